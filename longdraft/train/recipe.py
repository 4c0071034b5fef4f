"""A recipe: the TOML file that says what is trained, on which texts, and how.

    [target]   path of the model, or [target.model]: the words of a config.json, for one that is trained first
    [data]     texts; [data.written]: those that the target writes itself
    [draft]    what is trained for the target; without it, only the target is
    [arms]     which ablations of it are trained beside it, and with how many seeds
    [loss]     of a draft that reads the target (``DistillConfig``)
    [evaluate] on how many held-out texts, and where, tokens per round are counted in the end
    [optim]    and [run]; those of a target that is trained are [target.optim] and [target.run]

What is left out has a default, what nobody knows is refused by name. Paths are relative to the file.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from os import PathLike
from pathlib import Path

from longdraft.config import as_float, as_int
from longdraft.errors import InvalidValueError
from longdraft.models.feedback import FeedbackConfig
from longdraft.train.arms import NAMES, VANILLA
from longdraft.train.data_config import DataConfig, read_data
from longdraft.train.distill import DistillConfig
from longdraft.train.loop import RunConfig
from longdraft.train.optim import OptimConfig
from longdraft.train.settings import Section, as_list, as_words, choice, read_section, refuse_others, whole

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MOST_BYTES = 2**20
LAYERS = re.compile("(last|spaced|influential):[1-9][0-9]{0,3}")


@dataclass(frozen=True)
class TargetConfig(Section):
    """The model that drafts are for: at ``path`` (or a name), or to be trained first: ``model`` has its sizes.

    ``tokenizer``: a model's, for one that is trained; left out, a vocabulary of its own is learned. ``dtype``: in
    which a target teaches.
    """

    path: str | None = None
    tokenizer: str | None = None
    dtype: str = "auto"
    model: Mapping[str, object] | None = None
    optim: OptimConfig = field(default_factory=OptimConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        if (self.path is None) == (self.model is None):
            raise InvalidValueError("path", self.path, "must be given, or else target.model, and not both")


@dataclass(frozen=True)
class DraftRecipe(Section):
    """What is trained for a target: a ``spire`` draft of some of its layers, or a plain small ``model``.

    ``layers``: numbers, or ``last:n``, ``spaced:n``, ``influential:n``. ``window``, ``sinks``, ``memory``, ``context``:
    see ``FeedbackConfig``. ``init``: the target's layers, or random ones. ``model``: sizes of a plain model, which
    ``learns`` the texts themselves, or what the target says of them, reading no more than ``sinks`` and ``window``.
    """

    kind: str = choice("spire", ("spire", "model"))
    layers: str | Sequence[int] = "last:2"
    window: int = FeedbackConfig.window
    sinks: int = FeedbackConfig.sinks
    memory: str = FeedbackConfig.memory
    context: str = FeedbackConfig.context
    init: str = choice("pruned", ("pruned", "random"))
    model: Mapping[str, object] | None = None
    learns: str = choice("text", ("text", "target"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.kind == "model") != (self.model is not None):
            raise InvalidValueError("kind", self.kind, "must be 'model' where there is a draft.model, and only there")
        if isinstance(self.layers, str) and not LAYERS.fullmatch(self.layers):
            limit = "must be numbers of the target's layers, or 'last:n', 'spaced:n' or 'influential:n'"
            raise InvalidValueError("layers", self.layers, limit)
        self.feedback((0,) if isinstance(self.layers, str) else self.layers)  # checks the rest

    def feedback(self, layers: Sequence[int]) -> FeedbackConfig:
        """The draft's config, once its layers are known."""
        return FeedbackConfig(layers, self.window, self.sinks, self.memory, self.context)


def _as_arms(what: str, value: object) -> tuple[str, ...]:
    """Names of arms, each once; ``all`` are all."""
    names = as_words(what, value)
    if names == ("all",):
        return NAMES
    if not names or len(set(names)) < len(names) or set(names) - set(NAMES):
        raise InvalidValueError(what, value, f"must be 'all' alone, or some of {', '.join(NAMES)}, each once")
    return names


@dataclass(frozen=True)
class ArmsConfig(Section):
    """The draft and its ablations by ``names`` (``arms.py``), each with ``seeds``, one after the other from the run's.

    ``vanilla``: sizes of the plain small model; left out, an eighth of the target.
    """

    names: Sequence[str] = field(default=("spire", "no-activations", VANILLA), metadata={"check": _as_arms})
    seeds: int = whole(1, 1, 1000)
    vanilla: Mapping[str, object] | None = None


