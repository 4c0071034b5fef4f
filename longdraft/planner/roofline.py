"""Prices by the roofline model: what online control goes by where nothing was calibrated.

Owns what ``cost.py`` leaves out of a plan: ragged rounds, looking tokens up, choosing what to read, upkeep and waking.
The constants are orders of magnitude, and what is observed corrects them (``pace.py``).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import pairwise

import torch

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
PAGE = 16  # tokens; what is noted of pages is small whatever their size
MASS_SHARE = 0.03  # what noting attention masses adds to reading the cache


class Roofline:
    """See ``Prices``; for a target and the drafts that may propose for it."""

    def __init__(self, target: Target, drafts: Seq[DraftConfig]) -> None:
        self.target_model, self.hardware = target, target.hardware
        known = [draft_key(config) for config in drafts]
        self._drafts: dict[DraftConfig, Candidate] = {config: candidate(target, config, given(0)) for config in known}
        self._selectors = {config: selector(config) for config in known}

    def target(self, lengths: Seq[int], tokens: Seq[int]) -> float:
        """See ``Prices``."""
        return self._pass(self.target_model.network, lengths, tokens)

    def draft(self, config: DraftConfig, lengths: Seq[int], gammas: Seq[int]) -> float:
        """See ``Prices``: a pass per proposed token, over the rows that still want one."""
        made = self._drafts[draft_key(config)]
        if made.network is None:
            return LOOK_UP_S * len(lengths)
        seconds, reads = self._choosing(config, lengths, gammas), [made.reads(length) for length in lengths]
        for done, level in pairwise([0, *sorted(set(gammas))]):
            active = [read for read, gamma in zip(reads, gammas, strict=True) if gamma > done]
            seconds += (level - done) * self._pass(made.network, active, [1] * len(active))
        return seconds

    def upkeep(self, config: DraftConfig, lengths: Seq[int]) -> float:
        """See ``Prices``."""
        made, wanted = self._drafts[draft_key(config)], needs(config)
        if config.weights == "ngram":
            return TAKE_IN_S * len(lengths)
        if config.own_model:
            return len(lengths) * 2 * made.network.weights / self.hardware.flops_per_s
        if not wanted.tokens:
            return 0.0
        noting = MASS_SHARE * sum(lengths) * self._kv_s if wanted.page_mass else 0.0
        return LOOK_UP_S * len(lengths) + noting

    def wake(self, config: DraftConfig, length: int) -> float:
        """See ``Prices``. A self-draft that chooses starts with its first and last tokens: that costs nothing."""
        if config.weights == "ngram":
            return TAKE_IN_S * length
        if config.own_model:
            work = pass_work(self._drafts[draft_key(config)].network, {length / 2: 1}, queries=length)
            return times(work, self.hardware).total
        return 0.0

    def _pass(self, net: Network, lengths: Seq[int], tokens: Seq[int]) -> float:
        """A pass in which row ``i`` feeds ``tokens[i]`` tokens and reads its own and ``lengths[i]`` others."""
        keys = [length + n for length, n in zip(lengths, tokens, strict=True)]
        work = Work(
            linear_flops=sum(tokens) * (2 * net.weights + net.extra_flops),
            weight_bytes=net.weights * net.weight_bytes,
            attention_flops=sum(n * k for n, k in zip(tokens, keys, strict=True)) * net.attention_flops,
            kv_bytes=sum(keys) * net.kv_bytes_per_token,
            rows=len(keys),
            layers=net.layers,
            kv_heads=net.kv_heads,
        )
        return times(work, self.hardware).total

    def _choosing(self, config: DraftConfig, lengths: Seq[int], gammas: Seq[int]) -> float:
        """A round's share of choosing what to read."""
        if not needs(config).tokens:
            return 0.0
        if isinstance(
            self._selectors[draft_key(config)], PageSelector
        ):  # anew in every round, by what is noted of each page
            noted = sum(lengths) / PAGE * page_note_bytes(config, self.target_model.config, torch.bfloat16)
            return CHOOSE_S * len(lengths) + noted / self.hardware.bytes_per_s
        rounds = max(1.0, config.budget / TAIL / (1 + sum(gammas) / len(gammas)))  # between two choices, by all keys
        return (CHOOSE_S * len(lengths) + sum(lengths) * self._kv_s / 2) / rounds

    @property
    def _kv_s(self) -> float:
        """Seconds to read one cached token."""
        return self.target_model.network.kv_bytes_per_token / self.hardware.bytes_per_s
