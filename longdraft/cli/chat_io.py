"""What ``longdraft chat`` reads and writes besides the model: input lines, text for a terminal, saved conversations."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from longdraft.errors import InvalidValueError, LongDraftError

MAX_FILE_BYTES = 64 * 2**20
# Control characters that a terminal acts on: all of C0 but tab and newline, DEL, and C1, which holds an escape, too.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
Message = dict[str, str]


def terminal_reader() -> Callable[[str], str]:
    """Reads lines with the editing and the history of ``readline``, where Python has it."""
    if not sys.stdout.isatty():  # ``input`` would write its prompt into the answers
        return _read_beside_redirected_answers
    try:
        import readline  # noqa: F401 - importing it changes ``input``
    except ImportError:
        pass
    return input


def _read_beside_redirected_answers(prompt: str) -> str:
    print(prompt, end="", file=sys.stderr, flush=True)
    return input()


def read_piped(prompt: str) -> str:
    """The next line of stdin, which must be UTF-8; ``prompt`` is for terminals."""
    line = b"" if sys.stdin is None else sys.stdin.buffer.readline()
    if not line:
        raise EOFError
    return line.decode("utf-8-sig").removesuffix("\n").removesuffix("\r")


def printable(text: str) -> str:
    """``text`` without the control characters that a terminal would act on; each becomes a replacement character."""
    return _CONTROLS.sub("\ufffd", text)


def save(path: Path, messages: list[Message]) -> None:
    """Write ``messages`` as JSON to a new file, whole or not at all; its owner alone may read it."""
    data, path = json.dumps(messages, ensure_ascii=False, indent=1) + "\n", path.expanduser()
    temporary = None
    try:
        if os.path.lexists(path):
            raise InvalidValueError("the file", str(path), "it exists already", "Give another name.")
        with tempfile.NamedTemporaryFile("wb", dir=path.parent, prefix=".chat-", delete=False) as file:
            temporary = file.name
            file.write(data.encode())
        os.replace(temporary, path)
        temporary = None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name, half a surrogate pair in a message
        if isinstance(error, LongDraftError):
            raise
        raise InvalidValueError("the file", str(path), f"it cannot be written ({error})") from error
    finally:
        if temporary:
            os.unlink(temporary)


def load(path: Path) -> list[Message]:
    """The messages of a file that ``save`` wrote: perhaps one of the system, then user and assistant in turns."""
    try:
        with path.expanduser().open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ValueError(f"more than {MAX_FILE_BYTES // 2**20} MiB")
        messages = json.loads(data.decode())
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidValueError("the file", str(path), f"it cannot be read ({error})") from error
    limit = "it must be a JSON list of messages, each with 'role' and 'content' as strings alone"
    if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
        raise InvalidValueError("the file", str(path), limit)
    roles = [message["role"] for message in messages]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if not roles or turns != ["user", "assistant"] * (len(turns) // 2):
        limit = "its roles must be 'user' and 'assistant' in turns, perhaps behind one 'system'"
        raise InvalidValueError("the file", str(path), limit)
    return messages


def _is_message(message: object) -> bool:
    if not isinstance(message, dict) or message.keys() != {"role", "content"}:
        return False
    return all(isinstance(value, str) for value in message.values())
