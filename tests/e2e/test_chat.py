"""A conversation in the terminal: history, commands, Ctrl-C, a full context, and what may reach the screen."""

import io
import json
import os
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from longdraft.checkpoint import load as loading
from longdraft.cli import options
from longdraft.cli.app import app
from longdraft.cli.chat import COMMANDS, Chat
from longdraft.cli.chat_io import load, printable, read_piped, save, terminal_reader
from longdraft.config import AutoDraft
from longdraft.errors import InvalidValueError, LongDraftError, TemplateError
from longdraft.llm import LLM
from longdraft.outputs import CompletionOutput, RequestOutput, RequestStats, StreamOutput
from longdraft.sampling_params import SamplingParams
from tests.e2e.command import longdraft_process

FRANCE, ITALY = "What is the capital of France?", "And of Italy?"
PARIS = "The capital of France is Paris."
GREEDY = SamplingParams(temperature=0, max_tokens=12)
SAMPLED = SamplingParams(temperature=1, max_tokens=12, seed=5)


@pytest.fixture(scope="module")
def llm():
    return LLM(draft=None, max_model_len=512, kv_cache_memory_bytes=2**28)


class ScriptedStream:
    """What ``LLM.stream_chat`` gives: ``pieces`` of text, of which an exception is raised instead."""

    def __init__(self, pieces, reason="stop", error=None):
        self.waiting, self.closed, self.said = list(pieces), False, ""
        self.reason, self.error, self.done = reason, error, False

    def __iter__(self):
        return self

    def __next__(self):
        if self.done:
            raise StopIteration
        if self.closed or not self.waiting:
            self.done, reason = True, self.reason if not self.waiting else "abort"
            stats = RequestStats(7, 3, 0.25, 0.5, 0, 4, 0.1, 2, (2, 2), (2, 1))
            outputs = [CompletionOutput(0, self.said, [1, 2, 3], reason, self.error)]
            return StreamOutput(0, "", [], None, reason, self.error, RequestOutput(None, [0] * 7, outputs, stats, "x"))
        piece = self.waiting.pop(0)
        if not isinstance(piece, str):
            raise piece
        self.said += piece
        return StreamOutput(0, piece, [1])

    def close(self):
        self.closed = True


class ScriptedLLM:
    """Answers with the scripts it was given, one after another, and remembers what it was asked."""

    kv_format = None

    def __init__(self, *scripts, limit=100):
        self.engine = SimpleNamespace(config=SimpleNamespace(max_tokens_per_request=limit))
        self.checkpoint = SimpleNamespace(name="scripted")
        self.scripts, self.asked, self.params, self.streams = list(scripts), [], [], []

    def stream_chat(self, messages, params):
        self.asked.append([dict(message) for message in messages])
        self.params.append(params)
        script = self.scripts.pop(0)
        if isinstance(script, BaseException):
            raise script
        self.streams.append(script if isinstance(script, ScriptedStream) else ScriptedStream(script))
        return self.streams[-1]


class Talk:
    """A ``Chat`` whose input is a script (of lines and exceptions) and whose outputs are kept."""

    def __init__(self, llm, *lines, params=GREEDY, out=None, **settings):
        self.lines, self.prompts = list(lines), []
        self.out, self.err = out or io.StringIO(), io.StringIO()
        console = Console(file=self.err, force_terminal=False, width=60)
        self.chat = Chat(llm, params, read=self.read, out=self.out, console=console, **settings)

    def read(self, prompt):
        self.prompts.append(prompt)
        line = self.lines.pop(0) if self.lines else EOFError()
        if isinstance(line, BaseException):
            raise line
        return line

    def run(self, *lines):
        """Run over more ``lines``; what stderr got from them."""
        self.lines += lines
        at = len(self.err.getvalue())
        self.chat.run()
        return self.err.getvalue()[at:]


class Interrupting(io.StringIO):
    """An output at whose ``n``-th write the user presses Ctrl-C."""

    def __init__(self, n):
        super().__init__()
        self.left = n

    def write(self, text):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return super().write(text)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def pages_held(llm):
    return llm.engine.store.num_pages - llm.engine.store.num_free_pages


# --- with the embedded model ---


