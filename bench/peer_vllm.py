"""Plain decoding by vLLM on the prompts of ``longdraft bench decode``, in vLLM's own environment.

    python bench/peer_vllm.py write DIR --batch 8 --context 7000      # with LongDraft: model and prompts into DIR
    python bench/peer_vllm.py run DIR --tokens 96                     # with vLLM: tokens per second

Recipe and caveats are in docs/performance.md. A run's prefill comes from vLLM's prefix cache; its time is that of
``tokens`` more than one token. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median


def write(folder: Path, model: str | None, dtype: str, batch: int, context: int) -> None:
    """The model as a Hugging Face folder with the weights that LongDraft runs, and P8's token ids."""
    from longdraft import LLM
    from longdraft.bench.peers.hand_over import as_folder
    from longdraft.bench.prompts import windows

    llm = LLM(model, dtype=dtype)
    folder.mkdir(parents=True, exist_ok=True)
    setting = {"model": str(as_folder(llm, folder).absolute()), "dtype": dtype, "prompts": windows(llm, batch, context)}
    (folder / "prompts.json").write_text(json.dumps(setting))


def run(folder: Path, tokens: int, rounds: int) -> dict[str, object]:
    """Greedy decoding of all prompts together."""
    import vllm

    setting = json.loads((folder / "prompts.json").read_text())
    prompts = setting["prompts"]
    llm = vllm.LLM(
        setting["model"],
        skip_tokenizer_init=True,
        dtype=setting["dtype"],
        max_model_len=len(prompts[0]) + tokens + 1,
        max_num_seqs=len(prompts),
        enable_prefix_caching=True,
    )

    def seconds(num: int) -> float:
        params = vllm.SamplingParams(temperature=0, max_tokens=num, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
        return time.perf_counter() - started

    seconds(1 + tokens)  # fills the prefix cache, compiles
    took = [seconds(1 + tokens) - seconds(1) for _ in range(rounds)]
    speeds = [len(prompts) * tokens / s for s in took]
    return {
        "peer": f"vllm {vllm.__version__}",
        "batch": len(prompts),
        "context": len(prompts[0]),
        "dtype": setting["dtype"],
        "tok_s": median(speeds),
        "rounds": speeds,
    }


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    writer, runner = verbs.add_parser("write"), verbs.add_parser("run")
    for verb in (writer, runner):
        verb.add_argument("folder", type=Path, metavar="DIR")
    writer.add_argument("--model")
    writer.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    writer.add_argument("--batch", type=int, default=8)
    writer.add_argument("--context", type=int, default=7000)
    runner.add_argument("--tokens", type=int, default=96)
    runner.add_argument("--rounds", type=int, default=5)
    args = vars(parser.parse_args())
    if args.pop("verb") == "write":
        write(**args)
    else:
        print(json.dumps(run(**args)))


if __name__ == "__main__":  # vLLM starts its workers by importing this file
    main()
