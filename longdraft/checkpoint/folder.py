"""The JSON files of a checkpoint folder: read within limits, as data only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NoReturn

from longdraft.errors import ModelFileError

CONFIG_LIMIT = 2**20  # bytes; real ones hold a few thousand
TOKENIZER_CONFIG_LIMIT = 2**25  # holds every added token of some models
TEMPLATE_LIMIT = 2**20
# Neither a sampling setting nor a limit, so no default of a request.
_BOOKKEEPING = frozenset(
    """transformers_version eos_token_id bos_token_id pad_token_id decoder_start_token_id use_cache
    cache_implementation output_attentions output_hidden_states output_scores output_logits
    return_dict_in_generate""".split()
)


def read_json(path: Path | str, limit: int = CONFIG_LIMIT) -> dict[str, object]:
    """The object in a JSON file of at most ``limit`` bytes.

    Raises ``ModelFileError`` when the file cannot be read, is too large, or is not a JSON object. NaN and Infinity are
    not JSON; of a key given twice the last one counts.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise ModelFileError(path, f"cannot be read ({error.strerror})") from error
    if len(data) > limit:
        raise ModelFileError(path, f"is larger than {limit} bytes, the limit for this file")

    def not_json(word: str) -> NoReturn:
        raise ValueError(f"{word} is not JSON")

    try:
        value = json.loads(data.decode("utf-8-sig"), parse_constant=not_json)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(path, f"is not valid JSON ({error})", fix="Download or copy the file again.") from error
    if not isinstance(value, dict):
        raise ModelFileError(path, f"holds a JSON {type(value).__name__} where an object is expected")
    return value


def generation_defaults(folder: Path | str) -> tuple[tuple[int, ...], dict[str, object]]:
    """End-of-sequence ids, and the sampling settings and limits that ``generation_config.json`` gives, unchecked.

    The ids come from ``generation_config.json``, and from ``config.json`` where that is silent. Either file may be
    absent. Raises ``ModelFileError`` when one is damaged.
    """
    eos: tuple[int, ...] = ()
    settings: dict[str, object] = {}
    for name in ("generation_config.json", "config.json"):
        path = Path(folder, name)
        if not path.exists():
            continue
        raw = read_json(path)
        eos = eos or _token_ids(path, raw.get("eos_token_id"))
        if name == "generation_config.json":
            settings = {key: value for key, value in raw.items() if _is_setting(key, value)}
    return eos, settings


def _is_setting(key: str, value: object) -> bool:
    return value is not None and not key.startswith("_") and key not in _BOOKKEEPING


def _token_ids(path: Path, value: object) -> tuple[int, ...]:
    """One id or a list of ids as a tuple without repeats; nothing for null."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 2**31:
            raise ModelFileError(path, f"eos_token_id holds {token!r:.80}, which is not a token id")
    return tuple(dict.fromkeys(ids))


def read_chat_template(folder: Path | str) -> str | None:
    """The folder's chat template: ``chat_template.jinja``, else the one in ``tokenizer_config.json``, else ``None``."""
    path = Path(folder, "chat_template.jinja")
    if path.exists():
        data = path.read_bytes()[: TEMPLATE_LIMIT + 1]
        if len(data) > TEMPLATE_LIMIT:
            raise ModelFileError(path, f"is larger than {TEMPLATE_LIMIT} bytes, the limit for this file")
        return data.decode("utf-8", errors="replace")
    path = Path(folder, "tokenizer_config.json")
    template = read_json(path, TOKENIZER_CONFIG_LIMIT).get("chat_template") if path.exists() else None
    if isinstance(template, list):  # several by name, in older files
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
