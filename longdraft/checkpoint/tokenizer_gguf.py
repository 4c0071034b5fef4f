"""A ``Tokenizer`` rebuilt from the metadata of a GGUF file, with the ids of transformers' GGUF conversion."""

from __future__ import annotations

import math
import reprlib
from collections import Counter
from collections.abc import Mapping
from typing import NoReturn

from tokenizers import AddedToken, models, processors
from tokenizers import Tokenizer as Backend

from longdraft.checkpoint.pipelines import SPLITS, use_byte_level, use_metaspace
from longdraft.checkpoint.tokenizer import Tokenizer, library_errors
from longdraft.errors import ModelFileError, UnsupportedModelError

MAX_PIECE = 1024  # characters of one SentencePiece token; finding its merges costs the square of this
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # of tokenizer.ggml.token_type
# Control tokens that transformers' classes bring along, by GGUF kind.
_OWN_TOKENS = {"gpt2": ("<|endoftext|>",), "llama": ("<unk>", "<s>", "</s>")}


def build_tokenizer(metadata: Mapping[str, object], *, file: object = "GGUF metadata") -> Tokenizer:
    """Rebuild the tokenizer that ``tokenizer.ggml.*`` describes; ``file`` is named in errors.

    The ids are those of transformers' conversion, except that control and user-defined tokens always have the id the
    file gives them: the conversion loses those that are not plain ASCII, or gives them ids past the vocabulary. Raises
    ``ModelFileError`` for damaged metadata, ``UnsupportedModelError`` for kinds not reproduced.
    """
    meta = _Metadata(metadata, file)
    kind, tokens = meta.get("model", str), meta.array("tokens", str)
    if kind not in _OWN_TOKENS:
        raise UnsupportedModelError(
            "tokenizer.ggml.model", kind, "only gpt2 (byte-level BPE) and llama (SentencePiece)"
        )
    if not tokens:
        meta.fail("tokens", "is missing or empty")
    if len(set(tokens)) < len(tokens):
        meta.fail("tokens", f"lists {reprlib.repr(Counter(tokens).most_common(1)[0][0])} more than once")
    size = len(tokens)
    types = meta.array("token_type", int, size) or [_NORMAL] * size
    named = {key: meta.token_id(f"{key}_token_id", size) for key in ("bos", "eos", "unknown", "padding")}
    own = {i for i, token in enumerate(tokens) if token in _OWN_TOKENS[kind]}
    user = {i for i, t in enumerate(types) if t == _USER_DEFINED}
    special = ({i for i, t in enumerate(types) if t == _CONTROL} | own | set(named.values()) - {None}) - user
    with library_errors(meta.file):
        backend = _byte_level_bpe(meta, tokens, special | user) if kind == "gpt2" else _sentencepiece_bpe(meta, tokens)
        backend.add_tokens([AddedToken(tokens[i], special=True, normalized=False) for i in sorted(special)])
        backend.add_tokens([AddedToken(tokens[i], special=False, normalized=False) for i in sorted(user)])
        adds = {"bos": meta.get("add_bos_token", bool, kind == "llama"), "eos": meta.get("add_eos_token", bool, False)}
        bos, eos = ([key] if adds[key] and named[key] is not None else [] for key in ("bos", "eos"))
        backend.post_processor = processors.TemplateProcessing(
            single=[*bos, "$A", *eos], special_tokens=[(key, named[key]) for key in (*bos, *eos)]
        )
    return Tokenizer(backend, bos_token_id=named["bos"], eos_token_id=named["eos"])


