"""The tokenizer against transformers: same ids and text from GGUF metadata and from tokenizer.json folders."""

import json
import lzma
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from longdraft.checkpoint import tokenizer_folder as module
from longdraft.checkpoint.tokenizer import Tokenizer
from longdraft.checkpoint.tokenizer_folder import read_tokenizer
from longdraft.checkpoint.tokenizer_gguf import build_tokenizer
from longdraft.errors import InvalidValueError, ModelFileError, UnsupportedModelError

transformers = pytest.importorskip("transformers")

NOVELS = sorted(p.name for p in (Path(module.__file__).parents[1] / "data").glob("*.txt.xz"))
UTF8 = "naïve 🙂🙂 한국어 日本語 ďábelské 👩‍🚀 end"
HARD = [
    *(
        "",
        " ",
        "  ",
        "\n",
        "\n\n  \n x",
        "\t 12",
        "   123",
        "a1b22",
        "1,234.5",
        "12345678901",
        " 1",
        "  1  2 ",
        "x\r\ny",
    ),
    *(UTF8, "Ａ１２ ⅷ ½ ²", "e\u0301 \u00e9", "\u200b\ufeff\u00a0x", "\ue000\U0010fffd", "it's I'LL we've"),
    "def f(x):\n\tif x != 0x1F:\n        return {'a': [1, 2.50]}  # done\n\n\n",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "HTTPServer camelCase snake_case CONSTANT_1 https://example.com/a?b=1&c=%20",
]


# Older ones, the last for Python 3.10 among them, overlook add_bos_token and add_eos_token in GGUF files.
READS_ADD_BOS = Version(transformers.__version__) >= Version("5.24")


def assert_same(ours: Tokenizer, theirs, text: str) -> None:
    """Same ids, and same text back, for one text and one transformers tokenizer."""
    ids = theirs(text).input_ids
    if READS_ADD_BOS:
        assert ours.encode(text) == ids
    assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False).input_ids
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


# --- the embedded model -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NOVELS)
def test_novels(ours, theirs, name):
    text = lzma.open(Path(module.__file__).parents[1] / "data" / name, "rt", encoding="utf-8").read()
    ids = ours.encode(text)
    assert ids == theirs(text).input_ids
    assert ours.decode(ids) == text


@pytest.mark.parametrize("text", HARD)
def test_hard_strings(ours, theirs, text):
    assert_same(ours, theirs, text)
    assert ours.decode(ours.encode(text), skip_special_tokens=False) == text


@settings(max_examples=150, deadline=None)
@given(st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from(" \t\n019aZ<|>'🙂é")), max_size=40))
def test_any_text(ours, theirs, text):
    assert_same(ours, theirs, text)


def test_facts(ours, metadata):
    assert (ours.vocab_size, ours.bos_token_id, ours.eos_token_id) == (49152, 1, 2)
    assert ours.special_ids == frozenset(range(17))
    assert ours.token_text(2) == "<|im_end|>" and ours.token_text(49152) == ours.token_text(-1) == ""
    assert [ours.token_text(i) for i in range(0, 49152, 97)] == metadata["tokenizer.ggml.tokens"][::97]


def test_control_tokens_as_text(ours, theirs):
    text = "a <|im_end|>\n<|im_start|>system<|endoftext|>"
    ids = ours.encode(text, allow_special=False)
    assert not ours.special_ids & set(ids)
    assert ids == theirs(text, split_special_tokens=True).input_ids
    assert ours.decode(ids) == text
    assert ours.encode("plain", allow_special=False) == ours.encode("plain")


def test_characters_split_over_tokens_decode_whole(ours):
    ids = ours.encode(UTF8)
    assert len(ids) > len(UTF8.split()) and ours.decode(ids) == UTF8
    assert ours.decode(ids[:-2] + ours.encode("🙂")[:1]).endswith("\ufffd")


def test_ids_outside_the_vocabulary(ours):
    inside = ours.encode("hello")
    assert ours.decode([49152, *inside, 50000, 2**40]) == "hello"
    assert ours.decode([]) == ""
    with pytest.raises(InvalidValueError, match="-1"):
        ours.decode([5, -1])


