"""``longdraft generate``: complete one or more prompts from the command line, files or stdin."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longdraft.cli import drafting, options, sampling
from longdraft.config import DEFAULT_DRAFT
from longdraft.errors import InvalidValueError

if TYPE_CHECKING:
    from longdraft.config import AutoDraft, DraftConfig
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
    min_tokens: Annotated[int, typer.Option(help="No end before so many new tokens.")] = 0,
    n: Annotated[int, typer.Option("-n", "--n", help="Completions per prompt, each with a seed of its own.")] = 1,
    temperature: sampling.Temperature = None,
    top_k: sampling.TopK = None,
    top_p: sampling.TopP = None,
    min_p: sampling.MinP = None,
    repetition_penalty: sampling.Repetition = None,
    presence_penalty: sampling.Presence = 0.0,
    frequency_penalty: sampling.Frequency = 0.0,
    seed: sampling.Seed = None,
    stop: Annotated[list[str] | None, typer.Option(help="End at this text; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past end-of-text tokens.")] = False,
    draft: drafting.Name = DEFAULT_DRAFT,
    kv: drafting.Kv = None,
    budget: drafting.Budget = 512,
    refresh: drafting.Refresh = None,
    gamma: drafting.Gamma = 4,
    sampling_rule: drafting.Rule = "coupled",
    compare: Annotated[bool, typer.Option("--compare", help="Decode plainly and with the draft, and compare.")] = False,
    dtype: options.Dtype = "auto",
    kv_dtype: options.KVDtype = None,
    kv_format: options.KVFormat = None,
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

    config = drafting.draft_config(draft, budget, gamma, sampling_rule, kv, refresh)
    if compare:
        drafting.require_draft(config)
        if n > 1:
            raise InvalidValueError("--n", n, "must be 1 with --compare")
    prompts = read_prompts(prompt, file or [])
    llm = options.make_llm(
        model,
        draft=config,
        tokenizer=tokenizer,
        dtype=dtype,
        kv_dtype=kv_dtype,
        kv_format=kv_format,
        device=device,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        download=download,
    )
    params = sampling.sampling_params(
        llm,
        n=n,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
        stop=tuple(stop or ()),
    )
    sources, texts = zip(*prompts, strict=True)
    if compare:
        _compare(llm, list(sources), list(texts), params, drafting.require_draft(llm.draft), chat, json)
        return
    with Progress() as progress:
        on_step = track(progress, len(texts) * n * max_tokens)
        if chat:
            results = llm.chat([[{"role": "user", "content": text}] for text in texts], params, on_step=on_step)
        else:
            results = llm.generate(texts, params, on_step=on_step)
    _show(llm, list(zip(sources, results, strict=True)), params.seed, json, stats)
    failed = [output.error for result in results for output in result.outputs if output.error]
    if failed:
        typer.secho(f"error: {len(failed)} of {n * len(results)} completions failed: {failed[0]}", fg="red", err=True)
        raise typer.Exit(1)


def _compare(
    llm: LLM,
    sources: list[str],
    texts: list[str],
    params: SamplingParams,
    draft: DraftConfig | AutoDraft,
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
                "index": output.index,
                "text": output.text,
                "token_ids": output.token_ids,
                "finish_reason": output.finish_reason,
                "error": output.error,
                "prompt_tokens": result.stats.prompt_tokens,
            }
            for source, result in results
            for output in result.outputs
        ]
        print(jsonlib.dumps({**where, "seed": seed, "results": rows, "speculative" if llm.draft else "plain": run}))
        return
    shown = [(source, output) for source, result in results for output in result.outputs]
    for source, output in shown:
        if len(shown) > 1:
            number = f", completion {output.index + 1}" if len(shown) > len(results) else ""
            typer.echo(f"--- {source}{number} ({output.finish_reason})")
        typer.echo(output.text)
    if stats:
        if seed is not None:
            where = {**where, "seed": seed}
        Console(stderr=True).print(table("", run, where))
