"""The rows of a step that draft: how many tokens each, over how much, and as what they are drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from longdraft.sampling_params import SamplingParams


@dataclass(frozen=True)
class Row:
    """``index`` in vLLM's batch, tokens ``known``, the ``newest`` of them, what it may draft over which ``budget``."""

    index: int
    request: str
    known: int
    newest: int
    wanted: int
    budget: int
    params: SamplingParams
    seed: int | None


def rows_of(
    runner: Any,
    sampled: list[list[int]],
    num_tokens: Any,
    token_ids: Any,
    settings: Callable[[Any], tuple[int, int]],
) -> list[Row]:
    """Rows of ``runner``'s batch that got a token in this step and have room to draft.

    ``num_tokens [R]``, ``token_ids [R, …]``: vLLM's, with the sampled tokens. ``settings``: γ and budget of a request.
    Rows whose prompt is not finished have sampled nothing. A row ends at the slots it has (stock vLLM reserves none
    for drafts), and one token before the model's length, which verification's own token takes.
    """
    table, rows = runner.input_batch.block_table[0], []
    for index, tokens in enumerate(sampled):
        if not tokens:
            continue
        name = runner.input_batch.req_ids[index]
        request, known = runner.requests[name], int(num_tokens[index])
        gamma, budget = settings(request)
        slots = int(table.num_blocks_per_row[index]) * table.block_size
        wanted = min(gamma, slots - (known - 1), runner.max_model_len - known - 1)
        if wanted > 0:
            newest = int(token_ids[index, known - 1])
            params = request.sampling_params
            rows.append(Row(index, name, known, newest, wanted, budget, _drawn_as(params), params.seed))
    return rows


def _drawn_as(params: Any) -> SamplingParams:
    """As vLLM's ``params`` filter; greedy below its smallest temperature."""
    if params.temperature < 1e-5:
        return SamplingParams(temperature=0.0)
    return SamplingParams(temperature=params.temperature, top_k=max(0, params.top_k), top_p=params.top_p)
