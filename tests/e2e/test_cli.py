"""The command line as a user meets it: outputs, streams, exit codes, errors without tracebacks."""

import json
import subprocess

import pytest

from longdraft.kernels.native import _native
from tests.e2e.command import COMMAND, longdraft, longdraft_process

TIER = "near-tie" if _native is None else "bit-identical"  # in float32 and bfloat16


def test_generate_prints_text_on_stdout_and_figures_on_stderr():
    done = longdraft_process("generate", "The capital of France is", "--max-tokens", "8")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "tokens/s" in done.stderr
    assert "tokens/s" not in done.stdout


def test_generate_reads_files_and_stdin_and_gives_json(tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("The capital of France is")
    done = longdraft("generate", "-", "--file", str(file), "--json", "--max-tokens", "4", stdin="Once upon a time")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert len(report["results"]) == 2
    assert "Paris" in report["results"][1]["text"]
    assert [row["source"] for row in report["results"]] == ["stdin", str(file)]
    how = "plain" if TIER == "near-tie" else "speculative"  # what drafts by default
    assert {"tokens_per_s", "tokens", "seconds", "prefill_s"} <= report[how].keys()
    assert report["exactness"] == TIER


def test_generate_as_chat():
    done = longdraft("generate", "What is the capital of France?", "--chat", "--no-stats", "--max-tokens", "20")
    assert done.stdout == "The capital of France is Paris.\n"


def test_demo_on_a_small_scale():
    args = ("--batch", "2", "--prompt-tokens", "50", "--max-tokens", "6")
    done = longdraft("demo", *args, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["plain"]["tokens"] == 12
    assert report["draft"]["weights"] == ("target@int8" if _native else "target")
    assert report["identical"] is True
    assert report["speculative"]["tokens_per_verify"] >= 1
    assert "passage 2" in done.stderr


def test_doctor_passes_its_self_test():
    done = longdraft("doctor", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["self_test"]["passed"] is True
    assert "used" in report["kernels"]["attention"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("generate", "x", "--model", "nowhere"), ["no file or folder 'nowhere'"]),
        (("generate", "x", "--temperature", "-1"), ["temperature is -1.0", "from 0 to 100"]),
        (("generate", "x", "--dtype", "int3"), ["dtype is 'int3'", "float32"]),
        (("generate", "x", "--max-model-len", "9000"), ["max_model_len is 9000", "8192"]),
        (("generate", "--file", "nowhere.txt"), ["nowhere.txt", "No such file"]),
        (("demo", "--prompt-tokens", "8190"), ["8286", "8192", "--prompt-tokens"]),
    ],
)
def test_errors_name_value_limit_and_fix_without_a_traceback(args, words):
    done = longdraft(*args)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


def test_debug_shows_the_traceback():
    done = longdraft_process("generate", "x", "--model", "nowhere", "--debug")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_bad_input_files(tmp_path):
    file = tmp_path / "latin1.txt"
    file.write_bytes(b"caf\xe9")
    done = longdraft("generate", "--file", str(file))
    assert (done.returncode, "UTF-8" in done.stderr) == (1, True)
    assert longdraft("generate", stdin="").returncode == 1


def test_an_unknown_flag_gets_a_suggestion():
    done = longdraft("generate", "x", "--max-token", "4")
    assert done.returncode == 2
    assert "--max-tokens" in done.stderr


def test_the_newline_that_ends_a_file_is_not_part_of_the_prompt(tmp_path):
    question = "What is the capital of France?"
    file = tmp_path / "question.txt"
    file.write_bytes(b"\xef\xbb\xbf" + question.encode() + b"\r\n")
    args = ("generate", "--chat", "--no-stats", "--max-tokens", "20")
    assert longdraft(*args, stdin=f"{question}\n").stdout == "The capital of France is Paris.\n"
    assert longdraft(*args, "--file", str(file)).stdout == "The capital of France is Paris.\n"


def test_sampling_without_a_seed_says_which_seed_it_took():
    args = ("generate", "Once upon a time", "--temperature", "1", "--max-tokens", "12", "--json")
    one, two = (json.loads(longdraft(*args).stdout) for _ in range(2))
    assert one["seed"] != two["seed"]
    assert one["results"][0]["token_ids"] != two["results"][0]["token_ids"]
    again = json.loads(longdraft(*args, "--seed", str(one["seed"])).stdout)
    assert again["results"] == one["results"]


def test_options_without_effect_are_noted():
    done = longdraft("generate", "x", "--top-p", "0.5", "--max-tokens", "1")
    assert "temperature 0" in done.stderr


def test_results_and_errors_name_their_files(tmp_path):
    good, empty = tmp_path / "good.txt", tmp_path / "empty.txt"
    good.write_text("Once")
    empty.write_text("\n")
    done = longdraft("generate", "-f", str(good), "-f", str(empty))
    assert (done.returncode, "empty.txt" in done.stderr) == (1, True)
    long = tmp_path / "long.txt"
    long.write_text("word " * 300)
    done = longdraft("generate", "-f", str(good), "-f", str(long), "--max-model-len", "200")
    assert "prompt 2 of 2" in done.stderr
    done = longdraft("generate", "-f", str(good), "-f", str(good), "x", "--max-tokens", "1")
    assert done.stdout.count(f"--- {good} (length)") == 2
    assert "--- argument (length)" in done.stdout


def test_a_closed_stdin_is_no_prompt():
    command = ["sh", "-c", 'exec "$@" <&-', "sh", *COMMAND, "generate"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert "prompt" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_without_a_tokenizer_says_what_to_do(tmp_path):
    from tests.parity.models import tiny_checkpoint

    done = longdraft("demo", "--model", str(tiny_checkpoint(tmp_path, "llama")), "--prompt-tokens", "9")
    assert done.returncode == 1
    assert "tokenizer.json" in done.stderr


def test_plain_progress_shows_every_phase(monkeypatch, capsys):
    from longdraft.cli import progress

    monkeypatch.setattr(progress, "PLAIN_EVERY_S", -1.0)
    with progress.Progress() as bars:
        bars.update("prefill", 5, 10, "tokens", seconds=1.0)
        bars.update("decode", 3, 9, "tokens", seconds=1.0)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["prefill: 5 of 10 tokens, 5 /s, 1 s left", "decode: 3 of 9 tokens, 3 /s, 2 s left"]
