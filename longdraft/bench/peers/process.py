"""A peer's process from our end: started, asked, ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from longdraft.bench.machine import describe_machine
from longdraft.bench.peers import Peer
from longdraft.bench.turns import OnProgress
from longdraft.errors import InvalidValueError, LongDraftError, MissingDependencyError

if TYPE_CHECKING:
    from longdraft.llm import LLM


class PeerProcess:
    """A running peer. ``engine`` is its name and version, ``dtype`` the type of its weights once it has loaded them."""

    def __init__(self, peer: Peer, python: str, threads: int, report: OnProgress) -> None:
        self.peer, self._report, self.dtype = peer, report, ""
        count = str(threads)
        quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": count}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        try:
            # In a session of its own: Ctrl-C is for us, who end it.
            self._child = subprocess.Popen(  # noqa: S603 - our own script
                [python, str(peer.script)], env={**os.environ, **quiet}, start_new_session=True, **pipes
            )
        except OSError as error:
            problem = f"must be a Python interpreter ({error.strerror})"
            raise InvalidValueError("--peer-python", python, problem) from error
        try:
            self.engine = self._answer(f"{python} -m pip install {peer.packages}")
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """For its counters of processor time."""
        return self._child.pid

    def ask(self, do: str, **arguments: object) -> Any:  # noqa: ANN401 - JSON
        """Have the peer do something; its answer."""
        try:
            self._child.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            pass  # it ended; reading says so
        return self._answer()

    def _answer(self, install: str = "") -> Any:  # noqa: ANN401 - JSON
        for line in self._child.stdout:
            message = json.loads(line)
            if "progress" in message:
                name, *state = message["progress"]
                self._report(f"{self.peer.name}: {name}", *state)
            elif "missing" in message:
                raise MissingDependencyError(message["missing"], f"--peer {self.peer.name}", install)
            else:
                return message["answer"]
        raise LongDraftError(f"The process of --peer {self.peer.name} ended; its message is above.")

    def close(self) -> None:
        """End it, at once."""
        self._child.kill()
        self._child.communicate()


@contextmanager
def running(peer: Peer, llm: LLM, python: str | None, report: OnProgress) -> Iterator[PeerProcess]:
    """The peer with the model of ``llm``, on as many threads. Raises ``MissingDependencyError`` where it lacks."""
    if llm.model.device.type != "cpu":
        raise InvalidValueError("--device", str(llm.model.device), "must be cpu with --peer, which runs there")
    threads = int(describe_machine(None)["threads"])
    process = PeerProcess(peer, python or sys.executable, threads, report)
    try:
        with TemporaryDirectory(prefix="longdraft-peer-") as folder:
            model = peer.hand_over(llm, Path(folder))
            dtype = str(llm.model.dtype).removeprefix("torch.")
            process.dtype = process.ask("load", model=str(model), dtype=dtype, threads=threads)
            yield process
    finally:
        process.close()
