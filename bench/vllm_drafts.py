"""Stock vLLM with LongDraft's draft, attention, or both, against vLLM as it is: engines that take turns, on CPUs.

    python bench/peer_vllm.py write DIR --batch 8 --context 7000            # with LongDraft: model and prompts into DIR
    VLLM_CPU_OMP_THREADS_BIND=0-1 python bench/vllm_drafts.py DIR --arm vllm:0 --arm vllm:3 --arm native:3   # with both

An arm is whose attention runs, γ (0: the draft switched off; ``auto``: chosen at every step, by what is timed when the
engine starts), and ``:int8`` for a draft with such weights. It is set
against plain vLLM with the same attention, ``speedup``, and against vLLM as it is, ``over_stock``. A turn is ``tokens``
more than one token for every prompt, which vLLM's prefix cache already holds. The order of arms is turned round after
each round; a ratio is of one round. Intel's OpenMP is preloaded, as vLLM advises, where it is installed. The last line
is one JSON object; docs/engines.md has what was measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from longdraft.bench import interval
from longdraft.integrations.vllm.args import BLOCK_SIZE, MOST_GAMMA, engine_args
from longdraft.integrations.vllm.settings import Settings


class Arm(NamedTuple):
    """Whose attention; γ or ``auto``, or ``None`` for an engine without a draft; the draft's weights."""

    attention: str
    gamma: int | str | None
    weights: str = "target"

    @classmethod
    def of(cls, text: str) -> Arm:
        """``vllm:3``, ``native:4:int8``."""
        attention, gamma, *weights = text.split(":")
        return cls(attention, gamma if gamma == "auto" else int(gamma), *weights)


STOCK = Arm("vllm", None)


class Engines:
    """An engine of vLLM for each attention, with a draft and without one, as far as arms ask for them."""

    def __init__(self, setting: dict[str, Any], arms: list[Arm], budget: int, tokens: int, eager: bool) -> None:
        import vllm

        self.arms = list(dict.fromkeys([STOCK, *(Arm(arm.attention, None) for arm in arms), *arms]))
        most = max([1, *(MOST_GAMMA if arm.gamma == "auto" else arm.gamma or 0 for arm in arms)])
        common = {
            "skip_tokenizer_init": True,
            "dtype": setting["dtype"],
            "max_model_len": len(setting["prompts"][0]) + tokens + 16,
            "max_num_seqs": len(setting["prompts"]),
            "enable_prefix_caching": True,
            "enforce_eager": eager,
            "block_size": BLOCK_SIZE["cpu"],
        }
        self._llms: dict[tuple[str, bool], vllm.LLM] = {}
        for arm in self.arms:
            if self._key(arm) not in self._llms:
                own = any(a.attention == arm.attention and a.weights == "int8" for a in arms)
                auto = Arm(arm.attention, "auto", "int8" if own else "target") in arms
                draft = "auto" if auto else "streaming_llm"
                settings = Settings(draft, budget, attention=arm.attention, weights="int8" if own else "target")
                gamma = 0 if arm.gamma is None else most
                ours = {} if arm == STOCK else engine_args(settings, gamma, "cpu")
                self._llms[self._key(arm)] = vllm.LLM(setting["model"], **{**common, **ours})

    @staticmethod
    def _key(arm: Arm) -> tuple[str, bool]:
        return arm.attention, arm.gamma is not None

    def seconds(self, arm: Arm, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]], dict]:
        """What ``tokens`` more than one take, the words, and what the draft counted."""
        import vllm

        llm, taken, words, counts = self._llms[self._key(arm)], [], [], {}
        if arm.gamma is not None:
            auto = arm.gamma == "auto"
            choice = {"draft": "auto", "gamma": None} if auto else {"draft": "streaming_llm", "gamma": arm.gamma}
            llm.collective_rpc("longdraft_set", kwargs={**choice, "weights": arm.weights})
        for count in (1, 1 + tokens):
            params = vllm.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
            started = time.perf_counter()
            outs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
            taken.append(time.perf_counter() - started)
            words = [list(out.outputs[0].token_ids) for out in outs]
        if arm.gamma is not None:
            (counts,) = llm.collective_rpc("longdraft_set")
        return taken[1] - taken[0], words, counts


def measure(engines: Engines, prompts: list[list[int]], tokens: int, rounds: int) -> list[dict[str, Any]]:
    """A cell for each arm but the first, over all ``prompts``."""
    taken: dict[Arm, list[float]] = {arm: [] for arm in engines.arms}
    words: dict[Arm, list[list[int]]] = {}
    counts: dict[Arm, dict[str, float]] = {}
    for turn in range(rounds):
        for arm in engines.arms if turn % 2 else engines.arms[::-1]:
            took, words[arm], counts[arm] = engines.seconds(arm, prompts, tokens)
            taken[arm].append(took)
    cells = []
    for arm in engines.arms[1:]:
        cell = {"batch": len(prompts), "context": len(prompts[0]), **arm._asdict()}
        for name, base in (("speedup", Arm(arm.attention, None)), ("over_stock", STOCK)):
            ratios = [a / b for a, b in zip(taken[base], taken[arm], strict=True)]
            middle, low, high = interval(ratios)
            cell |= {name: middle, f"{name}_low": low, f"{name}_high": high, f"{name}_rounds": ratios}
        cell["ms"] = [1000 * t / tokens for t in taken[arm]]
        cell |= {"last_" + name: count for name, count in counts[arm].items()}
        cell["stock_ms"] = [1000 * t / tokens for t in taken[STOCK]]
        base = words[Arm(arm.attention, None)]
        cell["identical_rows"] = sum(a == b for a, b in zip(base, words[arm], strict=True))
        cells.append(cell)
        print(arm, {key: round(value, 3) for key, value in cell.items() if isinstance(value, float)}, flush=True)
    return cells


def preload() -> None:
    """Intel's OpenMP for vLLM's workers, where pip put it."""
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    if library.exists() and "omp" not in os.environ.get("LD_PRELOAD", ""):
        os.environ["LD_PRELOAD"] = ":".join(filter(None, [str(library), os.environ.get("LD_PRELOAD")]))


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--context", type=int, help="first tokens of the prompts; left out: all")
    parser.add_argument("--arm", type=Arm.of, action="append", metavar="ATTENTION:GAMMA[:WEIGHTS]")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--eager", action="store_true", help="without compilation")
    args = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "3")
    preload()
    setting = json.loads((args.folder / "prompts.json").read_text())
    arms = args.arm or [Arm("vllm", 3), Arm("native", 3)]
    engines, cells = Engines(setting, arms, args.budget, args.tokens, args.eager), []
    for batch in args.batch or [8]:
        prompts = [prompt[: args.context] for prompt in setting["prompts"][:batch]]
        for arm in engines.arms:  # fills the caches, compiles
            engines.seconds(arm, prompts, args.tokens)
        cells += measure(engines, prompts, args.tokens, args.rounds)
    print(json.dumps({"dtype": setting["dtype"], "budget": args.budget, "cells": cells}))


if __name__ == "__main__":  # vLLM starts its workers by importing this file
    main()
