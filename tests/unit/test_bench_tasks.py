"""Texts that acceptance is measured on: exact lengths, answers where they belong, chance from the seed alone."""

import re
import sys
from types import SimpleNamespace

import pytest

from longdraft.bench import code_text
from longdraft.bench.prompts import NOVELS, hay, novel
from longdraft.bench.tasks import BETWEEN, HOPS, KEYS, RETRIEVAL, TASKS, make_prompts
from longdraft.checkpoint.load import load_checkpoint
from longdraft.errors import InvalidValueError

QUESTION = "\n\nQuestion: "


@pytest.fixture(scope="module")
def llm(embedded_path):
    """All that the texts need of one."""
    checkpoint = load_checkpoint(embedded_path)
    return SimpleNamespace(tokenizer=checkpoint.tokenizer, model=SimpleNamespace(config=checkpoint.config))


def text(llm, ids):
    return llm.tokenizer.decode(ids)


@pytest.mark.parametrize("task", TASKS)
def test_lengths_are_exact_and_the_seed_decides(llm, task):
    for context in (450, 1301):
        prompts = make_prompts(llm, task, 5, context, seed=3)
        assert [len(prompt.ids) for prompt in prompts] == [context] * 5
        assert len({tuple(prompt.ids) for prompt in prompts}) == 5
        assert make_prompts(llm, task, 5, context, seed=3) == prompts
        assert make_prompts(llm, task, 2, context, seed=3) == prompts[:2]  # the count changes nothing
        assert (make_prompts(llm, task, 5, context, seed=4) == prompts) == (task == "prose")


@pytest.mark.parametrize("kind", RETRIEVAL)
def test_facts_are_in_the_hay_and_the_answer_is_not_given_away(llm, kind):
    for prompt in make_prompts(llm, kind, 6, 700):
        body, _, end = text(llm, prompt.ids).rpartition(QUESTION)
        assert end.count("\nAnswer: ") == 1
        assert prompt.answer not in end
        if kind == "variables":
            value = re.search(r"stand for (\d+)", end)[1]
            names = re.findall(rf"\b([A-Z]{{3}}) stands for {value}\.", body)
            while found := re.findall(rf"\b([A-Z]{{3}}) stands for whatever {names[-1]} stands for\.", body):
                assert body.index(f" {names[-1]} stands for") < body.index(f" {found[0]} stands for")
                names += found
            assert prompt.answer == ", ".join(names)
            assert len(names) == HOPS + 1
        else:
            key = re.search(r"number of the (.+)\?", end)[1]
            assert re.findall(rf"The number of the {key} is (\d+)\.", body) == [prompt.answer]
            numbers = re.findall(r"The number of the \w+ \w+ is (\d{7})\.", body)
            assert len(set(numbers)) == (KEYS if kind == "multikey" else 2)


def test_facts_stand_at_all_depths_and_behind_sentences(llm):
    prompts = make_prompts(llm, "needle", 40, 2000)
    depths, behind = [], 0
    for prompt in prompts:
        body = text(llm, prompt.ids)
        for match in re.finditer(r" The number of the", body.rpartition(QUESTION)[0]):
            depths.append(match.start() / len(body))
            behind += body[match.start() - 1] in '.!?"'
    assert (min(depths) < 0.1, max(depths) > 0.9) == (True, True)
    assert behind > 0.8 * len(depths)  # not where a sentence goes on for long, or the hay ends
    assert 0.4 < sum(depths) / len(depths) < 0.6


@pytest.mark.parametrize("kind", RETRIEVAL)
def test_forms_of_a_task(llm, kind):
    """The same facts; the question closes the prompt, lies 64 tokens and more before the answer, or is a second one."""
    plain, early, second = (make_prompts(llm, f"{kind}{form}", 4, 800) for form in ("", "-early", "-second"))
    for a, b, c in zip(plain, early, second, strict=True):
        assert (a.then, b.then, c.ids) == ([], [], a.ids)
        assert a.answer == b.answer
        ends = [text(llm, prompt.ids).rpartition(QUESTION)[2] for prompt in (a, b)]
        assert ends[1].split("\nAnswer: ")[1] == ends[0].split("\nAnswer: ")[1]
        hidden = ends[1].removeprefix(ends[0].split("\nAnswer: ")[0]).split("\nAnswer: ")[0]
        assert len(llm.tokenizer.encode(hidden)) >= BETWEEN - 2  # the same text, tokenised at other borders
        turn = text(llm, c.then)
        assert turn.startswith(f" {a.answer}.{QUESTION}")
        assert c.answer != a.answer
        assert c.answer not in turn
        assert c.answer.split(", ")[0] in text(llm, c.ids)


def test_code_is_the_standard_library(llm):
    rows = [prompt.ids for prompt in make_prompts(llm, "code", 3, 600)]
    sources = "".join(code_text._read(name) for name in code_text._modules())
    for row in rows:
        assert text(llm, row)[:500] in sources
    assert len({tuple(row) for row in code_text.code_windows(llm.tokenizer, 260, 40)}) > 250  # a second lap, too


def test_hay_goes_round(llm):
    size = sum(len(novel(name)) for name in NOVELS)
    ids = hay(llm.tokenizer, size - 50, 200)
    assert len(ids) == 200
    assert hay(llm.tokenizer, 2 * size - 50, 200) == ids


def test_what_cannot_be_made_is_refused(llm, monkeypatch):
    with pytest.raises(InvalidValueError, match="--task"):
        make_prompts(llm, "needles", 1, 500)
    with pytest.raises(InvalidValueError, match=r"--context.*at least"):
        make_prompts(llm, "multikey", 1, 100)
    with pytest.raises(InvalidValueError, match="tokenizer"):
        make_prompts(SimpleNamespace(tokenizer=None), "prose", 1, 100)
    monkeypatch.setattr(sys.modules["sysconfig"], "get_path", lambda name: "/no/such/folder")
    code_text._modules.cache_clear()
    with pytest.raises(InvalidValueError, match="sources"):
        make_prompts(llm, "code", 1, 100)
    code_text._modules.cache_clear()
