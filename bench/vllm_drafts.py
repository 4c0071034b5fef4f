"""Stock vLLM with LongDraft's draft against vLLM as it is: two engines, taking turns, in vLLM's own environment.

    python bench/peer_vllm.py write DIR --batch 8 --context 7000    # with LongDraft: model and prompts into DIR
    python bench/vllm_drafts.py DIR --batch 8 --gamma 0 --gamma 3   # with vLLM and LongDraft; gamma 0: off

A turn is ``tokens`` more than one token for every prompt, which vLLM's prefix cache already holds. Arms change places
in every other round; a ratio is of one round. The last line is one JSON object. docs/engines.md has what was measured.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

from longdraft.bench import interval
from longdraft.integrations.vllm.args import engine_args
from longdraft.integrations.vllm.settings import Settings

PLAIN = "plain"


def seconds(llm: object, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
    """What ``tokens`` more than one take, and the words."""
    import vllm

    taken, words = [], []
    for count in (1, 1 + tokens):
        params = vllm.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        outs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        taken.append(time.perf_counter() - started)
        words = [list(out.outputs[0].token_ids) for out in outs]
    return taken[1] - taken[0], words


def measure(
    folder: Path, batches: list[int], gammas: list[int], budget: int, tokens: int, rounds: int, eager: bool
) -> list:
    """A cell for each batch and γ."""
    import vllm

    setting = json.loads((folder / "prompts.json").read_text())
    prompts = setting["prompts"]
    common = {
        "skip_tokenizer_init": True,
        "dtype": setting["dtype"],
        "max_model_len": len(prompts[0]) + tokens + 16,
        "max_num_seqs": len(prompts),
        "enable_prefix_caching": True,
        "enforce_eager": eager,
    }
    drafting = engine_args(Settings(budget=budget), max(1, *gammas), "cpu")
    plain = vllm.LLM(setting["model"], block_size=drafting["block_size"], **common)
    draft = vllm.LLM(setting["model"], **drafting, **common)
    cells = []
    for batch in batches:
        texts = prompts[:batch]
        arms, taken, words = [PLAIN, *gammas], {}, {}
        for turn in range(-1, rounds):  # the first fills the caches and compiles
            for arm in arms if turn % 2 else arms[::-1]:
                if arm != PLAIN:
                    draft.collective_rpc("longdraft_set", kwargs={"gamma": arm})
                took, words[arm] = seconds(plain if arm == PLAIN else draft, texts, tokens)
                taken.setdefault(arm, []).append(took)
        for arm in gammas:
            ratios = [a / b for a, b in zip(taken[PLAIN][1:], taken[arm][1:], strict=True)]
            middle, low, high = interval(ratios)
            same = sum(a == b for a, b in zip(words[PLAIN], words[arm], strict=True))
            cells.append(
                {
                    "batch": batch,
                    "context": len(texts[0]),
                    "dtype": setting["dtype"],
                    "gamma": arm,
                    "budget": budget,
                    "speedup": middle,
                    "ci_low": low,
                    "ci_high": high,
                    "rounds": ratios,
                    "plain_ms": [1000 * t / tokens for t in taken[PLAIN][1:]],
                    "identical_rows": same,
                }
            )
            print(
                f"{batch} x {len(texts[0])}, gamma {arm}: {middle:.3f} ({low:.3f}-{high:.3f}), {same} rows identical",
                flush=True,
            )
    return cells


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--gamma", type=int, action="append")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--eager", action="store_true", help="without compilation")
    args = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "3")
    cells = measure(
        args.folder, args.batch or [8], args.gamma or [0, 3], args.budget, args.tokens, args.rounds, args.eager
    )
    print(json.dumps({"cells": cells}))


if __name__ == "__main__":  # vLLM starts its workers by importing this file
    main()
