"""A round of drafting over a model runner's pages: which rows, which tables, which tokens. Imports no vLLM."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from longdraft.errors import InvalidValueError, LongDraftError
from longdraft.integrations.vllm.guard import runner_refusals
from longdraft.integrations.vllm.rows import Row, rows_of
from longdraft.integrations.vllm.sampling import Seeds, draw
from longdraft.integrations.vllm.settings import Settings
from longdraft.integrations.vllm.tables import DraftTables, Step

# Logits [R, V] after tokens [R]: the target's own pass over a step's tables; the last argument counts steps from 0.
Forward = Callable[[torch.Tensor, Step, DraftTables, int], torch.Tensor]


class Drafter:
    """Drafts for the rows of each step of a ``runner``, once it has one; steps aside where ``off`` says why."""

    def __init__(
        self, settings: Settings, most: int, seed: int, forward: Forward, warn: Callable[[str], None], off: str | None
    ) -> None:
        """``most``: drafted tokens a round; ``warn`` is called once per sentence."""
        self.settings, self.most, self.off = settings, most, off
        self.seeds = Seeds(seed)
        self.counts: Counter[str] = Counter()
        self.runner: Any = None
        self._forward, self._say = forward, warn
        self._checked = False
        self._said: set[str] = set()
        self._waiting: dict[str, int] = {}  # drafted tokens by request that are not verified yet

    def change(self, **changes: Any) -> dict[str, float]:
        """Replace settings from now on; returns the counts so far and starts new ones.

        ``rounds``, tokens of drafts that were ``verified`` and of these ``accepted``, ``draft_s``. Raises
        ``InvalidValueError`` for another attention: that is fixed.
        """
        if changes.get("attention", self.settings.attention) != self.settings.attention:
            raise InvalidValueError("attention", changes["attention"], "is fixed when vLLM starts")
        self.settings = replace(self.settings, **changes)
        counts, self.counts = dict(self.counts), Counter()
        return counts

    def propose(self, sampled: list[list[int]], num_tokens: Any, token_ids: Any) -> list[list[int]]:
        """Drafted token ids of each row; an empty list for rows that draft none. Never raises.

        ``sampled``: the tokens each row got in this step; ``num_tokens [R]`` and ``token_ids [R, …]`` include them.
        """
        drafts: list[list[int]] = [[] for _ in sampled]
        if not self._ready():
            return drafts
        started = time.perf_counter()
        try:
            self.seeds.keep(self.runner.requests)
            rows = rows_of(self.runner, sampled, num_tokens, token_ids, self._gamma_and_budget)
            for row, tokens in zip(rows, self._draft(rows) if rows else (), strict=True):
                drafts[row.index] = tokens
        except Exception as error:  # a draft is never worth a request
            self.off = f"drafting failed, decoding is plain from now on ({type(error).__name__}: {error})"
            self.runner._draft_probs = self.runner._draft_prob_req_ids = None
            self._warn(self.off)
            return [[] for _ in sampled]
        self._count(sampled, drafts)
        self.counts["draft_s"] += time.perf_counter() - started
        return drafts

    def _count(self, sampled: list[list[int]], drafts: list[list[int]]) -> None:
        """A row's tokens but for the last one are those of its last drafts that stood."""
        names = self.runner.input_batch.req_ids
        self.counts["rounds"] += 1
        for name, tokens, drafted in zip(names, sampled, drafts, strict=False):
            if tokens:
                self.counts["verified"] += self._waiting.pop(name, 0)
                self.counts["accepted"] += len(tokens) - 1
                self._waiting[name] = len(drafted)
        self._waiting = {name: self._waiting[name] for name in names if name in self._waiting}

    def _ready(self) -> bool:
        if self.off is None and not self._checked:
            self.off = (
                "start vLLM with LongDraft's --worker-cls (longdraft vllm-args)"
                if self.runner is None
                else (next(runner_refusals(self.runner), None))
            )
            self._checked = True
        if self.off is not None:
            self._warn(self.off)
        return self.off is None

    def _gamma_and_budget(self, request: Any) -> tuple[int, int]:
        """What a request drafts, and over how much; a bad setting is named once and passed over."""
        params = request.sampling_params
        settings = self.settings
        try:
            settings = settings.of_request(params.extra_args if params is not None else None)
        except (LongDraftError, ValueError, TypeError) as error:
            self._warn(f"a request's setting is passed over: {error}")
        gamma = self.most if settings.gamma is None else min(settings.gamma, self.most)
        return gamma, settings.budget if settings.draft == "streaming_llm" else self.runner.max_model_len

    def _draft(self, rows: list[Row]) -> list[list[int]]:
        """Drafted tokens of ``rows``, and their distributions where the runner's verification looks for them."""
        block_table = self.runner.input_batch.block_table[0]
        table = block_table.get_device_tensor(len(self.runner.input_batch.req_ids))[[row.index for row in rows]]
        wanted = [row.wanted for row in rows]
        budgets = [row.budget for row in rows]
        tables = DraftTables.build(
            table, [row.known for row in rows], wanted, budgets, self.settings.sinks, block_table.block_size
        )
        sampled = any(not row.params.greedy for row in rows)
        seeds = [self.seeds.of(row.request, row.seed) for row in rows]
        ids = torch.tensor([row.newest for row in rows], dtype=torch.int32, device=table.device)
        out, probs = [], []
        for j in range(max(wanted)):
            step = tables.step(j)
            logits = self._forward(ids, step, tables, j)
            if sampled:
                drawn, q = draw(logits, [row.params for row in rows], seeds, step.positions + 1)
                probs.append(q)
            else:
                drawn = logits.argmax(dim=-1)
            ids = drawn.int()
            out.append(ids)
        if sampled:
            self.runner._draft_probs = torch.stack(probs, dim=1)
            self.runner._draft_prob_req_ids = [row.request for row in rows]
        tokens = torch.stack(out, dim=1).tolist()
        return [drafted[: row.wanted] for drafted, row in zip(tokens, rows, strict=True)]

    def _warn(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            self._say(sentence)
