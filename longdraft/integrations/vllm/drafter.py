"""A round of drafting over a model runner's pages: which rows, which tables, which tokens. Imports no vLLM."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from longdraft.errors import InvalidValueError, LongDraftError, RankError
from longdraft.integrations.vllm.control import Control, sentence
from longdraft.integrations.vllm.guard import runner_refusals
from longdraft.integrations.vllm.rows import Row, rows_of
from longdraft.integrations.vllm.sampling import Draw, Seeds
from longdraft.integrations.vllm.settings import Settings
from longdraft.integrations.vllm.tables import DraftTables, Step

UNCHOSEN = 3  # γ where it was to be chosen and cannot be
LOG_S = 10.0  # between two lines about what is chosen

# Tables of rows with their own [R, M], with the blocks that are chosen for them.
Choose = Callable[[DraftTables, torch.Tensor, list[Row]], DraftTables]
# Logits [R, V] after tokens [R]: the target's own pass over a step's tables; the last argument counts steps from 0.
Forward = Callable[[torch.Tensor, Step, DraftTables, int], torch.Tensor]


def guess(
    forward: Forward,
    tables: DraftTables,
    newest: torch.Tensor,
    count: int,
    pick: Callable[[torch.Tensor, Step], torch.Tensor],
) -> list[torch.Tensor]:
    """Tokens ``[R]`` of ``count`` draft steps after the ``newest [R]``, as ``pick`` takes them of a step's logits."""
    ids, out = newest, []
    for j in range(count):
        step = tables.step(j)
        ids = pick(forward(ids, step, tables, j), step).int()
        out.append(ids)
    return out


