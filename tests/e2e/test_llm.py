"""The offline API on a tiny folder and on the embedded model, as a user would call it."""

import pytest
import torch

from longdraft import LLM, SamplingParams
from longdraft.errors import (
    ContextLengthError,
    InvalidValueError,
    ModelFileError,
    ModelNotFoundError,
    TemplateError,
    UnsupportedModelError,
)
from longdraft.kernels import native
from tests.parity.models import tiny_checkpoint

TIER = "near-tie" if native._native is None else "bit-identical"  # in float32 and bfloat16
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder, dtype="float64", kv_cache_memory_bytes=2**22)


@pytest.fixture(scope="module")
def embedded():
    return LLM(max_model_len=512, kv_cache_memory_bytes=2**28)


def test_greedy_equals_transformers(folder, llm):
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    prompts = [[5, 6, 7], list(range(40)), [9]]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    for prompt, result in zip(prompts, llm.generate(prompts, params), strict=True):
        want = theirs.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False, eos_token_id=None)
        assert result.outputs[0].token_ids == want[0, len(prompt) :].tolist()
        assert result.prompt_token_ids == prompt


def test_prompts_in_every_form_and_results_in_order(embedded):
    text = "The capital of France is"
    ids = embedded.tokenizer.encode(text)
    forms = [text, ids, {"prompt": text}, {"prompt_token_ids": ids}]
    results = embedded.generate(forms, GREEDY)
    assert len({result.text for result in results}) == 1
    assert "Paris" in results[0].text
    assert embedded.generate(ids, GREEDY)[0].outputs[0].token_ids == results[0].outputs[0].token_ids
    assert [r.prompt for r in results] == [text, None, text, None]


def test_a_stop_string_ends_the_text_before_it(embedded):
    params = SamplingParams(temperature=0, max_tokens=40, stop="is Par", logprobs=2)
    (result,) = embedded.chat([{"role": "user", "content": "What is the capital of France?"}], params)
    assert result.text == "The capital of France "
    assert result.outputs[0].finish_reason == "stop"
    assert len(result.outputs[0].logprobs) == len(result.outputs[0].token_ids)
    first = result.outputs[0].logprobs[0][result.outputs[0].token_ids[0]]
    assert (first.decoded_token, first.rank) == ("The", 1)


def test_chat_answers_and_stops_at_end_of_turn(embedded):
    question = [{"role": "user", "content": "What is the capital of France?"}]
    one = embedded.chat(question, SamplingParams(temperature=0, max_tokens=40))
    two = embedded.chat([question, question], SamplingParams(temperature=0, max_tokens=40))
    assert one[0].text == "The capital of France is Paris."
    assert one[0].outputs[0].finish_reason == "stop"
    assert [r.text for r in two] == [one[0].text] * 2


def test_statistics_and_exactness(llm):
    (result,) = llm.generate([[1] * 20], GREEDY)
    assert (result.stats.prompt_tokens, result.stats.output_tokens) == (20, len(result.outputs[0].token_ids))
    assert result.stats.decode_tokens_per_s > 0
    assert result.exactness == "identical"
    assert LLM(llm.checkpoint.path, kv_cache_memory_bytes=2**22).exactness == TIER


def test_one_bad_prompt_leaves_nothing_behind(llm):
    free = llm.engine.store.num_free_pages
    for bad, error in (([128], InvalidValueError), ([], InvalidValueError), ([1] * 256, ContextLengthError)):
        with pytest.raises(error):
            llm.generate([[1, 2], bad], GREEDY)
    assert not llm.engine.has_work
    assert llm.engine.store.num_free_pages == free
    assert llm.generate([[1, 2]], GREEDY)


def test_arrays_and_tensors_are_prompts(llm):
    import numpy as np

    want = [r.outputs[0].token_ids for r in llm.generate([[5, 6, 7], [8, 9]], GREEDY)]
    for prompts in (
        [np.array([5, 6, 7]), torch.tensor([8, 9])],
        [[np.int64(5), 6, 7], {"prompt_token_ids": np.array([8, 9])}],
        [(5, 6, 7), range(8, 10)],
    ):
        assert [r.outputs[0].token_ids for r in llm.generate(prompts, GREEDY)] == want
    for one in (np.array([5, 6, 7]), torch.tensor([5, 6, 7]), np.array([[5, 6, 7]])):
        assert llm.generate(one, GREEDY)[0].outputs[0].token_ids == want[0]
    params = SamplingParams(temperature=np.float32(0), max_tokens=np.int64(12), stop_token_ids=np.array([], dtype=int))
    assert params == GREEDY