def test_answers_are_those_of_llm_chat_for_the_same_history(llm):
    talk = Talk(llm, FRANCE, ITALY, system="You are a helpful assistant.")
    talk.run()
    system = {"role": "system", "content": "You are a helpful assistant."}
    first = llm.chat([system, user(FRANCE)], GREEDY)[0].text
    second = llm.chat([system, user(FRANCE), assistant(first), user(ITALY)], GREEDY)[0].text
    assert talk.chat.messages == [system, user(FRANCE), assistant(first), user(ITALY), assistant(second)]
    assert talk.out.getvalue() == f"{first}\n{second}\n"
    assert "Paris" in first
    assert second != llm.chat([system, user(ITALY)], GREEDY)[0].text, "this history does not matter: no test of it"


def test_stats_command_gives_the_real_figures(llm):
    talk = Talk(llm, FRANCE)
    talk.run()
    said = talk.run("/stats")
    tokens = len(llm.encode_chat(talk.chat.messages))
    assert talk.out.getvalue() == f"{PARIS}\n"
    assert f"context: {tokens} of 512 tokens" in said
    assert "last answer: 8 tokens at" in said
    assert "KV in use: 0 tokens (0.0 MiB) now" in said
    assert "last answer: none" in talk.run("/reset", "/stats")
    assert "context: 0 of 512" in talk.run("/stats")


def test_ctrl_c_keeps_the_partial_answer_and_frees_the_cache(llm):
    talk = Talk(llm, "Tell me a long story.", params=SamplingParams(temperature=0, max_tokens=200), out=Interrupting(6))
    held = []
    show = talk.chat._show
    talk.chat._show = lambda text: (held.append(pages_held(llm)), show(text))
    said = talk.run()
    assert max(held) > 0
    assert pages_held(llm) == 0
    assert not llm.engine.num_unfinished
    partial = talk.chat.turns[1]["content"]
    whole = llm.chat([user("Tell me a long story.")], GREEDY)[0].text
    assert partial and whole.startswith(partial) and len(partial) < len(whole)
    assert "Stopped. What has come stays in the conversation." in said
    assert "stopped by Ctrl-C" in talk.run("/stats")
    talk.chat.params = GREEDY
    talk.run(FRANCE)  # the program and the engine go on
    assert talk.chat.turns[3]["content"] == llm.chat(talk.chat.turns[:3], GREEDY)[0].text


def test_a_message_that_does_not_fit_is_refused_with_numbers(llm):
    talk = Talk(llm, FRANCE)
    talk.run()
    before = list(talk.chat.turns)
    long = "word " * 600
    tokens = len(llm.encode_chat([*before, user(long)]))
    said = talk.run(long)
    assert f"takes {tokens:,} tokens" in said and "holds 512" in said and "/reset" in said
    assert "Your message is not kept." in said
    assert talk.chat.turns == before
    assert talk.out.getvalue() == f"{PARIS}\n"
    assert "Shorten the message." in talk.run("/reset", long)
    talk.run(FRANCE)
    assert talk.chat.turns == [user(FRANCE), assistant(PARIS)]


def test_an_answer_cut_by_the_context_says_so_and_is_kept(llm):
    filler = "one " * 470
    talk = Talk(llm, filler, params=SamplingParams(temperature=0, max_tokens=300, ignore_eos=True))
    said = talk.run()
    prompt = len(llm.encode_chat([user(filler)]))
    assert f"context of 512 tokens is full ({prompt} before the answer, {512 - prompt} of it)" in said
    assert "/reset forgets the conversation" in said
    assert len(talk.chat.turns) == 2
    assert "not kept" in talk.run("more")
    assert len(talk.chat.turns) == 2


def test_an_answer_cut_by_max_tokens_says_so(llm):
    talk = Talk(llm, FRANCE, params=SamplingParams(temperature=0, max_tokens=3))
    assert "cut at --max-tokens 3" in talk.run()
    assert talk.chat.turns[1]["content"] == "The capital of"


def test_figures_after_each_answer_only_if_asked_for():
    talk = Talk(ScriptedLLM(["Hi"]), "Hello", stats=True)
    said = talk.run()
    assert "3 tokens at 8.0 tokens/s, prompt of 7 tokens in 0.25 s" in said
    assert "75% of 4 proposals accepted, 2.00 tokens per verify" in said
    assert "tokens/s" not in Talk(ScriptedLLM(["Hi"]), "Hello").run()


# --- commands ---


def test_help_names_every_command_and_both_ends_leave():
    talk = Talk(ScriptedLLM(), "/help", "/exit", "never read")
    said = talk.run()
    assert all(f"/{name}" in said for name in COMMANDS)
    assert talk.lines == ["never read"]
    talk = Talk(ScriptedLLM(), "/quit", "never read")
    talk.run()
    assert talk.lines == ["never read"]
    assert talk.out.getvalue() == ""


