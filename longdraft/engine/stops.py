"""When a sequence ends: end-of-sequence and stop tokens, stop strings, length.

Cuts a run of new tokens at the first of them, wherever in the run it lies.
"""

from __future__ import annotations

from longdraft.core import Sequence
from longdraft.engine.detokenize import Detokenizer


def cut(
    seq: Sequence, tokens: list[int], eos_token_ids: frozenset[int], text: Detokenizer | None = None
) -> tuple[list[int], str | None]:
    """The tokens of the run that are kept, and why the sequence ends there (``stop``, ``length``) if it does.

    The ending token itself is kept, also the one that completes a stop string; ``seq.stop_text`` is then the output's
    text up to that string. A stop on the very last allowed token counts as ``stop``. ``text`` is the text so far, where
    the sequence has stop strings; it is advanced by the tokens that are kept.
    """
    if not tokens:
        return tokens, None
    stops = set(seq.params.stop_token_ids)
    if not seq.params.ignore_eos:
        stops |= eos_token_ids
    room = seq.max_total - len(seq.ids)
    for n, token in enumerate(tokens[:room], start=1):
        if token in stops or (text and _completes_stop(seq, text, token)):
            return tokens[:n], "stop"
    return tokens[:room], "length" if len(tokens) >= room else None


def _completes_stop(seq: Sequence, text: Detokenizer, token: int) -> bool:
    """Advance ``text``; whether a stop string is complete now. The one that begins first wins, not the first listed."""
    before = len(text.text)
    if not text.push(token):
        return False
    found = []
    for stop in seq.params.stop:
        at = text.text.find(stop, max(0, before - len(stop) + 1))
        if at >= 0:
            found.append(at)
    if found:
        seq.stop_text = text.text[: min(found)]
    return bool(found)
