"""Distillation: its loss by hand, blocks that begin everywhere, drafts that get better, and a target written down."""

from dataclasses import replace

import pytest
import torch

from longdraft.checkpoint.base import Checkpoint
from longdraft.checkpoint.spire import read_spire
from longdraft.errors import InvalidValueError, ModelFileError
from longdraft.models.config import parse_hf_config
from longdraft.models.feedback import Ends, FeedbackConfig, FeedbackDraft
from longdraft.models.registry import RandomWeights, tiny_config
from longdraft.models.transformer import Transformer
from longdraft.train.arms import ARMS, an_eighth, student
from longdraft.train.data import Batches
from longdraft.train.distill import Distillation, DistillConfig, Live, Said, Student, first_block, narrowed
from longdraft.train.divergence import compare
from longdraft.train.losses import Top, Whole
from longdraft.train.prune_init import initial_tensors
from longdraft.train.shards import Key, Shards, Shelf, write_shards
from longdraft.train.teacher import Teacher
from tests.spire_drafts import for_training, tensors_of

F64 = torch.float64
SPIRE = FeedbackConfig((1, 2), window=6, sinks=1)


def texts(rows, length, seed=0):
    return torch.randint(128, (rows, length), generator=torch.Generator().manual_seed(seed))


class World:
    """A tiny target, a draft for it, and what asks the one about the other."""

    def __init__(self, config=SPIRE, trained=True, dtype=F64, std=0.3, **more):
        self.config = tiny_config()
        self.source = RandomWeights(self.config, seed=6, std=std)
        self.checkpoint = Checkpoint("the target", "", self.config, self.source, None)
        self.teacher = Teacher(Transformer(self.config, self.source, dtype=F64))
        tensors = tensors_of(self.teacher.model, self.source, config, trained, dtype, **more)
        self.draft = for_training(self.teacher.model, self.source, config, tensors)
        self.student = Student.of_spire(self.draft, self.checkpoint)

    @property
    def live(self):
        return Live(self.teacher, self.draft.taps)

    def objective(self, config=None, source=None):
        return Distillation(self.student, source or self.live, config)


@pytest.fixture(scope="module")
def world():
    return World()


@pytest.mark.parametrize("weights", [(), (4.0, 2.0, 1.0)], ids=["alike", "weighted"])
@torch.no_grad()
def test_the_loss_is_that_of_single_texts_by_hand(world, weights):
    """Blocks of each text from its own beginning on, against logits of the target's own pass."""
    ids = texts(5, 14)
    value, figures = world.objective(DistillConfig(k=3, omega=0.25, weights=weights, seed=1, chunk=4)).loss(ids)
    losses, accepted, text_losses, used = [], [], [], set()
    y = world.teacher.residuals(ids.tolist(), world.draft.taps)
    log_p = torch.cat([x for _, x in world.teacher.chunks(ids.tolist(), (0,))], dim=1).log_softmax(-1)
    for row, text in enumerate(ids):
        first = first_block(text, 3, seed=1)
        used.add(first)
        q = world.draft.logits(world.draft(text[None], y[:, row : row + 1], 3, first))[0].log_softmax(-1)[:-1]
        p = log_p[row, first:-1]
        each = 0.25 * (p.exp() * (p - q)).sum(-1) - 0.75 * compare(p, q)[1]
        share = torch.tensor((weights or (1.0, 1.0, 1.0)) * 5)[: len(each)].double()
        losses.append((each * share).sum() / share.sum())
        accepted.append(compare(p, q)[1].mean())
        text_losses.append(-torch.stack([q[i, text[first + i + 1]] for i in range(len(q))]).mean())
    assert value.item() == pytest.approx(torch.stack(losses).mean().item(), rel=1e-9)
    assert figures["acceptance"] == pytest.approx(torch.stack(accepted).mean().item(), rel=1e-9)
    assert figures["cross_entropy"] == pytest.approx(torch.stack(text_losses).mean().item(), rel=1e-9)
    assert len(used) > 1


