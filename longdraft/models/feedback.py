"""SPIRe's draft (arXiv:2504.06419): layers of the target that read what the target knows, and remember their own block.

x^l is a token's residual stream behind l layers of the draft (0: its embedding), y^l the same in the target. Attention
of draft layer i takes its keys and values, all through the layer's own norm and projections, from

    a verified token            y^tap(i), by default the very input of the target's layer that i began as
    an earlier one of the block its memory m_i = sum over l of softmax(w_i)_l x^l (Feedback Transformer, 2002.09402)
    the token itself            x^i, as its memory does not exist yet

Verified tokens are the first ``sinks`` and the last ``window`` before the block, at their positions in the text. Here
is the draft as training needs it: differentiable, all blocks of a text side by side, only the steps within a block one
after the other. ``drafts/spire.py`` runs the same layers on the package's kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional

from longdraft.config import as_int
from longdraft.errors import InvalidValueError
from longdraft.models.config import ModelConfig
from longdraft.models.rope import RotaryTable, apply_rotary
from longdraft.models.weights import WeightSource

MEMORIES = ("per_layer", "shared", "off")
CONTEXTS = ("activations", "last", "embedding", "own")
GROUP = 16  # blocks that are given their context together: a product of more rows, over at most twice the tokens
MEMORY = "memory"  # the tensor's name in files: the weights w, [n, n + 1], or [1, n + 1] if all layers share one memory
Residuals = torch.Tensor  # [n, B, L, hidden], one of the target's residual streams for each layer of the draft
KV = tuple[torch.Tensor, torch.Tensor]  # [..., G, D] each


@dataclass(frozen=True)
class FeedbackConfig:
    """What a draft is made of.

    ``layers``: the target's layers that it began as, ascending from 0. ``memory``: each layer has its own, all share
    one, or none (a token's keys and values stay what they were when it was the newest). ``context``, what the keys and
    values of verified tokens come from: the target's ``activations`` at the layers' inputs, its ``last`` residual
    stream, the ``embedding``, or the draft's ``own`` residual streams, which need a prefill of its own and no memory.
    """

    layers: tuple[int, ...]
    window: int = 64
    sinks: int = 1
    memory: str = "per_layer"
    context: str = "activations"

    def __post_init__(self) -> None:
        layers = tuple(self.layers) if isinstance(self.layers, (tuple, list)) else ()
        whole = all(type(layer) is int and layer >= 0 for layer in layers)
        if not layers or not whole or list(layers) != sorted(set(layers)):
            raise InvalidValueError("layers", self.layers, "must be numbers of the target's layers, ascending from 0")
        object.__setattr__(self, "layers", layers)
        object.__setattr__(self, "window", as_int("window", self.window, 1, 2**20))
        object.__setattr__(self, "sinks", as_int("sinks", self.sinks, 0, 2**20))
        for what, known in (("memory", MEMORIES), ("context", CONTEXTS)):
            if getattr(self, what) not in known:
                raise InvalidValueError(what, getattr(self, what), f"must be one of {', '.join(known)}")
        if self.context == "own" and self.memory != "off":
            raise InvalidValueError("memory", self.memory, "must be 'off' where the context is the draft's own")

    @property
    def num_memories(self) -> int:
        """How many memories a token has."""
        return {"per_layer": len(self.layers), "shared": 1, "off": 0}[self.memory]

    def taps(self, num_layers: int) -> tuple[int, ...]:
        """For each layer of the draft, behind how many of the target's ``num_layers`` its residual stream is read."""
        if self.layers[-1] >= num_layers:
            raise InvalidValueError("layers", self.layers, f"must be below the target's {num_layers} layers")
        if self.context == "activations":
            return self.layers
        return (0 if self.context == "embedding" else num_layers,) * len(self.layers)


@dataclass(frozen=True)
class Ends:
    """What a draft shares with its target: embedding ``[V, hidden]``, final norm ``[hidden]``, head ``[V, hidden]``."""

    embedding: torch.Tensor
    norm: torch.Tensor
    head: torch.Tensor

    @classmethod
    def of(cls, target: ModelConfig, source: WeightSource, dtype: torch.dtype = torch.float32) -> Ends:
        """Read from the target's checkpoint."""
        embedding, norm = (source.load(f"model.{name}.weight").to(dtype) for name in ("embed_tokens", "norm"))
        return cls(embedding, norm, embedding if target.tie_embeddings else source.load("lm_head.weight").to(dtype))

    def as_multiplied(self) -> Ends:
        """With the head in the type that autocast multiplies in: it casts what does not learn for every product."""
        device = self.head.device.type
        if self.head.requires_grad or not torch.is_autocast_enabled(device):
            return self
        return replace(self, head=self.head.to(torch.get_autocast_dtype(device)))

    def logits(self, x: torch.Tensor, eps: float) -> torch.Tensor:
        """``[..., V]`` of residual streams ``[..., hidden]`` behind the last layer; ``eps`` is the norm's."""
        x = x.to(self.norm.dtype)
        return functional.linear(functional.rms_norm(x, x.shape[-1:], self.norm, eps), self.head)


class FeedbackDraft(nn.Module):
    """The draft with its weights as parameters, under the names of its file; what it shares is not among them."""

    def __init__(
        self, config: FeedbackConfig, target: ModelConfig, tensors: Mapping[str, torch.Tensor], ends: Ends
    ) -> None:
        """``tensors``: of the draft's file; they become the parameters themselves, and must be of one type."""
        super().__init__()
        self.config, self.target = config, target
        self.taps = config.taps(target.num_layers)
        n = len(config.layers)
        with torch.device("meta"):
            self.model = nn.ModuleDict({"layers": nn.ModuleList(_Layer(target) for _ in range(n))})
            self.memory = nn.Parameter(torch.empty(config.num_memories, n + 1)) if config.num_memories else None
        self.load_state_dict(dict(tensors), assign=True)
        for name in ("embedding", "norm", "head"):
            self.register_buffer(name, getattr(ends, name), persistent=False)
        self._rotary = RotaryTable(target.rope, target.head_dim, target.max_position_embeddings)

    def forward(self, ids: torch.Tensor, residuals: Residuals | None, k: int, first: int = 0) -> torch.Tensor:
        """Residual streams ``[B, L - first, hidden]`` behind the last layer, of the tokens of ``ids [B, L]``.

        From position ``first`` on the text is cut into blocks of ``k`` tokens, the last one maybe shorter. Each block
        knows the target's ``residuals`` of the tokens before it, which are no function of the draft's weights, and
        its own tokens as its steps come to them. ``None`` for a draft whose context is its own (``first`` is 0 then):
        it goes by the streams of ``ids`` itself.
        """
        own_context = residuals is None
        assert not own_context or self.config.context == "own", "this draft reads residual streams of its target"
        assert not (own_context and first), "a draft that reads its own residual streams begins with the text"
        cut = _Cut(ids.shape[1], k, first, self.config, ids.device)
        x = functional.embedding(ids[:, cut.tokens], self.embedding)  # [B, J, k, hidden]
        rotary = self._at(cut.tokens)
        contexts = None if own_context else [self._project(i, residuals[i], cut) for i in range(len(self.taps))]
        own: list[KV | None] = [None] * len(self.taps)
        out = []
        # Without a memory no step waits for another: a block is one step.
        for start in range(0, k, 1 if self.config.num_memories else k):
            step = slice(start, start + 1 if self.config.num_memories else k)
            at = tuple(table[:, step] for table in rotary)
            streams = [x[:, :, step]]
            for i, layer in enumerate(self.model["layers"]):
                now = layer.keys_values(streams[-1], at)
                own[i] = now if own[i] is None else _then(own[i], now)
                context = cut.choose(*(y.flatten(1, 2) for y in now)) if own_context else contexts[i]
                streams.append(layer(streams[-1], at, context, own[i], cut.hidden))
            if self.config.num_memories:
                own = self._remember(streams, at, own)
            out.append(streams[-1])
        return torch.cat(out, dim=2).flatten(1, 2)[:, : ids.shape[1] - first]

    @torch.no_grad()
    def inputs(self, ids: torch.Tensor, k: int) -> Residuals:
        """What enters each layer: the ``residuals`` of a text, for a draft whose context is its own."""
        seen: list[torch.Tensor] = []
        layers = self.model["layers"]
        hooks = [layer.register_forward_pre_hook(lambda _, given: seen.append(given[0])) for layer in layers]
        try:
            self(ids, None, k)
        finally:
            for hook in hooks:
                hook.remove()
        return torch.stack([x.flatten(1, 2)[:, : ids.shape[1]] for x in seen])

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., V]`` of residual streams behind the last layer, by the target's own norm and head."""
        return self.ends.logits(x, self.target.norm_eps)

    @property
    def ends(self) -> Ends:
        """What it shares with its target, where that is now."""
        return Ends(self.embedding, self.norm, self.head)

    def _project(self, i: int, stream: torch.Tensor, cut: _Cut) -> KV:
        """Keys and values of layer ``i`` for what each block reads of ``stream [B, L, hidden]``."""
        kv = self.model["layers"][i].keys_values(stream, self._at(torch.arange(stream.shape[1], device=stream.device)))
        return cut.choose(*kv)

    def _remember(self, streams: list[torch.Tensor], at: KV, own: list[KV]) -> list[KV]:
        """The step is over: the newest token's keys and values are those of its memory from now on."""
        memories = torch.einsum("il,l...->i...", self.memory.softmax(dim=-1), torch.stack(streams))
        memories = memories.to(streams[-1].dtype)  # autocast multiplies in a type of its own
        kept = []
        for i, (k, v) in enumerate(own):
            layer = self.model["layers"][i]
            now = layer.keys_values(memories[i if self.config.memory == "per_layer" else 0], at)
            kept.append(_then((k[:, :, :-1], v[:, :, :-1]), now))
        return kept

    def _at(self, positions: torch.Tensor) -> KV:
        """Cosines and sines, ``[..., D/2]``."""
        return tuple(x.unflatten(0, positions.shape) for x in self._rotary.lookup(positions.flatten()))


