"""``longdraft demo``: a batch of long prompts from a novel, continued plainly and speculatively by a real model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from longdraft.cli import drafting, options

if TYPE_CHECKING:
    from longdraft.llm import LLM

NOVEL = "austen_pride_and_prejudice"
FALLBACK = "streaming_llm"  # drafts where 8-bit weights have no kernels


def demo(
    model: options.Model = None,
    tokenizer: options.TokenizerFolder = None,
    batch: Annotated[int, typer.Option(help="Prompts decoded together.")] = 4,
    prompt_tokens: Annotated[int, typer.Option(help="Length of each prompt in tokens.")] = 4000,
    max_tokens: Annotated[int, typer.Option(help="New tokens per prompt.")] = 96,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    draft: Annotated[
        str | None,
        typer.Option(
            help=f"Who proposes tokens: {drafting.NAMES}, or {drafting.OWN}. Left out: int8 where the native kernels "
            f"run, else {FALLBACK}."
        ),
    ] = None,
    kv: drafting.Kv = None,
    budget: drafting.Budget = 256,
    refresh: drafting.Refresh = None,
    gamma: drafting.Gamma = 3,
    sampling_rule: drafting.Rule = "coupled",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    json: options.Json = False,
    download: options.Download = False,
) -> None:
    """Decode a batch of real long prompts (passages of a public-domain novel), plainly and with a draft, and compare.

    Exit status 0 only if the outputs are equal as far as the exactness tier promises.
    """
    import json as jsonlib

    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    from longdraft.cli.progress import Progress, track_comparison
    from longdraft.cli.report import setting
    from longdraft.compare import compare
    from longdraft.sampling_params import SamplingParams

    console = Console(stderr=json)  # with --json, stdout is for the JSON alone
    settings = (budget, gamma, sampling_rule, kv, refresh)
    asked = drafting.require_draft(drafting.draft_config(draft or FALLBACK, *settings))  # before a model is read
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True, seed=0)
    named = {"draft": asked if draft else None, "tokenizer": tokenizer}
    llm = options.make_llm(model, **named, dtype=dtype, device=device, download=download)
    config = llm.resolve(asked if draft or not llm.model.fused else drafting.draft_config("int8", *settings))
    prompts = passages(llm, batch, prompt_tokens, max_tokens)
    sizes = f"{batch} passages of {prompt_tokens:,} tokens by {max_tokens} tokens each"
    console.print(f"[bold]{llm.checkpoint.name}[/] continues {sizes}")
    with Progress() as progress:
        result = compare(llm, prompts, params, config, track_comparison(progress))
    for i, (ids, text) in enumerate(zip(result.prompts, result.texts, strict=True), start=1):
        shown = Text.assemble((f"… {llm.tokenizer.decode(ids[-40:])}", "dim"), text)
        console.print(Panel(shown, title=f"passage {i}", title_align="left"))
    where = setting(llm)
    console.print(drafting.comparison_table(result, config, where))
    if note := drafting.note_on_speed(result):
        console.print(note, style="dim")
    if json:
        sizes = {"batch": batch, "prompt_tokens": prompt_tokens, "max_tokens": max_tokens}
        print(jsonlib.dumps({**where, **sizes, "draft": vars(config), **result.report()}))
    if not result.held:
        raise typer.Exit(1)


def passages(llm: LLM, batch: int, prompt_tokens: int, max_tokens: int) -> list[list[int]]:
    """``batch`` windows of ``prompt_tokens`` token ids, spread evenly over the novel.

    Raises ``ContextLengthError`` if prompt and continuation do not fit, ``InvalidValueError`` if the novel is shorter.
    """
    import lzma
    from importlib.resources import files

    from longdraft.config import as_int
    from longdraft.errors import ContextLengthError, InvalidValueError
    from longdraft.prompts import require

    as_int("--batch", batch, 1, 1024)
    as_int("--prompt-tokens", prompt_tokens, 1, 2**31)
    limit = llm.engine.config.max_tokens_per_request
    if prompt_tokens + max_tokens > limit:
        fix = "Lower --prompt-tokens or --max-tokens."
        raise ContextLengthError("prompt + new tokens", prompt_tokens + max_tokens, f"must be at most {limit}", fix)
    packed = (files("longdraft") / "data" / f"{NOVEL}.txt.xz").read_bytes()
    ids = require(llm.tokenizer).encode(lzma.decompress(packed).decode())
    if prompt_tokens > len(ids):
        raise InvalidValueError("--prompt-tokens", prompt_tokens, f"must be at most {len(ids)}, the novel's length")
    step = (len(ids) - prompt_tokens) // batch
    return [ids[i * step : i * step + prompt_tokens] for i in range(batch)]