def test_a_callback_may_abort(llm):
    def abort_second(engine, outputs):
        for output in outputs:
            if output.seq.ids[0] == 9 and not output.finish_reason and len(output.seq.output_ids) == 3:
                engine.abort(output.seq.id)

    params = SamplingParams(temperature=0, max_tokens=8)
    first, second = llm.generate([[5, 6], [9, 9]], params, draft=None, on_step=abort_second)
    assert (second.outputs[0].finish_reason, len(second.outputs[0].token_ids)) == ("abort", 3)
    assert first.outputs[0].finish_reason in ("stop", "length")


def test_a_small_cache_is_logged(folder, caplog):
    llm = LLM(folder, dtype="float32", kv_cache_memory_bytes=50_000)
    assert "KV cache holds 64 tokens" in caplog.text
    assert llm.engine.config.max_tokens_per_request == 64
    caplog.clear()
    LLM(folder, kv_cache_memory_bytes=2**22)
    assert not [record for record in caplog.records if "native" not in record.message]


def test_another_tokenizer_must_fit_the_model(folder, tmp_path):
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({f"w{i}": i for i in range(200)}, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelFileError, match="200 tokens.*128"):
        LLM(folder, tokenizer=tmp_path, kv_cache_memory_bytes=2**22)


def test_an_added_token_without_an_embedding_is_refused_only_when_used(folder, tmp_path):
    from tokenizers import Tokenizer, models

    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(128)}, unk_token="w0"))
    backend.add_special_tokens(["[PAD]"])
    backend.save(str(tmp_path / "tokenizer.json"))
    llm = LLM(folder, tokenizer=tmp_path, kv_cache_memory_bytes=2**22)
    assert llm.generate("w5", GREEDY)
    with pytest.raises(InvalidValueError, match="128.*vocabulary"):
        llm.generate("w5[PAD]", GREEDY)


def test_an_interrupt_leaves_nothing_behind(llm):
    def interrupt(engine, outputs):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1] * 50, [2] * 50], GREEDY, on_step=interrupt)
    assert not llm.engine.has_work
    assert llm.engine.store.num_free_pages == llm.engine.store.num_pages


BAD_PROMPTS = [
    *(b"bytes", 5, None, [None], [b"x"], [{"text": "x"}], [{"prompt": "a", "x": 1}], [{1, 2}], {"prompt": None}),
    *({"prompt_token_ids": x} for x in (5, "abc", b"abc", None, True)),
    *([10**5000], [[1.5]], [[True]], [["a"]], torch.ones(2, 2, 2), [[[1]]]),
]


@pytest.mark.parametrize("prompts", BAD_PROMPTS, ids=lambda p: type(p).__name__)
def test_wrong_kinds_of_prompts(llm, prompts):
    with pytest.raises(InvalidValueError, match="prompt"):
        llm.generate(prompts, GREEDY)


@pytest.mark.parametrize("params", ["greedy", [GREEDY], [GREEDY, None], 3])
def test_wrong_sampling_params(llm, params):
    with pytest.raises(InvalidValueError, match="sampling_params"):
        llm.generate([[1], [2]], params)


def test_degenerate_prompts(embedded):
    """Case O29: nothing to start from is refused, a blank is a prompt, nothing at all is no work."""
    for empty in ("", ["a", ""], [[]]):
        with pytest.raises(InvalidValueError, match="empty|at least one"):
            embedded.generate(empty, GREEDY)
    assert embedded.generate([], GREEDY) == []
    assert embedded.generate(" ", GREEDY)[0].stats.prompt_tokens == 1
    assert len(embedded.generate([[0], [0, 0]], GREEDY)) == 2


def test_an_immediate_end_gives_no_echo(llm):
    (plain,) = llm.generate([[5, 6, 7]], GREEDY)
    stop = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=(plain.outputs[0].token_ids[0],))
    (result,) = llm.generate([[5, 6, 7]], stop)
    assert (len(result.outputs[0].token_ids), result.outputs[0].finish_reason) == (1, "stop")


def test_a_model_without_text_tools_says_so(llm):
    with pytest.raises(InvalidValueError, match="tokenizer"):
        llm.generate("text", GREEDY)
    with pytest.raises(InvalidValueError, match="tokenizer"):
        llm.chat([{"role": "user", "content": "hi"}], GREEDY)


