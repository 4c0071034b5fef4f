"""What drafts where nobody says: control, where that cannot show; and only what leaves the cache its room."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from typer.testing import CliRunner

from longdraft import LLM
from longdraft.cli.app import app
from longdraft.config import AutoDraft, DraftConfig, EngineConfig, draft_key
from longdraft.errors import KVCapacityError
from longdraft.kernels.dispatch import CallSpec
from longdraft.llm_control import affordable, considered, exact_only
from longdraft.planner.candidates import CONSIDERED
from longdraft.sampling_params import SamplingParams

SMALL = {"kv_cache_memory_bytes": 2**22}
NATIVE = CONSIDERED["native"]
ROWS = [[1, 2, 3, 4] * 5, list(range(40))]


def test_control_chooses_unless_it_could_show(folder):
    llm = LLM(folder, dtype="float64", **SMALL)
    assert llm.draft == AutoDraft(exact=True)
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=12, ignore_eos=True)
    chosen, plain = (llm.generate(ROWS, params, draft=draft) for draft in ("default", None))
    assert [r.outputs[0].token_ids for r in chosen] == [r.outputs[0].token_ids for r in plain]
    assert chosen[0].stats.control is not None and plain[0].stats.control is None
    near = LLM(folder, dtype="float32", device="cpu", **SMALL)
    bits = near.tier == "bit-identical"
    assert near.draft == (AutoDraft(exact=True) if bits else None)
    assert near.resolve("default") == near.draft
    assert near.resolve("auto") == AutoDraft()  # asked for, it may


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_near_ties(device):
    half = torch.bfloat16
    spec = CallSpec(device, half, half, 24, 3, 16)  # no native kernel has heads of 24
    assert exact_only(AutoDraft(exact=True), spec) is None
    assert exact_only(AutoDraft(exact=True), replace(spec, dtype=torch.float64)) == AutoDraft(exact=True)
    for draft in (AutoDraft(), DraftConfig(), None):
        assert exact_only(draft, spec) == draft


@pytest.mark.parametrize("verb", ["generate", "chat"])
def test_the_command_line_leaves_it_to_the_model(verb, monkeypatch):
    made = []
    monkeypatch.setattr("longdraft.cli.options.make_llm", lambda *_, draft, **__: made.append(draft) or 1 / 0)
    CliRunner().invoke(app, [verb, *(["x"] if verb == "generate" else [])], input="x")
    assert made == [AutoDraft(exact=True)]


def size(pages, beside, drafts):
    """As many pages as ``pages`` says beside the weights that ``drafts`` hold."""
    weights = "int8" if any(d.int8 for d in drafts) else "copies" if any(d.weights == "target" for d in drafts) else ""
    assert set(beside) <= set(drafts)
    if pages[weights] < 1:
        raise KVCapacityError("no room")
    return EngineConfig(64, pages[weights])


SPIRE = DraftConfig(weights="some/draft")


@pytest.mark.parametrize("beside", [(), (SPIRE,)])
@pytest.mark.parametrize(
    ("int8", "copies", "kept"),
    [
        (50, 90, NATIVE),
        (49, 50, tuple(d for d in NATIVE if not d.int8)),
        (0, 60, tuple(d for d in NATIVE if not d.int8)),
        (0, 0, (DraftConfig(weights="ngram"),)),
        (49, 49, (DraftConfig(weights="ngram"),)),
    ],
)
def test_drafts_leave_the_cache_its_room(int8, copies, kept, beside):
    pages = {"int8": int8, "copies": copies, "": 100}
    sizes, drafts = affordable(NATIVE, beside, partial(size, pages, beside))
    assert drafts == kept
    assert sizes.num_pages == (int8 if kept == NATIVE else copies if len(kept) > 1 else 100)


def test_what_does_not_fit_at_all_is_said():
    with pytest.raises(KVCapacityError):
        affordable(NATIVE, (), partial(size, {"int8": 0, "copies": 0, "": 0}, ()))


def test_control_is_given_what_there_is_room_for(folder, monkeypatch):
    llm = LLM(folder, dtype="float64", **SMALL)
    assert set(llm.engine.control.drafts) == set(map(draft_key, considered(llm.model.spec)))
    monkeypatch.setattr("longdraft.llm_build.considered", lambda spec: NATIVE)
    monkeypatch.setattr("longdraft.llm_draft.num_parameters", lambda *_: 2**60)
    tight = LLM(folder, dtype="float64")
    assert not any(draft.int8 for draft in tight.engine.control.drafts)
    assert tight.engine.config.num_pages > 0
