"""Self-speculation on the embedded model at real context lengths: identity and acceptance.

    python bench/self_spec.py --length 2000 --length 4000 --length 7000

Eight prompts, two windows of each packaged novel. Each length is filled once; plain decoding and every draft continue
forks of the same pages. The last line is one JSON object; ``differences`` counts rows that differ from plain decoding,
each certified as a near-tie or not.
"""

from __future__ import annotations

import argparse
import json
import lzma
import time
from dataclasses import replace
from importlib.resources import files
from itertools import product

from longdraft import LLM, DraftConfig, SamplingParams
from longdraft.core import Sequence, Status, sum_by_position
from longdraft.drafts.base import DraftRow
from longdraft.exactness import certify, rounding
from longdraft.llm_draft import resolve_draft


def windows(llm: LLM, length: int) -> list[list[int]]:
    """Two windows of ``length`` ids of each novel, from a third and from two thirds of its text on."""
    paths = sorted((files("longdraft") / "data").iterdir(), key=lambda p: p.name)
    texts = [lzma.decompress(path.read_bytes()).decode() for path in paths]
    return [llm.encode(text[len(text) * i // 3 :][:60_000])[:length] for text in texts for i in (1, 2)]


def fill(llm: LLM, rows: list[list[int]], params: SamplingParams) -> list[Sequence]:
    """The prompts' sequences, each held at its first token."""
    sequences = [llm.engine.sequence(llm.engine.add(row, params)) for row in rows]
    while llm.engine.has_work:
        for output in llm.engine.step():
            output.seq.held = True
    return sequences


def decode(llm: LLM, parents: list[Sequence], draft: DraftConfig | None) -> tuple[list[Sequence], float]:
    """Forks of the parents under ``draft``, run to their end, and the seconds that took."""
    forks = [llm.engine.sequence(llm.engine.fork(parent.id, draft=draft)) for parent in parents]
    started = time.perf_counter()
    while any(seq.status is not Status.FINISHED for seq in forks):
        llm.engine.step()
    return forks, time.perf_counter() - started


def first_position(llm: LLM, parents: list[Sequence], config: DraftConfig) -> float:
    """How often the draft's next token is the target's, asked before every token of plain decoding.

    In the real loop a round starts where the last one was refused, at places harder than the average.
    """
    forks, draft = [llm.engine.sequence(llm.engine.fork(p.id)) for p in parents], llm.engine.runner.draft(config)
    equal = asked = 0
    while rows := [DraftRow(seq, 1) for seq in forks if seq.status is not Status.FINISHED]:
        for row in rows:
            llm.engine.store.reserve(row.seq.id, row.seq.num_committed, 2)
        proposal = draft.propose(rows, sampled=False)
        llm.engine.step()
        equal += sum(tokens[0] == row.seq.ids[-1] for tokens, row in zip(proposal.tokens, rows, strict=True))
        asked += len(rows)
    return equal / asked


def measure(llm: LLM, length: int, temperature: float, args: argparse.Namespace) -> list[dict[str, object]]:
    """One row per draft."""
    params = SamplingParams(temperature=temperature, seed=11, max_tokens=args.tokens, ignore_eos=True)
    parents = fill(llm, windows(llm, length), params)
    plain, plain_s = decode(llm, parents, None)
    epsilon = 4 * rounding(llm.model, [seq.ids for seq in plain])
    rows = []
    for kv, budget in product(args.draft, args.budget):
        rate = first_position(llm, parents, replace(resolve_draft(kv), budget=budget))
        row = {"length": length, "temperature": temperature, "draft": kv, "budget": budget, "first_position": rate}
        print(row, flush=True)
        rows.append(row)
    for kv, budget, gamma in product(args.draft, args.budget, args.gamma):
        forks, seconds = decode(llm, parents, replace(resolve_draft(kv), budget=budget, gamma=gamma))
        found = []
        for parent, a, b in zip(parents, plain, forks, strict=True):
            outputs = (a.output_ids, b.output_ids)
            found.append(certify(llm.model, a.ids[: a.num_prompt], outputs, params, parent.seed, epsilon))
        drafted = sum_by_position(s.stats.drafted for s in forks)
        accepted = sum_by_position(s.stats.accepted for s in forks)
        row = {
            "length": length,
            "temperature": temperature,
            "draft": kv,
            "budget": budget,
            "gamma": gamma,
            "acceptance_by_position": [round(a / d, 3) for a, d in zip(accepted, drafted, strict=True)],
            "tokens_per_verify": round(
                sum(s.stats.decode_tokens for s in forks) / sum(s.stats.verify_passes for s in forks), 2
            ),
            "differences": sum(d is not None for d in found),
            "certified": sum(d is not None and d["near_tie"] for d in found),
            "epsilon": epsilon,
            "speed_ratio": round(plain_s / seconds, 2),
        }
        print(row, flush=True)
        rows.append(row)
    for parent in parents:
        llm.engine.abort(parent.id)
    return rows


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, action="append")
    parser.add_argument("--draft", nargs="*", default=["streaming_llm"])
    parser.add_argument("--budget", type=int, nargs="*", default=[256, 512])
    parser.add_argument("--gamma", type=int, nargs="*", default=[1, 3, 5])
    parser.add_argument("--temperature", type=float, nargs="*", default=[0.0, 1.0])
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    llm = LLM()
    rows = [row for length in args.length or [2000] for t in args.temperature for row in measure(llm, length, t, args)]
    print(json.dumps({"model": llm.checkpoint.name, "exactness": llm.exactness, "rows": rows}))


if __name__ == "__main__":
    main()