@torch.no_grad()
def test_the_targets_logits_are_those_of_its_own_pass(world):
    """Also where it multiplies in bfloat16."""
    ids = texts(2, 14).tolist()
    for model in (world.teacher.model, Transformer(world.config, world.source, dtype=torch.bfloat16)):
        teacher, limit = Teacher(model), 1e-9 if model.dtype == F64 else 1e-3
        streams, own = next(teacher.chunks(ids, (world.config.num_layers,)))
        found = Live(teacher, ()).logits(streams[0].flatten(0, 1))
        torch.testing.assert_close(found, own.flatten(0, 1), rtol=limit, atol=limit * float(own.abs().max()))


@torch.no_grad()
def test_a_head_in_the_type_of_products_changes_no_logit(world):
    ends, x = (
        Ends(*(x.float() for x in (world.draft.embedding, world.draft.norm, world.draft.head))),
        torch.randn(5, 64),
    )
    assert ends.as_multiplied() is ends
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = ends.as_multiplied()
        assert cast.head.dtype == torch.bfloat16 and torch.equal(cast.logits(x, 1e-5), ends.logits(x, 1e-5))
        learned = replace(ends, head=ends.head.clone().requires_grad_())
        assert learned.as_multiplied() is learned


def test_a_batch_in_parts_has_the_same_gradient(world):
    """Parts weighted by their texts, as the training loop takes them."""
    ids, objective = texts(6, 11), world.objective(DistillConfig(k=4))
    whole = gradient(objective, [ids])
    parts = gradient(objective, ids.split([1, 3, 2]))
    for name, x in whole.items():
        torch.testing.assert_close(parts[name], x, rtol=1e-9, atol=1e-12)


def gradient(objective, parts):
    total = sum(len(ids) for ids in parts)
    for p in objective.parameters.values():
        p.grad = None
    for ids in parts:
        (objective.loss(ids)[0] * len(ids) / total).backward()
    return {name: p.grad for name, p in objective.parameters.items()}


def test_the_gradient_is_that_of_finite_differences(world):
    ids, objective, random = texts(2, 9), world.objective(DistillConfig(k=3, chunk=5)), torch.Generator().manual_seed(0)
    found = gradient(objective, [ids])
    ways = {name: torch.randn(p.shape, generator=random, dtype=F64) for name, p in objective.parameters.items()}
    ends, step = [], 1e-6
    with torch.no_grad():
        for sign in (1, -1):
            for times in (1, -1):
                for name, p in objective.parameters.items():
                    p.add_(times * sign * step * ways[name])
                if times == 1:
                    ends.append(float(objective.loss(ids)[0]))
    slope = sum(float((found[name] * way).sum()) for name, way in ways.items())
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(slope, rel=1e-5)


def test_blocks_begin_everywhere_and_by_the_text_alone():
    rows = texts(400, 8)
    counts = torch.bincount(torch.tensor([first_block(row, 5, 3) for row in rows]), minlength=5)
    assert counts.min() > 50 and counts.sum() == 400
    assert [first_block(row.int(), 5, 3) for row in rows] == [first_block(row, 5, 3) for row in rows]
    assert [first_block(row, 5, 4) for row in rows] != [first_block(row, 5, 3) for row in rows]


LEARNING = {
    "spire": (SPIRE, {}, {}),
    "no activations": (FeedbackConfig((1, 2), 6, 1, "off", "own"), {}, {}),
    "random": (SPIRE, {"random_seed": 1}, {"loss": "log_acceptance"}),
}


