"""The package as it is installed where there is no compiler: pure, complete, and plain about what it runs on."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("scikit_build_core", reason="the package's build backend is not installed")
ROOT = Path(__file__).parents[2]
BUILD = "import sys; from scikit_build_core.build import build_wheel; build_wheel(sys.argv[1])"
# Says where the package lies, and continues a prompt; nothing of the working tree is to be seen.
RUN = """import longdraft
from longdraft import LLM, SamplingParams
print(longdraft.__file__)
(result,) = LLM(max_model_len=64, kv_cache_memory_bytes=2**24).generate(
    ["The capital of France is"], SamplingParams(temperature=0, max_tokens=4)
)
print(result.outputs[0].text)
"""


def python(code, *args, cwd, **environment):
    """Run ``code`` in a process of its own; its output and errors. ``-S``: the tree may be installed for editing."""
    command = [sys.executable, "-S", "-c", code, *map(str, args)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_without_a_compiler_the_package_is_pure_and_runs(tmp_path):
    """An extension that lies in the working tree stays out of the wheel, which holds all else that git knows."""
    path = os.pathsep.join(entry for entry in sys.path if entry and Path(entry) != ROOT)
    python(BUILD, tmp_path, cwd=ROOT, CXX=str(tmp_path / "no-compiler"), PYTHONPATH=path)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-none-any.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as file:
        held = {name for name in file.namelist() if name.startswith("longdraft/")}
        file.extractall(site)
    here = {str(p.relative_to(ROOT)) for p in (ROOT / "longdraft").rglob("*") if p.is_file()}
    assert held == {name for name in here if not name.endswith((".so", ".pyd", ".pyc"))}

    out, err = python(RUN, cwd=tmp_path, PYTHONPATH=os.pathsep.join((str(site), path)))
    where, _, text = out.partition("\n")
    assert Path(where).is_relative_to(site)
    assert "Paris" in text
    assert "Running on PyTorch's kernels" in err and "the native extension is not there" in err
