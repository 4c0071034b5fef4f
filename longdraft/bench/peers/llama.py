"""Plain decoding by llama.cpp, all rows in one batch: a script, the peer's end of ``process.py``."""

from __future__ import annotations

import sys
import time
from typing import Any

from serve import OnProgress, serve  # a script's own folder is where Python looks first

TRIAL, TRIALS = 4, 2  # tokens, and times, by which the faster attention is found
CHUNK = 2048  # prompt tokens per call
ERROR = 4  # llama.cpp's level of messages
CELLS = 256  # llama.cpp rounds a sequence's room up to this many tokens


class Child:
    """The model, and a context with the prompts: one sequence per row, each with K and V in float16 of its own.

    Flash attention is on or off, whichever decodes faster: the first prompt, copied to all rows, decides.
    """

    def __init__(self, progress: OnProgress) -> None:
        import llama_cpp
        import numpy

        self.lib, self.numpy, self.progress = llama_cpp, numpy, progress
        self.name = f"llama-cpp-python {llama_cpp.__version__}"
        self.context: Any = None
        self.length = 0
        self.first: list[int] = []  # the prompts' next tokens

    def load(self, model: str, dtype: str, threads: int) -> str:
        """``dtype`` is the file's business."""
        lib, self.threads = self.lib, threads
        self._log = lib.llama_log_callback(_print_errors)  # kept: C has no reference to it
        lib.llama_log_set(self._log, None)
        settings = lib.llama_model_default_params()
        settings.n_gpu_layers = 0
        self.model = lib.llama_model_load_from_file(model.encode(), settings)
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {model}.")
        self.vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.batch = lib.llama_batch_init(CHUNK, 0, 1)
        return lib.llama_ftype_name(lib.llama_model_ftype(self.model)).decode()

    def fill(self, prompts: list[list[int]], room: int) -> str:
        if self.context:
            self.lib.llama_free(self.context)
        self.length = len(prompts[0])
        ways = {"flash attention": self.lib.LLAMA_FLASH_ATTN_TYPE_ENABLED, "no flash attention": 0}
        contexts, seconds = {}, {}
        for way, flash in ways.items():
            self.context = contexts[way] = self._new(len(prompts), max(room, TRIAL), flash)
            self.first = [self._prefill(0, prompts[0], way)] * len(prompts)
            for row in range(1, len(prompts)):
                self.lib.llama_memory_seq_cp(self._memory, 0, row, -1, -1)
            seconds[way] = min(self.decode(TRIAL)["seconds"] for _ in range(TRIALS))
        best = min(seconds, key=seconds.get)
        for way, context in contexts.items():
            if way != best:
                self.lib.llama_free(context)
        self.context = contexts[best]
        for row, ids in list(enumerate(prompts))[1:]:
            self.lib.llama_memory_seq_rm(self._memory, row, -1, -1)
            self.first[row] = self._prefill(row, ids, f"row {row + 1} of {len(prompts)}")
        return f"{best}, F16 KV"

    def decode(self, tokens: int) -> dict[str, Any]:
        rows = [self.first]
        started = time.perf_counter()
        for n in range(tokens):
            feed = [(token, self.length + n, row, True) for row, token in enumerate(rows[-1])]
            rows.append(self._feed(feed))
        seconds = time.perf_counter() - started
        for row in range(len(self.first)):
            self.lib.llama_memory_seq_rm(self._memory, row, self.length, -1)
        return {"seconds": seconds, "rows": [list(row) for row in zip(*rows, strict=True)]}

    @property
    def _memory(self) -> Any:  # noqa: ANN401 - a pointer
        return self.lib.llama_get_memory(self.context)

    def _new(self, rows: int, room: int, flash: int) -> Any:  # noqa: ANN401 - a pointer
        """An empty context, whose rows attend over their own cells only."""
        settings = self.lib.llama_context_default_params()
        settings.n_ctx = rows * CELLS * -(-(self.length + room) // CELLS)
        settings.n_batch, settings.n_seq_max, settings.kv_unified = CHUNK, rows, False
        settings.n_threads = settings.n_threads_batch = self.threads
        settings.flash_attn_type = flash
        settings.type_k = settings.type_v = self.lib.GGML_TYPE_F16
        context = self.lib.llama_init_from_model(self.model, settings)
        if not context:
            raise SystemExit(f"llama.cpp cannot make a context of {settings.n_ctx} tokens.")
        return context

    def _prefill(self, row: int, ids: list[int], name: str) -> int:
        """The token that comes after ``ids``."""
        for start in range(0, len(ids), CHUNK):
            stop = min(start + CHUNK, len(ids))
            feed = [(ids[n], n, row, n == len(ids) - 1) for n in range(start, stop)]
            found = self._feed(feed)
            self.progress(f"fill, {name}", stop, len(ids), "tokens")
        return found[0]

    def _feed(self, feed: list[tuple[int, int, int, bool]]) -> list[int]:
        """One pass over (token, position, row, whether its next token is wanted); those next tokens."""
        batch, wanted = self.batch, []
        batch.n_tokens = len(feed)
        for n, (token, position, row, want) in enumerate(feed):
            batch.token[n], batch.pos[n], batch.n_seq_id[n], batch.seq_id[n][0] = token, position, 1, row
            batch.logits[n] = want
            wanted += [n] * want
        if self.lib.llama_decode(self.context, batch):
            raise SystemExit(f"llama.cpp could not decode {len(feed)} tokens.")
        return [int(self._logits(n).argmax()) for n in wanted]

    def _logits(self, n: int) -> Any:  # noqa: ANN401 - an array [V]
        return self.numpy.ctypeslib.as_array(self.lib.llama_get_logits_ith(self.context, n), (self.vocab_size,))


def _print_errors(level: int, text: bytes, data: object) -> None:
    if level == ERROR:
        sys.stderr.write(text.decode(errors="replace"))


if __name__ == "__main__":
    serve(Child)
