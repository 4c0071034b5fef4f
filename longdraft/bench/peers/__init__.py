"""Other engines' plain decoding in turns with ours: which there are, what each is given, and how to install it.

A peer runs in a process of its own, by a Python of its own where one is named: ``hf.py`` and ``llama.py`` are scripts
that need their engine and ``serve.py``, and nothing else of this package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from longdraft.bench.peers import hand_over

if TYPE_CHECKING:
    from longdraft.llm import LLM


@dataclass(frozen=True)
class Peer:
    """An engine: its script, the packages for ``pip install``, and what makes the model's file or folder for it."""

    name: str
    script: Path
    packages: str
    hand_over: Callable[[LLM, Path], Path]  # folder for new files → the model


_HERE = Path(__file__).parent
_ALL = (
    Peer("hf", _HERE / "hf.py", "torch transformers", hand_over.as_folder),
    Peer("llama-cpp", _HERE / "llama.py", "llama-cpp-python", hand_over.as_gguf),
    Peer("llama-cpp-unpacked", _HERE / "llama.py", "llama-cpp-python", hand_over.as_unpacked_gguf),
)
PEERS = {peer.name: peer for peer in _ALL}
