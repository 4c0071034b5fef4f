"""What a request does to its logits before temperature and filters: masks, bias, penalties, its own functions.

All of it is a function of the logits and of the tokens before a place, drafted ones included; there is no running
state that a refused proposal could spoil. Drafts and target go through the same code.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch

from longdraft.core import Place
from longdraft.sampling_params import LogitsProcessor, SamplingParams


def adjust(logits: torch.Tensor, places: Sequence[Place]) -> tuple[torch.Tensor, dict[int, str]]:
    """Adjusted ``logits [R, V]``, one ``Place`` per row, and for rows where that failed the reason.

    A failed row (no token left, or a processor that raised) comes back as zeros: it hurts nobody else.
    """
    rows = [i for i, place in enumerate(places) if place.seq.params.adjusts_logits]
    if not rows:
        return logits, {}
    out, errors = logits.clone(), {}
    seen: dict[int, _Seen] = {}
    for i in rows:
        place = places[i]
        if not torch.isfinite(out[i].amax()):
            errors[i], out[i] = NOT_FINITE, 0
            continue
        try:
            _mask(out[i], place)
            if place.seq.params.penalised:
                if place.seq.id not in seen:
                    seen[place.seq.id] = _Seen(place, out.shape[-1], out.device)
                _penalise(out[i], place.seq.params, seen[place.seq.id], place.drafted)
            out[i] = _process(out[i], place)
        except Exception as error:  # a processor may raise anything; it is its own request's fault
            errors[i] = f"a logits processor raised {type(error).__name__}: {error}"
        else:
            if not torch.isfinite(out[i].amax()):
                empty = bool(out[i].amax() == -torch.inf)
                errors[i] = NOTHING_LEFT if empty else "a logits processor returned values that are not finite"
        if i in errors:
            out[i] = 0
    return out, errors


NOT_FINITE = "the model's logits are not finite"
NOTHING_LEFT = "no token is left to draw: allowed_token_ids, bad_words, min_tokens or a logits processor exclude all"


def _mask(row: torch.Tensor, place: Place) -> None:
    """Allowed tokens, bad words, tokens that would end it too early, bias; in place on ``row [V]``."""
    params = place.seq.params
    if params.allowed_token_ids is not None:
        kept = row[list(params.allowed_token_ids)]
        row.fill_(-torch.inf)
        row[list(params.allowed_token_ids)] = kept
    for word in params.bad_words:
        start = list(word[:-1])
        if place.last(len(start)) == start:
            row[word[-1]] = -torch.inf
    if place.num_output < params.min_tokens:
        row[list(place.seq.stop_ids)] = -torch.inf
    if params.logit_bias:
        ids, values = zip(*params.logit_bias, strict=True)
        row[list(ids)] += torch.tensor(values, dtype=row.dtype, device=row.device)


class _Seen:
    """How often each token stands in a sequence's output, and which stand in its prompt: ``[V]`` each."""

    def __init__(self, place: Place, vocab: int, device: torch.device) -> None:
        ids = torch.tensor(place.seq.ids, device=device)
        prompt, output = ids[: place.seq.num_prompt], ids[place.seq.num_prompt :]
        self.output = torch.bincount(output, minlength=vocab)
        self.prompt = torch.bincount(prompt, minlength=vocab) > 0


def _penalise(row: torch.Tensor, params: SamplingParams, seen: _Seen, drafted: Sequence[int]) -> None:
    """Repetition (prompt and output), frequency and presence (output), in place on ``row [V]``."""
    extra = torch.tensor(list(drafted), dtype=torch.int64, device=row.device)
    counts = seen.output + torch.bincount(extra, minlength=len(row))
    if params.repetition_penalty != 1:
        factor = params.repetition_penalty
        shrunk = torch.where(row > 0, row / factor, row * factor)
        row.copy_(torch.where(seen.prompt | (counts > 0), shrunk, row))
    row -= params.frequency_penalty * counts.to(row.dtype)
    row -= params.presence_penalty * (counts > 0).to(row.dtype)


def _process(row: torch.Tensor, place: Place) -> torch.Tensor:
    """The request's own functions, one after the other."""
    for function in place.seq.params.logits_processors:
        seq = place.seq
        history = [list(seq.ids[: seq.num_prompt]), [*seq.output_ids, *place.drafted]]
        shape = row.shape
        row = function(*(history if _takes_prompt(function) else history[1:]), row)
        if not isinstance(row, torch.Tensor) or row.shape != shape:
            raise TypeError(f"it must return a tensor of shape {list(shape)}")
    return row


def _takes_prompt(function: LogitsProcessor) -> bool:
    """Whether it is a function of (prompt_ids, output_ids, logits) and not of (output_ids, logits)."""
    try:
        return len(inspect.signature(function).parameters) == 3
    except (TypeError, ValueError):  # builtins tell nothing
        return False
