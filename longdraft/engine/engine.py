"""Requests in, tokens out: one synchronous ``step`` over a scheduler that decides and a runner that computes."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import count

import torch

from longdraft.checkpoint.tokenizer import Tokenizer
from longdraft.config import MAX_SEED, DraftConfig, EngineConfig, as_int
from longdraft.core import Batch, Sequence, SequenceStats, Status, StepOutput
from longdraft.drafts.registry import check
from longdraft.engine import stops
from longdraft.engine.decide import decide
from longdraft.engine.detokenize import Detokenizer
from longdraft.engine.runner import Runner
from longdraft.engine.scheduler import Scheduler
from longdraft.engine.stats import EngineStats
from longdraft.errors import ContextLengthError, InvalidValueError
from longdraft.kv.store import PagedStore
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
    ) -> None:
        """``tokenizer`` is needed for requests with stop strings only."""
        self.model, self.config, self.tokenizer = model, config, tokenizer
        self._texts: dict[int, Detokenizer] = {}  # of unfinished requests with stop strings
        self.eos_token_ids = frozenset(eos_token_ids)
        self.store = PagedStore(model.config.num_layers, config.num_pages, model.layout, model.kv_dtype, model.device)
        self.scheduler = Scheduler(config, self.store)
        self.runner = Runner(model, self.store)
        self.stats = EngineStats()
        self._sequences: dict[int, Sequence] = {}  # unfinished ones
        self._ids = count()

    def add(self, prompt_ids: Seq[int], params: SamplingParams, draft: DraftConfig | None = None) -> int:
        """Queue a request and return its id. Refuses what could never run, before any work is done.

        ``draft`` proposes tokens for it; ``None`` is plain decoding. Drafts may differ from request to request.

        ``max_tokens`` beyond the context limit is cut to it; a prompt that leaves no room for one token is refused.
        """
        self._check_ids("prompt token ids", prompt_ids)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        if params.stop and self.tokenizer is None:
            raise InvalidValueError("stop", params.stop, "needs a tokenizer, and this model comes without one")
        limit = self.config.max_tokens_per_request
        if not prompt_ids:
            raise InvalidValueError("prompt", list(prompt_ids), "must hold at least one token")
        if len(prompt_ids) >= limit:
            by = "max_model_len" if limit == self.config.max_model_len else "the size of the KV cache in tokens"
            raise ContextLengthError(
                "prompt length in tokens",
                len(prompt_ids),
                f"must leave room for one new token within {limit} ({by})",
                "Shorten the prompt, or raise max_model_len and kv_cache_memory_bytes if the model allows it.",
            )
        request_id = next(self._ids)
        seed = self._seed(request_id) if params.seed is None else params.seed
        draft = None if draft is None else check(draft)
        seq = Sequence(request_id, list(prompt_ids), len(prompt_ids), params, seed, limit, draft)
        if params.max_tokens is not None:
            seq.max_total = min(limit, len(prompt_ids) + params.max_tokens)
        self._track(seq)
        self.stats.prompt_tokens += len(prompt_ids)
        self.scheduler.add(seq)
        return request_id

    def fork(self, request_id: int, *, seed: int | None = None, draft: DraftConfig | None = None) -> int:
        """Continue an unfinished request as a second one from its current state, sharing its cached pages.

        With the same seed (the default) and the coupled rule both go on alike, whatever ``draft`` the new one has
        (``None`` is plain decoding). Returns the new request's id. Its statistics start afresh.
        """
        source = self.sequence(request_id)
        if seed is not None:
            seed = as_int("seed", seed, 0, MAX_SEED)
        child = dataclasses.replace(
            source,
            id=next(self._ids),
            ids=list(source.ids),
            seed=source.seed if seed is None else seed,
            draft=None if draft is None else check(draft),
            held=False,
            num_committed=0,
            status=Status.WAITING,
            stats=SequenceStats(),
            logprobs=list(source.logprobs),
        )
        self._track(child)
        self.scheduler.fork(source, child)
        return child.id

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
            outputs = self._verify(batch, log_q)
        finally:
            if self.model.device.type == "cuda":  # a chunk that wants no logits would be charged to the next step
                torch.cuda.synchronize(self.model.device)
            stats.record(batch, time.perf_counter() - started, drafted_s)
        if not batch.prefill:
            stats.decode_tokens += sum(len(output.tokens) for output in outputs)
        return outputs

    def _verify(self, batch: Batch, log_q: dict[int, torch.Tensor]) -> list[StepOutput]:
        """One pass of the target over the batch's tokens and proposals, and what follows from it for each row."""
        decisions = decide(batch.rows, self.runner.forward(batch), log_q)
        outputs = []
        for row, decision in zip(batch.rows, decisions, strict=True):
            text = self._texts.get(row.seq.id)
            tokens, reason = stops.cut(row.seq, decision.tokens, self.eos_token_ids, text)
            row.seq.logprobs += decision.logprobs[: len(tokens)]
            if not batch.prefill:
                # What lies behind a stop was never needed, so it counts neither as drafted nor as accepted.
                drafted = len(row.proposal) if len(tokens) == len(decision.tokens) else len(tokens)
                row.seq.stats.count(drafted, min(decision.accepted, drafted), len(tokens))
            error = None
            if decision.broken and reason is None:
                reason, error = "error", "the model's logits are not finite"
            self.scheduler.commit(row, tokens)
            if reason:
                outputs.append(self._end(row.seq, tokens, reason, error))
            elif tokens:
                outputs.append(StepOutput(row.seq, tokens))
        return outputs

    def _end(self, seq: Sequence, tokens: list[int], reason: str, error: str | None = None) -> StepOutput:
        self.scheduler.finish(seq, reason, error)
        del self._sequences[seq.id]
        self._texts.pop(seq.id, None)
        return StepOutput(seq, tokens, reason)

    def _track(self, seq: Sequence) -> None:
        self._sequences[seq.id] = seq
        if seq.params.stop:
            self._texts[seq.id] = Detokenizer(self.tokenizer, seq.output_ids)

    def _check_ids(self, what: str, ids: Seq[int]) -> None:
        vocab = self.model.config.vocab_size
        for token in ids:
            if type(token) is not int or not 0 <= token < vocab:
                raise InvalidValueError(what, token, f"must be integers from 0 to {vocab - 1} (the vocabulary)")

    def _seed(self, request_id: int) -> int:
        """A seed of its own for an unseeded request: the same each time the same engine does the same work."""
        digest = hashlib.blake2b(f"{self.config.seed}/{request_id}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1
