"""Plain decoding by ``transformers`` in a process of its own, in turns with ours: a yardstick from outside.

The parent (``HuggingFace``) sends one JSON line per request and gets one back; the child is this module run by name.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import subprocess
import sys
import time
from itertools import product
from typing import TYPE_CHECKING, Any

from longdraft.bench import PLAIN, PeerCell, interval
from longdraft.bench.machine import Load, describe_machine, disturbed
from longdraft.errors import LongDraftError, MissingDependencyError

if TYPE_CHECKING:
    from longdraft.bench.decode import Contest
    from longdraft.llm import LLM

CHUNK = 256  # prompt tokens fed at once: eager attention keeps all scores
TRIAL = 4  # tokens by which the best way is found
REPEATS = 2  # times the rounds asked for


class HuggingFace:
    """The child process with the model of an ``LLM``. ``with HuggingFace(llm) as peer: peer.measure(contest)``."""

    def __init__(self, llm: LLM) -> None:
        if importlib.util.find_spec("transformers") is None:
            raise MissingDependencyError("transformers", "--peer hf", "pip install transformers")
        self.dtype = str(llm.model.dtype).removeprefix("torch.")
        threads = str(describe_machine(None)["threads"])
        command = [sys.executable, "-m", __name__, str(llm.checkpoint.path), self.dtype]
        quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": threads}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._child = subprocess.Popen(command, env={**os.environ, **quiet}, **pipes)  # noqa: S603 - our own module

    def __enter__(self) -> HuggingFace:
        return self

    def __exit__(self, *error: object) -> None:
        self._child.kill()
        self._child.wait()

    def ask(self, **request: object) -> Any:  # noqa: ANN401 - JSON
        """One request and its answer."""
        try:
            self._child.stdin.write(json.dumps(request) + "\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            pass  # it ended; reading says so
        line = self._child.stdout.readline()
        if not line:
            raise LongDraftError("The process that runs transformers ended; its message is above.")
        return json.loads(line)

    def measure(self, contest: Contest) -> PeerCell | None:
        """Turns of plain decoding here and there on the same prompts; ``None`` for sampled rows."""
        if contest.temperature:
            return None
        from longdraft.bench.decode import turn

        plan = contest.plan
        prompts = [seq.ids[: seq.num_prompt] for seq in contest.sources[PLAIN]]
        way = self.ask(prompts=prompts, room=max(plan.round_tokens, TRIAL) + 1)
        ratios: list[tuple[bool, float, float]] = []  # disturbed, ratio, the peer's speed
        while sum(not noisy for noisy, *_ in ratios) < plan.rounds and len(ratios) < REPEATS * plan.rounds:
            contest.make_room()
            before, speeds = Load.now(), {}
            for ours in (True, False) if len(ratios) % 2 else (False, True):
                if ours:
                    speeds[ours] = turn(contest.llm, contest.rows[PLAIN], plan.round_tokens).speed
                    between = disturbed(before, Load.now())
                else:
                    seconds = self.ask(tokens=plan.round_tokens)
                    speeds[ours] = contest.batch * plan.round_tokens / seconds
                    before = Load.now()  # the child's work is no disturbance
            ratios.append((between, speeds[True] / speeds[False], speeds[False]))
        chosen = sorted(ratios, key=lambda row: row[0])[: plan.rounds]  # undisturbed ones first
        ratio, low, high = interval([row[1] for row in chosen], plan.seed)
        speed = len(chosen) / sum(1 / row[2] for row in chosen)
        return PeerCell(f"hf {way}", contest.batch, contest.context, self.dtype, speed, ratio, low, high)


class Child:
    """The other side: the model, the prompts' caches, and the fastest way to go on from them."""

    def __init__(self, path: str, dtype: str) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        from longdraft.checkpoint.load import load_checkpoint

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        folder, file = os.path.split(path)
        if os.path.isdir(path):
            config = AutoConfig.from_pretrained(path)
        else:
            config = AutoConfig.from_pretrained(folder, gguf_file=file)
        self.model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
        # The very weights that we decode with: transformers would keep a quantised file packed.
        source = load_checkpoint(path).weights
        state = {name: source.load(name) for name in source.shapes()}
        missing, unexpected = self.model.load_state_dict(state, strict=False)
        if unexpected or [name for name in missing if name != "lm_head.weight"]:
            raise LongDraftError(f"transformers misses {missing} and does not know {unexpected}.")
        self.model.tie_weights()
        known = inspect.signature(self.model.forward).parameters
        self.keyword = "cache" if "cache" in known else "past_key_values"  # its name in older versions
        self.caches: dict[str, Any] = {}
        self.context, self.way = 0, ("", "")
        self.first = self.last = None  # tokens: after the prompts, and the last one decoded

    def fill(self, prompts: list[list[int]], room: int) -> str:
        """Fill both kinds of cache and find the fastest way."""
        import torch
        from transformers import DynamicCache, StaticCache

        ids, self.context = torch.tensor(prompts), len(prompts[0])
        config = self.model.config
        self.caches = {
            "dynamic cache": DynamicCache(config=config),
            "static cache": StaticCache(config=config, max_cache_len=self.context + room),
        }
        self.model.set_attn_implementation("sdpa")
        for cache in self.caches.values():
            for start in range(0, self.context, CHUNK):
                logits = self.step(ids[:, start : start + CHUNK], cache)
            self.first = logits[:, -1].argmax(-1, keepdim=True)
        seconds = {way: self.decode(TRIAL, way) for way in product(self.caches, ("sdpa", "eager")) for _ in range(2)}
        self.way = min(seconds, key=seconds.get)
        return ", ".join(self.way)

    def decode(self, tokens: int, way: tuple[str, str]) -> float:
        """Seconds for ``tokens`` more per row, from the end of the prompts."""
        cache, token = self.caches[way[0]], self.first
        self.model.set_attn_implementation(way[1])
        started = time.perf_counter()
        for _ in range(tokens):
            token = self.step(token, cache)[:, -1].argmax(-1, keepdim=True)
        seconds = time.perf_counter() - started
        cache.crop(-tokens)
        self.last = token
        return seconds

    def step(self, ids: Any, cache: Any) -> Any:  # noqa: ANN401 - tensors and a cache
        """Logits after the last of ``ids [B, N]``."""
        return self.model(ids, use_cache=True, logits_to_keep=1, **{self.keyword: cache}).logits


def main() -> None:
    """Serve requests until the parent goes away."""
    import torch

    out, sys.stdout = sys.stdout, sys.stderr  # whatever libraries print must not be taken for an answer
    child = Child(*sys.argv[1:])
    with torch.inference_mode():
        for line in sys.stdin:
            request = json.loads(line)
            if "prompts" in request:
                answer: object = child.fill(request["prompts"], request["room"])
            else:
                answer = child.decode(request["tokens"], child.way)
            print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
