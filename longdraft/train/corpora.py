"""Texts to train on: a user's files, and what is here anyway, as nothing is ever fetched from a network.

What is here is kept apart from what acceptance is measured on (``bench/prompts.py``, ``bench/code_text.py``): of the
packaged novels the first third, of the standard library the packages and not the modules beside them.
"""

from __future__ import annotations

import lzma
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from longdraft.errors import InvalidValueError

NOVELS = ("pride_and_prejudice", "sense_and_sensibility", "northanger_abbey", "mansfield_park")
CHAPTER = re.compile(r"^(?=chapter [ivxlc\d]+\s*$)", re.IGNORECASE | re.MULTILINE)
# Not prose nor code: tables of characters, and tests.
LEFT_OUT = {"encodings", "test", "tests", "idle_test", "site-packages", "dist-packages"}
SUFFIXES = (".txt", ".md", ".rst", ".py", ".tex", ".html", ".json", ".c", ".h", ".cc", ".cpp", ".js", ".ts", ".java")
LEAST = 200  # characters; shorter files are mostly empty ``__init__.py``


@dataclass(frozen=True)
class Document:
    """A text that is not to be torn apart between training and held-out texts."""

    name: str
    text: str


@lru_cache(maxsize=len(NOVELS))
def novel(name: str) -> str:
    """One of the packaged ``NOVELS``."""
    return lzma.decompress((files("longdraft") / "data" / f"austen_{name}.txt.xz").read_bytes()).decode()


def documents(corpora: Sequence[str], paths: Sequence[str | Path]) -> list[Document]:
    """All documents of the named ``CORPORA`` and of a user's files and folders, in an order that is always the same.

    Of a folder all files at any depth that have a text's suffix and are UTF-8. Raises ``InvalidValueError`` for an
    unknown corpus, a path that is not there, a named file that is no text, and where there is nothing at all.
    """
    found: list[Document] = []
    for corpus in corpora:
        if corpus not in CORPORA:
            raise InvalidValueError("corpora", corpus, f"must be one of {', '.join(CORPORA)}")
        found += CORPORA[corpus]()
    for path in map(Path, paths):
        found += _of_user(path.expanduser())
    if not found:
        raise InvalidValueError("paths", [str(path) for path in paths], "must hold texts", f"Known: {SUFFIXES}")
    return found


def _novels() -> Iterator[Document]:
    for name in NOVELS:
        text = novel(name)
        chapters = CHAPTER.split(text[: len(text) // 3])
        yield from (Document(f"{name} {n}", chapter) for n, chapter in enumerate(chapters) if len(chapter) >= LEAST)


def _stdlib() -> Iterator[Document]:
    folder = Path(sysconfig.get_path("stdlib"))
    for path in sorted(folder.glob("*/**/*.py")):
        if LEFT_OUT.isdisjoint(path.relative_to(folder).parts):
            yield from _read(path)


CORPORA = {"novels": _novels, "stdlib": _stdlib}


def _of_user(path: Path) -> list[Document]:
    if path.is_file():
        found = list(_read(path, least=1))
        if not found:
            raise InvalidValueError("paths", str(path), "must be a file of UTF-8 text that is not empty")
        return found
    if not path.is_dir():
        raise InvalidValueError("paths", str(path), "must be a file or a folder that is there")
    return [d for file in sorted(path.rglob("*")) if file.suffix.lower() in SUFFIXES for d in _read(file)]


def _read(path: Path, least: int = LEAST) -> Iterator[Document]:
    """The file as a document, unless it is hardly anything, or no text."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return
    if len(text) >= least and "\0" not in text:
        yield Document(str(path), text)