class Drafter:
    """Drafts for the rows of each step of a ``runner``, once it has one; steps aside where ``off`` says why."""

    def __init__(
        self,
        settings: Settings,
        most: int,
        seed: int,
        forward: Forward,
        warn: Callable[[str], None],
        off: str | None,
        log: Callable[[str], None] = lambda _: None,
        choose: Choose = lambda tables, *_: tables,
    ) -> None:
        """``most``: drafted tokens a round; ``warn`` is called once per sentence; ``choose``: if settings want that."""
        self.settings, self.most, self.off = settings, most, off
        self.seeds = Seeds(seed)
        self.counts: Counter[str] = Counter()
        self.runner: Any = None
        self.parted: Callable[[], bool] = lambda: False  # after a failure: whether other ranks go on (``ranks.py``)
        self.control: Control | None = None  # who chooses γ where that is left open
        self.log, self._logged = log, 0.0
        self._forward, self._say, self._choose = forward, warn, choose
        self._checked = False
        self._said: set[str] = set()
        self._waiting: dict[str, int] = {}  # drafted tokens by request that are not verified yet

    def change(self, **changes: Any) -> dict[str, float]:
        """Replace settings from now on; returns the counts so far and starts new ones.

        ``rounds``, tokens of drafts that were ``verified`` and of these ``accepted``, ``draft_s``; where γ was chosen,
        how many times as fast as plain decoding that was ``predicted`` and ``realised`` to be. Raises
        ``InvalidValueError`` for another attention: that is fixed.
        """
        if changes.get("attention", self.settings.attention) != self.settings.attention:
            raise InvalidValueError("attention", changes["attention"], "is fixed when vLLM starts")
        self.settings = replace(self.settings, **changes)
        counts, self.counts = dict(self.counts), Counter()
        if self.control:
            self.control.forget()
            stats = self.control.news("counts")
            counts |= {"predicted": stats.predicted_speedup, "realised": stats.realised_speedup}
        return counts

    def propose(self, sampled: list[list[int]], num_tokens: Any, token_ids: Any) -> list[list[int]]:
        """Drafted token ids of each row; an empty list for rows that draft none.

        ``sampled``: the tokens each row got in this step; ``num_tokens [R]`` and ``token_ids [R, …]`` include them.
        Raises ``RankError`` where this rank fails while others go on, and nothing else.
        """
        drafts: list[list[int]] = [[] for _ in sampled]
        if not self._ready():
            return drafts
        started = time.perf_counter()
        try:
            rows = self._rows(sampled, num_tokens, token_ids, started)
            chosen = time.perf_counter()
            for row, tokens in zip(rows, self._draft(rows) if rows else (), strict=True):
                drafts[row.index] = tokens
        except Exception as error:  # a draft is never worth a request
            self._fail(error)
            return [[] for _ in sampled]
        self._count(sampled, drafts)
        ended = time.perf_counter()
        self.counts["draft_s"] += ended - started
        if self.control:
            self.control.took(ended - chosen)
            self._tell(ended)
        return drafts

    def _fail(self, error: Exception) -> None:
        """Step aside from now on."""
        self.off = f"drafting failed, decoding is plain from now on ({type(error).__name__}: {error})"
        self.runner._draft_probs = self.runner._draft_prob_req_ids = None
        self.warn(self.off)
        if self.parted():
            raise RankError(f"drafting failed on a rank whose part others wait for: {error}") from error

    def _rows(self, sampled: list[list[int]], num_tokens: Any, token_ids: Any, now: float) -> list[Row]:
        """The rows that draft now, and how much."""
        self.seeds.keep(self.runner.requests)
        rows = rows_of(self.runner, sampled, num_tokens, token_ids, self.most, self._gamma_and_budget)
        if self._chooses:
            step = dict(zip(self.runner.input_batch.req_ids, sampled, strict=False))
            self.control.observe(step, self.runner.requests, now)
            gammas = self.control.choose(rows)
            rows = [replace(row, wanted=gamma) for row, gamma in zip(rows, gammas, strict=True)]
        return [row for row in rows if row.wanted]

    @property
    def _chooses(self) -> bool:
        return self.control is not None and self.settings.draft == "auto"

    def _tell(self, now: float) -> None:
        """A line in the log now and then."""
        if now > self._logged + LOG_S:
            self._logged, stats = now, self.control.news("log")
            if stats.seconds:
                self.log(sentence(stats))

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
            self.warn(self.off)
        return self.off is None

    def _gamma_and_budget(self, request: Any) -> tuple[int | None, int]:
        """What a request drafts, if somebody said, and over how much; a bad setting is named once and passed over."""
        params = request.sampling_params
        settings = self.settings
        try:
            settings = settings.of_request(params.extra_args if params is not None else None)
        except (LongDraftError, ValueError, TypeError) as error:
            self.warn(f"a request's setting is passed over: {error}")
        gamma = settings.gamma
        if gamma is None and settings.draft == "auto" and not self._chooses:
            gamma = UNCHOSEN
        return gamma, settings.budget if settings.bounded else self.runner.max_model_len

    def _draft(self, rows: list[Row]) -> list[list[int]]:
        """Drafted tokens of ``rows``, and their distributions where the runner's verification looks for them."""
        block_table = self.runner.input_batch.block_table[0]
        table = block_table.get_device_tensor(len(self.runner.input_batch.req_ids))[[row.index for row in rows]]
        wanted = [row.wanted for row in rows]
        budgets = [row.budget for row in rows]
        tables = DraftTables.build(
            table, [row.known for row in rows], wanted, budgets, self.settings.sinks, block_table.block_size
        )
        if self.settings.chooses_blocks:
            tables = self._choose(tables, table, rows)
        seeds = [self.seeds.of(row.request, row.seed) for row in rows]
        greedy = all(row.params.greedy for row in rows)
        draw = None if greedy else Draw([row.params for row in rows], seeds, table.device)
        newest = torch.tensor([row.newest for row in rows], dtype=torch.int32, device=table.device)
        probs: list[torch.Tensor] = []

        def pick(logits: torch.Tensor, step: Step) -> torch.Tensor:
            if draw is None:
                return logits.argmax(dim=-1)
            drawn, q = draw(logits, step.positions + 1)
            probs.append(q)
            return drawn

        out = guess(self._forward, tables, newest, max(wanted), pick)
        if draw is not None:
            self.runner._draft_probs = torch.stack(probs, dim=1)
            self.runner._draft_prob_req_ids = [row.request for row in rows]
        tokens = torch.stack(out, dim=1).tolist()
        return [drafted[: row.wanted] for drafted, row in zip(tokens, rows, strict=True)]

    def warn(self, sentence: str) -> None:
        """Once per sentence."""
        if sentence not in self._said:
            self._said.add(sentence)
            self._say(sentence)
