"""Losses of a draft's next-token distributions q against the target's p; no model, no data.

mixed            ω KL(p ‖ q) − (1 − ω) α, α = sum min(p, q) = 1 − TV: the chance that a token stands (SPIRe,
                 arXiv:2504.06419). ω = 1 is distillation alone. KL is the cross-entropy with soft targets less p's
                 entropy, which no weight of the draft changes.
log_acceptance   −log α (LK losses, arXiv:2602.23881): where little is accepted it pushes hardest
hard             cross-entropy with the text's own next token, for comparison

p is known whole, or by its largest entries and the mass of all others, their rest. The rest then counts as one more
token of both distributions. That merges tokens, so by it KL is at most the true one, and α at least, by no more than
the smaller of the two rests.

Logits of a batch are larger than all else, ``[tokens, V]``; here they exist for a few tokens at a time, their gradients
too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from longdraft.config import as_float, as_int
from longdraft.errors import InvalidValueError
from longdraft.train.divergence import compare

CHUNK = 128  # tokens whose logits exist at once
STRIP = 16  # tokens that are compared at once: what that takes stays in the cache, and in memory that is there
Logits = Callable[[torch.Tensor], torch.Tensor]  # residual streams [n, hidden] behind the last layer → [n, V]
Value = Callable[[torch.Tensor, slice], torch.Tensor]  # logits [m, V] of some of a chunk's tokens, and which → []


@dataclass(frozen=True)
class Whole:
    """All of p: the target's residual streams ``[..., hidden]`` behind its last layer, and what makes logits of it."""

    streams: torch.Tensor
    logits: Logits

    def part(self, rows: Sequence[int], first: int, stop: int) -> Whole:
        """Of texts ``[B, L, ...]`` some, and of these the tokens ``[first, stop)``, all in one row: ``[N, ...]``."""
        return Whole(self.streams[rows, first:stop].flatten(0, 1), self.logits)

    @torch.no_grad()
    def at(self, rows: slice) -> Known:
        """Of N tokens some, with their logits."""
        with torch.autocast(self.streams.device.type, enabled=False):  # a target is not rounded
            return Known(self.logits(self.streams[rows]))


