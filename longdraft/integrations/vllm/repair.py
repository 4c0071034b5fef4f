"""Two defects of vLLM's CPU build that speculation of any kind meets: found at start, and repaired.

Without Triton for CPUs, ``expand_batch_to_tokens`` of vLLM 0.32 fills a 64-bit copy of its output and drops it, so that
temperatures are uninitialised memory (vLLM issue 55005); and a step in which a batch with ``top_k`` has no drafted
token at all ends the engine, as the largest of no numbers is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """``x [B]`` to ``[num_tokens]``: entry b as often as its tokens, that end at ``cu_num_tokens[b]``."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
    values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return torch.repeat_interleave(values, counts, output_size=num_tokens)


def repair(sampler: ModuleType, device: torch.device) -> Iterator[str]:
    """Put vLLM's ``rejection_sampler`` module right where it is wrong on ``device``: a sentence for each repair."""
    x = torch.tensor([1.0, 0.75, 0.5], device=device)
    ends = torch.tensor([2, 2, 5], dtype=torch.int32, device=device)
    if any(
        not torch.equal(sampler.expand_batch_to_tokens(y, ends, 5), expand_batch_to_tokens(y, ends, 5))
        for y in (x, (8 * x).int())
    ):
        sampler.expand_batch_to_tokens = expand_batch_to_tokens
        yield "sampling under speculation is wrong in this vLLM (issue 55005)"
    one = torch.ones(1, device=device)
    params = SimpleNamespace(all_greedy=False, temperature=one, top_k=one.int(), top_p=None)
    try:
        sampler.apply_sampling_constraints(torch.empty(0, 2, device=device), (0 * one).int(), params)
    except (RuntimeError, IndexError):
        sampler.apply_sampling_constraints = _unless_empty(sampler.apply_sampling_constraints)
        yield "top_k under speculation ends this vLLM where a step has no drafts"


def _unless_empty(constraints: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def apply(logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return constraints(logits, *args, **kwargs) if len(logits) else logits

    return apply
