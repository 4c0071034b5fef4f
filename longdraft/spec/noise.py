"""Counter-based noise: G(seed, position, token id), a pure function without state.

Coupled sampling (arXiv:2408.07978) draws a token as argmax(log p + G). Because the noise depends only on seed, position
and token id, draft and target use the same noise, and neither batch-mates nor speculation can change a draw. The
generator is Philox4x32-10 (Salmon et al. 2011): counter (token id // 4, position, role), key = seed; word ``id % 4``
belongs to the id.

Roles number independent streams. The coupled rule needs one that draft and target share; under the maximal rule
(arXiv:2211.17192) the draft's draw, the acceptance and the draw after a rejection must be independent of each other.
"""

from __future__ import annotations

import torch

COUPLED, DRAFT, ACCEPT, RESIDUAL = range(4)

_MULTIPLY = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_ROUNDS = 10


def philox(counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], seed: torch.Tensor) -> torch.Tensor:
    """Philox4x32-10: four counter words and a 64-bit key ``seed`` (int64, broadcastable) → ``[..., 4]`` words.

    32-bit words live in int64 tensors; products wrap modulo 2^64, which leaves both halves right.
    """
    a, b, c, d = torch.broadcast_tensors(*counter)
    key = (seed & _MASK, (seed >> 32) & _MASK)
    for i in range(_ROUNDS):
        round_key = ((key[0] + i * _WEYL[0]) & _MASK, (key[1] + i * _WEYL[1]) & _MASK)
        first, second = a * _MULTIPLY[0], c * _MULTIPLY[1]
        a = ((second >> 32) & _MASK) ^ b ^ round_key[0]
        c = ((first >> 32) & _MASK) ^ d ^ round_key[1]
        b, d = second & _MASK, first & _MASK
    return torch.stack((a, b, c, d), dim=-1)


def uniforms(seed: torch.Tensor, position: torch.Tensor, ids: torch.Tensor, role: int = COUPLED) -> torch.Tensor:
    """Uniform(0, 1) float64 noise of token ``ids`` at ``position`` under ``seed`` (int64, broadcast together)."""
    zero = torch.zeros_like(ids)
    words = philox((ids >> 2, position, zero + role, zero), seed)
    word = words.gather(-1, (ids & 3).expand(words.shape[:-1])[..., None])[..., 0]
    return _unit(word)


def accept_uniforms(seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """What decides on the drafted token of each position: ``seed, position [K]`` → ``[K]`` float64."""
    return uniforms(seed, position, torch.zeros_like(position), ACCEPT)


def all_gumbels(seed: torch.Tensor, position: torch.Tensor, vocab_size: int, role: int = COUPLED) -> torch.Tensor:
    """Noise of every token: ``seed, position [R]`` → ``[R, V]`` float64, four ids per Philox call."""
    group = torch.arange((vocab_size + 3) // 4, device=seed.device)[None]
    zero = torch.zeros_like(group)
    words = philox((group, position[:, None], zero + role, zero), seed[:, None])
    return _gumbel(_unit(words.flatten(1)[:, :vocab_size]))


def gumbels(seed: torch.Tensor, position: torch.Tensor, ids: torch.Tensor, role: int = COUPLED) -> torch.Tensor:
    """Noise of chosen tokens: ``seed, position, ids [K]`` → ``[K]`` float64, equal to ``all_gumbels`` there."""
    return _gumbel(uniforms(seed, position, ids, role))


def _unit(word: torch.Tensor) -> torch.Tensor:
    return (word.double() + 0.5) / 2.0**32


def _gumbel(u: torch.Tensor) -> torch.Tensor:
    return -torch.log(-torch.log(u))