@pytest.mark.parametrize("name", LEARNING)
def test_a_few_steps_make_a_draft_better_on_other_texts(name):
    config, start, how = LEARNING[name]
    world = World(config, trained=False, std=0.1, **start)
    objective = world.objective(DistillConfig(**how))
    train, held_out = texts(9, 14), texts(4, 14, seed=9)
    with torch.no_grad():
        before = objective.loss(held_out)[1]["acceptance"]
    for step in range(9):
        slopes = gradient(objective, [train[3 * (step % 3) :][:3]])
        with torch.no_grad():
            for name, p in objective.parameters.items():
                p -= 1e-3 * slopes[name].sign()
    with torch.no_grad():
        after = objective.loss(held_out)[1]["acceptance"]
    assert after > before + 0.01, (before, after)


def test_a_model_of_its_own_learns_all_that_it_has(world):
    """A small plain model over a sparse cache, with embedding, norm and head of its own, taught by a wider target."""
    config = tiny_config(hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, tie_embeddings=True)
    source = RandomWeights(config, seed=2)
    ends = Ends.of(config, source, F64)
    learned = {name: getattr(ends, name).requires_grad_() for name in ("embedding", "norm")}
    wide = FeedbackConfig((0, 1), 1, 0, "off", "own")
    model = FeedbackDraft(
        wide, config, initial_tensors(wide, config, source, F64), Ends(*learned.values(), ends.embedding)
    )
    sparse = narrowed(model, window=5, sinks=1)
    student = Student(sparse, learned | dict(sparse.named_parameters()), lambda folder: None)
    objective = Distillation(student, Live(world.teacher, ()), DistillConfig(k=3))
    ids = texts(3, 10)
    grads = gradient(objective, [ids])
    assert all(float(x.abs().max()) > 0 for x in grads.values())
    assert {p.data_ptr() for p in model.parameters()} == {p.data_ptr() for p in sparse.parameters()}
    with torch.no_grad():
        name, step = "embedding", 1e-6
        way = torch.randn(learned[name].shape, generator=torch.Generator().manual_seed(0), dtype=F64)
        ends = []
        for sign in (1, -2):
            learned[name].add_(sign * step * way)
            ends.append(float(objective.loss(ids)[0]))
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(float((grads[name] * way).sum()), rel=1e-5)


def test_arms_lack_what_their_names_say(world):
    """By name: memory, context, beginning and loss; all give a loss, and none changes what another begins with."""
    made = {name: student(how, world.checkpoint, SPIRE, DistillConfig(k=3), seed=4) for name, how in ARMS.items()}
    shown = {
        name: (s.model.config.memory, s.model.config.context, how.loss, how.omega) for name, (s, how) in made.items()
    }
    full = ("per_layer", "activations", "mixed", 0.5)
    assert shown == {
        "spire": full,
        "no-memory": ("off", *full[1:]),
        "no-activations": ("off", "own", *full[2:]),
        "random-init": full,
        "hard-labels": (*full[:2], "hard", 0.5),
        "kl-only": (*full[:3], 1.0),
        "log-acceptance": (*full[:2], "log_acceptance", 0.5),
        "small-distilled": ("off", "own", *full[2:]),
    }
    name, own = "model.layers.0.mlp.up_proj.weight", world.source.load("model.layers.1.mlp.up_proj.weight")
    begun = {arm for arm, (s, _) in made.items() if torch.equal(s.parameters[name], own)}
    assert begun == ARMS.keys() - {"random-init", "small-distilled"}
    for arm, (s, how) in made.items():
        loss = Distillation(s, Live(world.teacher, s.model.taps), how).loss(texts(2, 9))[0]
        assert bool(loss.isfinite()) and loss.requires_grad, arm
    small = parse_hf_config({"vocab_size": 9, **an_eighth(tiny_config())})
    assert (small.hidden_size, small.num_layers, small.head_dim) == (32, 1, 8), "of 64, 3 and 16"


