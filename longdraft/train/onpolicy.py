"""Texts that a target writes itself, for its drafts to learn from: they see then what they will have to propose.

Owns the files, not the writing: whoever has an engine hands in a function. Files are whole or absent, and each text
depends on its prompt and number alone, so writing goes on where it was killed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from longdraft.checkpoint.folder import read_json
from longdraft.config import MAX_SEED, as_float, as_int
from longdraft.errors import InvalidValueError, ModelFileError
from longdraft.train.files import save_tensors, save_text

INDEX = "texts.json"
Write = Callable[[list[list[int]], list[int]], list[list[int]]]  # prompts and their seeds → what follows each


@dataclass(frozen=True)
class Writing:
    """How texts are written: by whom (a model's fingerprint), in which ``dtype``, at which temperature.

    ``length``: tokens of a text, prompt included. Text n has the seed ``seed + n``.
    """

    model: str
    temperature: float
    length: int
    seed: int = 0
    per_shard: int = 64
    dtype: str = "auto"

    def __post_init__(self) -> None:
        as_float("temperature", self.temperature, 0.0, 1e3)
        as_int("length", self.length, 2, 2**31 - 1)
        as_int("seed", self.seed, 0, MAX_SEED - 2**31)
        as_int("per_shard", self.per_shard, 1, 2**20)


def write_texts(folder: Path, writing: Writing, prompts: Sequence[Sequence[int]], write: Write) -> torch.Tensor:
    """``[R, length]`` int32: every prompt with what ``write`` lets follow, files that are there being read.

    Raises ``InvalidValueError`` for a prompt that leaves nothing to write, ``ModelFileError`` where the folder has
    texts of something else or a damaged file.
    """
    for prompt in prompts:
        as_int("tokens of a prompt", len(prompt), 1, writing.length - 1, "Give shorter prompts, or longer texts.")
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(repr([list(prompt) for prompt in prompts]).encode()).hexdigest()
    made, index = asdict(writing) | {"prompts": digest}, folder / INDEX
    if index.exists() and read_json(index) != made:
        problem = f"it is of other texts: {read_json(index)}, not {made}"
        raise ModelFileError(index, problem, fix="Give the settings it was made with, or another folder.")
    save_text(index, json.dumps(made, indent=2) + "\n")
    parts = []
    for first in range(0, len(prompts), writing.per_shard):
        file = folder / f"texts-{first // writing.per_shard:05}.safetensors"
        if not file.exists():
            numbers = range(first, min(first + writing.per_shard, len(prompts)))
            rows = [list(prompts[n]) for n in numbers]
            follow = write(rows, [writing.seed + n for n in numbers])
            texts = [row + more for row, more in zip(rows, follow, strict=True)]
            if any(len(text) != writing.length for text in texts):
                raise InvalidValueError("texts", [len(text) for text in texts], f"must have {writing.length} tokens")
            save_tensors(file, {"ids": torch.tensor(texts, dtype=torch.int32)})
        parts.append(_read(file))
    return torch.cat(parts)


def _read(file: Path) -> torch.Tensor:
    try:
        return load_file(file)["ids"]
    except (SafetensorError, OSError, KeyError) as error:
        raise ModelFileError(file, f"cannot be read ({error})", fix="Delete it and write the texts again.") from error
