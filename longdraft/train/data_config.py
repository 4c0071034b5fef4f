"""``[data]`` of a recipe: which documents, which of them are kept aside, and what the target is to write itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from longdraft.config import MAX_SEED, as_int
from longdraft.errors import InvalidValueError
from longdraft.train.corpora import CORPORA, Document, documents
from longdraft.train.data import is_held_out
from longdraft.train.settings import Section, as_words, choice, number, read_section, refuse_others, whole


def _as_some(what: str, value: object) -> tuple[str, ...] | None:
    """A list of words, or none at all."""
    return None if value is None else as_words(what, value)


@dataclass(frozen=True)
class WrittenConfig(Section):
    """Texts that the target writes, for drafts to be trained on: ``texts`` of ``length`` tokens, ``prompt`` included.

    Prompts come from training documents of some of the recipe's ``corpora`` and ``paths``; left out, of all. Text n has
    the seed ``seed + n``.
    """

    corpora: Sequence[str] | None = field(default=None, metadata={"check": _as_some})
    paths: Sequence[str] | None = field(default=None, metadata={"check": _as_some})
    prompt: int = whole(192, 1, 2**24 - 1)
    length: int = whole(640, 2, 2**24)
    texts: int = whole(864, 1, 2**20)
    temperature: float = number(1.0, 0, 100)
    seed: int = whole(0, 0, MAX_SEED - 2**31)

    def __post_init__(self) -> None:
        super().__post_init__()
        as_int("prompt", self.prompt, 1, self.length - 1, "Give shorter prompts, or longer texts.")


@dataclass(frozen=True)
class DataConfig(Section):
    """Texts: of ``corpora`` and in ``paths`` (files and folders); ``held_out`` is the share of documents kept aside.

    ``cache``: what the target says of them is written down once, for all drafts and epochs. Sequences are then cut at
    the same places in every epoch. A token takes two bytes per residual stream that is read, and of the last one.
    """

    corpora: Sequence[str] = field(default=tuple(CORPORA), metadata={"check": as_words})
    paths: Sequence[str] = field(default=(), metadata={"check": as_words})
    held_out: float = number(0.05, 0, 1)
    cache: bool = choice(False, (False, True))
    written: WrittenConfig | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("corpora", "paths"):
            own, all_of = getattr(self.written, name, None), getattr(self, name)
            if own is not None and not set(own) <= set(all_of):
                limit = f"must be some of data.{name}, which are {', '.join(all_of) or 'none'}"
                raise InvalidValueError(f"written.{name}", list(own), limit)

    def prompted(self) -> list[Document]:
        """What the target's own texts may begin with: documents of which none is held out."""
        how = self.written or WrittenConfig()
        corpora = self.corpora if how.corpora is None else how.corpora
        paths = self.paths if how.paths is None else how.paths
        return [document for document in documents(corpora, paths) if not is_held_out(document, self.held_out)]

    def beneath(self, folder: Path) -> DataConfig:
        """The same with paths relative to ``folder``."""
        written = self.written
        if written is not None and written.paths is not None:
            written = replace(written, paths=_beneath(folder, written.paths))
        return replace(self, paths=_beneath(folder, self.paths), written=written)


def _beneath(folder: Path, paths: Sequence[str]) -> tuple[str, ...]:
    return tuple(str(folder / Path(path).expanduser()) for path in paths)


def read_data(raw: object, folder: Path) -> DataConfig:
    """The section of a table; its paths are relative to ``folder``. Raises ``InvalidValueError``."""
    raw = dict(refuse_others(raw, [f.name for f in fields(DataConfig)], "data"))
    if "written" in raw:
        raw["written"] = read_section(WrittenConfig, raw["written"], "data.written")
    return read_section(DataConfig, raw, "data").beneath(folder)
