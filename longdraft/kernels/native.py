"""The native CPU kernels: C++ (``csrc/``) behind the same interfaces as the torch ones, and a whole pass in one call.

Batch-invariant: what a row gets does not depend on the rows beside it, on how many of its tokens are fed together, or
on the number of threads. Where the extension was not built everything runs on torch. ``LONGDRAFT_THREADS`` and
``LONGDRAFT_ISA`` override the number of threads (one per usable core) and the instruction set (the best there is);
``LONGDRAFT_THREADS=openmp`` takes the threads of torch's OpenMP, which no others then compete with.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from longdraft.errors import InvalidValueError
from longdraft.kernels.layout import BlockedLayout, Layout
from longdraft.view import NEVER, AttnPlan, CompactView, LayerKV, PagesView, TableView

if TYPE_CHECKING:
    from longdraft.kernels.dispatch import CallSpec

try:
    from longdraft import _native
except ImportError as error:
    _native, WHY_NOT = None, f"the native extension is not there ({error})"
else:
    WHY_NOT = ""
FAR = 2**30  # a position that no query reaches, in 32 bits


@lru_cache(maxsize=1)
def runtime() -> Any:  # noqa: ANN401 - a class of the extension
    """The threads and kernels that all models of this process share."""
    isas = _native.isas()
    isa = os.environ.get("LONGDRAFT_ISA") or isas[0]
    if isa not in isas:
        raise InvalidValueError("LONGDRAFT_ISA", isa, f"must be one of {', '.join(isas)} on this processor")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = os.environ.get("LONGDRAFT_THREADS") or str(cores)
    if threads == "openmp":
        try:
            return _native.Runtime(isa, 0)
        except ValueError as error:
            raise InvalidValueError("LONGDRAFT_THREADS", threads, "needs OpenMP in this process") from error
    if not threads.isdecimal() or not 1 <= int(threads) <= 1024:
        raise InvalidValueError("LONGDRAFT_THREADS", threads, "must be an integer from 1 to 1024, or openmp")
    return _native.Runtime(isa, int(threads))


if hasattr(os, "register_at_fork"):  # threads do not survive a fork: a child makes its own
    os.register_at_fork(after_in_child=runtime.cache_clear)


def use_huge_pages(x: torch.Tensor) -> None:
    """Ask for large memory pages under a tensor that is not in use yet; without the extension nothing happens."""
    if _native is not None and x.device.type == "cpu":
        _native.huge_pages(x.data_ptr(), x.nbytes)


def describe() -> str:
    """What is there, in words."""
    if _native is None:
        return WHY_NOT
    return f"{runtime().isa} of {', '.join(_native.isas())}; {runtime().threads} threads"


def unsupported(spec: CallSpec) -> str | None:
    """Why the native kernels cannot serve ``spec``; ``None`` if they can."""
    types = (torch.float32, torch.bfloat16)
    if _native is None:
        return WHY_NOT
    if spec.device != "cpu":
        return f"it runs on the CPU, not on {spec.device}"
    if spec.dtype not in types or spec.kv_dtype not in types:
        return f"it computes in float32 and bfloat16, not {spec.dtype} with K and V in {spec.kv_dtype}"
    if spec.head_dim % 16 or spec.head_dim > 256:
        return f"head_dim must be a multiple of 16 up to 256, not {spec.head_dim}"
    return None if spec.page_size == _native.PAGE else f"pages must hold {_native.PAGE} tokens, not {spec.page_size}"


def draw(
    logits: torch.Tensor,  # [R, V] float32
    temperatures: Sequence[float],
    seeds: Sequence[int],
    positions: Sequence[int],
    role: int,
) -> list[int]:
    """argmax(logits / T + G) per row, for T = 0 the largest; −1 where a logit is NaN or none is finite.

    G is the noise of ``spec/noise.py``; ties go to the lowest id.
    """
    logits, tokens = logits.contiguous(), torch.empty(len(logits), dtype=torch.int64)
    settings = torch.tensor(temperatures, dtype=torch.float64)
    seeds_t, positions_t = (torch.tensor(x, dtype=torch.int64) for x in (seeds, positions))
    addresses = (settings.data_ptr(), seeds_t.data_ptr(), positions_t.data_ptr())
    runtime().draw(logits.data_ptr(), *logits.shape, *addresses, role, tokens.data_ptr())
    return tokens.tolist()


def can_draw(logits: torch.Tensor) -> bool:
    """Whether ``draw`` serves these logits."""
    return _native is not None and logits.device.type == "cpu" and logits.dtype == torch.float32


def can_rate(layout: Layout, k: torch.Tensor) -> bool:
    """Whether ``token_mass`` and ``page_scores`` serve keys that lie in ``k`` like this."""
    return isinstance(layout, BlockedLayout) and k.device.type == "cpu"


def token_mass(
    queries: torch.Tensor,  # [L, n, H, D] float32, at the positions start, start + 1, …
    start: int,
    k: torch.Tensor,  # [L, …] the storage of all layers' keys
    layout: BlockedLayout,
    pages: torch.Tensor,  # [P] int64: those of one row
) -> torch.Tensor:
    """``[L, G, P * page_size]`` float32: see ``Keys.mass``; 0 for slots behind the last query."""
    queries, pages = queries.contiguous(), pages.contiguous()
    layers, n, heads, dim = queries.shape
    mass = torch.empty(layers, layout.num_kv_heads, len(pages) * layout.page_size)
    shape = (heads, layout.num_kv_heads, dim, k.dtype == torch.bfloat16)
    addresses = (pages.data_ptr(), len(pages), k.data_ptr(), k[0].nbytes, mass.data_ptr())
    runtime().token_mass(shape, layers, queries.data_ptr(), n, start, *addresses)
    return mass


def page_scores(parts: torch.Tensor, bounds: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """``[L, G, P]`` float32: ``parts [L, G, 2, D]`` times ``bounds [L, all pages, G, 2, D]`` of ``pages [P]``."""
    parts, pages = parts.contiguous(), pages.contiguous()
    layers, num_pages, kv_heads, _, dim = bounds.shape
    scores = torch.empty(layers, kv_heads, len(pages))
    shape = (kv_heads, kv_heads, dim, bounds.dtype == torch.bfloat16)
    addresses = (parts.data_ptr(), pages.data_ptr(), len(pages), scores.data_ptr())
    runtime().page_scores(shape, layers, bounds.data_ptr(), num_pages, *addresses)
    return scores


class NativeAttention:
    """One pass over each page for all queries of a row and all heads of a KV group. One object serves one step."""

    name = "native"

    def __init__(self, plan: AttnPlan, layout: BlockedLayout, spec: CallSpec) -> None:
        self.plan = NativePlan(plan, layout.num_kv_heads * spec.group_size, layout, spec)

    @staticmethod
    def supports(spec: CallSpec) -> str | None:
        """See ``unsupported``."""
        return unsupported(spec)

    @staticmethod
    def layout(page_size: int, num_kv_heads: int, head_dim: int, spec: CallSpec) -> BlockedLayout:
        """How K and V must lie for these kernels."""
        return BlockedLayout(page_size, num_kv_heads, head_dim, pairs=spec.kv_dtype == torch.bfloat16)

    def __call__(
        self, q: torch.Tensor, kv: LayerKV, tokens: torch.Tensor | None = None, mass: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``q [N, H, D]`` → ``[N, H, D]``; the step's own K/V must already be written.

        The page masses of ``tokens [n]`` are written to ``mass [n, G, P]`` (float32): what share of attention a KV
        head's queries give to each page of the row's list, summed over the heads of its group.
        """
        q = q.float().contiguous()
        out = torch.empty_like(q)
        wanted = (0 if tokens is None else len(tokens), address(tokens), address(mass))
        addresses = (q.data_ptr(), kv.k.data_ptr(), kv.v.data_ptr(), out.data_ptr())
        runtime().attention(self.plan.handle, *addresses, *wanted)
        return out

    def write(self, kv: LayerKV, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store ``k`` and ``v [N, G, D]`` at ``slots [N]`` int64; those of negative slots are dropped."""
        k, v, slots = k.float().contiguous(), v.float().contiguous(), slots.contiguous()
        addresses = (k.data_ptr(), v.data_ptr(), slots.data_ptr(), len(slots), kv.k.data_ptr(), kv.v.data_ptr())
        runtime().write(self.plan.handle, *addresses)


class NativePlan:
    """A step's view in the form the kernels read: lists of pages with the positions of their first slots.

    One object serves all layers, also where each has its own lists.
    """

    def __init__(self, plan: AttnPlan, heads: int, layout: BlockedLayout, spec: CallSpec) -> None:
        view, kind = plan.view, (heads, layout.num_kv_heads, layout.head_dim, spec.kv_dtype == torch.bfloat16)
        if isinstance(view, TableView):
            self.handle = _of_table(view, plan.query_starts, kind)
            return
        pages, first, counts, positions = _lists(view, layout.num_kv_heads)
        none = torch.zeros(len(view.lens), dtype=torch.int32)  # no sinks, and a window from 0 on
        # Kept here: the handle holds addresses only.
        self.arrays = [
            None if x is None else x.to(torch.int32).contiguous()
            for x in (pages, first, counts, positions, plan.query_starts, view.lens, none, none)
        ]
        layers = pages.shape[0] if view.layered else 1
        sizes = (layers, len(view.lens), *pages.shape[-2:])
        self.handle = _native.Plan(*kind, *sizes, *(address(x) for x in self.arrays))


def _of_table(view: TableView, query_starts: torch.Tensor, kind: tuple[int, int, int, bool]) -> Any:  # noqa: ANN401
    """The plan of a view that every step makes; the extension keeps what it needs of it (see ``page_numbers``)."""
    starts = None if view.starts is None else view.starts.contiguous()
    arrays = (view.tables.contiguous(), view.lens.contiguous(), query_starts.contiguous())
    return _native.Plan(*kind, *view.tables.shape, *(x.data_ptr() for x in arrays), view.sinks, address(starts))


def _lists(view: PagesView | CompactView, num_kv_heads: int) -> tuple[torch.Tensor | None, ...]:
    """``pages [B, G', P]``, their ``first`` positions, ``counts [B, G']``, and the positions of all slots if need be.

    The pages of a list come in the order of their positions, the used ones first. Layered views have a dimension more.
    """
    if isinstance(view, PagesView):
        number = torch.where(view.numbers < 0, FAR, view.numbers)
        if (number[..., 1:] < number[..., :-1]).any():
            number = number.sort(dim=-1).values
        used = number * view.page_size < view.lens[:, None, None]  # what lies behind the row's end shows nothing
        number = number.where(used, 0)
        tables = view.tables[:, None].expand(*number.shape[:-1], -1)
        return tables.gather(-1, number), number * view.page_size, used.sum(dim=-1), None
    positions = torch.where(view.positions == NEVER, FAR, view.positions)
    positions = positions.expand(*positions.shape[:-2], num_kv_heads, -1)
    pages = view.tables[:, None].expand(*positions.shape[:-1], -1)
    last = (positions < FAR) * torch.arange(1, positions.shape[-1] + 1)
    return pages, torch.zeros_like(pages), -(-last.amax(dim=-1) // view.page_size), positions


def address(x: torch.Tensor | None) -> int:
    """Where a tensor lies; 0 for none."""
    return 0 if x is None else x.data_ptr()
