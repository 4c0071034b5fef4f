"""Chat messages to prompt text and token ids, through the model's own Jinja template.

A template comes with the model and is not trusted. It is rendered in Jinja's sandbox, and that in a child process with
limits on time and memory, killed when it breaks them: a single C call inside a template (``'%999999999d'``, a join, the
text of a nested list) can take any time and memory, so that no check within our own process would come in time.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from longdraft.errors import InvalidValueError, TemplateError

try:
    import resource
except ImportError:  # Windows: only the clock limits the child there
    resource = None

if TYPE_CHECKING:
    import jinja2

    from longdraft.checkpoint.tokenizer import Tokenizer

MAX_SECONDS = 1.0  # wall clock for one rendering
START_SECONDS = 30.0
MAX_OUTPUT = 4 << 20  # bytes of UTF-8, the default
MAX_MEMORY = 192 << 20  # bytes of data the child may hold
# Audit events of the child process, by the part before the first dot, that rendering has no use for.
_FORBIDDEN = frozenset(("open", "import", "os", "subprocess", "socket", "ctypes", "shutil", "mmap"))
_ROLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def render(
    template: str | None,
    messages: Sequence[Mapping[str, object]],
    *,
    bos_token: str = "",
    eos_token: str = "",
    add_generation_prompt: bool = True,
    extra: Mapping[str, object] | None = None,
    max_bytes: int = MAX_OUTPUT,
) -> str:
    """The prompt text that ``template`` makes of ``messages``; ``extra`` holds more variables for it (``tools``...).

    A message is a dict with a ``role`` and a ``content``: a string, or a list of text parts, which are joined with
    newlines. Raises ``InvalidValueError`` for other messages; ``TemplateError`` where there is no template, where the
    template refuses the messages (in its own words), fails, or takes more than ``MAX_SECONDS``, ``MAX_MEMORY`` or
    ``max_bytes``.
    """
    if not template:
        raise TemplateError(
            "This model has no chat template. Use a model that has one (mostly an 'instruct' or 'chat' model), or give "
            "the prompt as plain text to a completion."
        )
    variables = {"tools": None, "documents": None, "bos_token": bos_token, "eos_token": eos_token, **(extra or {})}
    variables |= {"messages": check_messages(messages), "add_generation_prompt": add_generation_prompt}
    request = {"template": template, "variables": variables, "max_bytes": max_bytes}
    try:
        line = json.dumps(request, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:  # ValueError: cycles, and lone surrogates
        limit = f"messages and extra variables must be plain JSON data ({error})"
        raise InvalidValueError("a chat request", messages, limit) from error
    reply = _worker.ask(line, 8 * max_bytes + 65536)  # JSON writes one byte of text as at most six
    if "error" in reply:
        raise TemplateError(reply["error"])
    return reply["text"]


def encode_chat(
    tokenizer: Tokenizer,
    template: str | None,
    messages: Sequence[Mapping[str, object]],
    *,
    add_generation_prompt: bool = True,
    extra: Mapping[str, object] | None = None,
    allow_special_tokens_in_content: bool = False,
    max_bytes: int = MAX_OUTPUT,
) -> list[int]:
    """Prompt ids: the rendered template, encoded with nothing added, as ``apply_chat_template`` of transformers does.

    The template's own control tokens become control ids. The names of control tokens inside ``messages`` and ``extra``
    are plain text, unless ``allow_special_tokens_in_content``. Raises what ``render`` raises, and ``TemplateError``
    where the template works with such a name in a way that makes the two impossible to tell apart.
    """
    bos, eos = ("" if i is None else tokenizer.token_text(i) for i in (tokenizer.bos_token_id, tokenizer.eos_token_id))
    settings = {"add_generation_prompt": add_generation_prompt, "max_bytes": max_bytes}
    rendered = partial(render, template, bos_token=bos, eos_token=eos, **settings)
    checked, extra = check_messages(messages), dict(extra or {})
    text = rendered(checked, extra=extra)
    if allow_special_tokens_in_content:
        return tokenizer.encode(text, add_special_tokens=False)
    mark = _unused_character(template, text, checked, extra)
    marked, marked_extra = _mark((checked, extra), tokenizer.special_tokens, mark)
    marked = [new | {"role": old["role"]} for new, old in zip(marked, checked, strict=True)]
    if (marked, marked_extra) == (checked, extra):
        return tokenizer.encode(text, add_special_tokens=False)
    marked_text = rendered(marked, extra=marked_extra)
    if marked_text.replace(mark, "") != text:
        raise TemplateError(
            "The messages hold the name of a control token, and the chat template changes the text around it, so it "
            "cannot be kept as plain text. Remove it, or set allow_special_tokens_in_content."
        )
    return tokenizer.encode_marked(marked_text, mark)


def check_messages(messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """``messages`` with string contents and no None values; ``InvalidValueError`` names the index of a bad one."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InvalidValueError("messages", messages, "there must be a list of at least one message")
    return [_check_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _check_message(where: str, message: Mapping[str, object]) -> dict[str, object]:
    if not isinstance(message, Mapping):
        raise InvalidValueError(where, message, "it must be a dict with 'role' and 'content'")
    role, content = message.get("role"), message.get("content")
    # Templates write the role between control tokens, so it may not hold anything that could end it.
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise InvalidValueError(f"{where}['role']", role, "it must be a word like 'system', 'user' or 'assistant'")
    if isinstance(content, (list, tuple)):
        content = "\n".join(_part_text(f"{where}['content'][{i}]", part) for i, part in enumerate(content))
    if not isinstance(content, str):
        raise InvalidValueError(f"{where}['content']", content, "it must be a string or a list of text parts")
    return {key: value for key, value in message.items() if value is not None} | {"content": content}


def _part_text(where: str, part: object) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text":
        raise InvalidValueError(f"{where}['type']", kind, "only parts {'type': 'text', 'text': ...} are supported")
    if not isinstance(part.get("text"), str):
        raise InvalidValueError(f"{where}['text']", part.get("text"), "it must be a string")
    return part["text"]


def _unused_character(*used: object) -> str:
    """A character that nobody could foresee and that occurs nowhere in ``used``."""
    taken = json.dumps(used, ensure_ascii=False)
    while (mark := chr(0xF0000 + secrets.randbelow(0xFFFE))) in taken:
        pass
    return mark


@lru_cache(maxsize=8)
def _name_parts(names: tuple[str, ...]) -> tuple[re.Pattern[str], tuple[str, ...], tuple[str, ...]]:
    """A regex for the first character of each name (names may overlap), and the beginnings and ends of all names."""
    starts = re.compile(f"(?=(?:{'|'.join(map(re.escape, names)) or '(?!)'})).", re.DOTALL)
    cuts = [(name[:i], name[i:]) for name in names for i in range(1, len(name))]
    return starts, tuple({start for start, _ in cuts}), tuple({end for _, end in cuts})


def _mark(value: Any, names: tuple[str, ...], mark: str) -> Any:
    """A copy of plain data with ``mark`` inside every control token's name, and at ends that could be part of one."""
    starts, prefixes, suffixes = _name_parts(names)

    def broken(text: str) -> str:
        return starts.sub(lambda match: match[0] + mark, text)

    def walk(item: Any) -> Any:
        if isinstance(item, str):
            text, core = broken(item), item.strip()
            if core.startswith(suffixes):  # inside the spaces, which many templates strip
                text = text[: -len(text.lstrip())] + mark + text.lstrip()
            if core.endswith(prefixes):
                text = text.rstrip() + mark + text[len(text.rstrip()) :]
            return text
        if isinstance(item, Mapping):
            return {broken(key) if isinstance(key, str) else key: walk(entry) for key, entry in item.items()}
        return [walk(entry) for entry in item] if isinstance(item, (list, tuple)) else item

    return walk(value)


class _Worker:
    """The child process, started when first needed (about 0.1 s) and again after it had to be killed.

    It keeps nothing from one request to the next, so all engines of a process share one.
    """

    _BOOT = (
        "import json, sys; sys.path[:] = json.loads(sys.stdin.buffer.readline()); "
        "from longdraft.checkpoint.chat import _serve; _serve()"
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


_worker = _Worker()


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
        value: object, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, **more: Any
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
