"""When a sequence ends: end-of-sequence and stop tokens, stop strings, length.

Cuts a run of new tokens at the first of them, wherever in the run it lies.
"""

from __future__ import annotations

from longdraft.core import Sequence
from longdraft.engine.detokenize import Detokenizer


def cut(seq: Sequence, tokens: list[int], text: Detokenizer | None = None) -> tuple[list[int], str | None]:
    """The tokens of the run that are kept, and why the sequence ends there (``stop``, ``length``) if it does.

    The ending token itself is kept, also the one that completes a stop string; ``seq.stop_text`` is then the output's
    text up to that string. A stop on the very last allowed token counts as ``stop``. ``text`` is the text so far, where
    the sequence has stop strings; it is advanced by the tokens that are kept. Nothing counts as a stop within the first
    ``min_tokens`` tokens.
    """
    if not tokens:
        return tokens, None
    room, have = seq.max_total - len(seq.ids), len(seq.ids) - seq.num_prompt
    for n, token in enumerate(tokens[:room], start=1):
        stop_text = _text_before_stop(seq, text, token) if text else None
        if (stop_text is not None or token in seq.stop_ids) and have + n > seq.params.min_tokens:
            seq.stop_text = stop_text
            return tokens[:n], "stop"
    return tokens[:room], "length" if len(tokens) >= room else None


def _text_before_stop(seq: Sequence, text: Detokenizer, token: int) -> str | None:
    """Advance ``text``; if that completes a stop string, the output's text up to it (or with it, if asked for).

    The string that begins first wins, not the first listed.
    """
    before = len(text.text)
    if not text.push(token):
        return None
    found = []
    for stop in seq.params.stop:
        at = text.text.find(stop, max(0, before - len(stop) + 1))
        if at >= 0:
            found.append((at, at + len(stop)))
    if not found:
        return None
    start, end = min(found)
    return text.text[: end if seq.params.include_stop_str_in_output else start]
