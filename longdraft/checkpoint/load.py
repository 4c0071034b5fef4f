"""A model's name or path → a ``Checkpoint``. The one place that knows which file formats there are."""

from __future__ import annotations

import re
from importlib.util import find_spec
from os import PathLike
from pathlib import Path

from longdraft.checkpoint.base import Checkpoint
from longdraft.checkpoint.bundled import NAME as BUNDLED
from longdraft.checkpoint.bundled import require_bundled
from longdraft.checkpoint.folder import generation_defaults, read_chat_template, read_json
from longdraft.checkpoint.gguf import GGUFWeights, eos_token_ids, hf_config
from longdraft.checkpoint.gguf_header import GGUFHeader, read_header
from longdraft.checkpoint.safetensors import SafetensorsWeights
from longdraft.checkpoint.ties import resolve_tie
from longdraft.checkpoint.tokenizer import Tokenizer
from longdraft.checkpoint.tokenizer_folder import read_tokenizer
from longdraft.checkpoint.tokenizer_gguf import build_tokenizer
from longdraft.errors import InvalidValueError, MissingDependencyError, ModelFileError, ModelNotFoundError
from longdraft.models.config import ModelConfig, parse_hf_config

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.gguf"]


def load_checkpoint(model: str | PathLike[str] | None = None, *, download: bool = False) -> Checkpoint:
    """Read a checkpoint's headers and text tools; tensors are read when asked for.

    ``model`` is a folder in the Hugging Face layout, a GGUF file, the name of the embedded model (also the default),
    or a hub id whose files are cached. Only ``download=True`` lets a hub id use the network.

    Raises ``ModelNotFoundError``, ``ModelFileError`` or ``UnsupportedModelError``.
    """
    path, name = locate(model, download)
    if path.is_dir():
        return _from_folder(path, name)
    if path.suffix.lower() != ".gguf":
        fix = "Give a GGUF file, or the folder that holds config.json and the safetensors files."
        raise ModelFileError(path, "is not a model file of a known kind", fix=fix)
    return _from_gguf(path, name)


def read_config(model: str | PathLike[str] | None = None) -> tuple[str, ModelConfig]:
    """A model's name and config alone, from whatever ``load_checkpoint`` takes; no weights need be there.

    A ``config.json`` may be named itself. Raises what ``load_checkpoint`` raises.
    """
    path, name = locate(model, download=False)
    if path.is_dir():
        path = path / "config.json" if (path / "config.json").exists() else _only_gguf(path)
    elif path.suffix.lower() == ".json":
        name = path.absolute().parent.name
    if path.suffix.lower() == ".json":
        return name, parse_hf_config(read_json(path), source=str(path))
    return name, _gguf_config(read_header(path))


def locate(model: str | PathLike[str] | None, download: bool) -> tuple[Path, str]:
    """The folder or file that ``model`` stands for, and what to call it."""
    if model is None or str(model).lower() == BUNDLED:
        return require_bundled(), BUNDLED
    if not isinstance(model, (str, PathLike)):
        raise InvalidValueError("model", model, "must be a path, a name or a hub id")
    if not str(model):
        raise InvalidValueError("model", model, "must not be empty", "Leave it out for the embedded model.")
    path, is_folder, is_file = look_up(model)
    if is_folder:
        return path, path.resolve().name
    if is_file:
        return path, path.stem
    if HUB_ID.fullmatch(str(model)):
        return _hub_folder(str(model), download), str(model)
    raise ModelNotFoundError(
        f"There is no file or folder {str(model)[:200]!r}, and it is not a hub id of the form owner/name. "
        f"Leave the model out (or say {BUNDLED!r}) for the embedded one."
    )


def look_up(name: str | PathLike[str]) -> tuple[Path, bool, bool]:
    """A path with ``~`` resolved, and whether a folder or a file is there."""
    path = Path(name)
    try:
        path = path.expanduser()
        return path, path.is_dir(), path.is_file()
    except (OSError, ValueError, RuntimeError):  # too long a name, a NUL in it, an unknown user's home
        return path, False, False


def _from_gguf(path: Path, name: str) -> Checkpoint:
    header = read_header(path)
    source = GGUFWeights(header)
    config, warning = resolve_tie(_gguf_config(header), source)
    template = header.metadata.get("tokenizer.chat_template")
    tokenizer = build_tokenizer(header.metadata, file=header.path)
    return Checkpoint(
        name=name,
        path=str(path),
        config=config,
        weights=source,
        tokenizer=fitting(tokenizer, config, path),
        chat_template=template if isinstance(template, str) else None,
        eos_token_ids=eos_token_ids(header),
        warnings=(warning,) if warning else (),
    )


def _gguf_config(header: GGUFHeader) -> ModelConfig:
    try:
        return parse_hf_config(hf_config(header), source=header.path)
    except InvalidValueError as error:  # in a binary file, a senseless number is damage, not something to edit
        raise ModelFileError(header.path, f"its metadata makes no sense: {error}") from error


def _from_folder(path: Path, name: str) -> Checkpoint:
    if not (path / "config.json").exists():
        return _from_gguf(_only_gguf(path), name)
    source = SafetensorsWeights(path)
    raw = read_json(path / "config.json")
    config, warning = resolve_tie(parse_hf_config(raw, source=str(path / "config.json")), source)
    eos, defaults = generation_defaults(path)
    tokenizer = read_tokenizer(path) if (path / "tokenizer.json").exists() else None
    return Checkpoint(
        name=name,
        path=str(path),
        config=config,
        weights=source,
        tokenizer=fitting(tokenizer, config, path) if tokenizer else None,
        chat_template=read_chat_template(path),
        eos_token_ids=eos,
        generation_defaults=defaults,
        warnings=tuple(w for w in (warning, *source.warnings) if w),
    )


def _only_gguf(path: Path) -> Path:
    """The GGUF file of a folder without ``config.json``, if there is just one."""
    files = sorted(path.glob("*.gguf"))
    if len(files) != 1:
        fix = f"Name one of: {', '.join(f.name for f in files)}." if files else "Is this a model's folder?"
        raise ModelFileError(path, "holds no config.json", fix=fix)
    return files[0]


def fitting(tokenizer: Tokenizer, config: ModelConfig, path: str | PathLike[str]) -> Tokenizer:
    """Check that every token of the vocabulary proper has an embedding row; there may be more rows (padding).

    Tokens added later may lack one, as a pad token often does: a prompt that holds one is refused when it comes.
    """
    if tokenizer.base_vocab_size > config.vocab_size:
        have = f"the tokenizer has {tokenizer.base_vocab_size} tokens"
        problem = f"{have}, the model only {config.vocab_size} embedding rows"
        raise ModelFileError(path, problem, fix="Tokenizer and weights belong to different models.")
    return tokenizer


def _hub_folder(repo: str, download: bool) -> Path:
    """The cached snapshot of a hub repository, fetched first if ``download`` allows it."""
    if find_spec("huggingface_hub") is None:
        raise MissingDependencyError("huggingface-hub", f"Loading {repo!r} from the hub", 'pip install "longdraft[hf]"')
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo, allow_patterns=HUB_FILES, local_files_only=not download))
    except Exception as error:  # the hub's exceptions have changed with every major version
        if download:
            first_line = (str(error).splitlines() or [""])[0]
            problem = f"{repo!r} could not be downloaded ({type(error).__name__}: {first_line})"
            raise ModelNotFoundError(f"{problem}. Check the name and the network.") from error
        raise ModelNotFoundError(
            f"{repo!r} is not in the local hub cache, and the network is off. Run: hf download {repo}, "
            "or allow the network with --download (download=True)"
        ) from error
