"""How far a draft's distribution is from its target's, with gradients in closed form."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

LEAST = -1e4  # of a logarithm; its exponential is 0 in float64, too


def compare(log_p: torch.Tensor, log_q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """KL(p ‖ q), where what p excludes counts nothing, and α = sum min(p, q): ``[n, C]`` twice → ``[n]`` each."""
    return _Compare.apply(log_p, log_q)


class _Compare(torch.autograd.Function):
    """See ``compare``. Gradients are q's alone; in closed form they take a third of the passes over ``[n, C]``."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's
        log_p: torch.Tensor,
        log_q: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Whatever is not returned is made in place: new memory costs more than the arithmetic."""
        p, q, scratch = log_p.exp(), log_q.exp(), log_p - log_q
        kl = scratch.clamp_(min=LEAST).mul_(p).sum(dim=-1)
        alpha = torch.minimum(p, q, out=scratch).sum(dim=-1)
        if ctx.needs_input_grad[1]:  # d alpha / d log q = q where q < p, and half of it where they are equal
            torch.sub(p, q, out=scratch).sign_().add_(1).mul_(q).mul_(0.5)
            ctx.save_for_backward(p, scratch)
        return kl, alpha

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_kl: torch.Tensor, of_alpha: torch.Tensor) -> tuple[None, torch.Tensor]:  # noqa: ANN401
        """d KL / d log q = −p."""
        p, smaller = ctx.saved_tensors
        return None, (smaller * of_alpha[:, None]).addcmul_(p, of_kl[:, None], value=-1)