def test_reset_forgets_turns_and_keeps_the_system_message():
    llm = ScriptedLLM(["one"], ["two"])
    Talk(llm, "a", "/reset", "b", system="S").run()
    assert llm.asked[1] == [{"role": "system", "content": "S"}, user("b")]


def test_system_is_set_shown_and_removed_while_turns_stay():
    llm = ScriptedLLM(["one"], ["two"], ["three"])
    talk = Talk(llm, "a", "/system Be  kind", "b")
    assert "The system message: Be  kind" in talk.run()
    assert llm.asked[1] == [{"role": "system", "content": "Be  kind"}, user("a"), assistant("one"), user("b")]
    assert "The system message: Be  kind" in talk.run("/system")
    assert "No system message" in talk.run("/system -", "c")
    assert llm.asked[2][0] == user("a")


def test_save_and_load_carry_a_conversation_over(tmp_path):
    file = tmp_path / "talk.json"
    talk = Talk(ScriptedLLM(["schön\x1b"]), "ä [red]", f"/save {file}", system="S")
    talk.run()
    want = [{"role": "system", "content": "S"}, user("ä [red]"), assistant("schön\x1b")]
    assert json.loads(file.read_text(encoding="utf-8")) == want
    assert "ä" in file.read_text(encoding="utf-8")
    assert os.listdir(tmp_path) == ["talk.json"]  # no temporary file is left
    llm = ScriptedLLM(["more"])
    other = Talk(llm, f"/load {file}", "b", system="another")
    other.run()
    assert llm.asked[0] == [*want, user("b")]


def test_save_never_overwrites_and_names_what_is_wrong(tmp_path):
    file = tmp_path / "talk.json"
    file.write_text("precious")
    talk = Talk(ScriptedLLM(["one"]), f"/save {file}")
    assert "nothing to save" in talk.run()
    assert "exists already. Give another name." in talk.run("a", f"/save {file}")
    assert file.read_text() == "precious"
    assert "cannot be written" in talk.run(f"/save {tmp_path}/no/such/folder")
    assert "cannot be written" in talk.run("/save a\0b")
    assert "must be a file's name" in talk.run("/save")
    with pytest.raises(InvalidValueError, match="cannot be written"):
        save(tmp_path / "surrogate.json", [user("\ud800")])
    assert os.listdir(tmp_path) == ["talk.json"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("{}", "JSON list of messages"),
        ("[]", "in turns"),
        ('[{"role": "user"}]', "JSON list of messages"),
        ('[{"role": "user", "content": 3}]', "JSON list of messages"),
        ('[{"role": "user", "content": "a"}]', "in turns"),
        ('[{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]', "in turns"),
    ],
)
def test_load_refuses_what_is_no_conversation(tmp_path, text, words):
    file = tmp_path / "talk.json"
    file.write_text(text)
    talk = Talk(ScriptedLLM(["one"]), "a")
    talk.run()
    assert words in " ".join(talk.run(f"/load {file}").split())
    assert talk.chat.turns == [user("a"), assistant("one")]
    with pytest.raises(InvalidValueError, match="cannot be read"):
        load(tmp_path / "nowhere.json")


def test_retry_replaces_the_last_answer_only_if_a_new_one_comes():
    llm = ScriptedLLM(["one"], ["two"], LongDraftError("broken\nin two lines"))
    talk = Talk(llm, "/retry", "a", "/retry", params=SAMPLED)
    assert "no answer yet" in talk.run()
    assert talk.chat.turns == [user("a"), assistant("two")]
    assert llm.asked == [[user("a")], [user("a")]]
    assert [params.seed for params in llm.params] == [5, 6]
    assert "error: broken in two lines The earlier answer stays.\n" in talk.run("/retry")
    assert talk.chat.turns == [user("a"), assistant("two")]
    assert "the same" in Talk(ScriptedLLM(["one"], ["one"]), "a", "/retry").run()


def test_the_seed_of_a_sampled_answer_is_shown():
    talk = Talk(ScriptedLLM(["one"], ["two"]), "a", "b", params=SAMPLED, stats=True)
    said = talk.run()
    assert "seed 5" in said and "seed 6" in said


def test_unknown_commands_do_not_reach_the_model():
    talk = Talk(ScriptedLLM(), "/nope at all", "/", "/reset now")
    said = " ".join(talk.run().split())
    assert all(f"/{name}" in said for name in COMMANDS)
    assert "'/nope'" in said and "must be nothing" in said
    assert not talk.chat.llm.asked


