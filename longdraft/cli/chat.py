"""``longdraft chat``: talk to a model in the terminal, or line by line through pipes."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer
from rich.console import Console
from rich.text import Text

from longdraft.cli import drafting, options, sampling
from longdraft.cli.chat_io import Message, load, printable, read_piped, save, terminal_reader
from longdraft.config import DEFAULT_DRAFT, MAX_SEED
from longdraft.errors import ContextLengthError, InvalidValueError, LongDraftError, TemplateError
from longdraft.sampling_params import SamplingParams

if TYPE_CHECKING:
    from longdraft.llm import LLM
    from longdraft.outputs import RequestOutput, StreamOutput

MORE = "... "  # the prompt of a message's further lines
COMMANDS = {  # name: (what follows it, what it does)
    "help": ("", "list the commands"),
    "reset": ("", "forget the conversation; the system message stays"),
    "system": ("[TEXT]", "set the system message; the conversation stays. Without TEXT: show it. TEXT -: remove it"),
    "save": ("FILE", "write the conversation to a new JSON file"),
    "load": ("FILE", "go on with a conversation that /save wrote"),
    "retry": ("", "drop the last answer and ask again"),
    "stats": ("", "figures of the last answer and of the cache"),
    "exit": ("", "leave; /quit and Ctrl-D do so, too"),
    "quit": ("", "leave"),
}


def chat(
    model: options.Model = None,
    tokenizer: options.TokenizerFolder = None,
    system: Annotated[str | None, typer.Option(help="The system message. Left out: the model's own.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most new tokens per answer.")] = 512,
    temperature: sampling.Temperature = None,
    top_k: sampling.TopK = None,
    top_p: sampling.TopP = None,
    min_p: sampling.MinP = None,
    repetition_penalty: sampling.Repetition = None,
    seed: sampling.Seed = None,
    draft: drafting.Name = DEFAULT_DRAFT,
    kv: drafting.Kv = None,
    budget: drafting.Budget = 512,
    refresh: drafting.Refresh = None,
    gamma: drafting.Gamma = 4,
    sampling_rule: drafting.Rule = "coupled",
    dtype: options.Dtype = "auto",
    kv_format: options.KVFormat = None,
    device: options.Device = "auto",
    max_model_len: options.MaxModelLen = None,
    stats: Annotated[bool, typer.Option("--stats/--no-stats", help="Figures on stderr after each answer.")] = False,
    download: options.Download = False,
) -> None:
    """Talk to a model. In a pipe, each line is a message and stdout holds the answers only. /help lists commands.

    Sampling options left out are the model's own (its generation_config.json).
    """
    given = {"max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    given |= {"repetition_penalty": repetition_penalty, "seed": seed}
    # So that a bad value is refused before a model is read.
    SamplingParams(**{name: value for name, value in given.items() if value is not None})
    config = drafting.draft_config(draft, budget, gamma, sampling_rule, kv, refresh)
    require_chat_model(model, tokenizer, download)
    settings = {"dtype": dtype, "kv_format": kv_format, "device": device, "max_model_len": max_model_len}
    llm = options.make_llm(model, draft=config, tokenizer=tokenizer, download=download, **settings)
    params = sampling.sampling_params(llm, **given)
    interactive = sys.stdin is not None and sys.stdin.isatty()
    if hasattr(sys.stdout, "reconfigure"):  # a letter that the terminal lacks is no reason to end
        sys.stdout.reconfigure(errors="replace")
    read = terminal_reader() if interactive else read_piped
    Chat(llm, params, system=system, stats=stats, interactive=interactive, read=read).run()


def require_chat_model(model: str | None, tokenizer: str | None, download: bool) -> None:
    """Refuse a model that cannot chat, from its headers alone. Raises ``InvalidValueError`` or ``TemplateError``."""
    from longdraft.checkpoint.load import load_checkpoint

    checkpoint = load_checkpoint(model, download=download)
    if checkpoint.tokenizer is None and tokenizer is None:
        fix = "Name a folder that has a tokenizer.json with --tokenizer."
        raise InvalidValueError("--tokenizer", None, f"it is needed: {checkpoint.name!r} comes without one", fix)
    if not checkpoint.chat_template:
        raise TemplateError(
            f"{checkpoint.name!r} has no chat template. Use a model that has one (mostly an 'instruct' or 'chat' "
            "model), or complete plain text with: longdraft generate"
        )


@dataclass(frozen=True)
class Answer:
    """What came of one message. ``result`` is missing only where the engine was stopped before it could tell."""

    text: str
    result: RequestOutput | None
    stopped: bool
    seed: int | None

    @property
    def figures(self) -> str:
        """One line of figures."""
        parts = ["stopped by Ctrl-C"] if self.stopped else []
        if self.result:
            stats = self.result.stats
            parts.append(f"{stats.output_tokens:,} tokens at {stats.decode_tokens_per_s:,.1f} tokens/s")
            parts.append(f"prompt of {stats.prompt_tokens:,} tokens in {stats.prefill_s:.2f} s")
            if stats.drafted:
                parts.append(f"{stats.accepted / stats.drafted:.0%} of {stats.drafted:,} proposals accepted")
                parts.append(f"{stats.tokens_per_verify:.2f} tokens per verify")
        if self.seed is not None:
            parts.append(f"seed {self.seed}")
        return ", ".join(parts)


class Chat:
    """A conversation with a model: ``system`` and ``turns`` are its state, ``run`` is the loop around it.

    Args:
        llm: the model.
        params: how answers are decoded. If it samples, its seed is the first answer's, and each further answer adds
            one to it, so that /retry gives another answer and the conversation as a whole is repeatable.
        system: the system message.
        stats: print a line of figures after each answer.
        interactive: somebody is watching: greet, prompt, and let Ctrl-C stop no more than an answer.
        read: gives one line after showing a prompt; raises ``EOFError`` at the end.
        out: where answers go.
        console: where everything else goes; ``None`` is stderr.
    """

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        *,
        system: str | None = None,
        stats: bool = False,
        interactive: bool = True,
        read: Callable[[str], str] = input,
        out: TextIO | None = None,
        console: Console | None = None,
    ) -> None:
        self.llm, self.params, self.system, self.stats, self.interactive = llm, params, system, stats, interactive
        self.turns: list[Message] = []  # user and assistant in turns
        self.last: Answer | None = None
        self._read, self._out = read, sys.stdout if out is None else out
        self._console = console or Console(stderr=True)
        self._asked = 0
        self._seed = secrets.randbelow(2**31) if params.seed is None else params.seed

    @property
    def messages(self) -> list[Message]:
        """The whole conversation, the system message first."""
        return self._with_system(self.turns)

    def run(self) -> None:
        """Read and answer until the end of input, /exit, or a second Ctrl-C at the prompt."""
        if self.interactive:
            lossy = f", KV in {self.llm.kv_format} (lossy)" if self.llm.kv_format else ""
            size = f"context of {self.llm.engine.config.max_tokens_per_request:,} tokens{lossy}"
            self._note(f"{self.llm.checkpoint.name}, {size}. /help lists the commands, Ctrl-D leaves.")
        warned = False
        while True:
            try:
                line = self.read_message()
                warned = False
                if not self.handle(line):
                    return
            except EOFError:
                if self.interactive:
                    self._note("")  # the shell's prompt gets a line of its own
                return
            except UnicodeDecodeError as error:
                self._error(f"the message must be UTF-8 text ({error.reason} at byte {error.start})")
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                if warned:
                    self._note("")
                    return
                warned = True
                self._note("\nPress Ctrl-C again or Ctrl-D to leave.")

    def read_message(self) -> str:
        """One message: a line, and while lines end in a backslash, the next one. Raises ``EOFError``."""
        prompts = ("> ", MORE) if self.interactive else ("", "")
        line = self._read(prompts[0])
        lines = [line]
        while line.endswith("\\"):
            lines[-1] = line[:-1]
            try:
                line = self._read(prompts[1])
            except EOFError:  # what was written counts
                break
            lines.append(line)
        return "\n".join(lines)

    def handle(self, line: str) -> bool:
        """Do what a command says, or send a message; False is to leave."""
        if line.startswith("/") and not line.startswith("//"):
            try:
                return self._command(line)
            except LongDraftError as error:
                self._error(str(error))
        elif line.strip():
            self.send(line.removeprefix("/") if line.startswith("//") else line)
        return True

    def send(self, text: str) -> None:
        """Ask the model and show its answer. A message that gets none does not stay in the conversation."""
        if problem := self._answer([*self.turns, {"role": "user", "content": text}]):
            self._error(f"{problem} Your message is not kept.")

    def _answer(self, turns: list[Message]) -> str:
        """Answer ``turns`` and make them the conversation; or what went wrong, and all stays as it was."""
        limit = self.llm.engine.config.max_tokens_per_request
        try:
            answer = self._stream(self._with_system(turns))
        except ContextLengthError as error:
            fix = "/reset forgets the conversation." if len(turns) > 1 else "Shorten the message."
            return (
                f"The conversation takes {error.value:,} tokens, but the context holds {limit:,} with the answer. {fix}"
            )
        except LongDraftError as error:
            return str(error)
        completion = answer.result.outputs[0] if answer.result else None
        if completion and completion.error:
            return f"The answer failed: {completion.error}."
        if answer.stopped and not answer.text:
            return "Stopped before a word of the answer came."
        self.turns, self.last = [*turns, {"role": "assistant", "content": answer.text}], answer
        if answer.stopped:
            self._note("Stopped. What has come stays in the conversation.")
        elif completion and completion.finish_reason == "length":
            self._explain_cut(answer.result, limit)
        if self.stats:
            self._note(answer.figures)
        return ""

    def _stream(self, messages: list[Message]) -> Answer:
        """Show an answer as it comes. Ctrl-C ends it, and with it its request."""
        params, stream, stopped, outputs = self._next_params(), None, False, []
        try:
            stream = self.llm.stream_chat(messages, params)
            self._follow(stream, outputs)
        except KeyboardInterrupt:
            if not self.interactive:
                raise
            stopped = True
            if stream is not None:
                stream.close()
                self._follow(stream, outputs)  # what the last step gave, and the figures
        finally:
            if stream is not None:
                stream.close()
            if outputs:
                self._show("\n")
        result = outputs[-1].result if outputs else None
        text = result.text if result else "".join(output.text for output in outputs)
        return Answer(text, result, stopped, params.seed)

    def _follow(self, stream: Iterator[StreamOutput], outputs: list[StreamOutput]) -> None:
        for output in stream:
            outputs.append(output)  # first, so that an interrupted write loses nothing
            self._show(output.text)

    def _next_params(self) -> SamplingParams:
        if self.params.greedy:
            return replace(self.params, seed=None)
        self._asked += 1
        return replace(self.params, seed=(self._seed + self._asked - 1) % (MAX_SEED + 1))

    def _explain_cut(self, result: RequestOutput, limit: int) -> None:
        prompt, output = result.stats.prompt_tokens, result.stats.output_tokens
        if prompt + output < limit:
            self._note(f"The answer was cut at --max-tokens {self.params.max_tokens:,}.")
            return
        self._error(
            f"The context of {limit:,} tokens is full ({prompt:,} before the answer, {output:,} of it), so the answer "
            "was cut. /reset forgets the conversation."
        )

    def _with_system(self, turns: list[Message]) -> list[Message]:
        return turns if self.system is None else [{"role": "system", "content": self.system}, *turns]

    def _show(self, text: str) -> None:
        self._out.write(printable(text))
        self._out.flush()

    def _note(self, text: str) -> None:
        # As Text, so that nothing in it is taken for markup; unbroken, since the terminal breaks lines itself.
        self._console.print(Text(printable(text), style="dim"), soft_wrap=True)

    def _error(self, text: str) -> None:
        self._console.print(Text(f"error: {printable(' '.join(text.split()))}", style="red"), soft_wrap=True)

    def _command(self, line: str) -> bool:
        name, *rest = line[1:].split(maxsplit=1) or [""]
        if name not in COMMANDS:
            known = ", ".join(f"/{known}" for known in COMMANDS)
            fix = "A message that starts with a slash is written with two."
            raise InvalidValueError("the command", f"/{name}", f"it must be one of {known}", fix)
        argument, wanted = "".join(rest).strip(), COMMANDS[name][0]
        if argument and not wanted:
            raise InvalidValueError(f"what follows /{name}", argument, "it must be nothing")
        if wanted == "FILE" and not argument:
            raise InvalidValueError(f"what follows /{name}", argument, "it must be a file's name")
        if name in ("exit", "quit"):
            return False
        {
            "help": self._help,
            "reset": self._reset,
            "system": self._system,
            "save": self._save,
            "load": self._load,
            "retry": self._retry,
            "stats": self._figures,
        }[name](argument)
        return True

    def _help(self, _: str) -> None:
        for name, (argument, what) in COMMANDS.items():
            self._note(f"{f'/{name} {argument}':<15} {what}")
        self._note("A message that starts with a slash is written with two. A line that ends in a backslash goes on.")
        self._note("Ctrl-C stops an answer and keeps what has come.")

    def _reset(self, _: str) -> None:
        self.turns, self.last = [], None
        self._note("The conversation is forgotten.")

    def _system(self, text: str) -> None:
        if text:
            self.system = None if text == "-" else text
        self._note("No system message is set." if self.system is None else f"The system message: {self.system}")

    def _save(self, name: str) -> None:
        if not self.messages:
            self._error("There is nothing to save yet.")
            return
        save(Path(name), self.messages)
        self._note(f"{len(self.messages)} messages saved to {name}")

    def _load(self, name: str) -> None:
        messages = load(Path(name))
        has_system = messages[0]["role"] == "system"
        self.system = messages[0]["content"] if has_system else None
        self.turns, self.last = messages[has_system:], None
        self._note(f"{len(messages)} messages loaded from {name}; they replace the conversation.")

    def _retry(self, _: str) -> None:
        if not self.turns:
            self._error("There is no answer yet.")
            return
        if self.params.greedy:
            self._note("At temperature 0 the answer to the same words is the same.")
        if problem := self._answer(self.turns[:-1]):
            self._error(f"{problem} The earlier answer stays.")

    def _figures(self, _: str) -> None:
        engine = self.llm.engine
        store = engine.store
        context = len(self.llm.encode_chat(self.messages)) if self.messages else 0

        def kv(pages: int) -> str:
            return f"{pages * store.capacity // store.num_pages:,} tokens ({pages * store.page_bytes / 2**20:,.1f} MiB)"

        self._note(f"context: {context:,} of {engine.config.max_tokens_per_request:,} tokens")
        self._note(f"last answer: {self.last.figures if self.last else 'none'}")
        now, most = kv(store.num_pages - store.num_free_pages), kv(engine.stats.peak_kv_pages)
        self._note(f"KV in use: {now} now, {most} at most, of {kv(store.num_pages)}")
