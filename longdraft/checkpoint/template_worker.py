"""Renders chat templates in Jinja's sandbox, in a child process with limits that is killed when it breaks them.

A process, because a single C call inside a template (``'%999999999d'``, a join, the text of a nested list) can take any
time and memory, so that no check within our own process would come in time.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING

from longdraft.errors import TemplateError

try:
    import resource
except ImportError:  # Windows: only the clock limits the child there
    resource = None

if TYPE_CHECKING:
    import jinja2

MAX_SECONDS = 1.0  # wall clock for one rendering
START_SECONDS = 30.0
MAX_MEMORY = 192 << 20  # bytes of data the child may hold
# Audit events of the child process, by the part before the first dot, that rendering has no use for.
_FORBIDDEN = frozenset(("open", "import", "os", "subprocess", "socket", "ctypes", "shutil", "mmap"))


class TemplateWorker:
    """The child process, started when first needed (about 0.1 s) and again after it had to be killed.

    It keeps nothing from one request to the next, so all engines of a process share one.
    """

    _BOOT = (
        "import json, sys; sys.path[:] = json.loads(sys.stdin.buffer.readline()); "
        "from longdraft.checkpoint.template_worker import _serve; _serve()"
    )

    def __init__(self) -> None:
        self._reset()
        atexit.register(self._stop)
        if hasattr(os, "register_at_fork"):  # a forked process must not talk to its parent's child
            os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: bytes, limit: int) -> dict[str, str]:
        """The child's reply, of at most ``limit`` bytes; ``TemplateError`` if it breaks its limits."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._stop()
                self._start()
            line, late = self._exchange(request, limit, MAX_SECONDS)
        if line:
            return json.loads(line)
        broken = f"{MAX_SECONDS:g} s" if late else f"{MAX_MEMORY >> 20} MiB of memory, or broke its process"
        raise TemplateError(f"The chat template was stopped: it took more than {broken}.")

    def _start(self) -> None:
        command = [sys.executable, "-I", "-c", self._BOOT]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        try:
            self._process = subprocess.Popen(command, **pipes)  # noqa: S603
        except OSError as error:
            raise TemplateError(f"The process that renders chat templates cannot be started ({error}).") from error
        line, _ = self._exchange(json.dumps([p for p in sys.path if isinstance(p, str)]).encode(), 64, START_SECONDS)
        if not line:
            raise TemplateError("The process that renders chat templates does not start. Is jinja2 installed?")

    def _exchange(self, request: bytes, limit: int, seconds: float) -> tuple[bytes, bool]:
        """Send one line and read one; without a whole line in time, kill the child and return no bytes."""
        process, late = self._process, threading.Event()

        def expire() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(seconds, expire)
        timer.start()
        line = b""
        try:
            process.stdin.write(request + b"\n")
            process.stdin.flush()
            line = process.stdout.readline(limit)
        except OSError:
            pass  # it died
        finally:
            timer.cancel()
            timer.join()  # so that it has either killed the child or never will
            if late.is_set() or not line.endswith(b"\n"):  # also after KeyboardInterrupt: the reply may still come
                line = b""
                self._stop()
        return line, late.is_set()

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


worker = TemplateWorker()


def _serve() -> None:
    """The child's main loop: one JSON request per line in, one JSON reply per line out."""
    compiled = lru_cache(maxsize=4)(_environment().from_string)
    # Jinja loads parts of itself when they are first needed, which has to be before _confine.
    reply = _render(compiled, "{{ messages | pprint }}{{ strftime_now('%d %b') }}", {"messages": []}, 99)
    _confine()
    while True:
        sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")  # the first reply says that it is ready
        sys.stdout.buffer.flush()
        if not (line := sys.stdin.buffer.readline()):
            return
        try:
            _limit_cpu()
            reply = _render(compiled, **json.loads(line))
        except Exception as error:
            reply = {"error": f"The chat template failed: {type(error).__name__}: {str(error)[:2000]}"}


def _render(
    compiled: Callable[[str], jinja2.Template], template: str, variables: dict[str, object], max_bytes: int
) -> dict[str, str]:
    import jinja2

    chunks, size = [], 0
    try:
        for chunk in compiled(template).generate(variables):
            chunks.append(chunk)
            size += len(chunk.encode())
            if size > max_bytes:
                return {"error": f"The chat template was stopped: it wrote more than {max_bytes} bytes."}
    except jinja2.TemplateError as error:
        if type(error) is not jinja2.TemplateError:
            raise
        return {"error": f"The chat template refused the messages: {str(error)[:2000]}"}  # from raise_exception
    return {"text": "".join(chunks)}


def _environment() -> jinja2.Environment:
    """The sandbox, with what ``transformers`` gives to templates."""
    import jinja2.debug  # not loaded before the first error otherwise, when nothing can be loaded any more
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """``{% generation %}`` marks the model's own words for training; here it changes nothing."""

        tags = {"generation"}

        def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
            line = next(parser.stream).lineno
            return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def raise_exception(message: object) -> None:
        raise jinja2.TemplateError(str(message))

    def tojson(
        value: object, ensure_ascii: bool = False, indent: object = None, separators: object = None, **more: object
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, **more)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _confine() -> None:
    """Give up what rendering does not need, should a template find its way out of the sandbox."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which may still want to render

    def refuse(event: str, _: tuple) -> None:
        if event.partition(".")[0] in _FORBIDDEN:
            raise PermissionError(f"a chat template may not use {event}")

    if resource is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY, MAX_MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.addaudithook(refuse)


def _limit_cpu() -> None:
    """Seconds from now after which the system ends this process, even if its parent no longer exists."""
    if resource is not None:
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + MAX_SECONDS) + 2, hard))
