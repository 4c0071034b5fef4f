"""What the target says of given texts: its residual streams and its logits, as drafts are trained on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from longdraft.capture import Capture
from longdraft.kv.store import PagedStore
from longdraft.models.feed import Feed, feed
from longdraft.models.transformer import Transformer

CHUNK = 512  # tokens of a row fed at once


class Teacher:
    """Runs a target over rows of token ids that are all of one length, chunk by chunk."""

    def __init__(self, model: Transformer, chunk: int = CHUNK) -> None:
        self.model, self.chunk = model, chunk

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """``[N, V]`` of residual streams ``[N, hidden]`` behind the last layer, by the target's own norm and head."""
        return self.model.head(self.model.norm(x.to(self.model.spec.compute_dtype)))

    def residuals(
        self, rows: Sequence[Sequence[int]], taps: Sequence[int], store: PagedStore | None = None
    ) -> torch.Tensor:
        """``[T, B, L, hidden]``: the residual streams of ``rows`` (B of length L) behind each of ``taps`` layers."""
        return torch.cat([y for y, _ in self.chunks(rows, taps, False, store)], dim=2)

    def store(self, tokens: Sequence[int]) -> PagedStore:
        """A cache with room for rows of so many tokens."""
        model = self.model
        pages = sum(-(-n // model.layout.page_size) for n in tokens)
        return PagedStore(model.config.num_layers, pages, model.layout, model.kv_dtype, model.device)

    def chunks(
        self,
        rows: Sequence[Sequence[int]],
        taps: Sequence[int],
        logits: bool = True,
        store: PagedStore | None = None,
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Of one chunk after the other the streams ``[T, B, C, hidden]`` and, if wanted, ``logits [B, C, V]``.

        In between them only K and V are kept: logits of a long text may not fit in memory. They stay in ``store``, if
        there is one, as its rows 0, 1, ….
        """
        model, length, known = self.model, len(rows[0]), sorted(set(taps))
        store = store or self.store([length] * len(rows))
        for start in range(0, length, self.chunk):
            stop = min(start + self.chunk, length)
            n = stop - start
            for b in range(len(rows)):
                store.reserve(b, start, n)
            feeds = [Feed(b, start, row[start:stop], n if logits else 0) for b, row in enumerate(rows)]
            tokens = torch.arange(len(rows) * n, device=model.device)
            form = Capture(tokens, hidden=model.hidden_form(len(known), len(tokens)), taps=tuple(known))
            out = feed(model, store, feeds, capture=form if known else None)
            streams = form.hidden[[known.index(tap) for tap in taps]]
            # A copy: what comes out of an inference pass cannot take part in training.
            yield streams.unflatten(1, (len(rows), n)), out.view(len(rows), -1, out.shape[-1]).clone()
