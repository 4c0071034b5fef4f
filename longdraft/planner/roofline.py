"""Prices by the roofline model: what online control goes by where nothing was calibrated.

Owns what ``cost.py`` leaves out of a plan: ragged rounds, looking tokens up, choosing what to read, upkeep and waking.
A SPIRe draft has neither of the last two: passes tell it of every token, and nothing could tell it later.
The constants are orders of magnitude, and what is observed corrects them (``pace.py``).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from longdraft.capture import Needs
from longdraft.config import DraftConfig, draft_key
from longdraft.drafts.refresh import TAIL
from longdraft.drafts.registry import needs, page_note_bytes, selector
from longdraft.kv.select.base import PageSelector
from longdraft.planner.assumed import given
from longdraft.planner.candidates import Candidate, Target, candidate
from longdraft.planner.cost import Network, Work, pass_work, times

LOOK_UP_S = 1e-5  # an n-gram's continuation of one row
TAKE_IN_S = 1.5e-6  # a token into its automaton
CHOOSE_S = 2e-4  # a row's choice of pages or tokens, besides what is read for it
PASSES_TOLD = 8  # of which a self-draft must be told before it chooses well
PAGE = 16  # tokens; what is noted of pages is small whatever their size
MASS_SHARE = 0.03  # what noting attention masses adds to reading the cache


@dataclass(frozen=True)
class _Draft:
    """What is looked up of a draft again and again."""

    made: Candidate
    needs: Needs
    choice_s: float  # seconds of a round's choice per row ...
    choice_token_s: float  # ... and per cached token of it
    choice_tokens: float  # a choice is made anew after so many tokens; 1: in every round


class Roofline:
    """See ``Prices``; for a target and the drafts that may propose for it."""

    def __init__(self, target: Target, drafts: Seq[DraftConfig]) -> None:
        self.network, self.hardware = target.network, target.hardware
        self._kv_s = self.network.kv_bytes_per_token / self.hardware.bytes_per_s  # to read one cached token
        self._drafts = {draft_key(draft): self._prepared(target, draft) for draft in drafts}

    def knows(self, config: DraftConfig) -> bool:
        """See ``Prices``."""
        return draft_key(config) in self._drafts

    def target(self, lengths: Seq[int], tokens: Seq[int]) -> float:
        """See ``Prices``."""
        return self._pass(self.network, lengths, tokens)

    def draft(self, config: DraftConfig, lengths: Seq[int], gammas: Seq[int]) -> float:
        """See ``Prices``: a pass per proposed token, over the rows that still want one."""
        known = self._drafts[draft_key(config)]
        net, reads = known.made.network, known.made.reads
        if net is None:
            return LOOK_UP_S * len(lengths)
        seconds, done = 0.0, 0
        for level in sorted(set(gammas)):
            active = [reads(length) for length, gamma in zip(lengths, gammas, strict=True) if gamma > done]
            seconds += (level - done) * self._pass(net, active, [1] * len(active))
            done = level
        if not known.needs.tokens:
            return seconds
        rounds = max(1.0, known.choice_tokens * len(gammas) / (len(gammas) + sum(gammas)))  # between two choices
        return seconds + (known.choice_s * len(lengths) + known.choice_token_s * sum(lengths)) / rounds

    def upkeep(self, config: DraftConfig, lengths: Seq[int]) -> float:
        """See ``Prices``."""
        known = self._drafts[draft_key(config)]
        if config.weights == "ngram":
            return TAKE_IN_S * len(lengths)
        if known.made.kv_bytes_per_token:  # a small model, which has a cache of every token
            return len(lengths) * 2 * known.made.network.weights / self.hardware.flops_per_s
        if not known.needs.tokens:
            return 0.0
        noting = MASS_SHARE * sum(lengths) * self._kv_s if known.needs.page_mass else 0.0
        return LOOK_UP_S * len(lengths) + noting

    def wake(self, config: DraftConfig, length: int) -> float:
        """See ``Prices``. A self-draft that chooses does so well once it was told of some passes."""
        known = self._drafts[draft_key(config)]
        if config.weights == "ngram":
            return TAKE_IN_S * length
        if known.made.kv_bytes_per_token:
            work = pass_work(known.made.network, {length / 2: 1}, queries=length)
            return times(work, self.hardware).total
        return PASSES_TOLD * self.upkeep(config, [length])

    def _prepared(self, target: Target, draft: DraftConfig) -> _Draft:
        made, wanted = candidate(target, draft_key(draft), given(0)), needs(draft)
        if isinstance(selector(draft), PageSelector):  # anew in every round, by what is noted of each page
            noted = page_note_bytes(draft, target.config, torch.bfloat16) / PAGE / self.hardware.bytes_per_s
            return _Draft(made, wanted, CHOOSE_S, noted, 1.0)
        return _Draft(made, wanted, CHOOSE_S, self._kv_s / 2, draft.budget / TAIL)  # by all keys

    def _pass(self, net: Network, lengths: Seq[int], tokens: Seq[int]) -> float:
        """A pass in which row ``i`` feeds ``tokens[i]`` tokens and reads its own and ``lengths[i]`` others."""
        fed, read = sum(tokens), sum(lengths)
        keys = fed + read
        work = Work(
            linear_flops=fed * (2 * net.weights + net.extra_flops),
            weight_bytes=net.weights * net.weight_bytes,
            attention_flops=sum(n * (k + n) for n, k in zip(tokens, lengths, strict=True)) * net.attention_flops,
            kv_bytes=keys * net.kv_bytes_per_token,
            rows=len(lengths),
            layers=net.layers,
            kv_heads=net.kv_heads,
        )
        return times(work, self.hardware).total
