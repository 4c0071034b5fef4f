"""A draft that is asked before every choice: what its guesses would have got, by how much they had to say."""

from dataclasses import replace

import pytest

from longdraft.core import Choice, Round, Row
from longdraft.planner.control import Controller
from longdraft.planner.watch import Watch
from tests.unit.recorded import EPYC, INT8, NGRAM, World, sequence

LONG_GUESS = (1, 2, 3, 4, 5, 6, 7, 8)


def watched(seq, *steps, kind=2):
    """Steps of one row: (tokens that came, guess, whether it was proposed). → (tries, stood) of a kind of guess."""
    watch = Watch(8)
    for step, (came, guess, used) in enumerate(steps):
        seq.ids.extend(came)
        choice = Choice(replace(NGRAM, gamma=8)) if used else Choice()
        row = Row(seq, 1, 1, room=8 * used, proposal=guess * used, choice=choice)
        watch.observe([Round(row, row.room, len(came) - 1 if used else 0, len(came))], {seq.id: guess}, step)
    counts = watch.pools[kind].counts
    return watch, [round(x) for x in counts.tried[:4]], [round(x) for x in counts.stood[:4]]


def test_a_guess_counts_once_the_text_has_come():
    plain = [([n], LONG_GUESS[n - 1 :] + (0,) * (n - 1), False) for n in (1, 2, 3)]
    _, tried, _ = watched(sequence(0, 10), *plain)
    assert tried == [0] * 4  # the first guess is not decided yet
    _, tried, stood = watched(sequence(0, 10), *plain, ([9], LONG_GUESS[3:], False))
    assert (tried, stood) == ([1] * 4, [1, 1, 1, 0])  # as a round of 8 of which 3 stood
    watch, tried, stood = watched(
        sequence(0, 10), ([1, 2, 3], LONG_GUESS, False), ([4, 5, 6, 7, 8], LONG_GUESS[3:], False), ([9], (), False)
    )
    assert tried == stood == [1] * 4
    assert not watch._open
    watch, *_ = watched(sequence(0, 10), *plain)
    watch.release(0)
    assert not watch._open


@pytest.mark.parametrize(
    ("guess", "kind"), [((1, 2), 0), ((1, 2, 3, 4), 1), (LONG_GUESS, 2), (LONG_GUESS + LONG_GUESS, 3)]
)
def test_kinds_of_guesses(guess, kind):
    watch, tried, stood = watched(sequence(0, 10), ([7], guess, False), kind=kind)
    assert (tried, stood) == ([1] + [0] * 3, [0] * 4)
    chances, none = watch.survival([guess, ()], 0)
    assert chances[0] == pytest.approx(watch.pools[kind].rates(0)[0])
    assert (len(chances), none) == (min(len(guess), 8), [])  # no more is promised than was said


def test_a_guess_is_followed_to_its_end_where_less_of_it_is_proposed():
    """Else nothing would be learned of late positions while rounds are short."""
    short = ([2, 3], LONG_GUESS[1:], True), ([9], LONG_GUESS[3:], False)
    *_, tried, stood = watched(sequence(0, 10), ([1], LONG_GUESS, False), *short)
    assert (tried, stood) == ([1] * 4, [1, 1, 1, 0])
    *_, tried, _ = watched(sequence(0, 10), (list(LONG_GUESS), LONG_GUESS * 2, False), kind=3)
    assert tried == [1] * 4  # at its eighth token, as no more are used


def test_rows_whose_text_begins_to_repeat_itself_are_drafted_for_at_once():
    """Two rows of eight do so after a while; they get long rounds within a few tokens, the others none."""

    def repeats(draft, row, at):
        return 0.99 * (draft.weights == "ngram" and row < 2 and at >= 40)

    control = Controller(EPYC, {INT8: 0.1, NGRAM: 0.1})
    world = World(control, EPYC, [2000] * 8, repeats)
    while len(world.seqs[0].output_ids) < 100:
        world.step()
    drafted = [[rows[i][1] for rows in world.steps] for i in range(8)]
    for row in (0, 1):
        first = next(n for n, room in enumerate(drafted[row]) if room >= 4)
        assert 38 <= first <= 44
        assert min(drafted[row][first + 2 : first + 6]) >= 3
    assert not any(room for row in drafted[3:] for room in row if room > 2)


@pytest.mark.parametrize("said", [(), (1, 2)])
def test_no_more_is_proposed_than_was_said(said):
    """The guess is known before the choice, so a row without one costs nothing to verify."""
    control, seqs = Controller(EPYC, {NGRAM: 0.1}), [sequence(0, 2000), sequence(1, 2000)]
    control.evidence.watch.pools[0].observe(0, [(0, 8, 8)] * 40)
    first, second = control.choose(seqs, {0: said, 1: LONG_GUESS})
    assert (first.draft.gamma if first.draft else 0) == len(said)
    assert second.draft.gamma > 2


def test_prompts_are_taken_in_and_the_state_is_kept():
    control, seq = Controller(EPYC, {INT8: 0.1, NGRAM: 0.1}), sequence(0, 2000)
    assert control.asked == replace(NGRAM, gamma=16)
    assert control.told(seq) == (NGRAM,)  # before any step
    for _ in range(200):
        (choice,) = control.choose([seq], {0: ()})
        assert NGRAM in choice.told
        assert choice.draft is None or choice.draft.weights != "ngram"  # it has nothing to say
        row = Row(seq, 1, 1, room=choice.draft.gamma if choice.draft else 0, choice=choice)
        seq.ids.append(0)
        seq.num_committed += 1
        control.observe([Round(row, row.room, 0, 1)], EPYC.target([seq.num_committed], [1 + row.room]), {})
