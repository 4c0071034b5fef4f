"""How often a draft's proposals stand: draft x budget x context x temperature, on several kinds of text.

``examine.py`` looks at a few prompts at a time; here they are put together. docs/acceptance.md has the protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np

from longdraft.bench import Arm, repeated_share
from longdraft.bench.acceptance_cells import Ground, Result, differences, make_cell
from longdraft.bench.examine import Examination, Sample, Setting, join, own_tokens
from longdraft.bench.tasks import Prompt, make_prompts
from longdraft.bench.turns import OnProgress, require_pages, resolved, told
from longdraft.config import MAX_SEED, as_int
from longdraft.errors import ContextLengthError, InvalidValueError
from longdraft.llm import LLM
from longdraft.sampling_params import SamplingParams

ROWS = 3  # side by side for each prompt: what is filled, a draft's row, and a run of that
CHUNK = 128  # prompt tokens per step that a bench's engine needs: every draft takes in one to two such steps for itself


@dataclass(frozen=True)
class AcceptancePlan:
    """Which cells are measured, on how much.

    Every task, context and temperature with every one of ``arms`` (their own γ does not matter) and ``gammas``;
    ``batch`` prompts at a time. Drafts are asked at ``positions`` places, the first of which is ``after`` tokens behind
    the prompt and what its output is made to begin with. Attention is looked at in ``mass_positions`` of them.
    ``baseline`` is the name of the draft that others are compared with.
    """

    tasks: tuple[str, ...]
    contexts: tuple[int, ...]
    arms: tuple[Arm, ...]
    gammas: tuple[int, ...]
    temperatures: tuple[float, ...] = (0.0, 1.0)
    prompts: int = 32
    positions: int = 64
    batch: int = 8
    mass_positions: int = 4
    after: int = 0
    baseline: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for context in self.contexts:
            as_int("context", context, 1, 2**31 - 1)
        as_int("prompts", self.prompts, 2, 10_000)  # no interval can be given for one
        as_int("positions", self.positions, 1, 2**20)
        as_int("after", self.after, 0, 2**20)
        as_int("batch", self.batch, 1, 4096)
        as_int("mass_positions", self.mass_positions, 0, 2**20)
        as_int("seed", self.seed, 0, MAX_SEED - self.prompts)
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature)
        names = list(dict.fromkeys(arm.name for arm in self.arms))
        if not self.arms or any(arm.config is None for arm in self.arms):
            fix = "Name those that auto would choose from."
            raise InvalidValueError("--draft", names, "must be at least one draft, and always the same one each", fix)
        if self.baseline is not None and self.baseline not in names:
            raise InvalidValueError("--baseline", self.baseline, f"must be one of the drafts ({', '.join(names)})")

    def setting(self, temperature: float) -> Setting:
        """How a group of prompts is examined."""
        return Setting(temperature, self.positions, self.gammas, self.mass_positions, self.seed, self.after)


def measure(
    llm: LLM, plan: AcceptancePlan, on_result: Callable[[Result], None], on_progress: OnProgress | None = None
) -> None:
    """Measure all cells; ``on_result`` gets those of each task, context and temperature together.

    When interrupted, also those of the current one, on the groups of prompts that are complete. The engine must have no
    other requests, and is left so. Raises ``ContextLengthError``, ``KVCapacityError`` or ``InvalidValueError`` before
    anything is computed where something cannot be done.
    """
    if llm.engine.num_unfinished:
        raise InvalidValueError("unfinished requests", llm.engine.num_unfinished, "must be 0 while drafts are measured")
    plan = replace(plan, arms=resolved(llm, plan.arms))
    for arm in plan.arms:
        llm.engine.runner.check(arm.draft)
    for context in plan.contexts:
        check_length(llm, context, plan.setting(0).life(Prompt([], [])))  # before there are prompts of that length
    for task, context in product(plan.tasks, plan.contexts):
        check_room(llm, plan, context, make_prompts(llm, task, plan.prompts, context, plan.seed))
    report = on_progress or (lambda name, done, total, unit: None)
    settings = list(product(plan.tasks, plan.contexts, plan.temperatures))
    for number, (task, context, temperature) in enumerate(settings, 1):
        name = f"{number} of {len(settings)}: {task} {context} T{temperature:g}"
        _Trial(llm, plan, task, context, temperature).run(on_result, partial(_named, report, name))


def _named(report: OnProgress, setting: str, name: str, done: int, total: int, unit: str) -> None:
    report(f"{setting}{name}", done, total, unit)


def check_room(llm: LLM, plan: AcceptancePlan, context: int, prompts: Sequence[Prompt]) -> None:
    """Refuse a context at which the rows of a group do not fit side by side."""
    life, config = max(plan.setting(0).life(p) for p in prompts), llm.engine.config
    check_length(llm, context, life)
    batch = min(plan.batch, plan.prompts)
    require_pages(llm, batch, context, ROWS, life + min(context, own_tokens(llm)))
    if ROWS * batch > config.max_num_seqs:
        raise InvalidValueError("max_num_seqs", config.max_num_seqs, f"must be at least {ROWS * batch} for these cells")


def check_length(llm: LLM, context: int, life: int) -> None:
    """``ContextLengthError`` unless ``life`` new tokens fit behind a prompt of ``context``."""
    limit = llm.engine.config.max_tokens_per_request - life
    if context > limit:
        raise ContextLengthError("--context", context, f"must be at most {limit}, to leave room for {life} new tokens")


class _Trial:
    """One task, context and temperature."""

    def __init__(self, llm: LLM, plan: AcceptancePlan, task: str, context: int, temperature: float) -> None:
        self.llm, self.plan, self.task, self.context, self.temperature = llm, plan, task, context, temperature
        self.arms = [replace(arm, draft=replace(arm.draft, gamma=max(plan.gammas))) for arm in plan.arms]
        self.groups: list[dict[Arm, Sample]] = []
        self.outputs: list[list[int]] = []  # by plain decoding, where it is measured
        self.right: list[bool] = []  # whether it gave the answer

    def run(self, on_result: Callable[[Result], None], report: OnProgress) -> None:
        """All prompts, group by group."""
        plan = self.plan
        prompts = make_prompts(self.llm, self.task, plan.prompts, self.context, plan.seed)
        try:
            for first in range(0, len(prompts), plan.batch):
                examined = Examination(
                    self.llm, prompts[first : first + plan.batch], plan.setting(self.temperature), first
                )
                try:
                    with told(self.llm, examined.sources, self.arms):
                        self._examine(examined, report)
                finally:
                    examined.close()
        finally:
            if len(self.outputs) > 1:
                on_result(self._result())

    def _examine(self, examined: Examination, report: OnProgress) -> None:
        """A group becomes part of the result when all drafts have had their turn: they are compared on equal terms."""
        found: dict[Arm, Sample] = {}
        examined.prepare(f", fill from prompt {examined.first + 1}", report)
        for arm in self.arms:
            found[arm] = examined.sample(arm)
            done = examined.first * len(self.arms) + len(examined.prompts) * len(found)
            report("", done, self.plan.prompts * len(self.arms), "prompts x drafts")
        self.groups.append(found)
        for prompt, ids in zip(examined.prompts, examined.truth, strict=True):
            output = ids[len(prompt.ids) + len(prompt.then) :]
            self.outputs.append(output)
            if prompt.answer is not None:
                self.right.append(self.llm.tokenizer.decode(output).strip().startswith(prompt.answer))

    def _result(self) -> Result:
        plan = self.plan
        ground = Ground(
            task=self.task,
            context=self.context,
            temperature=self.temperature,
            positions=plan.positions,
            after=plan.after,
            gammas=plan.gammas,
            seed=plan.seed,
            repeated_8gram=repeated_share(self.outputs),
            answered=float(np.mean(self.right)) if self.right else None,
        )
        samples = {arm: join([group[arm] for group in self.groups]) for arm in self.arms}
        cells = []
        for arm, sample in samples.items():
            draft = self.llm.engine.runner.draft(arm.draft)
            sizes = draft.bytes_read(self.context), draft.bytes(self.context), draft.note_bytes(self.context)
            cells += [make_cell(ground, arm, n, sample, *sizes) for n in range(len(plan.gammas))]
        return Result(cells, list(differences(ground, samples, plan.baseline)))
