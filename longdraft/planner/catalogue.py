"""Models that are planned for, by their names: files, or for want of them the table ``models.json``."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files

from longdraft.checkpoint.load import HUB_ID, locate, look_up, read_config
from longdraft.checkpoint.spire import SpireCheckpoint, is_spire, read_spire
from longdraft.errors import ModelNotFoundError
from longdraft.models.config import ModelConfig, parse_hf_config

_SUFFIXES = ("-instruct", "-chat", "-hf")


@cache
def known_models() -> dict[str, ModelConfig]:
    """Every model of the table."""
    table = json.loads((files(__package__) / "models.json").read_text())
    return {name: parse_hf_config(raw, source=name) for name, raw in table["models"].items()}


def known_name(name: str) -> str | None:
    """The table's name for ``name``: case, the hub's owner and a final ``-Instruct``, ``-chat`` or ``-hf`` aside."""
    wanted = name.rpartition("/")[2].lower()
    for suffix in _SUFFIXES:
        wanted = wanted.removesuffix(suffix)
    return next((known for known in known_models() if known.lower() == wanted), None)


def find_model(name: str | None) -> tuple[str, ModelConfig]:
    """A model's name and config: files first, then the table, then the hub's cache; ``None`` is the embedded model.

    Raises ``ModelNotFoundError`` with the names that are known, and what ``read_config`` raises.
    """
    if name is None or any(look_up(name)[1:]):
        return read_config(name)
    known = known_name(name)
    if known is not None:
        return known, known_models()[known]
    try:
        return read_config(name)
    except ModelNotFoundError as error:
        fix = "" if HUB_ID.fullmatch(name) else "Or give a config.json: no weights are needed to plan. "
        raise ModelNotFoundError(f"{error} {fix}Known without files: {', '.join(known_models())}.") from error


def find_spire(name: str) -> SpireCheckpoint | None:
    """The SPIRe draft in a folder, or in the hub's cache, if that is what ``name`` stands for."""
    try:
        path, shown = locate(name, download=False)
    except ModelNotFoundError:
        return None
    return read_spire(path, shown) if is_spire(path) else None
