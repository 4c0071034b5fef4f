"""Prompt lookup: the automaton against brute force, and what is proposed from it."""

import gc
import random
import sys
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longdraft.core import Sequence
from longdraft.drafts import ngram
from longdraft.drafts.base import DraftRow
from longdraft.drafts.ngram import MAX_TOKENS, MIN_MATCH, NGram, SuffixAutomaton
from longdraft.sampling_params import SamplingParams

TEXTS = st.one_of(
    st.lists(st.integers(0, 1), max_size=60),
    st.lists(st.integers(0, 3), max_size=80),
    # A few blocks again and again: long matches, and periods that break off.
    st.lists(st.sampled_from([(0,), (1,), (0, 1), (0, 0, 2), (0, 1, 0, 2)]), max_size=20)
    .map(lambda x: sum(x, ()))
    .map(list),
)


def make_seq(ids, seq_id=0, num_committed=None):
    ids = list(ids)
    seq = Sequence(
        id=seq_id, ids=ids, num_prompt=len(ids), params=SamplingParams(), seed=0, max_total=len(ids) + 10_000
    )
    seq.num_committed = len(ids) - 1 if num_committed is None else num_committed
    return seq


def propose(draft, seq, gamma=8):
    return draft.propose([DraftRow(seq, gamma)], sampled=False).tokens[0]


def build(text, start=0):
    automaton = SuffixAutomaton(start)
    for token in text[start:]:
        automaton.extend(token)
    return automaton


def longest_earlier(text):
    """Length of the longest suffix that occurs earlier, and all indices where it ends there, by trying them all."""
    n = len(text)
    for length in range(n - 1, 0, -1):
        ends = [e for e in range(length - 1, n - 1) if text[e + 1 - length : e + 1] == text[n - length :]]
        if ends:
            return length, ends
    return 0, [-1]


def copied(text, end, count):
    """Token by token, from ``end`` on, of the text and of what was copied so far."""
    whole = list(text)
    for i in range(count):
        whole.append(whole[end + 1 + i])
    return whole[len(text) :]


def expected(text, gamma):
    """Every proposal that is right for ``text``."""
    length, ends = longest_earlier(text)
    return [copied(text, e, min(gamma, length)) for e in ends] if length >= MIN_MATCH else [[]]


# The automaton


@given(TEXTS)
@settings(max_examples=400, deadline=None)
def test_match_is_the_longest_earlier_suffix_at_every_prefix(text):
    automaton = SuffixAutomaton()
    assert automaton.match() == (0, -1)
    for n in range(1, len(text) + 1):
        automaton.extend(text[n - 1])
        length, ends = longest_earlier(text[:n])
        assert automaton.match()[0] == length
        assert automaton.match()[1] in ends


@pytest.mark.parametrize("alphabet", [1, 2, 3, 20, 250])
def test_match_in_longer_random_texts(alphabet):
    rng = random.Random(alphabet)
    text = bytes(rng.randrange(alphabet) for _ in range(1500))
    automaton, longest = SuffixAutomaton(), 0
    for n in range(1, len(text) + 1):
        automaton.extend(text[n - 1])
        longest += 1
        while text.find(text[n - longest : n], 0, n - 1) < 0:
            longest -= 1  # an empty suffix is found anywhere
        length, end = automaton.match()
        assert length == longest
        assert end < n - 1
        assert not length or text[end + 1 - length : end + 1] == text[n - length : n]
    assert len(automaton._link) <= 2 * len(text)


@given(TEXTS, st.integers(0, 30))
@settings(max_examples=100, deadline=None)
def test_a_start_shifts_positions_and_hides_what_lies_before(text, start):
    start = min(start, len(text))
    length, end = build(text, start).match()
    alone = build(text[start:])
    assert (length, end) == (alone.match()[0], alone.match()[1] + start if length else -1)
    assert build(text, start).known == len(text)


@given(TEXTS)
@settings(max_examples=100, deadline=None)
def test_the_occurrence_is_the_latest_when_links_are_followed_to_the_root(text):
    original, ngram.FRESH_LINKS = ngram.FRESH_LINKS, 10_000
    try:
        automaton = SuffixAutomaton()
        for n in range(1, len(text) + 1):
            automaton.extend(text[n - 1])
            assert automaton.match()[1] == longest_earlier(text[:n])[1][-1]
    finally:
        ngram.FRESH_LINKS = original


def test_the_occurrence_is_the_latest_for_a_repeated_phrase():
    phrase, text = [1, 2, 3], []
    for filler in range(10, 20):
        text += [*phrase, filler]
    assert build(text + phrase).match() == (3, len(text) - 2)


@pytest.mark.parametrize("period", [1, 2, 3, 7])
def test_periodic_text_matches_one_period_back(period):
    text = [i % period for i in range(200)]
    automaton = SuffixAutomaton()
    for n in range(1, len(text) + 1):
        automaton.extend(text[n - 1])
        length = max(n - period, 0)
        assert automaton.match() == (length, n - 1 - period if length else -1)