def test_two_slashes_backslashes_and_blank_lines():
    llm = ScriptedLLM(["one"], ["two"], ["three"])
    talk = Talk(llm, "//etc/hosts", "first\\", "second\\", "", "", "   ", "end\\")
    talk.run()
    assert [messages[-1]["content"] for messages in llm.asked] == ["/etc/hosts", "first\nsecond\n", "end"]
    assert talk.prompts[1:4] == ["> ", "... ", "... "]


# --- Ctrl-C and errors ---


def test_ctrl_c_in_the_stream_closes_it_and_the_chat_goes_on():
    llm = ScriptedLLM(["one ", KeyboardInterrupt(), "never"], ["two"])
    talk = Talk(llm, "a", "b")
    talk.run()
    assert llm.streams[0].closed
    assert talk.chat.turns == [user("a"), assistant("one "), user("b"), assistant("two")]
    assert talk.out.getvalue() == "one \ntwo\n"


def test_ctrl_c_while_the_end_is_written_keeps_the_whole_answer_and_its_figures():
    talk = Talk(ScriptedLLM(["one"]), "a", out=Interrupting(2), stats=True)
    assert "stopped by Ctrl-C, 3 tokens at" in talk.run()
    assert talk.chat.turns == [user("a"), assistant("one")]


@pytest.mark.parametrize("script", [KeyboardInterrupt(), [KeyboardInterrupt(), "never"]])
def test_ctrl_c_before_the_first_word_drops_the_message_and_says_so(script):
    talk = Talk(ScriptedLLM(script), "a")
    assert "Stopped before a word of the answer came. Your message is not kept." in talk.run()
    assert talk.chat.turns == []


def test_ctrl_c_at_the_prompt_leaves_at_the_second_time():
    talk = Talk(ScriptedLLM(["one"]), KeyboardInterrupt(), "a", KeyboardInterrupt(), KeyboardInterrupt(), "never read")
    said = talk.run()
    assert said.count("Press Ctrl-C again or Ctrl-D to leave.") == 2
    assert talk.lines == ["never read"]
    assert talk.out.getvalue() == "one\n"


def test_ctrl_c_in_a_script_ends_it_and_closes_the_stream():
    llm = ScriptedLLM(["one ", KeyboardInterrupt(), "never"])
    with pytest.raises(KeyboardInterrupt):
        Talk(llm, "a", "b", interactive=False).run()
    assert llm.streams[0].closed
    with pytest.raises(KeyboardInterrupt):
        Talk(ScriptedLLM(), KeyboardInterrupt(), interactive=False).run()


def test_errors_are_one_line_and_the_chat_goes_on():
    failing = ScriptedStream(["half"], "error", "no finite\nlogits")
    llm = ScriptedLLM(TemplateError("no\nsystem [bold]role"), failing, ["half", LongDraftError("late")], ["two"])
    talk = Talk(llm, "a", "b", "c", "d")
    lines = talk.run().splitlines()
    assert "error: no system [bold]role Your message is not kept." in lines
    assert "error: The answer failed: no finite logits. Your message is not kept." in lines
    assert "error: late Your message is not kept." in lines
    assert talk.chat.turns == [user("d"), assistant("two")]
    assert talk.out.getvalue() == "half\nhalf\ntwo\n"
    assert all(stream.closed for stream in llm.streams)


def test_a_line_that_is_not_text_is_an_error_line():
    bad = UnicodeDecodeError("utf-8", b"caf\xe9", 3, 4, "unexpected end of data")
    talk = Talk(ScriptedLLM(["one"]), bad, "a")
    assert "must be UTF-8 text (unexpected end of data at byte 3)" in talk.run()
    assert talk.chat.turns == [user("a"), assistant("one")]


# --- what reaches the screen ---


def test_control_characters_of_the_model_never_reach_the_terminal():
    evil = "a\x1b[31mb\x07\r\x9b2J\x7f\x00 [bold]c\td\n"
    talk = Talk(ScriptedLLM([evil]), "x")
    talk.run()
    assert talk.out.getvalue() == "a\ufffd[31mb\ufffd\ufffd\ufffd2J\ufffd\ufffd [bold]c\td\n\n"
    assert talk.chat.turns[1]["content"] == evil
    assert "\x1b" not in talk.run("/system \x1b[2J")
    everything = "".join(map(chr, range(0x250)))
    kept = [c for c in printable(everything) if ord(c) < 32 or 127 <= ord(c) < 160]
    assert kept == ["\t", "\n"]


