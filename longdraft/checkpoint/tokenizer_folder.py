"""A ``Tokenizer`` from a folder's ``tokenizer.json`` and its companions, with the ids that ``AutoTokenizer`` gives."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, models, normalizers
from tokenizers import Tokenizer as Backend

from longdraft.checkpoint.folder import read_json
from longdraft.checkpoint.pipelines import QWEN2, use_byte_level, use_metaspace
from longdraft.checkpoint.tokenizer import Tokenizer, library_errors
from longdraft.errors import ModelFileError, UnsupportedModelError

MAX_FILE = 128 << 20  # bytes; the largest real tokenizer.json has about 35 MB
# Control tokens that transformers' classes bring along.
_CLASS_TOKENS = {
    "GPT2Tokenizer": dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>"),
    "Qwen2Tokenizer": dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>"),
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
}


def read_tokenizer(path: str | Path) -> Tokenizer:
    """Read a folder's tokenizer.

    Whether BOS is added is up to ``tokenizer.json`` alone: as in transformers 5, ``add_bos_token`` beside it is not
    read. Only the default tokens of transformers' classes get no new ids where the vocabulary lacks them: the model
    would have no embedding for those. Raises ``ModelFileError`` for damaged files, ``UnsupportedModelError`` for
    settings not reproduced.
    """
    folder = Path(path)
    file = folder / "tokenizer.json"
    text = _read_text(file)
    config, model = _optional_json(folder / "tokenizer_config.json"), _optional_json(folder / "config.json")
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
        name = _tokenizer_class(config, model, text) if is_bpe else ""
        _apply_class(backend, name, config)
        named = _add_config_tokens(backend, config, _CLASS_TOKENS.get(name, {}))
    bos, eos = (backend.token_to_id(named[key]) if key in named else None for key in ("bos_token", "eos_token"))
    return Tokenizer(backend, bos_token_id=bos, eos_token_id=eos)


def _tokenizer_class(config: dict, model: dict, text: str) -> str:
    """The class ``AutoTokenizer`` picks, where that class replaces the pipeline which ``tokenizer.json`` describes."""
    name = str(config.get("tokenizer_class") or model.get("tokenizer_class") or "").removesuffix("Fast")
    family = model.get("model_type")
    if family == "qwen2" or (family == "qwen3" and not name):
        return "Qwen2Tokenizer"
    if family == "mistral" or (name == "LlamaTokenizer" and '"ByteLevel"' in text):
        return ""
    return name


def _apply_class(backend: Backend, name: str, config: dict) -> None:
    """Give ``backend`` the pipeline of transformers' class ``name``; other classes take the file as it is."""
    prefix = config.get("add_prefix_space")
    if name == "LlamaTokenizer":
        scheme = "always" if config.get("legacy") else "first"
        use_metaspace(backend, scheme if prefix is None or prefix else "never")
    elif name in ("GPT2Tokenizer", "Qwen2Tokenizer"):
        use_byte_level(backend, QWEN2 if name == "Qwen2Tokenizer" else None, bool(prefix))
        backend.normalizer = normalizers.NFC() if name == "Qwen2Tokenizer" else None


def _added_token(value: dict, **fixed: bool) -> AddedToken:
    flags = {k: value[k] for k in ("single_word", "lstrip", "rstrip", "normalized", "special") if k in value}
    return AddedToken(value["content"], **{**flags, **fixed})


def _add_config_tokens(backend: Backend, config: dict, named: dict[str, str]) -> dict[str, str]:
    """Add the tokens that ``tokenizer_config.json`` declares; returns its named ones, after the class's ``named``."""
    declared = {int(i): _added_token(value) for i, value in (config.get("added_tokens_decoder") or {}).items()}
    backend.add_tokens([declared[i] for i in sorted(declared)])
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    chosen = {key: value for key, value in config.items() if key.endswith("_token") and not isinstance(value, bool)}
    # A class's own tokens count only where the vocabulary has them: new ids would lie outside the model's.
    named = {key: name for key, name in named.items() if backend.token_to_id(name) is not None and key not in chosen}
    values = [*named.values(), *chosen.values(), *(extra.values() if isinstance(extra, dict) else extra)]
    tokens = [_added_token(v if isinstance(v, dict) else {"content": v}, special=True) for v in values if v]
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens([token for token in tokens if token.content not in known])
    return named | {key: v["content"] if isinstance(v, dict) else v for key, v in chosen.items() if v}


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
