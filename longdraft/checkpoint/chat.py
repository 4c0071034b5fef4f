"""Chat messages to prompt text and token ids, through the model's own Jinja template.

A template comes with the model and is not trusted: ``template_worker`` renders it in a sandbox, in its own process.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from longdraft.checkpoint.template_worker import worker
from longdraft.errors import InvalidValueError, TemplateError

if TYPE_CHECKING:
    from longdraft.checkpoint.tokenizer import Tokenizer

MAX_OUTPUT = 4 << 20  # bytes of UTF-8, the default
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
    reply = worker.ask(line, 8 * max_bytes + 65536)  # JSON writes one byte of text as at most six
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