def test_banner_and_prompt_are_for_terminals_only():
    talk = Talk(ScriptedLLM(["one"]), "a")
    assert "scripted, context of 100 tokens. /help" in talk.run()
    assert talk.prompts == ["> ", "> "]
    talk = Talk(ScriptedLLM(["one"]), "a", interactive=False)
    assert talk.run() == ""
    assert set(talk.prompts) == {""}


def test_pieces_are_shown_as_they_come():
    out = io.StringIO()
    seen = []
    out.flush = lambda: seen.append(out.getvalue())
    Talk(ScriptedLLM(["one ", "two"]), "a", out=out).run()
    assert seen[:2] == ["one ", "one two"]


def test_piped_lines_lose_their_ends_and_the_byte_order_mark(monkeypatch):
    raw = io.BytesIO(b"\xef\xbb\xbfone\r\n two \n\xff\nlast")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=raw))
    assert [read_piped(""), read_piped("")] == ["one", " two "]
    with pytest.raises(UnicodeDecodeError):
        read_piped("")
    assert read_piped("") == "last"
    with pytest.raises(EOFError):
        read_piped("")
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(EOFError):
        read_piped("")


def test_the_prompt_stays_out_of_redirected_answers(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert terminal_reader()("> ") == "hello"
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "> ")


# --- the command ---


def test_the_command_answers_line_by_line_in_a_pipe():
    args = ("chat", "--max-tokens", "12", "--stats", "--draft", "streaming_llm", "--max-model-len", "512")
    done = longdraft_process(*args, stdin=f"{FRANCE}\n/nope\n{ITALY}\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{PARIS}\nThe capital of Italy is Rome.\n"
    assert "tokens per verify" in done.stderr and "'/nope'" in done.stderr
    assert "\x1b" not in done.stderr and "> " not in done.stdout


@pytest.mark.parametrize(
    ("tokenizer", "template", "args", "words"),
    [
        (None, "{{ messages }}", (), "--tokenizer"),
        ("one", None, (), "longdraft generate"),
        ("one", "", ("--tokenizer", "folder"), "longdraft generate"),
        ("one", "{{ messages }}", ("--top-p", "2"), "top_p is 2.0"),
        ("one", "{{ messages }}", ("--draft", "no"), "draft is 'no'"),
        ("one", "{{ messages }}", (), "the weights are read"),
        (None, "{{ messages }}", ("--tokenizer", "folder"), "the weights are read"),
    ],
)
def test_what_cannot_work_is_refused_before_weights_are_read(monkeypatch, tokenizer, template, args, words):
    made = SimpleNamespace(name="m", tokenizer=tokenizer, chat_template=template)

    def read_weights(*_, **__):
        raise LongDraftError("the weights are read")

    monkeypatch.setattr(loading, "load_checkpoint", lambda model, download: made)
    monkeypatch.setattr(options, "make_llm", read_weights)
    result = CliRunner().invoke(app, ["chat", *args])
    assert isinstance(result.exception, LongDraftError), result.output
    assert words in str(result.exception)


def test_options_reach_the_chat(monkeypatch, llm):
    asked, talks = {}, []
    monkeypatch.setattr(options, "make_llm", lambda model, **settings: asked.update(settings, model=model) or llm)
    monkeypatch.setattr(Chat, "run", lambda talk: talks.append(talk))
    args = "--model smollm2-135m-instruct --system S --max-tokens 9 --temperature 0.5 --top-k 3 --seed 4 --stats"
    drafting = "--draft streaming_llm --budget 64 --gamma 2 --max-model-len 99 --dtype bfloat16 --device cpu"
    result = CliRunner().invoke(app, ["chat", *args.split(), *drafting.split()])
    assert result.exit_code == 0, result.output
    (talk,) = talks
    assert (talk.system, talk.stats, talk.interactive) == ("S", True, False)
    assert talk.params == SamplingParams(temperature=0.5, top_k=3, seed=4, max_tokens=9)
    assert (asked["draft"].kv, asked["draft"].budget, asked["draft"].gamma) == ("streaming_llm", 64, 2)
    assert [asked[name] for name in ("max_model_len", "dtype", "device", "download")] == [99, "bfloat16", "cpu", False]
    CliRunner().invoke(app, ["chat"])
    assert talks[1].params == SamplingParams(temperature=0, max_tokens=512)
    assert (talks[1].system, talks[1].stats, asked["draft"]) == (None, False, AutoDraft(exact=True))