def test_a_broken_period_is_found_again():
    text = [0] * 50 + [1] + [0] * 20
    automaton = build(text)
    assert automaton.match()[0] == 20
    assert automaton.match()[1] in longest_earlier(text)[1]
    automaton.extend(1)
    assert automaton.match() == (21, 50)


def test_the_work_per_token_is_bounded():
    """A hidden loop over the text or over the links would make the later tokens dearer: counted, not timed."""
    rng = random.Random(0)
    for text in ([7] * 4000, [i % 5 for i in range(4000)], [rng.randrange(2) for _ in range(4000)]):
        lines = [_lines_run(text[:n]) / n for n in (1000, 4000)]
        assert lines[1] < 1.15 * lines[0]


def _lines_run(text):
    automaton, count = SuffixAutomaton(), 0

    def trace(frame, event, arg):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for token in text:
            automaton.extend(token)
    finally:
        sys.settrace(before)
    return count


# Proposals


@given(TEXTS, st.integers(1, 12))
@settings(max_examples=200, deadline=None)
def test_proposals_continue_an_earlier_occurrence_at_every_prefix(text, gamma):
    draft = NGram()
    for n in range(1, len(text) + 1):
        assert propose(draft, make_seq(text[:n]), gamma) in expected(text[:n], gamma)


def test_proposals_are_as_long_as_gamma_or_the_match():
    draft = NGram()
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]
    assert propose(draft, make_seq(text), 2) == [4, 5]
    assert propose(draft, make_seq(text), 3) == [4, 5, 6]
    assert propose(draft, make_seq(text), 9) == [4, 5, 6]


def test_one_matching_token_is_not_enough_and_two_are():
    assert propose(NGram(), make_seq([1, 2, 3, 1])) == []
    assert propose(NGram(), make_seq([1, 2, 3, 1, 2])) == [3, 1]


@pytest.mark.parametrize("text", [[], [5], [5, 5], [1, 2, 3, 4]])
def test_texts_without_a_match_propose_nothing(text):
    assert propose(NGram(), make_seq(text)) == []


def test_token_zero_is_a_token_like_others():
    assert propose(NGram(), make_seq([0, 0, 1, 2, 0, 0]), 2) == [1, 2]


@pytest.mark.parametrize("period", [1, 2, 3, 5])
def test_copying_goes_on_beyond_the_end_of_the_text(period):
    text = [10 + i % period for i in range(60)]
    assert propose(NGram(), make_seq(text), 40) == [10 + i % period for i in range(60, 100)]


def test_rows_are_ragged_and_in_order():
    rows = [
        DraftRow(make_seq([1, 2, 3, 1, 2], 0), 1),
        DraftRow(make_seq([1, 2, 3, 4, 5], 1), 4),
        DraftRow(make_seq([6] * 20, 2), 7),
        DraftRow(make_seq([1, 2, 3, 1, 2], 3), 9),
    ]
    assert NGram().propose(rows, sampled=False).tokens == [[3], [], [6] * 7, [3, 1]]


def test_no_rows_give_no_tokens():
    assert NGram().propose([], sampled=False).tokens == []


@pytest.mark.parametrize("sampled", [False, True])
def test_there_are_no_distributions_and_the_rule_changes_nothing(sampled):
    proposal = NGram().propose([DraftRow(make_seq([4, 5, 6, 4, 5]), 2)], sampled=sampled)
    assert proposal.log_q is None
    assert proposal.tokens == [[6, 4]]


def test_proposing_changes_neither_the_ids_nor_the_next_proposal():
    draft, seq = NGram(), make_seq([3] * 9)
    first = propose(draft, seq, 5)
    first.append(99)
    assert seq.ids == [3] * 9
    assert propose(draft, seq, 5) == [3] * 5


# State by sequence


@given(TEXTS, st.lists(st.integers(1, 9), min_size=1), st.integers(4, 200))
@settings(max_examples=200, deadline=None)
def test_catching_up_equals_a_fresh_build(text, steps, max_tokens):
    """Whatever rounds were missed, also across restarts at the cap."""
    draft, n = NGram(max_tokens), 0
    while n < len(text):
        n = min(n + steps[n % len(steps)], len(text))
        assert propose(draft, make_seq(text[:n])) == propose(NGram(max_tokens), make_seq(text[:n]))


def test_follow_takes_in_committed_tokens_only():
    text = [1, 2, 3, 1, 2, 9, 9, 9]
    draft, seq = NGram(), make_seq(text, num_committed=5)
    draft.follow([seq])
    assert draft._states[0].known == 5
    assert draft._states[0].match() == (2, 1)
    seq.num_committed = 7
    draft.follow([seq])
    assert draft._states[0].known == 7
    assert propose(draft, seq) == propose(NGram(), make_seq(text)) == [9, 9]


def test_follow_in_chunks_equals_no_follow():
    rng = random.Random(1)
    text = [rng.randrange(3) for _ in range(300)]
    draft, seq = NGram(128), make_seq(text)
    for committed in (0, 1, 100, 101, 128, 129, 250, 299):
        seq.num_committed = committed
        draft.follow([seq])
    assert propose(draft, seq) == propose(NGram(128), make_seq(text))


