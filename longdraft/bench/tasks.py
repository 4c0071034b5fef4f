"""What is measured on: prose, code, random tokens, and retrieval tasks in RULER's manner (arXiv:2404.06654).

A retrieval task hides facts in prose and asks for them. Where the question stands decides what a selection that looks
at the prompt's last tokens can know, so each kind comes in three forms:

    needle         hay with the facts | question | lead                       the question closes the prompt
    needle-early   hay with the facts | question | 64 tokens of hay | lead    it lies outside an observation window
    needle-second  hay with the facts | question | lead || answer | another question | lead

What stands behind ``||`` is no prompt: the tokens come as output, as in a second turn, so that what was selected when
the prompt was filled is out of date where the measurement begins.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from longdraft.bench.code_text import code_windows
from longdraft.bench.prompts import hay, windows
from longdraft.checkpoint.tokenizer import Tokenizer
from longdraft.errors import InvalidValueError
from longdraft.llm import LLM
from longdraft.prompts import require

BETWEEN = 64  # tokens between an early question and the lead of its answer
SENTENCE = 64  # tokens within which a sentence is expected to end
KEYS, HOPS = 8, 4
KINDS = ("small", "amber", "silent", "northern", "painted", "broken", "golden", "hollow")
THINGS = ("falcon", "lantern", "harbour", "orchard", "compass", "chapel", "bridge", "violin", "garden", "mirror")
LETTERS = "BCDFGHJKLMNPQRSTVWXZ"


@dataclass(frozen=True)
class Prompt:
    """``ids`` are filled; ``then`` are the output's first tokens, whatever the model would say.

    ``answer``: what should come next, where there is a right answer.
    """

    ids: list[int]
    then: list[int]
    answer: str | None = None


@dataclass(frozen=True)
class Facts:
    """Statements in the order in which they have to be read, and questions with their answers, one or two."""

    statements: list[str]
    questions: list[tuple[str, str]]
    lead: str


def make_prompts(llm: LLM, task: str, count: int, context: int, seed: int = 0) -> list[Prompt]:
    """``count`` different prompts of exactly ``context`` ids for a task of ``TASKS``; ``seed`` decides on all chance.

    Raises ``InvalidValueError`` for an unknown task, and where ``context`` is too short or too long for it.
    """
    if task == "random":
        return [Prompt(_random_ids(llm, context, random.Random(f"{seed} random {n}")), []) for n in range(count)]  # noqa: S311
    tokenizer = require(llm.tokenizer)
    if task == "prose":
        return [Prompt(ids, []) for ids in windows(llm, count, context)]
    if task == "code":
        return [Prompt(ids, []) for ids in code_windows(tokenizer, count, context, seed)]
    check_task(task)
    kind, _, form = task.partition("-")
    return [_retrieval(tokenizer, kind, form, context, random.Random(f"{seed} {kind} {n}")) for n in range(count)]  # noqa: S311


def check_task(task: str) -> None:
    """``InvalidValueError`` unless there is such a task."""
    if task not in TASKS:
        raise InvalidValueError("--task", task, f"must be one of {', '.join(TASKS)}")


def _random_ids(llm: LLM, count: int, chance: random.Random) -> list[int]:
    """Ids of the whole vocabulary, each as likely as any other: text that nothing is known of."""
    return [chance.randrange(llm.model.config.vocab_size) for _ in range(count)]


def _retrieval(tokenizer: Tokenizer, kind: str, form: str, context: int, chance: random.Random) -> Prompt:
    facts = RETRIEVAL[kind](chance)

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    start, lead = tokenizer.encode("")[:1], ids(f"\nAnswer: {facts.lead}")
    statements = [ids(f" {statement}") for statement in facts.statements]
    question, between = ids(f"\n\nQuestion: {facts.questions[0][0]}"), BETWEEN if form == "early" else 0
    fixed = len(start) + sum(map(len, statements)) + len(question) + between + len(lead)
    if context < fixed + SENTENCE:
        raise InvalidValueError("--context", context, f"must be at least {fixed + SENTENCE} for this {kind} task")
    prose = hay(tokenizer, chance.randrange(2**30), context - fixed + between)
    body, rest = prose[: context - fixed], prose[context - fixed :]
    prompt = [*start, *_hidden(tokenizer, body, statements, chance), *question, *rest, *lead]
    if form != "second":
        return Prompt(prompt, [], facts.questions[0][1])
    then = f" {facts.questions[0][1]}.\n\nQuestion: {facts.questions[1][0]}"
    return Prompt(prompt, [*ids(then), *lead], facts.questions[1][1])


def _hidden(tokenizer: Tokenizer, body: list[int], statements: list[list[int]], chance: random.Random) -> list[int]:
    """``body`` with the statements at random depths, in their order, each behind a sentence if one ends near."""
    depths = sorted(chance.randrange(len(body) + 1) for _ in statements)
    places = [_sentence_end(tokenizer, body, depth) for depth in depths]
    out, last = [], 0
    for place, statement in zip(places, statements, strict=True):
        out += body[last:place] + statement
        last = place
    return out + body[last:]


def _sentence_end(tokenizer: Tokenizer, ids: list[int], at: int) -> int:
    for n in range(at, min(at + SENTENCE, len(ids))):
        if tokenizer.decode([ids[n]]).rstrip().endswith((".", "!", "?", '."')):
            return n + 1
    return at


def _numbers(chance: random.Random, count: int) -> Facts:
    """``count`` things with a number each; two of them are asked for."""
    names = chance.sample([f"{kind} {thing}" for kind in KINDS for thing in THINGS], count)
    numbers = [str(n) for n in chance.sample(range(10**6, 10**7), count)]
    statements = [f"The number of the {n} is {x}." for n, x in zip(names, numbers, strict=True)]
    pairs = chance.sample(list(zip(names, numbers, strict=True)), 2)
    return Facts(statements, [(f"What is the number of the {n}?", x) for n, x in pairs], "The number is")


def _needle(chance: random.Random) -> Facts:
    """A fact, and another one for a second question."""
    return _numbers(chance, 2)


def _multikey(chance: random.Random) -> Facts:
    """Facts of the same form, of which the key tells the one that is wanted."""
    return _numbers(chance, KEYS)


def _variables(chance: random.Random) -> Facts:
    """Two chains of names, each standing for the name before it, the first for a number; which are a number's names?"""
    names = ["".join(chance.sample(LETTERS, 3)) for _ in range(2 * (HOPS + 1))]
    while len(set(names)) < len(names):
        names = ["".join(chance.sample(LETTERS, 3)) for _ in names]
    chains, values = (names[: HOPS + 1], names[HOPS + 1 :]), chance.sample(range(10_000, 100_000), 2)
    waiting = []
    for chain, value in zip(chains, values, strict=True):
        links = [f"{new} stands for whatever {old} stands for." for old, new in zip(chain, chain[1:], strict=False)]
        waiting.append([f"{chain[0]} stands for {value}.", *links])
    statements = []
    while any(waiting):
        statements.append(chance.choice([chain for chain in waiting if chain]).pop(0))
    asked = [(f"Which names stand for {v}?", ", ".join(chain)) for v, chain in zip(values, chains, strict=True)]
    return Facts(statements, asked, "They are")


RETRIEVAL: dict[str, Callable[[random.Random], Facts]] = {
    "needle": _needle,
    "multikey": _multikey,
    "variables": _variables,
}
FORMS = ("", "-early", "-second")
TEXTS = ("prose", "code", "random")  # without a question
TASKS = (*TEXTS, *(f"{kind}{form}" for kind in RETRIEVAL for form in FORMS))
