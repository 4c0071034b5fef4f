"""A recipe carried out: its target first, if that is to be trained, then what drafts for it, each in its own folder.

OUT/tokenizer   a vocabulary that was learned
OUT/tokens-…    the texts' ids
OUT/target, OUT/draft   state.safetensors, log.jsonl and, in the end, model/ (see ``loop.py``)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from longdraft.checkpoint.base import Checkpoint
from longdraft.checkpoint.load import load_checkpoint
from longdraft.checkpoint.tokenizer import Tokenizer
from longdraft.checkpoint.tokenizer_folder import read_tokenizer
from longdraft.engine.sizing import auto_dtype, resolve_block_size, resolve_dtype
from longdraft.errors import InvalidValueError
from longdraft.models.config import parse_hf_config
from longdraft.models.feedback import Ends, FeedbackDraft
from longdraft.models.transformer import Transformer
from longdraft.models.weights import fingerprint
from longdraft.prompts import require
from longdraft.train import prune_init
from longdraft.train.corpora import Document, documents
from longdraft.train.data import Batches, Streams, held_out, tokenize
from longdraft.train.distill import Distillation, Live, Student, narrowed
from longdraft.train.lm import LanguageModel, random_tensors
from longdraft.train.loop import MODEL, Hooks, Job, RunConfig, Trainer, digest
from longdraft.train.objective import Objective
from longdraft.train.recipe import Recipe
from longdraft.train.state import Progress, read_log
from longdraft.train.teacher import Teacher
from longdraft.train.vocabulary import learn_tokenizer

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
class Workshop:
    """Carries a recipe out in a folder; ``hooks`` gives those of a stage by its name and its steps."""

    recipe: Recipe
    out: Path
    resume: bool = False
    hooks: Callable[[str, RunConfig], Hooks] = lambda name, run: Hooks()

    def run(self) -> dict[str, Outcome]:
        """Every stage's outcome by its name; a stage that was stopped is the last one.

        Raises ``InvalidValueError``, ``TrainingError`` and what loading a model raises.
        """
        recipe, done = self.recipe, {}
        texts = documents(recipe.data.corpora, recipe.data.paths)
        self.out.mkdir(parents=True, exist_ok=True)
        if recipe.target.model is not None:
            done["target"] = self._train_target(texts)
            if recipe.draft is None or not done["target"].finished:
                return done
            target = load_checkpoint(done["target"].model)
        else:
            target = load_checkpoint(recipe.target.path)
        done["draft"] = self._train_draft(texts, target)
        return done

    def _train_target(self, texts: list[Document]) -> Outcome:
        target = self.recipe.target
        config = parse_hf_config(target.model, source="target.model")
        tokenizer = self._tokenizer(texts, config.vocab_size)
        tensors = random_tensors(config, target.run.seed)
        objective = LanguageModel(target.model, tensors, tokenizer)
        return self._stage("target", objective, self._streams(texts, tokenizer), sorted(target.model.items()))

    def _tokenizer(self, texts: list[Document], vocab_size: int) -> Tokenizer:
        """The recipe's, or one that is learned of all texts, held-out ones too: it is no model of them."""
        if self.recipe.target.tokenizer is not None:
            return require(load_checkpoint(self.recipe.target.tokenizer).tokenizer)
        folder = self.out / "tokenizer"
        if self.resume and (folder / "tokenizer_config.json").exists():
            return read_tokenizer(folder)
        return learn_tokenizer((text.text for text in texts), vocab_size, folder)

    def _train_draft(self, texts: list[Document], target: Checkpoint) -> Outcome:
        streams = self._streams(texts, require(target.tokenizer))
        make = self._spire if self.recipe.draft.kind == "spire" else self._small_model
        made_for = fingerprint(target.config, target.weights)
        return self._stage("draft", make(target, streams), streams, self.recipe.draft, self.recipe.loss, made_for)

    def _small_model(self, target: Checkpoint, streams: Streams) -> Objective:
        """A plain model with the target's vocabulary."""
        draft = self.recipe.draft
        raw = {"vocab_size": target.config.vocab_size, **draft.model}
        config = parse_hf_config(raw, source="draft.model")
        if config.vocab_size != target.config.vocab_size:
            limit = f"must be the target's {target.config.vocab_size}"
            raise InvalidValueError("draft.model.vocab_size", config.vocab_size, limit, "Leave it out.")
        model = LanguageModel(raw, random_tensors(config, self.recipe.run.seed), target.tokenizer)
        if draft.learns == "text":
            return model
        ends = Ends.of(target.config, target.weights)
        said = Live(self._teacher(target), (), partial(ends.logits, eps=target.config.norm_eps))
        student = Student(narrowed(model.model, draft.window, draft.sinks), model.parameters, model.export)
        return Distillation(student, said, self.recipe.loss)

    def _teacher(self, target: Checkpoint) -> Teacher:
        auto = auto_dtype(target.config, torch.device("cpu"), resolve_block_size(16))
        dtype = resolve_dtype("target.dtype", self.recipe.target.dtype, auto)
        return Teacher(Transformer(target.config, target.weights, dtype=dtype))

    def _spire(self, target: Checkpoint, streams: Streams) -> Objective:
        recipe, teacher = self.recipe, self._teacher(target)
        config = recipe.draft.feedback(self._layers(teacher.model, streams))
        random = recipe.run.seed if recipe.draft.init == "random" else None
        tensors = prune_init.initial_tensors(config, target.config, target.weights, random_seed=random)
        model = FeedbackDraft(config, target.config, tensors, Ends.of(target.config, target.weights))
        return Distillation(Student.of_spire(model, target), Live(teacher, model.taps, model.logits), recipe.loss)

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

    def _streams(self, texts: list[Document], tokenizer: Tokenizer) -> Streams:
        return tokenize(texts, tokenizer, self.recipe.data.held_out, self.out)

    def _stage(self, name: str, objective: Objective, streams: Streams, *what: object) -> Outcome:
        """Train one thing; ``what`` it is decides, with texts and settings, whether a run may go on."""
        section = self.recipe.target if name == "target" else self.recipe
        optim, run, start = section.optim, section.run, time.perf_counter()
        batches = Batches(streams.train, run.lengths, run.batch_tokens, run.seed)
        tested = list(held_out(streams.held_out, sorted(run.lengths), run.eval_tokens))
        job = Job(objective, batches, tested, optim, run, digest(name, *what, optim, run.decisive, streams.digest))
        progress = Trainer(job, self.out / name, self.hooks(name, run)).train(self.resume)
        figures = [record["held_out"] for record in read_log(self.out / name) if "held_out" in record]
        seconds = time.perf_counter() - start
        return Outcome(progress, progress.step == run.steps, figures[0], figures[-1], seconds, self.out / name / MODEL)
