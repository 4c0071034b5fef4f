"""Draft steps as vLLM's CUDA graphs, over the runner of ``test_vllm_glue.py``: what a graph reads, and where.

A graph here is what it is in vLLM: it reads buffers that it was captured with, as many entries as its key says.
"""

from __future__ import annotations

import random
from enum import Enum
from types import SimpleNamespace

import pytest
import torch

from longdraft.errors import InvalidValueError
from longdraft.integrations.vllm.graphs import Graphs
from longdraft.integrations.vllm.guard import GRAPHS, graphs_refusals
from longdraft.integrations.vllm.settings import Settings
from longdraft.integrations.vllm.tables import PAD_SLOT, Step
from tests.unit.test_vllm_glue import BLOCK, Runner, decode, texts

STALE = 10_007  # what buffers hold of steps before: no token, no position that is written


class Mode(Enum):
    """vLLM's ``CUDAGraphMode``."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_AND_PIECEWISE = 3
    FULL_DECODE_ONLY = 4

    def mixed_mode(self):
        return {3: Mode.PIECEWISE, 4: Mode.NONE}.get(self.value, self)


class Capturing(Runner):
    """A runner with graphs of ``sizes`` tokens."""

    def __init__(self, *args, sizes=(1, 2, 4, 8), **more):
        super().__init__(*args, **more)
        self.sizes, self.ran = sizes, []
        self.input_ids = SimpleNamespace(gpu=torch.full((16,), STALE, dtype=torch.int32))
        self.positions = torch.full((16,), STALE)
        self.is_padding = torch.ones(16, dtype=torch.bool)
        self.input_batch.block_table[0].slot_mapping = SimpleNamespace(gpu=torch.full((16,), STALE))
        self.cudagraph_dispatcher = SimpleNamespace(dispatch=self.dispatch, cudagraph_mode=Mode.FULL_AND_PIECEWISE)
        self.supports_mm_inputs = False
        self.graphs = Graphs(self, Mode.NONE, Mode.PIECEWISE)
        self.captured = (self.input_ids.gpu, self.positions, self.input_batch.block_table[0].slot_mapping.gpu)

    def dispatch(self, num_tokens, valid_modes):
        assert valid_modes == {Mode.NONE, Mode.PIECEWISE}  # a whole pass's graph would verify, not draft
        size = next((s for s in self.sizes if s >= num_tokens), None)
        return (Mode.PIECEWISE, SimpleNamespace(num_tokens=size)) if size else (Mode.NONE, "its own")

    def _prepare_padding_mask(self, unpadded, padded):
        mask = self.is_padding[:padded]
        mask[:unpadded], mask[unpadded:] = False, True
        return mask

    def forward(self, ids, step, tables, index):
        feed, n = self.graphs.feed(ids, step), len(ids)
        self.ran.append((n, feed.key and feed.key.num_tokens))
        if feed.mode is Mode.NONE:
            assert feed.key is None and feed.padding is None
            return super().forward(feed.ids, Step(step.lengths, feed.positions, feed.slots), tables, index)
        size = feed.key.num_tokens
        for fed, captured in zip((feed.ids, feed.positions, feed.slots), self.captured, strict=True):
            assert fed.data_ptr() == captured.data_ptr() and len(fed) == size
            assert (captured[size:] == STALE).all()
        ids, positions, slots = (buffer[:size].clone() for buffer in self.captured)
        assert (slots[n:] == PAD_SLOT).all() and not ids[n:].any() and not positions[n:].any()
        assert feed.padding.tolist() == [i >= n for i in range(size)]
        for buffer in self.captured:
            buffer.fill_(STALE)
        return super().forward(ids[:n], Step(step.lengths, positions[:n], slots[:n]), tables, index)


@pytest.mark.parametrize(("count", "size"), [(1, 1), (3, 4), (5, 8), (8, 8), (9, None)])
def test_a_round_is_fed_from_the_captured_buffers_padded_to_a_captured_size(count, size):
    runner = Capturing(texts(random.Random(count), count), seed=count)
    assert runner.drafter(most=4).propose(*runner.arguments()) == [decode(text, 4) for text in runner.texts]
    assert runner.ran == [(count, size)] * 4 and not runner.said


def test_rows_of_different_length_and_padding_write_the_rows_own_slots_alone():
    rows = texts(random.Random(20), 5, 10)
    runner = Capturing(rows, seed=3)
    wishes = [0, 1, 4, 2, 3]
    for request, gamma in zip(runner.requests.values(), wishes, strict=True):
        request.sampling_params.extra_args = {"longdraft_gamma": gamma}
    drafts = runner.drafter(Settings(draft="full"), most=4).propose(*runner.arguments())
    assert drafts == [decode(text, 4)[:gamma] for text, gamma in zip(rows, wishes, strict=True)]
    assert runner.ran == [(4, 4)] * 4  # the row that drafts none is not among them
    table = runner.input_batch.block_table[0].table
    own = [
        int(table[i, p // BLOCK]) * BLOCK + p % BLOCK
        for i, (text, gamma) in enumerate(zip(rows, wishes, strict=True))
        for p in range(len(text) - 1, len(text) - 1 + gamma)
    ]
    assert sorted(runner.written) == sorted(own)


def piecewise(answer=True):
    return SimpleNamespace(compilation_config=SimpleNamespace(is_attention_compiled_piecewise=lambda: answer))


@pytest.mark.parametrize("name", [*GRAPHS, "input_batch.block_table.slot_mapping"])
def test_whatever_is_missing_is_named_and_graphs_are_done_without(name):
    runner = Capturing(texts(random.Random(1), 2))
    assert not list(graphs_refusals(runner, piecewise()))
    thing, (*path, last) = runner, name.split(".")
    for part in path:
        thing = getattr(thing, part)
    thing = thing[0] if isinstance(thing, list) else thing
    if last == "_prepare_padding_mask":
        runner = SimpleNamespace(**{k: getattr(runner, k) for k in ("input_batch", *vars(runner))})
    else:
        delattr(thing, last)
    (why,) = graphs_refusals(runner, piecewise())
    assert last in why


def test_graphs_of_whole_passes_serve_no_draft():
    runner = Capturing(texts(random.Random(2), 2))
    for mode, said in ((Mode.NONE, 0), (Mode.PIECEWISE, 0), (Mode.FULL, 1), (Mode.FULL_DECODE_ONLY, 1)):
        runner.cudagraph_dispatcher.cudagraph_mode = mode
        why = list(graphs_refusals(runner, piecewise()))
        assert len(why) == said and all(mode.name in sentence for sentence in why)
    runner.cudagraph_dispatcher.cudagraph_mode = Mode.FULL_AND_PIECEWISE
    assert "attention" in next(graphs_refusals(runner, piecewise(False)))
    assert "lacks is_attention" in next(graphs_refusals(runner, SimpleNamespace()))
    runner.supports_mm_inputs = True
    assert "multimodal" in next(graphs_refusals(runner, piecewise()))


def test_graphs_can_be_switched_off():
    assert Settings().graphs and not Settings.of_server({"longdraft": {"graphs": False}}).graphs
    with pytest.raises(InvalidValueError, match="graphs"):
        Settings.of_server({"longdraft": {"graphs": "no"}})
