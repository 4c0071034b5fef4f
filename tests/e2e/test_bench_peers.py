"""Peers of the decoding benchmark: the pipe to a process, turns with ours, and each engine's own end of the pipe."""

import ctypes
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from longdraft import LLM, DraftConfig, SamplingParams
from longdraft.bench import Arm, Plan
from longdraft.bench import decode as bench
from longdraft.bench.machine import Load
from longdraft.bench.peers import PEERS, Peer, hand_over, process
from longdraft.bench.peers import measure as turns
from longdraft.bench.tasks import Prompt
from longdraft.bench.turns import turn
from longdraft.checkpoint.gguf import GGUFWeights, hf_config
from longdraft.checkpoint.gguf_header import read_header
from longdraft.checkpoint.load import load_checkpoint
from longdraft.cli.app import app
from longdraft.errors import InvalidValueError, LongDraftError, MissingDependencyError, UnsupportedModelError
from longdraft.models.config import parse_hf_config
from longdraft.models.registry import tiny_config
from tests.unit.gguf_files import random_tensors, write_llama_gguf

FULL = Arm("full", DraftConfig(kv="full", gamma=3))
PEER = {"peer", "batch", "context", "dtype", "tok_s", "ratio", "ci_low", "ci_high"}
SCRIPTS = Path(hand_over.__file__).parent
FAKE = """
import os, sys
sys.path.insert(0, {scripts!r})
from serve import serve
{before}
class Child:
    name, seconds, turns = "fake 1.0", 0.25, 0
    def __init__(self, progress):
        self.progress = progress
        print("words that are no answer")
        os.write(1, b"nor are these\\n")
    def load(self, model, dtype, threads):
        assert os.path.exists(model) and threads >= 1 and os.environ["OMP_NUM_THREADS"] == str(threads)
        return dtype + " or so"
    def fill(self, prompts, room):
        self.rows = [[prompt[0], *range(room)] for prompt in prompts]
        self.progress("fill", len(prompts), len(prompts), "rows")
        return "its own way"
    def decode(self, tokens):
        {decode}
        self.turns += 1
        return dict(seconds=self.seconds, rows=[row[: tokens + 1] for row in self.rows])
serve(Child)
"""


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder, dtype="float64", kv_cache_memory_bytes=2**24)


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(bench, "disturbed", lambda before, after: False)
    monkeypatch.setattr(turns, "disturbed", lambda before, after: False)


def prompts(batch, context):
    return [[(7 * i + 5 * n + 1) % 128 for i in range(context)] for n in range(batch)]


def fake(tmp_path, before="", decode="pass"):
    script = tmp_path / "fake.py"
    script.write_text(FAKE.format(scripts=str(SCRIPTS), before=before, decode=decode))
    return Peer("fake", script, "some-engine", lambda llm, folder: folder)


def measure(llm, peer, temperature=0.0, rounds=3, report=lambda *args: None):
    rows, plan = [], Plan((2,), (64,), (FULL,), (temperature,), rounds=rounds, round_tokens=8)
    with process.running(peer, llm, None, report) as running:
        bench.measure(
            llm, plan, prompts, lambda cell: None, after_cell=lambda c: rows.append(turns.measure(c, running))
        )
    assert llm.engine.num_unfinished == 0
    return rows


def test_a_peer_takes_turns_with_plain_decoding(llm, tmp_path, monkeypatch):
    """Through a real process, whose libraries print what they like."""
    order, asked, seen = [], process.PeerProcess.ask, []

    def ours(*args):
        order.append("ours")
        return turn(*args)

    def theirs(self, do, **arguments):
        order.append((do, arguments.get("tokens")))
        return asked(self, do, **arguments)

    monkeypatch.setattr(turns, "turn", ours)
    monkeypatch.setattr(process.PeerProcess, "ask", theirs)
    (row,) = measure(llm, fake(tmp_path), report=lambda *args: seen.append(args))
    turn_of_peer = ("decode", 8)
    assert [step[0] if step[0] in ("load", "fill") else step for step in order] == [
        *("load", "fill", ("decode", 1)),
        *(turn_of_peer, "ours", "ours", turn_of_peer, turn_of_peer, "ours"),
    ]
    assert ("fake: fill", 2, 2, "rows") in seen
    report = row.report()
    assert report.keys() == PEER
    assert json.dumps(report)
    assert (row.peer, row.dtype) == ("fake (fake 1.0, its own way)", "float64 or so")
    assert (row.batch, row.context, row.tok_s) == (2, 64, pytest.approx(2 * 8 / 0.25))
    assert row.ci_low <= row.ratio <= row.ci_high


