"""``longdraft plan`` as a user meets it: one answer, its JSON, its picture, and errors that say what to do."""

import json
import sys

import pytest
from typer.testing import CliRunner

from longdraft.cli.app import app
from longdraft.cli.numbers import parse_numbers
from longdraft.errors import ContextLengthError, InvalidValueError, KVCapacityError, LongDraftError
from tests.e2e.command import longdraft

PNG = b"\x89PNG\r\n\x1a\n"
SUMMARY = {
    *("batch", "context", "best", "ranking", "why", "break_even_context", "memory"),
    *("frontier", "model", "hardware", "cells"),
}
LINE = {
    *("draft", "weights", "kv", "budget", "gamma", "speedup", "tokens_per_s", "rows", "tokens_per_verify"),
    *("draft_ms", "verify_ms", "plain_ms"),
}
DRAFTED = LINE | {"acceptance", "acceptance_source", "note", "break_even_acceptance"}


def plan(*args):
    """The text and the JSON object that a plan prints; errors are raised."""
    done = CliRunner().invoke(app, ["plan", *map(str, args)])
    if done.exception is not None:
        raise done.exception
    text, _, line = done.output.strip().rpartition("\n")
    return text, json.loads(line)


def test_the_question_of_most_users_by_one_command():
    done = longdraft("plan", "Llama-3.1-8B", "--hardware", "H200", "--batch", "64", "--context", "16k")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report.keys() == SUMMARY
    assert (report["batch"], report["context"]) == (64, 16384)
    assert 1.5 < report["best"]["speedup"] < 3 and report["best"]["gamma"] >= 1
    assert report["best"] == report["ranking"][0]
    assert [row for row in report["ranking"] if row["draft"] == "off"][0].keys() == LINE
    assert all(row.keys() == DRAFTED for row in report["ranking"] if row["draft"] != "off")
    assert report["why"][0].startswith("Speculate with")
    assert any("do not fit" in said for said in report["why"])
    assert (report["memory"]["fits"], report["memory"]["largest_batch_plain"]) == (False, 55)
    for word in ("Speculate with", "bound by reading the cache", "Verifying", "ASSUMED", "MagicDec", "largest batch"):
        assert word in done.stdout


def test_plain_decoding_is_an_answer():
    text, report = plan("Qwen3-8B", "--hardware", "H200", "--batch", 256, "--context", "1k")
    assert report["best"]["draft"] == "off"
    assert (report["best"]["gamma"], report["best"]["speedup"], report["best"]["budget"]) == (0, 1.0, None)
    assert "Do not speculate" in text
    assert report["break_even_context"] > 1024


def test_a_grid_and_its_frontier(tmp_path):
    file = tmp_path / "plan.json"
    args = ("Llama-3.1-8B", "--hardware", "a100-80gb", "--batch", "1,16..64", "--context", "4k..32k", "--json", file)
    text, report = plan(*args, "--draft", "streaming_llm", "--target-speedup", 1.5)
    assert [(c["batch"], c["context"]) for c in report["cells"]] == [
        (b, n) for n in (4096, 8192, 16384, 32768) for b in (1, 16, 32, 64)
    ]
    assert list(report["frontier"]) == ["1", "16", "32", "64"]
    assert report["frontier"]["64"] == report["break_even_context"]
    assert json.loads(file.read_text()) == report
    assert report["memory"]["fits"] is True  # the main one is the largest that fits
    assert 1 > report["ranking"][0]["target_acceptance"] > report["ranking"][0]["break_even_acceptance"] > 0
    assert "pays from" in text and "for 1.5 x" in text and "(" in text
    gains = [c["best"]["speedup"] for c in report["cells"] if c["batch"] == 16]
    assert gains == sorted(gains)