def test_chat_without_a_template(folder, embedded_path, tmp_path):
    llm = LLM(max_model_len=64, kv_cache_memory_bytes=2**24)
    llm.checkpoint = llm.checkpoint.__class__(**{**llm.checkpoint.__dict__, "chat_template": None})
    with pytest.raises(TemplateError, match="no chat template"):
        llm.chat([{"role": "user", "content": "hi"}], GREEDY)


def test_what_is_not_a_model(tmp_path, folder):
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "model.bin").write_bytes(b"x" * 100)
    for bad, error, words in (
        (tmp_path / "nothing", ModelNotFoundError, "no file or folder"),
        (tmp_path / "notes.txt", ModelFileError, "GGUF"),
        (tmp_path / "model.bin", ModelFileError, "GGUF"),
        (tmp_path, ModelFileError, "config.json"),
        ("no-such-owner/no-such-model", ModelNotFoundError, "hf download no-such-owner/no-such-model"),
        ("../../etc/passwd\0", ModelNotFoundError, "no file or folder"),
        ("x" * 10_000, ModelNotFoundError, "no file or folder"),
        (5, InvalidValueError, "model is 5"),
    ):
        with pytest.raises(error, match=words):
            LLM(bad)


def test_dynamic_rope_holds_only_within_the_original_length(tmp_path):
    parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    path = tiny_checkpoint(tmp_path, "llama", rope_parameters=parameters)
    with pytest.raises(InvalidValueError, match="max_model_len"):
        LLM(path, max_model_len=300)
    assert LLM(path, kv_cache_memory_bytes=2**22).generate([[1] * 240], GREEDY)


def test_a_short_sliding_window_is_refused(tmp_path):
    path = tiny_checkpoint(tmp_path, "mistral", sliding_window=64)
    with pytest.raises(UnsupportedModelError, match="sliding_window"):
        LLM(path, kv_cache_memory_bytes=2**22)
    assert LLM(path, max_model_len=64, kv_cache_memory_bytes=2**22).generate([[1] * 40], GREEDY)


TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}<|assistant|>"
CONTROL = ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]


@pytest.fixture(scope="module")
def talking_folder(tmp_path_factory):
    """A tiny model with a byte-level tokenizer, a chat template and a generation config, as transformers saves it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("talking")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", additional_special_tokens=CONTROL
    )
    tokenizer.chat_template = TEMPLATE
    tiny_checkpoint(folder, "qwen3", vocab_size=272)
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [260, 7], "temperature": 0.6}')
    return folder


def test_a_folder_with_text_tools_chats_like_transformers(talking_folder):
    from transformers import AutoTokenizer

    llm = LLM(talking_folder, kv_cache_memory_bytes=2**22)
    talk = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi <|end|> 🙂"}]
    (result,) = llm.chat(talk, GREEDY)
    plain = [talk[0], {"role": "user", "content": "Hi there 🙂"}]
    (again,) = llm.chat(plain, GREEDY)
    theirs = AutoTokenizer.from_pretrained(talking_folder)
    ids = theirs.apply_chat_template(plain, add_generation_prompt=True, return_dict=False)
    assert again.prompt_token_ids == ids
    end = llm.tokenizer.encode("<|end|>")
    assert len(end) == 1
    assert result.prompt_token_ids.count(end[0]) == 2  # the one in the user's text is plain text
    assert llm.engine.eos_token_ids == {260, 7}
    assert llm.generate("Hello, wörld", GREEDY)[0].prompt_token_ids == theirs("Hello, wörld").input_ids


def test_a_template_in_a_file_of_its_own_or_by_name(talking_folder, tmp_path):
    import json

    from longdraft.checkpoint.folder import read_chat_template

    assert read_chat_template(talking_folder) == TEMPLATE
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert read_chat_template(tmp_path) == "yes"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert read_chat_template(tmp_path) == "file"
    (tmp_path / "chat_template.jinja").write_bytes(b"x" * 2**21)
    with pytest.raises(ModelFileError, match="limit"):
        read_chat_template(tmp_path)


def test_a_hub_id_loads_from_the_cache_without_the_network(talking_folder, tmp_path):
    import os
    import shutil
    import subprocess
    import sys

    repository = tmp_path / "hub" / "models--someone--something"
    shutil.copytree(talking_folder, repository / "snapshots" / ("a" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    code = (
        "import sys\n"
        "def refuse(event, args):\n"
        "    assert event not in ('socket.connect', 'socket.getaddrinfo'), event\n"
        "sys.addaudithook(refuse)\n"
        "from longdraft import LLM\n"
        "print(LLM('someone/something', kv_cache_memory_bytes=2**22))\n"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    assert done.stdout.startswith("LLM('someone/something'"), done.stderr
