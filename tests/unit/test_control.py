"""Online control without a model or a clock: recorded costs, given acceptances, and the best that could be done."""

import math
import random
from dataclasses import replace
from itertools import product

import pytest

from longdraft.config import AutoDraft, DraftConfig
from longdraft.core import Choice, Round, Row
from longdraft.outputs import ControlStats
from longdraft.planner.batch import BatchCosts, target_kind
from longdraft.planner.candidates import CONSIDERED, Target, prior
from longdraft.planner.catalogue import known_models
from longdraft.planner.control import Controller
from longdraft.planner.cost import pass_work, times
from longdraft.planner.estimate import Own, Pool, survival
from longdraft.planner.hardware import unmeasured_cpu
from longdraft.planner.joint import Offer, Problem
from longdraft.planner.pace import Pace
from longdraft.planner.reasons import MEASURING
from longdraft.planner.roofline import Roofline
from longdraft.planner.trials import Trials
from tests.unit.recorded import EPYC, INT8, NGRAM, WINDOW, Flat, Recorded, World, oracle, sequence

DRAFTS = {INT8: 0.75, WINDOW: 0.75}


def play(lengths, rate, tokens, *, costs=EPYC, prices=None, drafts=DRAFTS, seed=0):
    """A world in which every draft's tokens stand as ``rate(row, position)`` says, until all rows have their tokens."""
    control = Controller(prices or costs, drafts)
    world = World(control, costs, lengths, lambda draft, row, at: rate(row, at), seed)
    while min(len(seq.output_ids) for seq in world.seqs) < tokens:
        world.step()
    return world