def test_the_embedded_model_on_a_machine_of_ones_own():
    text, report = plan("--bandwidth-gb-s", 45, "--tflops", 0.8, "--batch", 8, "--context", 7000, "--acceptance", 0.95)
    assert report["model"]["name"] == "smollm2-135m-instruct"
    assert report["hardware"]["source"] == "given"
    assert report["best"]["weights"] == "target@int8"  # tried by default on a CPU
    assert report["memory"]["usable_gib"] is None and report["memory"]["largest_batch"] is None
    assert {row["acceptance_source"] for row in report["ranking"] if row["gamma"]} == {"given"}
    assert "not known" in text


def test_types_drafts_budgets_and_acceptance_by_position():
    args = ("Llama-3.1-8B", "--hardware", "H200", "--batch", 64, "--context", "16k", "--kv-dtype", "float8")
    _, report = plan(*args, "--draft", "ngram", "--draft", "layer_skip", "--budget", 128, "--acceptance", "0.9,0.6,0.3")
    assert {row["draft"] for row in report["ranking"]} == {"ngram", "layer_skip", "off"}
    assert max(row["gamma"] for row in report["ranking"]) <= 3
    assert next(row for row in report["ranking"] if row["draft"] == "ngram")["acceptance"] == [0.9, 0.6, 0.3]
    assert report["memory"]["fits"] is True
    assert report["model"]["kv_bytes_per_token"] == 65536


def test_a_config_without_weights(tmp_path):
    from tests.parity.models import T0

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **T0}))
    _, report = plan(tmp_path, "--hardware", "RTX-4090")
    assert (report["model"]["name"], report["context"]) == (tmp_path.name, 256)  # the default ends at its limit


@pytest.mark.parametrize("args", [("--batch", "64", "--context", "16k"), ("--batch", "1..64", "--context", "1k..16k")])
def test_the_picture(tmp_path, args):
    file = tmp_path / "plan.png"
    plan("Llama-3.1-8B", "--hardware", "H200", *args, "--plot", file)
    assert file.read_bytes().startswith(PNG)
    assert file.stat().st_size > 20_000


def test_the_picture_shows_frontier_memory_and_the_asked_point(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    seen = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kwargs: seen.append(self))
    plan("Llama-3.1-8B", "--hardware", "A100-80GB", "--batch", 64, "--context", "16k", "--plot", tmp_path / "x.png")
    left, right = seen[0].axes[:2]
    pays, fits = left.lines
    contexts = [int(label.get_text().replace(",", "")) for label in left.get_xticklabels()]
    batches = [int(label.get_text()) for label in left.get_yticklabels()]
    assert contexts == [1024 * 2**i for i in range(8)] and batches == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert list(fits.get_xdata()) == sorted(fits.get_xdata(), reverse=True)
    ((x, y),) = [patch.get_center() for patch in left.patches]
    assert (contexts[round(x)], batches[round(y)]) == (16384, 64)
    dots = [line for line in right.lines if line.get_marker() == "o"]
    assert [line.get_xdata()[0] for line in dots][0] == pytest.approx(0.67)
    curve = right.lines[0].get_ydata()
    assert list(curve) == sorted(curve)


ON = ("--hardware", "H200")


