"""Which drafts may propose tokens for which targets: same ids for the same tokens, whatever the number of rows."""

import re
import time
import unicodedata
from itertools import combinations

import pytest
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from longdraft.checkpoint import pairing
from longdraft.checkpoint.base import Checkpoint
from longdraft.checkpoint.load import load_checkpoint
from longdraft.checkpoint.pairing import PROBES, check_pair, fingerprint
from longdraft.checkpoint.pipelines import SPLITS, use_byte_level, use_metaspace
from longdraft.checkpoint.tokenizer import Tokenizer
from longdraft.checkpoint.tokenizer_folder import read_tokenizer
from longdraft.errors import LongDraftError, VocabularyMismatchError
from longdraft.models.registry import RandomWeights, tiny_config

SPECIAL = ("<unk>", "<s>", "</s>", "<pad>")
WORDS = "th he in er an re on at en nd ti es or te of ed is it al the".split()
TOKENS = (*SPECIAL, *map(chr, range(33, 127)), "Ġ", "Ċ", *WORDS)  # 120
MERGES = [*((word[0], word[1]) for word in WORDS[:-1]), ("th", "e")]


def make(tokens=TOKENS, merges=MERGES, added=(), special=SPECIAL, split=None, normalizer=None) -> Tokenizer:
    """A tokenizer over ASCII; ``tokens`` may be a dict with ids, ``added`` come after them."""
    vocab = dict(tokens) if isinstance(tokens, dict) else {token: i for i, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=list(merges), unk_token="<unk>", fuse_unk=True))
    backend.pre_tokenizer = split or pre_tokenizers.ByteLevel(add_prefix_space=False)
    if normalizer:
        backend.normalizer = normalizer
    backend.add_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
    return Tokenizer(backend, bos_token_id=1, eos_token_id=2)


def checkpoint(name: str, tokenizer: Tokenizer | None, rows: int = 128) -> Checkpoint:
    config = tiny_config(vocab_size=rows)
    return Checkpoint(name=name, path=name, config=config, weights=RandomWeights(config), tokenizer=tokenizer)


def check(target: Tokenizer | None, draft: Tokenizer | None, target_rows: int = 128, draft_rows: int = 128) -> None:
    check_pair(checkpoint("big", target, target_rows), checkpoint("small", draft, draft_rows))


def refusal(target: Tokenizer | None, draft: Tokenizer | None, **rows: int) -> str:
    """What is said against the pair. The message names both models and ends with what to do."""
    with pytest.raises(VocabularyMismatchError) as caught:
        check(target, draft, **rows)
    message = str(caught.value)
    start, problem = "'small' cannot propose tokens for 'big': ", caught.value.problem
    assert message.startswith(f"{start}{problem}. ") and message.split(f"{problem}. ")[1].endswith(".")
    assert isinstance(caught.value, LongDraftError)
    return problem


def swapped(first: int, second: int) -> tuple[str, ...]:
    tokens = list(TOKENS)
    tokens[first], tokens[second] = tokens[second], tokens[first]
    return tuple(tokens)


# --- the same vocabulary ----------------------------------------------------------------------------------------------


def test_the_sizes_used_here():
    assert make().vocab_size == make().base_vocab_size == 120


@pytest.mark.parametrize("rows", [120, 128, 136])
def test_same_tokenizer_with_any_number_of_rows(rows):
    check(make(), make(), draft_rows=rows)
    check(make(), make(), target_rows=rows)


def test_what_does_not_count():
    adds_bos = make()._backend
    adds_bos.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    bos = Tokenizer(adds_bos, bos_token_id=1)
    assert bos.encode("a") != make().encode("a")
    fewer_special = make(special=SPECIAL[:3], added=SPECIAL[3:])
    assert fewer_special.special_ids != make().special_ids
    for other in (bos, fewer_special):
        check(make(), other)
        check(other, make())


# --- other ids --------------------------------------------------------------------------------------------------------


def test_swapped_tokens_name_the_first():
    problem = refusal(make(), make(swapped(103, 110)))
    assert problem == f"token 103 is {TOKENS[103]!r} for the target but {TOKENS[110]!r} for the draft"
    reversed_words = (*TOKENS[:100], *TOKENS[:99:-1])  # "al", the first of them by name, is not the first by id
    assert refusal(make(), make(reversed_words)) == "token 100 is 'th' for the target but 'the' for the draft"


