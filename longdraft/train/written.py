"""What a recipe's target writes itself: prompts out of the documents it is to be trained on, and the engine's answers.

The files are those of ``onpolicy.py``; which documents may give prompts is the caller's to say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from longdraft.checkpoint.base import Checkpoint
from longdraft.checkpoint.tokenizer import Tokenizer
from longdraft.config import as_int
from longdraft.core import StepOutput
from longdraft.engine.engine import Engine
from longdraft.errors import InvalidValueError
from longdraft.llm import LLM
from longdraft.models.weights import fingerprint
from longdraft.prompts import require
from longdraft.sampling_params import SamplingParams
from longdraft.train.corpora import Document
from longdraft.train.data import encode
from longdraft.train.data_config import WrittenConfig
from longdraft.train.onpolicy import Write, Writing, write_texts

OnProgress = Callable[[int, int], None]


def written(
    folder: Path,
    how: WrittenConfig,
    documents: Sequence[Document],
    target: Checkpoint,
    dtype: str = "auto",
    on_progress: OnProgress = lambda done, total: None,
) -> torch.Tensor:
    """``[R, length]`` int32: texts that ``target``, run in ``dtype``, writes from prompts out of ``documents``.

    They lie in ``folder``; what is there already is read. ``on_progress``: tokens written, and all of them. Raises
    ``InvalidValueError`` and ``ModelFileError`` as ``cut`` and ``write_texts`` do, and what loading a model raises.
    """
    as_int("data.written.length", how.length, 2, target.config.context_length, "The target's contexts end there.")
    prompts = cut(documents, require(target.tokenizer), how.prompt, how.texts)
    made_by = fingerprint(target.config, target.weights)
    writing = Writing(made_by, how.temperature, how.length, how.seed, dtype=dtype)
    each, llm = how.length - how.prompt, None

    def write(some: list[list[int]], seeds: list[int]) -> list[list[int]]:
        nonlocal llm
        if llm is None:  # there is something to write
            llm = LLM(target.path, None, dtype=dtype, max_model_len=how.length, max_num_seqs=writing.per_shard)
        before = (seeds[0] - how.seed) * each
        told = continuations(llm, how.temperature, how.length, lambda n: on_progress(before + n, how.texts * each))
        return told(some, seeds)

    return write_texts(folder, writing, prompts, write)


def cut(documents: Sequence[Document], tokenizer: Tokenizer, length: int, count: int) -> list[list[int]]:
    """``count`` different prompts of ``length`` ids, each out of one document, at even distances over all of them.

    Raises ``InvalidValueError`` where documents have not so many.
    """
    texts = [encode(document, tokenizer) for document in documents]
    ends = np.cumsum([0, *(max(0, len(ids) - length + 1) for ids in texts)])  # places where a prompt may begin
    if count > ends[-1]:
        limit = f"must be at most {ends[-1]}, as many different prompts of {length} tokens as there are"
        raise InvalidValueError("data.written.texts", count, limit, "Give more documents, or shorter prompts.")
    prompts = []
    for place in np.linspace(0, ends[-1] - 1, count).astype(int):
        n = int(np.searchsorted(ends, place, side="right")) - 1
        start = int(place - ends[n])
        prompts.append(texts[n][start : start + length])
    return prompts


def continuations(
    llm: LLM, temperature: float, length: int, on_tokens: Callable[[int], None] = lambda done: None
) -> Write:
    """By ``llm``, until prompt and output have ``length`` tokens; a text's end does not end it, as in packed texts.

    Greedy at temperature 0. Drafts that ``llm`` has make it faster, and change nothing. ``on_tokens``: how many are
    written of what was asked for.
    """

    def write(prompts: list[list[int]], seeds: list[int]) -> list[list[int]]:
        params = [
            SamplingParams(temperature=temperature, seed=seed, max_tokens=length - len(prompt), ignore_eos=True)
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        done = 0

        def on_step(engine: Engine, outputs: list[StepOutput]) -> None:
            nonlocal done
            done += sum(len(output.tokens) for output in outputs)
            on_tokens(done)

        return [list(result.outputs[0].token_ids) for result in llm.generate(prompts, params, on_step=on_step)]

    return write
