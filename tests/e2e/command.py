"""The ``longdraft`` command: in this process, which is quick, or as a process of its own."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from unittest import mock

from longdraft.cli.app import main

COMMAND = [sys.executable, "-m", "longdraft"]
# One thread each: several of these may run beside each other on few cores.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def longdraft(*args, stdin=""):
    """The command in this process: status, stdout and stderr as a user's shell would have them, none a terminal."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    given = io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8")
    with (
        mock.patch.object(sys, "argv", ["longdraft", *args]),
        mock.patch.object(sys, "stdin", given),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as exit:
            code = exit.code or 0
    return subprocess.CompletedProcess(args, code, out.getvalue(), err.getvalue())


def longdraft_process(*args, stdin=None):
    """The command as a process of its own."""
    command = [*COMMAND, *args]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=200, env=ENVIRONMENT)