def test_swapped_tokens_that_no_probe_shows(monkeypatch):
    monkeypatch.setattr(pairing, "PROBES", ())
    other = make(swapped(0, 3))
    assert refusal(make(), other) == "token 0 is '<unk>' for the target but '<pad>' for the draft"
    assert refusal(other, make()) == "token 0 is '<pad>' for the target but '<unk>' for the draft"


def test_long_tokens_are_cut_in_messages():
    assert len(refusal(make(added=["x" * 5000]), make(added=["y" * 5000]))) < 300


def test_extra_added_tokens_are_accepted():
    """As Qwen2's 3 added tokens, Qwen2.5's 22 and Qwen3's 26, each the start of the next."""
    few, more = make(added=["<a>"]), make(added=["<a>", "<b>", "<c>"])
    assert len({fingerprint(t) for t in (make(), few, more)}) == 3
    for other in (few, more):
        check(make(), other)
        check(other, make())
    check(few, more)


def test_other_added_tokens_are_refused():
    assert refusal(make(added=["<a>", "<b>"]), make(added=["<a>", "<c>", "<b>"])) == (
        "token 121 is '<b>' for the target but '<c>' for the draft"
    )
    control = make(special=(*SPECIAL, "<a>"))
    assert refusal(control, make(added=["<b>"])) == "token 120 is '<a>' for the target but '<b>' for the draft"


def test_extra_ordinary_tokens_are_refused():
    more = make((*TOKENS, "zzz"))
    assert refusal(make(), more) == "token 120 is 'zzz' for the draft, but the target has no token 120"
    assert refusal(more, make()) == "token 120 is 'zzz' for the target, but the draft has no token 120"
    assert refusal(more, make(added=["<a>"])) == "token 120 is 'zzz' for the target but '<a>' for the draft"


def test_one_token_with_two_ids_is_refused():
    """No id means two things here: each side lacks the other's id."""
    sides = [make(dict(zip(TOKENS, range(120), strict=True)) | {"<a>": i}, added=["<a>"]) for i in (120, 125)]
    assert [t.encode("<a>") for t in sides] == [[120], [125]]
    assert refusal(*sides) == "token '<a>' is 120 for the target but 125 for the draft"


def test_placeholders_of_gguf_files_count_as_nothing():
    """A GGUF file has a token for every embedding row; those of the unused rows are named after their ids."""
    padded = make((*TOKENS, *(f"[PAD{i}]" for i in range(120, 128))))
    assert fingerprint(padded) == fingerprint(make())
    for other in (make(), make((*TOKENS, "[PAD120]")), make(added=["<a>"])):
        check(padded, other)
        check(other, padded)
    wrong_number = make((*TOKENS, "[PAD7]"))
    assert refusal(make(), wrong_number) == "token 120 is '[PAD7]' for the draft, but the target has no token 120"
    assert "'zzz' for the target" in refusal(make((*TOKENS, "zzz")), padded)


# --- same ids, other pieces -------------------------------------------------------------------------------------------


def test_other_merges_are_refused():
    draft = make(merges=[MERGES[1], MERGES[0], *MERGES[2:]])  # "the" is t, he and no longer the
    assert fingerprint(draft) == fingerprint(make())
    problem = refusal(make(), draft)
    text = next(text for text in PROBES if make().encode(text) != draft.encode(text))
    ids = make().encode(text), draft.encode(text)
    assert problem == f"the text {text!r} becomes the tokens {ids[0]} for the target but {ids[1]} for the draft"


@pytest.mark.parametrize(
    "normalizer", [normalizers.Lowercase(), normalizers.NFKC(), normalizers.NFD(), normalizers.Strip()], ids=repr
)
def test_other_normalizers_are_refused(byte_level, normalizer):
    assert "becomes the tokens" in refusal(byte_level(None), byte_level(None, normalizer))


