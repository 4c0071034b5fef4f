"""``longdraft generate``: complete one or more prompts from the command line, files or stdin."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longdraft.cli import drafting, options
from longdraft.errors import InvalidValueError

if TYPE_CHECKING:
    from longdraft.config import DraftConfig
    from longdraft.llm import LLM
    from longdraft.outputs import RequestOutput
    from longdraft.sampling_params import SamplingParams

MAX_PROMPT_BYTES = 64 * 2**20


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The text to continue. Left out or '-': read from stdin.")
    ] = None,
    file: Annotated[
        list[Path] | None, typer.Option("--file", "-f", help="A prompt from a file; may be repeated.")
    ] = None,
    model: options.Model = None,
    tokenizer: options.TokenizerFolder = None,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap each prompt as a user's message.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Most new tokens per prompt.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k most probable tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the most probable tokens that hold this much probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the most probable one.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes a sampled output repeatable. Left out: a new one.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End at this text; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past end-of-text tokens.")] = False,
    draft: drafting.Kv = "off",
    budget: drafting.Budget = 512,
    gamma: drafting.Gamma = 4,
    sampling_rule: drafting.Rule = "coupled",
    compare: Annotated[bool, typer.Option("--compare", help="Decode plainly and with the draft, and compare.")] = False,
    dtype: options.Dtype = "auto",
    kv_dtype: options.KVDtype = None,
    max_model_len: options.MaxModelLen = None,
    kv_cache_memory_bytes: options.KVMemory = None,
    max_num_seqs: options.MaxSeqs = 256,
    max_num_batched_tokens: options.MaxBatchedTokens = 512,
    device: options.Device = "auto",
    json: options.Json = False,
    stats: Annotated[bool, typer.Option("--stats/--no-stats", help="Close with figures on stderr.")] = True,
    download: options.Download = False,
) -> None:
    """Complete prompts. Text goes to stdout; progress and figures go to stderr."""
    from longdraft.cli.progress import Progress, track
    from longdraft.sampling_params import SamplingParams

    if temperature > 0 and seed is None:
        seed = secrets.randbelow(2**31)
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        max_tokens=max_tokens,
        seed=seed,
        ignore_eos=ignore_eos,
        stop=tuple(stop or ()),
    )
    if params.greedy and (top_k > 0 or top_p < 1 or min_p > 0 or seed is not None):
        typer.secho("note: at temperature 0 the other sampling options change nothing", fg="yellow", err=True)
    config = drafting.draft_config(draft, budget, gamma, sampling_rule)
    if compare:
        drafting.require_draft(config)
    prompts = read_prompts(prompt, file or [])
    llm = options.make_llm(
        model,
        draft=config,
        tokenizer=tokenizer,
        dtype=dtype,
        kv_dtype=kv_dtype,
        device=device,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        download=download,
    )
    sources, texts = zip(*prompts, strict=True)
    if compare:
        _compare(llm, list(sources), list(texts), params, config, chat, json)
        return
    with Progress() as progress:
        on_step = track(progress, len(texts) * max_tokens)
        if chat:
            results = llm.chat([[{"role": "user", "content": text}] for text in texts], params, on_step=on_step)
        else:
            results = llm.generate(texts, params, on_step=on_step)
    _show(llm, list(zip(sources, results, strict=True)), seed, json, stats)
    failed = [result.outputs[0].error for result in results if result.outputs[0].error]
    if failed:
        typer.secho(f"error: {len(failed)} of {len(results)} requests failed: {failed[0]}", fg="red", err=True)
        raise typer.Exit(1)


def _compare(
    llm: LLM,
    sources: list[str],
    texts: list[str],
    params: SamplingParams,
    draft: DraftConfig,
    chat: bool,
    json: bool,
) -> None:
    """Decode both ways, show the speculative text and the table; exit status 1 if the promise did not hold."""
    import json as jsonlib

    from rich.console import Console

    from longdraft.cli.progress import Progress, track_comparison
    from longdraft.cli.report import setting
    from longdraft.compare import compare

    prompts = [llm.encode_chat([{"role": "user", "content": t}]) if chat else llm.encode(t) for t in texts]
    with Progress() as progress:
        result = compare(llm, prompts, params, draft, track_comparison(progress))
    where = setting(llm)
    if json:
        rows = [{"source": source, "text": text} for source, text in zip(sources, result.texts, strict=True)]
        print(jsonlib.dumps({**where, "draft": vars(draft), "results": rows, **result.report()}))
    else:
        for source, text in zip(sources, result.texts, strict=True):
            typer.echo(f"--- {source}\n{text}" if len(texts) > 1 else text)
    console = Console(stderr=True)
    console.print(drafting.comparison_table(result, draft, where))
    if note := drafting.note_on_speed(result):
        console.print(note, style="dim")
    if not result.held:
        raise typer.Exit(1)


def read_prompts(prompt: str | None, paths: list[Path]) -> list[tuple[str, str]]:
    """(source, text) of the prompts of the command line: the argument or stdin, then each file.

    One newline at the end of a file or of stdin, and a byte-order mark, belong to the file and not to the prompt.
    """
    prompts = []
    if prompt == "-" or (prompt is None and not paths):
        if sys.stdin is None or (prompt is None and sys.stdin.isatty()):
            raise InvalidValueError(
                "prompt", prompt, "must be given", "Pass it as an argument, by --file, or on stdin."
            )
        prompts.append(("stdin", _decode("stdin", sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1))))
    elif prompt is not None:
        prompts.append(("argument", prompt))
    for path in paths:
        try:
            with path.open("rb") as file:
                prompts.append((str(path), _decode(str(path), file.read(MAX_PROMPT_BYTES + 1))))
        except OSError as error:
            raise InvalidValueError("--file", str(path), f"must be a readable file ({error.strerror})") from error
    return prompts


def _decode(name: str, data: bytes) -> str:
    if len(data) > MAX_PROMPT_BYTES:
        raise InvalidValueError("prompt", name, f"must be at most {MAX_PROMPT_BYTES // 2**20} MiB")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidValueError("prompt", name, f"must be UTF-8 text ({error.reason} at byte {error.start})") from error
    text = text.removesuffix("\n").removesuffix("\r")
    if not text:
        raise InvalidValueError("prompt", name, "must not be empty")
    return text


def _show(llm: LLM, results: list[tuple[str, RequestOutput]], seed: int | None, json: bool, stats: bool) -> None:
    import json as jsonlib

    from rich.console import Console

    from longdraft.cli.report import figures, setting, table

    run, where = figures(llm, [result for _, result in results]), setting(llm)
    if json:
        rows = [
            {
                "source": source,
                "text": result.text,
                "token_ids": result.outputs[0].token_ids,
                "finish_reason": result.outputs[0].finish_reason,
                "error": result.outputs[0].error,
                "prompt_tokens": result.stats.prompt_tokens,
            }
            for source, result in results
        ]
        print(jsonlib.dumps({**where, "seed": seed, "results": rows, "speculative" if llm.draft else "plain": run}))
        return
    for source, result in results:
        if len(results) > 1:
            typer.echo(f"--- {source} ({result.outputs[0].finish_reason})")
        typer.echo(result.text)
    if stats:
        if seed is not None:
            where = {**where, "seed": seed}
        Console(stderr=True).print(table("", run, where))
