"""A recipe carried out: its target first, if that is to be trained, then what drafts for it, each in its own folder.

OUT/tokenizer   a vocabulary that was learned
OUT/tokens-…    the texts' ids
OUT/written     texts that the target writes itself, if the recipe wants them
OUT/said-…      what the target says of the texts, if that is to be kept
OUT/target, OUT/draft   state.safetensors, log.jsonl and, in the end, model/ (see ``loop.py``); with arms, a folder
                OUT/ARM-SEED for each in the place of OUT/draft
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from longdraft.checkpoint.base import Checkpoint
from longdraft.checkpoint.load import load_checkpoint
from longdraft.checkpoint.tokenizer import Tokenizer
from longdraft.checkpoint.tokenizer_folder import read_tokenizer
from longdraft.engine.sizing import auto_dtype, resolve_block_size, resolve_dtype
from longdraft.errors import InvalidValueError
from longdraft.models.config import ModelConfig, parse_hf_config
from longdraft.models.transformer import Transformer
from longdraft.models.weights import fingerprint
from longdraft.prompts import require
from longdraft.train import prune_init
from longdraft.train.arms import ARMS, VANILLA, TrainedAs, an_eighth, student
from longdraft.train.corpora import Document, documents
from longdraft.train.data import Batches, Streams, held_out, tokenize
from longdraft.train.distill import Distillation, Live, Source, Student, narrowed
from longdraft.train.lm import LanguageModel, random_tensors
from longdraft.train.loop import MODEL, Hooks, Job, RunConfig, Trainer, digest
from longdraft.train.objective import Objective
from longdraft.train.recipe import Recipe
from longdraft.train.shards import Shelf
from longdraft.train.state import Progress, read_log
from longdraft.train.teacher import Teacher
from longdraft.train.vocabulary import learn_tokenizer
from longdraft.train.written import written

WRITTEN = "written"
PROBES = 8  # held-out sequences by which influential layers are found


@dataclass(frozen=True)
class Outcome:
    """How a stage ended; figures are those of held-out texts before it began and when it ended."""

    progress: Progress
    finished: bool
    before: Mapping[str, object]
    after: Mapping[str, object]
    seconds: float
    model: Path


@dataclass(frozen=True)
class _Lesson:
    """What all drafts of a target share: texts, the target, which of its layers they begin as, and its fingerprint.

    ``said``: what it says of the texts, if that is written down.
    """

    target: Checkpoint
    streams: Streams
    teacher: Teacher
    layers: tuple[int, ...]
    made_for: str
    said: Shelf | None = None

    def live(self, taps: tuple[int, ...]) -> Live:
        """The target itself."""
        return Live(self.teacher, taps)

    def source(self, taps: tuple[int, ...]) -> Source:
        """Of the residual streams ``taps`` and the target's distributions."""
        known = self.said is not None and taps in ((), self.said.taps)
        return self.said if known else self.live(taps)


