"""What is known of each draft's acceptance on the rows of a batch, and which drafts enough is known of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from longdraft.config import DraftConfig, draft_key
from longdraft.core import Round
from longdraft.planner.estimate import Own, Pool, Try, pool_weight, survival
from longdraft.planner.joint import Offer
from longdraft.planner.watch import Watch

ENOUGH = 1.0  # tries that a draft must have seen lately to be chosen


class Evidence:
    """Pools of all rows and figures of each, by the number of a draft."""

    def __init__(self, drafts: Mapping[DraftConfig, float], positions: int) -> None:
        """``drafts``: who may propose → how often its tokens are assumed to stand before anything was seen."""
        self.positions = positions
        self.numbers = {draft_key(draft): number for number, draft in enumerate(drafts)}
        self.pools = [Pool(positions, prior) for prior in drafts.values()]
        self._models = [draft.weights != "ngram" for draft in drafts]
        self.watched = self._models.index(False) if False in self._models else None  # its number
        self.watch = Watch(positions) if self.watched is not None else None
        self._own: dict[int, dict[int, Own]] = {}  # by sequence id

    def offers(self, seq_ids: Sequence[int], step: int) -> list[Offer]:
        """Every draft that runs passes, as it is expected to do for these sequences."""
        best, rows = self._best_known(step), [self._own.get(seq_id, {}) for seq_id in seq_ids]
        out = []
        for number, pool in enumerate(self.pools):
            if number == self.watched:
                continue
            usual = pool.rates(step, best if self._models[number] and best is not pool else None)
            weight = pool_weight([row[number] for row in rows if number in row], usual[0])
            rates = [row[number].rates(step, usual, weight) if number in row else usual for row in rows]
            out.append(Offer(number, [survival(r) for r in rates]))
        return out

    def watched_offer(self, guesses: Sequence[Sequence[int]], step: int) -> Offer:
        """That of the draft that is watched, which says ``guesses`` now."""
        return Offer(self.watched, self.watch.survival(guesses, step))

    def tested(self, offers: Sequence[Offer], step: int) -> Sequence[Offer]:
        """Those of which enough was seen lately; others have to be tried first. In the first step all will do.

        What is merely assumed, or remembered, is often too good: who is left for it must not be chosen for that.
        """
        if step <= 1:
            return offers
        return [o for o in offers if self.pools[o.number].evidence(step) >= ENOUGH]

    def observe(
        self, rounds: Sequence[Round], step: int, blind: Sequence[Round], guesses: Mapping[int, Sequence[int]]
    ) -> dict[int, list[Try]]:
        """What rounds say of drafts that are known here, under the coupled rule; returned by their numbers.

        ``blind`` rounds say nothing. ``guesses``: what the draft that is watched had said, by sequence id.
        """
        seen: dict[int, list[Try]] = {}
        if self.watch:
            self.watch.observe(rounds, guesses, step)
        for r in rounds:
            draft = r.row.choice.draft
            number = self.numbers.get(draft_key(draft)) if draft and r.asked else None
            if number in (None, self.watched) or draft.sampling_rule != "coupled" or r in blind:
                continue
            seen.setdefault(number, []).append((r.row.seq.id, r.asked, r.accepted))
        for number, tries in seen.items():
            self.pools[number].observe(step, tries)
            for seq_id, asked, accepted in tries:
                own = self._own.setdefault(seq_id, {}).setdefault(number, Own(self.positions))
                own.observe(step, asked, accepted)
        return seen

    def doubt(self, new: set[int]) -> None:
        """Drafts came into use: the text has changed, so what was seen of the others counts little."""
        for number in set(range(len(self.pools))) - new - {self.watched}:
            self.pools[number].counts.doubt()
            for own in self._own.values():
                if number in own:
                    own[number].doubt()

    def release(self, seq_id: int) -> None:
        """Forget a sequence."""
        self._own.pop(seq_id, None)
        if self.watch:
            self.watch.release(seq_id)

    def _best_known(self, step: int) -> Pool | None:
        """That of the draft with weights of which most was seen lately."""
        pools = [pool for pool, model in zip(self.pools, self._models, strict=True) if model]
        best = max(pools, key=lambda pool: pool.evidence(step), default=None)
        return best if best and best.evidence(step) >= ENOUGH else None
