"""A defect of vLLM's CPU build that makes sampling wrong under any speculation: found at start, and repaired.

Without Triton for CPUs, ``expand_batch_to_tokens`` of vLLM 0.32 fills a 64-bit copy of its output and drops it, so that
temperatures are uninitialised memory (vLLM issue 55005).
"""

from __future__ import annotations

from types import ModuleType

import torch


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """``x [B]`` to ``[num_tokens]``: entry b as often as its tokens, that end at ``cu_num_tokens[b]``."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
    values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return torch.repeat_interleave(values, counts, output_size=num_tokens)


def repair(sampler: ModuleType, device: torch.device) -> bool:
    """Whether vLLM's ``rejection_sampler`` module was wrong on ``device``, and now is right."""
    x = torch.tensor([1.0, 0.75, 0.5], device=device)
    ends = torch.tensor([2, 2, 5], dtype=torch.int32, device=device)
    wrong = any(
        not torch.equal(sampler.expand_batch_to_tokens(y, ends, 5), expand_batch_to_tokens(y, ends, 5))
        for y in (x, (8 * x).int())
    )
    if wrong:
        sampler.expand_batch_to_tokens = expand_batch_to_tokens
    return wrong