@pytest.mark.parametrize(
    ("args", "error", "words"),
    [
        (("Llama-3.1-8B",), InvalidValueError, ["--hardware", "H200", "--bandwidth-gb-s"]),
        (("Llama-3.1-8B", "--hardware", "H300"), InvalidValueError, ["'H300'", "H200, B200", "--tflops"]),
        (("Llama-3.1-8B", *ON, "--tflops", 3), InvalidValueError, ["--tflops is 3.0", "--hardware"]),
        (("Llama-3.1-8B", "--tflops", 3), InvalidValueError, ["--hardware", "both"]),
        (("Llama-3.1-8B", "--tflops", 3, "--bandwidth-gb-s", 0), InvalidValueError, ["bandwidth_gb_s is 0.0"]),
        (("Llama-9", *ON), LongDraftError, ["'Llama-9'", "Llama-3.1-8B", "config.json"]),
        (("Llama-3.1-8B", *ON, "--batch", "0"), InvalidValueError, ["--batch is '0'", "from 1 on"]),
        (("Llama-3.1-8B", *ON, "--batch", "100k"), InvalidValueError, ["--batch is 102400", "65536"]),
        (("Llama-3.1-8B", *ON, "--context", "200k"), ContextLengthError, ["204800", "131072", "Plan for"]),
        (("Llama-3.1-8B", *ON, "--context", "64k..1k"), InvalidValueError, ["64k..1k", "smaller"]),
        (("Llama-3.1-8B", *ON, "--context", "16m"), InvalidValueError, ["--context is '16m'", "16k"]),
        (("Llama-3.1-70B", *ON), KVCapacityError, ["131.4 GiB", "126.9 GiB", "--dtype int8"]),
        (("Llama-3.1-8B", *ON, "--dtype", "int3"), InvalidValueError, ["--dtype is 'int3'", "bfloat16"]),
        (("Llama-3.1-8B", *ON, "--acceptance", "high"), InvalidValueError, ["--acceptance is 'high'", "0.9,0.8"]),
        (("Llama-3.1-8B", *ON, "--acceptance", "1.2"), InvalidValueError, ["acceptance is 1.2", "from 0 to 1"]),
        (("Llama-3.1-8B", *ON, "--draft", "layer_skip"), InvalidValueError, ["layer_skip", "--acceptance"]),
        (("Llama-3.1-8B", *ON, "--draft", "TinyLlama-1.1B"), LongDraftError, ["32000", "128256"]),
        (("Llama-3.1-8B", *ON, "--max-gamma", 0), InvalidValueError, ["max_gamma is 0", "64"]),
        (("Llama-3.1-8B", *ON, "--budget", 0), InvalidValueError, ["budget is 0"]),
        (("Llama-3.1-8B", *ON, "--target-speedup", 0), InvalidValueError, ["--target-speedup is 0"]),
        (("Llama-3.1-8B", *ON, "--plot", "x.svg"), InvalidValueError, ["--plot", ".png"]),
        (("Llama-3.1-8B", *ON, "--json", "no/where.json"), InvalidValueError, ["--json", "folder"]),
        (("Llama-3.1-8B", *ON, "--batch", ",".join(map(str, range(1, 402)))), InvalidValueError, ["401", "400"]),
    ],
)
def test_errors_name_the_value_the_limit_and_the_fix(args, error, words):
    with pytest.raises(error) as found:
        plan(*args)
    for word in words:
        assert word in str(found.value)


def test_numbers():
    assert parse_numbers("--x", ["16k", "1,8", "2..9"]) == (1, 2, 4, 8, 9, 16384)
    assert parse_numbers("--x", ["1K..3k", "7"]) == (7, 1024, 2048, 3072)
    for bad in ("", "1..", "..4", "-1", "1.5", "k", "0..4", "1,,2", "٣"):
        with pytest.raises(InvalidValueError, match="--x"):
            parse_numbers("--x", [bad])


def test_planning_reads_no_weights_and_builds_no_model(monkeypatch):
    from longdraft.checkpoint import gguf
    from longdraft.models.transformer import Transformer

    def refuse(*args, **kwargs):
        raise AssertionError("weights were read")

    monkeypatch.setattr(gguf.GGUFWeights, "load", refuse)
    monkeypatch.setattr(Transformer, "__init__", refuse)
    assert plan("--hardware", "H200")[1]["ranking"]


def test_no_plot_no_matplotlib():
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from longdraft.cli.app import app\n"
        "assert CliRunner().invoke(app, ['plan', '--help']).exit_code == 0\n"
        "assert not {'torch', 'matplotlib', 'numpy'} & sys.modules.keys()\n"
        "assert CliRunner().invoke(app, ['plan', 'Qwen3-8B', '--hardware', 'H200']).exit_code == 0\n"
        "assert 'matplotlib' not in sys.modules\n"
    )
    import subprocess

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
