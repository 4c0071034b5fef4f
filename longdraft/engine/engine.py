"""Requests in, tokens out: one synchronous ``step`` over a scheduler that decides and a runner that computes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from itertools import count

import torch

from longdraft.checkpoint.tokenizer import Tokenizer
from longdraft.config import MAX_SEED, AutoDraft, DraftConfig, EngineConfig, as_int
from longdraft.core import Batch, Round, Row, Sequence, SequenceStats, Status, StepOutput
from longdraft.drafts.small_model import DraftModel
from longdraft.drafts.spire import SpireModel
from longdraft.engine import stops
from longdraft.engine.admission import check_ids, derived_seed, fit_prompt, resolve
from longdraft.engine.control import Control, OwnDrafts
from longdraft.engine.decide import Decision, decide
from longdraft.engine.detokenize import Detokenizer
from longdraft.engine.runner import Runner
from longdraft.engine.scheduler import Scheduler
from longdraft.engine.stats import EngineStats
from longdraft.errors import InvalidValueError
from longdraft.models.transformer import Transformer
from longdraft.sampling_params import SamplingParams


class Engine:
    """Continuous batching on one device. Single-threaded, no I/O."""

    def __init__(
        self,
        model: Transformer,
        config: EngineConfig,
        eos_token_ids: Iterable[int] = (),
        tokenizer: Tokenizer | None = None,
        draft_models: Mapping[str, Transformer | SpireModel] | None = None,
        control: Control | None = None,
    ) -> None:
        """``tokenizer`` is needed for requests with stop strings or bad words only; ``draft_models`` by name.

        ``control`` chooses drafts for requests that leave it open; without it there may be none.
        """
        self.model, self.tokenizer, self.store = model, tokenizer, model.new_store(config.num_pages)
        self.config = config = dataclasses.replace(config, kv_tokens=self.store.longest)
        self._texts: dict[int, Detokenizer] = {}  # of unfinished requests with stop strings
        self.eos_token_ids = frozenset(eos_token_ids)
        pages = self.store.pages_for(self.store.capacity)  # a draft model's own ones: not in the target's format
        small = {
            name: DraftModel(m, pages) if isinstance(m, Transformer) else m for name, m in (draft_models or {}).items()
        }
        self.control = control or OwnDrafts()
        self._noted_s = 0.0  # what it took control to take note of the last step
        self.runner = Runner(model, self.store, small, config.max_num_seqs, self.control)
        runner = self.runner
        self.scheduler = Scheduler(config, self.store, runner.fork, runner.release, self.control, runner.choose)
        self.stats = EngineStats()
        self._sequences: dict[int, Sequence] = {}  # unfinished ones
        self._ids = count()

    def add(self, prompt_ids: Seq[int], params: SamplingParams, draft: DraftConfig | AutoDraft | None = None) -> int:
        """Queue a request and return its id. Refuses what could never run, before any work is done.

        ``draft`` proposes tokens for it; ``None`` is plain decoding, an ``AutoDraft`` leaves it to the engine's
        control. Drafts may differ from request to request.

        ``max_tokens`` beyond the context limit is cut to it; a prompt that leaves no room for one token is refused.
        """
        vocab = self.model.config.vocab_size
        check_ids("prompt token ids", prompt_ids, vocab)
        params = resolve(params, vocab, self.tokenizer)
        ids = fit_prompt(prompt_ids, params, self.config)
        limit, request_id = self.config.max_tokens_per_request, next(self._ids)
        seed = derived_seed(self.config.seed, request_id) if params.seed is None else params.seed
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_token_ids)
        draft = self.check(draft)
        seq = Sequence(request_id, ids, len(ids), params, seed, limit, draft, stop_ids)
        if params.max_tokens is not None:
            seq.max_total = min(limit, len(ids) + params.max_tokens)
        self._queue(seq)
        self.stats.prompt_tokens += len(ids)
        return request_id

    def add_all(
        self, prompt_ids: Seq[int], params: SamplingParams, draft: DraftConfig | AutoDraft | None = None
    ) -> list[int]:
        """``add`` for each of the ``params.n`` completions; all but the first share its cached prompt.

        The first completion is what ``n = 1`` gives; the others' seeds are derived from its seed.
        """
        first = self.sequence(self.add(prompt_ids, params, draft))
        ids = [first.id]
        for i in range(1, params.n):
            seed = derived_seed(first.seed, i)
            own = dataclasses.replace(first.params, prompt_logprobs=None)
            child = dataclasses.replace(first, **_fresh(first), id=next(self._ids), params=own, seed=seed, source=first)
            self._queue(child)
            ids.append(child.id)
        return ids

    def fork(self, request_id: int, *, seed: int | None = None, draft: DraftConfig | AutoDraft | None = None) -> int:
        """Continue an unfinished request as a second one from its current state, sharing its cached pages.

        With the same seed (the default) and the coupled rule both go on alike, whatever ``draft`` the new one has
        (``None`` is plain decoding). Returns the new request's id. Its statistics start afresh.
        """
        source = self.sequence(request_id)
        if seed is not None:
            seed = as_int("seed", seed, 0, MAX_SEED)
        own_seed = source.seed if seed is None else seed
        draft = self.check(draft)
        child = dataclasses.replace(source, **_fresh(source), id=next(self._ids), seed=own_seed, draft=draft)
        self._track(child)
        self.scheduler.fork(source, child, source.num_committed)
        return child.id

    def check(self, draft: DraftConfig | AutoDraft | None) -> DraftConfig | AutoDraft | None:
        """``draft``, if it can be had here; ``InvalidValueError`` otherwise."""
        for config in self.drafts_of(draft):  # made now, not when one is first chosen
            self.runner.check(config)
        return draft

    def drafts_of(self, draft: DraftConfig | AutoDraft | None) -> tuple[DraftConfig, ...]:
        """Those that may propose for a request with ``draft``."""
        if not isinstance(draft, AutoDraft):
            return () if draft is None else (draft,)
        if not self.control.drafts:
            raise InvalidValueError("draft", draft.label, "needs an engine with a control", "Name a draft.")
        return self.control.drafts

    def abort(self, request_id: int) -> StepOutput:
        """End an unfinished request now and free its pages; what it has so far is in the output's sequence."""
        return self._end(self.sequence(request_id), [], "abort")

    def sequence(self, request_id: int) -> Sequence:
        """An unfinished request's record, to be read; it stays valid when the request ends."""
        if request_id not in self._sequences:
            raise InvalidValueError("request id", request_id, "must name an unfinished request")
        return self._sequences[request_id]

    def hold(self, request_id: int, held: bool = True) -> None:
        """Keep an unfinished request from running, or let it go on. Its pages stay unless somebody else needs them."""
        self.sequence(request_id).held = held

    @property
    def num_unfinished(self) -> int:
        """Requests that are queued, running or held."""
        return len(self._sequences)

    @property
    def has_work(self) -> bool:
        """Whether any request can go on: unfinished and not held."""
        return self.scheduler.has_work

    def step(self) -> list[StepOutput]:
        """Run one step; outputs of the sequences that got tokens or ended."""
        started = time.perf_counter()
        batch = self.scheduler.schedule()
        if batch is None:
            return []
        stats, used = self.stats, self.store.num_pages - self.store.num_free_pages
        stats.peak_kv_pages = max(stats.peak_kv_pages, used)
        stats.preemptions = self.scheduler.num_preemptions
        drafted_s, drafting = 0.0, time.perf_counter()
        try:
            batch, log_q = self.runner.propose(batch)
            drafted_s = time.perf_counter() - drafting
            outputs, rounds = self._verify(batch, log_q)
        finally:
            if self.model.device.type == "cuda":  # a chunk that wants no logits would be charged to the next step
                torch.cuda.synchronize(self.model.device)
            stats.select_s = self.runner.select_s
            seconds = time.perf_counter() - started
            stats.record(batch, seconds, drafted_s)
        if not batch.prefill:
            stats.decode_tokens += sum(len(output.tokens) for output in outputs)
            chosen_s = self.runner.choose_s
            self.control.observe(rounds, seconds - chosen_s, batch.draft_s, chosen_s + self._noted_s)
            self._noted_s = time.perf_counter() - started - seconds
            stats.decode_s += self._noted_s  # taking note of it is part of the step
        return outputs

    def _verify(self, batch: Batch, log_q: dict[int, torch.Tensor]) -> tuple[list[StepOutput], list[Round]]:
        """One pass of the target over the batch's tokens and proposals, and what follows from it for each row."""
        decisions = decide(batch.rows, self.runner.forward(batch), log_q)
        ends = [self._commit(row, decision, batch.prefill) for row, decision in zip(batch.rows, decisions, strict=True)]
        started = time.perf_counter()
        self.runner.follow(batch)
        if batch.prefill:
            self.stats.draft_prefill_s += time.perf_counter() - started
            self.scheduler.share_prompts()  # before a sequence may end, and after drafts have taken in its prompt
        outputs = []
        for row, got in zip(batch.rows, ends, strict=True):
            if got.reason:
                outputs.append(self._end(row.seq, got.tokens, got.reason, got.error))
            elif got.tokens:
                outputs.append(StepOutput(row.seq, got.tokens))
        return outputs, [got.round for got in ends]

    def _commit(self, row: Row, decision: Decision, prefill: bool) -> _Got:
        """Note what a row got: its tokens, cut at a stop, and why it ends, if it does."""
        seq = row.seq
        tokens, reason = stops.cut(seq, decision.tokens, self._texts.get(seq.id))
        seq.logprobs += decision.logprobs[: len(tokens)]
        seq.prompt_logprobs += decision.prompt_logprobs
        # What lies behind a stop was never needed, so it counts neither as drafted nor as accepted.
        whole = len(tokens) == len(decision.tokens)
        drafted, asked = (len(row.proposal), row.room) if whole else (len(tokens), len(tokens))
        accepted = min(decision.accepted, drafted)
        if not prefill:
            seq.stats.count(drafted, accepted, len(tokens))
        self.scheduler.commit(row, tokens)
        error = decision.error if reason is None else None
        return _Got(tokens, "error" if error else reason, error, Round(row, asked, accepted, len(tokens)))

    def _end(self, seq: Sequence, tokens: list[int], reason: str, error: str | None = None) -> StepOutput:
        self.scheduler.finish(seq, reason, error)
        del self._sequences[seq.id]
        self._texts.pop(seq.id, None)
        return StepOutput(seq, tokens, reason)

    def _queue(self, seq: Sequence) -> None:
        self._track(seq)
        self.scheduler.add(seq)

    def _track(self, seq: Sequence) -> None:
        self._sequences[seq.id] = seq
        if seq.params.stop:
            skip = seq.params.skip_special_tokens
            self._texts[seq.id] = Detokenizer(self.tokenizer, seq.output_ids, skip_special_tokens=skip)


@dataclasses.dataclass(frozen=True)
class _Got:
    """What a step gave a row, and why it ends, if it does."""

    tokens: list[int]
    reason: str | None
    error: str | None
    round: Round


def _fresh(seq: Sequence) -> dict[str, object]:
    """Fields of a sequence that has the ids of ``seq`` and a life of its own before it."""
    return {
        "ids": list(seq.ids),
        "held": False,
        "num_committed": 0,
        "status": Status.WAITING,
        "stats": SequenceStats(),
        "logprobs": list(seq.logprobs),
        "prompt_logprobs": list(seq.prompt_logprobs),
    }
