"""When a sequence ends: end-of-sequence and stop tokens, and length. Cuts a run of new tokens at the first of them."""

from __future__ import annotations

from longdraft.core import Sequence


def cut(seq: Sequence, tokens: list[int], eos_token_ids: frozenset[int]) -> tuple[list[int], str | None]:
    """The tokens of the run that are kept, and why the sequence ends there (``stop``, ``length``) if it does.

    The ending token itself is kept; a stop on the very last allowed token counts as ``stop``.
    """
    if not tokens:
        return tokens, None
    stops = set(seq.params.stop_token_ids)
    if not seq.params.ignore_eos:
        stops |= eos_token_ids
    room = seq.max_total - len(seq.ids)
    for n, token in enumerate(tokens[:room], start=1):
        if token in stops:
            return tokens[:n], "stop"
    return tokens[:room], "length" if len(tokens) >= room else None
