"""Drafts inside stock transformers: ``model.generate(**inputs, custom_generate=longdraft.generate_with(...))``.

The model drafts for itself over a small part of its own cache (MagicDec, arXiv:2408.11049) and checks what it drafted
with all of it, so that a call returns what it returns without drafts, sooner where contexts are long. Nothing of
transformers is patched: it calls ``SelfSpeculation``, attention goes through ``AttentionInterface``, and the cache is a
``DynamicCache`` before and after.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import torch

from longdraft.config import MAX_SEED, DraftConfig, as_int
from longdraft.core import SequenceStats
from longdraft.drafts.registry import SELECTORS, named, selector
from longdraft.engine.admission import derived_seed
from longdraft.errors import InvalidValueError, MissingDependencyError
from longdraft.integrations.transformers.reading import readable
from longdraft.integrations.transformers.rules import Coupled, Greedy, Maximal

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel
    from transformers.generation import GenerateDecoderOnlyOutput

OLDEST = (5, 24)  # what this is written for and tested with
_SETTINGS = {"budget", "gamma", "sinks", "refresh", "sampling_rule"}
READABLE = [name for name, kind in SELECTORS.items() if readable(kind)]


def generate_with(
    draft: str | DraftConfig = "streaming_llm",
    *,
    seed: int | None = None,
    generator: torch.Generator | None = None,
    **settings: object,
) -> SelfSpeculation:
    """What to pass to ``generate`` of transformers as ``custom_generate``, so that it drafts.

    Args:
        draft: which part of the model's own cache drafts read: ``streaming_llm``, ``snapkv``, ``topk`` or ``full``; or
            a ``DraftConfig`` that says so.
        seed: what sampling draws with; the same for each prompt, and others derived from it for further sequences that
            a prompt returns. ``None``: each row's seed is drawn from ``generator``, or from torch's own, so that
            ``torch.manual_seed`` makes calls repeatable.
        settings: fields of ``DraftConfig``: ``budget``, ``gamma``, ``sinks``, ``refresh``, ``sampling_rule``.

    Raises ``MissingDependencyError`` if transformers is absent or too old, ``InvalidValueError`` for a draft that
    cannot be had here.
    """
    _require_transformers()
    config = named(draft) if isinstance(draft, str) else draft
    known = isinstance(config, DraftConfig) and config.kv in READABLE
    if not known or config.weights != "target" or config.layers != "all":
        raise InvalidValueError("draft", draft, f"must be {', '.join(READABLE)} here", "Use longdraft.LLM for others.")
    unknown = sorted(settings.keys() - _SETTINGS)
    if unknown:
        raise InvalidValueError("a setting", unknown[0], f"must be one of {', '.join(sorted(_SETTINGS))}")
    return SelfSpeculation(replace(config, **settings), seed, generator)


def _require_transformers() -> None:
    oldest = ".".join(map(str, OLDEST))
    purpose, install = "Drafting inside transformers", f"pip install 'transformers>={oldest}'"
    try:
        found = version("transformers")
    except PackageNotFoundError:
        raise MissingDependencyError("transformers", purpose, install) from None
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < OLDEST:
        raise MissingDependencyError("transformers", purpose, install, found)


class SelfSpeculation:
    """A way of decoding for ``generate(custom_generate=...)``; ``stats`` are those of each row of the last call."""

    def __init__(self, config: DraftConfig, seed: int | None, generator: torch.Generator | None) -> None:
        self.config, self.generator = config, generator
        self.seed = None if seed is None else as_int("seed", seed, 0, MAX_SEED)
        self.stats: list[SequenceStats] = []

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: list,
        stopping_criteria: list,
        generation_config: GenerationConfig,
        streamer: object | None = None,
        **inputs: object,
    ) -> GenerateDecoderOnlyOutput | torch.Tensor:
        """See ``GenerationMixin._sample``, whose place this takes: the same arguments and results.

        Raises ``UnsupportedModelError`` or ``InvalidValueError`` for what drafts cannot do.
        """
        from longdraft.integrations.transformers import checks
        from longdraft.integrations.transformers.loop import Call, columns

        withheld = _withheld_by_generate()
        streamer = streamer or withheld.pop("streamer", None)
        positions = inputs.get("position_ids")
        most = stopping_criteria.max_length or generation_config.max_length
        checks.check_model(model, positions, most - input_ids.shape[1] + self.config.gamma)
        checks.check_distributed(model)
        given = {**withheld, **inputs, "streamer": streamer}
        checks.check_call(generation_config, logits_processor, stopping_criteria, given, len(input_ids))
        cache = inputs.get("cache")
        checks.check_cache(cache)
        checks.check_prompt(input_ids, columns(generation_config, inputs), cache.get_seq_length(), positions)
        call = Call(model, input_ids, logits_processor, stopping_criteria, generation_config, inputs, streamer)
        self.stats = call.stats
        return call.run(selector(self.config), self.config.gamma, self._rule(generation_config, input_ids))

    def _rule(self, config: GenerationConfig, input_ids: torch.Tensor) -> Greedy:
        """Who draws, with a seed for each row if it samples."""
        if not config.do_sample:
            return Greedy()
        if self.seed is None:
            device = None if self.generator is None else self.generator.device
            seeds = torch.randint(MAX_SEED, (len(input_ids),), generator=self.generator, device=device)
        else:
            further = (row % config.num_return_sequences for row in range(len(input_ids)))
            seeds = torch.tensor([derived_seed(self.seed, i) if i else self.seed for i in further])
        rule = Maximal if self.config.sampling_rule == "maximal" else Coupled
        return rule(seeds.to(input_ids.device))


def _withheld_by_generate() -> dict[str, object]:
    """What the user gave to ``generate`` and it does not hand to a callable: it would be ignored without a word.

    A streamer that is never ended lets its reader wait for ever, so it is taken from the frame of ``generate``.
    """
    caller = sys._getframe(2)
    names = ("streamer", "assistant_model") if caller.f_code.co_name == "generate" else ()
    return {name: caller.f_locals.get(name) for name in names}
