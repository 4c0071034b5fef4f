"""Names of drafts → what each costs, holds and is assumed to get accepted: the candidates of a plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from longdraft.checkpoint.spire import SpireCheckpoint, check_tensors
from longdraft.config import DraftConfig
from longdraft.drafts.layer_skip import choose_layers
from longdraft.drafts.registry import NAMED, check, kept_tokens, named, selector
from longdraft.drafts.spire import settled
from longdraft.errors import InvalidValueError, ModelFileError, TargetMismatchError, VocabularyMismatchError
from longdraft.models.config import ModelConfig
from longdraft.models.weights import num_parameters
from longdraft.planner.assumed import Assumed, assumed, published_pair
from longdraft.planner.catalogue import find_model, find_spire
from longdraft.planner.cost import BYTES, Network, Reads, Rows, lengths_of, network, pass_work, times, whole
from longdraft.planner.curves import Curves
from longdraft.planner.hardware import Hardware

BUDGETS = (256, 512)
# What is tried without being named: 8-bit weights have kernels on CPUs only, so far.
SELF_DRAFTS = {"cpu": ("streaming_llm", "int8"), "gpu": ("streaming_llm",)}
# What online control chooses from where the user leaves it open, by what the target runs on.
CONSIDERED: dict[str, tuple[DraftConfig, ...]] = {
    "native": (
        DraftConfig(weights="target@int8", budget=256),
        DraftConfig(budget=256),
        DraftConfig(weights="target@int8", kv="verified", budget=256),
        DraftConfig(weights="ngram"),
    ),
    "cpu": (DraftConfig(budget=256), DraftConfig(weights="ngram")),
    "gpu": (DraftConfig(), DraftConfig(weights="ngram")),
}
UNKNOWN_ACCEPTANCE = {"ngram": 0.1}  # of weights without a figure; others: 0.7
PRIOR_LENGTH = 4096  # tokens, for which a figure is looked up
VOCABULARY_PADDING = 0.01  # of the embedding's rows; members of a family differ by less


@dataclass(frozen=True)
class Target:
    """A model on a machine. ``weight_bytes`` and ``kv_bytes`` are those of one element."""

    name: str
    config: ModelConfig
    hardware: Hardware
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0
    curves: Curves | None = None  # where this very model was calibrated on that machine

    def pass_seconds(self, rows: Rows, queries: int = 1) -> float:
        """One pass of the whole model, as calibrated or by the roofline model."""
        if self.curves:
            lengths = lengths_of(rows)
            return self.curves.target(lengths, [queries] * len(lengths))
        return times(pass_work(self.network, rows, queries), self.hardware).total

    @cached_property
    def network(self) -> Network:
        """A pass of the whole model."""
        return network(self.config, weight_bytes=self.weight_bytes, kv_bytes=self.kv_bytes)

    @cached_property
    def held_bytes(self) -> float:
        """Bytes of all weights, embedding included."""
        return num_parameters(self.config) * self.weight_bytes


@dataclass(frozen=True)
class Candidate:
    """A draft as the planner sees it; ``gamma`` of its config is a plan's to choose.

    ``network`` runs once per drafted token over ``reads`` of each row's cache; a draft without weights has none.
    ``weight_bytes`` (in all), ``kv_bytes_per_token`` and ``kv_bytes_per_row`` (copies) are what it holds beside the
    target's.
    """

    config: DraftConfig
    network: Network | None
    reads: Reads
    acceptance: Assumed
    weight_bytes: float = 0.0
    kv_bytes_per_token: float = 0.0
    kv_bytes_per_row: float = 0.0

    @property
    def budget(self) -> int | None:
        """Tokens that it reads of a row, where that is bounded."""
        return None if self.network is None or self.config.selection == "full" else self.config.budget

    @property
    def key(self) -> str:
        """The user's name for the draft, whatever its budget."""
        default = replace(self.config, budget=DraftConfig.budget)
        return next((name for name, draft in NAMED.items() if draft == default), self.config.short_name)

    @property
    def note(self) -> str:
        """What to know before it is chosen."""
        return "8-bit weights have kernels on CPUs only, so far" if self.config.int8 else ""


def candidates(
    target: Target,
    drafts: Iterable[str] = (),
    budgets: Iterable[int] = BUDGETS,
    acceptance: Assumed | None = None,
) -> list[Candidate]:
    """Each of ``drafts`` with each of ``budgets``; without names those for which there are figures.

    Raises ``InvalidValueError`` for a draft that was named and has no figure, where no ``acceptance`` is given.
    """
    drafts = tuple(drafts) or (*SELF_DRAFTS[target.hardware.kind], *filter(None, [published_pair(target.name)]))
    found: dict[DraftConfig, Candidate] = {}
    for name in drafts:
        draft = named(name) or DraftConfig(weights=name)
        _require_no_format(draft)
        configs = _variants(draft, budgets)
        figures = {config: acceptance or assumed(config, target.name) for config in configs}
        if not any(figures.values()):
            fix = "Give one by --acceptance; longdraft bench decode measures it."
            raise InvalidValueError("--draft", name, "no acceptance is published for it at such budgets", fix)
        found |= {config: candidate(target, config, figure) for config, figure in figures.items() if figure}
    return list(found.values())