@pytest.mark.parametrize("text", [None, 5, b"x", ["x"], "a\ud800b"])
def test_what_is_not_text(ours, text):
    for allow in (True, False):
        with pytest.raises(InvalidValueError, match="valid Unicode"):
            ours.encode(text, allow_special=allow)


def test_many_threads(metadata):
    fresh = build_tokenizer(metadata)
    texts = [f"text {i} <|im_end|> {UTF8}" for i in range(40)]
    expected = [(fresh.encode(t), build_tokenizer(metadata).encode(t, allow_special=False)) for t in texts[:2]]
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda t: (fresh.encode(t), fresh.encode(t, allow_special=False)), texts))
    assert got[:2] == expected
    assert [fresh.decode(plain) for _, plain in got] == texts


def test_imports_neither_torch_nor_transformers():
    code = "import sys, longdraft.checkpoint.tokenizer, longdraft.checkpoint.chat; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "numpy", "jinja2"} & set(loaded)


# --- GGUF vocabularies of other kinds ---------------------------------------------------------------------------------


def write_gguf(folder: Path, keys: dict) -> None:
    """A GGUF file with no tensors and these ``tokenizer.ggml.*`` keys."""
    writer = gguf.GGUFWriter(folder / "m.gguf", "llama")
    sizes = ("block_count", "context_length", "embedding_length", "feed_forward_length", "head_count", "head_count_kv")
    for size in sizes:
        getattr(writer, f"add_{size}")(8)
    writer.add_layer_norm_rms_eps(1e-5)
    adders = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
    for key, value in keys.items():
        adders[type(value)](f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def both(folder: Path, keys: dict) -> tuple:
    """Our tokenizer and transformers' for the same keys."""
    write_gguf(folder, keys)
    ours = build_tokenizer({f"tokenizer.ggml.{key}": value for key, value in keys.items()})
    return ours, transformers.AutoTokenizer.from_pretrained(folder, gguf_file="m.gguf")


@pytest.fixture(scope="module")
def byte_level_keys() -> dict:
    """A vocabulary whose merges run across words, digits and blank lines, so that every split regex shows."""
    trained = Backend(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator([*HARD, "12345 67 the cat's HAT. It's\n\n  ok/\n" * 3] * 3, trainer)
    data = json.loads(trained.to_str())["model"]
    tokens = [*data["vocab"], "<|endoftext|>", "<|eot|>", "<think>"]
    merges = [" ".join(pair) for pair in data["merges"]]
    types = [1] * len(data["vocab"]) + [3, 3, 4]
    return {"model": "gpt2", "tokens": tokens, "merges": merges, "token_type": types, "eos_token_id": len(tokens) - 2}


PRE_TYPES = ["smollm", "gpt-2", "default", "llama-bpe", "llama3", "llama-v3", "qwen2", "deepseek-r1-qwen", "tekken"]


@pytest.mark.parametrize("pre", [None, *PRE_TYPES])
def test_pre_tokenizers(tmp_path, byte_level_keys, pre):
    ours, theirs = both(tmp_path, byte_level_keys | ({"pre": pre} if pre else {}))
    for text in [*HARD, "1234567", "a  b", "It'LL\n\n\n x", "ÀÉx Ǆz/\n", "<think> hm</think><|eot|>", "..//\r\n !"]:
        assert_same(ours, theirs, text)
    assert ours.encode("<think>", allow_special=False) == theirs("<think>").input_ids  # not a control token


@pytest.mark.parametrize("adds", [{}, {"add_bos_token": True}, {"add_eos_token": True, "add_bos_token": True}])
def test_bos_and_eos_of_a_byte_level_file(tmp_path, byte_level_keys, adds):
    ours, theirs = both(tmp_path, byte_level_keys | {"bos_token_id": len(byte_level_keys["tokens"]) - 3, **adds})
    for text in ("", "hi", " 12"):
        assert_same(ours, theirs, text)


def test_control_tokens_keep_their_ids(byte_level_keys):
    """Where we differ from the conversion, which gives such a BOS an id past the vocabulary."""
    added = ["<｜begin▁of▁sentence｜>", "<｜User｜>"]
    keys = byte_level_keys | {"tokens": byte_level_keys["tokens"] + added, "pre": "deepseek-r1-qwen"}
    size = len(keys["tokens"])
    keys |= {"token_type": keys["token_type"] + [3, 4], "bos_token_id": size - 2, "add_bos_token": True}
    ours = build_tokenizer({f"tokenizer.ggml.{key}": value for key, value in keys.items()})
    assert ours.vocab_size == size
    assert ours.encode("<｜User｜>") == [size - 2, size - 1]
    assert ours.decode([size - 2, size - 1], skip_special_tokens=False) == "".join(added)


@pytest.fixture(scope="module")
def sentencepiece_keys() -> dict:
    pieces = ["▁", *"hixabs<>/", "▁h", "hi", "▁hi", "▁▁", "ab", "<s", "s>", "ba"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces]
    scores = [0.0] * 259 + [-20.0 - i for i in range(10)] + [-3.0, -2.0, -1.0, -4.0, -5.0, -6.0, -6.5, -5.0]
    types = [2, 3, 3] + [6] * 256 + [1] * len(pieces)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return {"model": "llama", "pre": "default", "tokens": tokens, "scores": scores, "token_type": types, **ids}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"add_bos_token": False},
        {"add_bos_token": True, "add_eos_token": True, "add_space_prefix": True},
        {"merges": ["▁ h", "h i", "▁h i", "a b"]},
    ],
)
def test_sentencepiece(tmp_path, sentencepiece_keys, changes):
    ours, theirs = both(tmp_path, sentencepiece_keys | changes)
    for text in [
        "hi",
        " hi",
        "  hi",
        "hi hi  abab",
        "",
        " ",
        "a</s>hi",
        "a</s> hi",
        "bab ab",
        UTF8,
        "\n\t",
        "hi <unk>x",
    ]:
        assert_same(ours, theirs, text)
    assert ours.decode(ours.encode(UTF8)) == UTF8


