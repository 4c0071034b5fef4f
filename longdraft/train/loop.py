"""The training loop: whatever has a loss and parameters is trained, and a run that was killed goes on bit by bit.

Nothing here knows a model. All that a step depends on is in the saved state, the texts and the recipe: there is no
random state that runs along.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from longdraft.config import MAX_SEED
from longdraft.errors import TrainingError
from longdraft.train.files import save_folder
from longdraft.train.objective import Batches, Objective
from longdraft.train.optim import OptimConfig, Optimizer
from longdraft.train.settings import Section, as_shares, choice, whole
from longdraft.train.state import STATE, Log, Progress, load_state, save_state

MODEL = "model"  # the folder of what was trained
AUTOCAST = {"off": None, "bfloat16": torch.bfloat16}
Figures = Mapping[str, float]


@dataclass(frozen=True)
class RunConfig(Section):
    """How long, on what sequences, and what is done when.

    ``lengths``: of the sequences, in tokens, each with its share of all tokens; every step takes ``batch_tokens`` of
    one length. ``micro_tokens``: most that go through at once; a step's gradient is the same whatever it is.
    ``save_every`` and ``eval_every`` are in steps; ``eval_tokens`` are held-out tokens per length. ``patience``: steps
    in a row whose loss or gradients are no numbers before the run stops.
    """

    steps: int = whole(1000, 1, 10**8)
    seed: int = whole(0, 0, MAX_SEED)
    lengths: Mapping[int, float] = field(default_factory=lambda: {512: 1.0}, metadata={"check": as_shares})
    batch_tokens: int = whole(8192, 2, 2**24)
    micro_tokens: int = whole(2048, 2, 2**24)
    save_every: int = whole(100, 1, 10**8)
    eval_every: int = whole(100, 1, 10**8)
    eval_tokens: int = whole(16384, 1, 2**30)
    autocast: str = choice("off", AUTOCAST)
    patience: int = whole(10, 1, 10**6)

    @property
    def decisive(self) -> RunConfig:
        """What decides on the weights that come out, all else as usual: a run goes on if that is the same."""
        return RunConfig(self.steps, self.seed, self.lengths, self.batch_tokens, autocast=self.autocast)


@dataclass(frozen=True)
class Job:
    """What is trained, on what, and how; ``held_out`` are sequences ``[B, L]`` that it is measured on.

    ``identity`` says what the run is, for refusing to go on with another one.
    """

    objective: Objective
    batches: Batches
    held_out: Sequence[torch.Tensor]
    optim: OptimConfig
    run: RunConfig
    identity: str = ""


@dataclass
class Hooks:
    """``on_step`` is told of every record of the log; ``stop`` is asked after every step whether to end early."""

    on_step: Callable[[Mapping[str, object]], None] = lambda record: None
    stop: Callable[[], bool] = lambda: False


@dataclass
class Trainer:
    """One run in a folder: ``state.safetensors``, ``log.jsonl``, and in the end ``model/``."""

    job: Job
    folder: Path
    hooks: Hooks = field(default_factory=Hooks)

    def train(self, resume: bool = False) -> Progress:
        """Train to the end or until ``stop`` says so, and write what was trained; ``resume`` goes on where it was.

        Raises ``TrainingError`` after too many steps that came to nothing; what was saved before stays.
        """
        job, run = self.job, self.job.run
        self.folder.mkdir(parents=True, exist_ok=True)
        if not resume and (self.folder / STATE).exists():
            raise TrainingError(f"{self.folder} holds a run. Go on with --resume, or give another --out.")
        optimizer = Optimizer(job.optim, job.objective.parameters)
        saved = load_state(self.folder, optimizer, job.identity) if resume else None
        at = saved or Progress()
        log = Log(self.folder, at.step)
        with _deterministic():
            if saved is None:
                self._note(log, {"step": 0, "held_out": self._measure()})
            while at.step < run.steps:
                self._note(log, self._step(optimizer, at))
                last = at.step == run.steps or self.hooks.stop()
                if at.step % run.eval_every == 0 or last:
                    self._note(log, {"step": at.step, "held_out": self._measure()})
                if at.step % run.save_every == 0 or last:
                    save_state(self.folder, at, optimizer, job.identity)
                if last:
                    break
        save_folder(self.folder / MODEL, job.objective.export)
        return at

    def _step(self, optimizer: Optimizer, at: Progress) -> dict[str, object]:
        """One step; its record for the log."""
        job, start = self.job, time.perf_counter()
        rate = job.optim.rate(at.step, job.run.steps)
        ids = job.batches.step(at.step)
        loss, figures = self._gradients(ids)
        norm = optimizer.step(rate) if math.isfinite(loss) else optimizer.drop()
        at.step += 1
        at.tokens += ids.numel()
        at.in_a_row = at.in_a_row + 1 if norm is None else 0
        at.skipped += norm is None
        if at.in_a_row >= job.run.patience:
            raise TrainingError(
                f"The loss or its gradients were no numbers in the last {at.in_a_row} steps, up to step {at.step}. "
                f"Lower optim.lr ({job.optim.lr:g}) or set run.autocast to 'off', and go on with --resume."
            )
        speed = ids.numel() / (time.perf_counter() - start)
        counts = {"step": at.step, "tokens": at.tokens, "length": ids.shape[1], "skipped": at.skipped}
        values = {"loss": loss, **figures, "grad_norm": norm, "lr": rate, "tokens_per_s": round(speed, 1)}
        return counts | {name: _finite(value) for name, value in values.items()}

    def _gradients(self, ids: torch.Tensor) -> tuple[float, Figures]:
        """Those of the mean loss over ``ids [B, L]``, in parts of at most ``micro_tokens``; loss and figures."""
        total: dict[str, float] = {}
        for part, share in self._parts(ids):
            loss, figures = self._loss(part)
            (loss * share).backward()
            for name, value in {"loss": float(loss.detach()), **figures}.items():
                total[name] = total.get(name, 0.0) + share * value
        return total.pop("loss"), total

    def _parts(self, ids: torch.Tensor) -> Iterator[tuple[torch.Tensor, float]]:
        rows = max(1, self.job.run.micro_tokens // ids.shape[1])
        return ((part, len(part) / len(ids)) for part in ids.split(rows))

    def _loss(self, ids: torch.Tensor) -> tuple[torch.Tensor, Figures]:
        device = next(iter(self.job.objective.parameters.values())).device
        kind = AUTOCAST[self.job.run.autocast]
        with torch.autocast(device.type, dtype=kind, enabled=kind is not None):
            return self.job.objective.loss(ids.to(device))

    @torch.no_grad()
    def _measure(self) -> dict[str, float | None]:
        """Loss and figures on held-out texts, means over tokens."""
        total: dict[str, float] = {}
        tokens = sum(ids.numel() for ids in self.job.held_out)
        for part in (part for ids in self.job.held_out for part, _ in self._parts(ids)):
            loss, figures = self._loss(part)
            for name, value in {"loss": float(loss), **figures}.items():
                total[name] = total.get(name, 0.0) + value * part.numel() / tokens
        return {name: _finite(value) for name, value in total.items()}

    def _note(self, log: Log, record: Mapping[str, object]) -> None:
        log.add(record)
        self.hooks.on_step(record)


def digest(*parts: object) -> str:
    """A run's identity from whatever it depends on, each with a ``repr`` that says it all."""
    return hashlib.sha256("\n".join(map(repr, parts)).encode()).hexdigest()


def _finite(value: float | None) -> float | None:
    """JSON knows no others."""
    return value if value is not None and math.isfinite(value) else None


@contextmanager
def _deterministic() -> Iterator[None]:
    """Sums of gradients in a fixed order: some of torch's are otherwise not, with several threads."""
    before, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a help in finding errors, and a pass over all memory
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(before, warn_only=warned)
