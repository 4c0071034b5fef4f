"""Small steps of PyTorch's between native passes keep to one thread, and give the others back."""

import pytest
import torch

from longdraft.config import DraftConfig
from longdraft.drafts.registry import make
from longdraft.kernels.threads import one_thread
from tests.conftest import greedy, make_engine, run


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_one_thread_and_as_many_as_before(two_threads):
    with one_thread():
        assert torch.get_num_threads() == 1
        with one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


def test_also_after_an_error(two_threads):
    with pytest.raises(ZeroDivisionError), one_thread():
        raise ZeroDivisionError
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("kind", ["pages", "verified"])
def test_choosing_pages_keeps_to_one_thread(tiny, two_threads, monkeypatch, kind):
    seen = []
    memory = type(make(DraftConfig(kv=kind), tiny, tiny.new_store(1)).memory)
    for name in ("rate", "observe"):
        right = getattr(memory, name)
        noted = lambda *args, right=right: seen.append(torch.get_num_threads()) or right(*args)  # noqa: E731
        monkeypatch.setattr(memory, name, noted)
    engine = make_engine(tiny)
    for n in range(3):  # rows that draft unlike numbers of tokens
        engine.add(list(range(100 + n)), greedy(20), DraftConfig(kv=kind, budget=80, gamma=1 + n))
    list(run(engine))
    assert seen and set(seen) == {1}
    assert torch.get_num_threads() == 2
