"""A plain language model as an ``Objective``: next-token cross-entropy, for small targets and for small drafts.

Its layers are those of ``models/feedback.py`` as training needs them: a draft of all layers that reads its own residual
streams, with the whole text as one block, is a causal decoder.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.nn import functional

from longdraft.checkpoint.safetensors import SINGLE
from longdraft.checkpoint.ties import EMBEDDING, HEAD
from longdraft.checkpoint.tokenizer import Tokenizer
from longdraft.errors import InvalidValueError
from longdraft.models.config import ModelConfig, parse_hf_config
from longdraft.models.feedback import Ends, FeedbackConfig, FeedbackDraft
from longdraft.models.weights import expected_shapes
from longdraft.train.files import save_tensors
from longdraft.train.vocabulary import save_tokenizer

NORM = "model.norm.weight"
STD = 0.02


class LanguageModel:
    """A Llama-like model with its weights as parameters, under the names of its checkpoint."""

    def __init__(
        self, raw: Mapping[str, object], tensors: Mapping[str, torch.Tensor], tokenizer: Tokenizer | None = None
    ) -> None:
        """``raw``: what ``config.json`` is to say. ``tensors``: all of the model's; they become the parameters.

        ``tokenizer``: what the exported folder is to have. Raises what ``parse_hf_config`` raises.
        """
        self.raw, self.tokenizer = dict(raw), tokenizer
        self.config = config = parse_hf_config(raw)
        shapes = {name: tuple(x.shape) for name, x in tensors.items()}
        if shapes != expected_shapes(config):
            raise InvalidValueError("tensors", sorted(shapes)[:3], "must be those of the config, in their shapes")
        self._ends = {name: x.requires_grad_() for name, x in tensors.items() if not name.startswith("model.layers.")}
        embedding = self._ends[EMBEDDING]
        ends = Ends(embedding, self._ends[NORM], self._ends.get(HEAD, embedding))
        layers = {name: x for name, x in tensors.items() if name not in self._ends}
        every = FeedbackConfig(tuple(range(config.num_layers)), window=1, sinks=0, memory="off", context="own")
        self.model = FeedbackDraft(every, config, layers, ends)

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        """See ``Objective``."""
        return self._ends | dict(self.model.named_parameters())

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """``[B, L, V]`` after each token of ``ids [B, L]``."""
        return self.model.logits(self.model(ids, None, k=ids.shape[1]))

    def loss(self, ids: torch.Tensor) -> tuple[torch.Tensor, Mapping[str, float]]:
        """See ``Objective``: nats per token that is predicted, and how often the likeliest token was the next one."""
        logits, wanted = self.logits(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        right = (logits.detach().argmax(dim=-1) == wanted).float().mean()
        return functional.cross_entropy(logits, wanted), {"accuracy": float(right)}

    def export(self, folder: Path) -> None:
        """See ``Objective``: an ordinary checkpoint."""
        folder.mkdir(parents=True, exist_ok=True)
        save_tensors(folder / SINGLE, self.parameters)
        raw = self.raw
        if self.tokenizer is not None:
            raw = raw | {"eos_token_id": self.tokenizer.eos_token_id}
            save_tokenizer(self.tokenizer, folder)
        (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")


def random_tensors(config: ModelConfig, seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """A model before training, as GPT-2's: N(0, 0.02²), less for what is added to the residual stream; norms are 1."""
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_shapes(config).items():
        if len(shape) == 1:
            tensors[name] = torch.full(shape, float(name.endswith("norm.weight")), dtype=dtype)
            continue
        adds = name.endswith(("o_proj.weight", "down_proj.weight"))
        std = STD / math.sqrt(2 * config.num_layers) if adds else STD
        tensors[name] = (std * torch.randn(shape, generator=random)).to(dtype)
    return tensors
