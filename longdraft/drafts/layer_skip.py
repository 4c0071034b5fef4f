"""Layer skipping without training (after Draft & Verify, arXiv:2309.08168): the target minus some of its layers.

The residual stream lets a layer be left out; what is left is a cheaper, worse model that shares the target's weights
and cache. Only the chosen layers' slots of a step are written, and the verify pass overwrites them as ever. It is
``SelfSpec`` with a choice of layers, so any selection of tokens goes with it.
"""

from __future__ import annotations

from longdraft.errors import InvalidValueError


def choose_layers(spec: str, num_layers: int) -> tuple[int, ...] | None:
    """Layers to run, in order: ``every:n`` is each n-th from 0 and the last, ``first:n`` the first n; ``all`` → None.

    The last layer always runs under ``every:n``: it feeds the output head. Raises ``InvalidValueError`` where the
    model has too few layers for anything to be left out or kept as asked.
    """
    if spec == "all":
        return None
    kind, n = spec.split(":")
    if int(n) > num_layers:
        raise InvalidValueError("layers", spec, f"must stay within the target's {num_layers} layers")
    if kind == "first":
        return tuple(range(int(n)))
    return tuple(sorted({*range(0, num_layers, int(n)), num_layers - 1}))