def test_what_is_learned_is_exported(world, tmp_path):
    world.objective().export(tmp_path / "draft")
    read = read_spire(tmp_path / "draft", "mine")
    read.check_target(world.checkpoint)
    assert all(torch.equal(x, world.student.parameters[name]) for name, x in read.tensors().items())


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"k": 0}, "k"),
        ({"loss": "kl"}, "loss"),
        ({"omega": -1}, "omega"),
        ({"temperature": 0.0}, "temperature"),
        ({"weights": (1.0, 1.0)}, "weights"),
        ({"weights": (0.0,) * 4}, "weights"),
    ],
)
def test_senseless_settings_are_refused(settings, what):
    with pytest.raises(InvalidValueError) as caught:
        DistillConfig(**settings)
    assert caught.value.what == what


def test_a_text_without_a_block_is_refused(world):
    with pytest.raises(InvalidValueError, match="length is 4"):
        world.objective(DistillConfig(k=4)).loss(texts(1, 4))


# --- a target written down

TEXTS = texts(7, 12, seed=5)


def key(world, **more):
    return Key.of(world.checkpoint, more.pop("texts", TEXTS), world.draft.taps, **{"top": 16, "per_shard": 3} | more)


def write(world, folder, **more):
    made = key(world, **more)
    write_shards(folder, made, TEXTS, world.teacher, world.draft.logits, batch=2)
    return Shards(folder, made, world.draft.logits)


class Rounded:
    """The target itself, rounded as shards are."""

    def __init__(self, world, last=True):
        self.world, self.last = world, last

    def of(self, ids):
        said = self.world.live.of(ids)
        streams = said.targets.streams
        targets = Whole(streams.bfloat16().float() if self.last else streams, self.world.draft.logits)
        return Said(said.residuals.bfloat16().float(), targets)


@torch.no_grad()
def test_shards_of_all_say_what_the_target_says(world, tmp_path):
    """As exactly as bfloat16, in any order of texts."""
    shards = write(world, tmp_path, top=0)
    ids = TEXTS[[4, 0, 6]]
    got, want = shards.of(ids), Rounded(world).of(ids)
    assert torch.equal(got.residuals, want.residuals)
    assert torch.equal(got.targets.streams, want.targets.streams)
    assert world.objective(source=shards).loss(ids)[0] == world.objective(source=Rounded(world)).loss(ids)[0]


@torch.no_grad()
def test_shards_of_the_largest_entries_bound_what_the_target_says(world, tmp_path):
    shards, whole = write(world, tmp_path), Rounded(world, last=False)
    said = shards.of(TEXTS)
    want = Top.of(whole.of(TEXTS).targets.logits(whole.of(TEXTS).targets.streams), 16)
    torch.testing.assert_close(said.targets.log_p.double(), want.log_p, rtol=1e-5, atol=1e-5)
    assert torch.equal(said.targets.ids, want.ids)
    for seed in range(4):
        how = DistillConfig(seed=seed)
        cut = world.objective(how, shards).loss(TEXTS)[1]
        all_ = world.objective(how, whole).loss(TEXTS)[1]
        assert cut["kl"] <= all_["kl"] + 1e-5
        assert -1e-5 <= cut["acceptance"] - all_["acceptance"] <= float(want.log_rest.exp().max())
        assert cut["cross_entropy"] == pytest.approx(all_["cross_entropy"], rel=1e-6)
    with pytest.raises(InvalidValueError, match="temperature is 0.5"):
        world.objective(DistillConfig(temperature=0.5), shards).loss(TEXTS)


def test_a_file_that_was_not_finished_is_not_there(world, tmp_path, monkeypatch):
    """Killed when all is written, but nothing says yet that it is."""
    monkeypatch.setattr("longdraft.train.files.os.replace", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write(world, tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))


