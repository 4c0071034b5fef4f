"""Whether a draft model may propose tokens for a target: only if every id means the same text to both.

Models of one family pad their embeddings to different sizes, so the number of rows says nothing; the tokenizers decide.
"""

from __future__ import annotations

import hashlib
import json

from longdraft.checkpoint.base import Checkpoint
from longdraft.checkpoint.tokenizer import Tokenizer
from longdraft.errors import ModelFileError, VocabularyMismatchError

# Texts that tokenizers of different models cut differently. They avoid what the GGUF file and the folder of one and the
# same model are known to cut differently: two or more spaces before a digit and digits beyond ASCII (SmolLM2),
# characters that Unicode's NFC would change (Qwen2), and a space at the start (Llama 2).
PROBES = (
    "The quick brown fox isn't jumping over anybody's lazy dogs; they're asleep.",
    "In 1234567 cases of 89, about 3.14159 or 1,000,000 were wrong",
    "def area(r):\n    if r != 0x1F:\n\t\treturn {'r': [r ** 2, 2.50]}  # done\n\n\n",
    "two  spaces,   three,\ttab \t mixed\n\n  \n end   ",
    "snake_case camelCase HTTPServer CONSTANT_1 https://example.com/a?b=1&c=%20",
    "WE'LL SHOUT: IT'S O'CLOCK!!! (really?!) -- \"yes\"... and/or\r\nline",
    "floccinaucinihilipilification, antidisestablishmentarianism, Weltschmerz, phthisis",
    "naïve café, Ångström, ďábelské, Ελλάδα, Россия, עברית, العربية, हिन्दी",
    "日本語の文章、한국어 문장, 中文字符",
    "emoji 🙂🙂 👩‍🚀 🇨🇭",
    "ＡＢ ﬁ ™ \u00a0\u200bx",
)
_FIX = "Choose a draft model that was trained with the target's tokenizer."


def check_pair(target: Checkpoint, draft: Checkpoint) -> None:
    """Check that ``draft`` may propose tokens for ``target``; raises ``VocabularyMismatchError`` if not.

    Every id that both know must mean the same token, and every token that both know must have the same id. A token that
    only one side knows is accepted if it is an added token or a placeholder ``[PAD<id>]`` of a GGUF file, but not if it
    is an ordinary one. Both must also cut the probe texts alike: other merges, or another way to split text, do not
    make the output wrong, but are a sign of different models. What is not compared: the number of embedding rows,
    which tokens are special, and whether BOS or EOS is added.

    Without tokenizers, nothing but equal ``config.vocab_size`` can be checked, and that is what is asked for.
    """
    if target.tokenizer is None or draft.tokenizer is None:
        return _check_without_tokenizer(target, draft)
    problem = None
    if fingerprint(target.tokenizer) != fingerprint(draft.tokenizer):
        problem = _first_difference(target.tokenizer, draft.tokenizer)
    problem = problem or _first_other_cut(target.tokenizer, draft.tokenizer)
    if problem:
        raise VocabularyMismatchError(target.name, draft.name, problem, _FIX)


def fingerprint(tokenizer: Tokenizer) -> str:
    """Hex digest of the vocabulary, that is of all ids and tokens; placeholders for unused rows do not count."""
    tokens = sorted((i, token) for token, i in _tokens(tokenizer).items())
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()


def _check_without_tokenizer(target: Checkpoint, draft: Checkpoint) -> None:
    if target.tokenizer is None and draft.tokenizer is None:
        sizes = target.config.vocab_size, draft.config.vocab_size
        if sizes[0] == sizes[1]:
            return
        problem = f"neither has a tokenizer, and the target has {sizes[0]} embedding rows but the draft {sizes[1]}"
        fix = "Add tokenizer.json to both models' folders."
    else:
        have, lack = ("target", "draft") if draft.tokenizer is None else ("draft", "target")
        problem = f"the {have} has a tokenizer but the {lack} has none, so their tokens cannot be compared"
        fix = f"Add tokenizer.json to the folder of the {lack}."
    raise VocabularyMismatchError(target.name, draft.name, problem, fix)


def _tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Token → id. GGUF files list a token for every embedding row and call the unused ones [PAD<id>]."""
    return {token: i for token, i in tokenizer.vocabulary().items() if token != f"[PAD{i}]"}


def _first_difference(target: Tokenizer, draft: Tokenizer) -> str | None:
    """What the lowest id on which the vocabularies disagree means to both; None if only extra tokens differ."""
    ids = {"target": _tokens(target), "draft": _tokens(draft)}
    texts = {side: {i: token for token, i in tokens.items()} for side, tokens in ids.items()}
    added = target.added_tokens | draft.added_tokens
    for token, i in sorted(ids["target"].items() ^ ids["draft"].items(), key=lambda item: (item[1], item[0])):
        if i in texts["target"] and i in texts["draft"]:
            return (
                f"token {i} is {_show(texts['target'][i])} for the target but {_show(texts['draft'][i])} for the draft"
            )
        if token in ids["target"] and token in ids["draft"]:
            return (
                f"token {_show(token)} is {ids['target'][token]} for the target but {ids['draft'][token]} for the draft"
            )
        if token not in added:
            have, lack = ("target", "draft") if token in ids["target"] else ("draft", "target")
            return f"token {i} is {_show(token)} for the {have}, but the {lack} has no token {i}"
    return None


def _first_other_cut(target: Tokenizer, draft: Tokenizer) -> str | None:
    for text in PROBES:
        a, b = _encode(target, text), _encode(draft, text)
        if a != b:
            return f"the text {text!r} becomes the tokens {a} for the target but {b} for the draft"
    return None


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    try:
        return tokenizer.encode(text, add_special_tokens=False)
    except ModelFileError:  # a vocabulary that lacks one of the characters and has no token for the unknown
        return []


def _show(token: str) -> str:
    return f"{token!r:.100}"
