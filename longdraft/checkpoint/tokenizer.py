"""Text to token ids and back, from a ``tokenizer.json`` folder or from the metadata of a GGUF file.

Owns the reproduction of what ``transformers`` makes of either source: same ids, same text. The work is done by the
``tokenizers`` library; nothing here knows models, weights or file formats other than these two.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import NoReturn

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from longdraft.errors import InvalidValueError, LongDraftError, ModelFileError, UnsupportedModelError

MAX_FILE = 128 << 20  # bytes; the largest real tokenizer.json has about 35 MB
MAX_PIECE = 1024  # characters of one SentencePiece token; finding its merges costs the square of this

_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LLAMA3 = "|".join((_CONTRACTION, _WORD, r"\p{N}{1,3}", _PUNCTUATION, _SPACES))
_QWEN2 = "|".join((_CONTRACTION, _WORD, r"\p{N}", _PUNCTUATION, _SPACES))
_TEKKEN = "|".join(
    rf"[^\r\n\p{{L}}\p{{N}}]?{word}" for word in (f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*")
) + "|".join(("", r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", _SPACES))
# How text is cut before the merges, by ``tokenizer.ggml.pre``; None is GPT-2's own split. For "smollm", llama.cpp first
# cuts out every digit (so that "  1" is two spaces and a digit); transformers does not, and we give its ids.
_SPLITS = {
    **dict.fromkeys((None, "default", "gpt-2", "smollm")),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "tekken": _TEKKEN,
}
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # of tokenizer.ggml.token_type
# Control tokens that transformers' classes bring along, by GGUF kind and by class.
_OWN_TOKENS = {"gpt2": ("<|endoftext|>",), "llama": ("<unk>", "<s>", "</s>")}
_CLASS_TOKENS = {
    "GPT2Tokenizer": dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>"),
    "Qwen2Tokenizer": dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>"),
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
}


class Tokenizer:
    """Encodes and decodes with one vocabulary. Safe to use from many threads at once."""

    def __init__(self, backend: Backend, *, bos_token_id: int | None = None, eos_token_id: int | None = None) -> None:
        self._backend = backend
        self.bos_token_id, self.eos_token_id = bos_token_id, eos_token_id
        added = backend.get_added_tokens_decoder()
        self._special = {token.content: i for i, token in added.items() if token.special}
        self.special_ids = frozenset(self._special.values())
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        # What starts a text that brings its own BOS; None where the tokenizer would not add one anyway.
        adds_bos = bos_token_id is not None and self._run(backend, "", True)[:1] == [bos_token_id]
        self._bos = self.token_text(bos_token_id) if adds_bos else None

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """Read ``tokenizer.json`` and its companions; the ids are those of ``AutoTokenizer.from_pretrained``.

        Whether BOS is added is up to ``tokenizer.json`` alone: as in transformers 5, ``add_bos_token`` beside it is
        not read. Only the default tokens of transformers' classes get no new ids where the vocabulary lacks them: the
        model would have no embedding for those. Raises ``ModelFileError`` for damaged files, ``UnsupportedModelError``
        for settings not reproduced.
        """
        return _read_folder(Path(path))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object], *, file: object = "GGUF metadata") -> Tokenizer:
        """Rebuild the tokenizer that ``tokenizer.ggml.*`` describes; ``file`` is named in errors.

        The ids are those of transformers' conversion, except that control and user-defined tokens always have the id
        the file gives them: the conversion loses those that are not plain ASCII, or gives them ids past the vocabulary.
        Raises ``ModelFileError`` for damaged metadata, ``UnsupportedModelError`` for kinds not reproduced.
        """
        return _build_from_gguf(_Metadata(metadata, file))

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The texts of the control tokens."""
        return tuple(self._special)

    def token_text(self, token_id: int) -> str:
        """The vocabulary's own spelling of one token (``decode`` gives readable text); empty for an unknown id."""
        return (self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None) or ""

    def encode(self, text: str, *, add_special_tokens: bool = True, allow_special: bool = True) -> list[int]:
        """Token ids of ``text``.

        ``add_special_tokens`` adds what the model wants around a plain text, mostly one BOS or nothing; a text that
        already starts with BOS gets no second one. With ``allow_special=False`` the names of control tokens in
        ``text`` are plain text. Raises ``InvalidValueError`` for what is not text.
        """
        _check_text(text)
        if not allow_special and self._mentions_special(text):
            return self._run(self._plain[0], text, add_special_tokens)
        ids = self._run(self._backend, text, add_special_tokens)
        doubled = add_special_tokens and self._bos and text.startswith(self._bos) and ids[:2] == 2 * ids[:1]
        return ids[1:] if doubled else ids

    def encode_marked(self, text: str, mark: str) -> list[int]:
        """Token ids of a rendered chat, with nothing added.

        A control token counts unless the character ``mark`` stands inside its name; the marks themselves are dropped.
        """
        _check_text(text)
        plain, aliases = self._plain
        names = "|".join(re.escape(name) for name in sorted(aliases, key=len, reverse=True)) or "(?!)"
        text = re.sub(names, lambda match: aliases[match[0]], text)
        return self._run(plain, text.replace(mark, ""), False)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``ids``. Ids past the vocabulary (padded embedding rows) give no text; negative ones are refused."""
        known = [int(i) for i in ids]
        if min(known, default=0) < 0:
            raise InvalidValueError("a token id", min(known), "token ids start at 0")
        with _library_errors("this tokenizer"):
            return self._backend.decode([i for i in known if i < self.vocab_size], skip_special_tokens)

    @staticmethod
    def _run(backend: Backend, text: str, add_special_tokens: bool) -> list[int]:
        with _library_errors("this tokenizer"):  # as when a vocabulary has no token for an unknown word
            return backend.encode(text, add_special_tokens=add_special_tokens).ids

    def _mentions_special(self, text: str) -> bool:
        normalizer = self._backend.normalizer
        texts = (text,) if normalizer is None else (text, normalizer.normalize_str(text))
        return any(name in t for name in self._special for t in texts)

    @cached_property
    def _plain(self) -> tuple[Backend, dict[str, str]]:
        """A twin in which no text reaches a control token, and the unguessable names that do: same ids otherwise."""
        key = secrets.token_hex(8)
        aliases = {name: f"\ue000{key}{i}\ue001" for name, i in self._special.items()}
        data = json.loads(self._backend.to_str())
        model = data["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {aliases.get(token, token): i for token, i in model["vocab"].items()}
        else:
            model["vocab"] = [[aliases.get(token, token), score] for token, score in model["vocab"]]
        if "merges" in model:  # those of a SentencePiece vocabulary may spell control tokens
            model["merges"] = [m for m in model["merges"] if not aliases.keys() & {*m, "".join(m)}]
        model["unk_token"] = aliases.get(model.get("unk_token"), model.get("unk_token"))
        for token in data["added_tokens"]:
            token["content"] = aliases.get(token["content"], token["content"])
        return Backend.from_str(json.dumps(data)), aliases


@contextmanager
def _library_errors(file: object) -> Iterator[None]:
    """Turn whatever the tokenizers library raises, its panics included, into ``ModelFileError``."""
    try:
        yield
    except LongDraftError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # KeyboardInterrupt and its like
        raise ModelFileError(file, f"the tokenizers library refused it ({str(error)[:200]})") from error


def _check_text(text: str) -> None:
    try:
        text.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        raise InvalidValueError("the text", text, "it must be a string of valid Unicode characters") from error


def _read_text(file: Path) -> str:
    try:
        if file.stat().st_size > MAX_FILE:
            raise ModelFileError(file, f"has more than {MAX_FILE >> 20} MiB, too much for a tokenizer")
        return file.read_text("utf-8")
    except FileNotFoundError as error:
        raise ModelFileError(file, "is missing", fix="Save the model's tokenizer with transformers 5 first.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFileError(file, f"cannot be read ({error})") from error


def _read_json(file: Path) -> dict:
    """The object in an optional JSON file, empty where there is no such file."""
    try:
        data = json.loads(_read_text(file)) if file.exists() else {}
    except (ValueError, RecursionError) as error:
        raise ModelFileError(file, f"is not valid JSON ({error})") from error
    if not isinstance(data, dict):
        raise ModelFileError(file, "does not hold a JSON object")
    return data


def _read_folder(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    text = _read_text(file)
    config, model = _read_json(folder / "tokenizer_config.json"), _read_json(folder / "config.json")
    if "added_tokens_decoder" not in config:  # written before transformers 4.34
        config |= _read_json(folder / "special_tokens_map.json")
    with _library_errors(file):
        backend = Backend.from_str(text)
        backend.no_truncation()
        backend.no_padding()
    is_bpe = isinstance(backend.model, models.BPE)
    if config.get("split_special_tokens"):
        raise UnsupportedModelError("split_special_tokens", True, "control tokens in a prompt are always recognised")
    if config.get("clean_up_tokenization_spaces") and not is_bpe:
        raise UnsupportedModelError("clean_up_tokenization_spaces", True, "only without it, or for BPE vocabularies")
    with _library_errors(folder / "tokenizer_config.json"):
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
        _use_metaspace(backend, scheme if prefix is None or prefix else "never")
    elif name in ("GPT2Tokenizer", "Qwen2Tokenizer"):
        _use_byte_level(backend, _QWEN2 if name == "Qwen2Tokenizer" else None, bool(prefix))
        backend.normalizer = normalizers.NFC() if name == "Qwen2Tokenizer" else None


def _use_metaspace(backend: Backend, scheme: str) -> None:
    """SentencePiece: spaces become U+2581, one more is put before the text unless ``scheme`` is "never"."""
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps if scheme == "never" else [*steps, decoders.Strip(content=" ", left=1)])
    _set_bpe(backend.model, sentencepiece=True)


def _use_byte_level(backend: Backend, split: str | None, prefix: bool = False) -> None:
    """Byte-level BPE over the pieces that the regex ``split`` (GPT-2's own if None) cuts the text into."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=split is None)
    cut = [] if split is None else [pre_tokenizers.Split(Regex(split), behavior="isolated")]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cut, byte_level])
    backend.decoder = decoders.ByteLevel()
    _set_bpe(backend.model, sentencepiece=False)


