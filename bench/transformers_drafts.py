"""``generate`` of transformers with LongDraft's draft against ``generate`` as it is, in one process, taking turns.

    python bench/peer_vllm.py write DIR --batch 4 --context 3000       # the model and prompts into DIR
    python bench/transformers_drafts.py DIR --batch 1 --batch 4        # torch's threads: OMP_NUM_THREADS

A turn is ``tokens`` more for prompts whose cache is filled but for the last token. Plain decoding is the better of
static and dynamic cache, both with sdpa. Arms change places in every other round; a ratio is of one round. The last
line is one JSON object. docs/engines.md has what was measured.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median

import torch
from transformers import AutoModelForCausalLM, Cache, DynamicCache, PreTrainedModel, StaticCache

from longdraft import generate_with
from longdraft.bench import interval

CHUNK = 512
PLAIN = ("dynamic", "static")


@torch.inference_mode()
def filled(model: PreTrainedModel, ids: list[int]) -> DynamicCache:
    """A cache of all but the last token."""
    cache, prompt = DynamicCache(config=model.config), torch.tensor([ids[:-1]])
    for part in prompt.split(CHUNK, dim=1):
        model(part, cache=cache, use_cache=True, logits_to_keep=1)
    return cache


def joined(model: PreTrainedModel, rows: list[DynamicCache], room: int, static: bool) -> Cache:
    """A new cache of these rows."""
    length = rows[0].get_seq_length() + room
    cache = StaticCache(model.config, length) if static else DynamicCache(config=model.config)
    for n, layers in enumerate(zip(*(row.layers for row in rows), strict=True)):
        cache.update(torch.cat([x.keys for x in layers]), torch.cat([x.values for x in layers]), n)
    return cache


def partings(first: torch.Tensor, second: torch.Tensor, logits: tuple[torch.Tensor, ...]) -> list[float]:
    """Of rows that differ: how much better the first other token was, in ``logits`` of the first."""
    margins, start = [], first.shape[1] - len(logits)
    for row in (first != second).any(dim=1).nonzero().flatten().tolist():
        at = int((first[row] != second[row]).nonzero()[0])
        tokens = torch.stack([first[row, at], second[row, at]])
        margins.append(float(-logits[at - start][row, tokens].diff()))
    return margins


def measure(
    model: PreTrainedModel, prompts: list[list[int]], arms: dict[str, object], tokens: int, rounds: int
) -> list:
    """A cell for each draft; ``arms``: name → what goes to ``custom_generate``."""
    rows, ids = [filled(model, x) for x in prompts], torch.tensor(prompts)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": tokens, "do_sample": False}
    taken: dict[str, list[float]] = {name: [] for name in (*PLAIN, *arms)}
    words, accepted = {}, {}
    for turn in range(-1, rounds):  # the first warms up
        for name in taken if turn % 2 else list(taken)[::-1]:
            cache = joined(model, rows, tokens, name == "static")
            started = time.perf_counter()
            words[name] = model.generate(ids, cache=cache, **options, custom_generate=arms.get(name))
            taken[name].append(time.perf_counter() - started)
            if name in arms:
                stats = arms[name].stats
                accepted[name] = sum(sum(s.accepted) for s in stats) / max(1, sum(sum(s.drafted) for s in stats))
    plain = min(PLAIN, key=lambda name: median(taken[name][1:]))
    kept = {"return_dict_in_generate": True, "output_logits": True}
    logits = model.generate(ids, cache=joined(model, rows, tokens, plain == "static"), **options, **kept).logits
    cells = []
    for name in arms:
        middle, low, high = interval([a / b for a, b in zip(taken[plain][1:], taken[name][1:], strict=True)])
        cells.append(
            {
                "draft": name,
                "batch": len(prompts),
                "context": len(prompts[0]),
                "speedup": middle,
                "ci_low": low,
                "ci_high": high,
                "accepted": accepted[name],
                "plain": plain,
                "ms_per_token": {arm: [1000 * t / tokens for t in taken[arm][1:]] for arm in (*PLAIN, name)},
                "margins": {arm: partings(words[plain], words[arm], logits) for arm in (*PLAIN, name) if arm != plain},
            }
        )
        print(json.dumps(cells[-1]), flush=True)
    return cells


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--draft", action="append")
    parser.add_argument("--gamma", type=int, default=3)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    setting = json.loads((args.folder / "prompts.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(setting["model"], dtype=setting["dtype"]).eval()
    model.generation_config.eos_token_id = None
    drafts = args.draft or ["streaming_llm"]
    arms = {name: generate_with(name, gamma=args.gamma, budget=args.budget) for name in drafts}
    cells = []
    for batch in args.batch or [1, 4]:
        cells += measure(model, setting["prompts"][:batch], arms, args.tokens, args.rounds)
    print(json.dumps({"cells": cells}))


if __name__ == "__main__":
    main()
