"""SPIRe's layers in plain torch: blocks side by side against one token at a time, by the equations."""

import math
from itertools import product

import pytest
import torch

from longdraft.errors import InvalidValueError
from longdraft.models.config import RopeConfig
from longdraft.models.feedback import CONTEXTS, MEMORIES, MEMORY, FeedbackConfig
from longdraft.models.registry import RandomWeights, tiny_config
from longdraft.models.transformer import Transformer
from longdraft.train.prune_init import (
    block_influence,
    influential_layers,
    initial_memory,
    initial_tensors,
    last_layers,
    spaced_layers,
    spread_layers,
)
from longdraft.train.teacher import Teacher
from tests.spire_drafts import for_training, tensors_of

F64 = torch.float64


class World:
    """A tiny target in float64, a text, its residual streams and a draft."""

    def __init__(self, config: FeedbackConfig, length=23, batch=2, trained=True, **overrides):
        self.config, self.target_config = config, tiny_config(**overrides)
        self.source = RandomWeights(self.target_config, seed=6)
        self.target = Transformer(self.target_config, self.source, dtype=F64)
        self.ids = torch.randint(128, (batch, length), generator=torch.Generator().manual_seed(length))
        self.tensors = tensors_of(self.target, self.source, config, trained)
        self.draft = for_training(self.target, self.source, config, {n: x.clone() for n, x in self.tensors.items()})
        self.y = Teacher(self.target).residuals(self.ids.tolist(), self.draft.taps)

    def blocks(self, k, first=0, **changes):
        """Logits ``[B, L - first, V]``, with another ``ids`` or ``y`` if given."""
        ids, y = changes.get("ids", self.ids), changes.get("y", self.y)
        return self.draft.logits(self.draft(ids, None if self.config.context == "own" else y, k, first))