@dataclass(frozen=True)
class EvaluateConfig(Section):
    """Where tokens per round are counted: behind ``contexts`` tokens of ``texts`` held-out texts, over ``span`` tokens.

    ``batch``: texts at a time.
    """

    contexts: Sequence[int] = field(default=(256, 512, 960), metadata={"check": as_list(as_int, 1, 2**24)})
    temperatures: Sequence[float] = field(default=(0.0, 1.0), metadata={"check": as_list(as_float, 0.0, 1e3)})
    texts: int = whole(64, 2, 2**20)
    span: int = whole(64, 1, 2**20)
    batch: int = whole(4, 1, 4096)


@dataclass(frozen=True)
class Recipe:
    """All of it; ``name`` is the file's. ``arms``: none: the draft alone."""

    name: str
    target: TargetConfig
    data: DataConfig = DataConfig()
    draft: DraftRecipe | None = None
    arms: ArmsConfig | None = None
    loss: DistillConfig = DistillConfig()
    optim: OptimConfig = OptimConfig()
    run: RunConfig = field(default_factory=RunConfig)
    evaluate: EvaluateConfig = EvaluateConfig()

    def __post_init__(self) -> None:
        if self.arms is not None and (self.draft is None or self.draft.kind != "spire"):
            raise InvalidValueError("arms", list(self.arms.names), "need a [draft] of the kind 'spire'")
        if self.data.written is not None and self.draft is None:
            raise InvalidValueError("data.written", self.data.written.texts, "needs a [draft], which is trained on it")

    def with_run(self, **changes: int) -> Recipe:
        """The same with other steps or another seed, of the target's training, too."""
        target = replace(self.target, run=replace(self.target.run, **changes))
        return replace(self, target=target, run=replace(self.run, **changes))

    def with_arms(self, **changes: object) -> Recipe:
        """The same with other ``names`` or ``seeds``. Raises ``InvalidValueError``."""
        return replace(self, arms=replace(self.arms or ArmsConfig(), **changes)) if changes else self


def read_recipe(file: str | PathLike[str]) -> Recipe:
    """Read and check a recipe. Raises ``InvalidValueError`` that names the key and, for an unknown one, the nearest."""
    path = Path(file).expanduser()
    try:
        with path.open("rb") as stream:
            raw = tomllib.loads(stream.read(MOST_BYTES).decode())
    except OSError as error:
        raise InvalidValueError("--config", str(path), f"cannot be read ({error.strerror})") from error
    except ValueError as error:  # no TOML, or no UTF-8
        raise InvalidValueError("--config", str(path), f"is not TOML: {error}") from error
    return parse_recipe(raw, path.stem, path.parent)


def parse_recipe(raw: Mapping[str, object], name: str, folder: Path) -> Recipe:
    """``raw``: the file's tables; ``folder``: what its paths are relative to."""
    raw = refuse_others(raw, [f.name for f in fields(Recipe) if f.name != "name"], "")
    parts: dict[str, object] = {"target": _target(raw.get("target", {}), folder)}
    if "data" in raw:
        parts["data"] = read_data(raw["data"], folder)
    kinds = {"draft": DraftRecipe, "loss": DistillConfig, "optim": OptimConfig, "run": RunConfig}
    kinds |= {"arms": ArmsConfig, "evaluate": EvaluateConfig}
    parts |= {key: read_section(kind, raw[key], key) for key, kind in kinds.items() if key in raw}
    recipe = Recipe(name, **parts)
    if recipe.draft is None and recipe.target.path is not None:
        raise InvalidValueError("draft", None, "must be given where the target is not trained, or nothing would be")
    return recipe


def _target(raw: object, folder: Path) -> TargetConfig:
    raw = dict(refuse_others(raw, [f.name for f in fields(TargetConfig)], "target"))
    for key, kind in (("optim", OptimConfig), ("run", RunConfig)):
        raw[key] = read_section(kind, raw.get(key, {}), f"target.{key}")
    for key in ("path", "tokenizer"):
        if isinstance(raw.get(key), str) and (folder / raw[key]).exists():
            raw[key] = str(folder / raw[key])
    return read_section(TargetConfig, raw, "target")
