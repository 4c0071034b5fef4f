"""The native kernels against the machine's roofs: memory for attention and weights, arithmetic for prefill.

    python bench/kernels.py                      # SmolLM2's shapes: 9 query heads on 3 KV heads, head_dim 64

Every figure is a median over interleaved turns: a roof is timed right beside what is compared with it. The last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from longdraft.kernels import native
from longdraft.kernels.dispatch import CallSpec
from longdraft.kernels.linear.native import NativeLinear
from longdraft.kernels.native import NativeAttention, runtime
from longdraft.kv.store import PagedStore
from longdraft.view import AttnPlan

COPIES = 40  # layers' caches: more than any cache of the processor holds, as in a decoding step


def clock(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def interleaved(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each call, taken in turns, forwards and backwards."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds + 1):
        for name in list(calls)[:: 1 if i % 2 else -1]:
            seconds = clock(calls[name])
            if i:  # the first round warms up
                times[name].append(seconds)
    return {name: statistics.median(values) for name, values in times.items()}


def attention(heads: int, kv_heads: int, batch: int, context: int, dtype: torch.dtype, rounds: int) -> dict[str, float]:
    """Plain and verify attention against a prefetching read loop over as many bytes."""
    spec = CallSpec("cpu", dtype, dtype, 64, heads // kv_heads, 16)
    layout = NativeAttention.layout(16, kv_heads, 64, spec)
    pages = -(-(context + 8) // 16)
    store = PagedStore(COPIES, batch * pages, layout, dtype, "cpu")
    for row in range(batch):
        store.reserve(row, 0, context + 8)
    store.k.normal_(0, 0.3)
    store.v.normal_()
    size = 2 * COPIES * batch * context * kv_heads * 64 * dtype.itemsize
    buffer = torch.empty(size, dtype=torch.uint8)
    native.use_huge_pages(buffer)
    buffer.random_()

    def attend(queries: int, masses: bool = False) -> Callable[[], object]:
        starts = torch.arange(batch + 1) * queries
        plan = AttnPlan(store.view(range(batch), [context] * batch), starts, torch.zeros(0, dtype=torch.int64))
        kernel, q = NativeAttention(plan, layout, spec), torch.randn(batch * queries, heads, 64)
        tokens = torch.arange(len(q)) if masses else None
        mass = torch.zeros(len(q), kv_heads, pages) if masses else None
        return lambda: [kernel(q, layer, tokens, mass) for layer in store.layers]

    calls = {"read": lambda: runtime().read(buffer.data_ptr(), size)}
    calls |= {f"attention {n}": attend(n) for n in (1, 2, 3, 4, 6, 8)}
    calls["with masses 4"] = attend(4, masses=True)
    seconds = interleaved(calls, rounds)
    row = {"read_gb_s": size / seconds["read"] / 1e9, "share_of_read": seconds["read"] / seconds["attention 1"]}
    row["masses_cost_at_4"] = seconds["with masses 4"] / seconds["attention 4"]
    return row | {f"x_at_{n}": seconds[f"attention {n}"] / seconds["read"] for n in (1, 2, 3, 4, 6, 8)}


def weights(rounds: int, sizes: tuple[int, ...] = (1, 8, 24)) -> dict[str, float]:
    """A pass over 30 layers' weights and the head in bfloat16 and in 8 bits, milliseconds."""
    shapes = [(960, 576), (576, 576), (3072, 576), (576, 1536)] * 30 + [(49152, 576)]
    half = [NativeLinear(torch.randn(shape) / 30, None, None, torch.bfloat16) for shape in shapes]
    eight = [layer.quantised() for layer in half]
    out = {}
    for m in sizes:
        inputs = [torch.randn(m, layer.k) for layer in half]
        calls = {
            name: lambda layers=layers, inputs=inputs: [f(x) for f, x in zip(layers, inputs, strict=True)]
            for name, layers in (("bf16", half), ("int8", eight))
        }
        seconds = interleaved(calls, rounds)
        out |= {f"{name}_ms_at_{m}": 1e3 * value for name, value in seconds.items()}
        out[f"int8_over_bf16_at_{m}"] = seconds["int8"] / seconds["bf16"]
    return out


def prefill(rounds: int, tokens: int = 512) -> dict[str, float]:
    """The rate of products in prefill chunks, and of torch's large product, GFLOP/s in bfloat16."""
    layer, x = NativeLinear(torch.randn(3072, 576), None, None, torch.bfloat16), torch.randn(tokens, 576)
    a = torch.randn(2048, 2048).bfloat16()
    seconds = interleaved({"linear": lambda: [layer(x) for _ in range(8)], "gemm": lambda: a @ a}, rounds)
    rates = {"linear_gflops": 8 * 2 * tokens * 3072 * 576 / seconds["linear"] / 1e9}
    return rates | {"torch_gemm_gflops": 2 * 2048**3 / seconds["gemm"] / 1e9}


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--context", type=int, default=7000)
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()
    report: dict[str, object] = {"isa": runtime().isa, "threads": runtime().threads}
    for name, (heads, kv_heads) in {"9:3": (9, 3), "9:9": (9, 9), "12:3": (12, 3), "24:3": (24, 3)}.items():
        for dtype in (torch.bfloat16, torch.float32):
            key = f"attention {name} {str(dtype).removeprefix('torch.')}"
            report[key] = attention(heads, kv_heads, args.batch, args.context, dtype, args.rounds)
            print(key, {k: round(v, 3) for k, v in report[key].items()}, flush=True)
            if name != "9:3":
                break
    for key, measure in (("weights", weights), ("prefill", prefill)):
        report[key] = measure(args.rounds)
        print(key, {k: round(v, 3) for k, v in report[key].items()}, flush=True)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