class _Metadata:
    """Checked look-ups below ``tokenizer.ggml.``"""

    def __init__(self, values: Mapping[str, object], file: object) -> None:
        self.values, self.file = values, file

    def fail(self, key: str, problem: str) -> NoReturn:
        raise ModelFileError(self.file, f"metadata key 'tokenizer.ggml.{key}' {problem}")

    def get(self, key: str, kind: type, default: object = None) -> object:
        value = self.values.get(f"tokenizer.ggml.{key}", default)
        if value is not None and type(value) is not kind:
            self.fail(key, f"is {reprlib.repr(value)}, expected {kind.__name__}")
        return value

    def array(self, key: str, kind: type, length: int | None = None) -> list | None:
        """A list of ``length`` values of one kind, None where there is no such key."""
        values = self.get(key, list)
        if values is not None and set(map(type, values)) - {kind}:
            self.fail(key, f"is not a list of {kind.__name__} only")
        if values is not None and length is not None and len(values) != length:
            self.fail(key, f"has {len(values)} elements for {length} tokens")
        return values

    def token_id(self, key: str, vocab_size: int) -> int | None:
        value = self.get(key, int)
        if value is not None and not 0 <= value < vocab_size:
            self.fail(key, f"is {value}, but there are {vocab_size} tokens")
        return value


def _byte_level_bpe(meta: _Metadata, tokens: list[str], verbatim: set[int]) -> Backend:
    """GPT-2's kind. Tokens not in ``verbatim`` are spelled in its alphabet of 256 characters, one per byte."""
    pre = meta.get("pre", str)
    if pre not in SPLITS:
        known = "only " + ", ".join(sorted(filter(None, SPLITS)))
        raise UnsupportedModelError("tokenizer.ggml.pre", pre, known, "Use the model's safetensors folder instead.")
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {byte: chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)}
    spelled = frozenset(alphabet.values())
    vocab = {
        token if i in verbatim or spelled.issuperset(token) else "".join(alphabet[b] for b in token.encode()): i
        for i, token in enumerate(tokens)
    }
    backend = Backend(models.BPE(vocab=vocab, merges=_listed_merges(meta, vocab)))
    use_byte_level(backend, SPLITS[pre])
    return backend


def _sentencepiece_bpe(meta: _Metadata, tokens: list[str]) -> Backend:
    """SentencePiece's kind, with merges from the file or else from the scores."""
    pre = meta.get("pre", str)
    if SPLITS.get(pre):
        raise UnsupportedModelError("tokenizer.ggml.pre", pre, "a SentencePiece vocabulary does not split text")
    if meta.get("add_space_prefix", bool) is False:
        # transformers' conversion overlooks the key, so its ids are not the ones the model was trained on.
        raise UnsupportedModelError("tokenizer.ggml.add_space_prefix", False, "only true")
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = _listed_merges(meta, vocab) if meta.get("merges", list) is not None else _scored_merges(meta, vocab)
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    use_metaspace(backend)
    return backend


def _listed_merges(meta: _Metadata, vocab: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    for text in meta.array("merges", str) or meta.fail("merges", "is missing or empty"):
        left, _, right = text.partition(" ")
        if not {left, right, left + right} <= vocab.keys():  # on which the library would panic
            meta.fail("merges", f"has {reprlib.repr(text)}, which names a token that is not in the vocabulary")
        merges.append((left, right))
    return merges


def _scored_merges(meta: _Metadata, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Every way to make a token of two others; those that make the best token come first."""
    scores = meta.array("scores", float, len(vocab)) or meta.fail("scores", "is missing, and so is 'merges'")
    if not all(map(math.isfinite, scores)):
        meta.fail("scores", "holds a value that is not a finite number")
    if (longest := max(map(len, vocab))) > MAX_PIECE:
        meta.fail("tokens", f"has a token of {longest} characters, at most {MAX_PIECE} are allowed")
    ranked = []
    for token, score in zip(vocab, scores, strict=True):
        pairs = ((token[:i], token[i:]) for i in range(1, len(token)))
        known = [(left, right) for left, right in pairs if left in vocab and right in vocab]
        ranked += [(score, *pair) for pair in sorted(known, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))]
    ranked.sort(key=lambda m: (m[0], len(m[1]), len(m[2])), reverse=True)
    return [(left, right) for _, left, right in ranked]
