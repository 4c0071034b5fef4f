"""Text as it comes (cases O04, O27), one BOS (case O28), and the settings that a model brings along."""

import json
import random

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from longdraft import LLM, DraftConfig, SamplingParams
from longdraft.checkpoint.tokenizer import Tokenizer
from longdraft.engine.detokenize import Detokenizer
from longdraft.errors import ContextLengthError, InvalidValueError, ModelFileError
from longdraft.request import TextStream
from tests.parity.models import tiny_checkpoint

DRAFTS = [None, DraftConfig(kv="full", gamma=16), DraftConfig(kv="streaming_llm", budget=12, gamma=3), "ngram"]
TEXT = "naïve 🙂🙂 한국어 日本語 ďábelské 👩‍🚀 end"


def letters_backend() -> Backend:
    """96 tokens of two to four letters; the model has 128 embedding rows."""
    names = [chr(97 + i % 26) * (1 + i % 3) + chr(65 + i // 26) for i in range(96)]
    backend = Backend(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=names[0]))
    backend.decoder = decoders.Fuse()
    return backend


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


def byte_fallback() -> Tokenizer:
    """A SentencePiece-like vocabulary: some letters, a word mark, and a token for every byte."""
    pieces = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz", "▁end", "▁na"]
    backend = Backend(
        models.Unigram([(p, -1.0 - 0.01 * i) for i, p in enumerate(pieces)], unk_id=0, byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(backend)


TOKENIZERS = {"byte-level": byte_level, "byte-fallback": byte_fallback}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama")
    letters_backend().save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def llms(folder):
    return [LLM(folder, draft, dtype="float64", kv_cache_memory_bytes=2**22) for draft in DRAFTS]


def chunkings(n):
    rng = random.Random(0)
    for size in range(1, 10):
        yield [size] * n
    for _ in range(200):
        yield [rng.randint(1, 9) for _ in range(n)]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("cut", [0, 1, 2])
def test_characters_arrive_whole_in_every_chunking(name, cut):
    """Steps of 1 to 9 tokens; the stream may also end inside a character."""
    tokenizer = TOKENIZERS[name]()
    ids = tokenizer.encode(TEXT + "🙂")
    ids = ids[: len(ids) - cut]
    whole = tokenizer.decode(ids)
    assert cut or whole == TEXT + "🙂"
    for sizes in chunkings(len(ids)):
        stream, pieces, at = TextStream(tokenizer, SamplingParams()), [], 0
        for size in sizes:
            pieces.append(stream.push(ids[at : at + size]))
            at += size
        assert not any("\ufffd" in piece for piece in pieces)
        last = stream.finish(whole)
        assert "".join(pieces) + last == whole
        assert last.count("\ufffd") == whole.count("\ufffd")


@pytest.mark.parametrize("name", TOKENIZERS)
def test_invalid_bytes_in_the_middle_show_once(name):
    tokenizer = TOKENIZERS[name]()
    good = [tokenizer.encode(word) for word in ("ab", "한", "end")]
    first_byte = 1 if name == "byte-fallback" else 0
    for junk in ([first_byte + 200], [first_byte + 130, first_byte + 255]):
        ids = [*good[0], *junk, *good[1], *good[2]]
        detokenizer = Detokenizer(tokenizer, ids)
        detokenizer.finish()
        assert detokenizer.text == tokenizer.decode(ids)


@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "seed": 3}, {"temperature": 0, "n": 2, "logprobs": 1}])
@pytest.mark.parametrize("stop", [(), ("bbB",), ("aA", "ccC", "b"), ("zz#",)])
def test_streams_join_to_the_result(llms, params, stop):
    settings = SamplingParams(**{"temperature": 0, "max_tokens": 40, "ignore_eos": True, "stop": stop, **params})
    wanted = None
    for llm in llms:
        (result,) = llm.generate([[5, 6, 7, 8]], settings)
        outputs = list(llm.stream([5, 6, 7, 8], settings))
        assert outputs[-1].result.outputs == result.outputs
        same = [(c.text, c.token_ids, c.finish_reason) for c in result.outputs]
        wanted = wanted or same
        assert same == wanted
        for completion in result.outputs:
            mine = [o for o in outputs if o.index == completion.index]
            assert "".join(o.text for o in mine) == completion.text
            assert [t for o in mine for t in o.token_ids] == completion.token_ids
            assert [o.finish_reason for o in mine] == [None] * (len(mine) - 1) + [completion.finish_reason]
            if settings.logprobs is not None:
                assert [p for o in mine for p in o.logprobs] == completion.logprobs
        assert llm.engine.num_unfinished == 0


@pytest.mark.parametrize("number", range(len(DRAFTS)))
def test_no_delta_ever_holds_part_of_a_stop(llms, number):
    """Stops cut out of the plain text at every place and of every length up to 7; shown text never passes one."""
    llm, settings = llms[number], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    text = llms[0].generate([[5, 6, 7]], settings)[0].text
    for start in range(4, len(text) - 8, 5):
        stop = text[start : start + 1 + start % 7]
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=stop)
        shown = ""
        for output in llm.stream([5, 6, 7], params):
            shown += output.text
            assert stop not in shown
        assert shown == text[: text.find(stop)]
        assert output.finish_reason == "stop"
    with_stop = SamplingParams(temperature=0, max_tokens=40, stop=text[20:24], include_stop_str_in_output=True)
    assert "".join(o.text for o in llm.stream([5, 6, 7], with_stop)) == text[: text.find(text[20:24]) + 4]


