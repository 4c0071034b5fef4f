"""Every sampling parameter: what is accepted, in what form it is kept, and that all else is refused by name."""

import dataclasses
import math

import pytest

from longdraft import SamplingParams
from longdraft.config import EngineConfig
from longdraft.engine.admission import fit_prompt, resolve
from longdraft.errors import ContextLengthError, InvalidValueError
from longdraft.sampling_params import from_generation_config
from tests.conftest import greedy, make_engine, run

HOSTILE = [-1, 0, 2**31, 2**63, -(2**63), 1e308, -1e308, math.nan, math.inf, -math.inf, "1", "x", True, [], {}, [[]]]
HOSTILE += [None, b"1", object(), 10**5000, [10**400], {"a": 1}, {5: math.nan}, {5: "3"}, [1.5], ["a" * 10_000], [True]]
FIELDS = [field.name for field in dataclasses.fields(SamplingParams)]


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_values_are_taken_or_refused_by_name(field, value):
    """Nothing but ``InvalidValueError`` comes out, it names the field, and what is accepted is finite."""
    try:
        params = SamplingParams(**{field: value})
    except InvalidValueError as error:
        assert error.what == field
        assert len(str(error)) < 500
        return
    kept = getattr(params, field)
    assert not isinstance(kept, float) or math.isfinite(kept)
    assert dataclasses.replace(params) == params
    assert hash(params) == hash(dataclasses.replace(params))


@pytest.mark.parametrize(
    ("field", "low", "high", "below", "above"),
    [
        ("n", 1, 128, 0, 129),
        ("temperature", 0, 100, -0.01, 100.1),
        ("top_p", 1e-9, 1, 0, 1.0001),
        ("min_p", 0, 1, -1e-9, 1.0001),
        ("repetition_penalty", 0.01, 100, 0.0, 100.5),
        ("presence_penalty", -2, 2, -2.01, 2.01),
        ("frequency_penalty", -2, 2, -2.01, 2.01),
        ("logprobs", 0, 20, -1, 21),
        ("prompt_logprobs", 0, 20, -1, 21),
        ("seed", 0, 2**63 - 1, -1, 2**63),
        ("truncate_prompt_tokens", -1, 2**31 - 1, -2, 0),
    ],
)
def test_borders(field, low, high, below, above):
    for value in (low, high):
        assert getattr(SamplingParams(**{field: value}), field) == value
    for value in (below, above):
        with pytest.raises(InvalidValueError, match=field):
            SamplingParams(**{field: value})


def test_forms_are_made_uniform():
    params = SamplingParams(
        logit_bias={"7": 1, 3: -100.0},
        bad_words=["no", [1, 2], (3,)],
        allowed_token_ids=[5, 3, 5],
        stop="end",
        stop_token_ids=None,
        logits_processors=None,
    )
    assert params.logit_bias == ((3, -100.0), (7, 1.0))
    assert params.bad_words == ("no", (1, 2), (3,))
    assert params.allowed_token_ids == (3, 5)
    assert (params.stop, params.stop_token_ids, params.logits_processors) == (("end",), (), ())
    assert dataclasses.replace(params, seed=3).logit_bias == params.logit_bias


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"structured_outputs": {"json": {}}}, "structured_outputs.*not supported.*vLLM"),
        ({"min_tokens": 17}, "min_tokens is 17.*max_tokens = 16"),
        ({"logit_bias": {3: 101}}, "logit_bias is 101.*-100 to 100"),
        ({"logit_bias": {3: 1, "3": 1}}, "name each token id once"),
        ({"allowed_token_ids": []}, "None allows all"),
        ({"bad_words": "word"}, "list of strings"),
        ({"bad_words": [""]}, "1 to 256"),
        ({"bad_words": [[]]}, "1 to 256"),
        ({"bad_words": ["a"] * 2000}, "at most 1024"),
        ({"stop": ["a"] * 17}, "at most 16"),
        ({"stop": [""]}, "1 to 256"),
        ({"logits_processors": [3]}, "functions of"),
        ({"repetition_penalty": 0}, "1 is no penalty"),
    ],
)
def test_messages_say_the_limit_and_the_fix(bad, words):
    with pytest.raises(InvalidValueError, match=words):
        SamplingParams(**bad)


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "bad_words", "logit_bias"])
@pytest.mark.parametrize("token", [128, 2**31 - 1])
def test_ids_outside_the_vocabulary_are_refused_before_the_engine(tiny, field, token):
    values = {"bad_words": [[1, token]], "logit_bias": {token: 1.0}}
    engine = make_engine(tiny)
    mate = engine.sequence(engine.add([1, 2], greedy(5)))
    with pytest.raises(InvalidValueError, match=f"{field} is {token}.*0 to 127"):
        engine.add([1, 2, 3], SamplingParams(**{field: values.get(field, [token])}))
    list(run(engine))
    assert len(mate.output_ids) == 5
    assert engine.store.num_free_pages == engine.store.num_pages


def test_words_need_a_tokenizer():
    with pytest.raises(InvalidValueError, match="bad_words.*tokenizer"):
        resolve(SamplingParams(bad_words=["a"]), 128, None)
    assert resolve(SamplingParams(bad_words=[[1]]), 128, None).bad_words == ((1,),)


def test_a_bad_word_is_forbidden_with_and_without_a_space_before_it(embedded_path):
    from longdraft.checkpoint.load import load_checkpoint

    tokenizer = load_checkpoint(embedded_path).tokenizer
    words = resolve(SamplingParams(bad_words=["Paris", [7, 8]]), 49152, tokenizer).bad_words
    assert words == (tuple(tokenizer.encode("Paris")), tuple(tokenizer.encode(" Paris")), (7, 8))


@pytest.mark.parametrize(
    ("length", "settings", "kept"),
    [
        (10, {"truncate_prompt_tokens": 4}, 4),
        (10, {"truncate_prompt_tokens": 40}, 10),
        (100, {"truncate_prompt_tokens": -1, "max_tokens": 16}, 48),
        (100, {"truncate_prompt_tokens": -1, "max_tokens": None}, 63),
        (100, {"truncate_prompt_tokens": -1, "max_tokens": 10**9}, 63),
        (30, {"truncate_prompt_tokens": -1}, 30),
    ],
)
def test_truncation_keeps_the_end_of_the_prompt(length, settings, kept):
    config = EngineConfig(max_model_len=64, num_pages=64)
    assert fit_prompt(list(range(length)), SamplingParams(**settings), config) == list(range(length))[-kept:]


def test_truncation_does_not_hide_a_prompt_that_is_still_too_long():
    config = EngineConfig(max_model_len=64, num_pages=64)
    with pytest.raises(ContextLengthError, match="is 64"):
        fit_prompt([1] * 200, SamplingParams(truncate_prompt_tokens=64), config)


def test_generation_config_settings():
    settings = {"temperature": 0.6, "top_p": 0.9, "top_k": 40, "max_new_tokens": 99, "repetition_penalty": 1.1, "x": 1}
    params = from_generation_config(settings)
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.6, 0.9, 40, 99)
    assert params.repetition_penalty == 1.1
    assert from_generation_config({}) == SamplingParams()
    assert from_generation_config({"do_sample": False, "temperature": 0.5}).greedy
    assert from_generation_config({"do_sample": True}).temperature == 1
    with pytest.raises(InvalidValueError, match="temperature"):
        from_generation_config({"temperature": -1})