def test_writing_goes_on_where_it_was_killed(world, tmp_path):
    """Whole files stay, half ones do not count, and in the end all is as if nothing had happened."""

    class Killed(Exception):
        pass

    class Mortal(Teacher):
        left = 3

        def residuals(self, rows, taps):
            if not self.left:
                raise Killed
            self.left -= 1
            return super().residuals(rows, taps)

    made, teacher = key(world), Mortal(world.teacher.model)
    with pytest.raises(Killed):
        write_shards(tmp_path / "a", made, TEXTS, teacher, world.draft.logits, batch=2)
    files = sorted((tmp_path / "a").glob("*.safetensors"))
    assert [file.name for file in files] == ["shard-00000.safetensors"]
    with pytest.raises(ModelFileError, match="only 3 texts are there"):
        Shards(tmp_path / "a", made, world.draft.logits)
    (tmp_path / "a" / "shard-00001.safetensors.part").write_bytes(b"half")
    teacher.left, before = 3, files[0].stat().st_mtime_ns  # as many as are still missing
    write_shards(tmp_path / "a", made, TEXTS, teacher, world.draft.logits, batch=2)
    assert files[0].stat().st_mtime_ns == before and teacher.left == 0
    write(world, tmp_path / "b")
    for a, b in zip(*(sorted((tmp_path / x).glob("*.safetensors")) for x in "ab"), strict=True):
        assert a.read_bytes() == b.read_bytes()


def test_shards_of_something_else_are_refused_by_name(world, tmp_path):
    write(world, tmp_path)
    other = World()
    other.checkpoint = Checkpoint("the other", "", other.config, RandomWeights(other.config, seed=7), None)
    for made, words in (
        (key(other), "made by 'the target', whose fingerprint is .*; 'the other'"),
        (key(world, top=8), "whose top is 16; .* has 8"),
        (key(world, temperature=0.7), "whose temperature is 1.0"),
        (replace(key(world), taps=(0, 1)), r"whose taps is \[1, 2\]"),
        (key(world, texts=texts(7, 12)), "whose texts is"),
    ):
        with pytest.raises(ModelFileError, match=words):
            Shards(tmp_path, made, world.draft.logits)
        with pytest.raises(ModelFileError, match=words):
            write_shards(tmp_path, made, TEXTS, world.teacher, world.draft.logits)
    with pytest.raises(InvalidValueError, match="one of those the shards were made of"):
        Shards(tmp_path, key(world), world.draft.logits).of(texts(1, 12, seed=8))
    asking = Shards(tmp_path, key(world), world.draft.logits, otherwise=world.live)
    assert isinstance(asking.of(texts(1, 12, seed=8)).targets, Whole)
    assert isinstance(asking.of(TEXTS).targets, Top)
    (tmp_path / "shard-00001.safetensors").write_bytes(b"damaged")
    with pytest.raises(ModelFileError, match="Delete it"):
        Shards(tmp_path, key(world), world.draft.logits)


class Silent(Teacher):
    def residuals(self, rows, taps):
        raise RuntimeError("the target is asked")


def test_a_shelf_has_texts_of_every_length_and_runs_the_target_for_no_other(world, tmp_path):
    """What is read is what the target says, rounded; texts that are not there are asked of it."""
    stream = texts(1, 50)[0].to(torch.int32)
    batches = Batches(stream, {8: 0.5, 12: 0.5}, 24, seed=1, fixed=True)
    shelf = Shelf.written(tmp_path, world.checkpoint, batches.texts(), world.live)
    silent = Shelf.written(
        tmp_path, world.checkpoint, batches.texts(), replace(world.live, teacher=Silent(world.teacher.model))
    )
    for step in range(6):  # more than an epoch of each
        ids = batches.step(step)
        said, live = silent.of(ids), world.live.of(ids)
        torch.testing.assert_close(said.residuals.double(), live.residuals, rtol=0.01, atol=0.01)
        assert torch.equal(said.targets.streams, shelf.of(ids).targets.streams)
    assert shelf.of(texts(2, 8, seed=3)).residuals.dtype == F64, "live"
    with pytest.raises(RuntimeError, match="asked"):
        silent.of(texts(2, 8, seed=3))