@dataclass(frozen=True)
class Known:
    """All of p as logits ``[N, V]``."""

    logits: torch.Tensor

    @torch.no_grad()
    def pair(self, rows: slice, log_q: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """log p and log q of some of N tokens, ``[n, C]`` each, C being what is told apart: here all tokens."""
        return log_probs(self.logits[rows], temperature), log_q


@dataclass(frozen=True)
class Top:
    """The K largest of p, ``ids, log_p [..., K]``, and the logarithm of their rest ``[...]``; of one temperature."""

    ids: torch.Tensor
    log_p: torch.Tensor
    log_rest: torch.Tensor
    temperature: float = 1.0

    @classmethod
    def of(cls, logits: torch.Tensor, k: int, temperature: float = 1.0) -> Top:
        """The ``k`` largest of the distributions that ``logits [..., V]`` give."""
        as_int("top", k, 1, logits.shape[-1] - 1, "All of p needs no rest.")
        log_p = log_probs(logits, temperature)
        top = log_p.topk(k, dim=-1)
        return cls(top.indices, top.values, _log_rest(log_p, top.indices), temperature)

    def part(self, rows: Sequence[int], first: int, stop: int) -> Top:
        """See ``Whole``."""
        parts = (x[rows, first:stop].flatten(0, 1) for x in (self.ids, self.log_p, self.log_rest))
        return Top(*parts, self.temperature)

    def at(self, rows: slice) -> Top:
        """Of N tokens some."""
        return Top(self.ids[rows], self.log_p[rows], self.log_rest[rows], self.temperature)

    def pair(self, rows: slice, log_q: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Known``: K tokens and the rest."""
        if temperature != self.temperature:
            limit = f"must be {self.temperature}, at which the target's largest entries were taken"
            raise InvalidValueError("temperature", temperature, limit)
        ids = self.ids[rows]
        log_p = torch.cat([self.log_p[rows], self.log_rest[rows, None]], dim=-1)
        return log_p.to(log_q), torch.cat([log_q.gather(-1, ids), _log_rest(log_q, ids)[:, None]], dim=-1)


Targets = Whole | Top


def log_probs(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """``[..., V]`` at a ``temperature`` above 0, in at least float32: autocast multiplies in bfloat16."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (logits if temperature == 1.0 else logits / temperature).log_softmax(dim=-1)


def _log_rest(log_p: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """``[...]``: the logarithm of the mass of all tokens but ``ids [..., K]``; no difference of near numbers."""
    return log_p.scatter(-1, ids, -torch.inf).logsumexp(dim=-1)


@dataclass(frozen=True)
class Compared:
    """What a loss may look at of n tokens."""

    log_q: torch.Tensor  # [n, C]
    log_p: torch.Tensor | None  # [n, C]; None: the target was not asked
    log_q_of_text: torch.Tensor  # [n]: of the text's own next token

    @cached_property
    def _both(self) -> tuple[torch.Tensor, torch.Tensor]:
        return compare(self.log_p, self.log_q)

    @property
    def acceptance(self) -> torch.Tensor:
        """α, ``[n]``."""
        return self._both[1]

    @property
    def kl(self) -> torch.Tensor:
        """KL(p ‖ q), ``[n]``."""
        return self._both[0]

    @torch.no_grad()
    def figures(self) -> dict[str, torch.Tensor]:
        """What is worth showing of each token, ``[n]`` each; ``acceptance`` and ``kl`` are bounds if p has a rest.

        Ask the loss first: what it has computed is not computed again, and what is computed here has no gradients.
        """
        shown = {"cross_entropy": -self.log_q_of_text}
        return shown if self.log_p is None else shown | {"acceptance": self.acceptance, "kl": self.kl}


@dataclass(frozen=True)
class MixedLoss:
    """ω KL(p ‖ q) − (1 − ω) α (arXiv:2504.06419, where ω is 0.5)."""

    omega: float = 0.5

    def __post_init__(self) -> None:
        object.__setattr__(self, "omega", as_float("omega", self.omega, 0.0, 1.0))

    def __call__(self, compared: Compared) -> torch.Tensor:
        """``[n]``. A part that does not count may be infinite."""
        total = self.omega * compared.kl if self.omega > 0 else 0.0
        return total - (1 - self.omega) * compared.acceptance if self.omega < 1 else total


def log_acceptance(compared: Compared) -> torch.Tensor:
    """−log α, ``[n]`` (arXiv:2602.23881). min(p, q) stays a logarithm: α may be tiny."""
    return -torch.minimum(compared.log_p, compared.log_q).logsumexp(dim=-1)


def hard_labels(compared: Compared) -> torch.Tensor:
    """−log q of the text's next token, ``[n]``."""
    return -compared.log_q_of_text


Loss = Callable[[Compared], torch.Tensor]
LOSSES = ("mixed", "log_acceptance", "hard")


def make_loss(kind: str, omega: float = 0.5) -> Loss:
    """By name; ``omega`` is the mixed one's. Raises ``InvalidValueError``."""
    if kind not in LOSSES:
        raise InvalidValueError("loss", kind, f"must be one of {', '.join(LOSSES)}")
    return {"mixed": MixedLoss(omega), "log_acceptance": log_acceptance, "hard": hard_labels}[kind]


@dataclass(frozen=True)
class Text:
    """N tokens that a draft went over: what follows each, what the target says of that, and how much each counts."""

    labels: torch.Tensor  # [N] int64
    targets: Targets | None
    weights: torch.Tensor | None = None  # [N]; None: all alike


def mean_loss(
    x: torch.Tensor,  # [N, hidden] the draft's residual streams behind its last layer
    logits: Logits,
    text: Text,
    loss: Loss,
    *,
    temperature: float = 1.0,
    learned: Sequence[torch.Tensor] = (),  # of what ``logits`` uses: leaves that want gradients, too
    chunk: int = CHUNK,
) -> tuple[torch.Tensor, dict[str, float]]:
    """The weighted mean of ``loss`` over N tokens, and the plain means of ``Compared.figures``.

    p and q are those at ``temperature``. Logits are made ``chunk`` tokens at a time, and their gradients at once.
    """
    weights = x.new_ones(len(x)) if text.weights is None else text.weights.to(x)
    weights = weights / weights.sum()
    figures: dict[str, float] = defaultdict(float)

    def of_chunk(rows: slice) -> Value:
        labels, mine = text.labels[rows, None], weights[rows]
        known = text.targets and text.targets.at(rows)

        def value(z: torch.Tensor, some: slice) -> torch.Tensor:
            log_q = log_probs(z, temperature)
            of_text = log_q.gather(-1, labels[some])[:, 0]
            log_p, log_q = known.pair(some, log_q, temperature) if known else (None, log_q)
            compared = Compared(log_q, log_p, of_text)
            total = (mine[some] * loss(compared)).sum()
            for name, each in compared.figures().items():
                figures[name] += float(each.detach().sum()) / len(x)
            return total

        return value

    if torch.is_grad_enabled():
        return _InChunks.apply(logits, of_chunk, chunk, x, *learned), figures
    total = x.new_zeros(())
    for rows in _chunks(len(x), chunk):
        z, value = logits(x[rows]), of_chunk(rows)
        for some in _chunks(len(z), STRIP):
            total += value(z[some], some)
    return total, figures


def _chunks(length: int, chunk: int) -> Iterator[slice]:
    return (slice(start, start + chunk) for start in range(0, length, chunk))


class _InChunks(torch.autograd.Function):
    """The sum of values over chunks of ``x``; each chunk's graph is gone before the next one is made.

    So gradients are computed on the way forward, and only scaled on the way back.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's
        logits: Logits,
        of_chunk: Callable[[slice], Value],
        chunk: int,
        x: torch.Tensor,
        *learned: torch.Tensor,
    ) -> torch.Tensor:
        """``logits`` also depends on ``learned``."""
        total, of_x, of_learned = x.new_zeros(()), torch.empty_like(x), [torch.zeros_like(w) for w in learned]
        for rows in _chunks(len(x), chunk):
            with torch.enable_grad():
                piece = x[rows].detach().requires_grad_()
                z = logits(piece)
            of_z, value = torch.empty_like(z), of_chunk(rows)
            for some in _chunks(len(z), STRIP):
                with torch.enable_grad():
                    strip = z.detach()[some].requires_grad_()
                    part = value(strip, some)
                (of_z[some],) = torch.autograd.grad(part, strip)
                total += part.detach()
            of_x[rows], *more = torch.autograd.grad(z, (piece, *learned), of_z)
            for known, new in zip(of_learned, more, strict=True):
                known += new
        ctx.save_for_backward(of_x, *of_learned)
        return total

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        """What was computed, times what comes from above."""
        return None, None, None, *(upstream * x for x in ctx.saved_tensors)