def test_text_held_back_for_a_stop_that_never_completes_is_not_lost(llms):
    settings = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    text = llms[0].generate([[9, 9]], settings)[0].text
    for llm in llms:
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop=text[-3:] + "#")
        outputs = list(llm.stream([9, 9], params))
        assert "".join(o.text for o in outputs) == text
        assert outputs[-1].finish_reason == "length"


def test_streams_read_in_turns(llms):
    settings = SamplingParams(temperature=1, seed=5, max_tokens=25, ignore_eos=True)
    for llm in llms:
        alone = [llm.generate([[i, i + 1]], settings)[0].text for i in range(3)]
        streams, texts = [llm.stream([i, i + 1], settings) for i in range(3)], [""] * 3
        mate = llm.generate([[0, 1]], settings)[0]  # runs through while they wait
        assert mate.text == alone[0]
        for _ in range(60):
            for i, stream in enumerate(streams):
                texts[i] += next(stream).text if next_is_left(stream) else ""
        assert texts == alone


def next_is_left(stream):
    return bool(stream._outputs) or not stream._request.done


@pytest.mark.parametrize("how", ["close", "drop", "with", "error"])
def test_an_abandoned_stream_frees_its_cache(llms, how):
    llm = llms[1]
    stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    assert llm.engine.store.num_free_pages < llm.engine.store.num_pages
    if how == "close":
        stream.close()
        assert [o.finish_reason for o in stream][-1] == "abort"
    elif how == "with":
        with stream:
            next(stream)
    elif how == "error":
        with pytest.raises(ZeroDivisionError):
            for _ in stream:
                raise ZeroDivisionError
    del stream
    assert llm.engine.store.num_free_pages == llm.engine.store.num_pages
    assert not llm._requests


def test_a_bad_request_is_refused_when_the_stream_is_made(llms):
    with pytest.raises(ContextLengthError):
        llms[0].stream([1] * 10_000)
    with pytest.raises(InvalidValueError):
        llms[0].stream([1, 2], SamplingParams(stop_token_ids=(5000,)))
    assert llms[0].engine.num_unfinished == 0


def test_an_aborted_request_gives_what_it_has(llms):
    llm, seen = llms[0], []

    def on_step(engine, outputs):
        seen.extend(outputs)
        if len(seen) == 4:
            engine.abort(outputs[0].seq.id)

    (result,) = llm.generate([[1, 2]], SamplingParams(max_tokens=50, ignore_eos=True, seed=1), on_step=on_step)
    assert result.outputs[0].finish_reason == "abort"
    assert len(result.outputs[0].token_ids) == 4
    assert result.text
    assert not llm._requests


# --- what a model brings along


def write(folder, **settings):
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


def test_precedence_of_sampling_settings(tmp_path):
    """A request's own parameters, else generation_config.json, else the library's defaults."""
    folder = write(tiny_checkpoint(tmp_path, "llama"), temperature=0.3, top_k=7, max_new_tokens=5, do_sample=True)
    settings = {"dtype": "float64", "kv_cache_memory_bytes": 2**22}
    llm = LLM(folder, **settings)
    assert llm.default_sampling_params == SamplingParams(temperature=0.3, top_k=7, max_tokens=5)
    (result,) = llm.generate([[1, 2, 3]])
    assert len(result.outputs[0].token_ids) == 5
    (explicit,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    assert len(explicit.outputs[0].token_ids) == 9
    own = LLM(folder, generation_config="none", **settings)
    assert own.default_sampling_params == SamplingParams()
    with pytest.raises(InvalidValueError, match="'auto' or 'none'"):
        LLM(folder, generation_config="other", **settings)
    with pytest.raises(ModelFileError, match="generation_config.json: top_k.*'none'"):
        LLM(write(folder, top_k="many"), **settings)


def bos_folder(path, template):
    """A model whose tokenizer puts <s> before a text, and a template that writes it or not."""
    from tokenizers import AddedToken, processors

    backend = letters_backend()
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    start = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    tiny_checkpoint(path, "llama")
    backend.save(str(path / "tokenizer.json"))
    config = {"bos_token": "<s>", "chat_template": template, "tokenizer_class": "PreTrainedTokenizerFast"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path, start


@pytest.mark.parametrize("writes", [True, False])
def test_one_bos(tmp_path, writes):
    """Chat, plain text, text that brings its own BOS, ids (case O28); chat as transformers does it."""
    from transformers import AutoTokenizer

    start = "{{ bos_token }}" if writes else ""
    path, bos = bos_folder(tmp_path, start + "{% for m in messages %}{{ m.content }}{% endfor %}")
    llm = LLM(path, dtype="float64", kv_cache_memory_bytes=2**22)
    messages = [{"role": "user", "content": "aA bbA"}]
    theirs = AutoTokenizer.from_pretrained(path).apply_chat_template(messages, return_dict=False)
    assert llm.encode_chat(messages) == theirs == [bos] * writes + [0, 1]
    assert llm.encode("aA bbA") == llm.encode("<s>aA bbA") == [bos, 0, 1]
    assert llm.encode([bos, bos, 0]) == [bos, bos, 0]
    assert llm.generate("aA", SamplingParams(max_tokens=1))[0].prompt_token_ids == [bos, 0]


def test_the_embedded_model_gets_no_bos(embedded_path):
    llm = LLM(embedded_path, max_model_len=64, kv_cache_memory_bytes=2**24)
    ids = llm.encode("Once upon")
    assert llm.tokenizer.decode(ids, skip_special_tokens=False) == "Once upon"
    assert (
        llm.encode_chat([{"role": "user", "content": "Hi"}]).count(1) == 3
    )  # <|im_start|> of three messages, no other