def test_merges_that_spell_a_control_token(sentencepiece_keys):
    ours = build_tokenizer({f"tokenizer.ggml.{key}": value for key, value in sentencepiece_keys.items()})
    ids = ours.encode("x<s>hi</s>", allow_special=False)
    assert ids[0] == ours.bos_token_id and not ours.special_ids & set(ids[1:])
    assert ours.decode(ids) == "x<s>hi</s>"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": "t5"}, "t5"),
        ({"model": None}, "model"),
        ({"pre": "brand-new"}, "brand-new"),
        ({"model": "llama", "pre": "llama-bpe"}, "llama-bpe"),
        ({"model": "llama", "add_space_prefix": False}, "add_space_prefix"),
    ],
)
def test_refused_kinds(byte_level_keys, changes, named):
    with pytest.raises(UnsupportedModelError, match=named):
        build_tokenizer({f"tokenizer.ggml.{key}": v for key, v in (byte_level_keys | changes).items()})


DAMAGE = [
    *({"tokens": value} for value in (None, [], "abc", [1, 2], ["a", None])),
    *({"merges": value} for value in (None, [], ["a"], ["a zzz"], ["h e l"], [""], [5], ["< ~"])),
    *({"token_type": value} for value in ([1], ["x"], 3)),
    *({"bos_token_id": value} for value in (-1, 10**6, "1", True, 1.0)),
    *({"padding_token_id": value} for value in (2**63,)),
    *({"add_bos_token": value} for value in (1, "true")),
    *({"pre": value} for value in (7,)),
    *({"model": value} for value in (["gpt2"],)),
    {"model": "llama", "merges": None},
]


@pytest.mark.parametrize("changes", DAMAGE, ids=str)
def test_damaged_metadata(byte_level_keys, changes):
    with pytest.raises(ModelFileError, match=r"^odd\.gguf: metadata key 'tokenizer\.ggml\."):
        keys = {f"tokenizer.ggml.{key}": value for key, value in (byte_level_keys | changes).items()}
        build_tokenizer(keys, file="odd.gguf")


@pytest.mark.parametrize("scores", [None, [1.0], [float("nan")] * 277, [0] * 277, ["0"] * 277])
def test_damaged_scores(sentencepiece_keys, scores):
    with pytest.raises(ModelFileError, match="scores"):
        build_tokenizer({f"tokenizer.ggml.{k}": v for k, v in (sentencepiece_keys | {"scores": scores}).items()})


