"""Stop strings and log-probabilities under speculation (cases O04, O05, O09), and text built token by token (O27)."""

import random

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from longdraft.checkpoint.tokenizer import Tokenizer
from longdraft.config import DraftConfig, EngineConfig
from longdraft.drafts.registry import SELECTORS
from longdraft.engine.detokenize import Detokenizer
from longdraft.engine.engine import Engine
from longdraft.errors import InvalidValueError
from longdraft.exactness import forced_logits
from longdraft.sampling_params import SamplingParams
from tests.conftest import run

PROMPT = list(range(5, 13))
# Proposals longer than a page: one draft that is always right, one that is not.
LONG = [DraftConfig(kv=kv, budget=12, gamma=16) for kv in ("full", "streaming_llm")]
DRAFTS = [None, *(DraftConfig(kv=kv, budget=12, gamma=g) for kv in SELECTORS for g in (1, 4)), *LONG]
IDS = [f"{d.kv}-{d.gamma}" if d else "plain" for d in DRAFTS]


@pytest.fixture(scope="module")
def letters() -> Tokenizer:
    """128 tokens of one to three ASCII letters."""
    names = [chr(97 + i % 26) * (1 + i % 3) + chr(65 + i // 26) for i in range(128)]
    backend = Backend(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=names[0]))
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend)


def outcomes(model, tokenizer, drafts, **params):
    """(text, ids, finish reason, logprobs) of one request under each of ``drafts``, all together, beside another."""
    engine = Engine(model, EngineConfig(max_model_len=256, num_pages=8 * len(drafts) + 8), tokenizer=tokenizer)
    settings = SamplingParams(**{"temperature": 0, "max_tokens": 48, "logprobs": 1, **params})
    seqs = [engine.sequence(engine.add(PROMPT, settings, draft)) for draft in drafts]
    engine.add([1, 2, 3], SamplingParams(seed=1, max_tokens=40), DraftConfig(kv="full", gamma=3))
    list(run(engine))
    assert engine.store.num_free_pages == engine.store.num_pages
    assert all(len(seq.logprobs) == len(seq.output_ids) for seq in seqs)
    assert not engine._texts
    texts = [tokenizer.decode(seq.output_ids) if seq.stop_text is None else seq.stop_text for seq in seqs]
    return [(text, s.output_ids, s.finish_reason, s.logprobs) for text, s in zip(texts, seqs, strict=True)]


def under_every_draft(model, tokenizer, **params):
    """The same as :func:`outcomes`, by the draft's name and without the log-probabilities."""
    return dict(zip(IDS, (o[:3] for o in outcomes(model, tokenizer, DRAFTS, **params)), strict=True))


def test_stop_strings_end_at_the_same_place(tiny, letters):
    ((text, ids, _, _),) = outcomes(tiny, letters, [None])
    ends, so_far = [], ""
    for token in ids:
        so_far += letters.decode([token])
        ends.append(len(so_far))
    inside = text[ends[2] - 1 : ends[3] + 1]  # starts and ends inside tokens
    early = text[ends[0]]
    spanning = text[ends[14] - 1 : ends[18] + 1]  # over the border of a block of 16
    unfinished = text[-2:] + "#"
    for stops in ([inside], [early], [spanning], [spanning, inside], ["#", early], [unfinished], [text[-1:]]):
        want = (text, ids, "length")
        if any(s in text for s in stops):
            complete = min(text.find(s) + len(s) for s in stops if s in text)
            kept = next(i for i, end in enumerate(ends) if end >= complete) + 1
            want = (text[: min(text.find(s) for s in stops if s in text[: ends[kept - 1]])], ids[:kept], "stop")
        assert under_every_draft(tiny, letters, stop=stops) == dict.fromkeys(IDS, want)


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "seed": 3}, {"temperature": 1, "top_k": 5, "seed": 4}])
def test_logprobs_equal_a_teacher_forced_pass(tiny, letters, params):
    got = outcomes(tiny, letters, DRAFTS, logprobs=5, **params)
    ids = got[0][1]
    assert [o[1] for o in got] == [ids] * len(DRAFTS)
    rows = forced_logits(tiny, [[*PROMPT, *ids]], len(ids) + 1)[:-1].log_softmax(dim=-1)
    ranks = 1 + (rows[:, None] > rows[:, :, None]).sum(dim=-1)
    for i, (token, row) in enumerate(zip(ids, rows, strict=True)):
        shown = {token, *row.topk(5).indices.tolist()}
        for name, (_, _, _, logprobs) in zip(IDS, got, strict=True):
            entry = logprobs[i]
            assert next(iter(entry)) == token, name
            assert {t: x.rank for t, x in entry.items()} == {t: int(ranks[i, t]) for t in shown}, name
            assert max(abs(x.logprob - float(row[t])) for t, x in entry.items()) < 1e-10, name
            assert entry[token].logprob != 0.0


