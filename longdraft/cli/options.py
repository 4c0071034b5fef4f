"""Options that several verbs share, and how a verb makes its ``LLM``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from longdraft.llm import LLM

Model = Annotated[
    str | None,
    typer.Option("--model", "-m", help="Folder, GGUF file or hub id. Left out: the embedded SmolLM2-135M-Instruct."),
]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float64.")]
KVDtype = Annotated[str | None, typer.Option(help="Type of the cached K and V. Left out: --dtype.")]
MaxModelLen = Annotated[int | None, typer.Option(help="Longest prompt + output in tokens. Left out: the model's own.")]
KVMemory = Annotated[int | None, typer.Option(help="Bytes of KV cache. Left out: 40 % of the free memory.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")]
Download = Annotated[bool, typer.Option("--download", help="Allow the network for a hub id that is not cached.")]


def make_llm(
    model: str | None,
    dtype: str = "auto",
    kv_dtype: str | None = None,
    max_model_len: int | None = None,
    kv_cache_memory_bytes: int | None = None,
    download: bool = False,
) -> LLM:
    """Load a model with a progress line; warnings of its files go to stderr."""
    from longdraft.cli.progress import Progress
    from longdraft.llm import LLM

    with Progress() as progress:
        llm = LLM(
            model,
            dtype=dtype,
            kv_dtype=kv_dtype,
            max_model_len=max_model_len,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            download=download,
            on_load=lambda done, total: progress.update("load", done, total, "layers"),
        )
    for warning in llm.checkpoint.warnings:
        typer.secho(f"warning: {warning}", fg="yellow", err=True)
    return llm