def test_repeated_and_endless_tokens(sentencepiece_keys):
    for last, problem in (("hi", "more than once"), ("x" * 5000, "5000 characters")):
        tokens = [*sentencepiece_keys["tokens"][:-1], last]
        with pytest.raises(ModelFileError, match=problem):
            build_tokenizer({f"tokenizer.ggml.{k}": v for k, v in (sentencepiece_keys | {"tokens": tokens}).items()})


# --- folders with a tokenizer.json ------------------------------------------------------------------------------------


def write_folder(folder: Path, backend: Backend, config: dict, model_type: str = "llama", **others: dict) -> None:
    backend.save(str(folder / "tokenizer.json"))
    for name, data in {"tokenizer_config": config, "config": {"model_type": model_type}, **others}.items():
        (folder / f"{name}.json").write_text(json.dumps(data))


def byte_level(adds_bos: bool = False) -> Backend:
    """Like SmolLM2's: digits are cut out one by one."""
    backend = Backend(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|im_end|>", "<|endoftext|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([*HARD, "the cat   in the hat   12"] * 3, trainer)
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return backend


def metaspace() -> Backend:
    """Like Llama 2's: spaces are replaced by a normalizer."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *"hix", "▁h", "hi", "▁hi", "▁▁"]
    merges = [("▁", "h"), ("h", "i"), ("▁h", "i"), ("▁", "▁")]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in pieces[:3]])
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return backend


FOLDER_TEXTS = [*HARD, "the   12 <s>x</s> y", "<|im_end|>  hi", "  hi hi", "hi<s> hi", "<think>hi</think> [X]"]


def assert_same_folder(folder: Path) -> Tokenizer:
    ours, theirs = read_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for text in FOLDER_TEXTS:
        ids = theirs(text).input_ids
        doubled = ids[:2] == [ours.bos_token_id] * 2
        assert ours.encode(text) == (ids[1:] if doubled else ids)
        assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False).input_ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    return ours


@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "GPT2Tokenizer", "LlamaTokenizerFast", None])
@pytest.mark.parametrize("backend", [byte_level, metaspace])
def test_the_pipeline_is_that_of_the_file(tmp_path, name, backend):
    """Whatever class is named, tokenizer.json is taken at its word; so does transformers for its generic class."""
    config = {"bos_token": "<s>", "eos_token": "</s>"} | ({"tokenizer_class": name} if name else {})
    write_folder(tmp_path, backend(), config)
    if name == "PreTrainedTokenizerFast":
        assert_same_folder(tmp_path)
    file = Backend.from_file(str(tmp_path / "tokenizer.json"))
    for text in HARD:
        assert read_tokenizer(tmp_path).encode(text) == file.encode(text).ids


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("flag", [None, False, True])
def test_add_bos_token_flag_is_not_read(tmp_path, adds_bos, flag):
    """tokenizer.json alone decides, in transformers 5 and here."""
    config = {"bos_token": "<s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    write_folder(tmp_path, byte_level(adds_bos), config | ({} if flag is None else {"add_bos_token": flag}))
    ours = assert_same_folder(tmp_path)
    assert ours.encode("hi")[:1] == ([0] if adds_bos else ours.encode("hi", add_special_tokens=False)[:1])


@pytest.mark.parametrize("kind", [transformers.PreTrainedTokenizerFast, transformers.LlamaTokenizerFast])
@pytest.mark.parametrize("adds_bos", [False, True])
def test_folder_saved_by_transformers(tmp_path, kind, adds_bos):
    if kind is transformers.LlamaTokenizerFast:
        data = json.loads(metaspace().to_str())["model"]
        vocabulary = {"vocab": data["vocab"], "merges": [tuple(m) for m in data["merges"]]}
        saved = kind(**vocabulary, add_bos_token=adds_bos)
    else:
        saved = kind(tokenizer_object=byte_level(), bos_token="<s>", add_bos_token=adds_bos, pad_token="[X]")
    saved.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    ours = assert_same_folder(tmp_path)
    assert (ours.encode("hi")[0] == ours.bos_token_id) is adds_bos


def test_tokens_declared_beside_tokenizer_json(tmp_path):
    """In added_tokens_decoder, as extra tokens, and in the older special_tokens_map.json."""
    think = {"content": "<think>", "special": False, "normalized": False}
    end = {"content": "<|im_end|>", "special": True, "rstrip": True, "normalized": False}
    config = {"added_tokens_decoder": {"400": think, "2": end}, "extra_special_tokens": ["</think>"]}
    write_folder(tmp_path, byte_level(), config | {"eos_token": {"__type": "AddedToken", "content": "</s>"}})
    assert assert_same_folder(tmp_path).eos_token_id == 1
    old = {"eos_token": "</s>", "bos_token": {"content": "<s>"}, "additional_special_tokens": ["[X]", "<think>"]}
    write_folder(tmp_path, byte_level(), {"eos_token": "<s>"}, special_tokens_map=old)
    assert assert_same_folder(tmp_path).eos_token_id == 1


def test_text_that_starts_with_bos_gets_no_second_one(tmp_path):
    write_folder(tmp_path, byte_level(adds_bos=True), {"bos_token": "<s>"})
    ours = read_tokenizer(tmp_path)
    assert ours.encode("<s>hi") == ours.encode("hi")
    assert ours.encode("<s>") == ours.encode("") == [0]
    assert ours.encode("<s><s>hi")[:3] == [0, 0, ours.encode("hi")[1]]
    plain = ours.encode("<s>hi", allow_special=False)
    assert plain[0] == 0 and 0 not in plain[1:] and ours.decode(plain) == "<s>hi"
    write_folder(tmp_path, byte_level(), {"bos_token": "<s>"})
    assert read_tokenizer(tmp_path).encode("<s><s>hi")[:2] == [0, 0]  # nothing was added, so nothing is removed


def test_truncation_and_padding_are_ignored(tmp_path):
    backend = byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    write_folder(tmp_path, backend, {})
    assert_same_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(
            ("tokenizer.json", text)
            for text in (None, "", "{}", "[]", "[" * 5000, "\xff", '{"model": {"type": "BPE"}}')
        ),
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]}}'),  # a panic
        *(("tokenizer_config.json", text) for text in ("{", "[]", "[" * 100000, "\xff", '{"bos_token": [1]}')),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {}}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"1": {"content": 5}}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}'),
        ("special_tokens_map.json", "5"),
    ],
)
def test_damaged_folder(tmp_path, name, content):
    write_folder(tmp_path, byte_level(), {})
    (tmp_path / name).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(ModelFileError, match=name):
        read_tokenizer(tmp_path)


def test_oversized_folder_and_missing_folder(tmp_path, monkeypatch):
    write_folder(tmp_path, byte_level(), {})
    monkeypatch.setattr(module, "MAX_FILE", 1000)
    with pytest.raises(ModelFileError, match="MiB"):
        read_tokenizer(tmp_path)
    with pytest.raises(ModelFileError, match="missing"):
        read_tokenizer(os.fspath(tmp_path / "nowhere"))


def test_refused_settings(tmp_path):
    write_folder(tmp_path, byte_level(), {"split_special_tokens": True})
    with pytest.raises(UnsupportedModelError, match="split_special_tokens"):
        read_tokenizer(tmp_path)
    words = Backend(models.WordLevel({"a": 0}, unk_token="a"))
    write_folder(tmp_path, words, {"clean_up_tokenization_spaces": True})
    with pytest.raises(UnsupportedModelError, match="clean_up"):
        read_tokenizer(tmp_path)


@pytest.mark.parametrize("kind", ["WordLevel", "Unigram"])
def test_other_vocabularies(tmp_path, kind):
    if kind == "WordLevel":
        backend = Backend(models.WordLevel({"<unk>": 0, "<s>": 1, "a": 2, "b": 3}, unk_token="<unk>"))
    else:
        backend = Backend(models.Unigram([("<unk>", 0.0), ("<s>", -1.0), ("a", -2.0), ("b", -3.0)], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    write_folder(tmp_path, backend, {"bos_token": "<s>", "unk_token": "<unk>"})
    ours = assert_same_folder(tmp_path)
    assert 1 in ours.encode("a <s> b") and 1 not in ours.encode("a <s> b", allow_special=False)
