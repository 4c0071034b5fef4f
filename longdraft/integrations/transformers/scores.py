"""The user's logits processors and stopping criteria over rows of different lengths.

Both are functions of the ids so far, which transformers gives them for a whole batch of one length. Here they are asked
for the rows that have a length, one length after the other. Those of transformers that look at each row alone get these
rows; any other gets the whole batch, cut to that length, so that it finds its rows at their numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from transformers.generation import logits_process, stopping_criteria

_PROCESSORS = """MinLengthLogitsProcessor MinNewTokensLengthLogitsProcessor TemperatureLogitsWarper TopPLogitsWarper
    RepetitionPenaltyLogitsProcessor TopKLogitsWarper TopHLogitsWarper MinPLogitsWarper TypicalLogitsWarper
    EpsilonLogitsWarper EtaLogitsWarper NoRepeatNGramLogitsProcessor SequenceBiasLogitsProcessor
    NoBadWordsLogitsProcessor ForcedBOSTokenLogitsProcessor ForcedEOSTokenLogitsProcessor
    InfNanRemoveLogitsProcessor ExponentialDecayLengthPenalty LogitNormalization
    SuppressTokensAtBeginLogitsProcessor SuppressTokensLogitsProcessor WatermarkLogitsProcessor""".split()
_CRITERIA = "MaxLengthCriteria MaxTimeCriteria StopStringCriteria EosTokenCriteria".split()
BY_ROW = {getattr(logits_process, name) for name in _PROCESSORS if hasattr(logits_process, name)} | {
    getattr(stopping_criteria, name) for name in _CRITERIA
}

Place = tuple[int, int]  # a row, and how many ids come before the token that is asked for


def by_row(function: object) -> bool:
    """Whether it looks at each row alone, and not at its number either."""
    per_row = isinstance(getattr(function, "prompt_ignore_length", None), torch.Tensor)
    return type(function) in BY_ROW and not per_row


def by_length(places: Sequence[Place]) -> Iterator[tuple[int, list[int], list[int]]]:
    """The places of each length, shortest first: the length, the places' numbers, their rows."""
    for length in sorted({n for _, n in places}):
        numbers = [i for i, (_, n) in enumerate(places) if n == length]
        yield length, numbers, [places[i][0] for i in numbers]


class Scores:
    """``processors`` and ``criteria`` of one call, over ``ids [B, capacity]``."""

    def __init__(self, ids: torch.Tensor, processors: list, criteria: list) -> None:
        self.ids, self.processors, self.criteria = ids, processors, criteria
        self.stopped_by_row = all(map(by_row, criteria))

    def processed(self, logits: torch.Tensor, places: Sequence[Place]) -> torch.Tensor:
        """Scores ``[R, V]`` of ``logits [R, V]``, one place each; ``ids`` hold drafted tokens up to there."""
        if not self.processors:
            return logits
        out = torch.empty_like(logits)
        for length, numbers, rows in by_length(places):
            part = logits[numbers]
            for processor in self.processors:
                if by_row(processor):
                    part = processor(self.ids[rows, :length], part)
                else:
                    whole = part.new_zeros(len(self.ids), part.shape[1])
                    whole[rows] = part
                    part = processor(self.ids[:, :length], whole)[rows]
            out[numbers] = part
        return out

    def stopped(self, length: int, rows: list[int], scores: tuple[torch.Tensor, ...] | None) -> list[bool]:
        """Whether each of ``rows`` ends with its first ``length`` ids; ``scores [B, V]`` of each new one, if kept."""
        if self.stopped_by_row:
            return self.criteria(self.ids[rows, :length], scores).tolist()
        return self.criteria(self.ids[:, :length], scores)[rows].tolist()
