"""A vocabulary for a small model: byte-level BPE of a given size, learned from its texts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from longdraft.checkpoint.tokenizer import Tokenizer
from longdraft.checkpoint.tokenizer_folder import read_tokenizer
from longdraft.config import as_int

END = "<|endoftext|>"  # id 0; it closes every text
LEAST, MOST = 257, 2**20  # all bytes and the end


def learn_tokenizer(texts: Iterable[str], vocab_size: int, folder: Path) -> Tokenizer:
    """Learn at most ``vocab_size`` tokens and write them to ``folder`` as every checkpoint has them.

    Any text can be encoded, as all bytes are among them; digits are taken one by one.
    """
    as_int("vocab_size", vocab_size, LEAST, MOST)
    backend = Backend(models.BPE())
    parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    backend.pre_tokenizer = pre_tokenizers.Sequence(parts)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(END, special=True)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    save_settings(folder, END)
    return read_tokenizer(folder)


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a tokenizer to a model's folder, with the token that closes texts."""
    tokenizer.save(folder / "tokenizer.json")
    end = None if tokenizer.eos_token_id is None else tokenizer.token_text(tokenizer.eos_token_id)
    save_settings(folder, end)


def save_settings(folder: Path, end: str | None) -> None:
    """Write the file beside ``tokenizer.json`` that names the token which closes texts."""
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
