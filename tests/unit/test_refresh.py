"""When a choice is made anew: by rounds, or when acceptance falls."""

import pytest

from longdraft.config import DraftConfig
from longdraft.core import SequenceStats
from longdraft.drafts.refresh import Since, spare
from longdraft.errors import InvalidValueError
from tests.conftest import greedy, make_engine, run, run_alone


def chosen_in(refresh, accepted, gamma=4):
    """The rounds, from 0, that begin with a choice, where ``accepted[i]`` of γ tokens are accepted in round i."""
    stats, since, made = SequenceStats(), None, []
    for i, a in enumerate(accepted):
        if since is None or since.due(refresh, stats):
            since = Since.now(stats)
            made.append(i)
        stats.count(gamma, a, a + 1)
    return made


def test_by_rounds():
    assert chosen_in(0, [0] * 50) == [0]
    assert chosen_in(1, [2] * 5) == [0, 1, 2, 3, 4]
    assert chosen_in(3, [2] * 8) == [0, 3, 6]


def test_when_acceptance_falls():
    assert chosen_in("auto", [3] * 40) == [0]
    assert chosen_in("auto", [0] * 40) == [0]  # it never was better
    assert chosen_in("auto", [1, 4, 2, 3] * 10) == [0]  # ups and downs
    made = chosen_in("auto", [4] * 20 + [1] * 30)
    assert made[0] == 0 and 20 < made[1] < 24
    assert len(made) == 2  # what came after the choice is compared with itself
    assert chosen_in("auto", [4, 4, 4, 0, 0, 0]) == [0]  # too few to judge by


def test_rounds_without_proposals_say_nothing():
    stats = SequenceStats()
    since = Since.now(stats)
    for _ in range(30):
        stats.count(0, 0, 1)
        assert not since.due("auto", stats)


@pytest.mark.parametrize(("refresh", "want"), [(0, 21), ("auto", 21), (1, 0), (2, 5), (3, 10), (9, 21)])
def test_room_for_the_rounds_to_come(refresh, want):
    assert spare(refresh, 100, 4) == want
    assert spare(refresh, 12, 4) == 0


@pytest.mark.parametrize("kv", ["snapkv", "topk"])
def test_a_choice_due_is_made_and_changes_nothing_else(tiny, monkeypatch, kv):
    engine = make_engine(tiny)
    config = DraftConfig(kv=kv, budget=200, gamma=1, refresh="auto")
    draft, made = engine.runner.draft(config), []
    fill = draft.copies.fill
    draft.copies.fill = lambda row, x: made.append(row) or fill(row, x)
    prompt = [(7 * i) % 128 for i in range(60)]
    seq = engine.sequence(engine.add(prompt, greedy(60), config))
    asked = []
    monkeypatch.setattr(Since, "due", lambda self, refresh, stats: asked.append(refresh) or len(asked) == 5)
    list(run(engine))
    assert set(asked) == {"auto"}
    assert len(made) == 2
    assert seq.output_ids == run_alone(tiny, prompt, greedy(60))


def test_what_refresh_may_be():
    assert DraftConfig(refresh="auto").refresh == "auto"
    for bad in (-1, 1.5, True, "often"):
        with pytest.raises(InvalidValueError, match="refresh.*auto"):
            DraftConfig(refresh=bad)
