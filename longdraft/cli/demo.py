"""``longdraft demo``: a batch of long prompts from a novel, continued by a real model."""

from __future__ import annotations

from typing import Annotated

import typer

from longdraft.cli import options

NOVEL = "austen_pride_and_prejudice"


def demo(
    model: options.Model = None,
    tokenizer: options.TokenizerFolder = None,
    batch: Annotated[int, typer.Option(help="Prompts decoded together.")] = 4,
    prompt_tokens: Annotated[int, typer.Option(help="Length of each prompt in tokens.")] = 4000,
    max_tokens: Annotated[int, typer.Option(help="New tokens per prompt.")] = 96,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    json: options.Json = False,
    download: options.Download = False,
) -> None:
    """Decode a batch of real long prompts (passages of a public-domain novel) and show what came out, and how fast."""
    import json as jsonlib

    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    from longdraft.cli.progress import Progress, track
    from longdraft.cli.report import figures, setting, table
    from longdraft.config import SamplingParams

    console = Console(stderr=json)  # with --json, stdout is for the JSON alone
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    llm = options.make_llm(model, tokenizer=tokenizer, dtype=dtype, device=device, download=download)
    prompts = passages(llm, batch, prompt_tokens, max_tokens)
    sizes = f"{batch} passages of {prompt_tokens:,} tokens by {max_tokens} tokens each"
    console.print(f"[bold]{llm.checkpoint.name}[/] continues {sizes}")
    with Progress() as progress:
        results = llm.generate(prompts, params, on_step=track(progress, batch * max_tokens))
    for i, result in enumerate(results, start=1):
        before = llm.tokenizer.decode(result.prompt_token_ids[-40:])
        text = Text.assemble((f"… {before}", "dim"), result.text)
        console.print(Panel(text, title=f"passage {i}", title_align="left"))
    run, where = figures(llm, results), setting(llm)
    console.print(table("plain decoding", run, where))
    if json:
        print(
            jsonlib.dumps(
                {**where, "batch": batch, "prompt_tokens": prompt_tokens, "max_tokens": max_tokens, "plain": run}
            )
        )


def passages(llm, batch: int, prompt_tokens: int, max_tokens: int) -> list[list[int]]:  # noqa: ANN001 - LLM, lazily
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