def _variants(draft: DraftConfig, budgets: Iterable[int]) -> list[DraftConfig]:
    """``draft`` with each budget, where it has one; a small model over its whole cache, too.

    What a SPIRe draft reads is its own business.
    """
    if draft.own_model and find_spire(draft.model):
        return [draft]
    kinds = [replace(draft, kv="full"), draft] if draft.own_model else [draft]
    bounded = [config for config in kinds if config.selection != "full" and config.weights != "ngram"]
    return [k for k in kinds if k not in bounded] + [replace(k, budget=budget) for k in bounded for budget in budgets]


def prior(draft: DraftConfig, target: str) -> float:
    """How often such a draft's tokens are assumed to stand before any was seen."""
    figure = assumed(draft, target)
    rate = figure.rate(PRIOR_LENGTH) if figure else UNKNOWN_ACCEPTANCE.get(draft.weights, 0.7)
    return rate if isinstance(rate, (int, float)) else rate[0]


def candidate(target: Target, draft: DraftConfig, acceptance: Assumed) -> Candidate:
    """``draft`` for ``target``; raises ``InvalidValueError`` or ``VocabularyMismatchError`` where it cannot be."""
    check(draft)
    _require_no_format(draft)
    if draft.weights == "ngram":
        return Candidate(draft, None, whole, acceptance)
    reads = selector(draft).tokens_read
    if draft.own_model:
        spire = find_spire(draft.model)
        return _spire(target, draft, spire, acceptance) if spire else _small(target, draft, reads, acceptance)
    kept = choose_layers(draft.layers, target.config.num_layers)
    int8 = draft.weights == "target@int8"
    net = network(
        target.config,
        weight_bytes=BYTES["int8"] if int8 else target.weight_bytes,
        kv_bytes=target.kv_bytes,
        layers=None if kept is None else len(kept),
    )
    held = num_parameters(target.config) * BYTES["int8"] if int8 else 0.0
    copies = kept_tokens(draft)[0] * target.network.kv_bytes_per_token
    return Candidate(draft, net, reads, acceptance, weight_bytes=held, kv_bytes_per_row=copies)


def _require_no_format(draft: DraftConfig) -> None:
    if draft.format:
        limit = "must have no format in a plan: what decoding costs is not modelled"
        raise InvalidValueError("kv", draft.kv, limit, f"Plan for {draft.selection!r}.")


def _spire(target: Target, draft: DraftConfig, spire: SpireCheckpoint, acceptance: Assumed) -> Candidate:
    """Layers beside the target, with its head, over keys and values of their own that never grow.

    These are projected once more of a token's memory, and of what the target says of it: both are counted with each
    drafted token. Raises ``TargetMismatchError`` where sizes are not the target's.
    """
    config, model = spire.config, target.config
    try:
        check_tensors(config, model, spire.weights)
    except (InvalidValueError, ModelFileError) as error:
        problem = f"it was made for {spire.target!r}, whose sizes are others"
        raise TargetMismatchError(target.name, spire.name, problem) from error
    draft, layers = settled(draft, config), len(config.layers)
    size = BYTES["int8"] if draft.int8 else target.weight_bytes
    net = network(model, weight_bytes=size, kv_bytes=target.kv_bytes, layers=layers)
    again = layers * model.kv_elements_per_layer * model.hidden_size * (1 + bool(config.num_memories))
    own = layers * num_parameters(model, "model.layers.0.")
    held = own * target.weight_bytes + draft.int8 * net.weights * size
    kept = (draft.budget + draft.gamma) * net.kv_bytes_per_token
    reads, net = selector(draft).tokens_read, replace(net, weights=net.weights + again)
    return Candidate(draft, net, reads, acceptance, weight_bytes=held, kv_bytes_per_row=kept)


def _small(target: Target, draft: DraftConfig, reads: Reads, acceptance: Assumed) -> Candidate:
    """A model of its own, in the target's types; its cache holds every token, whatever it reads of it."""
    name, config = find_model(draft.weights)
    longest = config.full_attention_length  # beyond it the draft slides
    sizes = sorted((config.vocab_size, target.config.vocab_size))
    if sizes[1] - sizes[0] > VOCABULARY_PADDING * sizes[1]:
        problem = f"it has {config.vocab_size} tokens, the target {target.config.vocab_size}"
        raise VocabularyMismatchError(target.name, name, problem, "Take a draft with the target's tokenizer.")
    net = network(config, weight_bytes=target.weight_bytes, kv_bytes=target.kv_bytes)
    held = num_parameters(config) * target.weight_bytes
    per_token = net.kv_bytes_per_token
    copies = kept_tokens(draft)[0] * per_token
    return Candidate(draft, net, lambda n: min(reads(n), longest), acceptance, held, per_token, copies)