@pytest.fixture(scope="module")
def byte_level():
    """Tokenizers of one vocabulary, whose merges run across words, digits and blanks so that every split shows."""
    trained = Backend(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator(PROBES * 2, trainer)
    text = trained.to_str()

    def tokenizer(split: str | None, normalizer=None) -> Tokenizer:
        backend = Backend.from_str(text)
        use_byte_level(backend, split)
        if normalizer:
            backend.normalizer = normalizer
        return Tokenizer(backend)

    return tokenizer


@pytest.mark.parametrize(("a", "b"), list(combinations(dict.fromkeys(SPLITS.values()), 2)))
def test_other_splits_are_refused(byte_level, a, b):
    """The probes tell all known families of pre-tokenizers apart."""
    for split in (a, b):
        check(byte_level(split), byte_level(split))
    assert fingerprint(byte_level(a)) == fingerprint(byte_level(b))
    assert "becomes the tokens" in refusal(byte_level(a), byte_level(b))


def test_prefix_space_is_refused():
    spaced = make(split=pre_tokenizers.ByteLevel(add_prefix_space=True))
    assert "becomes the tokens" in refusal(make(), spaced)


def test_probes_avoid_what_differs_between_files_of_one_model():
    for text in PROBES:
        assert unicodedata.is_normalized("NFC", text) and not text[0].isspace()
        assert not re.search(r"\s\s\d", text) and not any(c.isnumeric() and not c.isascii() for c in text)


def test_vocabulary_that_cannot_spell_the_probes():
    one, other = (Backend(models.WordLevel(vocab, unk_token="?")) for vocab in ({"a": 0, "b": 1}, {"a": 1, "b": 0}))
    check(Tokenizer(one), Tokenizer(one))
    assert refusal(Tokenizer(one), Tokenizer(other)) == "token 0 is 'a' for the target but 'b' for the draft"


# --- no tokenizer -----------------------------------------------------------------------------------------------------


def test_without_tokenizers_the_rows_decide():
    check(None, None)
    assert refusal(None, None, draft_rows=136) == (
        "neither has a tokenizer, and the target has 128 embedding rows but the draft 136"
    )


def test_one_tokenizer_is_not_enough():
    assert "the target has a tokenizer but the draft has none" in refusal(make(), None)
    assert "the draft has a tokenizer but the target has none" in refusal(None, make())


# --- the embedded model -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def embedded() -> Checkpoint:
    return load_checkpoint()


def saved(embedded: Checkpoint, folder, **changes) -> Tokenizer:
    """The tokenizer of the embedded GGUF file as that of a folder, with parts of its pipeline replaced."""
    backend = Backend.from_str(embedded.tokenizer._backend.to_str())
    for name, value in changes.items():
        setattr(backend, name, value)
    backend.save(str(folder / "tokenizer.json"))
    return read_tokenizer(folder)


def test_embedded_model_with_itself_is_quick(embedded):
    again = load_checkpoint()
    start = time.perf_counter()
    check_pair(embedded, again)
    assert time.perf_counter() - start < 2


def test_embedded_model_with_its_folder(embedded, tmp_path):
    tokenizer = saved(embedded, tmp_path)
    assert fingerprint(tokenizer) == fingerprint(embedded.tokenizer)
    check(embedded.tokenizer, tokenizer)
    check(tokenizer, embedded.tokenizer)


def test_folder_that_cuts_digits_first(embedded, tmp_path):
    """SmolLM2's folders do, and the larger models are natural targets for the embedded one."""
    digits = pre_tokenizers.Digits(individual_digits=True)
    both = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer = saved(embedded, tmp_path, pre_tokenizer=both)
    assert tokenizer.encode("a   1") != embedded.tokenizer.encode("a   1")
    check(tokenizer, embedded.tokenizer)


def test_folder_that_composes_characters(embedded, tmp_path):
    """As Qwen2's folders do, while GGUF files do not say so."""
    tokenizer = saved(embedded, tmp_path, normalizer=normalizers.NFC())
    assert tokenizer.encode("e\u0301") != embedded.tokenizer.encode("e\u0301")
    check(tokenizer, embedded.tokenizer)


def test_folder_that_puts_a_space_before_spaces():
    """As Llama 2's folders do, while SentencePiece's kind of GGUF tokenizer puts one only where there is none."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *"abeht", "▁▁", "th", "▁th"]
    merges = [("▁", "▁"), ("t", "h"), ("▁", "th")]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    gguf, folder = (
        Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        for _ in range(2)
    )
    use_metaspace(gguf)
    folder.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    assert gguf.encode(" th").ids != folder.encode(" th").ids
    check(Tokenizer(folder), Tokenizer(gguf))


def test_fingerprint_of_the_embedded_model(embedded):
    """Draft cards will hold it, so it must not change by accident."""
    assert fingerprint(embedded.tokenizer) == "853b524522cfa3366e3f45b1d03fb4e847c45e78306bf7d41003a65e560393db"