@pytest.mark.parametrize("m", range(0, 12))
def test_a_stop_and_the_cap_at_the_same_token(tiny, letters, m):
    """Exactly the cap, whichever comes first (case O05)."""
    ((_, ids, _, _),) = outcomes(tiny, letters, [None], max_tokens=12)
    kept = ids[: min(8, ids.index(ids[m]) + 1)]
    want = (letters.decode(kept), kept, "stop" if ids[m] in kept else "length")
    assert under_every_draft(tiny, letters, max_tokens=8, stop_token_ids=(ids[m],)) == dict.fromkeys(IDS, want)


TEXT = "naïve 🙂🙂 한국어 日本語 ďábelské 👩‍🚀 end"


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


def test_characters_are_never_split(byte_level):
    """One byte per token: pieces join to the whole text, and no piece holds part of a character."""
    detokenizer = Detokenizer(byte_level)
    pieces = [detokenizer.push(token) for token in byte_level.encode(TEXT)]
    assert "".join(pieces) == TEXT == detokenizer.text
    assert not any("\ufffd" in piece for piece in pieces)
    assert detokenizer.finish() == ""


def test_truncated_and_invalid_bytes_show_once(byte_level):
    ids = byte_level.encode("ab한")
    detokenizer = Detokenizer(byte_level, ids[:-1])
    assert detokenizer.text == "ab"
    detokenizer.finish()
    assert detokenizer.text == byte_level.decode(ids[:-1])
    rng = random.Random(0)
    for _ in range(50):
        ids = [rng.randrange(256) for _ in range(30)]
        detokenizer = Detokenizer(byte_level, ids)
        detokenizer.finish()
        assert detokenizer.text == byte_level.decode(ids)


def test_control_tokens_cost_no_time(embedded_path):
    from longdraft.checkpoint.load import load_checkpoint

    tokenizer = load_checkpoint(embedded_path).tokenizer
    detokenizer = Detokenizer(tokenizer, [*tokenizer.encode("Once"), *[2] * 500])
    assert len(detokenizer._ids) < 5
    for token in tokenizer.encode(" upon a 🙂 time"):
        detokenizer.push(token)
    assert detokenizer.text == "Once upon a 🙂 time"


def test_a_stop_string_of_several_bytes(tiny, byte_level):
    from longdraft.core import Sequence
    from longdraft.engine.stops import cut

    ids = byte_level.encode("일 한국")
    seq = Sequence(0, [1], 1, SamplingParams(stop="한", max_tokens=99), seed=0, max_total=99)
    kept, reason = cut(seq, ids, Detokenizer(byte_level))
    assert (kept, reason, seq.stop_text) == (ids[:7], "stop", "일 ")


@pytest.mark.parametrize("bad", [[""], "", 5, [5], ["x"] * 17, ["x" * 257], [None]])
def test_bad_stops_are_refused(bad):
    with pytest.raises(InvalidValueError, match="stop"):
        SamplingParams(stop=bad)


@pytest.mark.parametrize("bad", [-1, 21, True, 1.5, "1"])
def test_bad_logprobs_are_refused(bad):
    with pytest.raises(InvalidValueError, match="logprobs"):
        SamplingParams(logprobs=bad)


def test_stop_strings_need_a_tokenizer(tiny):
    engine = Engine(tiny, EngineConfig(max_model_len=256, num_pages=4))
    with pytest.raises(InvalidValueError, match="tokenizer"):
        engine.add([1], SamplingParams(stop="x"))


def test_forks_and_preemption_keep_text_and_logprobs(tiny, letters):
    ((text, ids, _, logprobs),) = outcomes(tiny, letters, [None])
    stop = text[len(text) // 2 : len(text) // 2 + 4]
    (want,) = outcomes(tiny, letters, [None], stop=stop)
    engine = Engine(tiny, EngineConfig(max_model_len=256, num_pages=40), tokenizer=letters)
    params = SamplingParams(temperature=0, max_tokens=48, logprobs=1, stop=stop)
    first = engine.sequence(engine.add(PROMPT, params, DraftConfig(kv="full", gamma=3)))
    for _ in range(3):
        engine.step()
    second = engine.sequence(engine.fork(first.id, draft=DraftConfig(kv="streaming_llm", budget=8, gamma=2)))
    engine.scheduler.preempt(first)
    list(run(engine))
    for seq in (first, second):
        assert (seq.stop_text, seq.output_ids, seq.finish_reason) == want[:3]
        assert [list(entry) for entry in seq.logprobs] == [list(entry) for entry in want[3]]
    assert torch.tensor([e[t].logprob for e, t in zip(logprobs, ids, strict=True)]).isfinite().all()
