"""Text to token ids and back with one vocabulary, on top of the ``tokenizers`` library.

Knows nothing of models or files: ``tokenizer_folder`` and ``tokenizer_gguf`` make the objects.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer as Backend

from longdraft.errors import InvalidValueError, LongDraftError, ModelFileError


class Tokenizer:
    """Encodes and decodes with one vocabulary. Safe to use from many threads at once."""

    def __init__(self, backend: Backend, *, bos_token_id: int | None = None, eos_token_id: int | None = None) -> None:
        self._backend = backend
        self.bos_token_id, self.eos_token_id = bos_token_id, eos_token_id
        added = backend.get_added_tokens_decoder()
        self._special = {token.content: i for i, token in added.items() if token.special}
        self.special_ids = frozenset(self._special.values())
        self.added_tokens = frozenset(token.content for token in added.values())
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.base_vocab_size = backend.get_vocab_size(with_added_tokens=False)
        # What starts a text that brings its own BOS; None where the tokenizer would not add one anyway.
        adds_bos = bos_token_id is not None and self._run(backend, "", True)[:1] == [bos_token_id]
        self._bos = self.token_text(bos_token_id) if adds_bos else None

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The texts of the control tokens."""
        return tuple(self._special)

    def vocabulary(self) -> dict[str, int]:
        """Every token's own spelling and its id, added tokens included; made anew by each call."""
        return self._backend.get_vocab(with_added_tokens=True)

    def token_text(self, token_id: int) -> str:
        """The vocabulary's own spelling of one token (``decode`` gives readable text); empty for an unknown id."""
        return (self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None) or ""

    def save(self, file: Path) -> None:
        """Write ``tokenizer.json``."""
        self._backend.save(str(file))

    def encode(self, text: str, *, add_special_tokens: bool = True, allow_special: bool = True) -> list[int]:
        """Token ids of ``text``.

        ``add_special_tokens`` adds what the model wants around a plain text, mostly one BOS or nothing; a text that
        already starts with BOS gets no second one. With ``allow_special=False`` the names of control tokens in
        ``text`` are plain text. Raises ``InvalidValueError`` for what is not text.
        """
        _check_text(text)
        if not allow_special and self._mentions_special(text):
            return self._run(self._plain[0], text, add_special_tokens)
        ids = self._run(self._backend, text, add_special_tokens)
        doubled = add_special_tokens and self._bos and text.startswith(self._bos) and ids[:2] == 2 * ids[:1]
        return ids[1:] if doubled else ids

    def encode_marked(self, text: str, mark: str) -> list[int]:
        """Token ids of a rendered chat, with nothing added.

        A control token counts unless the character ``mark`` stands inside its name; the marks themselves are dropped.
        """
        _check_text(text)
        plain, aliases = self._plain
        names = "|".join(re.escape(name) for name in sorted(aliases, key=len, reverse=True)) or "(?!)"
        text = re.sub(names, lambda match: aliases[match[0]], text)
        return self._run(plain, text.replace(mark, ""), False)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``ids``. Ids past the vocabulary (padded embedding rows) give no text; negative ones are refused."""
        known = [int(i) for i in ids]
        if min(known, default=0) < 0:
            raise InvalidValueError("a token id", min(known), "token ids start at 0")
        with library_errors("this tokenizer"):
            return self._backend.decode([i for i in known if i < self.vocab_size], skip_special_tokens)

    @staticmethod
    def _run(backend: Backend, text: str, add_special_tokens: bool) -> list[int]:
        with library_errors("this tokenizer"):  # as when a vocabulary has no token for an unknown word
            return backend.encode(text, add_special_tokens=add_special_tokens).ids

    def _mentions_special(self, text: str) -> bool:
        normalizer = self._backend.normalizer
        texts = (text,) if normalizer is None else (text, normalizer.normalize_str(text))
        return any(name in t for name in self._special for t in texts)

    @cached_property
    def _plain(self) -> tuple[Backend, dict[str, str]]:
        """A twin in which no text reaches a control token, and the unguessable names that do: same ids otherwise."""
        key = secrets.token_hex(8)
        aliases = {name: f"\ue000{key}{i}\ue001" for name, i in self._special.items()}
        data = json.loads(self._backend.to_str())
        model = data["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {aliases.get(token, token): i for token, i in model["vocab"].items()}
        else:
            model["vocab"] = [[aliases.get(token, token), score] for token, score in model["vocab"]]
        if "merges" in model:  # those of a SentencePiece vocabulary may spell control tokens
            model["merges"] = [m for m in model["merges"] if not aliases.keys() & {*m, "".join(m)}]
        model["unk_token"] = aliases.get(model.get("unk_token"), model.get("unk_token"))
        for token in data["added_tokens"]:
            token["content"] = aliases.get(token["content"], token["content"])
        return Backend.from_str(json.dumps(data)), aliases


@contextmanager
def library_errors(file: object) -> Iterator[None]:
    """Turn whatever the tokenizers library raises, its panics included, into ``ModelFileError``."""
    try:
        yield
    except LongDraftError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # KeyboardInterrupt and its like
        raise ModelFileError(file, f"the tokenizers library refused it ({str(error)[:200]})") from error


def _check_text(text: str) -> None:
    try:
        text.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        raise InvalidValueError("the text", text, "it must be a string of valid Unicode characters") from error
