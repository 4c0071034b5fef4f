"""Weights of a Hugging Face folder: ``model.safetensors``, or shards and their index.

Everything that can be wrong with the files is found from their headers when the folder is opened, so there is no
partly loaded model. Files that unpickle (``.bin``, ``.pt``, ``.pth``, ``.ckpt``) are never opened.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open

from longdraft.checkpoint.folder import read_json
from longdraft.errors import ModelFileError, ModelNotFoundError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_INDEX_LIMIT = 64 * 2**20
_DTYPES = ("F64", "F32", "F16", "BF16")
_UNPICKLED = (".bin", ".pt", ".pth", ".ckpt")
_AGAIN = "Download or copy it again."
_RESAVE = "With transformers: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)."


class SafetensorsWeights:
    """The tensors of one folder (a ``WeightSource``); ``warnings`` says which weight files were left aside.

    Raises ``ModelNotFoundError`` without such a folder, and ``ModelFileError`` naming the file or tensor when a shard
    is missing, cut short or not what the index says, or when a tensor is not of a float type.
    """

    def __init__(self, folder: Path | str) -> None:
        self._folder = Path(folder)
        if not self._folder.is_dir():
            raise ModelNotFoundError(f"{folder} is not a folder. Give one that holds config.json and {SINGLE}.")
        index = _shard_index(self._folder)
        shards = sorted(set(index.values())) or [SINGLE]
        for shard in shards:
            if not (self._folder / shard).is_file():
                raise ModelFileError(self._folder / shard, f"is missing, though {INDEX} names it", fix=_AGAIN)
        self._files = {shard: _open(self._folder / shard) for shard in shards}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._shard_of: dict[str, str] = {}
        for shard in shards:
            self._read_header(shard)
        self._check_index(index)
        surplus = sorted(file.name for file in self._folder.glob("*.safetensors") if file.name not in self._files)
        self.warnings = tuple(f"{self._folder / name} is not part of the model and was ignored." for name in surplus)

    @property
    def path(self) -> str:
        """The folder, for messages."""
        return str(self._folder)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name → shape of every tensor, from the headers."""
        return dict(self._shapes)

    def load(self, name: str) -> torch.Tensor:
        """One tensor on the CPU, in the file's type."""
        if name not in self._shard_of:
            raise ModelFileError(self._folder, f"tensor {name!r} is missing")
        shard = self._shard_of[name]
        try:
            return self._files[shard].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelFileError(self._folder / shard, f"tensor {name!r} cannot be read ({error})") from error

    def _read_header(self, shard: str) -> None:
        """Take note of the tensors in one shard."""
        file = self._files[shard]
        for name in file.keys():  # noqa: SIM118 - not a mapping
            if name in self._shard_of:
                problem = f"tensor {name!r} is also in {self._shard_of[name]}"
                raise ModelFileError(self._folder / shard, problem, fix="The files are of different saves.")
            header = file.get_slice(name)
            if header.get_dtype() not in _DTYPES:
                problem = f"tensor {name!r} has type {header.get_dtype()}; only {', '.join(_DTYPES)} are supported"
                raise ModelFileError(self._folder / shard, problem, fix="Use a checkpoint that was not quantised.")
            self._shard_of[name] = shard
            self._shapes[name] = tuple(header.get_shape())

    def _check_index(self, index: dict[str, str]) -> None:
        """Each tensor of the index is where it says. Tensors it does not list count as part of the model."""
        for name, shard in index.items():
            found = self._shard_of.get(name)
            if found != shard:
                where = f"it is in {found}" if found else "no shard holds it"
                problem = f"tensor {name!r} should be in {shard}, but {where}"
                raise ModelFileError(self._folder / INDEX, problem, fix="Index and shards are of different saves.")


def _shard_index(folder: Path) -> dict[str, str]:
    """Tensor name → shard file name; empty when the folder holds the single file."""
    single, path = folder / SINGLE, folder / INDEX
    if not path.exists():
        return {} if single.is_file() else _refuse_folder(folder)
    index = read_json(path, _INDEX_LIMIT).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise ModelFileError(path, "has no weight_map from tensor names to files", fix=_AGAIN)
    for shard in index.values():
        # A plain file name: nothing that could lead out of the folder.
        if not isinstance(shard, str) or not re.fullmatch(r"[^/\\:\0]+\.safetensors", shard):
            raise ModelFileError(path, f"names {shard!r:.80}, which is not a safetensors file of this folder")
    if single.exists() and SINGLE not in index.values():
        raise ModelFileError(folder, f"holds both {SINGLE} and {INDEX}", fix="Remove the one that is out of date.")
    return index


def _open(path: Path) -> Any:  # noqa: ANN401 - the library gives its handle no public type
    """Open one shard; the library compares its header with the file's length."""
    try:
        return safe_open(path, framework="pt")
    except OSError as error:
        raise ModelFileError(path, f"cannot be read ({error})") from error
    except SafetensorError as error:
        with open(path, "rb") as file:
            pointer = file.read(32).startswith(b"version https://git-lfs")
        fix = "This is a Git LFS pointer: run git lfs pull." if pointer else _AGAIN
        problem = f"is damaged or cut short at {path.stat().st_size} bytes ({error})"
        raise ModelFileError(path, problem, fix=fix) from error


def _refuse_folder(folder: Path) -> NoReturn:
    """Say what is there instead of weights."""
    names = sorted(file.name for file in folder.iterdir())
    if "adapter_config.json" in names:
        raise ModelFileError(folder, "holds an adapter, not a model", fix="Merge it into its base model and save that.")
    pickles = [name for name in names if name.endswith(_UNPICKLED)]
    if pickles:
        problem = (
            f"holds no {SINGLE}, only {', '.join(pickles[:3])}: opening such a file can run code, so it is not read"
        )
        raise ModelFileError(folder, problem, fix=f"Convert it where you trust it. {_RESAVE}")
    shards = [name for name in names if name.endswith(".safetensors")]
    fix = f"{INDEX} is missing beside {shards[0]}. {_AGAIN}" if shards else "Give the folder that holds the weights."
    raise ModelFileError(folder, f"holds neither {SINGLE} nor {INDEX}", fix=fix)
