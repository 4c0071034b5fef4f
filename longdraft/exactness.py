"""How far outputs are promised to be equal on these kernels, and whether a difference is within that promise.

In float32 two evaluations of the same token in differently shaped batches differ by rounding; where the best tokens are
closer than that, any of them may win. A difference between outputs is *certified* if, at the first token that differs,
a forward over the common prefix shows both tokens within ε = 4 × that rounding of the best one. A larger margin is a
broken promise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from longdraft.config import DraftConfig
from longdraft.core import Place
from longdraft.core import Sequence as EngineSequence
from longdraft.kv.store import PagedStore
from longdraft.models.feed import Feed, feed
from longdraft.models.transformer import Transformer
from longdraft.sampling_params import SamplingParams
from longdraft.spec.adjust import adjust
from longdraft.spec.noise import all_gumbels
from longdraft.spec.probs import to_log_probs

CHUNK = 512
LOSSY = "lossy"  # what reports say of a target that is not the model of its files: tiers hold relative to it
SAMPLE_ROWS, SAMPLE_TOKENS, SAMPLE_CONTEXT = 4, 16, 1024


def tier(model: Transformer, draft: DraftConfig | None = None, *, greedy: bool = False) -> str:
    """The tier of ``docs/lossless.md`` that holds for a model on its kernels, under a draft's sampling rule.

    Greedy distributions are one-hot, so that both rules must give the same ids.
    """
    if draft is not None and draft.sampling_rule == "maximal" and not greedy:
        return "distribution"
    if model.fused:
        return "bit-identical"
    return "identical" if model.dtype == torch.float64 else "near-tie"


def label(model: Transformer, name: str) -> str:
    """What reports say in place of the tier ``name``: ``lossy`` of a target that is not the model of its files."""
    return name if model.lossless else LOSSY


def forced_logits(model: Transformer, rows: Sequence[Sequence[int]], wanted: int, chunk: int = CHUNK) -> torch.Tensor:
    """Logits ``[B * wanted, V]`` after each of the last ``wanted`` ids of every row, all rows together in chunks.

    The last ``wanted`` ids are fed in one piece, or one by one where ``chunk`` is 1.
    """
    empty = model.new_store(0)
    store = model.new_store(sum(empty.takes(len(row)) for row in rows))
    most, out = min(chunk, wanted, store.longest_feed), []
    for b, row in enumerate(rows):
        head, step = len(row) - wanted, min(CHUNK, store.longest_feed)
        for start in range(0, head, step):
            _feed(model, store, [Feed(b, start, row[start : min(start + step, head)], 0)])
    for done in range(0, wanted, most):
        size = min(most, wanted - done)
        starts = [len(row) - wanted + done for row in rows]
        feeds = [Feed(b, s, row[s : s + size], size) for b, (row, s) in enumerate(zip(rows, starts, strict=True))]
        out.append(_feed(model, store, feeds).view(len(rows), size, -1))
    return torch.cat(out, dim=1).flatten(0, 1)


def _feed(model: Transformer, store: PagedStore, feeds: Sequence[Feed]) -> torch.Tensor:
    for f in feeds:
        assert store.reserve(f.row, f.start, len(f.tokens)), "there are pages for every row"
    return feed(model, store, feeds)


def rounding(model: Transformer, rows: Sequence[Sequence[int]]) -> float:
    """The largest difference between logits of single tokens of single rows, and of the same tokens all together."""
    rows = [list(row[:SAMPLE_CONTEXT]) for row in rows[:SAMPLE_ROWS]]
    wanted = min(SAMPLE_TOKENS, *(len(row) for row in rows))
    together = forced_logits(model, rows, wanted)
    alone = torch.cat([forced_logits(model, [row], wanted, chunk=1) for row in rows])
    return float((together - alone).abs().max())


def margin(model: Transformer, place: Place, tokens: Sequence[int], epsilon: float) -> float:
    """By how much the best token at ``place`` beats the worst of ``tokens``, in logits; inf if one could not come.

    Scores are what the draw compares, scaled to logits: l + T · G. A token whose logit is within ``epsilon`` of the
    border that top_k, top_p or min_p drew may have been on either side of it.
    """
    params = place.seq.params
    raw = forced_logits(model, [[*place.seq.ids, *place.drafted]], 1).double()
    logits = adjust(raw, [place])[0][0]
    scores, firm, possible = (
        logits,
        torch.ones_like(logits, dtype=torch.bool),
        torch.ones_like(logits, dtype=torch.bool),
    )
    if not params.greedy:
        at = (torch.tensor([x], device=logits.device) for x in (place.seq.seed, place.position))
        scores = logits + params.temperature * all_gumbels(*at, len(logits))[0]
        support = to_log_probs(logits[None], [params])[0] > -torch.inf
        if not bool(support.all()):
            border = logits[support].min()
            firm, possible = support & (logits > border + epsilon), logits >= border - epsilon
    if not all(bool(possible[t]) for t in tokens):
        return math.inf
    best = scores[firm].max() if bool(firm.any()) else scores.min()
    return max(0.0, *(float(best - scores[t]) for t in tokens))


def certify(
    model: Transformer,
    ids: Sequence[int],
    outputs: tuple[Sequence[int], Sequence[int]],
    params: SamplingParams,
    seed: int,
    epsilon: float,
    stop_ids: Iterable[int] = (),
) -> dict[str, object] | None:
    """Where two outputs of the prompt ``ids`` first differ, and whether that is a near-tie; ``None`` if they do not.

    ``stop_ids`` are those that ``min_tokens`` keeps away, if it does.
    """
    a, b = outputs
    if list(a) == list(b):
        return None
    at = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    here = {"position": at, "first": list(a[at : at + 1]), "second": list(b[at : at + 1])}
    if at >= min(len(a), len(b)):  # one is a beginning of the other: no tie explains that
        return {**here, "margin": None, "epsilon": epsilon, "near_tie": False}
    total, prompt = len(ids) + len(a), list(ids)
    seq = EngineSequence(-1, prompt + list(a[:at]), len(prompt), params, seed, total, stop_ids=frozenset(stop_ids))
    found = margin(model, Place(seq), [a[at], b[at]], epsilon)
    near = found <= epsilon
    return {**here, "margin": found if math.isfinite(found) else None, "epsilon": epsilon, "near_tie": near}
