"""A copy of the embedded model in which every KV head stands several times: the same function, several times the cache.

    python bench/more_kv_heads.py FOLDER [--times 3]
    longdraft bench decode --model FOLDER --batch 8 --context 7900 --draft int8 --gamma 3 --assume-acceptance 0.85

SmolLM2-135M has 9 query heads on 3 KV heads; with --times 3 it has the cache of a model without grouped heads.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from longdraft import LLM
from longdraft.bench.peers.hand_over import as_folder


def main() -> None:
    """Read, repeat, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--times", type=int, default=3)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    llm = LLM(dtype="bfloat16", kv_cache_memory_bytes=1 << 28)
    as_folder(llm, args.folder)
    head_dim = llm.model.config.head_dim
    weights = load_file(args.folder / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            weights[name] = torch.repeat_interleave(weight.unflatten(0, (-1, head_dim)), args.times, dim=0).flatten(
                0, 1
            )
    save_file(weights, args.folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((args.folder / "config.json").read_text())
    config["num_key_value_heads"] *= args.times
    (args.folder / "config.json").write_text(json.dumps(config))
    llm.tokenizer.save(args.folder / "tokenizer.json")


if __name__ == "__main__":
    main()
