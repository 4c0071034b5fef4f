"""Real rounds of speculation on given texts: a draft proposes k tokens one after the other, and the target judges them.

So SPIRe is measured (arXiv:2504.06419). A round begins anywhere in a text, of which everything before is verified, and
its proposals are the draft's own, not the text's. Rounds at many places of many texts run side by side; none of them
touches another.

``forced`` is the fast way: one pass of the draft, whose tokens are the text's. It says how often a proposal would stand
if those before it were the text's, and only estimates what a round gives: what stands is what target and draft agree
on, which is likelier than a text. It is exact for greedy decoding of a text that the target itself would write.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from longdraft.models.feed import Feed, Select, feed
from longdraft.models.feedback import FeedbackDraft, Residuals
from longdraft.models.transformer import Transformer
from longdraft.spec.acceptance import overlap
from longdraft.spec.noise import COUPLED, DRAFT
from longdraft.spec.sample import draw
from longdraft.spec.verify import DRAW_ROWS, acceptance_probability
from longdraft.train.losses import CHUNK, Logits, Whole
from longdraft.train.teacher import Teacher


@dataclass(frozen=True)
class Places:
    """Where rounds begin in texts: the first ``context`` tokens are verified, and ``k`` more for each round after it.

    Round j's newest token, which no cache has yet, stands at ``context + j * k``; ``count`` rounds.
    """

    context: int
    count: int
    k: int

    @property
    def starts(self) -> list[int]:
        """Positions of the newest tokens, one per round."""
        return [self.context + j * self.k for j in range(self.count)]

    @property
    def length(self) -> int:
        """Tokens of a text that are looked at."""
        return self.context + self.count * self.k


class Filled:
    """Texts ``[B, L]`` in a model's cache, and its residual streams behind each of ``taps`` layers."""

    def __init__(self, model: Transformer, texts: torch.Tensor, places: Places, taps: Sequence[int] = ()) -> None:
        self.model, self.texts, self.places = model, texts[:, : places.length], places
        page, rounds = model.layout.page_size, len(texts) * places.count
        # A round shares its text's pages but the last one, which is copied.
        teacher = Teacher(model)
        self.store = teacher.store([places.length] * len(texts) + [page + places.k] * rounds)
        self._taps = tuple(sorted(set(taps)))
        self._streams = teacher.residuals(self.texts.tolist(), self._taps, self.store)
        self._named = len(texts)

    def at(self, places: Places) -> Filled:
        """The same cache, not filled again, with rounds at other places, as many at most and no further into the texts.

        Of several such ones only one may have branches at a time.
        """
        assert (places.count, places.k) == (self.places.count, self.places.k) and places.length <= self.places.length
        other = copy.copy(self)
        other.places, other.texts = places, self.texts[:, : places.length]
        return other

    def streams(self, taps: Sequence[int]) -> Residuals:
        """``[T, B, L, hidden]``, in the order of ``taps``."""
        return self._streams[[self._taps.index(tap) for tap in taps], :, : self.places.length]

    def branch(self) -> list[Feed]:
        """New rows, one per text and round, that share the text up to the newest token, which they feed next."""
        feeds = []
        for b, text in enumerate(self.texts.tolist()):
            for start in self.places.starts:
                self.store.fork(b, self._named, start)
                feeds.append(Feed(self._named, start, [text[start]], 1))
                self._named += 1
        return feeds

    def run(
        self, feeds: Sequence[Feed], select: Select | None = None, layers: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Logits ``[R, V]`` of what branches feed."""
        for f in feeds:
            assert self.store.reserve(f.row, f.start, len(f.tokens)), "there is room for every round"
        return feed(self.model, self.store, feeds, select, layers).clone()

    def end(self, feeds: Sequence[Feed]) -> None:
        """Give the branches' pages back."""
        for f in feeds:
            self.store.free(f.row)


class Drafter(Protocol):
    """Who proposes."""

    def begin(self) -> None:
        """New rounds."""

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[B, J, V]`` behind the tokens of each round so far, ``[B, J, r]``: its newest one and what was proposed."""

    def end(self) -> None:
        """The rounds are over."""


class ModelDrafter:
    """A model over its own cache, or the target over a part of what it has: MagicDec's drafts (arXiv:2408.11049)."""

    def __init__(self, filled: Filled, select: Select | None = None, layers: Sequence[int] | None = None) -> None:
        """``select``: what its steps read; ``None``: all. ``layers``: see ``feed``."""
        self.filled, self.select, self.layers = filled, select, layers
        self._feeds: list[Feed] = []

    def begin(self) -> None:
        """See ``Drafter``."""
        self._feeds = self.filled.branch()

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """See ``Drafter``."""
        newest, before = tokens[:, :, -1].flatten().tolist(), tokens.shape[2] - 1
        feeds = [Feed(f.row, f.start + before, [x], 1) for f, x in zip(self._feeds, newest, strict=True)]
        return self.filled.run(feeds, self.select, self.layers).unflatten(0, tokens.shape[:2])

    def end(self) -> None:
        """See ``Drafter``."""
        self.filled.end(self._feeds)


class FeedbackDrafter:
    """A draft as it is trained, all rounds as blocks of their texts; it need not be one that the engine can run."""

    def __init__(self, draft: FeedbackDraft, filled: Filled) -> None:
        """``filled``: the target's, with the streams that the draft reads."""
        self.draft, self.places, self.texts = draft, filled.places, filled.texts
        own = draft.config.context == "own"
        streams = draft.inputs(self.texts, self.places.k) if own else filled.streams(draft.taps)
        self.residuals: Residuals = streams.to(draft.embedding.dtype)

    def begin(self) -> None:
        """See ``Drafter``: nothing is kept from step to step."""

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """See ``Drafter``."""
        (rows, rounds, known), k = tokens.shape, self.places.k
        ids = self.texts.clone()
        blocks = ids[:, self.places.context :].view(rows, rounds, k)
        blocks[:, :, :known] = tokens
        x = self.draft(ids, self.residuals, k, self.places.context)
        return self.draft.logits(x.view(rows, rounds, k, -1)[:, :, known - 1])

    def end(self) -> None:
        """See ``Drafter``."""


RULES = ("maximal", "coupled")


@torch.no_grad()
def rounds(
    target: Filled, drafter: Drafter, temperature: float, seeds: torch.Tensor, rule: str = "maximal"
) -> torch.Tensor:
    """``[B, J, k]`` float64: the chance that the first 1, 2, … k proposals of a round stand, given its proposals.

    A round of γ ≤ k proposals gives 1 and the sum of the first γ of them; the mean over rounds is the tokens per round.
    ``seeds [B]``: of each text's noise. Greedy where the ``temperature`` is 0. ``maximal`` (arXiv:2211.17192) averages
    over what is accepted, and over the last proposal looked at; ``coupled`` (arXiv:2408.07978), the engine's rule, is
    0 or 1, and what the engine would see with these seeds.
    """
    places, (rows, _) = target.places, target.texts.shape
    tokens = target.texts[:, places.starts][:, :, None]  # [B, J, 1]
    seeds = seeds.repeat_interleave(places.count)
    starts = torch.tensor(places.starts).repeat(rows)
    log_q = []
    drafter.begin()
    for step in range(places.k):
        log_q.append(_log_probs(drafter.logits(tokens).flatten(0, 1), temperature))
        drawn = _draw(log_q[-1], seeds, starts + step + 1, COUPLED if rule == "coupled" else DRAFT)
        tokens = torch.cat([tokens, drawn.view(rows, -1, 1)], dim=2)
    drafter.end()
    branches = target.branch()
    fed = zip(branches, tokens[:, :, :-1].flatten(0, 1).tolist(), strict=True)
    logits = target.run([Feed(f.row, f.start, row, places.k) for f, row in fed])
    target.end(branches)
    log_p = _log_probs(logits, temperature).unflatten(0, (-1, places.k))  # [B * J, k, V]
    proposals = tokens[:, :, 1:].flatten(0, 1)
    if rule == "coupled":
        at = (starts[:, None] + torch.arange(1, places.k + 1)).flatten()
        own = _draw(log_p.flatten(0, 1), seeds.repeat_interleave(places.k), at, COUPLED).view_as(proposals)
        stood = (own == proposals).double().cumprod(dim=-1)
    else:
        parts = zip(*(x.split(DRAW_ROWS) for x in (log_p, torch.stack(log_q, dim=1), proposals)), strict=True)
        stood = torch.cat([expected_to_stand(*part) for part in parts])
    return stood.view(rows, places.count, places.k)


def expected_to_stand(log_p: torch.Tensor, log_q: torch.Tensor, proposals: torch.Tensor) -> torch.Tensor:
    """``[N, k]``: the chance that the first 1, 2, … of ``proposals [N, k]`` stand under the maximal rule.

    ``log_p, log_q [N, k, V]``: of target and draft behind the proposals before each. The last one is averaged over all
    that the draft might have drawn: its mean over draws is the same, its variance smaller.
    """
    p, q = (x.gather(-1, proposals[..., None])[..., 0].exp() for x in (log_p, log_q))
    reached = torch.cat([torch.ones_like(p[:, :1]), acceptance_probability(p, q)[:, :-1].cumprod(dim=-1)], dim=-1)
    return reached * overlap(log_p.exp(), log_q.exp())


@torch.no_grad()
def forced(draft: FeedbackDraft, target: Filled, logits: Logits, temperature: float = 1.0) -> torch.Tensor:
    """``[B, J, k]``: the acceptance of each place of a block, where the tokens before it are the text's.

    ``target``: with the streams that the draft reads and the last one, of which ``logits`` makes its distribution.
    Greedy, 0 or 1, where the ``temperature`` is 0.
    """
    drafter, places = FeedbackDrafter(draft, target), target.places
    x = draft(drafter.texts, drafter.residuals, places.k, places.context).flatten(0, 1)
    (last,) = target.streams((target.model.config.num_layers,))
    said = Whole(last.to(x), logits).part(list(range(len(last))), places.context, places.length)
    out = []
    for start in range(0, len(x), CHUNK):
        part = slice(start, start + CHUNK)
        pair = _log_probs(said.logits(said.streams[part]), temperature), _log_probs(draft.logits(x[part]), temperature)
        out.append(overlap(*(x.exp() for x in pair)))
    return torch.cat(out).view(len(target.texts), places.count, places.k)


def _draw(log_probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, role: int) -> torch.Tensor:
    parts = zip(*(x.split(DRAW_ROWS) for x in (log_probs, seeds, positions)), strict=True)
    return torch.cat([draw(*part, role) for part in parts])


def _log_probs(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """``[N, V]``; one-hot at the first of the largest where the temperature is 0."""
    if temperature:
        return (logits.double() / temperature).log_softmax(dim=-1)
    best = torch.full(logits.shape, -torch.inf, dtype=torch.float64, device=logits.device)
    return best.scatter(-1, logits.argmax(dim=-1, keepdim=True), 0.0)
