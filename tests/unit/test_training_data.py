"""Texts to train on: kept apart, cut and ordered as computed; vocabularies; recipes and what is wrong with them."""

import sysconfig
from collections import Counter
from pathlib import Path

import pytest
import torch

from longdraft.errors import InvalidValueError
from longdraft.train.corpora import NOVELS, Document, documents, novel
from longdraft.train.data import Batches, Streams, held_out, is_held_out, tokenize
from longdraft.train.recipe import parse_recipe, read_recipe
from longdraft.train.vocabulary import END, learn_tokenizer

CONFIGS = Path(__file__).parents[2] / "configs"
MINIMAL = {"target": {"path": "smollm2-135m-instruct"}, "draft": {}}


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    texts = ["the cat and the hat 1234 and the cat\n" * 20, "naïve ☃ text"]
    return learn_tokenizer(texts, 280, tmp_path_factory.mktemp("words"))


# --- texts


def test_what_is_here_anyway_is_not_what_is_measured_on():
    found = documents(["novels", "stdlib"], [])
    assert len({document.name for document in found}) == len(found) > 300
    whole = {name: novel(name) for name in NOVELS}
    for document in found:
        if document.name.rpartition(" ")[0] in NOVELS:
            text = whole[document.name.rpartition(" ")[0]]
            assert text.index(document.text) + len(document.text) <= len(text) // 3
        else:
            assert Path(document.name).parent != Path(sysconfig.get_path("stdlib")), "one of code_text's modules"
    assert found[: len(whole)] == documents(["novels"], [])[: len(whole)]
    paths = [Path(document.name) for document in found if document.name.endswith(".py")]
    assert paths == sorted(paths), "the order in which a folder lists its files is nobody's"
    assert not any({"encodings", "test", "tests", "site-packages"} & {*path.parts} for path in paths)


