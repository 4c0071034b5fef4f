"""SPIRe's pruned initialisation (arXiv:2504.06419): a draft begins as some of the target's layers.

Which: the last ones, as in the paper, evenly spaced ones, or those that change the residual stream most (Block
Influence, ShortGPT, arXiv:2403.03853).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from longdraft.config import as_int
from longdraft.models.config import ModelConfig
from longdraft.models.feedback import MEMORY, FeedbackConfig
from longdraft.models.transformer import Transformer
from longdraft.models.weights import WeightSource, expected_shapes
from longdraft.train.teacher import Teacher

# How far above all others together a memory's one layer begins, in logits: softmax gives it 0.982, and the others
# enough to learn by.
PEAK = 4.0
STD = 0.02  # of random weights


def last_layers(n: int, num_layers: int) -> tuple[int, ...]:
    """The last ``n`` of the target's layers."""
    n = as_int("number of layers", n, 1, num_layers)
    return tuple(range(num_layers - n, num_layers))


def spaced_layers(n: int, num_layers: int) -> tuple[int, ...]:
    """``n`` of the target's layers at even distances, the last one among them."""
    n = as_int("number of layers", n, 1, num_layers)
    return tuple((i + 1) * num_layers // n - 1 for i in range(n))


def spread_layers(n: int, num_layers: int) -> tuple[int, ...]:
    """``n`` of the target's layers at even distances, the last one among them and, if there are two, the first."""
    n = as_int("number of layers", n, 1, num_layers)
    return (0, *(1 + i for i in spaced_layers(n - 1, num_layers - 1))) if n > 1 else spaced_layers(1, num_layers)


def influential_layers(n: int, influence: torch.Tensor) -> tuple[int, ...]:
    """The ``n`` layers of highest ``influence [L]``, ascending; ties to the lower one."""
    n = as_int("number of layers", n, 1, len(influence))
    order = influence.argsort(descending=True, stable=True)
    return tuple(sorted(order[:n].tolist()))


def block_influence(model: Transformer, rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """``[L]``: by how much each layer turns the residual stream, 1 − the mean cosine of what enters and what leaves it.

    ``rows``: token ids of some texts.
    """
    streams = tuple(range(model.config.num_layers + 1))
    total, count = torch.zeros(len(streams) - 1, dtype=torch.float64), 0
    teacher = Teacher(model)
    for row in rows:
        y = teacher.residuals([list(row)], streams)[:, 0].double()  # [L + 1, tokens, hidden]
        total += torch.nn.functional.cosine_similarity(y[:-1], y[1:], dim=-1).sum(dim=1)
        count += len(row)
    return 1 - total / count


def initial_tensors(
    config: FeedbackConfig,
    target: ModelConfig,
    source: WeightSource,
    dtype: torch.dtype = torch.float32,
    random_seed: int | None = None,
) -> dict[str, torch.Tensor]:
    """The tensors of a draft before training, copies of the target's; its memories are near the layers' own inputs.

    So the draft begins as the target with the other layers taken out. A memory that all share begins as the mean of
    the residual streams. ``random_seed`` takes random layers instead, for comparison.
    """
    config.taps(target.num_layers)  # checks the layers
    tensors = {}
    generator = torch.Generator().manual_seed(random_seed or 0)
    for name, shape in expected_shapes(target).items():
        parts = name.split(".")
        if parts[1] != "layers" or int(parts[2]) not in config.layers:
            continue
        own = ".".join(["model", "layers", str(config.layers.index(int(parts[2]))), *parts[3:]])
        if random_seed is None:
            tensors[own] = source.load(name).to(dtype, copy=True)
        elif len(shape) == 1:
            tensors[own] = torch.full(shape, float(name.endswith("norm.weight")), dtype=dtype)
        else:
            tensors[own] = (STD * torch.randn(shape, generator=generator)).to(dtype)
    if config.num_memories:
        tensors[MEMORY] = initial_memory(config).to(dtype)
    return tensors


def initial_memory(config: FeedbackConfig, peak: float = PEAK) -> torch.Tensor:
    """The weights of the memories, ``[n, n + 1]``: e^``peak`` times as much of a layer's own input as of all else."""
    n = len(config.layers)
    if config.memory == "shared":
        return torch.zeros(1, n + 1)
    return (peak + math.log(n)) * torch.eye(n, n + 1)
