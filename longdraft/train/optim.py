"""AdamW with a warm-up, a cosine and a guard: a step whose loss or gradients are no numbers changes nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from longdraft.models.feedback import MEMORY
from longdraft.train.settings import Section, number


@dataclass(frozen=True)
class OptimConfig(Section):
    """How weights are moved: ``beta1``, ``beta2``, ``eps`` and ``weight_decay`` are AdamW's; only matrices are decayed.

    The learning rate rises to ``lr`` within the share ``warmup`` of all steps, and falls along half a cosine to
    ``floor`` times ``lr``. Gradients are scaled down to a norm of ``clip``; 0 leaves them.
    """

    lr: float = number(3e-4, 0, 10)
    warmup: float = number(0.1, 0, 1)
    floor: float = number(0.1, 0, 1)
    beta1: float = number(0.9, 0, 0.99999)
    beta2: float = number(0.95, 0, 0.99999)
    eps: float = number(1e-8, 1e-20, 1)
    weight_decay: float = number(0.1, 0, 10)
    clip: float = number(1.0, 0, 1e9)

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of step 0, 1, … of ``steps``."""
        rising = round(self.warmup * steps)
        if step < rising:
            return self.lr * (step + 1) / rising
        done = (step - rising) / max(1, steps - rising - 1)
        return self.lr * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0))))


class Optimizer:
    """Moves parameters; its own tensors can be taken out and put back."""

    def __init__(self, config: OptimConfig, parameters: Mapping[str, torch.Tensor]) -> None:
        self.config, self.parameters = config, dict(parameters)
        # Norms, biases, and the weights of memories, whose logits mean nothing at 0.
        kept = [p for name, p in self.parameters.items() if p.ndim < 2 or name == MEMORY]
        decayed = [p for name, p in self.parameters.items() if p.ndim >= 2 and name != MEMORY]
        groups = [{"params": decayed}, {"params": kept, "weight_decay": 0.0}]
        self._adam = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
        )

    def step(self, rate: float) -> float | None:
        """Move by the gradients that are there, and drop them: their norm, or ``None`` if they are no numbers."""
        limit = self.config.clip or math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters.values(), limit))
        if math.isfinite(norm):
            for group in self._adam.param_groups:
                group["lr"] = rate
            self._adam.step()
        self.drop()
        return norm if math.isfinite(norm) else None

    def drop(self) -> None:
        """Forget gradients."""
        self._adam.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that the next step depends on besides the parameters, by name; nothing before the first step."""
        names = {p: name for name, p in self.parameters.items()}
        return {f"{kind}.{names[p]}": x for p, state in self._adam.state.items() for kind, x in state.items()}

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put back what ``tensors`` gave."""
        self._adam.state.clear()
        for full, x in tensors.items():
            kind, _, name = full.partition(".")
            p = self.parameters[name]
            # A copy: what is read from a file may lie at another alignment, and sums depend on it.
            self._adam.state[p][kind] = x.clone() if kind == "step" else x.to(p.device, copy=True)
