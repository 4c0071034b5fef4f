"""A SPIRe draft on disk (arXiv:2504.06419): ``config.json`` and its layers in ``model.safetensors``.

What it shares with its target, embedding, final norm and head, is not in the folder; the file says instead which model
it was made for, and refuses another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from longdraft.checkpoint.base import Checkpoint
from longdraft.checkpoint.folder import read_json
from longdraft.checkpoint.safetensors import SINGLE, SafetensorsWeights
from longdraft.errors import InvalidValueError, ModelFileError, TargetMismatchError
from longdraft.models.config import ModelConfig
from longdraft.models.feedback import MEMORY, FeedbackConfig
from longdraft.models.settings import Settings
from longdraft.models.weights import WeightSource, expected_shapes, fingerprint

KIND, VERSION = "spire", 1
CONFIG = "config.json"


@dataclass(frozen=True)
class SpireCheckpoint:
    """A draft's folder, read: ``target`` is the name of the model it was made for, for messages."""

    name: str
    path: str
    config: FeedbackConfig
    weights: WeightSource
    target: str
    fingerprint: str

    def check_target(self, target: Checkpoint) -> None:
        """Raise ``TargetMismatchError`` if it was made for another model, ``ModelFileError`` if it is damaged."""
        if fingerprint(target.config, target.weights) != self.fingerprint:
            problem = f"it was made for {self.target!r}, whose sizes or norms are others"
            raise TargetMismatchError(target.name, self.name, problem)
        check_tensors(self.config, target.config, self.weights)

    def tensors(self, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """All of them, in ``dtype`` or as they are, as ``FeedbackDraft`` takes them."""
        return {name: self.weights.load(name).to(dtype) for name in self.weights.shapes()}


def shapes(config: FeedbackConfig, target: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name → shape of every tensor of a draft."""
    config.taps(target.num_layers)
    n = len(config.layers)
    memory = {MEMORY: (config.num_memories, n + 1)} if config.num_memories else {}
    return expected_shapes(replace(target, num_layers=n), ends=False) | memory


def check_tensors(config: FeedbackConfig, target: ModelConfig, weights: WeightSource) -> None:
    """Raise ``ModelFileError`` naming the first tensor that is missing, misshapen or too many."""
    want, have = shapes(config, target), weights.shapes()
    for name in sorted(want.keys() | have.keys()):
        if want.get(name) != (tuple(have[name]) if name in have else None):
            problem = f"tensor {name!r} has shape {have.get(name)}, expected {want.get(name)}"
            raise ModelFileError(weights.path, problem, fix="Save the draft again.")


def is_spire(folder: Path) -> bool:
    """Whether a draft lies there."""
    path = folder / CONFIG
    return path.is_file() and read_json(path).get("model_type") == KIND


def read_spire(folder: Path, name: str) -> SpireCheckpoint:
    """A draft's folder; tensors are read when asked for. Raises ``ModelFileError``."""
    path = folder / CONFIG
    raw = read_json(path)
    if raw.get("version") != VERSION:
        problem = f"has version {raw.get('version')!r}, and {VERSION} is what is read here"
        raise ModelFileError(path, problem, fix="Save the draft again with this release.")
    known = FeedbackConfig.__dataclass_fields__
    target = raw.get("target")
    try:
        config = FeedbackConfig(**{key: raw[key] for key in known if key in raw})
        words = Settings(target if isinstance(target, Mapping) else {}, f"{path}: target.")
    except (InvalidValueError, TypeError) as error:
        raise ModelFileError(path, f"makes no sense: {error}") from error
    made_for, digest = (words.raw.get(key) for key in ("name", "fingerprint"))
    if not isinstance(made_for, str) or not isinstance(digest, str):
        raise ModelFileError(path, "does not say for which model the draft was made (target.name, target.fingerprint)")
    return SpireCheckpoint(name, str(folder), config, SafetensorsWeights(folder), made_for, digest)


def save_spire(
    folder: Path | str, config: FeedbackConfig, tensors: Mapping[str, torch.Tensor], target: Checkpoint
) -> Path:
    """Write a draft for ``target`` that consists of ``tensors``; its folder. Files that are there are replaced.

    Raises ``InvalidValueError`` where the tensors are not those of such a draft.
    """
    folder = Path(folder)
    want = shapes(config, target.config)
    have = {name: tuple(x.shape) for name, x in tensors.items()}
    if have != want:
        wrong = sorted(name for name in want.keys() | have.keys() if want.get(name) != have.get(name))
        raise InvalidValueError("tensors", wrong[:3], "must be those of the draft's config and target, in their shapes")
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: x.detach().cpu().contiguous() for name, x in tensors.items()}, folder / SINGLE)
    made_for = {"name": target.name, "fingerprint": fingerprint(target.config, target.weights)}
    raw = {"model_type": KIND, "version": VERSION, **asdict(config), "target": made_for}
    (folder / CONFIG).write_text(json.dumps(raw, indent=2) + "\n")
    return folder
