"""SPIRe (arXiv:2504.06419): a few trained layers that read the target's own residual streams. Its three ideas:

sparse KV       the first tokens and a window of the last ones, at their positions in the text (here)
pruned init     it begins as some of the target's layers (``train/prune_init.py``)
feedback        what the target says of verified tokens, and memories of the block's own (``models/feedback.py``)

    slots of a row   0 .. first | first ....... first + window | own
    hold             sinks      | the window, a ring            | the newest token and the proposals, tentative

The target's passes bring the streams of every token that turns out final; its keys and values go over the oldest of the
window. So there is no prefill, a refused proposal leaves nothing behind, and a row never takes more than sinks, window
and one block. Keys carry their positions, and all of a row's slots are read: it is an ordinary short row to any kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import torch

from longdraft.capture import Capture, Needs, Seen
from longdraft.config import MAX_GAMMA, DraftConfig
from longdraft.core import Sequence
from longdraft.drafts.base import DraftRow
from longdraft.drafts.model_draft import ModelDraft
from longdraft.errors import InvalidValueError
from longdraft.kv.store import PagedStore
from longdraft.models.config import ModelConfig
from longdraft.models.feed import Feed, feed
from longdraft.models.feedback import MEMORY, FeedbackConfig
from longdraft.models.transformer import Transformer
from longdraft.models.weights import WeightSource, num_parameters


class SpireModel:
    """A draft's layers on the kernels, with its target's embedding, final norm and head; no state."""

    def __init__(self, config: FeedbackConfig, source: WeightSource, target: Transformer) -> None:
        """``InvalidValueError`` for a draft that needs a prefill."""
        if config.context == "own":
            fix = "Train it for comparison only."
            raise InvalidValueError("context", config.context, "must be another for a draft to be run", fix)
        self.config, self.taps = config, config.taps(target.config.num_layers)
        types = {"dtype": target.dtype, "kv_dtype": target.kv_dtype, "device": target.device}
        layers = replace(target.config, num_layers=len(config.layers))
        page_size = target.layout.page_size
        self.model = Transformer(layers, _Layers(source), **types, page_size=page_size, ends=target)
        self.mix: torch.Tensor | None = None  # [n, n + 1]: how much of each stream is in each layer's memory
        if config.num_memories:
            weights = source.load(MEMORY).to(self.model.device, self.model.spec.compute_dtype)
            self.mix = weights.softmax(dim=-1).expand(len(config.layers), -1)

    @property
    def num_context(self) -> int:
        """Most verified tokens of a sequence that it reads."""
        return self.config.sinks + self.config.window


@dataclass(frozen=True)
class _Layers:
    """A draft's tensors without its memory."""

    source: WeightSource

    @property
    def path(self) -> str:
        return self.source.path

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: shape for name, shape in self.source.shapes().items() if name != MEMORY}

    def load(self, name: str) -> torch.Tensor:
        return self.source.load(name)


def settled(draft: DraftConfig, config: FeedbackConfig) -> DraftConfig:
    """``draft``, whose weights are a SPIRe draft's, with what that reads: it says so itself."""
    reads = {"kv": "streaming_llm", "budget": config.sinks + config.window, "sinks": config.sinks, "refresh": None}
    return replace(draft, **reads)


def weight_bytes(config: FeedbackConfig, target: ModelConfig, dtype: torch.dtype, int8: bool) -> int:
    """Bytes of a draft's layers beside its target; for sizing memory. 8-bit copies of the head, too, if there are any.

    The layers themselves stay, as keys and values are made with them.
    """
    layers = len(config.layers) * num_parameters(target, "model.layers.0.")
    return layers * dtype.itemsize + int8 * (layers + target.vocab_size * target.hidden_size)


def state_bytes(config: FeedbackConfig, target: ModelConfig, kv_dtype: torch.dtype, gamma: int) -> int:
    """Bytes of K and V that a draft keeps of a sequence, at most; for sizing memory."""
    tokens = config.sinks + config.window + gamma
    return tokens * len(config.layers) * target.kv_elements_per_layer * kv_dtype.itemsize


@dataclass
class _State:
    """What a row holds: the tokens ``[0, first)``, and of ``[start, stop)`` the last ``window``; see the picture."""

    first: int = 0
    start: int = 0
    stop: int = 0
    news: list[Seen] = field(default_factory=list)  # what the target said of tokens since

    def size(self, window: int) -> int:
        """Slots that hold verified tokens."""
        return self.first + min(self.stop - self.start, window)


