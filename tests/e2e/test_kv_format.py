"""``kv_format``: what users are told of a target whose own cache is in a format."""

from io import StringIO

import pytest
import torch
from rich.console import Console

from longdraft import LLM, SamplingParams
from longdraft.bench.turns import require_pages
from longdraft.cli.report import figures, setting, table
from longdraft.compare import compare
from longdraft.config import DraftConfig
from longdraft.errors import InvalidValueError, KVCapacityError
from tests.e2e.command import longdraft

PROMPT = [(7 * i + i // 5) % 128 for i in range(150)]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(folder):
    types = {"dtype": "float64", "kv_dtype": "bfloat16", "kv_cache_memory_bytes": 2**20}
    return LLM(folder, kv_format="quant8", **types), LLM(folder, **types)


def test_every_result_and_report_says_lossy(llm):
    ours, plain = llm
    assert (ours.exactness, ours.tier, ours.model.lossless) == ("lossy", "identical", False)
    assert (plain.exactness, plain.tier, plain.model.lossless) == ("identical", "identical", True)
    assert "kv_format='quant8', lossy" in repr(ours)
    assert "kv_format" not in repr(plain)
    assert [x.generate([PROMPT], PARAMS)[0].exactness for x in llm] == ["lossy", "identical"]
    result = compare(ours, [PROMPT, PROMPT[:99]], PARAMS, DraftConfig(kv="full", gamma=3))
    report = result.report()
    assert (report["exactness"], report["tier"], report["identical"], report["held"]) == (
        "lossy",
        "identical",
        True,
        True,
    )
    assert result.speculative["accepted"] == result.speculative["drafted"] > 0
    read = result.speculative["kv_bytes_read_per_plain_token"]
    assert (
        read
        < compare(plain, [PROMPT, PROMPT[:99]], PARAMS, DraftConfig(kv="full")).speculative[
            "kv_bytes_read_per_plain_token"
        ]
    )


def test_more_tokens_fit_the_same_memory(llm):
    ours, plain = (x.engine.store for x in llm)
    for store in (ours, plain):
        held = sum(x.nbytes for x in (store.k, store.v, *getattr(store, "_bytes", [])[2:]))
        assert held == store.num_pages * store.page_bytes <= 2**20
    assert ours.capacity > 1.05 * plain.capacity  # of three layers one is decoded to, and a head has but 16 channels
    require_pages(llm[0], 1, ours.longest - 500, 1, 20)
    with pytest.raises(KVCapacityError, match="room for"):
        require_pages(llm[0], 1, ours.longest + 500, 1, 20)


def test_what_cannot_be_is_refused_by_name(folder):
    with pytest.raises(InvalidValueError, match="kv_format is 'quant3'.*quant8"):
        LLM(folder, kv_format="quant3")
    with pytest.raises(InvalidValueError, match="own cache is kept in one.*Pass 'snapkv'"):
        LLM(folder, "snapkv+quant8", kv_format="quant8", kv_cache_memory_bytes=2**20)


def test_the_cache_of_a_draft_model_is_its_own(folder):
    """As many tokens of it as of the target's, at full precision; its proposals change nothing."""
    types = {"dtype": torch.float64, "kv_dtype": torch.bfloat16, "kv_cache_memory_bytes": 2**20}
    llm = LLM(folder, str(folder), kv_format="quant8", **types)
    (draft,) = llm.engine.runner.small.values()
    assert draft.store.format is None
    assert draft.store.capacity >= llm.engine.store.capacity
    got, want = (llm.generate([PROMPT], PARAMS, draft=d)[0] for d in (llm.draft, None))
    assert got.outputs[0].token_ids == want.outputs[0].token_ids
    assert sum(got.stats.accepted_by_position)


def test_reports_name_the_format_and_its_bytes(llm):
    """As JSON, and as the table that people see."""
    ours, _ = llm
    where, run = setting(ours), figures(ours, ours.generate([PROMPT], PARAMS))
    assert (where["exactness"], where["kv_format"]) == ("lossy", "quant8")
    assert run["kv_bytes_per_token"] == 3 * 2 * 1216 // 32  # against 384
    assert run["kv_tokens_capacity"] == ours.engine.store.longest
    assert run["kv_bytes_used"] == ours.engine.stats.peak_kv_pages * ours.engine.store.page_bytes
    console = Console(file=StringIO(), width=100)
    console.print(table("figures", run, where))
    assert "quant8, lossy" in console.file.getvalue()


@pytest.mark.parametrize("verb", [("generate", "x"), ("verify",), ("bench", "decode"), ("chat",)], ids=" ".join)
def test_the_command_line_knows_it(verb):
    done = longdraft(*verb, "--kv-format", "quant3")
    assert done.returncode == 1
    assert "kv_format is 'quant3'" in done.stderr
