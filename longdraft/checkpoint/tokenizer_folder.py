"""A ``Tokenizer`` from a folder's ``tokenizer.json`` and its companions.

The file's own pipeline is used as it is: it is what the model was trained with. (``AutoTokenizer`` of transformers 5
replaces it for some classes, differently from version to version.)
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from longdraft.checkpoint.folder import read_json
from longdraft.checkpoint.tokenizer import Tokenizer, library_errors
from longdraft.errors import ModelFileError, UnsupportedModelError

MAX_FILE = 128 << 20  # bytes; the largest real tokenizer.json has about 35 MB


def read_tokenizer(path: str | Path) -> Tokenizer:
    """Read a folder's tokenizer.

    Whether BOS is added is up to ``tokenizer.json`` alone: as in transformers 5, ``add_bos_token`` beside it is not
    read. Raises ``ModelFileError`` for damaged files, ``UnsupportedModelError`` for settings not reproduced.
    """
    folder = Path(path)
    file = folder / "tokenizer.json"
    text = _read_text(file)
    config = _optional_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:  # written before transformers 4.34
        config |= _optional_json(folder / "special_tokens_map.json")
    with library_errors(file):
        backend = Backend.from_str(text)
        backend.no_truncation()
        backend.no_padding()
    is_bpe = isinstance(backend.model, models.BPE)
    if config.get("split_special_tokens"):
        raise UnsupportedModelError("split_special_tokens", True, "control tokens in a prompt are always recognised")
    if config.get("clean_up_tokenization_spaces") and not is_bpe:
        raise UnsupportedModelError("clean_up_tokenization_spaces", True, "only without it, or for BPE vocabularies")
    with library_errors(folder / "tokenizer_config.json"):
        named = _add_config_tokens(backend, config)
    bos, eos = (backend.token_to_id(named[key]) if key in named else None for key in ("bos_token", "eos_token"))
    return Tokenizer(backend, bos_token_id=bos, eos_token_id=eos)


def _added_token(value: dict, **fixed: bool) -> AddedToken:
    flags = {k: value[k] for k in ("single_word", "lstrip", "rstrip", "normalized", "special") if k in value}
    return AddedToken(value["content"], **{**flags, **fixed})


def _add_config_tokens(backend: Backend, config: dict[str, object]) -> dict[str, str]:
    """Add the tokens that ``tokenizer_config.json`` declares; returns the named ones (``bos_token``...) as text."""
    declared = {int(i): _added_token(value) for i, value in (config.get("added_tokens_decoder") or {}).items()}
    backend.add_tokens([declared[i] for i in sorted(declared)])
    named = {key: value for key, value in config.items() if key.endswith("_token") and value and value is not True}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    values = [*named.values(), *(extra.values() if isinstance(extra, dict) else extra)]
    tokens = [_added_token(v if isinstance(v, dict) else {"content": v}, special=True) for v in values]
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens([token for token in tokens if token.content not in known])
    return {key: value["content"] if isinstance(value, dict) else value for key, value in named.items()}


def _read_text(file: Path) -> str:
    try:
        if file.stat().st_size > MAX_FILE:
            raise ModelFileError(file, f"has more than {MAX_FILE >> 20} MiB, too much for a tokenizer")
        return file.read_text("utf-8")
    except FileNotFoundError as error:
        raise ModelFileError(file, "is missing", fix="Save the model's tokenizer with transformers 5 first.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFileError(file, f"cannot be read ({error})") from error


def _optional_json(file: Path) -> dict[str, object]:
    return read_json(file, MAX_FILE) if file.exists() else {}