class _Cut:
    """A text of ``length`` tokens in J blocks of ``k`` from ``first`` on, and what each block knows beforehand.

    Windows of neighbouring blocks overlap, so N groups of C blocks are given the S tokens that any of the group reads.
    """

    def __init__(self, length: int, k: int, first: int, config: FeedbackConfig, device: torch.device) -> None:
        blocks = -(-(length - first) // k)
        groups = -(-blocks // GROUP)
        each = -(-blocks // groups)
        starts = first + k * torch.arange(groups * each, device=device).view(groups, each, 1)
        # Tokens past the end repeat the last one; they are nobody's past, and are dropped at the end.
        self.tokens = (starts.view(-1, 1) + torch.arange(k, device=device)).clamp(max=length - 1)  # [J, k]
        size, sinks = min(config.window, length), torch.arange(config.sinks, device=device)
        window = starts[:, 0] + torch.arange(-size, (each - 1) * k, device=device)  # [N, ...]
        first_seen, at = starts - config.window, window[:, None]  # [N, C, 1], [N, 1, ...]
        seen = torch.cat([sinks < first_seen, (at >= 0) & (at >= first_seen) & (at < starts)], dim=2)
        context = torch.cat([sinks.expand(groups, -1), window], dim=1).clamp(0, length - 1)
        used = seen.any(dim=1).any(dim=0)
        self.context, self.hidden = context[:, used], ~seen[:, :, used]  # [N, S], [N, C, S]

    def choose(self, k: torch.Tensor, v: torch.Tensor) -> KV:
        """``[B, G, N, S, D]`` of all tokens' ``[B, L, G, D]``."""
        return tuple(x.transpose(1, 2)[:, :, self.context] for x in (k, v))


class _Layer(nn.Module):
    """One decoder layer over given keys and values."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, dim, inner = config.hidden_size, config.head_dim, config.intermediate_size
        q, kv, eps = config.num_heads * dim, config.num_kv_heads * dim, config.norm_eps
        self.dim = dim
        self.input_layernorm = nn.RMSNorm(hidden, eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)
        parts = {name: nn.Linear(hidden, kv, config.qkv_bias) for name in ("k_proj", "v_proj")}
        parts |= {"q_proj": nn.Linear(hidden, q, config.qkv_bias), "o_proj": nn.Linear(q, hidden, config.o_bias)}
        if config.qk_norm:
            parts |= {"q_norm": nn.RMSNorm(dim, eps), "k_norm": nn.RMSNorm(dim, eps)}
        self.self_attn = nn.ModuleDict(parts)
        sizes = {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
        self.mlp = nn.ModuleDict({name: nn.Linear(*size, config.mlp_bias) for name, size in sizes.items()})

    def keys_values(self, x: torch.Tensor, rotary: KV) -> KV:
        """Of residual streams ``[..., hidden]``; ``rotary [..., D/2]`` may lack the first dimensions."""
        x = self.input_layernorm(x)
        return self._turned("k", x, rotary), self.self_attn["v_proj"](x).unflatten(-1, (-1, self.dim))

    def forward(self, x: torch.Tensor, rotary: KV, context: KV, own: KV, hidden: torch.Tensor) -> torch.Tensor:
        """``x [B, J, Q, hidden]``: the last Q of a block's tokens, over their context and the block so far."""
        q = self._turned("q", self.input_layernorm(x), rotary)
        x = x + self.self_attn["o_proj"](_attend(q, context, own, hidden).flatten(3))
        h, mlp = self.post_attention_layernorm(x), self.mlp
        return x + mlp["down_proj"](functional.silu(mlp["gate_proj"](h)) * mlp["up_proj"](h))

    def _turned(self, which: str, x: torch.Tensor, rotary: KV) -> torch.Tensor:
        heads = self.self_attn[f"{which}_proj"](x).unflatten(-1, (-1, self.dim))
        if f"{which}_norm" in self.self_attn:
            heads = self.self_attn[f"{which}_norm"](heads)
        cos, sin = (table.expand(*x.shape[:-1], -1).flatten(0, -2) for table in rotary)
        return apply_rotary(heads.flatten(0, -3), cos, sin).view(heads.shape)


def _attend(q: torch.Tensor, context: KV, own: KV, hidden: torch.Tensor) -> torch.Tensor:
    """``q [B, J, Q, H, D]`` over ``context [B, G, N, S, D]``, less what is ``hidden [N, C, S]``, and its block's own.

    Of ``own [B, J, R, G, D]`` the last Q are the queries' own, and are seen causally.
    """
    (groups, each, size), (_, blocks, queries, _, _), seen = hidden.shape, q.shape, own[0].shape[2]
    if not size and seen == queries:
        parts = (x.flatten(0, 1).transpose(1, 2) for x in (q, *own))
        out = functional.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).unflatten(0, (-1, blocks))
    kv_heads = own[0].shape[3]
    q = (q * q.shape[-1] ** -0.5).unflatten(3, (kv_heads, -1)).unflatten(1, (groups, each))
    q = q.permute(0, 4, 1, 2, 5, 3, 6)  # [B, G, N, C, H/G, Q, D]
    k, v = (x.unflatten(1, (groups, each)).permute(0, 4, 1, 2, 3, 5) for x in own)  # [B, G, N, C, R, D]
    of_group, of_block = q.shape[3:6], q.shape[4:6]
    scores = (q.flatten(3, 5) @ context[0].mT).unflatten(3, of_group), (q.flatten(4, 5) @ k.mT).unflatten(4, of_block)
    later = torch.arange(seen, device=q.device) > torch.arange(seen - queries, seen, device=q.device)[:, None]  # [Q, R]
    masked = torch.cat([hidden[:, :, None].expand(-1, -1, queries, -1), later.expand(groups, each, -1, -1)], dim=-1)
    weights = torch.cat(scores, dim=-1).masked_fill(masked[:, :, None], -torch.inf).softmax(dim=-1)
    old, new = weights.split((size, seen), dim=-1)
    out = (old.flatten(3, 5) @ context[1]).unflatten(3, of_group) + (new.flatten(4, 5) @ v).unflatten(4, of_block)
    return out.permute(0, 2, 3, 5, 1, 4, 6).flatten(4, 5).flatten(1, 2)


def _then(first: KV, second: KV) -> KV:
    """Both, one token of a block after the other."""
    return tuple(torch.cat(pair, dim=2) for pair in zip(first, second, strict=True))
