"""What passes and proposals cost on one machine, as curves with a few fitted constants: calibrated ``Prices``.

After MagicDec's three costs (arXiv:2408.11049): decoding, drafting and verifying, over batch, context, γ and budget.
Owns the form of the curves; ``longdraft.bench.calibrate`` measures and fits, ``calibration.py`` stores.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from longdraft.config import DraftConfig
from longdraft.drafts.refresh import spare
from longdraft.drafts.registry import selector
from longdraft.errors import InvalidValueError


@dataclass(frozen=True)
class PassCurve:
    """A pass: its rows' tokens through the weights, and attention over what each row reads.

    step_s                                    weights read once, launches
    + token_s · tokens fed
    + excess_s · tokens fed beyond ``knee``   arithmetic no longer hides behind reading weights
    + key_s · Σ keys                          a row's keys and values, read once for all of its tokens
    + query_s · Σ keys · tokens of the row beyond ``queries``
    """

    step_s: float
    token_s: float
    excess_s: float
    key_s: float
    query_s: float
    knee: int = 0
    queries: float = 1.0

    @staticmethod
    def terms(keys: Seq[int], tokens: Seq[int], knee: int, queries: float) -> tuple[float, ...]:
        """What the five constants are multiplied by: row ``i`` feeds ``tokens[i]`` and reads ``keys[i]`` in all."""
        fed = sum(tokens)
        many = sum(k * max(0, t - queries) for k, t in zip(keys, tokens, strict=True))
        return 1.0, fed, max(0, fed - knee), sum(keys), many

    def seconds(self, keys: Seq[int], tokens: Seq[int]) -> float:
        """Of one pass."""
        constants = (self.step_s, self.token_s, self.excess_s, self.key_s, self.query_s)
        return _dot(constants, self.terms(keys, tokens, self.knee, self.queries))


@dataclass(frozen=True)
class ChoiceCurve:
    """Choosing what to read of some rows, or looking up what to propose: per call, row, cached token, token read."""

    call_s: float = 0.0
    row_s: float = 0.0
    context_s: float = 0.0
    read_s: float = 0.0

    @staticmethod
    def terms(lengths: Seq[int], reads: Seq[int]) -> tuple[float, ...]:
        """What the four constants are multiplied by."""
        return 1.0, len(lengths), sum(lengths), sum(reads)

    def seconds(self, lengths: Seq[int], reads: Seq[int]) -> float:
        """Of one choice for every row."""
        return _dot((self.call_s, self.row_s, self.context_s, self.read_s), self.terms(lengths, reads))


@dataclass(frozen=True)
class NotingCurve:
    """What a pass of the target takes longer when it tells a draft what it needs: per row, token, token and key."""

    row_s: float = 0.0
    token_s: float = 0.0
    mass_s: float = 0.0

    @staticmethod
    def terms(lengths: Seq[int], tokens: Seq[int]) -> tuple[float, ...]:
        """What the three constants are multiplied by."""
        return len(lengths), sum(tokens), sum(n * t for n, t in zip(lengths, tokens, strict=True))

    def seconds(self, lengths: Seq[int], tokens: Seq[int]) -> float:
        """Of one pass."""
        return _dot((self.row_s, self.token_s, self.mass_s), self.terms(lengths, tokens))


@dataclass(frozen=True)
class DraftCurve:
    """A kind of draft. ``step`` is one drafted token for every row (``None``: it runs no pass), ``wake_s`` the time per
    token of a row's text to build up a state that was lost."""

    step: PassCurve | None
    choice: ChoiceCurve = ChoiceCurve()
    noting: NotingCurve = NotingCurve()
    wake_s: float = 0.0


@dataclass(frozen=True)
class Curves:
    """``Prices`` of one model in one setting; ``drafts`` by ``kind``. Of greedy decoding."""

    passes: PassCurve
    drafts: Mapping[str, DraftCurve]

    def target(self, lengths: Seq[int], tokens: Seq[int]) -> float:
        """See ``Prices``; drawing tokens is included."""
        return self.passes.seconds(keys_read(lengths, tokens), tokens)

    def draft(self, config: DraftConfig, lengths: Seq[int], gammas: Seq[int]) -> float:
        """See ``Prices``; noting in the verification is included."""
        return self.propose(config, lengths, gammas) + self.noting(config, lengths, [gamma + 1 for gamma in gammas])

    def upkeep(self, config: DraftConfig, lengths: Seq[int]) -> float:
        """See ``Prices``."""
        return self.noting(config, lengths, [1] * len(lengths))

    def propose(self, config: DraftConfig, lengths: Seq[int], gammas: Seq[int]) -> float:
        """Seconds of proposing ``gammas[i]`` tokens for row ``i``, with a round's share of a choice."""
        curve = self._curve(config)
        rows = [(n, gamma) for n, gamma in zip(lengths, gammas, strict=True) if gamma]
        if not rows:
            return 0.0
        lengths, gammas = ([row[i] for row in rows] for i in range(2))
        steps = draft_steps(config, lengths, gammas) if curve.step else ()
        choosing = curve.choice.seconds(lengths, reads_of(config, lengths)) / rounds_per_choice(config, max(gammas))
        return sum(curve.step.seconds(reads, [1] * len(reads)) for reads in steps) + choosing

    def noting(self, config: DraftConfig, lengths: Seq[int], tokens: Seq[int]) -> float:
        """Seconds by which a pass of the target takes longer when it tells the draft of row ``i``'s ``tokens[i]``."""
        return self._curve(config).noting.seconds(lengths, tokens)

    def wake(self, config: DraftConfig, length: int) -> float:
        """See ``Prices``."""
        return self._curve(config).wake_s * length

    def knows(self, config: DraftConfig) -> bool:
        """See ``Prices``; whatever the budget."""
        return kind(config) in self.drafts

    def _curve(self, config: DraftConfig) -> DraftCurve:
        if not self.knows(config):
            known = ", ".join(self.drafts) or "none was"
            raise InvalidValueError("draft", kind(config), f"must have been calibrated ({known})", "Calibrate anew.")
        return self.drafts[kind(config)]


def kind(config: DraftConfig) -> str:
    """What drafts of one set of constants have in common: all but budget, γ, refresh and rule."""
    return config.weights if config.weights == "ngram" else f"{config.weights}/{config.layers}/{config.kv}"


def keys_read(lengths: Seq[int], tokens: Seq[int]) -> list[int]:
    """Keys that full attention reads of each row in a pass that feeds it ``tokens[i]``."""
    return [n + t for n, t in zip(lengths, tokens, strict=True)]


def reads_of(config: DraftConfig, lengths: Seq[int]) -> list[int]:
    """Keys that a draft step reads of each row."""
    reader = selector(config)
    return [reader.tokens_read(n) for n in lengths]


def draft_steps(config: DraftConfig, lengths: Seq[int], gammas: Seq[int]) -> Iterator[list[int]]:
    """The keys that each step of proposing reads, of the rows that still want a token."""
    for step in range(max(gammas)):
        yield reads_of(config, [n + step + 1 for n, gamma in zip(lengths, gammas, strict=True) if gamma > step])


def rounds_per_choice(config: DraftConfig, gamma: int) -> int:
    """Rounds that a choice lasts if all proposals stand: until its date, or until the budget is full."""
    reader = selector(config)
    refresh = getattr(reader, "refresh", None)
    return 1 if refresh is None else spare(refresh, reader.budget, gamma) // (gamma + 1) + 1


def _dot(constants: Seq[float], terms: Seq[float]) -> float:
    return sum(c * t for c, t in zip(constants, terms, strict=True))
