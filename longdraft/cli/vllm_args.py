"""``longdraft vllm-args``: how to start stock vLLM with a LongDraft draft."""

from __future__ import annotations

from typing import Annotated

import typer


def vllm_args(
    model: Annotated[str, typer.Argument(help="The model, as vllm serve takes it.")],
    draft: Annotated[
        str, typer.Option(help="streaming_llm, or auto: γ is chosen at every step, by what was timed at the start.")
    ] = "streaming_llm",
    gamma: Annotated[
        int | None,
        typer.Option(help="Drafted tokens a round, 3 (auto: at most, 8); requests may ask for fewer. 0: no draft."),
    ] = None,
    budget: Annotated[int, typer.Option(help="Recent tokens that a draft reads, in whole blocks.")] = 512,
    sinks: Annotated[int, typer.Option(help="First tokens that it reads besides, in whole blocks.")] = 16,
    device: Annotated[str, typer.Option(help="cpu or gpu.")] = "gpu",
    attention: Annotated[str, typer.Option(help="vllm, or native: LongDraft's own kernels (cpu).")] = "vllm",
    weights: Annotated[str, typer.Option(help="The draft's: target, or int8 (with --attention native).")] = "target",
    selection: Annotated[
        str, typer.Option(help="Blocks it reads: streaming_llm, or pages: older ones by their keys (with native, too).")
    ] = "streaming_llm",
    graphs: Annotated[bool, typer.Option(help="Draft steps run as the CUDA graphs that vLLM has (gpu).")] = True,
    json: Annotated[bool, typer.Option("--json", help="Keyword arguments of vllm.LLM instead.")] = False,
) -> None:
    """Print the line for ``vllm serve`` (vLLM 0.32 or 0.33; not imported here)."""
    import json as jsonlib

    from longdraft.integrations.vllm.args import engine_args, serve_line
    from longdraft.integrations.vllm.settings import Settings

    reads = {"budget": budget, "sinks": sinks, "selection": selection}
    settings = Settings(draft, **reads, attention=attention, weights=weights, graphs=graphs)
    if json:
        print(jsonlib.dumps({"model": model, **engine_args(settings, gamma, device)}))
    else:
        print(serve_line(model, settings, gamma, device))
