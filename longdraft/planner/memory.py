"""What a plan holds in memory, and how many rows fit."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from longdraft.errors import KVCapacityError
from longdraft.planner.candidates import Candidate, Target
from longdraft.planner.hardware import GIB


@dataclass(frozen=True)
class Memory:
    """Bytes for a batch at a context. ``largest_batch`` and ``usable`` are ``None`` where the memory is not known."""

    weights: float
    draft_weights: float
    cache: float
    draft_cache: float
    usable: float | None
    largest_batch: int | None

    @property
    def total(self) -> float:
        """All that is held."""
        return self.weights + self.draft_weights + self.cache + self.draft_cache

    @property
    def fits(self) -> bool:
        """Whether the batch fits, as far as is known."""
        return self.usable is None or self.total <= self.usable

    def report(self) -> dict[str, object]:
        """As a JSON object, sizes in GiB."""
        sizes = {name: value for name, value in (asdict(self) | {"total": self.total}).items()}
        largest = sizes.pop("largest_batch")
        gib = {f"{name}_gib": value and round(value / GIB, 3) for name, value in sizes.items()}
        return {**gib, "largest_batch": largest, "fits": self.fits}


def memory(target: Target, draft: Candidate | None, batch: int, context: int) -> Memory:
    """What ``batch`` rows of ``context`` tokens hold with ``draft``, or decoded plainly."""
    row = context * target.network.kv_bytes_per_token
    draft_row = context * draft.kv_bytes_per_token + draft.kv_bytes_per_row if draft else 0.0
    draft_weights = draft.weight_bytes if draft else 0.0
    usable = target.hardware.usable_bytes
    left = None if usable is None else usable - target.held_bytes - draft_weights
    largest = None if left is None else max(0, int(left // (row + draft_row)))
    return Memory(target.held_bytes, draft_weights, batch * row, batch * draft_row, usable, largest)


def rows_that_fit(target: Target, draft: Candidate | None, batch: int, context: int) -> int:
    """``batch``, or as many rows as run together: the others wait. 0 where not even one fits."""
    largest = memory(target, draft, batch, context).largest_batch
    return batch if largest is None else min(batch, largest)


def require_one_row(target: Target, context: int) -> None:
    """Raise ``KVCapacityError`` where the model and one row of ``context`` tokens do not fit."""
    one = memory(target, None, 1, context)
    if not one.fits:
        name, tokens = target.hardware.name, int((one.usable - one.weights) // target.network.kv_bytes_per_token)
        fix = (
            f"Plan for a context of at most {tokens:,} tokens."
            if tokens > 0
            else "Take a smaller model, or more memory"
        )
        raise KVCapacityError(
            f"{target.name} takes {one.weights / GIB:.1f} GiB of weights and {one.cache / GIB:.1f} GiB of cache for "
            f"one row of {context:,} tokens, but {name} has {one.usable / GIB:.1f} GiB for both. {fix} "
            "Smaller types (--dtype int8, --kv-dtype float8) take less."
        )