class OneByOne:
    """The draft's equations for one sequence, one token and one key at a time."""

    def __init__(self, world, row):
        self.world, self.config, self.t = world, world.config, world.tensors
        self.ids, self.y = world.ids[row].tolist(), world.y[:, row]
        self.n, self.c = len(self.config.layers), world.target_config
        self.past = {}  # position → the token's own residual streams

    def norm(self, x, weight):
        return x / (x.square().mean() + self.c.norm_eps).sqrt() * weight

    def linear(self, i, name, x):
        prefix = f"model.layers.{i}.{name}"
        y = self.t[f"{prefix}.weight"] @ x
        return y + self.t[f"{prefix}.bias"] if f"{prefix}.bias" in self.t else y

    def heads(self, i, which, x, position):
        x = self.norm(x, self.t[f"model.layers.{i}.input_layernorm.weight"])
        heads = self.linear(i, f"self_attn.{which}_proj", x).view(-1, self.c.head_dim)
        if which == "v":
            return heads
        half = self.c.head_dim // 2
        if self.c.qk_norm:
            weight = self.t[f"model.layers.{i}.self_attn.{which}_norm.weight"]
            heads = torch.stack([self.norm(head, weight) for head in heads])
        # Angles are of float32, as in every model.
        angle = position * (1 / self.c.rope.theta ** (torch.arange(0, 2 * half, 2).float() / self.c.head_dim))
        turn = torch.complex(angle.cos().double(), angle.sin().double())
        turned = torch.complex(heads[:, :half], heads[:, half:]) * turn
        return torch.cat([turned.real, turned.imag], dim=1)

    def kv(self, i, x, position):
        return self.heads(i, "k", x, position), self.heads(i, "v", x, position)

    def attention(self, i, x, position, cache):
        q, group = self.heads(i, "q", x, position), self.c.num_heads // self.c.num_kv_heads
        out = []
        for h, query in enumerate(q):
            scores = torch.stack([k[h // group] @ query for k, _ in cache]) / math.sqrt(self.c.head_dim)
            out.append(sum(w * v[h // group] for w, (_, v) in zip(scores.softmax(0), cache, strict=True)))
        return self.linear(i, "self_attn.o_proj", torch.cat(out))

    def layer(self, i, x, position, cache):
        x = x + self.attention(i, x, position, cache)
        h = self.norm(x, self.t[f"model.layers.{i}.post_attention_layernorm.weight"])
        gate, up = (self.linear(i, f"mlp.{name}_proj", h) for name in ("gate", "up"))
        return x + self.linear(i, "mlp.down_proj", gate * gate.sigmoid() * up)

    def memory(self, i, streams):
        if self.config.memory == "off":
            return streams[i]
        weights = self.t[MEMORY][0 if self.config.memory == "shared" else i].softmax(0)
        return sum(w * x for w, x in zip(weights, streams, strict=True))

    def block(self, start, stop):
        seen = [t for t in range(start) if t < self.config.sinks or t >= start - self.config.window]
        own = [[] for _ in range(self.n)]
        for p in range(start, stop):
            streams = [self.world.draft.embedding[self.ids[p]]]
            for i in range(self.n):
                past = [self.past[t][i] if self.config.context == "own" else self.y[i, t] for t in seen]
                cache = [self.kv(i, x, t) for x, t in zip(past, seen, strict=True)]
                cache += own[i] + [self.kv(i, streams[i], p)]
                streams.append(self.layer(i, streams[i], p, cache))
            for i in range(self.n):
                own[i].append(self.kv(i, self.memory(i, streams), p))
            self.past[p] = streams
            yield streams[-1]

    def logits(self, k, first=0):
        length = len(self.ids)
        x = [y for start in range(first, length, k) for y in self.block(start, min(start + k, length))]
        return self.world.draft.logits(torch.stack(x))


KINDS = [(memory, context) for memory, context in product(MEMORIES, CONTEXTS) if context != "own" or memory == "off"]
MHA = {"num_kv_heads": 4}
MQA = {"num_kv_heads": 1, "qk_norm": True, "rope": RopeConfig(theta=500.0)}
BIASED = {"num_heads": 9, "num_kv_heads": 3, "hidden_size": 48, "qkv_bias": True, "o_bias": True, "mlp_bias": True}
CASES = [  # layers, window, sinks, k, first, target
    ((1, 2), 6, 2, 4, 0, {}),
    ((0, 1, 2), 3, 0, 3, 5, MQA),
    ((0, 2), 1, 1, 5, 1, BIASED),
    ((2,), 64, 4, 1, 0, MHA),
]


@torch.no_grad()
@pytest.mark.parametrize(("memory", "context"), KINDS)
def test_blocks_are_what_single_steps_give(memory, context):
    """Lengths that k does not divide, tokens before the window is full, sinks that the window still covers."""
    for case, (layers, window, sinks, k, first, overrides) in enumerate(CASES):
        if (case + KINDS.index((memory, context))) % 2 and memory != "per_layer":
            continue
        first = 0 if context == "own" else first
        world = World(FeedbackConfig(layers, window, sinks, memory, context), **overrides)
        got = world.blocks(k, first)
        want = OneByOne(world, case % 2).logits(k, first)
        torch.testing.assert_close(got[case % 2], want, rtol=1e-9, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("memory", ["per_layer", "off"])
def test_all_layers_with_the_inputs_as_memories_are_the_target(memory):
    world = World(FeedbackConfig((0, 1, 2), window=100, memory=memory), trained=False)
    if memory == "per_layer":
        world.draft.memory.copy_(initial_memory(world.config, peak=60.0))
    logits = torch.cat([x for _, x in Teacher(world.target).chunks(world.ids.tolist(), (0,))], dim=1)
    torch.testing.assert_close(world.blocks(4), logits, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_nothing_is_known_of_what_comes_later_or_lies_outside():
    """Another token or stream changes what follows it and can see it, and nothing else."""
    window, k, at = 5, 4, 9
    world = World(FeedbackConfig((1, 2), window, sinks=1), length=24)
    plain = world.blocks(k)
    ids, y = world.ids.clone(), world.y.clone()
    ids[:, at] = (ids[:, at] + 1) % 128
    changed = (world.blocks(k, ids=ids) - plain).abs().amax(dim=(0, 2)) > 1e-6
    assert changed.nonzero().flatten().tolist() == [9, 10, 11]  # its own block, from itself on
    y[:, :, at] += 1.0
    changed = (world.blocks(k, y=y) - plain).abs().amax(dim=(0, 2)) > 1e-6
    assert changed.nonzero().flatten().tolist() == [12, 13, 14, 15]  # the block that has it in its window: [7, 12)


def test_memories_are_means_that_learn():
    """Weights add up to one, and loss reaches each of them at the start, far from the others as one is."""
    world = World(FeedbackConfig((0, 1, 2), 8), trained=False)
    weights = world.draft.memory.softmax(dim=-1)
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(3, dtype=F64))
    assert weights.argmax(dim=-1).tolist() == [0, 1, 2]
    assert 0.98 < weights.max(dim=-1).values.min().item() < 0.99
    world.blocks(4).square().mean().backward()
    assert bool((world.draft.memory.grad.abs() > 1e-9).all())
    assert all(p.grad is not None and float(p.grad.abs().max()) > 0 for p in world.draft.parameters())
    assert {name for name, _ in world.draft.named_parameters()} == world.tensors.keys()


def test_gradients_are_those_of_finite_differences():
    world = World(FeedbackConfig((1, 2), 3, 1), length=7, batch=1)
    names = [MEMORY, "model.layers.0.self_attn.k_proj.weight", "model.layers.1.input_layernorm.weight"]
    random = torch.Generator().manual_seed(0)

    def loss():
        return world.blocks(3).log_softmax(dim=-1).gather(2, world.ids[..., None]).mean()

    loss().backward()
    for name, p in ((name, dict(world.draft.named_parameters())[name]) for name in names):
        way, step = torch.randn(p.shape, generator=random, dtype=F64), 1e-6
        with torch.no_grad():
            ends = []
            for sign in (1, -1):
                p.add_(sign * step * way)
                ends.append(float(loss()))
                p.sub_(sign * step * way)
        assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(float((p.grad * way).sum()), rel=1e-5), name


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"layers": ()}, "layers"),
        ({"layers": (2, 1)}, "layers"),
        ({"layers": (1, 1)}, "layers"),
        ({"layers": (-1,)}, "layers"),
        ({"layers": ("1",)}, "layers"),
        ({"window": 0}, "window"),
        ({"sinks": -1}, "sinks"),
        ({"memory": "both"}, "memory"),
        ({"context": "target"}, "context"),
        ({"context": "own"}, "memory"),
    ],
)
def test_senseless_drafts_are_refused(settings, what):
    with pytest.raises(InvalidValueError) as caught:
        FeedbackConfig(**{"layers": (1,), **settings})
    assert caught.value.what == what


def test_which_streams_are_read():
    taps = {context: FeedbackConfig((1, 2), memory="off", context=context).taps(8) for context in CONTEXTS}
    assert (taps["activations"], taps["last"], taps["embedding"]) == ((1, 2), (8, 8), (0, 0))


# --- where training begins


def test_layers_are_chosen_from_the_end_evenly_or_by_influence():
    assert last_layers(2, 8) == (6, 7)
    assert spaced_layers(2, 8) == (3, 7)
    assert spaced_layers(3, 8) == (1, 4, 7)
    assert spaced_layers(8, 8) == last_layers(8, 8) == tuple(range(8))
    assert [spread_layers(n, 8) for n in (1, 2, 3, 8)] == [(7,), (0, 7), (0, 3, 7), tuple(range(8))]
    assert spread_layers(8, 30) == (0, 4, 8, 12, 16, 20, 24, 29)
    assert influential_layers(2, torch.tensor([0.5, 0.1, 0.5, 0.7])) == (0, 3)
    for n, choose in product((0, 9), (last_layers, spread_layers)):
        with pytest.raises(InvalidValueError, match=f"is {n}.*from 1 to 8"):
            choose(n, 8)
    with pytest.raises(InvalidValueError, match="below the target's 3 layers"):
        initial_tensors(FeedbackConfig((3,)), tiny_config(), RandomWeights(tiny_config()))


def test_block_influence_is_the_turn_of_the_stream():
    """Against cosines token by token; a layer that adds nothing has none."""
    world = World(FeedbackConfig((0,)))
    rows = [world.ids[0].tolist(), world.ids[1, :5].tolist()]
    cosines = [[], [], []]
    for row in rows:
        for y in Teacher(world.target).residuals([row], range(4))[:, 0].unbind(1):
            for i in range(3):
                cosines[i].append(float(y[i] @ y[i + 1] / (y[i].norm() * y[i + 1].norm())))
    got = block_influence(world.target, rows)
    torch.testing.assert_close(got, torch.tensor([1 - sum(c) / len(c) for c in cosines], dtype=F64))
    assert len(set(influential_layers(2, got))) == 2


def test_a_draft_begins_as_copies_of_the_targets_layers():
    config, source = FeedbackConfig((0, 2)), RandomWeights(tiny_config())
    tensors = initial_tensors(config, tiny_config(), source)
    for name in ("self_attn.q_proj.weight", "mlp.down_proj.weight", "post_attention_layernorm.weight"):
        assert torch.equal(tensors[f"model.layers.1.{name}"], source.load(f"model.layers.2.{name}"))
    other = initial_tensors(config, tiny_config(), source, random_seed=1)
    assert {n: x.shape for n, x in other.items()} == {n: x.shape for n, x in tensors.items()}
    assert not torch.equal(other["model.layers.1.mlp.up_proj.weight"], tensors["model.layers.1.mlp.up_proj.weight"])
    assert torch.equal(initial_memory(FeedbackConfig((0, 2), memory="shared")), torch.zeros(1, 3))
