"""Requests in, tokens out: one synchronous ``step`` over a scheduler that decides and a runner that computes."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import count

import torch

from longdraft.config import MAX_SEED, EngineConfig, SamplingParams, as_int
from longdraft.core import Batch, Sequence, SequenceStats, Status, StepOutput
from longdraft.engine import stops
from longdraft.engine.runner import Runner
from longdraft.engine.scheduler import Scheduler
from longdraft.engine.stats import EngineStats
from longdraft.errors import ContextLengthError, InvalidValueError
from longdraft.kv.store import PagedStore
from longdraft.models.transformer import Transformer
from longdraft.spec.probs import to_log_probs
from longdraft.spec.sample import draw

DRAW_ROWS = 16  # tokens are drawn for so many rows at a time: several float64 copies of [rows, V] are alive then


class Engine:
    """Continuous batching on one device. Single-threaded, no I/O."""

    def __init__(self, model: Transformer, config: EngineConfig, eos_token_ids: Iterable[int] = ()) -> None:
        self.model, self.config = model, config
        self.eos_token_ids = frozenset(eos_token_ids)
        self.store = PagedStore(model.config.num_layers, config.num_pages, model.layout, model.kv_dtype, model.device)
        self.scheduler = Scheduler(config, self.store)
        self.runner = Runner(model, self.store)
        self.stats = EngineStats()
        self._sequences: dict[int, Sequence] = {}  # unfinished ones
        self._ids = count()

    def add(self, prompt_ids: Seq[int], params: SamplingParams) -> int:
        """Queue a request and return its id. Refuses what could never run, before any work is done.

        ``max_tokens`` beyond the context limit is cut to it; a prompt that leaves no room for one token is refused.
        """
        self._check_ids("prompt token ids", prompt_ids)
        self._check_ids("stop_token_ids", params.stop_token_ids)
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
        seq = Sequence(request_id, list(prompt_ids), len(prompt_ids), params, seed, limit)
        if params.max_tokens is not None:
            seq.max_total = min(limit, len(prompt_ids) + params.max_tokens)
        self._sequences[request_id] = seq
        self.stats.prompt_tokens += len(prompt_ids)
        self.scheduler.add(seq)
        return request_id

    def fork(self, request_id: int, *, seed: int | None = None) -> int:
        """Continue an unfinished request as a second one from its current state, sharing its cached pages.

        With the same seed (the default) both go on alike. Returns the new request's id. Its statistics start afresh.
        """
        source = self.sequence(request_id)
        if seed is not None:
            seed = as_int("seed", seed, 0, MAX_SEED)
        child = dataclasses.replace(
            source,
            id=next(self._ids),
            ids=list(source.ids),
            seed=source.seed if seed is None else seed,
            num_committed=0,
            status=Status.WAITING,
            stats=SequenceStats(),
        )
        self._sequences[child.id] = child
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

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
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
        try:
            outputs = self._run(batch)
        finally:
            if self.model.device.type == "cuda":  # a chunk that wants no logits would be charged to the next step
                torch.cuda.synchronize(self.model.device)
            stats.record(batch, time.perf_counter() - started)
        if not batch.prefill:
            stats.decode_tokens += sum(len(output.tokens) for output in outputs)
        return outputs

    def _run(self, batch: Batch) -> list[StepOutput]:
        tokens, broken = self._draw(batch, self.runner.forward(batch))
        outputs, at = [], 0
        for row in batch.rows:
            new = tokens[at : at + row.num_logits]
            failed = any(broken[at : at + row.num_logits])
            at += row.num_logits
            if failed:
                outputs.append(self._end(row.seq, [], "error", "the model's logits are not finite"))
                continue
            new, reason = stops.cut(row.seq, new, self.eos_token_ids) if new else (new, None)
            self.scheduler.commit(row, new)
            if reason:
                outputs.append(self._end(row.seq, new, reason))
            elif new:
                outputs.append(StepOutput(row.seq, new))
        return outputs

    def _draw(self, batch: Batch, logits: torch.Tensor) -> tuple[list[int], list[bool]]:
        """The token drawn from each row of ``logits [R, V]``, and whether that row is unusable (NaN or no maximum)."""
        wanted = [
            (row.seq, row.seq.num_committed + row.num_tokens - row.num_logits + 1 + i)  # the drawn token's position
            for row in batch.rows
            for i in range(row.num_logits)
        ]
        tokens: list[int] = []
        broken: list[bool] = []
        for start in range(0, len(wanted), DRAW_ROWS):
            seqs, positions = zip(*wanted[start : start + DRAW_ROWS], strict=True)
            part = logits[start : start + DRAW_ROWS]
            bad = ~part.amax(dim=-1).isfinite()
            log_probs = to_log_probs(part.masked_fill(bad[:, None], 0.0), [seq.params for seq in seqs])
            seeds, at = (torch.tensor(x, device=logits.device) for x in ([seq.seed for seq in seqs], positions))
            tokens += draw(log_probs, seeds, at).tolist()
            broken += bad.tolist()
        return tokens, broken

    def _end(self, seq: Sequence, tokens: list[int], reason: str, error: str | None = None) -> StepOutput:
        self.scheduler.finish(seq, reason, error)
        del self._sequences[seq.id]
        return StepOutput(seq, tokens, reason)

    def _check_ids(self, what: str, ids: Seq[int]) -> None:
        vocab = self.model.config.vocab_size
        for token in ids:
            if type(token) is not int or not 0 <= token < vocab:
                raise InvalidValueError(what, token, f"must be integers from 0 to {vocab - 1} (the vocabulary)")

    def _seed(self, request_id: int) -> int:
        """A seed of its own for an unseeded request: the same each time the same engine does the same work."""
        digest = hashlib.blake2b(f"{self.config.seed}/{request_id}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1
