"""What a request must satisfy before the engine takes it: ids within the vocabulary, words as ids, room to decode."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace

from longdraft.checkpoint.tokenizer import Tokenizer
from longdraft.config import EngineConfig
from longdraft.errors import ContextLengthError, InvalidValueError
from longdraft.sampling_params import SamplingParams


def resolve(params: SamplingParams, vocab: int, tokenizer: Tokenizer | None) -> SamplingParams:
    """``params`` with words turned into ids; ``InvalidValueError`` for ids outside the vocabulary."""
    for what, strings in (("stop", params.stop), ("bad_words", [w for w in params.bad_words if isinstance(w, str)])):
        if strings and tokenizer is None:
            raise InvalidValueError(what, strings, "needs a tokenizer, and this model comes without one")
    words = tuple(ids for word in params.bad_words for ids in _spellings(word, tokenizer) if ids)
    check_ids("stop_token_ids", params.stop_token_ids, vocab)
    check_ids("allowed_token_ids", params.allowed_token_ids or (), vocab)
    check_ids("logit_bias", [token for token, _ in params.logit_bias], vocab)
    check_ids("bad_words", [token for word in words for token in word], vocab)
    return replace(params, bad_words=words) if words else params


def _spellings(word: str | tuple[int, ...], tokenizer: Tokenizer | None) -> list[tuple[int, ...]]:
    """The ids of a bad word; of a string those at the start of a text and those behind a space."""
    if not isinstance(word, str):
        return [word]
    if tokenizer is None:
        return []
    texts = (word, " " + word.lstrip())
    return list(dict.fromkeys(tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts))


def check_ids(what: str, ids: Iterable[int], vocab: int) -> None:
    """``InvalidValueError`` unless all are integers within the vocabulary."""
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab:
            raise InvalidValueError(what, token, f"must be integers from 0 to {vocab - 1} (the vocabulary)")


def fit_prompt(ids: Seq[int], params: SamplingParams, config: EngineConfig) -> list[int]:
    """The prompt as it is decoded, truncated if asked for.

    Raises ``InvalidValueError`` if it is empty, ``ContextLengthError`` if it leaves no room for one token.
    """
    limit, keep = config.max_tokens_per_request, params.truncate_prompt_tokens
    if not ids:
        raise InvalidValueError("prompt", list(ids), "must hold at least one token")
    if keep is not None:
        room = params.max_tokens if params.max_tokens and params.max_tokens < limit else 1
        ids = ids[-keep:] if keep > 0 else ids[-(limit - room) :]
    if len(ids) >= limit:
        by = "max_model_len" if limit == config.max_model_len else "the size of the KV cache in tokens"
        raise ContextLengthError(
            "prompt length in tokens",
            len(ids),
            f"must leave room for one new token within {limit} ({by})",
            "Shorten the prompt, or raise max_model_len and kv_cache_memory_bytes if the model allows it.",
        )
    return list(ids)


def derived_seed(*parts: int) -> int:
    """A seed that is a pure function of ``parts``: (engine's seed, request) or (request's seed, completion)."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
