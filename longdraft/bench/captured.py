"""How much of the target's attention falls on what a draft's view shows.

The target's queries and the logarithm of its softmax's denominator are taken on the readable path, at a few positions.
Their products with the keys that a draft's pass reads, from whatever store and view it reads them, give the share of
the whole. No list of positions is needed, so copies of chosen keys count like the keys themselves.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from longdraft.bench.turns import Rows
from longdraft.config import DraftConfig
from longdraft.kernels.layout import Layout
from longdraft.kv.store import PagedStore
from longdraft.llm import LLM
from longdraft.models.feed import Feed, feed
from longdraft.models.transformer import Transformer
from longdraft.view import AttnPlan, KVView, LayerKV


@dataclass(frozen=True)
class Attention:
    """The target's exact attention at one position of a row."""

    queries: torch.Tensor  # [L, H, D] scaled, as they meet the keys
    newest: torch.Tensor  # [L, H] log of the unnormalised weight of the position's own key
    total: torch.Tensor  # [L, H] log of the sum over all keys


@dataclass(frozen=True)
class Pass:
    """What a pass reads: a view over storages, one for each layer, of which ``layers`` run."""

    view: KVView
    storage: Callable[[int], LayerKV]
    layers: Sequence[int]
    layout: Layout


def exact_attention(llm: LLM, rows: Rows) -> list[Attention]:
    """Of each row's newest token, which is not in the cache yet.

    A page for it must be reserved; its K and V are written there as the next step will write them again.
    """
    probe = _Probe(llm.model, llm.engine.store, rows)
    feed(probe, llm.engine.store, [Feed(seq.id, seq.num_committed, [seq.ids[-1]], 1) for seq in rows])
    return [Attention(*(torch.stack(x) for x in zip(*layers, strict=True))) for layers in probe.found]


class _Probe:
    """A model that runs by parts and notes queries and denominators: ``found[row][layer]``."""

    def __init__(self, model: Transformer, store: PagedStore, rows: Rows) -> None:
        self.model, self.device = copy.copy(model), model.device
        self.model._attention = self._watch  # the copy's kernel class; the model's own stays
        self.kernel, self.slots = model._attention, [store.slots(seq.id, 0, len(seq.ids)) for seq in rows]
        self.found: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in rows]

    def forward(self, *step: object) -> torch.Tensor:
        """See ``Transformer.forward``."""
        return self.model.forward_by_parts(*step)

    def _watch(self, plan: AttnPlan, *how: object) -> Callable[[torch.Tensor, LayerKV], torch.Tensor]:
        attention = self.kernel(plan, *how)

        def watched(q: torch.Tensor, kv: LayerKV) -> torch.Tensor:
            for n, slots in enumerate(self.slots):
                query = q[n].to(kv.k.dtype).to(q.dtype) * q.shape[-1] ** -0.5  # rounded as the kernels round it
                scores = _scores(query, self.model.layout.read_k(kv.k, slots.to(kv.k.device)))
                self.found[n].append((query, scores[:, -1], scores.logsumexp(dim=-1)))
            return attention(q, kv)

        return watched


@contextmanager
def passes_of(llm: LLM, config: DraftConfig, look: Callable[[Pass], None]) -> Iterator[None]:
    """While it lasts, ``look`` is called after every pass by which ``config`` drafts, when its keys still lie there.

    A draft whose keys are not the target's is not looked at.
    """
    model = _model_of(llm, config)
    if model is None:
        yield
        return
    right = model.forward
    names = inspect.signature(right)

    def forward(*args: object, **kwargs: object) -> torch.Tensor:
        logits, given = right(*args, **kwargs), names.bind(*args, **kwargs).arguments
        plan, kv, layers = given["plan"], given["kv"], given.get("layers")
        storage = kv.__getitem__ if plan.decode is None else lambda i: plan.decode(i, kv[i])
        look(Pass(plan.view, storage, range(len(kv)) if layers is None else layers, llm.model.layout))
        return logits

    model.forward = forward
    try:
        yield
    finally:
        del model.forward  # the class's method is visible again


def _model_of(llm: LLM, config: DraftConfig) -> Transformer | None:
    if config.weights == "target":
        return llm.model
    return llm.model.quantised() if config.weights == "target@int8" else None


def captured(attention: Attention, done: Pass, row: int) -> float:
    """The share of a position's attention on what ``row`` of a pass saw: the mean over the layers that ran, and heads.

    A draft's own key of the newest token is inexact; the target's stands in for it.
    """
    shares = [_captured_by_layer(attention, done, row, layer) for layer in done.layers]
    return float(torch.stack(shares).mean())


def _captured_by_layer(attention: Attention, done: Pass, row: int, layer: int) -> torch.Tensor:
    view, layout, keys = layer_of(done.view, layer), done.layout, done.storage(layer).k
    pages, positions = (x[row] for x in view.expand())  # [G', P], [G', slots]
    before = positions < view.lens[row] - 1  # neither empty nor the newest token
    queries, logs = attention.queries[layer], []
    for listed, seen in enumerate(before):
        at = seen.nonzero().flatten()
        slots = pages[listed, at // view.page_size] * view.page_size + at % view.page_size
        scores = _scores(queries, layout.read_k(keys, slots.to(keys.device)))  # [H, S]
        heads = slice(None) if len(before) == 1 else slice(*_group(listed, len(queries), len(before)))
        logs.append(scores[heads].logsumexp(dim=-1))
    log_seen = torch.logaddexp(torch.cat(logs), attention.newest[layer])
    return (log_seen - attention.total[layer]).exp().mean()


def layer_of(view: KVView, layer: int) -> KVView:
    """What one layer sees, where a view tells layers apart."""
    narrow = getattr(view, "layer", None)
    return narrow(layer) if narrow else view


def _group(kv_head: int, heads: int, kv_heads: int) -> tuple[int, int]:
    size = heads // kv_heads
    return kv_head * size, (kv_head + 1) * size


def _scores(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """``queries [H, D]``, ``keys [S, G, D]`` → ``[H, S]``."""
    grouped = queries.unflatten(0, (keys.shape[1], -1))  # [G, H / G, D]
    return torch.einsum("ghd,sgd->ghs", grouped, keys.to(queries.dtype)).flatten(0, 1)
