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


class Draw:
    """Draws of R rows with ``params`` and ``seeds``, laid out on ``device`` once for all steps of a round."""

    def __init__(self, params: list[SamplingParams], seeds: list[int], device: torch.device) -> None:
        self._params = params
        self._seeds = torch.tensor(seeds, dtype=torch.int64).to(device)
        self._filters = None if device.type == "cpu" else Filters(params, device)

    def __call__(self, logits: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens ``[R]`` and their distributions ``[R, V]`` float32 for ``logits [R, V]``; greedy rows are one-hot."""
        log_q = to_log_probs(logits, self._params) if self._filters is None else self._filters(logits)
        noise = all_gumbels(self._seeds, positions.long(), logits.shape[1], role=DRAFT)
        return (log_q + noise).argmax(dim=-1), log_q.exp().float()


class Filters:
    """``to_log_probs`` of all rows at once, for devices that would be waited for where a row is looked at.

    For processors, which sort as little as they can, it is the other one. Without ``min_p``, which vLLM refuses.
    """

    def __init__(self, params: list[SamplingParams], device: torch.device) -> None:
        whole = 2.0**31  # more than there are tokens
        values = [
            (1.0, 1.0, 2.0) if p.greedy else (p.temperature, p.top_k or whole, p.top_p if p.top_p < 1 else 2.0)
            for p in params
        ]
        self._values = torch.tensor(values, dtype=torch.float64).to(device)
        self._none = not any(p.greedy or p.filters for p in params)

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """``logits [R, V]`` → ``[R, V]`` float64, −inf outside the support."""
        temperature, top_k, top_p = self._values.T[:, :, None]
        logits = logits.double()
        logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
        if self._none:
            return logits.log_softmax(dim=-1)
        values, order = logits.sort(dim=-1, descending=True, stable=True)  # of equals the lower id comes first
        values = values.masked_fill(torch.arange(values.shape[1], device=values.device) >= top_k, -torch.inf)
        mass = values.softmax(dim=-1)
        before = mass.cumsum(dim=-1) - mass  # 0 for the first, which stays
        values = values.masked_fill(before >= top_p, -torch.inf).log_softmax(dim=-1)
        return torch.full_like(logits, -torch.inf).scatter(1, order, values)
