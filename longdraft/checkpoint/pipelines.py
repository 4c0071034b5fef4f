"""The pipelines that turn text into pieces before the merges, as the known families of tokenizers have them."""

from __future__ import annotations

from tokenizers import Regex, decoders, pre_tokenizers
from tokenizers import Tokenizer as Backend

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
SPLITS = {
    **dict.fromkeys((None, "default", "gpt-2", "smollm")),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "tekken": _TEKKEN,
}


def use_metaspace(backend: Backend) -> None:
    """SentencePiece: spaces become U+2581, and one more is put before the text."""
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="first", split=False)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)])
    backend.model.fuse_unk = backend.model.byte_fallback = True


def use_byte_level(backend: Backend, split: str | None) -> None:
    """Byte-level BPE over the pieces that the regex ``split`` (GPT-2's own if None) cuts the text into."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    cut = [] if split is None else [pre_tokenizers.Split(Regex(split), behavior="isolated")]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cut, byte_level])
    backend.decoder = decoders.ByteLevel()