def _set_bpe(model: models.BPE, *, sentencepiece: bool) -> None:
    model.fuse_unk = model.byte_fallback = sentencepiece
    model.dropout = model.unk_token = model.continuing_subword_prefix = model.end_of_word_suffix = None
    model.ignore_merges = False


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


def _build_from_gguf(meta: _Metadata) -> Tokenizer:
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
    with _library_errors(meta.file):
        backend = _byte_level_bpe(meta, tokens, special | user) if kind == "gpt2" else _sentencepiece_bpe(meta, tokens)
        backend.add_tokens([AddedToken(tokens[i], special=True, normalized=False) for i in sorted(special)])
        backend.add_tokens([AddedToken(tokens[i], special=False, normalized=False) for i in sorted(user)])
        adds = {"bos": meta.get("add_bos_token", bool, kind == "llama"), "eos": meta.get("add_eos_token", bool, False)}
        bos, eos = ([key] if adds[key] and named[key] is not None else [] for key in ("bos", "eos"))
        backend.post_processor = processors.TemplateProcessing(
            single=[*bos, "$A", *eos], special_tokens=[(key, named[key]) for key in (*bos, *eos)]
        )
    return Tokenizer(backend, bos_token_id=named["bos"], eos_token_id=named["eos"])


def _byte_level_bpe(meta: _Metadata, tokens: list[str], verbatim: set[int]) -> Backend:
    """GPT-2's kind. Tokens not in ``verbatim`` are spelled in its alphabet of 256 characters, one per byte."""
    pre = meta.get("pre", str)
    if pre not in _SPLITS:
        known = "only " + ", ".join(sorted(filter(None, _SPLITS)))
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
    _use_byte_level(backend, _SPLITS[pre])
    return backend


def _sentencepiece_bpe(meta: _Metadata, tokens: list[str]) -> Backend:
    """SentencePiece's kind, with merges from the file or else from the scores."""
    pre = meta.get("pre", str)
    if _SPLITS.get(pre):
        raise UnsupportedModelError("tokenizer.ggml.pre", pre, "a SentencePiece vocabulary does not split text")
    if meta.get("add_space_prefix", bool) is False:
        # transformers' conversion overlooks the key, so its ids are not the ones the model was trained on.
        raise UnsupportedModelError("tokenizer.ggml.add_space_prefix", False, "only true")
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = _listed_merges(meta, vocab) if meta.get("merges", list) is not None else _scored_merges(meta, vocab)
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    _use_metaspace(backend, "first")
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
