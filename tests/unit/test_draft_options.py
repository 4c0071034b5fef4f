"""Options that describe a draft, as each verb takes them: what reaches the model, and what is refused."""

from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from longdraft.cli import acceptance, bench, chat, options, verify
from longdraft.cli.app import app
from longdraft.config import AutoDraft, DraftConfig
from longdraft.errors import InvalidValueError

ONE = (("generate", "x"), ("chat",), ("demo",))
SEVERAL = (("bench", "decode"), ("bench", "acceptance"))


class Made(Exception):
    """A verb has come to where its drafts are known."""


@pytest.fixture
def run(monkeypatch):
    """Runs a verb; what a model would be made with, or measured or checked with."""

    def stop(*found):
        raise Made(found)

    def make(*_, draft=None, **__):
        named, model = SimpleNamespace(name="x"), SimpleNamespace(lossless=True)
        return stop(draft) if asked in ONE else SimpleNamespace(checkpoint=named, model=model, tier="x", exactness="x")

    def call(verb, *args):
        nonlocal asked
        asked = verb
        error = CliRunner().invoke(app, [*verb, *args]).exception
        if isinstance(error, Made):
            return error.args[0]
        raise error

    asked = ()
    monkeypatch.setattr(options, "make_llm", make)
    monkeypatch.setattr(chat, "require_chat_model", lambda *_: None)
    monkeypatch.setattr(verify, "run_checks", lambda *given: stop(given[-1]))
    for module in (bench, acceptance):
        monkeypatch.setattr(module, "_run", lambda llm, plan, *_: stop(*plan.arms))
    return call


@pytest.mark.parametrize("verb", ONE)
def test_one_draft(run, verb):
    for text, value in (("3", 3), ("never", 0), ("auto", "auto")):
        (draft,) = run(verb, "--draft", "snapkv+quant8", "--budget", "64", "--refresh", text)
        assert (draft.kv, draft.budget, draft.refresh) == ("snapkv+quant8", 64, value)
    assert run(verb, "--draft", "int8", "--kv", "verified", "--refresh", "2")[0].refresh == 2
    assert run(verb, "--draft", "verified")[0].refresh is None


@pytest.mark.parametrize("verb", SEVERAL)
def test_several_drafts(run, verb):
    """Each that chooses with each ``--refresh``, and tables tell them apart; the others as they are."""
    names = ("--draft", "streaming_llm", "--draft", "topk+quant8", "--gamma", "2")
    arms = run(verb, *names, "--refresh", "never", "--refresh", "4", "--refresh", "never")
    assert [(arm.name, arm.draft.kv, arm.draft.refresh) for arm in arms] == [
        ("streaming_llm", "streaming_llm", None),
        ("topk+quant8 (refresh never)", "topk+quant8", 0),
        ("topk+quant8 (refresh 4)", "topk+quant8", 4),
    ]
    assert [arm.name for arm in run(verb, *names)] == ["streaming_llm", "topk+quant8"]


def test_checks_of_every_draft(run):
    assert run(("verify",), "--refresh", "auto") == ("auto",)
    assert run(("verify",)) == (None,)


@pytest.mark.parametrize("verb", [*ONE, *SEVERAL, ("verify",)])
@pytest.mark.parametrize("text", ["0", "-1", "1.5", "often", "", "1e3", "٣", "9999999999"])
def test_what_refresh_cannot_be(run, verb, text):
    named = () if verb == ("verify",) else ("--draft", "pages")
    with pytest.raises(
        InvalidValueError, match=f"--refresh is {text!r}, but must be never, auto, or a number of rounds"
    ):
        run(verb, *named, f"--refresh={text}")


@pytest.mark.parametrize("draft", ["streaming_llm", "int8", "ngram", "full+quant8", "layer_skip", "auto", "off"])
def test_refresh_is_for_drafts_that_choose(run, draft):
    for verb in (*ONE, *SEVERAL):
        if draft == "off" and verb not in (("generate", "x"), ("chat",)):
            continue  # these need a draft
        wanted = "--draft snapkv, topk, pages or verified"
        with pytest.raises(InvalidValueError, match=f"--refresh is '2', but must be left out.*{wanted}"):
            run(verb, "--draft", draft, "--refresh", "2")


def test_reports_name_it():
    assert DraftConfig(kv="topk", budget=9, refresh=2).label == "topk, budget 9, refresh 2"
    assert DraftConfig(kv="topk", budget=9).label == "topk, budget 9"
    assert AutoDraft.label == "auto"
    assert DraftConfig("runs/tiny/spire-0/model@int8").label == "spire-0@int8 over streaming_llm, budget 512"
    paths = {"a/b": "b", "a/b@int8": "b@int8", "model": "model", "owner/name": "name"}
    assert {path: DraftConfig(path).short_name for path in paths} == paths
