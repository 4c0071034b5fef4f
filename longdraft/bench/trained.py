"""What a recipe trained, measured together: tokens per round on held-out texts (arXiv:2504.06419).

Beside the drafts stands the target itself over the same window, untrained: all of it (MagicDec, arXiv:2408.11049), and
as few of its layers as a draft has, without anything else: those that the draft began as, and as many from end to end.
Several seeds of an arm are one method: their rounds are counted together, so intervals are those over texts, not over
seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from longdraft.bench.modelled import Drafting
from longdraft.bench.tau import Counts, Method, Row, TauPlan, against, measure, report, table
from longdraft.checkpoint.base import Checkpoint
from longdraft.checkpoint.load import load_checkpoint
from longdraft.checkpoint.spire import is_spire, read_spire
from longdraft.kv.select.streaming_llm import StreamingLLM
from longdraft.models.feedback import Ends, FeedbackDraft
from longdraft.models.transformer import Transformer
from longdraft.prompts import require
from longdraft.train.data import held_out
from longdraft.train.prune_init import spread_layers
from longdraft.train.recipe import DraftRecipe, Recipe
from longdraft.train.rounds import FeedbackDrafter, Filled, ModelDrafter
from longdraft.train.stages import Outcome, Workshop

WINDOWED = "target over the same window"
SAME_LAYERS, SPREAD_LAYERS = "layer skip, same layers", "layer skip, spaced"
BASELINE = "spire"


@dataclass(frozen=True)
class Evaluated:
    """Every method's counts, its rows for every γ, and where the stages' own counts are."""

    k: int
    texts: int
    baseline: str
    counts: Mapping[str, Sequence[Counts]]
    rows: Sequence[Row]
    stages: Mapping[str, Sequence[Counts]]

    def differences(self) -> Iterator[dict[str, object]]:
        """From the baseline at γ = k, on the same texts."""
        for name, counts, found in against(self.counts, self.baseline, self.k):
            place = {"method": name, "context": counts.context, "temperature": counts.temperature}
            yield place | {"minus": self.baseline, **asdict(found)}

    def json(self) -> dict[str, object]:
        """All of it."""
        alone = {name: [c.ratio(self.k).estimate().value for c in counts] for name, counts in self.stages.items()}
        differences = list(self.differences())
        return {"k": self.k, "texts": self.texts, "rows": report(self.rows), "differences": differences, "alone": alone}


def tau_plan(recipe: Recipe) -> TauPlan:
    """Rounds as a recipe wants them. Raises ``InvalidValueError``."""
    how = recipe.evaluate
    return TauPlan(tuple(how.contexts), tuple(how.temperatures), recipe.loss.k, how.span, how.batch)


def evaluate(
    workshop: Workshop,
    done: Mapping[str, Outcome],
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluated:
    """Measure the drafts that ``workshop`` trained. Raises ``InvalidValueError`` where held-out texts are too short."""
    recipe, plan, target = workshop.recipe, tau_plan(workshop.recipe), workshop.target()
    length = max(plan.places(context).length for context in plan.contexts)
    stream = workshop.streams(require(target.tokenizer)).held_out
    texts = next(held_out(stream, [length], recipe.evaluate.texts * length))
    model = Transformer(target.config, target.weights)
    stages = [(name, own.recipe.draft) for name, _, own in workshop.drafts(target.config) if name in done]
    methods = [_method(name, draft, done[name], target) for name, draft in stages]
    untrained = list(_untrained(target, recipe.draft, _layers(done.values())))
    found = measure(model, texts, [*methods, *untrained], plan, on_progress)
    arms: dict[str, list[Method]] = {}
    for method in methods:
        arms.setdefault(method.name.rsplit("-", 1)[0] if recipe.arms else method.name, []).append(method)
    alone = {method.name: found[method.name] for method in methods}
    counts = {arm: [_together(c) for c in zip(*(found[m.name] for m in of), strict=True)] for arm, of in arms.items()}
    counts |= {method.name: found[method.name] for method in untrained}
    named = [replace(of[0], name=arm) for arm, of in arms.items()] + untrained
    rows = [row for method in named for row in table(target.config, method, counts[method.name])]
    baseline = BASELINE if BASELINE in counts else next(iter(counts))
    return Evaluated(plan.k, len(texts), baseline, counts, rows, alone)


def _together(counts: Sequence[Counts]) -> Counts:
    """Rounds of several drafts on the same texts."""
    return replace(counts[0], tokens=sum(c.tokens for c in counts), rounds=sum(c.rounds for c in counts))


def _layers(outcomes: Iterable[Outcome]) -> tuple[int, ...]:
    """Those of the target that SPIRe drafts of a recipe began as; none where it has no such draft."""
    models = (outcome.model for outcome in outcomes if is_spire(outcome.model))
    return next((tuple(read_spire(model, model.parent.name).config.layers) for model in models), ())


def _untrained(target: Checkpoint, draft: DraftRecipe, layers: tuple[int, ...]) -> Iterator[Method]:
    """The target over the draft's window: all of it, its ``layers`` alone, and as many from end to end, if others."""
    read = StreamingLLM(budget=draft.window + draft.sinks, sinks=draft.sinks)
    kept: dict[str, tuple[int, ...] | None] = {WINDOWED: None}
    if layers:
        kept[SAME_LAYERS] = layers
        spread = spread_layers(len(layers), target.config.num_layers)
        kept |= {SPREAD_LAYERS: spread} if spread != layers else {}
    for name, own in kept.items():
        runs = target.config if own is None else replace(target.config, num_layers=len(own))
        make = partial(ModelDrafter, select=read.select, layers=own)
        yield Method(name, make, Drafting(runs, read.budget))


def _method(name: str, draft: DraftRecipe, outcome: Outcome, target: Checkpoint) -> Method:
    """A stage's draft, as it was written."""
    if is_spire(outcome.model):
        return _spire(name, outcome.model, outcome.progress.tokens, target)
    small = load_checkpoint(outcome.model)
    model = Transformer(small.config, small.weights)
    select, read = None, None
    if draft.learns == "target":  # it learned to read no more
        read = draft.window + draft.sinks
        select = StreamingLLM(budget=read, sinks=draft.sinks).select

    def make(filled: Filled) -> ModelDrafter:
        return ModelDrafter(Filled(model, filled.texts, filled.places), select)

    return Method(name, make, Drafting(small.config, read), tokens=outcome.progress.tokens)


def _spire(name: str, folder: Path, tokens: int, target: Checkpoint) -> Method:
    read = read_spire(folder, name)
    read.check_target(target)
    draft = FeedbackDraft(read.config, target.config, read.tensors(), Ends.of(target.config, target.weights))
    own = read.config.context == "own"
    runs = replace(target.config, num_layers=len(read.config.layers))
    costs = Drafting(runs, read.config.window + read.config.sinks, read.config.memory != "off")
    return Method(name, lambda filled: FeedbackDrafter(draft, filled), costs, () if own else draft.taps, tokens)
