"""Drafts examined on a group of prompts: asked at every position of plain decoding, and let loose in the real loop.

The prompts are filled once, all but their last tokens. Plain decoding and every draft take these in for themselves, so
that a draft which looks at what the target says of them can, and the runs of one draft are forks of its row. All runs
go along the same tokens. What is kept of plain decoding: its tokens; at T > 0 its distributions; at a few positions its
attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from longdraft.bench import Arm
from longdraft.bench.asked import Place, accepted, overlaps, walk
from longdraft.bench.captured import Attention, Pass, captured, exact_attention, passes_of
from longdraft.bench.tasks import Prompt
from longdraft.bench.turns import OnProgress, Rows, advance, end, fill, fork
from longdraft.config import DraftConfig
from longdraft.core import Proposal
from longdraft.drafts.base import DraftRow
from longdraft.llm import LLM
from longdraft.sampling_params import SamplingParams


@dataclass(frozen=True)
class Sample:
    """What one draft did, in sums per prompt; NaN where nothing was measured."""

    stood: np.ndarray  # [P, γ] positions at which the first n proposed tokens stand
    proposed: np.ndarray  # [P] proposed tokens over all positions
    overlap: np.ndarray  # [P] expected acceptance of the first token, summed over positions
    coupled: np.ndarray  # [P] the same under the coupled rule
    captured: np.ndarray  # [P] mean over the positions looked at
    select_s: np.ndarray  # [P] seconds in which the draft chose what to read, while it was asked
    tokens: np.ndarray  # [P, number of γ] by the real loop
    passes: np.ndarray  # [P, number of γ]
    identical: np.ndarray  # [P] whether every run gave plain decoding's tokens


def join(samples: Sequence[Sample]) -> Sample:
    """Several groups of prompts as one."""
    return Sample(*(np.concatenate([getattr(s, f.name) for s in samples]) for f in fields(Sample)))


@dataclass(frozen=True)
class Setting:
    """How a group is examined. ``gammas`` are those of the real loop; positions are asked about up to the largest."""

    temperature: float
    positions: int
    gammas: tuple[int, ...]
    mass_positions: int = 0
    seed: int = 0
    after: int = 0  # output tokens before the first position

    def life(self, prompt: Prompt) -> int:
        """Tokens that a row may get without ever reaching its end: the last proposal has room, too, and may stand."""
        return self.lead(prompt) + self.positions + max(self.gammas) + 1

    def lead(self, prompt: Prompt) -> int:
        """Output tokens before the first position: at least the one that comes out of the prefill, without a draft."""
        return max(1, len(prompt.then)) + self.after

    def looked_at(self) -> set[int]:
        """The positions at which attention is computed, spread evenly."""
        return {round((n + 0.5) * self.positions / self.mass_positions - 0.5) for n in range(self.mass_positions)}


class Examination:
    """A group of prompts. ``close`` ends everything that was started."""

    def __init__(self, llm: LLM, prompts: Sequence[Prompt], setting: Setting, first: int = 0) -> None:
        """``first``: how many prompts there were before; it makes the prompts' seeds differ."""
        self.llm, self.prompts, self.setting, self.first = llm, prompts, setting, first
        self.starts = [len(p.ids) + setting.lead(p) for p in prompts]
        self.sources: Rows = []  # filled but for their last tokens
        self.made: Rows = []
        self.truth: list[list[int]] = []  # plain decoding's ids, prompt included
        self.log_p: dict[Place, torch.Tensor] = {}  # [V] float32
        self.attention: dict[Place, Attention] = {}

    def prepare(self, name: str, report: OnProgress) -> None:
        """Fill the prompts as far as all drafts share that, and decode plainly."""
        engine = self.llm.engine
        for n, prompt in enumerate(self.prompts):
            params = SamplingParams(
                temperature=self.setting.temperature,
                seed=self.setting.seed + self.first + n,
                max_tokens=self.setting.life(prompt),
                ignore_eos=True,
                logits_processors=(_forced(prompt.then),) if prompt.then else (),
            )
            self.sources.append(engine.sequence(engine.add(prompt.ids, params)))
        self.made += self.sources
        total = sum(len(prompt.ids) for prompt in self.prompts)
        while True:
            for seq in self.sources:
                engine.hold(seq.id, seq.num_pending <= own_tokens(self.llm))
            report(name, sum(seq.num_committed for seq in self.sources), total, "tokens")
            if all(seq.held for seq in self.sources):
                break
            engine.step()
        self._decode_plainly()
        report(name, total, total, "tokens")

    def close(self) -> None:
        """End all rows."""
        end(self.llm, self.made)

    def sample(self, arm: Arm) -> Sample:
        """Examine one draft; its γ is the largest of the setting."""
        base = self._begin(arm.draft)
        numbers = self._ask_for_tokens(base, arm.draft)
        numbers |= self._ask_for_distributions(base, arm.draft)
        loops = [self._real_loop(base, replace(arm.draft, gamma=gamma)) for gamma in self.setting.gammas]
        end(self.llm, base)
        numbers["identical"] &= np.all([same for _, _, same in loops], axis=0)
        tokens, passes = (np.stack([loop[i] for loop in loops], axis=1) for i in (0, 1))
        return Sample(**numbers, tokens=tokens, passes=passes)

    # --- runs

    def _decode_plainly(self) -> None:
        """As a draft that reads everything: its distributions are the target's own, and it is never believed."""
        setting, looked_at = self.setting, self.setting.looked_at()
        rule = "maximal" if setting.temperature else "coupled"
        config = DraftConfig(kv="full", gamma=1, sampling_rule=rule)
        rows = self._begin(config)

        def ask(places: list[Place], asked: list[DraftRow], propose: Callable[[], Proposal]) -> None:
            wanted = [n for n, (_, j) in enumerate(places) if j in looked_at]
            if wanted:
                found = exact_attention(self.llm, [asked[n].seq for n in wanted])
                self.attention |= dict(zip([places[n] for n in wanted], found, strict=True))
            if setting.temperature:
                log_p = propose().log_q.float().cpu()
                kept = zip(places, log_p, strict=True)
                self.log_p |= {(i, j): p for (i, j), p in kept if 0 <= j < setting.positions}

        ahead = max(setting.gammas) - 1  # what is proposed at the last position is compared, too
        walk(self.llm, rows, config, self.starts, setting.positions + ahead, ask)
        self.truth = [list(seq.ids) for seq in rows]
        end(self.llm, rows)

    def _ask_for_tokens(self, base: Rows, config: DraftConfig) -> dict[str, np.ndarray]:
        """What the draft proposes under the coupled rule, and what it saw when it did."""
        count, rows = len(self.prompts), self._fork(base, config)
        stood, proposed = np.zeros((count, config.gamma), dtype=int), np.zeros(count, dtype=int)
        shares: list[list[float]] = [[] for _ in range(count)]

        def ask(places: list[Place], asked: list[DraftRow], propose: Callable[[], Proposal]) -> None:
            seen: list[list[float]] = []  # by pass, of the rows that are looked at
            rated = [n for n, place in enumerate(places) if place in self.attention]

            def look(done: Pass) -> None:
                whole = len(done.view.lens) == len(places)  # else some rows draft nothing, and which is not known
                seen.append([captured(self.attention[places[n]], done, n) for n in rated] if whole else [])

            with passes_of(self.llm, config, look) if rated else nullcontext():
                proposal = propose()
            if seen:  # a draft may run the model before it drafts, to select: its steps are the last passes
                first_step = seen[-max(map(len, proposal.tokens))]
                for n, share in zip(rated, first_step, strict=False):
                    shares[places[n][0]].append(share)
            for (i, j), tokens in zip(places, proposal.tokens, strict=True):
                if j >= 0:
                    stood[i, : accepted(tokens, self.truth[i][self.starts[i] + j :])] += 1
                    proposed[i] += len(tokens)

        before = self.llm.engine.stats.select_s
        walk(self.llm, rows, config, self.starts, self.setting.positions, ask)
        each = (self.llm.engine.stats.select_s - before) / count
        mean = np.array([np.mean(own) if own else np.nan for own in shares])
        found = {"stood": stood, "proposed": proposed, "captured": mean, "select_s": np.full(count, each)}
        found["identical"] = self._as_plain(rows)
        end(self.llm, rows)
        return found

    def _ask_for_distributions(self, base: Rows, config: DraftConfig) -> dict[str, np.ndarray]:
        """How far the draft's distribution of the next token and the target's overlap."""
        sums = np.zeros((2, len(self.prompts)))
        if not self.setting.temperature:
            return {"overlap": sums[0] + np.nan, "coupled": sums[1] + np.nan}
        config = replace(config, gamma=1, sampling_rule="maximal")
        rows = self._fork(base, config)

        def ask(places: list[Place], asked: list[DraftRow], propose: Callable[[], Proposal]) -> None:
            proposal = propose()
            log_q = iter(()) if proposal.log_q is None else iter(proposal.log_q)
            for (i, j), tokens in zip(places, proposal.tokens, strict=True):
                q = next(log_q, None) if tokens else None
                if j >= 0:
                    sums[:, i] += overlaps(self.log_p[i, j], tokens, q)

        walk(self.llm, rows, config, self.starts, self.setting.positions, ask)
        end(self.llm, rows)
        return {"overlap": sums[0], "coupled": sums[1]}

    def _real_loop(self, base: Rows, config: DraftConfig) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens and passes per prompt where proposals are verified, and whether the tokens are plain decoding's."""
        rows = self._fork(base, config)
        walk(self.llm, rows, config, self.starts, 0, lambda places, asked, propose: propose())
        before = np.array([seq.stats.verify_passes for seq in rows])
        advance(self.llm, rows, [start + self.setting.positions for start in self.starts])
        passes = np.array([seq.stats.verify_passes for seq in rows]) - before
        tokens = np.array([len(seq.ids) - start for seq, start in zip(rows, self.starts, strict=True)])
        same = self._as_plain(rows)
        end(self.llm, rows)
        return tokens, passes, same

    def _begin(self, config: DraftConfig) -> Rows:
        """Rows at their first token, of whose prompt the draft has seen the last tokens itself."""
        engine = self.llm.engine
        rows = [engine.sequence(engine.fork(seq.id, draft=config)) for seq in self.sources]
        self.made += rows
        fill(self.llm, rows, "", lambda *_: None)
        return rows

    def _fork(self, sources: Rows, config: DraftConfig) -> Rows:
        rows = fork(self.llm, sources, Arm("", config))
        self.made += rows
        return rows

    def _as_plain(self, rows: Rows) -> np.ndarray:
        """Per row whether its ids are plain decoding's, as far as both go."""
        pairs = zip(self.truth, rows, strict=True)
        return np.array([all(a == b for a, b in zip(ids, seq.ids, strict=False)) for ids, seq in pairs])


def own_tokens(llm: LLM) -> int:
    """Most tokens of a prompt that every draft takes in for itself; more than one prefill step feeds, if there are."""
    return 2 * llm.engine.config.max_num_batched_tokens


def _forced(tokens: Sequence[int]) -> Callable[[list[int], torch.Tensor], torch.Tensor]:
    """A logits processor under which an output begins with ``tokens``."""

    def forced(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(output) >= len(tokens):
            return logits
        only = torch.full_like(logits, -torch.inf)
        only[tokens[len(output)]] = 0
        return only

    return forced