def regret(world, lengths, rate, tokens, step=100):
    """Seconds over those of one who knows the rates and makes the best choice every ``step`` tokens; luck apart."""
    seconds = 0.0
    for at in range(0, tokens, step):
        now, rates = [n + at + step // 2 for n in lengths], [rate(i, at) for i in range(len(lengths))]
        seconds += world.deserved * step / tokens / oracle(world.costs, now, {draft: rates for draft in DRAFTS})
    return world.seconds / seconds


# --- against the best that could be done, and against plain decoding


def drift(row, at):
    """0.9, then 0.5, then 0.9 again."""
    return 0.5 if 600 <= at < 1200 else 0.9


@pytest.mark.parametrize("shape", [(8, 2000), (4, 1500), (1, 7000), (2, 512)])
def test_drifting_acceptance_is_followed(shape):
    lengths = [shape[1]] * shape[0]
    world = play(lengths, drift, 1800)
    assert regret(world, lengths, drift, 1800) < 1.05


@pytest.mark.parametrize(("shape", "scale", "bend"), [((8, 7000), 40.0, 1.25), ((4, 1500), 0.01, 0.8)])
def test_prices_may_be_off_in_scale_and_shape(shape, scale, bend):
    """Observed passes set them right: the draft's and the target's are wrong by different factors."""
    drafts = {d: ({n: bend * ms for n, ms in by.items()}, once) for d, (by, once) in EPYC.drafts.items()}
    wrong = Recorded({n: scale * ms for n, ms in EPYC.linear.items()}, scale * EPYC.read, scale * EPYC.query, {})
    wrong.drafts = {d: ({n: scale * ms for n, ms in by.items()}, scale * once) for d, (by, once) in drafts.items()}
    lengths = [shape[1]] * shape[0]
    world = play(lengths, drift, 1800, prices=wrong)
    assert regret(world, lengths, drift, 1800) < 1.06


@pytest.mark.parametrize(("shape", "rate"), [((8, 512), 0.0), ((1, 512), 0.6), ((4, 2000), 0.3), ((1, 7000), 0.0)])
def test_plain_decoding_is_hardly_ever_better(shape, rate):
    world = play([shape[1]] * shape[0], lambda row, at: rate, 1000)
    assert world.seconds < 1.01 * world.plain_s


def test_it_finds_its_way_back():
    """Off while nothing stands; within a few hundred tokens of the change it proposes again, and gains."""
    world = play([2000] * 4, lambda row, at: 0.0 if at < 800 else 0.95, 1600)
    middle = [rows for rows in world.steps[200:780] if any(room for _, room in rows)]
    assert 0 < len(middle) < 0.06 * 580  # trials, and no more
    last = world.steps[-50:]
    assert sum(all(room >= 2 for _, room in rows) for rows in last) > 40
    assert world.plain_s / world.seconds > 1.06


def test_a_mixed_batch_gains_over_always_and_never():
    """Two rows whose text is easy among six whose text is hard: only the easy ones are drafted for."""
    costs = replace(EPYC, linear={1: 7.0, 8: 8.0, 64: 60.0})  # verifying is dear
    rates = [0.95, 0.95, *[0.1] * 6]
    world = play([7000] * 8, lambda row, at: rates[row], 400, costs=costs)
    late = world.steps[-60:]
    drafted = [sum(rows[i][1] > 0 for rows in late) for i in range(8)]
    assert min(drafted[:2]) > 45
    assert sum(drafted[2:]) < 0.25 * 6 * 60  # tried now and then, as they might have changed
    seconds = world.costs.target([7200] * 8, [5] * 8) + world.costs.draft(INT8, [7200] * 8, [4] * 8)
    always = sum(sum(rate**k for k in range(5)) for rate in rates) / seconds
    never = 8 / world.costs.target([7200] * 8, [1] * 8)
    assert world.tokens / world.seconds > 1.03 * max(always, never)


def test_the_better_draft_is_found():
    """It was assumed to be the worse one, and is tried because it might not be."""
    control = Controller(EPYC, {INT8: 0.9, WINDOW: 0.3})
    world = World(control, EPYC, [7000] * 4, lambda draft, row, at: 0.9 if draft.weights == "target" else 0.4)
    for _ in range(600):
        world.step()
    assert sum(rows[0][0] == WINDOW.label for rows in world.steps[-100:]) > 90


def test_a_model_of_its_own_is_told_of_every_row_and_never_dropped():
    """Nothing could tell it later. It proposes nothing here, its upkeep is dear, bringing it back would be cheap."""
    own = DraftConfig(weights="trained", budget=65, sinks=1, gamma=1)
    costs = replace(EPYC, drafts=EPYC.drafts | {own: ({1: 90.0, 8: 99.0}, 0.0)}, upkeeps={own: 1.0, INT8: 1.0})
    control = Controller(costs, {INT8: 0.9, own: 0.1})
    world = World(control, costs, [7000] * 2, lambda draft, row, at: 0.95 if draft == INT8 else 0.0)
    assert control.told(world.seqs[0]) == (own,)
    for _ in range(200):
        world.step()
    assert all(own in control.told(seq) for seq in world.seqs)
    plain, child = (replace(world.seqs[0], id=number) for number in (8, 9))
    plain.draft = None
    control.fork(plain, child)
    assert control.told(child) == (own,)


# --- the joint choice


class OneBatch:
    """Costs of one batch at recorded prices."""

    def __init__(self, costs, drafts, lengths):
        self.costs, self.drafts, self.lengths = costs, drafts, lengths

    def target(self, tokens):
        return self.costs.target(self.lengths, tokens)

    def draft(self, number, rows, gammas):
        return self.costs.draft(self.drafts[number], [self.lengths[i] for i in rows], gammas)


@pytest.mark.parametrize("seed", range(12))
def test_the_joint_choice_against_every_choice(seed):
    rng = random.Random(seed)
    lengths = [rng.choice([200, 1000, 4000, 12000]) for _ in range(3)]
    rates = {draft: [rng.choice([0.2, 0.5, 0.7, 0.85, 0.95]) for _ in lengths] for draft in (INT8, WINDOW)}
    chances = [Offer(n, [survival([r] * 5) for r in own]) for n, own in enumerate(rates.values())]
    found = Problem(OneBatch(EPYC, list(rates), lengths), chances, [5] * 3).best()
    assert found.rate > 0.985 * oracle(EPYC, lengths, rates, most=5)


def test_a_draft_without_a_pass_joins_another():
    """The row that repeats itself takes what it finds in its own text, the others go on with the model's draft."""
    lengths = [7000] * 4
    offers = [
        Offer(0, [survival([r] * 6) for r in (0.7, 0.9, 0.9, 0.9)]),
        Offer(1, [survival([0.8] * 6)] + [[0.0] * 6] * 3),
    ]
    found = Problem(OneBatch(EPYC, [INT8, NGRAM], lengths), offers, [6] * 4).best()
    assert found.drafts == (1, 0, 0, 0)
    assert found.gammas[0] > found.gammas[1]


class Steep:
    """Drafting is free; verifying a row's third token takes ten times as long as that of the first two."""

    def target(self, tokens):
        return 10 + sum((0.0, 0.2, 0.4, 2.4, 4.4)[fed - 1] for fed in tokens)

    def draft(self, number, rows, gammas):
        return 0.0


def test_a_rows_later_tokens_are_dearer():
    """All rows take the two that are cheap to verify, though their chances are small, and none takes the third one."""
    offer = Offer(0, [[0.7, 0.6, 0.55, 0.5], [0.3, 0.2, 0.15], [0.95, 0.94, 0.93, 0.92], []])
    problem = Problem(Steep(), [offer], [4] * 4)
    assert problem.joined(offer, problem.plain(), rate=0.5).gammas == (2, 2, 2, 0)
    assert problem.joined(offer, problem.plain(), rate=0.25).gammas == (4, 2, 4, 0)
    assert problem.joined(offer, problem.plain(), rate=2.0).gammas == (2, 0, 2, 0)


def test_a_step_with_little_to_propose_is_short():
    """Two tokens in two seconds are better than one in 1.1 only as long as no more than that is usual."""
    problem = Problem(OneBatch(Flat(1.0), [INT8], [100]), [Offer(0, [[0.9]])], [1])
    slow, none = problem.plan([0], [1]), Offer(1, [[]])
    assert (slow.tokens, slow.seconds) == (1.9, 2.0)
    assert problem.joined(none, slow, rate=0.8).gammas == (1,)
    assert problem.joined(none, slow, rate=1.0).off


def test_caps_and_rows_that_do_not_choose():
    costs = OneBatch(EPYC, [INT8], [7000, 7000])
    offers = [Offer(0, [survival([0.9] * 8)] * 2)]
    found = Problem(costs, offers, [2, 0]).best()
    assert found.gammas == (2, 0)
    assert found.tokens == pytest.approx(1 + 0.9 + 0.81 + 1)
    assert Problem(costs, offers, [2, 0], others=3.0).plan([0, None], [2, 0]).tokens == found.tokens + 3
    assert Problem(costs, offers, [2, 0], others=30.0).best().off  # the time of so many others is worth more
    assert Problem(costs, offers, [0, 0]).best().off


# --- what is seen


def test_acceptance_is_that_of_tokens_reached_for():
    """Rounds of two, of which two, one and none stood: 2 of 3 at the first position, 1 of 2 at the second, no more."""
    pool = Pool(4, prior=0.5)
    pool.observe(1, [(0, 2, 2), (1, 2, 1), (2, 2, 0)])
    assert pool.counts.tried == [3, 2, 0, 0]
    assert pool.counts.stood == [2, 1, 0, 0]
    rates = pool.rates(1)
    assert rates[2] == rates[3] == rates[1]  # nothing is known there: as the position before
    assert rates[1] < rates[0]


def test_estimates_of_censored_rounds_are_right_and_fade():
    rng, true, pool = random.Random(1), [0.9, 0.8, 0.6, 0.6], Pool(4, prior=0.2)
    own = Own(4)
    for step in range(1, 400):
        asked = rng.randint(1, 4)
        accepted = next((k for k in range(asked) if rng.random() > true[k]), asked)
        pool.observe(step, [(0, asked, accepted)])
        own.observe(step, asked, accepted)
    assert pool.rates(step) == pytest.approx(true, abs=0.2)
    assert own.rates(step, true, 12) == pytest.approx(true, abs=0.1)
    before = pool.rates(step)[0]
    for step in range(400, 480):
        pool.observe(step, [(0, 1, 0)])
    assert pool.rates(step)[0] < 0.2 < before
    assert pool.evidence(step) > 10 * pool.evidence(step + 600)


def test_a_row_differs_from_its_pool_also_where_it_was_not_seen():
    own, usual = Own(3), [0.8, 0.8, 0.8]
    assert own.rates(0, usual, 12) == pytest.approx(usual)
    for step in range(1, 40):
        own.observe(step, 1, 0)
    rates = own.rates(40, usual, 12)
    assert rates[0] < 0.4
    assert max(rates[1:]) < 0.5
    assert own.rates(40 + 2000, usual, 12) == pytest.approx(usual, abs=0.05)  # and is given another chance


def test_an_unseen_position_is_what_the_seen_one_is():
    """After a while of short rounds a longer one is as good as they are, whatever it was once."""
    pool = Pool(2, prior=0.5)
    for step in range(1, 60):
        pool.observe(step, [(0, 2, 1)])
    assert pool.rates(60)[1] < 0.2
    for step in range(60, 800):
        pool.observe(step, [(0, 1, 1)])
    assert pool.rates(800)[1] > 0.8


def test_pace_learns_the_scale_and_each_kinds_own_error():
    rng, pace = random.Random(0), Pace()
    a, b = ("a", "a here"), ("b", "b here")
    true = {a: 3.0, b: 3.6}
    for n in range(300):
        kind = a if n % 10 else b
        burst = 4.0 if n == 250 else 1.0  # somebody else's work
        pace.observe(kind, burst * true[kind] * math.exp(rng.gauss(0, 0.05)), 1.0)
    assert pace.factors(a)[0] == pytest.approx(3.0, rel=0.05)
    assert ratio(pace, b, a) == pytest.approx(1.2, rel=0.04)
    assert 2.6 < pace.factors(("new", "new here"))[0] < 3.4  # as one of the two, or somewhat faster
    for _ in range(60):  # the machine slows down; what was not seen is known to be slower, too
        pace.observe(a, 6.0, 1.0)
    assert ratio(pace, b, a) == pytest.approx(1.2, rel=0.1)


def ratio(pace, kind, other):
    return pace.factors(kind)[0] / pace.factors(other)[0]


def test_one_burst_does_not_condemn_a_kind():
    """The first pass of a kind takes four times as long as it should: it is dearer by three tenths at most."""
    pace, plain, long = Pace(), ("x", "x here"), ("y", "y here")
    for _ in range(10):
        pace.observe(plain, 1.0, 1.0)
    pace.observe(long, 4.0, 1.0)
    assert ratio(pace, long, plain) < 1.3
    for _ in range(6):
        pace.observe(long, 4.0, 1.0)  # so it is
        pace.observe(plain, 1.0, 1.0)
    assert ratio(pace, long, plain) > 2.5


def test_a_price_may_be_wrong_in_some_batches_only():
    """Long known to be right elsewhere, a kind of pass is half as dear again here: soon that is known."""
    pace, here, there, other = Pace(), ("x", "x here"), ("x", "x there"), ("y", "y here")
    for _ in range(200):
        pace.observe(there, 1.0, 1.0)
        pace.observe(other, 1.0, 1.0)
    for _ in range(12):
        pace.observe(other, 1.0, 1.0)
        pace.observe(here, 1.5, 1.0)
    assert ratio(pace, here, other) > 1.3
    assert ratio(pace, there, other) < 1.2


# Two cores of an EPYC, 8 rows of 512 tokens of SmolLM2-135M, while arithmetic was slower than when it was calibrated:
# ms by tokens fed, and the price of what more tokens than one per row add.
PLAIN_PRICE = 11.2
PASSES = {8: (11.2, 0.0), 16: (14.0, 1.8), 24: (17.4, 3.8), 32: (21.6, 7.0), 40: (26.2, 10.5)}


def test_memory_and_arithmetic_have_paces_of_their_own():
    """One plain pass and then long ones alone: both paces are known, and what was not seen for long is told rightly."""
    pace, kind = Pace(), target_kind([4000] * 8)
    for fed in (8, 40, *[40, 32] * 20):
        ms, added = PASSES[fed]
        pace.observe(kind, ms, PLAIN_PRICE, added)
    base, more = pace.factors(kind)
    for ms, added in PASSES.values():
        assert base * PLAIN_PRICE + more * added == pytest.approx(ms, rel=0.06)


def test_pace_is_that_of_passes_and_not_of_looking_things_up():
    """An n-gram takes microseconds, many times its price; a row's first pass touches memory for the first time."""
    control, seqs = Controller(EPYC, DRAFTS | {NGRAM: 0.1}), [sequence(i, 2000) for i in range(4)]
    looked_up = Choice(replace(NGRAM, gamma=2))
    for n in range(60):
        control.choose(seqs, {seq.id: (0, 0) for seq in seqs})
        rounds = []
        for seq in seqs:
            seq.stats.count(2, 2, 3)
            seq.num_committed += 3
            seq.ids.extend([0] * 3)
            rounds.append(Round(Row(seq, 1, 3, room=2, proposal=(0, 0), choice=looked_up), 2, 2, 3))
        lengths = [seq.num_committed - 3 for seq in seqs]
        seconds = EPYC.target(lengths, [3] * 4) * (1 if n else 3)
        control.observe(rounds, seconds + 2e-3, {NGRAM: 2e-3})
        if n:
            assert control.pace.factors(target_kind(lengths)) == pytest.approx((1, 1), rel=0.03)


@pytest.mark.parametrize(("draft_s", "starts"), [(0.88, False), (0.84, True)])  # 1.9 tokens in 1.88 or 1.84 s
def test_a_gain_of_one_per_cent_is_not_worth_starting_for(draft_s, starts):
    (choice,) = Controller(Flat(draft_s), {INT8: 0.9}).choose([sequence(0, 100)])
    assert (choice.draft is not None) == starts


def test_what_was_not_seen_lately_is_not_chosen_and_old_evidence_fades_when_another_comes_into_use():
    small = replace(INT8, budget=128)
    costs = replace(EPYC, drafts=EPYC.drafts | {small: EPYC.drafts[INT8]})
    control = Controller(costs, {INT8: 0.6, WINDOW: 0.99, small: 0.1, NGRAM: 0.1})
    seen, untested, failed, watched = control.evidence.pools
    for _ in range(20):
        seen.observe(1, [(0, 4, 3)] * 8)
        failed.observe(1, [(0, 1, 0)] * 8)
        watched.observe(1, [(0, 1, 0)] * 8)
    control._step = 1
    (choice,) = control.choose([sequence(0, 7000)])
    assert replace(choice.draft, gamma=1) == INT8
    assert untested.evidence(2) == 0
    assert failed.evidence(2) <= 2 < seen.evidence(2)
    assert watched.evidence(2) > 20  # is always up to date


def test_the_maximal_rule_says_nothing_of_the_coupled_one():
    control = Controller(EPYC, DRAFTS)
    for rule, evidence in (("maximal", 0), ("coupled", 1)):
        answer(control, [replace(sequence(0, 7000), draft=replace(INT8, gamma=2, sampling_rule=rule))], 9)
        assert control.evidence.pools[0].evidence(0) == evidence


def test_a_pass_costs_its_price_times_the_pace_of_its_parts():
    pace, seqs, lengths = Pace(), [sequence(0, 7000)], [7000]
    plain, more = EPYC.target(lengths, [1]), EPYC.target(lengths, [4]) - EPYC.target(lengths, [1])
    for _ in range(60):
        pace.observe(target_kind(lengths), plain, plain)
        pace.observe(target_kind(lengths), plain + 2 * more, plain, more)
    costs = BatchCosts(EPYC, pace, (INT8,), seqs, [0], {})
    assert costs.target([1]) == pytest.approx(plain, rel=0.02)
    assert costs.target([6]) - costs.target([1]) == pytest.approx(
        2 * (EPYC.target(lengths, [6]) - EPYC.target(lengths, [1])), rel=0.1
    )


def test_batches_of_other_sizes_are_of_other_kinds():
    assert len({target_kind([length] * rows)[1] for rows in (4, 8) for length in (700, 7000)}) == 4
    assert len({target_kind([length] * rows)[0] for rows in (4, 8) for length in (700, 7000)}) == 1


def test_plain_decoding_is_measured_again_only_where_the_gain_is_in_doubt():
    """Where drafting pays for sure it is measured twice in all."""
    for rate, least, most in ((0.95, 1, 2), (0.6, 3, 9)):
        world = play([7000] * 8, lambda row, at, rate=rate: rate, 600)
        assert least <= world.control.stats.off[MEASURING] / 8 <= most


def test_new_rows_bring_credit_for_trials():
    """Of whose text nothing is known yet: as much as a plain step of them takes."""
    trials, plain = Trials([False]), Problem(OneBatch(EPYC, [INT8], [7000] * 4), [], [8] * 4).plain()
    trials._drafts[0].put_off(10)
    trials.welcome(0.5, plain, 11)
    assert trials.credit == pytest.approx(plain.seconds / 2)
    assert trials._drafts[0].due > 20
    trials.welcome(0.75, plain, 11)
    assert trials._drafts[0].due == 12  # what was seen of others' texts has had its time


# --- states of drafts


def answer(control, seqs, gain):
    """One step: what was chosen, and ``gain`` accepted tokens for every row that had proposals."""
    choices, rounds, lengths = control.choose(seqs), [], [seq.num_committed for seq in seqs]
    for seq, choice in zip(seqs, choices, strict=True):
        room = choice.draft.gamma if choice.draft else 0
        row = Row(seq, 1, 1, room=room, proposal=(0,) * room, choice=choice)
        rounds.append(Round(row, room, min(gain, room), 1 + min(gain, room)))
        seq.num_committed += 1 + min(gain, room)
        seq.ids.extend([0] * (1 + min(gain, room)))
    control.observe(rounds, control.prices.target(lengths, [1 + r.row.room for r in rounds]), {})
    return choices


def test_waking_is_priced_and_idle_states_are_dropped():
    costs = replace(EPYC, wakes={INT8: 1000.0}, upkeeps={INT8: 0.5})  # 7 s for 7,000 tokens, 0.5 ms per pass
    control, seqs = Controller(costs, {INT8: 0.9}), [sequence(0, 7000, new=40)]
    assert all(answer(control, seqs, 9)[0] == Choice() for _ in range(20))  # 7 s for forty tokens: never
    costs = replace(EPYC, wakes={INT8: 1.0}, upkeeps={INT8: 0.5})  # 7 ms
    control, seqs = Controller(costs, {INT8: 0.9}), [sequence(0, 7000)]
    (first,) = answer(control, seqs, 9)
    assert first.draft is not None
    assert first.told == (INT8,) == control.told(seqs[0])
    choices = [answer(control, seqs, 0)[0] for _ in range(60)]
    gone = next(n for n, choice in enumerate(choices) if choice.dropped)
    off = next(n for n in range(gone) if not any(choice.draft for choice in choices[n:gone]))
    assert choices[gone].dropped == (INT8,)
    assert INT8 not in choices[gone].told
    assert 7 / 0.5 - 9 < gone - off < 7 / 0.5 + 12  # ms to wake it, over ms per pass: as soon as it cost as much


def test_the_usual_rate_is_that_of_the_rows_at_hand():
    control, seq = Controller(EPYC, DRAFTS), sequence(0, 7000)
    for _ in range(5):
        answer(control, [seq], 2)
    assert control._came / control._took > 2 / EPYC.target([7000], [3])
    control.choose([sequence(1, 100)])
    assert (control._came, control._took) == (0, 0)


def test_a_fork_has_its_sources_states_and_the_dead_have_none():
    control, (source, child) = Controller(EPYC, DRAFTS), (sequence(0, 7000), sequence(1, 7000))
    answer(control, [source], 9)
    control.fork(source, child)
    assert control.told(child) == control.told(source) != ()
    control.release(0)
    assert control.told(source) == ()
    (again,) = answer(control, [source], 9)  # preempted and filled again while its plan stood
    assert again.told == control.told(source) != ()
    control.release(0)
    plain = replace(child, id=2, draft=None)
    control.fork(child, plain)
    assert control.told(plain) == ()


def test_requests_with_drafts_of_their_own_keep_them():
    """They share the pass, and what they show of a draft counts."""
    control, own = Controller(EPYC, DRAFTS), replace(INT8, gamma=3)
    fixed, plain, auto = (
        replace(sequence(0, 7000), draft=own),
        replace(sequence(1, 7000), draft=None),
        sequence(2, 7000),
    )
    for _ in range(3):
        first, second, third = answer(control, [fixed, plain, auto], 9)
        assert (first, second) == (Choice(own, (own,)), Choice())
        assert third.draft is not None
    later = [answer(control, [fixed, plain, auto], 9)[2].draft for _ in range(60)]
    assert later.count(None) < 6  # plain decoding is measured, but not again and again because it never is all plain
    assert control.told(fixed) == (own,)
    assert control.evidence.pools[0].evidence(control._step) > 5
    assert control.choose([fixed, plain]) == [Choice(own, (own,)), Choice()]
    assert fixed.stats.control.seconds == 0 < auto.stats.control.seconds


def test_gamma_ends_with_the_request_and_with_its_own_limit():
    control = Controller(replace(EPYC, drafts={INT8: ({1: 0.1, 16: 0.1}, 0.0)}), {INT8: 0.99})
    short, small, free = sequence(0, 7000, new=3), sequence(1, 7000), sequence(2, 7000)
    small.draft = AutoDraft(gamma=2)
    gammas = [choice.draft and choice.draft.gamma for choice in control.choose([short, small, free])]
    assert gammas[:2] == [1, 2]
    assert gammas[2] > 3


# --- why not, and what came of it


def why(costs, lengths, rate, steps=40, drafts=None):
    world = World(Controller(costs, drafts or {INT8: 0.9}), costs, lengths, lambda draft, row, at: rate)
    for _ in range(steps):
        world.step()
    return world.control.stats.off.most_common(1)[0][0]


def test_reasons():
    dear = replace(EPYC, drafts={INT8: ({1: 40.0, 16: 40.0}, 0.0)})
    assert why(EPYC, [7000] * 4, 0.0) == "acceptance too low"
    assert why(dear, [300], 0.9) == "too short a context"
    computing = replace(EPYC, linear={n: 4.0 * n for n in (1, 8, 1000)}, read=0.01)
    assert why(computing, [300] * 64, 0.9, steps=4) == "batch too large"
    control, seqs = Controller(EPYC, DRAFTS), [sequence(0, 7000, new=2)]
    seqs[0].ids.append(0)
    seqs[0].num_committed += 1
    answer(control, seqs, 0)
    assert dict(seqs[0].stats.control.off) == {"near its end": 1}


def test_predicted_and_realised_speedup_and_the_residual():
    world = play([7000] * 8, lambda row, at: 0.8, 600)
    stats, late = world.control.stats, ControlStats()
    assert stats.realised_speedup == pytest.approx(world.plain_s / world.seconds, rel=0.02)
    assert stats.predicted_speedup == pytest.approx(stats.realised_speedup, rel=0.06)
    assert stats.eq2_residual == pytest.approx(stats.predicted_speedup / stats.realised_speedup - 1)
    assert sum(share for *_, share in stats.shares) == pytest.approx(1)
    assert stats.rounds.total() + stats.off.total() == 8 * len(world.steps)
    total = ControlStats.total(seq.stats.control for seq in world.seqs)
    assert (total.rounds, total.off) == (stats.rounds, stats.off)
    assert total.eq2_residual == pytest.approx(stats.eq2_residual)
    assert late.add(total).add(total, -1).shares == []
    assert (late.predicted_speedup, late.realised_speedup, late.eq2_residual) == (1, 1, 0)


# --- prices by the roofline


def target(name="SmolLM2-135M", cores=2):
    return Target(name, known_models()[name], unmeasured_cpu("avx512bf16", cores))


def test_the_sum_of_contexts_counts_not_their_number():
    prices = Roofline(target(), CONSIDERED["native"])
    one, many = prices.target([7000, 7000], [1, 1]), prices.target([500, 13500], [1, 1])
    assert one == pytest.approx(many)
    assert prices.target([7000, 700], [1, 1]) < 0.8 * one
    uniform = times(pass_work(target().network, {7004: 2}, queries=4), target().hardware).total
    assert prices.target([7000, 7000], [4, 4]) == pytest.approx(uniform)


def test_ragged_rounds_cost_a_pass_per_token_of_those_that_want_it():
    prices, draft = Roofline(target(), CONSIDERED["native"]), DraftConfig(budget=256, gamma=1)
    lengths = [100, 3000, 8000]
    alone = [prices.draft(draft, lengths[i:], [1] * (3 - i)) for i in range(3)]
    assert prices.draft(draft, lengths, [1, 2, 4]) == pytest.approx(alone[0] + alone[1] + 2 * alone[2])
    assert prices.draft(draft, [8000], [3]) == pytest.approx(prices.draft(draft, [800], [3]))  # what it reads
    int8, ngram = CONSIDERED["native"][0], CONSIDERED["native"][-1]
    assert prices.draft(int8, lengths, [1] * 3) < 0.7 * alone[0]
    assert prices.draft(ngram, lengths, [8] * 3) < 0.01 * alone[0]


def test_upkeep_and_waking():
    prices = Roofline(target(), CONSIDERED["native"])
    int8, window, verified, ngram = CONSIDERED["native"]
    for draft in (int8, window):
        assert prices.upkeep(draft, [7000]) == prices.wake(draft, 7000) == 0
    assert 0 < prices.upkeep(verified, [7000]) < 0.05 * prices.target([7000], [1])
    assert prices.wake(ngram, 7000) == pytest.approx(10 * prices.wake(ngram, 700))
    assert prices.upkeep(ngram, [7000]) == pytest.approx(prices.wake(ngram, 1))
    small = DraftConfig(weights="SmolLM2-135M", kv="full", gamma=1)
    pair = Roofline(replace(target(), name="x"), [small])
    assert pair.wake(small, 2000) > 10 * pair.wake(small, 100)
    assert pair.upkeep(small, [2000, 2000]) == pytest.approx(2 * pair.upkeep(small, [2000]))


@pytest.mark.parametrize("kind", CONSIDERED)
def test_what_is_considered_has_assumptions_and_prices(kind):
    drafts = CONSIDERED[kind]
    prices, control = Roofline(target(), drafts), Controller(Roofline(target(), drafts), dict.fromkeys(drafts, 0.5))
    assert control.drafts == tuple(replace(draft, gamma=1) for draft in drafts)
    for draft, length in product(control.drafts, (1, 100, 8000)):
        assert 0 < prior(draft, "SmolLM2-135M") < 1
        assert prices.draft(draft, [length], [2]) > 0
        assert min(prices.upkeep(draft, [length]), prices.wake(draft, length)) >= 0
