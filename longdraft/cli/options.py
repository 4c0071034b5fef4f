"""Options that several verbs share, and how a verb makes its ``LLM``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longdraft.errors import InvalidValueError

if TYPE_CHECKING:
    from longdraft.llm import LLM

Model = Annotated[
    str | None,
    typer.Option("--model", "-m", help="Folder, GGUF file or hub id. Left out: the embedded SmolLM2-135M-Instruct."),
]
TokenizerFolder = Annotated[
    str | None, typer.Option("--tokenizer", help="Folder with another tokenizer.json. Left out: the model's own.")
]
Dtype = Annotated[
    str,
    typer.Option(help="Stored type of the weights: float32, bfloat16, float64, or auto (bfloat16 on native kernels)."),
]
KVDtype = Annotated[str | None, typer.Option(help="Type of the cached K and V. Left out: --dtype.")]
KVFormat = Annotated[
    str | None,
    typer.Option(help="Format that all but the newest K and V are kept in: quant8. Lossy. Left out: as computed."),
]
MaxModelLen = Annotated[int | None, typer.Option(help="Longest prompt + output in tokens. Left out: the model's own.")]
KVMemory = Annotated[int | None, typer.Option(help="Bytes of KV cache. Left out: 40 % of what the weights leave free.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
MaxSeqs = Annotated[int, typer.Option("--max-num-seqs", help="Most requests decoded together.")]
MaxBatchedTokens = Annotated[int, typer.Option("--max-num-batched-tokens", help="Prompt tokens per prefill step.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the JSON there.")]
Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw the speed-ups.")]
Download = Annotated[bool, typer.Option("--download", help="Allow the network for a hub id that is not cached.")]


def make_llm(model: str | None, **settings: object) -> LLM:
    """``LLM(model, **settings)`` with a progress bar."""
    from longdraft.cli.progress import Progress
    from longdraft.llm import LLM

    with Progress() as progress:
        return LLM(model, **settings, on_load=lambda done, total: progress.update("load", done, total, "layers"))


def check_outputs(json: Path | None, plot: Path | None) -> None:
    """Before any work: can the results be written?"""
    for option, file in (("--json", json), ("--plot", plot)):
        if file and not file.absolute().parent.is_dir():
            raise InvalidValueError(option, str(file), "must lie in a folder that exists")
    if plot:
        from longdraft.bench.plot import check_plot

        check_plot(plot)
