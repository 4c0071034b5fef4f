"""Texts that a recipe's target writes itself: what they begin with, who writes them, and who is trained on them."""

import shutil
from dataclasses import replace

import pytest
import torch

from longdraft import LLM, SamplingParams
from longdraft.errors import InvalidValueError, ModelFileError, TrainingError
from longdraft.models.config import parse_hf_config
from longdraft.train import written as module
from longdraft.train.corpora import Document, documents
from longdraft.train.data import is_held_out
from longdraft.train.lm import LanguageModel, random_tensors
from longdraft.train.recipe import parse_recipe
from longdraft.train.stages import Workshop
from longdraft.train.vocabulary import learn_tokenizer
from longdraft.train.written import cut

LETTERS = "abcdefghijkl"
RAW = {
    "model_type": "llama",
    "vocab_size": 260,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target, and documents that each have a letter of their own in every other place."""
    folder = tmp_path_factory.mktemp("written")
    for n, letter in enumerate(LETTERS):
        (folder / ("two" if n % 3 else "one")).mkdir(exist_ok=True)
        (folder / ("two" if n % 3 else "one") / f"{letter}.txt").write_text(f"{letter}-" * (110 + n))
    tokenizer = learn_tokenizer([], 260, folder / "words")
    LanguageModel(RAW, random_tensors(parse_hf_config(RAW), 0), tokenizer).export(folder / "target")
    return folder


def workshop(folder, out, resume=False, on_written=lambda done, total: None, **how):
    """One whose target writes 66 texts; ``how`` changes that, ``none=True`` to not at all."""
    own = {"prompt": 5, "length": 12, "texts": 66, "seed": 3, **how}
    raw = {
        "target": {"path": "target", "dtype": "float32"},
        "data": {"corpora": [], "paths": ["one", "two"], "held_out": 0.5},
        "draft": {"layers": "last:1", "window": 4},
        "run": {"steps": 1, "lengths": {"16": 1.0}, "batch_tokens": 16, "eval_tokens": 16},
    }
    raw["data"] |= {} if own.pop("none", False) else {"written": own}
    return Workshop(parse_recipe(raw, "x", folder), out, resume, on_written=on_written)


@pytest.fixture(scope="module")
def done(folder, tmp_path_factory):
    """All of it, killed in the second file; with what was made of an LLM and said of how far it is."""
    out, told, made = tmp_path_factory.mktemp("out"), [], []

    def mortal(done, total):
        told.append((done, total))
        if done > 64 * 7:
            raise KeyboardInterrupt

    patch = pytest.MonkeyPatch()
    patch.setattr(module, "LLM", lambda path, draft, **how: made.append(how) or LLM(path, draft, **how))
    with pytest.raises(KeyboardInterrupt):
        workshop(folder, out, on_written=mortal).run()
    assert {path.name for path in (out / "written").iterdir()} == {"texts.json", "texts-00000.safetensors"}
    kept = (out / "written" / "texts-00000.safetensors").stat().st_mtime_ns
    again = []
    workshop(folder, out, resume=True, on_written=lambda *at: again.append(at)).run()
    patch.undo()
    assert (out / "written" / "texts-00000.safetensors").stat().st_mtime_ns == kept
    assert told == sorted(set(told)) and len(told) > 7 and told[-2] == (64 * 7, 66 * 7), "as it goes"
    assert again[0] == told[-1] and again[-1] == (66 * 7, 66 * 7)
    assert made == [{"dtype": "float32", "max_model_len": 12, "max_num_seqs": 64}] * 2, "once for all files of a run"
    return out


def streams(folder, out, **how):
    return workshop(folder, out, resume=True, **how)._lesson().streams


def texts_of(folder, out, **how):
    """The texts as the stream has them, less what is there without them, which is its beginning."""
    plain, all_of = streams(folder, out, none=True), streams(folder, out, **how)
    assert torch.equal(plain.held_out, all_of.held_out), "held-out texts are the same with and without"
    assert torch.equal(plain.train, all_of.train[: len(plain.train)])
    return all_of.train[len(plain.train) :]


def held_out_letters(folder):
    found = documents([], [folder / "one", folder / "two"])
    return {document.text[0] for document in found if is_held_out(document, 0.5)}


def test_prompts_are_pieces_of_one_document_each_at_even_distances(folder):
    tokenizer = learn_tokenizer([], 260, folder / "words")
    found = [
        Document(str(n), x) for n, x in enumerate(("abcdefghijklmno", "pqrs", "tuvwxyz", "ABCDEFGHIJKLMNOPQRSTUV"))
    ]
    places = [d.text[i : i + 8] for d in found for i in range(len(d.text) - 7)]
    for count in (1, 2, 4, len(places)):
        words = [tokenizer.decode(ids) for ids in cut(found, tokenizer, 8, count)]
        at = [places.index(word) for word in words]
        steps = {b - a for a, b in zip(at, at[1:], strict=False)}
        assert at[0] == 0 and len(at) == count and (not steps or max(steps) - min(steps) <= 1 and at[-1] == 22)
    with pytest.raises(InvalidValueError, match="texts is 24.*at most 23.*8 tokens"):
        cut(found, tokenizer, 8, 24)
    with pytest.raises(InvalidValueError, match="at most 0"):
        cut([], tokenizer, 8, 1)


def test_the_target_writes_them_once_behind_prompts_that_are_trained_on(folder, done, monkeypatch):
    """Each is a document of its own, by its own seed; what is there is read, and no engine is loaded for it."""
    monkeypatch.setattr(module, "LLM", None)
    rows = texts_of(folder, done).view(66, 13)
    llm = LLM(folder / "target", dtype="float32", kv_cache_memory_bytes=2**20)
    assert bool((rows[:, -1] == llm.tokenizer.eos_token_id).all())
    params = [SamplingParams(temperature=1, seed=3 + n, max_tokens=7, ignore_eos=True) for n in (0, 31, 65)]
    results = llm.generate([rows[n, :5].tolist() for n in (0, 31, 65)], params, use_tqdm=False)
    assert [rows[n, 5:12].tolist() for n in (0, 31, 65)] == [list(r.outputs[0].token_ids) for r in results]
    begin = [set(llm.tokenizer.decode(row[:5].tolist())) - {"-"} for row in rows]
    trained = set(LETTERS) - held_out_letters(folder)
    assert 2 < len(trained) < 10 and set().union(*begin) == trained and all(len(letters) == 1 for letters in begin)


def test_prompts_may_be_of_some_documents_alone(folder, tmp_path):
    rows = texts_of(folder, tmp_path, paths=["one"], texts=9, temperature=0.0).view(9, 13)
    llm = LLM(folder / "target", dtype="float32", kv_cache_memory_bytes=2**20)
    assert set(llm.tokenizer.decode(rows[:, :5].flatten().tolist())) - {"-"} == set("adgj") - held_out_letters(folder)
    greedy = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
    assert rows[8, 5:12].tolist() == list(llm.generate(rows[8, :5].tolist(), greedy)[0].outputs[0].token_ids)
    with pytest.raises(InvalidValueError, match=r"data.written.length is 65.*from 2 to 64"):
        streams(folder, tmp_path, length=65)


def test_a_run_does_not_go_on_with_other_texts(folder, done, tmp_path):
    shutil.copytree(done, tmp_path / "out")
    out = tmp_path / "out"
    for change in ({"seed": 4}, {"temperature": 0.5}, {"texts": 65}, {"prompt": 6}, {"length": 13}):
        with pytest.raises(ModelFileError, match="of other texts"):
            workshop(folder, out, resume=True, **change).run()
    other = workshop(folder, out, resume=True)
    other = replace(other, recipe=replace(other.recipe, target=replace(other.recipe.target, dtype="bfloat16")))
    with pytest.raises(ModelFileError, match="of other texts"):
        other.run()
    shutil.rmtree(out / "written")
    for change in ({"seed": 4}, {"none": True}):
        with pytest.raises(TrainingError, match="other texts"):
            workshop(folder, out, resume=True, **change).run()
