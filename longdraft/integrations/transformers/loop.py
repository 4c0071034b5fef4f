"""Rounds of drafting and verifying for one call of ``generate``: the place where everything here comes together.

A round: the model drafts over copies of what the selection chose of each row's cache, then runs once over the newest
token and the drafted ones with its whole cache; what does not stand is written over in the next round.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput, LogitsProcessorList, StoppingCriteriaList

from longdraft.capture import Seen
from longdraft.config import MAX_GAMMA
from longdraft.core import SequenceStats
from longdraft.integrations.transformers.attention import Pass, call, forward
from longdraft.integrations.transformers.reading import Reading
from longdraft.integrations.transformers.row_cache import RowCache
from longdraft.integrations.transformers.rows import Kept, Rows
from longdraft.integrations.transformers.rules import Greedy
from longdraft.integrations.transformers.scores import Scores
from longdraft.kv.select.base import Selector
from longdraft.kv.select.keys import Keys

CHUNK = 256  # tokens that are fed at once to complete a cache


def columns(config: GenerationConfig, inputs: dict[str, object]) -> int:
    """How many columns the cache has with the prompt; ``generate`` leaves out a mask of ones and notes its length."""
    mask = inputs.get("attention_mask")
    return getattr(config, "_mask_length", inputs["position_ids"].shape[1]) if mask is None else mask.shape[1]


class Call:
    """One call of ``generate``, whose prompt is ``input_ids [B, n]``; the rest is what transformers prepared for it."""

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        inputs: dict[str, object],
        streamer: object | None = None,
    ) -> None:
        """``inputs``: the stock ``cache``, the mask of all tokens in and behind it, ``position_ids`` of the latter."""
        self.model, self.config, self.streamer = model, config, streamer
        self.stock: DynamicCache = inputs["cache"]
        self.past = self.stock.get_seq_length()
        self.positions = inputs["position_ids"].expand(len(input_ids), -1)
        self.mask: torch.Tensor | None = inputs.get("attention_mask")
        visible = torch.ones_like(input_ids[:, :1]).expand(-1, columns(config, inputs))
        visible = (visible if self.mask is None else self.mask).bool()
        padded = any(hasattr(c, "eos_token_id") for c in criteria)
        pad_id = int(config._pad_token_tensor) if padded else None
        self.rows = Rows(input_ids, visible, criteria.max_length or config.max_length, MAX_GAMMA + 1, pad_id)
        self.scores = Scores(self.rows.ids, processors, criteria)
        returned = config.return_dict_in_generate
        self.kept_scores = Kept(len(input_ids), bool(returned and config.output_scores))
        self.kept_logits = Kept(len(input_ids), bool(returned and config.output_logits))
        self.stats = [SequenceStats() for _ in input_ids]
        self.cache = RowCache(model.config.num_hidden_layers)

    def run(self, selector: Selector, gamma: int, rule: Greedy) -> GenerateDecoderOnlyOutput | torch.Tensor:
        """All rounds, and what ``generate`` returns."""
        self.reading, self.gamma, self.rule = Reading(selector, gamma, self.stats), gamma, rule
        returned = self.config.return_dict_in_generate
        try:
            self._decide([[] for _ in self.stats], self._prefill()[:, None])
            while self.rows.wanted:
                proposals = self._propose()
                self._decide(proposals, self._verify(max(map(len, proposals))))
            sequences = self.rows.sequences()
            if returned or getattr(self.stock, "_is_user_defined", False):
                self._give_back(sequences)
        except BaseException:
            self._leave()
            raise
        if self.streamer is not None:
            self.streamer.end()
        if not returned:
            return sequences
        count = sequences.shape[1] - self.rows.prompt
        scores, logits = self.kept_scores.until(count), self.kept_logits.until(count)
        return GenerateDecoderOnlyOutput(sequences=sequences, scores=scores, logits=logits, cache=self.stock)

    def _leave(self) -> None:
        """Give a user's cache back as it was found, for a call that failed at any place."""
        if not self.past:
            self.stock.reset()
        elif self.cache.layers[0].is_initialized:
            self.cache.give(self.stock, self.past)
        else:
            for layer in self.stock.layers:  # a pass that failed has not come to all of them
                layer.crop(self.past - layer.get_seq_length())

    # --- the prompt

    def _prefill(self) -> torch.Tensor:
        """Logits ``[B, V]`` after the prompt. Its last tokens go the drafts' way if a selection wants their queries."""
        rows, count = self.rows, self.rows.width - self.past
        heard = min(self.reading.queries, count)
        size, logits = self.config.prefill_chunk_size or count, torch.empty(0)
        for start in range(-count, -heard, size):
            logits = self._stock_pass(start, min(start + size, -heard))
        self.cache.take(self.stock)
        if heard:
            places = torch.arange(rows.width - heard, rows.width, device=rows.ids.device).expand(len(rows), -1)
            ids = rows.ids[:, rows.prompt - heard : rows.prompt]
            logits = self._pass(places, ids, self.positions[:, -heard:], keep=1)[:, -1]
            for row, shown in enumerate(rows.visible[:, -heard:]):  # some of them may be padding
                self._observe(row, self.queries[:, row][:, :, shown.to(self.queries.device)], len(rows.front[row]))
        return logits

    def _stock_pass(self, start: int, stop: int) -> torch.Tensor:
        """Logits ``[B, V]`` after a part of the prompt, as ``generate`` fills it; both ends count from behind it."""
        rows = self.rows
        fed = {
            "input_ids": rows.ids[:, rows.prompt + start : rows.prompt + stop],
            "position_ids": self.positions[:, start : stop or None],
            "attention_mask": None if self.mask is None else self.mask[:, : rows.width + stop],
        }
        return call(self.model, self.stock, 1, **fed)[:, -1]

    # --- a round

    def _propose(self) -> list[list[int]]:
        """The ids drafted for each row, none for those that have ended; they are written behind the rows' own."""
        rows, wanted = self.rows, self.rows.wanted
        proposals: list[list[int]] = [[] for _ in self.stats]
        if max(wanted.values()) == 1:
            return proposals
        cache, mask = self._view()
        self.rule.begin()
        for step in range(self.gamma):
            asked = [b for b, most in wanted.items() if most > step + 1]  # the target itself adds one
            if not asked:
                break
            at = rows.newest(1) + step
            cache.at(torch.full_like(at, cache.width))
            note = Pass(None if mask is None else mask[..., : cache.width])
            logits = forward(self.model, rows.ids.gather(1, at), self._rotary(at), cache, note)
            places = [(b, rows.lengths[b] + step) for b in asked]
            scores = self.scores.processed(self._float(logits[asked, -1]), places)
            drawn = self.rule.propose(scores, asked, self._rotary(at + 1)[asked, 0])
            for row, token in zip(asked, drawn, strict=True):
                proposals[row].append(token)
            rows.write(proposals)
        return proposals

    def _view(self) -> tuple[RowCache, torch.Tensor | None]:
        """Copies of what each row's draft reads, and which of them each sees; rows that read less are padded."""
        chosen = []
        for row in range(len(self.rows)):
            columns = self.rows.columns(row)
            keys = Keys(lambda layer, b=row, c=columns: self.cache.layers[layer].keys[b][:, c].transpose(0, 1))
            chosen.append(columns[self.reading.tokens(row, len(columns), keys)])
        width = max(x.shape[2] for x in chosen)
        missing = torch.tensor([width - x.shape[2] for x in chosen])
        padded = torch.stack([pad(x, (width - x.shape[2], 0)) for x in chosen], dim=1)
        mask = torch.arange(width + self.gamma) >= missing[:, None, None]
        return self.cache.copies(padded, self.gamma), mask if missing.any() else None

    def _verify(self, drafted: int) -> torch.Tensor:
        """Logits ``[B, drafted + 1, V]`` after each row's newest token and those drafted behind it."""
        at = self.rows.newest(drafted + 1)
        return self._pass(at + self.rows.width - self.rows.prompt, self.rows.ids.gather(1, at), self._rotary(at))

    def _pass(self, places: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor, keep: int = 0) -> torch.Tensor:
        """Logits ``[B, n, V]`` of tokens that go to the columns ``places [B, n]``, or of the last ``keep``.

        Their queries are noted if they are wanted.
        """
        note = Pass(self.rows.sees(places), keep_queries=self.reading.queries > 0)
        logits = forward(self.model, ids, positions, self.cache.at(places), note, keep)
        if note.queries:
            self.queries = torch.stack([q.to(logits.device) for q in note.queries])
        return logits

    def _decide(self, proposals: list[list[int]], logits: torch.Tensor) -> None:
        """Take what stands of the proposals and one token more. ``logits [B, n, V]``: after each of them."""
        rows, active = self.rows, list(self.rows.wanted)
        own = [len(proposals[b]) + 1 for b in active]
        places = [(b, rows.lengths[b] + i) for b, count in zip(active, own, strict=True) for i in range(count)]
        flat = self._float(torch.cat([logits[b, :count] for b, count in zip(active, own, strict=True)]))
        scores = self.scores.processed(flat, places)
        next_at = self._rotary(rows.newest(1) + 1)[active, 0]
        verdict = self.rule.verify(scores, [proposals[b] for b in active], active, next_at)
        tokens: list[list[int]] = [[] for _ in self.stats]
        for b, new, part, raw in zip(active, verdict.tokens, scores.split(own), flat.split(own), strict=True):
            tokens[b] = new
            self.kept_scores.add(b, part[: len(new)])
            self.kept_logits.add(b, raw[: len(new)])
        before, cached = list(rows.lengths), [rows.cached(b) for b in active]
        self.kept_logits.cut(rows.extend(tokens, self.scores, self.kept_scores))
        for b, start, accepted in zip(active, cached, verdict.accepted, strict=True):
            if proposals[b]:
                self.stats[b].count(len(proposals[b]), accepted, rows.lengths[b] - before[b])
                if self.reading.queries:
                    self._observe(b, self.queries[:, b, :, : accepted + 1], start + accepted + 1)
        if self.streamer is not None:
            for token in tokens[0][: rows.lengths[0] - before[0]]:
                self.streamer.put(torch.tensor([token]))

    def _observe(self, row: int, queries: torch.Tensor, stop: int) -> None:
        """``queries [L, H, n, D]`` of a row's last tokens up to its ``stop``-th."""
        self.reading.observe(row, Seen(stop - queries.shape[2], queries.transpose(1, 2).float()))

    # --- small things

    def _rotary(self, at: torch.Tensor) -> torch.Tensor:
        """Positions ``[B, n]`` of tokens that lie at ``at [B, n]`` in ``ids``, behind the prompt or its last one."""
        return self.positions[:, -1:] + 1 + (at - self.rows.prompt)

    def _float(self, logits: torch.Tensor) -> torch.Tensor:
        """As ``generate`` hands them to processors: a copy in float32, where the ids are."""
        return logits.to(device=self.rows.ids.device, dtype=torch.float32, copy=True)

    def _give_back(self, sequences: torch.Tensor) -> None:
        """Leave the stock cache as ``generate`` does: all ids but the last, padding behind an end included."""
        shift, stop = self.rows.width - self.rows.prompt, self.rows.width + sequences.shape[1] - self.rows.prompt - 1
        for start in range(min(self.rows.lengths) - 1 + shift, stop, CHUNK):
            places = torch.arange(start, min(start + CHUNK, stop), device=sequences.device).expand(len(sequences), -1)
            at = places - shift
            self._pass(places, sequences.gather(1, at), self._rotary(at), keep=1)
        self.cache.give(self.stock, stop)
