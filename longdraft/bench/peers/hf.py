"""Plain decoding by ``transformers``: a script, the peer's end of ``process.py``."""

from __future__ import annotations

import inspect
import time
from typing import Any

from serve import OnProgress, serve  # a script's own folder is where Python looks first

TRIAL, TRIALS = 3, 2  # tokens, and times, by which the fastest way is found


class Child:
    """The model, and a cache with the prompts. Of static and dynamic cache, sdpa and eager attention it takes the best.

    Each prompt is filled alone and as a whole, by sdpa, and only once: both kinds of cache are made from that.
    """

    def __init__(self, progress: OnProgress) -> None:
        import torch
        import transformers

        self.torch, self.transformers, self.progress = torch, transformers, progress
        transformers.logging.disable_progress_bar()
        self.name = f"transformers {transformers.__version__}, torch {torch.__version__}"
        self.cache: Any = None
        self.first: Any = None  # the prompts' next tokens [B, 1]
        self.attention = "sdpa"

    def load(self, model: str, dtype: str, threads: int) -> str:
        self.torch.set_num_threads(threads)
        kind = getattr(self.torch, dtype)
        self.model = self.transformers.AutoModelForCausalLM.from_pretrained(model, dtype=kind).eval()
        known = inspect.signature(self.model.forward).parameters
        self.keyword = "cache" if "cache" in known else "past_key_values"  # its name in older versions
        return dtype

    def fill(self, prompts: list[list[int]], room: int) -> str:
        self.cache = None  # the last prompts' memory
        rows = self._prefill(prompts)
        seconds: dict[str, float] = {}
        for kind in ("dynamic", "static"):
            cache = self._join(rows, kind, len(prompts[0]) + max(room, TRIAL))
            for attention in ("sdpa", "eager"):
                way = f"{kind} cache, {attention}"
                seconds[way] = min(self._decode(TRIAL, cache, attention)[0] for _ in range(TRIALS))
                self.progress("ways tried", len(seconds), 4, way)
                if min(seconds, key=seconds.get) == way:
                    self.cache, self.attention = cache, attention
        return min(seconds, key=seconds.get)

    def decode(self, tokens: int) -> dict[str, Any]:
        seconds, rows = self._decode(tokens, self.cache, self.attention)
        return {"seconds": seconds, "rows": rows}

    def _prefill(self, prompts: list[list[int]]) -> list[Any]:
        """A cache per row."""
        self.model.set_attn_implementation("sdpa")
        rows, first = [], []
        for ids in prompts:
            rows.append(self.transformers.DynamicCache(config=self.model.config))
            first.append(self._step(self.torch.tensor([ids]), rows[-1]))
            self.progress("fill", len(rows), len(prompts), "rows")
        self.first = self.torch.cat(first)
        return rows

    def _join(self, rows: list[Any], kind: str, length: int) -> Any:  # noqa: ANN401 - a cache
        """The rows as one batch."""
        config = self.model.config
        if kind == "dynamic":
            cache = self.transformers.DynamicCache(config=config)
        else:
            cache = self.transformers.StaticCache(config=config, max_cache_len=length)
        for n, layers in enumerate(zip(*(row.layers for row in rows), strict=True)):
            k, v = (self.torch.cat([getattr(layer, which) for layer in layers]) for which in ("keys", "values"))
            cache.update(k, v, n)
        return cache

    def _decode(self, tokens: int, cache: Any, attention: str) -> tuple[float, list[list[int]]]:  # noqa: ANN401
        """From the end of the prompts, to which the cache is then cut."""
        self.model.set_attn_implementation(attention)
        found = [self.first]
        started = time.perf_counter()
        for _ in range(tokens):
            found.append(self._step(found[-1], cache))
        seconds = time.perf_counter() - started
        cache.crop(-tokens)
        return seconds, self.torch.cat(found, 1).tolist()

    def _step(self, ids: Any, cache: Any) -> Any:  # noqa: ANN401 - tensors and a cache
        """The next tokens [B, 1] after ``ids [B, N]``."""
        with self.torch.inference_mode():
            logits = self.model(ids, use_cache=True, logits_to_keep=1, **{self.keyword: cache}).logits
            return logits[:, -1].argmax(-1, keepdim=True)


if __name__ == "__main__":
    serve(Child)
