"""How far outputs are promised to be equal on these kernels, and whether a difference is within that promise.

In float32 two evaluations of the same token in differently shaped batches differ by rounding; where the two best tokens
are closer than that, either may win. A difference between outputs is *certified* if, at the first token that differs, a
forward over the common prefix shows such a near-tie. A larger gap is a broken promise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from longdraft.config import DraftConfig, SamplingParams
from longdraft.kv.store import PagedStore
from longdraft.models.feed import Feed, feed
from longdraft.models.transformer import Transformer
from longdraft.spec.noise import all_gumbels
from longdraft.spec.probs import to_log_probs

CHUNK = 512
SAMPLE_ROWS, SAMPLE_TOKENS, SAMPLE_CONTEXT = 4, 8, 256


def tier(model: Transformer, draft: DraftConfig | None = None) -> str:
    """The tier of ``docs/lossless.md`` that holds for a model on its kernels, under a draft's sampling rule."""
    if draft is not None and draft.sampling_rule == "maximal":
        return "distribution"
    return "identical" if model.dtype == torch.float64 else "near-tie"


def forced_logits(model: Transformer, rows: Sequence[Sequence[int]], wanted: int, chunk: int = CHUNK) -> torch.Tensor:
    """Logits ``[B * wanted, V]`` after each of the last ``wanted`` ids of every row, all rows together in chunks.

    The last ``wanted`` ids are fed in one piece, or one by one where ``chunk`` is 1.
    """
    pages = sum(-(-len(row) // model.layout.page_size) for row in rows)
    store = PagedStore(model.config.num_layers, pages, model.layout, model.kv_dtype, model.device)
    out = []
    for b, row in enumerate(rows):
        store.reserve(b, 0, len(row))
        head = len(row) - wanted
        for start in range(0, head, CHUNK):
            feed(model, store, [Feed(b, start, row[start : min(start + CHUNK, head)], 0)])
    for done in range(0, wanted, min(chunk, wanted)):
        size = min(chunk, wanted - done)
        starts = [len(row) - wanted + done for row in rows]
        feeds = [Feed(b, s, row[s : s + size], size) for b, (row, s) in enumerate(zip(rows, starts, strict=True))]
        out.append(feed(model, store, feeds).view(len(rows), size, -1))
    return torch.cat(out, dim=1).flatten(0, 1)


def rounding(model: Transformer, prompts: Sequence[Sequence[int]]) -> float:
    """The largest difference between logits of single tokens of single rows, and of the same tokens all together."""
    rows = [list(p[:SAMPLE_CONTEXT]) for p in prompts[:SAMPLE_ROWS] if len(p) > SAMPLE_TOKENS]
    if not rows:
        return 0.0
    together = forced_logits(model, rows, SAMPLE_TOKENS)
    alone = torch.cat([forced_logits(model, [row], SAMPLE_TOKENS, chunk=1) for row in rows])
    return float((together - alone).abs().max())


def gap(model: Transformer, ids: Sequence[int], params: SamplingParams, seed: int) -> float:
    """How far the best token after ``ids`` is ahead of the second best, noise included when sampling; in logits."""
    logits = forced_logits(model, [ids], 1)
    if params.greedy:
        scores = logits
    else:
        noise = all_gumbels(*(torch.tensor([x], device=logits.device) for x in (seed, len(ids))), logits.shape[-1])
        scores = to_log_probs(logits, [params]) + noise
    best, second = scores[0].topk(2).values.tolist()
    return best - second