def test_users_texts_are_files_and_folders(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.md").write_text("text " * 100)
    (tmp_path / "b.txt").write_text("other " * 100, encoding="utf-8")
    (tmp_path / "c.txt").write_bytes(b"\xff" * 300)
    (tmp_path / "few.txt").write_text("hardly anything")
    (tmp_path / "nul.txt").write_text("no text\0" * 100)
    (tmp_path / "d.bin").write_text("no " * 100)
    assert [Path(d.name).name for d in documents([], [tmp_path])] == ["b.txt", "a.md"]
    assert documents([], [tmp_path / "d.bin"])[0].text.startswith("no")
    for corpora, paths in (([], [tmp_path / "c.txt"]), ([], [tmp_path / "none"]), (["web"], []), ([], [])):
        with pytest.raises(InvalidValueError):
            documents(corpora, paths)


def test_held_out_texts_are_never_trained_on(learned):
    """Each document has a letter of its own; equal texts are on one side."""
    found = [Document(f"{n}", chr(0x4E00 + n // 2) * 30) for n in range(120)]
    held = [document.text[0] for document in found if is_held_out(document, 0.3)]
    assert 20 < len(held) < 55 and set(Counter(held).values()) == {2}
    streams = tokenize(found, learned, 0.3)
    batches = Batches(streams.train, {16: 0.5, 64: 0.5}, 128, seed=3)
    seen = "".join(learned.decode(row) for step in range(150) for row in batches.step(step).tolist())
    assert set(held).isdisjoint(seen) and len(set(seen) - {"�"}) == 60 - len(set(held))
    tested = "".join(map(learned.decode, next(held_out(streams.held_out, [16], 10**6)).tolist()))
    assert set(held) == set(tested) - {"�"}
    for share in (0.0, 1.0):
        with pytest.raises(InvalidValueError, match="held_out"):
            tokenize(found, learned, share)


def test_ids_are_kept_for_the_next_time(learned, tmp_path, tmp_path_factory):
    found = [Document("a", "the cat"), Document("b", f"a hat {END}"), Document("c", "1234")]
    share = next(s / 16 for s in range(1, 16) if 0 < sum(is_held_out(d, s / 16) for d in found) < 3)
    first = tokenize(found, learned, share, tmp_path)
    ids = torch.cat([first.train, first.held_out]).tolist()
    assert ids.count(learned.eos_token_id) == 3, "the end of each document, and none that its text names"
    assert tokenize(found, learned, share, tmp_path).digest == first.digest
    assert len(list(tmp_path.iterdir())) == 1
    tokenize(found[::-1], learned, share, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    sides = {s: {d.name for d in found if is_held_out(d, s)} for s in (n / 64 for n in range(1, 64))}
    other = next(s for s, held in sides.items() if 0 < len(held) < 3 and held != sides[share])
    words = learn_tokenizer(["the cat " * 20], 300, tmp_path_factory.mktemp("other"))
    for tokenizer, part in ((learned, other), (words, share)):  # not what is kept: it was of another side, or words
        want = tokenize(found, tokenizer, part).digest
        assert tokenize(found, tokenizer, part, tmp_path).digest == want != first.digest
    assert Streams(first.held_out, first.train).digest != first.digest


# --- order


def test_what_a_step_trains_on_depends_on_nothing_but_seed_and_step():
    stream = torch.arange(1000, dtype=torch.int32)
    one, other = (Batches(stream, {8: 0.25, 32: 0.75}, 64, seed=5) for _ in range(2))
    steps = [one.step(step) for step in range(40)]
    assert all(torch.equal(other.step(step), steps[step]) for step in reversed(range(40)))
    assert not torch.equal(Batches(stream, {8: 0.25, 32: 0.75}, 64, seed=6).step(0), steps[0])
    for ids in steps:
        assert ids.dtype == torch.int64 and ids.numel() == 64
        assert bool((ids.diff(dim=1) == 1).all()), "each sequence is one piece of the stream"
    shares = Counter(ids.shape[1] for ids in steps)
    assert abs(shares[8] - 10) <= 1 and shares[8] + shares[32] == 40


def test_an_epoch_goes_over_every_sequence_once():
    batches = Batches(torch.arange(168, dtype=torch.int32), {8: 1.0}, 40, seed=1)  # 20 sequences of 8, and room
    starts = torch.cat([batches.step(step)[:, 0] for step in range(12)]).view(3, 20)
    for epoch in starts:
        assert len(set((epoch - epoch.min()).tolist())) == 20 and set((epoch % 8).tolist()) == {int(epoch[0]) % 8}
    orders = [tuple((epoch - epoch.min()).tolist()) for epoch in starts]
    assert len(set(orders)) == 3 and len({int(epoch.min()) for epoch in starts}) > 1


def test_fixed_sequences_are_the_same_in_every_epoch():
    batches = Batches(torch.arange(171, dtype=torch.int32), {8: 1.0}, 56, seed=1, fixed=True)  # 21 sequences of 8
    seen = torch.cat([batches.step(step) for step in range(9)]).view(3, 21, 8)
    (texts,) = batches.texts()
    for epoch in seen:
        assert sorted(epoch.tolist()) == texts.tolist()
    assert seen[0].tolist() != seen[1].tolist()


def test_lengths_must_fit():
    stream = torch.arange(100, dtype=torch.int32)
    with pytest.raises(InvalidValueError, match="at most the 100 tokens"):
        Batches(stream, {128: 1.0}, 128, 0)
    with pytest.raises(InvalidValueError, match="multiple of the length 24.*72"):
        Batches(stream, {24: 1.0}, 64, 0)
    assert Batches(stream, {100: 1.0}, 100, 0).step(7).tolist() == [list(range(100))]


# --- vocabularies


def test_any_text_can_be_encoded(learned):
    for text in ("the cat", "☃ naïve\r\n\x00\U0001f9ea", "", " 12  34", f"{END} as text"):
        ids = learned.encode(text, add_special_tokens=False, allow_special=False)
        assert learned.decode(ids) == text and learned.eos_token_id not in ids
    assert learned.eos_token_id == 0 and 257 < learned.vocab_size <= 280
    assert len(learned.encode("the cat")) == 2 and len(learned.encode("1234")) == 4
    with pytest.raises(InvalidValueError, match="vocab_size"):
        learn_tokenizer(["a"], 100, Path("nowhere"))


# --- recipes


def test_the_recipes_of_the_project_are_right():
    tiny, real = (read_recipe(CONFIGS / f"spire_{name}.toml") for name in ("tiny", "smollm2"))
    assert tiny.target.model["num_hidden_layers"] == 8 and tiny.draft.layers == "last:2" and real.draft.window == 64
    late = sum(share * max(0, length - 2048) / length for length, share in real.run.lengths.items())
    assert late >= 0.25, "of the tokens are at positions from 2,048 on"
    assert tiny.with_run(steps=3).target.run.steps == tiny.with_run(steps=3).run.steps == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"drafts": {}}, ["drafts", "no such setting", "'draft'"]),
        ({"draft": {"windw": 5}}, ["draft.windw", "'window'"]),
        ({"draft": {"window": 0}}, ["draft.window is 0", "from 1"]),
        ({"draft": {"layers": "first:2"}}, ["draft.layers", "last:n"]),
        ({"draft": {"layers": [3, 1]}}, ["draft.layers", "ascending"]),
        ({"draft": {"kind": "model"}}, ["draft.kind", "draft.model"]),
        ({"draft": {"init": "zero"}}, ["draft.init", "pruned, random"]),
        ({"draft": 3}, ["draft is 3", "table"]),
        ({"run": {"steps": 1.5}}, ["run.steps is 1.5"]),
        ({"run": {"lengths": {"512": 0.5}}}, ["run.lengths", "add up to 1"]),
        ({"run": {"lengths": {"x": 1.0}}}, ["run.lengths"]),
        ({"run": {"autocast": "float16"}}, ["run.autocast", "off, bfloat16"]),
        ({"optim": {"lr": "fast"}}, ["optim.lr is 'fast'"]),
        ({"optim": {"beta3": 1}}, ["optim.beta3", "'beta"]),
        ({"loss": {"omega": 2}}, ["loss.omega is 2"]),
        ({"data": {"paths": "x"}}, ["data.paths", "list of words"]),
        ({"data": {"cache": 1}}, ["data.cache is 1", "False, True"]),
        ({"data": {"written": {"text": 5}}}, ["data.written.text", "'texts'"]),
        ({"data": {"written": 3}}, ["data.written is 3", "table"]),
        ({"data": {"written": {"prompt": 640}}}, ["data.written.prompt is 640", "from 1 to 639"]),
        ({"data": {"written": {"texts": 0}}}, ["data.written.texts is 0", "from 1"]),
        ({"data": {"written": {"temperature": 101}}}, ["data.written.temperature is 101"]),
        ({"data": {"written": {"seed": 2**63 - 1}}}, ["data.written.seed"]),
        ({"data": {"written": {"corpora": ["web"]}}}, ["data.written.corpora", "novels, stdlib"]),
        ({"data": {"corpora": ["novels"], "written": {"corpora": ["stdlib"]}}}, ["data.written.corpora", "novels"]),
        ({"data": {"paths": ["a"], "written": {"paths": ["b"]}}}, ["data.written.paths", "which are a"]),
        ({"data": {"written": {}}, "target": {"model": {}}, "draft": None}, ["data.written", "[draft]"]),
        ({"arms": {"names": ["spire", "no-memry"]}}, ["arms.names", "no-memory", "vanilla"]),
        ({"arms": {"names": ["spire", "all"]}}, ["arms.names"]),
        ({"arms": {}, "draft": {"kind": "model", "model": {}}}, ["arms", "'spire'"]),
        ({"evaluate": {"contexts": []}}, ["evaluate.contexts", "list of numbers"]),
        ({"evaluate": {"temperatures": [0, -1]}}, ["evaluate.temperatures is -1"]),
        ({"target": {}}, ["target.path", "target.model"]),
        ({"target": {"path": "x", "optm": {}}}, ["target.optm", "'optim'"]),
        ({"target": {"path": "x", "optim": {"lr": -1}}}, ["target.optim.lr is -1"]),
    ],
)
def test_what_is_wrong_with_a_recipe_is_named(change, words):
    with pytest.raises(InvalidValueError) as caught:
        parse_recipe({key: x for key, x in (MINIMAL | change).items() if x is not None}, "x", Path("."))
    assert all(word in str(caught.value) for word in words), caught.value


def test_files_that_are_no_recipes_are_refused(tmp_path):
    file = tmp_path / "x.toml"
    for content in (b"[target", b"\xff\xfe", b"[target]\npath = 'smollm2-135m-instruct'"):
        file.write_bytes(content)
        with pytest.raises(InvalidValueError, match="config|draft"):
            read_recipe(file)
    with pytest.raises(InvalidValueError, match="cannot be read"):
        read_recipe(tmp_path / "none.toml")
    text = "[target]\npath = 'model'\n[draft]\n[data]\npaths = ['texts', '/abs']"
    file.write_text(text)
    (tmp_path / "model").mkdir()
    recipe = read_recipe(file)
    assert recipe.target.path == str(tmp_path / "model")
    assert recipe.data.paths == (str(tmp_path / "texts"), "/abs") and recipe.name == "x"
