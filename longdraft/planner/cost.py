"""What a decode, draft or verify pass costs, and what a round of speculation gives: the roofline model.

After MagicDec (arXiv:2408.11049, Eq. 1 to 4) and SPIRe (arXiv:2504.06419, its modelled throughput). Owns counting and
the formulas; peaks and efficiencies are ``hardware.py``'s, drafts and choices ``plan.py``'s. A model is known by its
config alone.

A pass reads its weights once, whatever the batch, and every row's K and V once, whatever the number of queries; its
operations grow with both. So a batch at long context is bound by reading the cache, and verifying γ + 1 tokens takes
little longer than decoding one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from longdraft.config import as_float
from longdraft.models.config import ModelConfig
from longdraft.models.weights import num_parameters
from longdraft.planner.hardware import Hardware
from longdraft.spec.acceptance import expected_tokens

Rows = Mapping[float, int]  # length of a row's context in tokens, or a mean of lengths → number of such rows
Reads = Callable[[int], int]  # length → tokens of it that attention reads
Acceptance = float | Sequence[float]  # the chance that a token stands when those before it do: for all, or by position

BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "float8": 1.0, "int8": 1.0, "int4": 0.5}
PRECISION = 1e-9  # of an acceptance that is solved for


@dataclass(frozen=True)
class Network:
    """The weights that a pass runs, as far as they cost.

    ``weights`` are read once per pass and each takes part in one multiply-add per token. ``kv_elements`` is the number
    of K and V elements per token over its layers, ``attention_flops`` the operations per query and key over all heads
    and layers. ``weight_bytes`` and ``kv_bytes`` are those of one element.
    """

    weights: int
    layers: int
    kv_heads: int
    kv_elements: int
    attention_flops: int
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0
    extra_flops: int = 0  # per token, beyond two per weight

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of K and V that one token of one row takes."""
        return self.kv_elements * self.kv_bytes


def network(
    config: ModelConfig,
    *,
    weight_bytes: float = 2.0,
    kv_bytes: float = 2.0,
    layers: int | None = None,
    head: bool = True,
    attention: bool = True,
) -> Network:
    """The passes of a model, or of the ``layers`` of it that are kept.

    The embedding is looked up, not read; as the output layer of a tied model it is read. SPIRe's figures count neither
    the output layer and the norm before it (``head=False``) nor attention's operations (``attention=False``).
    """
    layers = config.num_layers if layers is None else layers
    outer = "model.embed_tokens." if config.tie_embeddings else "lm_head."
    ends = num_parameters(config, "model.norm.") + num_parameters(config, outer)
    return Network(
        weights=layers * num_parameters(config, "model.layers.0.") + (ends if head else 0),
        layers=layers,
        kv_heads=config.num_kv_heads,
        kv_elements=layers * config.kv_elements_per_layer,
        attention_flops=4 * layers * config.num_heads * config.head_dim if attention else 0,
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
    )


@dataclass(frozen=True)
class Work:
    """Operations and bytes of one pass: linear layers, and attention over the cache."""

    linear_flops: float
    weight_bytes: float
    attention_flops: float
    kv_bytes: float
    rows: int
    layers: int
    kv_heads: int


def whole(length: int) -> int:
    """The ``Reads`` of full attention."""
    return length


def lengths_of(rows: Rows) -> list[float]:
    """One length per row."""
    return [length for length, count in rows.items() for _ in range(count)]


def pass_work(net: Network, rows: Rows, queries: int = 1, reads: Reads = whole) -> Work:
    """One pass of ``queries`` tokens per row. Tokens of the same round count as part of ``length``, not beyond it."""
    count = sum(rows.values())
    keys = sum(n * reads(length) for length, n in rows.items())
    return Work(
        linear_flops=count * queries * (2 * net.weights + net.extra_flops),
        weight_bytes=net.weights * net.weight_bytes,
        attention_flops=queries * keys * net.attention_flops,
        kv_bytes=keys * net.kv_bytes_per_token,
        rows=count,
        layers=net.layers,
        kv_heads=net.kv_heads,
    )


@dataclass(frozen=True)
class Times:
    """Where a pass's seconds go. ``total`` combines them as the hardware overlaps computing and reading."""

    linear_compute: float
    weight_read: float
    attention_compute: float
    cache_read: float
    overhead: float
    overlap: str

    @property
    def total(self) -> float:
        """Seconds of the pass."""
        compute, read = self.linear_compute + self.attention_compute, self.weight_read + self.cache_read
        if self.overlap == "none":
            return compute + read + self.overhead
        if self.overlap == "pass":
            return max(compute, read) + self.overhead
        linear, attention = max(self.linear_compute, self.weight_read), max(self.attention_compute, self.cache_read)
        return linear + attention + self.overhead

    @property
    def bound(self) -> str:
        """What takes longest: one of weights, cache, compute, overhead."""
        compute = self.linear_compute + self.attention_compute
        parts = {"weights": self.weight_read, "cache": self.cache_read, "compute": compute, "overhead": self.overhead}
        return max(parts, key=parts.__getitem__)


def times(work: Work, hardware: Hardware) -> Times:
    """``work`` on ``hardware``. Devices share it, the cache by KV heads: one head's cannot be split."""
    flops, read = hardware.flops_per_s, hardware.bytes_per_s
    sharing = min(hardware.devices, work.kv_heads) / hardware.devices
    return Times(
        linear_compute=work.linear_flops / flops,
        weight_read=work.weight_bytes / read,
        attention_compute=work.attention_flops / (flops * sharing),
        cache_read=work.kv_bytes / (read * sharing),
        overhead=work.layers * hardware.layer_s + work.rows * hardware.row_s,
        overlap=hardware.overlap,
    )


def round_seconds(gamma: int, draft: float, verify: float, extra: float = 0.0) -> float:
    """A round: γ draft steps, one verification, and what the host adds (MagicDec's T_SD_total, without the last)."""
    return gamma * draft + verify + extra


def speedup(tokens: float, plain: float, round_s: float) -> float:
    """Eq. 2, inverted: ``tokens`` per row in ``round_s`` seconds against one in ``plain`` seconds."""
    return tokens * plain / round_s


def min_acceptance(gamma: int, plain: float, round_s: float, target: float = 1.0) -> float | None:
    """The constant acceptance at which a round is ``target`` times as fast as plain decoding.

    ``None`` where not even full acceptance gets there. Solves Ω(γ, α) · plain = target · round_s for α in [0, 1].
    """
    as_float("target", target, 0.0, float("inf"))
    needed = target * round_s / plain
    if needed > gamma + 1:
        return None
    low, high = 0.0, 1.0
    while high - low > PRECISION:  # Ω grows with α
        middle = (low + high) / 2
        low, high = (low, middle) if expected_tokens(middle, gamma) >= needed else (middle, high)
    return high if needed > 1 else 0.0


def implied_acceptance(tokens: float, gamma: int) -> float:
    """The constant acceptance that gives ``tokens`` per round of γ: Ω's inverse."""
    found = min_acceptance(gamma, 1.0, tokens)
    assert found is not None, f"a round of {gamma} drafted tokens gives at most {gamma + 1}, not {tokens}"
    return found
