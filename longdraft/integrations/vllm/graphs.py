"""Passes of a draft as the CUDA graphs that vLLM captured for the target's own. Imports no vLLM.

vLLM captures a pass for some numbers of tokens: in pieces, between which attention runs as ever, over whatever rows
there are. A piece reads its input where that lay when it was captured and takes the size that it is told for granted
(vLLM's ``CUDAGraphWrapper``). So what a pass is fed is laid into the runner's own buffers, padded to a captured size;
also the slots, as it depends on vLLM's settings whether keys and values are written inside a piece. Graphs of whole
passes are of another shape: so many tokens a row as verification feeds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from longdraft.integrations.vllm.tables import PAD_SLOT, Step


@dataclass(frozen=True)
class Feed:
    """What a pass runs on: ``ids``, ``positions``, ``slots [P]``, padding behind the step's own tokens.

    ``mode`` and ``key``: vLLM's words for the graph. ``padding [P]`` bool; ``None``: there is none.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    mode: Any
    key: Any = None
    padding: torch.Tensor | None = None


class Graphs:
    """Those of a ``runner``; ``none`` and ``pieces`` are vLLM's ``CUDAGraphMode.NONE`` and ``PIECEWISE``."""

    def __init__(self, runner: Any, none: Any, pieces: Any) -> None:
        self._runner, self._none, self._pieces = runner, none, pieces

    def feed(self, ids: torch.Tensor, step: Step) -> Feed:
        """A pass over ``ids [N]``, padded to the smallest captured size; as it is where no graph is large enough."""
        modes = {self._none, self._pieces}
        mode, key = self._runner.cudagraph_dispatcher.dispatch(len(ids), valid_modes=modes)
        if mode != self._pieces:
            return Feed(ids, step.positions, step.slots, self._none)
        runner, size = self._runner, key.num_tokens
        slots = runner.input_batch.block_table[0].slot_mapping.gpu
        return Feed(
            _laid(ids, runner.input_ids.gpu, size, 0),
            _laid(step.positions, runner.positions, size, 0),
            _laid(step.slots, slots, size, PAD_SLOT),
            mode,
            key,
            runner._prepare_padding_mask(len(ids), size),
        )


def _laid(values: torch.Tensor, buffer: torch.Tensor, size: int, rest: int) -> torch.Tensor:
    """The first ``size`` of ``buffer``: ``values`` and then ``rest``."""
    n = len(values)
    buffer[:n].copy_(values)
    buffer[n:size].fill_(rest)
    return buffer[:size]
