"""``longdraft doctor``: what this machine has, what LongDraft will use of it, and a short self-test."""

from __future__ import annotations

import os
import platform

import typer

from longdraft.cli import options

PACKAGES = ("torch", "numpy", "safetensors", "tokenizers", "gguf", "huggingface-hub", "transformers")


def doctor(json: options.Json = False) -> None:
    """Versions, processor, memory, kernels and models found, and a self-test of a few seconds."""
    import json as jsonlib

    from rich.console import Console
    from rich.table import Table

    report = {"versions": _versions(), "machine": _machine(), "kernels": _kernels(), "models": _models()}
    report["self_test"] = _self_test()
    if json:
        print(jsonlib.dumps(report))
    else:
        for section, rows in report.items():
            table = Table(title=section.replace("_", "-"), show_header=False, title_justify="left")
            table.add_column(style="bold")
            table.add_column(overflow="fold")
            for key, value in rows.items():
                table.add_row(key, str(value))
            Console().print(table)
    if not report["self_test"]["passed"]:
        raise typer.Exit(1)


def _versions() -> dict[str, str]:
    from longdraft.bench.machine import versions

    return {**dict.fromkeys(("longdraft", "python", *PACKAGES), "not installed"), **versions(PACKAGES)}


def _machine() -> dict[str, object]:
    import psutil
    import torch

    memory = psutil.virtual_memory()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "cores usable": len(psutil.Process().cpu_affinity())
        if hasattr(psutil.Process, "cpu_affinity")
        else os.cpu_count(),
        "threads of torch": torch.get_num_threads(),
        "memory": f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB free",
        "gpu": ", ".join(gpus) or "none (not needed)",
    }


def _kernels() -> dict[str, str]:
    from longdraft.engine.sizing import auto_dtype, resolve_device
    from longdraft.kernels.dispatch import IMPLEMENTATIONS, CallSpec, explain
    from longdraft.kernels.native import describe
    from longdraft.models.registry import tiny_config

    device = resolve_device("auto")
    dtype = auto_dtype(tiny_config(head_dim=64), device, 16)
    spec = CallSpec(device.type, dtype, dtype, head_dim=64, group_size=3, page_size=16)
    kernels = {op: "; ".join(f"{name}: {verdict}" for name, verdict in explain(op, spec)) for op in IMPLEMENTATIONS}
    return {"native": describe(), **kernels, "auto dtype": str(dtype).removeprefix("torch.")}


def _models() -> dict[str, str]:
    from longdraft.checkpoint.bundled import INSTALL, NAME, find_bundled

    path = find_bundled()
    return {NAME: str(path) if path else f"not installed; run: {INSTALL}"}


def _self_test() -> dict[str, object]:
    """A tiny random model in float64: a crowded, preempting engine must return what each request gives alone."""
    import time

    import torch

    from longdraft.config import EngineConfig
    from longdraft.engine.engine import Engine
    from longdraft.models.registry import RandomWeights, tiny_config
    from longdraft.models.transformer import Transformer
    from longdraft.sampling_params import SamplingParams

    started = time.perf_counter()
    config = tiny_config()
    model = Transformer(config, RandomWeights(config, seed=6), dtype=torch.float64)

    def outputs(prompts: list[list[int]], num_pages: int) -> tuple[list[list[int]], int]:
        engine = Engine(model, EngineConfig(max_model_len=256, num_pages=num_pages))
        got = {engine.add(ids, SamplingParams(seed=len(ids), max_tokens=40)): [] for ids in prompts}
        while engine.has_work:
            for output in engine.step():
                got[output.seq.id] += output.tokens
        return list(got.values()), engine.stats.preemptions

    prompts = [[(7 * i + n) % 128 for i in range(n)] for n in (1, 16, 33, 70)]
    alone = [outputs([ids], num_pages=16)[0][0] for ids in prompts]
    crowded, preemptions = outputs(prompts, num_pages=10)
    passed = crowded == alone and preemptions > 0
    result = f"batched output ({preemptions} preemptions) " + ("equals" if passed else "differs from") + " each alone"
    return {"passed": passed, "result": result, "seconds": round(time.perf_counter() - started, 2)}
