"""Where queries' attention goes, by page: plain torch, any layout of the cache. It is no part of attention itself."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from longdraft.kernels.dispatch import CallSpec
from longdraft.kernels.layout import Layout
from longdraft.view import AttnPlan, LayerKV, TableView


def group_weights(
    queries: torch.Tensor,  # [n, H, D] after rotary embedding
    keys: torch.Tensor,  # [S, G, D] likewise, of the same type
    positions: torch.Tensor,  # [n] where the queries stand; query p sees the keys [0, p]
) -> Iterator[torch.Tensor]:
    """Attention weights ``[n, S]`` for one KV head after the other, summed over the query heads of its group."""
    (n, heads, dim), kv_heads = queries.shape, keys.shape[1]
    hidden = torch.arange(len(keys), device=keys.device) > positions[:, None]  # [n, S]
    grouped = queries.view(n, kv_heads, heads // kv_heads, dim)
    for g in range(kv_heads):  # scores of all heads at once may be large
        scores = grouped[:, g].transpose(0, 1) @ keys[:, g].T * dim**-0.5  # [group, n, S]
        yield scores.masked_fill_(hidden, -torch.inf).softmax(dim=-1).sum(dim=0)


def attention_mass(
    queries: torch.Tensor,  # [n, H, D] after rotary embedding
    keys: torch.Tensor,  # [S, G, D] likewise
    positions: torch.Tensor,  # [n] where the queries stand; query p sees the keys [0, p]
) -> torch.Tensor:
    """``[G, S]`` float32: attention weights of every key, summed over the queries and over the heads of a KV group."""
    return torch.stack([x.sum(dim=0) for x in group_weights(queries.float(), keys.float(), positions)])


class PageMass:
    """The attention mass of some flat tokens of a step on each page of their rows. One object serves all layers."""

    def __init__(self, plan: AttnPlan, tokens: torch.Tensor, layout: Layout, spec: CallSpec) -> None:
        """``tokens [n]`` of a step over full views: masses are by page of the sequence. Of a negative one: zeros."""
        view, device = plan.view, tokens.device
        assert isinstance(view, TableView) and view.starts is None, "page masses are of passes over the whole cache"
        self.layout, self.spec, size = layout, spec, layout.page_size
        self.num_pages = -(-int(view.lens.max()) // size)
        flat = tokens.cpu()
        row = torch.searchsorted(plan.query_starts, flat, right=True) - 1
        position = view.lens[row] - plan.query_starts[row + 1] + flat
        self.rows = []  # of each row that is asked about: which of the tokens, their positions, the slots of its keys
        for b in row[flat >= 0].unique().tolist():
            mine = ((row == b) & (flat >= 0)).nonzero().flatten()
            token = torch.arange(int(view.lens[b]))
            slots = view.tables[b, token // size] * size + token % size
            self.rows.append(tuple(x.to(device) for x in (mine, position[mine], slots)))

    def __call__(self, q: torch.Tensor, kv: LayerKV) -> torch.Tensor:
        """``q [n, H, D]`` of the tokens → ``[n, G, P]`` in the compute type, normalised."""
        size, compute = self.layout.page_size, self.spec.compute_dtype
        mass = q.new_zeros(len(q), self.layout.num_kv_heads, self.num_pages * size, dtype=compute)
        for mine, positions, slots in self.rows:
            keys = self.layout.read_k(kv.k, slots).to(compute)
            queries = q[mine].to(kv.k.dtype).to(compute)  # rounded as the kernels round them
            for g, weights in enumerate(group_weights(queries, keys, positions)):
                mass[mine, g, : len(slots)] = weights
        return mass.unflatten(-1, (-1, size)).sum(dim=-1)
