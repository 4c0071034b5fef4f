"""What a target says of texts, written down once: training goes over it for many epochs without running the target.

A folder holds ``shards.json``, which says of what target, texts and temperature, and files of some texts each, in
bfloat16 the residual streams that a draft reads, and of each token's distribution the largest entries and their rest,
or the last residual stream, which is all of it. A file is whole or absent, so writing goes on where it was killed.
Reading maps the files; texts are found by their ids, in whatever order they are asked for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from longdraft.checkpoint.base import Checkpoint
from longdraft.checkpoint.folder import read_json
from longdraft.config import as_float, as_int
from longdraft.errors import InvalidValueError, ModelFileError
from longdraft.models.weights import fingerprint
from longdraft.train.distill import Live, Said, Source
from longdraft.train.files import save_tensors, save_text
from longdraft.train.losses import Logits, Top, Whole
from longdraft.train.teacher import Teacher

INDEX, VERSION = "shards.json", 1
TOP = 64


@dataclass(frozen=True)
class Key:
    """What shards are of; all of it must agree where they are read.

    ``taps``: the residual streams. ``top``: how many entries of a distribution; 0: all, as a residual stream, whatever
    the temperature. ``per_shard``: texts in a file.
    """

    target: str
    fingerprint: str
    tokenizer: str
    texts: str
    taps: tuple[int, ...]
    top: int
    temperature: float
    per_shard: int
    version: int = VERSION

    @classmethod
    def of(
        cls,
        target: Checkpoint,
        texts: torch.Tensor,
        taps: tuple[int, ...],
        top: int = TOP,
        temperature: float = 1.0,
        per_shard: int = 64,
    ) -> Key:
        """``texts [R, L]``: token ids. Raises ``InvalidValueError``."""
        as_int("top", top, 0, target.config.vocab_size - 1, "0 keeps all of a distribution.")
        as_float("temperature", temperature, 1e-3, 1e3)
        as_int("per_shard", per_shard, 1, 2**20)
        words = {} if target.tokenizer is None else target.tokenizer.vocabulary()
        return cls(
            target=target.name,
            fingerprint=fingerprint(target.config, target.weights),
            tokenizer=hashlib.sha256(repr(sorted(words.items())).encode()).hexdigest(),
            texts=hashlib.sha256(_bytes(texts)).hexdigest(),
            taps=tuple(taps),
            top=top,
            temperature=1.0 if top == 0 else temperature,
            per_shard=per_shard,
        )

    def check(self, folder: Path) -> None:
        """Raise ``ModelFileError`` unless the shards of ``folder`` are of this; it names what is not."""
        have = read_json(folder / INDEX)
        for name, want in json.loads(json.dumps(asdict(self))).items():
            if name != "target" and have.get(name) != want:
                problem = f"it was made by {have.get('target')!r}, whose {name} is {have.get(name)!r}; {self.target!r}"
                fix = "Use the target, texts and settings it was made with, or make shards in another folder."
                raise ModelFileError(folder / INDEX, f"{problem} with these texts and settings has {want!r}", fix=fix)


def write_shards(
    folder: Path,
    key: Key,
    texts: torch.Tensor,
    teacher: Teacher,
    logits: Logits,
    *,
    batch: int = 8,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Run the target over ``texts [R, L]``, ``batch`` at a time; files that are there already stay.

    ``logits``: the target's norm and head. ``on_progress``: texts done, and all. Raises ``ModelFileError`` where the
    folder has shards of something else.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / INDEX).exists():
        key.check(folder)
    else:
        save_text(folder / INDEX, json.dumps(asdict(key), indent=2) + "\n")
    for number, rows in enumerate(texts.split(key.per_shard)):
        file, done = _file(folder, number), number * key.per_shard
        if not file.exists():
            parts = []
            for part in rows.split(batch):
                parts.append(_said(part, key, teacher, logits))
                done += len(part)
                on_progress(done, len(texts))
            save_tensors(file, {name: torch.cat([part[name] for part in parts]) for name in parts[0]})
        on_progress(number * key.per_shard + len(rows), len(texts))


def _said(ids: torch.Tensor, key: Key, teacher: Teacher, logits: Logits) -> dict[str, torch.Tensor]:
    """What is kept of texts ``ids [B, L]``, each tensor with a leading B."""
    streams = teacher.residuals(ids.tolist(), (*key.taps, teacher.model.config.num_layers))
    kept = {"ids": ids.to(torch.int32), "residuals": streams[:-1].transpose(0, 1).to(torch.bfloat16)}
    if not key.top:
        return kept | {"last": streams[-1].to(torch.bfloat16)}
    rows = [[Top.of(logits(x), key.top, key.temperature) for x in row.split(256)] for row in streams[-1]]
    for name, kind in (("ids", torch.int32), ("log_p", torch.float32), ("log_rest", torch.float32)):
        kept[f"top_{name}"] = torch.stack([torch.cat([getattr(x, name) for x in row]) for row in rows]).to(kind)
    return kept


class Shards:
    """A ``Source`` that reads what was written; nothing is held in memory but where each text is."""

    def __init__(self, folder: Path, key: Key, logits: Logits, otherwise: Source | None = None) -> None:
        """``logits``: the target's norm and head, for shards that keep all of a distribution. ``otherwise`` is asked of
        texts that are not there, as held-out ones.

        Raises ``ModelFileError`` for shards of something else, incomplete or damaged ones.
        """
        key.check(folder)
        self.key, self._logits, self._otherwise = key, logits, otherwise
        self._files, self._where = [], {}
        texts = hashlib.sha256()
        while (file := _file(folder, len(self._files))).exists():
            try:
                self._files.append(safe_open(file, "pt"))
                ids = self._files[-1].get_tensor("ids")
            except (SafetensorError, OSError) as error:
                raise ModelFileError(
                    file, f"cannot be read ({error})", fix="Delete it and write shards again."
                ) from error
            texts.update(_bytes(ids))
            self._where |= {_bytes(row): (len(self._files) - 1, i) for i, row in enumerate(ids)}
        if texts.hexdigest() != key.texts:
            raise ModelFileError(folder, f"only {len(self._where)} texts are there", fix="Write the shards to the end.")

    def of(self, ids: torch.Tensor) -> Said:
        """See ``Source``. Raises ``InvalidValueError`` for a text that is not there, if nobody else is to be asked."""
        if self._otherwise is not None and any(_bytes(text) not in self._where for text in ids):
            return self._otherwise.of(ids)
        rows = [self._row(text) for text in ids]
        parts = {name: torch.stack([row[name] for row in rows]).to(ids.device) for name in rows[0]}
        residuals = parts["residuals"].transpose(0, 1).float()
        if not self.key.top:
            return Said(residuals, Whole(parts["last"].float(), self._logits))
        ids, log_p, log_rest = (parts[f"top_{name}"] for name in ("ids", "log_p", "log_rest"))
        return Said(residuals, Top(ids.long(), log_p, log_rest, self.key.temperature))

    def _row(self, text: torch.Tensor) -> dict[str, torch.Tensor]:
        place = self._where.get(_bytes(text))
        if place is None:
            raise InvalidValueError("a text", text.tolist(), "must be one of those the shards were made of")
        file, i = self._files[place[0]], place[1]
        return {name: file.get_slice(name)[i] for name in file.keys() if name != "ids"}  # noqa: SIM118


@dataclass(frozen=True)
class Shelf:
    """A ``Source`` of texts of several lengths, each with a folder of shards."""

    taps: tuple[int, ...]
    shards: Mapping[int, Shards]

    @classmethod
    def written(
        cls,
        out: Path,
        target: Checkpoint,
        texts: Iterable[torch.Tensor],
        live: Live,
        on_progress: Callable[[int, int, int], None] = lambda length, done, total: None,
    ) -> Shelf:
        """Of ``texts``, ``[R, L]`` for each length, in ``out``: written now where they are not there yet.

        All of a distribution is kept, and ``live`` is asked of other texts. ``on_progress``: a length, its texts done,
        and all of them. Raises ``ModelFileError``.
        """
        found = {}
        for rows in texts:
            folder, key = out / f"said-{rows.shape[1]}", Key.of(target, rows, live.taps, top=0)
            told = partial(on_progress, rows.shape[1])
            write_shards(folder, key, rows, live.teacher, live.logits, on_progress=told)
            found[rows.shape[1]] = Shards(folder, key, live.logits, live)
        return cls(live.taps, found)

    def of(self, ids: torch.Tensor) -> Said:
        """See ``Source``."""
        return self.shards[ids.shape[1]].of(ids)


def _file(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05}.safetensors"


def _bytes(ids: torch.Tensor) -> bytes:
    return ids.cpu().to(torch.int32).contiguous().numpy().tobytes()
