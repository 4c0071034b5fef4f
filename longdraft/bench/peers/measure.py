"""Our plain decoding and a peer's in turns, on the same prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from longdraft.bench import PLAIN, PeerCell, interval
from longdraft.bench.machine import Load, disturbed
from longdraft.bench.peers.process import PeerProcess
from longdraft.bench.turns import turn

if TYPE_CHECKING:
    from longdraft.bench.decode import Contest

REPEATS = 2  # times the rounds asked for: repeating has an end


def measure(contest: Contest, peer: PeerProcess) -> PeerCell | None:
    """The peer's speed and our speed over it, by rounds; ``None`` for sampled rows.

    The peer fills its own cache and starts each turn at the end of the prompts; ours goes on, so its context is longer
    by up to a fork's life.
    """
    if contest.temperature:
        return None
    plan = contest.plan
    prompts = [seq.ids[: seq.num_prompt] for seq in contest.sources[PLAIN]]
    way = peer.ask("fill", prompts=prompts, room=plan.round_tokens)
    peer.ask("decode", tokens=1)  # not timed, as each fork's first step
    rounds: list[tuple[bool, float, float]] = []  # disturbed, our speed over the peer's, the peer's
    rows: list[list[int]] = []
    while sum(not noisy for noisy, *_ in rounds) < plan.rounds and len(rounds) < REPEATS * plan.rounds:
        contest.make_room()
        speeds, noisy = {}, False
        for ours in (True, False) if len(rounds) % 2 else (False, True):
            pid = None if ours else peer.pid
            before = Load.now(pid)
            if ours:
                speeds[ours] = turn(contest.llm, contest.rows[PLAIN], plan.round_tokens).speed
            else:
                answer = peer.ask("decode", tokens=plan.round_tokens)
                speeds[ours], rows = contest.batch * plan.round_tokens / answer["seconds"], answer["rows"]
            noisy |= disturbed(before, Load.now(pid))
        rounds.append((noisy, speeds[True] / speeds[False], speeds[False]))
    contest.compare()
    chosen = sorted(rounds, key=lambda row: row[0])[: plan.rounds]  # undisturbed ones first
    ratio, low, high = interval([row[1] for row in chosen], plan.seed)
    speed = len(chosen) / sum(1 / row[2] for row in chosen)
    cell = (f"{peer.peer.name} ({peer.engine}, {way})", contest.batch, contest.context, peer.dtype)
    return PeerCell(*cell, speed, ratio, low, high, shown=agreement(contest.outputs, rows))


def agreement(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> str:
    """In words: how many rows of tokens are the same as far as both go, and where the others part."""
    parted = []
    for a, b in zip(ours, theirs, strict=True):
        parted += [n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y][:1]
    rows = f"{len(ours) - len(parted)} of {len(ours)} rows have our tokens"
    return f"{rows}; others differ from token {min(parted) + 1} on" if parted else rows