class Spire(ModelDraft):
    """Drafts by a ``SpireModel`` over what the target's passes said of each sequence's first and last tokens."""

    def __init__(self, spire: SpireModel, max_rows: int = 256, *, int8: bool = False) -> None:
        """``max_rows``: sequences that may run at once; each has room for what it reads and one block.

        ``int8``: by 8-bit copies of the weights; ``InvalidValueError`` without the native kernels.
        """
        self.spire, model = spire, spire.model
        self.runs = model.quantised() if int8 else model
        pages = max_rows * -(-(spire.num_context + MAX_GAMMA) // model.layout.page_size)
        self.store = PagedStore(model.config.num_layers, pages, model.layout, model.kv_dtype, model.device)
        self.needs = Needs(hidden=spire.config.window, sinks=spire.config.sinks, taps=spire.taps)
        self._states: dict[int, _State] = {}  # by sequence id
        self._last: tuple[Capture, Seq[Feed]] | None = None  # the step before, whose tokens are no memories yet

    # --- the draft's interface

    def begin(self, rows: Seq[DraftRow]) -> list[Feed | None]:
        """See ``ModelDraft``: the newest token, of which the target has said nothing yet. Without a past, nothing."""
        self._last = None
        self._take_in([row.seq.id for row in rows])
        return [self._feed(row) for row in rows]

    def run(self, feeds: Seq[Feed]) -> torch.Tensor:
        """See ``ModelDraft``."""
        self._remember()
        form = None
        if self.spire.mix is not None:
            tokens = torch.arange(len(feeds), device=self.spire.model.device)
            taps = tuple(range(self.spire.mix.shape[1]))
            form = Capture(tokens, hidden=self.spire.model.hidden_form(len(taps), len(feeds)), taps=taps)
            self._last = form, feeds
        return feed(self.runs, self.store, feeds, capture=form)

    def observe(self, seq: Sequence, seen: Seen) -> None:
        """See ``Draft``."""
        self._states.setdefault(seq.id, _State()).news.append(Seen(seen.start, hidden=seen.hidden))

    def follow(self, seqs: Seq[Sequence]) -> None:
        """See ``Draft``."""
        self._take_in([seq.id for seq in seqs])

    def settle(self, seqs: Seq[Sequence]) -> None:
        """See ``Draft``: nothing, unless more is waiting than a row would hold, as with a draft that sits out."""
        known = [seq.id for seq in seqs if seq.id in self._states]
        self._take_in([row for row in known if len(self._states[row].news) >= self.needs.hidden])

    def fork(self, source: Sequence, child: Sequence) -> None:
        """See ``Draft``: the child shares the pages, unless tokens that are not its own are among them."""
        self._take_in([source.id])
        state = self._states.get(source.id)
        if state and state.stop <= child.num_committed + 1:
            self.store.fork(source.id, child.id, state.size(self.needs.hidden))
            self._states[child.id] = replace(state, news=[])

    def release(self, seq_id: int) -> None:
        """See ``Draft``."""
        if self._states.pop(seq_id, None):
            self.store.free(seq_id)

    def bytes(self, length: int) -> int:
        """See ``Draft``: whole pages of what is read, and of the longest block."""
        pages = self.store.pages_for(min(length, self.spire.num_context) + MAX_GAMMA)
        return pages * self.store.layout.page_size * self.store.bytes_per_token

    def note_bytes(self, length: int) -> int:
        """See ``Draft``: residual streams that wait to become keys and values."""
        config = self.spire.model.config
        return min(length, self.needs.hidden) * config.num_layers * config.hidden_size * 4

    def bytes_read(self, length: int) -> int:
        """See ``Draft``."""
        return min(length, self.spire.num_context) * self.store.bytes_per_token

    # --- its cache

    def _feed(self, row: DraftRow) -> Feed | None:
        state = self._states.get(row.seq.id)
        if state is None or not state.stop:
            return None
        place = state.size(self.needs.hidden)
        self._reserve(row.seq.id, place + row.gamma)
        return Feed(row.seq.id, place, [row.seq.ids[-1]], 1, shift=row.seq.num_committed - place)

    def _reserve(self, row: int, size: int) -> None:
        """Make the first ``size`` slots writable: the ring begins anywhere among them."""
        assert self.store.reserve(row, 0, size), "there are pages for every row that may run"

    def _take_in(self, rows: Seq[int]) -> None:
        """Turn what the target said of the rows' tokens into keys and values, all rows at once."""
        streams: list[torch.Tensor] = []
        positions: list[int] = []
        slots: list[int] = []
        for row in rows:
            state = self._states.get(row)
            if state is None or not state.news:
                continue
            news, state.news = [x for x in (_advance(state, seen, self.needs.sinks) for seen in state.news) if x], []
            oldest = max(state.start, state.stop - self.needs.hidden)
            for seen in news:
                at = [t for t in range(seen.start, seen.stop) if t < state.first or t >= oldest]
                if at:
                    whole = len(at) == seen.stop - seen.start
                    streams.append(seen.hidden if whole else seen.hidden[:, [t - seen.start for t in at]])
                    positions += at
                    slots += self._slots(row, state, at)
        if streams:
            self._write(torch.cat(streams, dim=1), torch.tensor(positions), torch.tensor(slots))

    def _slots(self, row: int, state: _State, at: Seq[int]) -> list[int]:
        """Where the row's tokens ``at`` these positions go: no two to one slot, as they are of one window."""
        window = self.needs.hidden
        self._reserve(row, state.size(window))
        places = (t if t < state.first else state.first + (t - state.start) % window for t in at)
        return self.store.slots_at(row, places)

    def _write(self, streams: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Keys and values of ``streams [n, N, hidden]``, what enters each layer, to the store's ``slots [N]``."""
        model = self.spire.model
        model.write_keys_values(streams, positions.to(model.device), slots.to(model.device), self.store.layers)

    def _remember(self) -> None:
        """The tokens of the step before are the newest no longer: their keys and values come from their memories."""
        if self._last is None:
            return
        form, feeds = self._last
        self._last = None
        memories = (self.spire.mix @ form.hidden.flatten(1)).view(-1, *form.hidden.shape[1:])
        positions = torch.tensor([f.start + f.shift for f in feeds])
        slots = torch.tensor([slot for f in feeds for slot in self.store.slots_at(f.row, [f.start])])
        self._write(memories, positions, slots)


def _advance(state: _State, seen: Seen, sinks: int) -> Seen | None:
    """Go on to where ``seen`` ends, and what of it is new."""
    begin = max(seen.start, state.stop)
    if begin >= seen.stop:
        return None
    if begin > state.stop:  # nobody said what lies between: a new window
        state.start = begin
    elif state.stop == state.first < sinks:
        state.first = state.start = min(seen.stop, sinks)
    state.stop = seen.stop
    return seen if begin == seen.start else seen.since(begin)