def test_follow_behind_what_is_known_keeps_the_state():
    """A sequence that recomputes its cache has fewer committed tokens than the state has seen."""
    draft, seq = NGram(16), make_seq([1, 2, 3, 1, 2] * 8)
    before = propose(draft, seq)
    state = draft._states[0]
    seq.num_committed = 3
    draft.follow([seq])
    assert draft._states[0] is state
    assert state.known == 40
    assert propose(draft, seq) == before


def test_ids_that_became_shorter_are_a_bug():
    draft = NGram()
    propose(draft, make_seq([1, 2, 3, 1, 2]))
    with pytest.raises(AssertionError, match="shorter"):
        propose(draft, make_seq([1, 2, 3, 1]))
    with pytest.raises(AssertionError, match="shorter"):
        draft.follow([make_seq([1, 2, 3, 1])])


def test_released_sequences_leave_nothing_behind():
    draft = NGram()
    for seq_id in range(50):
        propose(draft, make_seq([seq_id] * 5, seq_id))
        draft.follow([make_seq([1, 2], 1000 + seq_id)])
        draft.release(seq_id)
        draft.release(1000 + seq_id)
    assert not draft._states
    draft.release(12345)


def test_a_released_id_starts_anew():
    draft = NGram()
    propose(draft, make_seq([1, 2, 3, 1, 2]))
    draft.release(0)
    assert propose(draft, make_seq([1, 2, 7, 1, 2])) == [7, 1]


def test_a_fork_goes_its_own_way():
    draft = NGram()
    source, child = make_seq([1, 2, 3, 1, 2], 0), make_seq([1, 2, 3, 1, 2], 1)
    propose(draft, source)
    draft.fork(source, child)
    source.ids += [4, 1, 2]
    child.ids += [5, 1, 2]
    assert propose(draft, source, 1) == [4]
    assert propose(draft, child, 1) == [5]


def test_many_sequences_are_independent():
    """Interleaved, growing by different amounts, in changing company: as if each had a draft of its own."""
    rng = random.Random(2)
    draft = NGram(64)
    seqs = [make_seq([rng.randrange(3) for _ in range(rng.randrange(1, 30))], i) for i in range(20)]
    alone = [NGram(64) for _ in seqs]
    for _ in range(40):
        chosen = rng.sample(seqs, rng.randrange(1, len(seqs)))
        rows = [DraftRow(seq, rng.randrange(1, 9)) for seq in chosen]
        tokens = draft.propose(rows, sampled=False).tokens
        assert tokens == [alone[row.seq.id].propose([row], sampled=False).tokens[0] for row in rows]
        for seq in chosen:
            seq.ids += [rng.randrange(3) for _ in range(rng.randrange(1, 6))]


# Memory


@pytest.mark.parametrize("cap", [2, 3, 16, 17])
def test_the_window_stays_within_the_cap_and_matches_are_right_after_restarts(cap):
    rng = random.Random(cap)
    text = [rng.randrange(3) for _ in range(200)]
    draft, seq, starts = NGram(cap), make_seq([]), set()
    for n, token in enumerate(text, 1):
        seq.ids.append(token)
        tokens = propose(draft, seq, 6)
        state = draft._states[0]
        starts.add(state.start)
        assert state.known == n
        assert min(n, cap // 2) <= n - state.start <= cap
        assert len(state._link) <= 2 * cap
        assert tokens in expected(text[state.start : n], 6)
    assert len(starts) == -(-(200 - cap) // (cap // 2)) + 1  # no oftener than every half window


def test_the_default_cap_holds_and_a_long_prompt_is_not_built_twice(monkeypatch):
    calls = 0
    extend = SuffixAutomaton.extend

    def counting(self, token):
        nonlocal calls
        calls += 1
        extend(self, token)

    monkeypatch.setattr(SuffixAutomaton, "extend", counting)
    draft = NGram()
    seq = make_seq(i % 1000 for i in range(2 * MAX_TOKENS + 5))
    assert propose(draft, seq, 4) == [(len(seq.ids) + i) % 1000 for i in range(4)]
    assert MAX_TOKENS // 2 <= calls <= MAX_TOKENS


@pytest.mark.parametrize("alphabet", [64, 49_152])
def test_bytes_is_an_honest_estimate(alphabet):
    rng = random.Random(3)
    text = [rng.randrange(alphabet) for _ in range(20_000)]
    gc.collect()
    tracemalloc.start()
    automaton = build(text)
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert automaton.known == len(text)
    assert 0.6 * used < NGram().bytes(len(text)) < 1.7 * used


def test_bytes_stop_growing_at_the_cap_and_no_kv_is_read():
    draft = NGram(1000)
    assert draft.bytes(0) < draft.bytes(500) < draft.bytes(1000) == draft.bytes(10**6)
    assert draft.bytes_read(10**5) == 0
