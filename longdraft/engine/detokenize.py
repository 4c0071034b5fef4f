"""Token ids → text as they come, never splitting a character that is spread over several tokens."""

from __future__ import annotations

from collections.abc import Iterable

from longdraft.checkpoint.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"  # how the tokenizer shows bytes that are not a whole character (yet)


class Detokenizer:
    """The text of a growing list of ids. ``text`` holds whole characters only; ``finish`` adds what is left over.

    Decoding anew from the start for every token would take quadratic time, and decoding tokens one by one would split
    characters and lose the spaces that a tokenizer writes only between tokens. So each token is decoded behind the few
    before it that made up the last piece of text.
    """

    def __init__(self, tokenizer: Tokenizer, ids: Iterable[int] = (), *, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._ids: list[int] = []
        self._context = self._read = 0  # ids [context, read) are the last piece that is in ``text``
        self.text = ""
        for token in ids:
            self.push(token)

    def push(self, token: int) -> str:
        """Take one more id; the text it completes, which may be empty."""
        self._ids.append(token)
        before, after = self._pieces()
        if after.endswith(REPLACEMENT):
            return ""  # a character is still open
        if len(after) <= len(before):
            self._ids.pop()  # it shows as nothing, as control tokens do: not worth decoding again and again
            return ""
        self._context, self._read = self._read, len(self._ids)
        self.text += after[len(before) :]
        return after[len(before) :]

    def finish(self) -> str:
        """The rest: bytes of a character that never was completed, shown as the tokenizer shows them."""
        before, after = self._pieces()
        rest = after[len(before) :]
        self._context = self._read = len(self._ids)
        self.text += rest
        return rest

    def _pieces(self) -> tuple[str, str]:
        last = self._ids[self._context : self._read]
        ids = (last, self._ids[self._context :])
        before, after = (self._tokenizer.decode(part, skip_special_tokens=self._skip) for part in ids)
        return before, after
