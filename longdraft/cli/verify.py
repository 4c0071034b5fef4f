"""``longdraft verify``: reproduces the proofs of losslessness on the user's own model and machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from longdraft.cli import drafting, options
from longdraft.config import AutoDraft
from longdraft.errors import InvalidValueError

if TYPE_CHECKING:
    from longdraft.llm import LLM

PROMPTS, NEW_TOKENS = 4, 24
Check = dict[str, object]


def verify(
    model: options.Model = None,
    tokenizer: options.TokenizerFolder = None,
    draft_model: Annotated[str | None, typer.Option("--draft-model", help="A small model to check as a draft.")] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Length of the prompts in tokens.")] = 400,
    budget: drafting.Budget = 128,
    refresh: drafting.Refresh = None,
    gamma: drafting.Gamma = 3,
    dtype: options.Dtype = "auto",
    kv_format: options.KVFormat = None,
    device: options.Device = "auto",
    json: options.Json = False,
    download: options.Download = False,
) -> None:
    """Check on your own model that speculation changes nothing: every draft, greedy and sampled, in a ragged batch."""
    import json as jsonlib

    from rich.console import Console
    from rich.table import Table

    from longdraft.drafts.registry import NAMED
    from longdraft.llm_draft import resolve_draft

    if isinstance(resolve_draft(draft_model), AutoDraft):
        raise InvalidValueError("--draft-model", draft_model, "must be a model's path or name")
    again = None if refresh is None else drafting.parse_refresh(refresh, NAMED.values())
    settings = {"tokenizer": tokenizer, "dtype": dtype, "kv_format": kv_format, "device": device, "download": download}
    llm = options.make_llm(model, draft=draft_model, **settings)
    lossy = "" if llm.model.lossless else f"; lossy: relative to the model with its KV in {kv_format}"
    table = Table(title=f"{llm.checkpoint.name}: {llm.tier}{lossy}", title_justify="left")
    for name in ("check", "passed", "figure"):
        table.add_column(name)
    checks = []
    with Console(stderr=True).status("checking") as status:
        for check in run_checks(llm, prompt_tokens, budget, gamma, again):
            checks.append(check)
            status.update(f"checking: {check['name']} done")
            table.add_row(str(check["name"]), "yes" if check["passed"] else "NO", _shown(check["figure"]))
    if json:
        print(
            jsonlib.dumps(
                {"tier": llm.tier, "exactness": llm.exactness, "model": llm.checkpoint.name, "checks": checks}
            )
        )
    else:
        Console().print(table)
    if not all(check["passed"] for check in checks):
        raise typer.Exit(1)


def run_checks(llm: LLM, prompt_tokens: int, budget: int, gamma: int, refresh: int | str | None) -> Iterator[Check]:
    """The checks, one by one as they are done."""
    from longdraft.compare import compare
    from longdraft.drafts.registry import NAMED
    from longdraft.sampling_params import SamplingParams

    prompts = _prompts(llm, prompt_tokens)
    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    sampled = SamplingParams(
        temperature=1, seed=7, max_tokens=NEW_TOKENS, ignore_eos=True, top_p=0.95, repetition_penalty=1.1
    )
    drafts = {**NAMED, **({llm.draft.label: llm.draft} if llm.draft else {})}
    for kv, named in drafts.items():
        if named.weights == "target@int8" and not llm.model.fused:
            continue  # it exists on the native kernels only
        draft = replace(named, budget=budget, gamma=gamma, refresh=refresh)
        for name, params in (("greedy", greedy), ("sampled", sampled)):
            result = compare(llm, prompts, params, draft)
            fast, wanted = result.speculative, len(prompts) * NEW_TOKENS
            figure = {
                "tokens": fast["tokens"],
                "differences": len(result.divergences),
                "largest_margin": max((d["margin"] or 0.0 for d in result.divergences), default=0.0),
                "acceptance": fast["accepted"] / fast["drafted"] if fast["drafted"] else 0.0,
            }
            drafted = fast["drafted"] > 0 or kv == "ngram"  # which has nothing to say on a text that never repeats
            passed = result.held and fast["tokens"] == result.plain["tokens"] == wanted and drafted
            yield {"name": f"{kv}, {name}: equal to plain decoding", "passed": passed, "figure": figure}
            if kv == "full":
                # A near-tie may cost a proposal, and with it the rest of its block: refusals count, not tokens.
                allowed = 0.0 if llm.tier == "identical" else 0.05
                refused = fast["rejections"] / max(1, fast["rejections"] + fast["accepted"])
                passed = fast["accepted"] > 0 and refused <= allowed
                yield {"name": f"{kv}, {name}: every proposal accepted", "passed": passed, "figure": 1 - refused}
    yield from _company(llm, prompts, greedy)
    store = llm.engine.store
    held = store.num_pages - store.num_free_pages
    yield {"name": "no KV page left behind", "passed": held == 0, "figure": held}


def _company(llm: LLM, prompts: list[list[int]], params: object) -> Iterator[Check]:
    """Each request alone against all together: the company must not matter beyond near-ties."""
    from longdraft.exactness import certify, rounding

    together = llm.generate(prompts, params)
    alone = [llm.generate([ids], params)[0] for ids in prompts]
    epsilon, found = 4 * rounding(llm.model, prompts), []
    for ids, x, y in zip(prompts, together, alone, strict=True):
        outputs = (x.outputs[0].token_ids, y.outputs[0].token_ids)
        found.append(certify(llm.model, ids, outputs, params, 0, epsilon if llm.tier == "near-tie" else 0.0))
    differences = [d for d in found if d]
    complete = all(r.stats.output_tokens == NEW_TOKENS for r in together + alone)
    figure = {
        "differences": len(differences),
        "largest_margin": max((d["margin"] or 0.0 for d in differences), default=0.0),
        "rounding": epsilon / 4,
    }
    passed = complete and (llm.tier == "near-tie" and all(d["near_tie"] for d in differences) or not differences)
    yield {"name": "a request's company changes nothing", "passed": passed, "figure": figure}


def _prompts(llm: LLM, prompt_tokens: int) -> list[list[int]]:
    """Ragged prompts: passages of a novel, or random ids for a model without a tokenizer."""
    import torch

    from longdraft.cli.demo import passages

    limit = llm.engine.config.max_tokens_per_request - NEW_TOKENS
    length = max(1, min(prompt_tokens, limit))
    if llm.tokenizer is None:
        vocab = llm.model.config.vocab_size
        rows = torch.randint(0, vocab, (PROMPTS, length), generator=torch.Generator().manual_seed(0)).tolist()
    else:
        rows = passages(llm, PROMPTS, length, NEW_TOKENS)
    return [row[: max(1, length - 37 * i)] for i, row in enumerate(rows)]


def _shown(figure: object) -> str:
    if isinstance(figure, dict):
        return ", ".join(f"{name} {_shown(value)}" for name, value in figure.items())
    return f"{figure:.3g}" if isinstance(figure, float) else str(figure)
