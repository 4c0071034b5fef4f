"""Control that looks at some steps only while there is nothing to propose: what it misses, and what it costs."""

from dataclasses import replace

import pytest

from longdraft.config import AutoDraft
from longdraft.core import Choice, Round, Row, Status
from longdraft.planner.control import Controller
from longdraft.planner.rest import QUIET, REST, Rest
from tests.unit.recorded import EPYC, INT8, NGRAM, WINDOW, World, sequence

DRAFTS = {INT8: 0.1, WINDOW: 0.1, NGRAM: 0.1}


def world(rows=4, rate=lambda draft, at: 0.0):
    return World(Controller(EPYC, DRAFTS), EPYC, [512] * rows, lambda draft, row, at: rate(draft, at))


def asked(world, steps):
    """In which of some steps the n-gram was asked."""
    out = []
    for _ in range(steps):
        out.append(world.control.asked is not None)
        world.step()
    return out


def test_of_quiet_steps_one_in_a_few_is_looked_at():
    quiet = world()
    asked(quiet, 300)  # what is tried at first has failed
    seen = asked(quiet, 400)
    assert sum(seen) / len(seen) < 1.5 / (1 + REST)
    watched = [n for n, was in enumerate(seen) if was]
    assert max(b - a for a, b in zip(watched, watched[1:], strict=False)) == 1 + REST
    stats = quiet.seqs[0].stats.control
    assert stats.off.total() + stats.rounds.total() == 700  # all steps count
    assert stats.off.total() > 640


def test_a_text_that_begins_to_repeat_itself_is_noticed_at_once():
    at = 500

    def rate(draft, place):
        return 0.95 if place >= at and draft.weights == "ngram" else 0.0

    turning = world(rate=rate)
    asked(turning, at)
    turning.steps.clear()
    asked(turning, 2 * (1 + REST))
    assert any(name == "ngram" for step in turning.steps for name, _ in step)


def test_other_rows_are_looked_at_at_once():
    resting = world()
    while resting.control.asked is not None:
        resting.step()
    last = resting.control.choose(resting.seqs)
    assert all(choice.draft is None and not choice.dropped for choice in last)
    rows = [Row(seq, 1, 1, choice=choice) for seq, choice in zip(resting.seqs, last, strict=True)]
    resting.control.observe([resting.round(i, row) for i, row in enumerate(rows)], 1, {})
    resting.control.release(resting.seqs[0].id)
    resting.seqs[0].status = Status.FINISHED
    new = [*resting.seqs[1:], sequence(99, 512)]
    chosen = resting.control.choose(new)
    assert [choice.told for choice in chosen] == [resting.control.told(seq) for seq in new]
    assert resting.control.asked is not None  # from here on again


def test_rows_with_a_draft_of_their_own_keep_it_awake():
    mixed = world()
    mixed.seqs[0].draft = replace(WINDOW, gamma=1)
    assert all(asked(mixed, 100))


def test_what_it_answers_meanwhile():
    rest, off = Rest(), [Choice(None, (NGRAM,), (WINDOW,))]
    for _ in range(QUIET + 1):
        assert rest.choices((1,)) is None
        rest.note((1,), off, still=True)
    assert [rest.choices((1,)) for _ in range(REST)] == [
        [Choice(None, (NGRAM,), ())]
    ] * REST  # what was dropped is gone
    assert rest.choices((1,)) is None
    rest.note((1,), off, still=True)
    assert rest.choices((2,)) is None and not rest.on and not rest.left
    rest.note((2,), off, still=False)
    assert rest.left == 0


@pytest.mark.parametrize("own_s", [0.0, 0.02])
def test_what_control_takes_is_part_of_a_step(own_s):
    """Of what is reported; a pass takes no longer for it, so neither the pace nor what is chosen changes."""
    control = Controller(EPYC, {INT8: 0.1})
    seqs = [sequence(i, 2000) for i in range(4)]
    plain = EPYC.target([2000] * 4, [1] * 4)
    for _ in range(400):
        rows = [Row(seq, 1, 1, choice=choice) for seq, choice in zip(seqs, control.choose(seqs), strict=True)]
        rounds = []
        for row in rows:
            row.seq.stats.count(0, 0, 1)
            rounds.append(Round(row, 0, 0, 1))
        control.observe(rounds, plain, {}, own_s * plain)
    stats = control.stats
    assert stats.realised_speedup == pytest.approx(1 / (1 + own_s), rel=0.004)
    assert stats.predicted_speedup == pytest.approx(stats.realised_speedup, rel=0.01)
    assert isinstance(seqs[0].draft, AutoDraft)
