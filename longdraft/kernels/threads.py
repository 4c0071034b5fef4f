"""Threads of PyTorch's beside those of the native kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """What is inside runs on the calling thread alone.

    For small steps between native passes: threads that PyTorch has used go on looking for work for some milliseconds,
    on the cores that the next pass runs on.
    """
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
