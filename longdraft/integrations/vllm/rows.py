"""The rows of a step that draft: how many tokens each, over how much, and as what they are drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from longdraft.sampling_params import SamplingParams


@dataclass(frozen=True)
class Row:
    """``index`` in vLLM's batch, tokens ``known``, the ``newest`` of them; it drafts ``wanted`` tokens over ``budget``.

    ``free``: nobody named a γ, so that fewer may be chosen. ``end``: tokens that the request comes to at most.
    """

    index: int
    request: str
    known: int
    newest: int
    wanted: int
    budget: int
    free: bool
    end: int
    params: SamplingParams
    seed: int | None


def rows_of(
    runner: Any,
    sampled: list[list[int]],
    num_tokens: Any,
    token_ids: Any,
    most: int,
    settings: Callable[[Any], tuple[int | None, int]],
) -> list[Row]:
    """Rows of ``runner``'s batch that got a token in this step; they want 0 tokens where there is no room to draft.

    ``num_tokens [R]``, ``token_ids [R, …]``: vLLM's, with the sampled tokens. ``settings``: γ, at most and without one
    ``most``, and budget of a request. Rows whose prompt is not finished have sampled nothing. A row ends at the slots
    it has (stock vLLM reserves none for drafts), and one token before its request's or the model's length, which
    verification's own token takes.
    """
    table, rows = runner.input_batch.block_table[0], []
    for index, tokens in enumerate(sampled):
        if not tokens:
            continue
        name = runner.input_batch.req_ids[index]
        request, known = runner.requests[name], int(num_tokens[index])
        gamma, budget = settings(request)
        params = request.sampling_params
        asked = params.max_tokens or runner.max_model_len
        end = min(runner.max_model_len, request.num_prompt_tokens + asked)
        slots = int(table.num_blocks_per_row[index]) * table.block_size
        wanted = min(most if gamma is None else gamma, most, slots - (known - 1), end - known - 1)
        newest = int(token_ids[index, known - 1])
        drawn = _drawn_as(params.temperature, params.top_k, params.top_p)
        free = gamma is None
        rows.append(Row(index, name, known, newest, max(0, wanted), budget, free, end, drawn, params.seed))
    return rows


@lru_cache(maxsize=256)
def _drawn_as(temperature: float, top_k: int, top_p: float) -> SamplingParams:
    """As vLLM filters by these; greedy below its smallest temperature."""
    if temperature < 1e-5:
        return SamplingParams(temperature=0.0)
    return SamplingParams(temperature=temperature, top_k=max(0, top_k), top_p=top_p)
