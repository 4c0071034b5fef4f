"""What a draft's token is drawn from, and with which noise.

A request's temperature, top_k and top_p apply to the draft as to the target; penalties and word lists do not, which
costs acceptance and nothing else: vLLM's rejection sampler is told the distribution that was drawn from
(arXiv:2211.17192). The noise is a pure function of a row's seed and of the position, so that a request with a seed
drafts the same tokens again and all ranks of a tensor-parallel group draft alike.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from longdraft.sampling_params import SamplingParams
from longdraft.spec.noise import DRAFT, all_gumbels
from longdraft.spec.probs import to_log_probs


class Seeds:
    """A seed for each request: its own if it has one, else one of a stream that all ranks share."""

    def __init__(self, seed: int) -> None:
        self._stream = torch.Generator().manual_seed(seed)
        self._seeds: dict[str, int] = {}

    def of(self, request: str, given: int | None) -> int:
        """The seed of ``request``, the same at every call until it is dropped."""
        if request not in self._seeds:
            drawn = int(torch.randint(2**62, (), generator=self._stream))
            self._seeds[request] = drawn if given is None else given & (2**63 - 1)
        return self._seeds[request]

    def keep(self, requests: Iterable[str]) -> None:
        """Forget all but ``requests``."""
        alive = set(requests)
        self._seeds = {name: seed for name, seed in self._seeds.items() if name in alive}


def draw(
    logits: torch.Tensor, params: list[SamplingParams], seeds: list[int], positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens ``[R]`` and their distributions ``[R, V]`` float32 for ``logits [R, V]``; greedy rows are one-hot."""
    log_q = to_log_probs(logits, params)
    seed = torch.tensor(seeds, dtype=torch.int64, device=logits.device)
    noise = all_gumbels(seed, positions.long(), logits.shape[1], role=DRAFT)
    return (log_q + noise).argmax(dim=-1), log_q.exp().float()