@dataclass(frozen=True)
class Workshop:
    """Carries a recipe out in a folder; ``hooks`` gives those of a stage by its name and its steps.

    ``on_said``: told how far what the target says is written down: texts of which length, done, and all.
    ``on_written``: how far its own texts are: tokens written, and all.
    """

    recipe: Recipe
    out: Path
    resume: bool = False
    hooks: Callable[[str, RunConfig], Hooks] = lambda name, run: Hooks()
    on_said: Callable[[int, int, int], None] = lambda length, done, total: None
    on_written: Callable[[int, int], None] = lambda done, total: None

    def run(self) -> dict[str, Outcome]:
        """Every stage's outcome by its name; a stage that was stopped is the last one.

        Raises ``InvalidValueError``, ``TrainingError`` and what loading a model raises.
        """
        recipe, done = self.recipe, {}
        self.out.mkdir(parents=True, exist_ok=True)
        if recipe.target.model is not None:
            done["target"] = self._train_target()
            if recipe.draft is None or not done["target"].finished:
                return done
        lesson = self._lesson()
        for name, how, own in self.drafts(lesson.target.config):
            done[name] = own._train_draft(name, how, lesson)
            if not done[name].finished:
                break
        return done

    def target(self) -> Checkpoint:
        """The model that drafts are for, once there is one."""
        return load_checkpoint(self.recipe.target.path or self.out / "target" / MODEL)

    def streams(self, tokenizer: Tokenizer) -> Streams:
        """The documents' ids."""
        return tokenize(self._texts(), tokenizer, self.recipe.data.held_out, self.out)

    def drafts(self, target: ModelConfig) -> Iterator[tuple[str, TrainedAs, Workshop]]:
        """Every draft's stage, how it is trained, and the workshop of its own recipe."""
        recipe, arms = self.recipe, self.recipe.arms
        if arms is None:
            yield "draft", TrainedAs(), self
            return
        small = replace(recipe.draft, kind="model", model=arms.vanilla or an_eighth(target), learns="text")
        for seed in range(recipe.run.seed, recipe.run.seed + arms.seeds):
            seeded = replace(recipe, run=replace(recipe.run, seed=seed))
            for arm in arms.names:
                own = replace(seeded, arms=None, draft=small) if arm == VANILLA else seeded
                yield f"{arm}-{seed}", ARMS.get(arm, TrainedAs()), replace(self, recipe=own)

    def _texts(self) -> list[Document]:
        return documents(self.recipe.data.corpora, self.recipe.data.paths)

    def _train_target(self) -> Outcome:
        target = self.recipe.target
        config = parse_hf_config(target.model, source="target.model")
        tokenizer = self._tokenizer(config.vocab_size)
        tensors = random_tensors(config, target.run.seed)
        objective = LanguageModel(target.model, tensors, tokenizer)
        return self._stage("target", objective, self.streams(tokenizer), sorted(target.model.items()))

    def _tokenizer(self, vocab_size: int) -> Tokenizer:
        """The recipe's, or one that is learned of all texts, held-out ones too: it is no model of them."""
        if self.recipe.target.tokenizer is not None:
            return require(load_checkpoint(self.recipe.target.tokenizer).tokenizer)
        folder = self.out / "tokenizer"
        if self.resume and (folder / "tokenizer_config.json").exists():
            return read_tokenizer(folder)
        return learn_tokenizer((text.text for text in self._texts()), vocab_size, folder)

    def _lesson(self) -> _Lesson:
        """What all drafts share."""
        target, draft = self.target(), self.recipe.draft
        streams = self._with_written(self.streams(require(target.tokenizer)), target)
        teacher = self._teacher(target)
        layers = self._layers(teacher.model, streams) if draft.kind == "spire" else ()
        lesson = _Lesson(target, streams, teacher, layers, fingerprint(target.config, target.weights))
        if not self.recipe.data.cache or not layers:  # a plain model may not ask the target at all
            return lesson
        taps = draft.feedback(layers).taps(target.config.num_layers)
        said = Shelf.written(self.out, target, self._batches(streams).texts(), lesson.live(taps), self.on_said)
        return replace(lesson, said=said)

    def _with_written(self, streams: Streams, target: Checkpoint) -> Streams:
        """With what the target writes itself, if the recipe wants that.

        Prompts come from no document that is held out, and what follows is trained on: held-out texts stay the same.
        """
        data, out = self.recipe.data, self.out / WRITTEN
        if data.written is None:
            return streams
        texts = written(out, data.written, data.prompted(), target, self.recipe.target.dtype, self.on_written)
        return streams.with_texts(texts, require(target.tokenizer).eos_token_id)

    def _train_draft(self, name: str, how: TrainedAs, lesson: _Lesson) -> Outcome:
        recipe = self.recipe
        objective = self._spire(how, lesson) if recipe.draft.kind == "spire" else self._small_model(lesson)
        what = (recipe.draft, how, recipe.loss, recipe.data.cache, lesson.made_for)
        return self._stage(name, objective, lesson.streams, *what)

    def _small_model(self, lesson: _Lesson) -> Objective:
        """A plain model with the target's vocabulary."""
        draft, target = self.recipe.draft, lesson.target
        raw = {"vocab_size": target.config.vocab_size, **draft.model}
        config = parse_hf_config(raw, source="draft.model")
        if config.vocab_size != target.config.vocab_size:
            limit = f"must be the target's {target.config.vocab_size}"
            raise InvalidValueError("draft.model.vocab_size", config.vocab_size, limit, "Leave it out.")
        model = LanguageModel(raw, random_tensors(config, self.recipe.run.seed), target.tokenizer)
        if draft.learns == "text":
            return model
        learns = Student(narrowed(model.model, draft.window, draft.sinks), model.parameters, model.export)
        return Distillation(learns, lesson.source(()), self.recipe.loss)

    def _teacher(self, target: Checkpoint) -> Teacher:
        auto = auto_dtype(target.config, torch.device("cpu"), resolve_block_size(16))
        dtype = resolve_dtype("target.dtype", self.recipe.target.dtype, auto)
        return Teacher(Transformer(target.config, target.weights, dtype=dtype))

    def _spire(self, how: TrainedAs, lesson: _Lesson) -> Objective:
        recipe = self.recipe
        how = replace(how, random=how.random or recipe.draft.init == "random")
        learns, loss = student(how, lesson.target, recipe.draft.feedback(lesson.layers), recipe.loss, recipe.run.seed)
        own = learns.model.config.context == "own"
        return Distillation(learns, lesson.source(() if own else learns.model.taps), loss)

    def _layers(self, model: Transformer, streams: Streams) -> tuple[int, ...]:
        """Which of the target's layers the draft begins as."""
        said, total = self.recipe.draft.layers, model.config.num_layers
        if not isinstance(said, str):
            return tuple(said)
        how, count = said.split(":")
        if how == "influential":
            length = min(self.recipe.run.lengths)
            rows = next(held_out(streams.held_out, [length], PROBES * length)).tolist()
            return prune_init.influential_layers(int(count), prune_init.block_influence(model, rows))
        return getattr(prune_init, f"{how}_layers")(int(count), total)

    def _batches(self, streams: Streams) -> Batches:
        """A draft's."""
        run = self.recipe.run
        return Batches(streams.train, run.lengths, run.batch_tokens, run.seed, fixed=self.recipe.data.cache)

    def _stage(self, name: str, objective: Objective, streams: Streams, *what: object) -> Outcome:
        """Train one thing; ``what`` it is decides, with texts and settings, whether a run may go on."""
        section = self.recipe.target if name == "target" else self.recipe
        optim, run, start = section.optim, section.run, time.perf_counter()
        own = Batches(streams.train, run.lengths, run.batch_tokens, run.seed)
        batches = own if name == "target" else self._batches(streams)
        tested = list(held_out(streams.held_out, sorted(run.lengths), run.eval_tokens))
        job = Job(objective, batches, tested, optim, run, digest(name, *what, optim, run.decisive, streams.digest))
        progress = Trainer(job, self.out / name, self.hooks(name, run)).train(self.resume)
        figures = [record["held_out"] for record in read_log(self.out / name) if "held_out" in record]
        seconds = time.perf_counter() - start
        return Outcome(progress, progress.step == run.steps, figures[0], figures[-1], seconds, self.out / name / MODEL)
