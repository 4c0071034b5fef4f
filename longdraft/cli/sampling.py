"""Options that say how tokens are drawn, and the parameters they make: what is left out comes from the model."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from longdraft.llm import LLM
    from longdraft.sampling_params import SamplingParams

FROM_MODEL = "Left out: the model's own setting"

Temperature = Annotated[float | None, typer.Option(help=f"0 is greedy. {FROM_MODEL}, else 0.")]
TopK = Annotated[int | None, typer.Option(help="Keep the k most probable tokens; 0 keeps all.")]
TopP = Annotated[float | None, typer.Option(help="Keep the most probable tokens that hold this much probability.")]
MinP = Annotated[float | None, typer.Option(help="Drop tokens below this share of the most probable one.")]
Repetition = Annotated[float | None, typer.Option("--repetition-penalty", help="Above 1: less of what was said.")]
Presence = Annotated[float, typer.Option("--presence-penalty", help="Off the logits of tokens in the output.")]
Frequency = Annotated[float, typer.Option("--frequency-penalty", help="The same, for each time they stand there.")]
Seed = Annotated[int | None, typer.Option(help="Makes a sampled output repeatable. Left out: a new one.")]


def sampling_params(llm: LLM, **given: object) -> SamplingParams:
    """The options that were ``given`` (not None), over the model's generation_config, over greedy decoding.

    A sampled request without a seed gets a new one, which the reports show.
    """
    base, chosen = llm.default_sampling_params, {name: value for name, value in given.items() if value is not None}
    if "temperature" not in llm.checkpoint.generation_defaults:
        base = replace(base, temperature=0.0)
    params = replace(base, **chosen)
    if params.greedy:
        idle = [f"--{name.replace('_', '-')}" for name in ("top_k", "top_p", "min_p", "seed") if name in chosen]
        if idle:
            note = f"note: at temperature 0 {' and '.join(idle)} change nothing"
            typer.secho(note, fg="yellow", err=True)
    return params if params.greedy or params.seed is not None else replace(params, seed=secrets.randbelow(2**31))
