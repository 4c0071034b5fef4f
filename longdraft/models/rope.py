"""Rotary embedding: inverse frequencies under each scaling rule (YaRN: arXiv:2309.00071), and their table.

Owns the arithmetic, which follows ``transformers`` operation for operation so that the float32 results are the same
bits. What the settings are and whether they are valid is the business of ``models/config``.
"""

from __future__ import annotations

import math

import torch

from longdraft.errors import InvalidValueError
from longdraft.models.config import RopeConfig


def inverse_frequencies(
    rope: RopeConfig, head_dim: int, max_position_embeddings: int
) -> tuple[torch.Tensor, float]:  # [D/2] float32, scaling
    """Radians per position for each of the ``head_dim / 2`` pairs, and the factor on every cosine and sine.

    ``dynamic`` gives the plain frequencies: they hold up to the original length, which ``RotaryTable`` enforces.
    """
    original = rope.original_max_len or max_position_embeddings
    inv_freq = 1.0 / _powers(rope.theta, head_dim)
    scaling = 1.0
    if rope.kind == "linear":
        inv_freq /= rope.factor
    elif rope.kind == "llama3":
        inv_freq = _llama3(inv_freq, rope, original)
    elif rope.kind == "yarn":
        inv_freq, scaling = _yarn(rope, head_dim, original), _yarn_scaling(rope)
    elif rope.kind not in ("default", "dynamic"):
        raise InvalidValueError("rope.kind", rope.kind, "it must be default, linear, dynamic, llama3 or yarn")
    if rope.freq_factors is not None:
        inv_freq = inv_freq / torch.tensor(rope.freq_factors, dtype=torch.float32)
    return inv_freq, scaling


def _powers(theta: float, head_dim: int) -> torch.Tensor:
    """theta^(2i / head_dim) for each pair i: the inverse of the unscaled frequencies."""
    return theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def _llama3(inv_freq: torch.Tensor, rope: RopeConfig, original: int) -> torch.Tensor:
    """Pairs that turn rarely within the original context are slowed down, fast ones kept, those between blended."""
    wavelength = 2 * math.pi / inv_freq
    longest, shortest = original / rope.low_freq_factor, original / rope.high_freq_factor
    slowed = torch.where(wavelength > longest, inv_freq / rope.factor, inv_freq)
    share = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = (1 - share) * slowed / rope.factor + share * slowed
    return torch.where((wavelength >= shortest) & (wavelength <= longest), blend, slowed)


def _yarn(rope: RopeConfig, head_dim: int, original: int) -> torch.Tensor:
    """YaRN: a linear ramp over the pairs, from unscaled to divided by ``factor``."""

    def pair_of(turns: float) -> float:
        """The pair, counted continuously, that makes ``turns`` full turns within the original context."""
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp, without dividing by zero
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    powers, keep = _powers(rope.theta, head_dim), 1 - ramp
    return 1.0 / (rope.factor * powers) * (1 - keep) + 1.0 / powers * keep


def _yarn_scaling(rope: RopeConfig) -> float:
    """The factor on cosines and sines: given, or derived from ``factor`` and the two mscales."""
    if rope.attention_factor is not None:
        return rope.attention_factor

    def derived(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return derived(rope.mscale) / derived(rope.mscale_all_dim)
    return derived(1.0)


class RotaryTable:
    """Cosines and sines of every position so far asked for, float32 ``[length, D/2]``, grown on demand.

    Entries depend on their position alone, never on the order of the look-ups. They are computed on the CPU, so that
    every device reads the same values.
    """

    def __init__(
        self,
        rope: RopeConfig,
        head_dim: int,
        max_position_embeddings: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self._inv_freq, self._scaling = inverse_frequencies(rope, head_dim, max_position_embeddings)
        # Beyond its original length, dynamic scaling changes the rotation of keys that are cached already.
        self._limit = max_position_embeddings if rope.kind == "dynamic" else None
        self._cos = self._sin = torch.empty(0, head_dim // 2, device=device)

    def lookup(
        self, positions: torch.Tensor, length: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:  # [N] → [N, D/2] each
        """Cosines and sines at ``positions`` (int64, not negative).

        ``length``: a number that all positions are known to be below; it spares reading them back from a device.
        """
        if length is not None:
            self._grow(length)
        elif positions.numel():
            first, last = (int(bound) for bound in positions.aminmax())
            if first < 0:
                raise InvalidValueError("position", first, "it must not be negative")
            self._grow(last + 1)
        return self._cos[positions], self._sin[positions]

    def _grow(self, length: int) -> None:
        have = len(self._cos)
        if length <= have:
            return
        if self._limit is not None and length > self._limit:
            limit = f"with dynamic rotary scaling it must be below {self._limit}"
            raise InvalidValueError("position", length - 1, limit, "Lower max_model_len.")
        target = max(length, 2 * have, 256)
        angles = torch.arange(have, target, dtype=torch.float32)[:, None] * self._inv_freq
        device = self._cos.device
        self._cos = torch.cat((self._cos, (angles.cos() * self._scaling).to(device)))
        self._sin = torch.cat((self._sin, (angles.sin() * self._scaling).to(device)))


def apply_rotary(
    x: torch.Tensor,  # [N, H, D]
    cos: torch.Tensor,  # [N, D/2]
    sin: torch.Tensor,  # [N, D/2]
) -> torch.Tensor:  # [N, H, D]
    """Turn the pairs (i, i + D/2) of every head by the given angles; computed in the wider type, returned in x's."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
