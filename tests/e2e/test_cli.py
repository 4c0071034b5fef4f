"""The command line as a user meets it: outputs, streams, exit codes, errors without tracebacks."""

import json
import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-m", "longdraft"]


def longdraft(*args, stdin=None):
    return subprocess.run([*COMMAND, *args], input=stdin, capture_output=True, text=True, timeout=200)


def test_generate_prints_text_on_stdout_and_figures_on_stderr():
    done = longdraft("generate", "The capital of France is", "--max-tokens", "8")
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
    assert {"tokens_per_s", "tokens", "seconds", "prefill_s"} <= report["plain"].keys()
    assert report["exactness"] == "near-tie"


def test_generate_as_chat():
    done = longdraft("generate", "What is the capital of France?", "--chat", "--no-stats", "--max-tokens", "20")
    assert done.stdout == "The capital of France is Paris.\n"


def test_demo_on_a_small_scale():
    args = ("--batch", "2", "--prompt-tokens", "50", "--max-tokens", "6")
    done = longdraft("demo", *args, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["plain"]["tokens"] == 12
    assert report["plain"]["prefill_tokens"] == 100
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
    done = longdraft("generate", "x", "--model", "nowhere", "--debug")
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
