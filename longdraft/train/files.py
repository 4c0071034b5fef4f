"""Files that are whole or not there: written beside their place, flushed to the disk, then renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file


def save_tensors(file: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """A safetensors file in the place of whatever is there; killed at any moment, the old one or the new one is."""
    kept = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    _save(file, lambda part: save_file(kept, part, dict(metadata) if metadata else None))


def save_text(file: Path, text: str) -> None:
    """The same with a text."""
    _save(file, lambda part: part.write_text(text, "utf-8"))


def save_folder(folder: Path, write: Callable[[Path], object]) -> None:
    """A folder that ``write`` fills, in the place of whatever is there."""
    part, old = folder.with_name(f"{folder.name}.part"), folder.with_name(f"{folder.name}.old")
    for left in (part, old):
        shutil.rmtree(left, ignore_errors=True)
    part.mkdir(parents=True)
    write(part)
    for path in part.rglob("*"):
        _flush(path)
    if folder.exists():
        os.replace(folder, old)
    os.replace(part, folder)
    shutil.rmtree(old, ignore_errors=True)


def _save(file: Path, write: Callable[[Path], object]) -> None:
    part = file.with_name(f"{file.name}.part")
    write(part)
    _flush(part)
    os.replace(part, file)
    _flush(file.parent)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