def test_no_figure_for_sampled_rows(llm, tmp_path):
    assert measure(llm, fake(tmp_path), temperature=1.0) == [None]


def test_disturbed_rounds_are_repeated_to_an_end(llm, tmp_path, monkeypatch):
    """A turn of either side counts, each against the processor time of its own process."""
    pids, now = [], Load.now

    def watched(pid=None):
        pids.append(pid)
        return now(pid)

    monkeypatch.setattr(Load, "now", staticmethod(watched))
    for bad, rounds in (((), 2), ((1,), 3), (range(99), 4)):  # turns
        asked = []

        def foreign(before, after, bad=bad, asked=asked):
            asked.append(None)
            return len(asked) in bad

        monkeypatch.setattr(turns, "disturbed", foreign)
        pids.clear()
        (row,) = measure(llm, fake(tmp_path, decode="self.seconds = 99 if self.turns == 1 else 0.25"), rounds=2)
        assert len(asked) == 2 * rounds  # a turn of each
        assert len([pid for pid in pids if pid]) == 2 * rounds  # before and after the peer's
        assert (row.tok_s == pytest.approx(2 * 8 / 0.25)) == (bad == (1,))  # the slow turn is the first that is timed


def test_how_far_tokens_agree():
    ours = [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert turns.agreement(ours, [[1, 2, 3], [5, 6]]) == "2 of 2 rows have our tokens"
    assert "1 of 2 rows have our tokens; others differ from token 3 on" in turns.agreement(ours, [[1, 2, 9, 9], [5, 6]])
    assert turns.agreement(ours, [[1, 2, 9], [9, 6]]).endswith("from token 1 on")


def test_what_a_missing_engine_says(llm, tmp_path):
    script = tmp_path / "missing.py"
    make = "def make(progress):\n    import no_such_engine\n"
    script.write_text(f"import sys\nsys.path.insert(0, {str(SCRIPTS)!r})\nfrom serve import serve\n{make}serve(make)\n")
    peer = Peer("fake", script, "some-engine", lambda llm, folder: pytest.fail("written for nobody"))
    with pytest.raises(MissingDependencyError, match="no_such_engine") as error:
        measure(llm, peer)
    assert f"{sys.executable} -m pip install some-engine" in str(error.value)


def test_a_peer_that_ends(llm, tmp_path, monkeypatch):
    children, popen = [], process.subprocess.Popen
    monkeypatch.setattr(process.subprocess, "Popen", lambda *a, **k: children.append(popen(*a, **k)) or children[-1])
    with pytest.raises(LongDraftError, match="--peer fake ended"):
        measure(llm, fake(tmp_path, decode="os._exit(3)"))
    with pytest.raises(LongDraftError, match="--peer fake ended"):
        measure(llm, fake(tmp_path, before="os._exit(3)"))
    measure(llm, fake(tmp_path))
    assert [child.returncode for child in children] == [3, 3, -9]


def test_wrong_peers_are_refused(llm, folder, tmp_path):
    with (
        pytest.raises(InvalidValueError, match="--peer-python"),
        process.running(PEERS["hf"], llm, "/no/python", print),
    ):
        pass
    cuda = SimpleNamespace(model=SimpleNamespace(device=torch.device("cuda")))
    with pytest.raises(InvalidValueError, match="--device"), process.running(PEERS["hf"], cuda, None, print):
        pass
    for name in ("llama-cpp", "llama-cpp-unpacked"):
        with pytest.raises(InvalidValueError, match="GGUF"):
            PEERS[name].hand_over(llm, tmp_path)


def script(name, monkeypatch):
    """A peer's script as a module."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    spec = importlib.util.spec_from_file_location(f"peer_{name}", SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules.pop("serve")
    return module


def greedy(llm, batch, context, tokens):
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return [result.outputs[0].token_ids for result in llm.generate(prompts(batch, context), params)]


def test_transformers_decodes_the_same_in_every_way(llm, folder, monkeypatch):
    child = script("hf", monkeypatch).Child(lambda *args: None)
    assert child.load(str(folder), "float64", 1) == "float64"
    ours, rows = greedy(llm, 2, 64, 9), child._prefill(prompts(2, 64))
    for kind in ("dynamic", "static"):
        cache = child._join(rows, kind, 64 + 8)
        for attention in ("sdpa", "eager"):
            for tokens in (8, 3, 8):
                seconds, found = child._decode(tokens, cache, attention)
                assert seconds > 0
                assert child.model.config._attn_implementation == attention
                assert found == [ids[: tokens + 1] for ids in ours], (kind, attention)


def test_transformers_takes_the_fastest_way(folder, monkeypatch):
    child, tried = script("hf", monkeypatch).Child(lambda *args: None), []
    child.load(str(folder), "float64", 1)

    def decode(tokens, cache, attention):
        tried.append((type(cache).__name__, attention))
        return {("StaticCache", "eager"): 1.0}.get(tried[-1], 2.0), []

    child._decode = decode
    assert child.fill(prompts(1, 20), 4) == "static cache, eager"
    assert len(set(tried)) == 4
    assert (type(child.cache).__name__, child.attention) == ("StaticCache", "eager")


def test_the_verb_with_transformers(folder, monkeypatch):
    monkeypatch.setattr(
        "longdraft.bench.tasks.make_prompts", lambda llm, text, *sizes: [Prompt(ids, []) for ids in prompts(*sizes)]
    )
    monkeypatch.setattr("longdraft.bench.machine.ROOF_BYTES", 2**20)
    sizes = ["--batch", "2", "--context", "64", "--rounds", "2", "--round-tokens", "4", "--draft", "ngram"]
    args = ["--model", str(folder), "--dtype", "float64", "--peer", "hf", "--peer-python", sys.executable, *sizes]
    done = CliRunner().invoke(app, ["bench", "decode", *args])
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout.splitlines()[-1])["peers"]
    assert row.keys() == PEER
    assert (row["batch"], row["context"], row["dtype"]) == (2, 64, "float64")
    assert "hf (transformers" in done.stdout
    assert "2 of 2 rows have our tokens" in done.stdout


class FakeLlama:
    """The calls of llama.cpp that are used. The next token depends on every token of a row's own cells."""

    LLAMA_FLASH_ATTN_TYPE_ENABLED, GGML_TYPE_F16, VOCAB = 1, 1, 32
    __version__ = "0"

    def __init__(self):
        self.live, self.passes = [], []

    def llama_context_default_params(self):
        return SimpleNamespace()

    def llama_batch_init(self, size, embd, seqs):
        token, pos, n_seq_id, logits = ([0] * size for _ in range(4))
        rows = [[0] for _ in range(size)]
        return SimpleNamespace(token=token, pos=pos, n_seq_id=n_seq_id, seq_id=rows, logits=logits)

    def llama_init_from_model(self, model, settings):
        assert settings.n_ctx % (256 * settings.n_seq_max) == 0
        assert not settings.kv_unified
        self.live.append(SimpleNamespace(settings=settings, rows={}))
        return self.live[-1]

    def llama_free(self, context):
        self.live.remove(context)

    def llama_get_memory(self, context):
        return context

    def llama_memory_seq_cp(self, memory, source, target, first, last):
        memory.rows[target] = list(memory.rows[source])

    def llama_memory_seq_rm(self, memory, row, first, last):
        memory.rows[row] = memory.rows[row][: max(first, 0)]

    def llama_decode(self, context, batch):
        self.logits = {}
        self.passes.append(batch.n_tokens)
        for n in range(batch.n_tokens):
            cells = context.rows.setdefault(batch.seq_id[n][0], [])
            if batch.pos[n] != len(cells) or batch.n_seq_id[n] != 1:
                return 1
            cells.append(batch.token[n])
            if batch.logits[n] is True:
                self.logits[n] = self.next(cells)
        return 0

    def next(self, cells):
        return sum((i + 1) * token for i, token in enumerate(cells)) % self.VOCAB

    def llama_get_logits_ith(self, context, n):
        row = (ctypes.c_float * self.VOCAB)(*np.eye(self.VOCAB)[self.logits[n]])
        return ctypes.cast(row, ctypes.POINTER(ctypes.c_float))


def test_llama_cpp_is_fed_right(monkeypatch):
    """Positions, rows, roll-back and clean-up, on a model of arithmetic; chunks end inside the prompts."""
    lib, module = FakeLlama(), script("llama", monkeypatch)
    monkeypatch.setitem(sys.modules, "llama_cpp", lib)
    monkeypatch.setattr(module, "CHUNK", 50)
    child = module.Child(lambda *args: None)
    child.model, child.threads, child.vocab_size = None, 1, lib.VOCAB
    child.batch = lib.llama_batch_init(50, 0, 1)
    for batch, context in ((3, 120), (1, 50), (2, 7)):
        given = prompts(batch, context)
        assert child.fill(given, 8).endswith("flash attention, F16 KV")
        assert len(lib.live) == 1
        assert (lib.live[0].settings.n_seq_max, lib.live[0].settings.type_k) == (batch, lib.GGML_TYPE_F16)
        for tokens in (8, 3, 8):
            expected = []
            for ids in given:
                cells = list(ids)
                for _ in range(tokens + 1):
                    cells.append(lib.next(cells))
                expected.append(cells[context:])
            lib.passes.clear()
            done = child.decode(tokens)
            assert done["rows"] == expected
            assert done["seconds"] > 0
            assert lib.passes == [batch] * tokens  # all rows in one pass


@pytest.mark.skipif(not importlib.util.find_spec("llama_cpp"), reason="llama-cpp-python is not installed")
def test_llama_cpp_itself(embedded_path):
    llm, rows = LLM(embedded_path, dtype="float32", max_model_len=128, kv_cache_memory_bytes=2**27), []
    plan = Plan((2,), (64,), (Arm("ngram", DraftConfig(weights="ngram", gamma=1)),), rounds=2, round_tokens=4)
    with process.running(PEERS["llama-cpp-unpacked"], llm, None, print) as running:
        assert running.dtype == "all F32"
        text = llm.encode("It is a truth universally acknowledged, " * 20)[:66]
        ids = [text[:64], text[2:66]]
        bench.measure(
            llm, plan, lambda b, c: ids, lambda c: None, after_cell=lambda c: rows.append(turns.measure(c, running))
        )
    assert rows[0].shown == "2 of 2 rows have our tokens"


def loaded_gguf(path, dtype, **more):
    """What is asked of an ``LLM`` that runs a GGUF file in ``dtype``."""
    config = tiny_config()
    path = write_llama_gguf(path, config, random_tensors(config), quant="Q8_0", **more)
    checkpoint = SimpleNamespace(path=str(path), weights=GGUFWeights(read_header(path)))
    return SimpleNamespace(checkpoint=checkpoint, model=SimpleNamespace(dtype=dtype))


@pytest.mark.parametrize(("dtype", "file_type"), [(torch.bfloat16, 32), (torch.float32, 0)])
def test_models_are_handed_over_with_the_weights_that_run(tmp_path, dtype, file_type):
    words = {"general.name": "tiny", "general.file_type": 7, "tokens": ["a", "é"], "scores": [1.0, 0.5]}
    llm = loaded_gguf(tmp_path / "m.gguf", dtype, tokenizer=words)
    path, weights = llm.checkpoint.path, llm.checkpoint.weights
    assert hand_over.as_gguf(llm, tmp_path) == Path(path)
    (tmp_path / "hf").mkdir()
    folder, file = hand_over.as_folder(llm, tmp_path / "hf"), hand_over.as_unpacked_gguf(llm, tmp_path)
    as_folder, unpacked = load_checkpoint(folder), GGUFWeights(read_header(file))
    assert parse_hf_config(hf_config(read_header(file))) == parse_hf_config(hf_config(read_header(path)))
    assert as_folder.config == parse_hf_config(hf_config(read_header(path)))
    for name in weights.shapes():
        ours, theirs, gguf = weights.load(name), as_folder.weights.load(name), unpacked.load(name)
        assert torch.equal(theirs, ours.to(dtype)), name
        assert torch.equal(gguf, ours.to(dtype) if ours.dim() > 1 else ours), name
    assert as_folder.weights.shapes() == unpacked.shapes() == weights.shapes()
    before, after = (dict(read_header(f).metadata) for f in (path, file))
    assert (before.pop("general.file_type"), after.pop("general.file_type")) == (7, file_type)
    assert before == after


def test_a_folder_is_handed_over_as_it_is(llm, folder, tmp_path):
    assert hand_over.as_folder(llm, tmp_path) == Path(folder)
    assert os.listdir(tmp_path) == []


def test_what_cannot_be_handed_over(tmp_path):
    llm = loaded_gguf(tmp_path / "m.gguf", torch.float64, rope_freqs=torch.ones(tiny_config().head_dim // 2))
    with pytest.raises(UnsupportedModelError, match="rope_freqs"):
        hand_over.as_folder(llm, tmp_path)
    with pytest.raises(InvalidValueError, match="float64"):
        hand_over.as_unpacked_gguf(llm, tmp_path)
