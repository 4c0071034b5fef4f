"""Formats of keys and values: how far off they are, what they take, and what a step reads of encoded rows."""

import pytest
import torch

from longdraft.cli.bench import make_arms
from longdraft.cli.drafting import draft_config
from longdraft.config import DraftConfig
from longdraft.drafts.coded_spec import old_groups
from longdraft.drafts.registry import FORMATS, KVS, SELECTORS, check, kept_tokens, make, named, page_note_bytes
from longdraft.engine.sizing import kv_bytes_per_token
from longdraft.errors import InvalidValueError
from longdraft.kernels.layout import BlockedLayout, PlainLayout
from longdraft.kv.coded import CodedStore, Reading, Span
from longdraft.kv.format.base import LAG, old_tokens
from longdraft.kv.format.quant import LEVELS, Quant8
from longdraft.kv.select.base import PageSelector
from longdraft.kv.store import PagedStore
from longdraft.llm_draft import resolve_draft
from longdraft.models.registry import tiny_config
from longdraft.planner.assumed import given
from longdraft.planner.candidates import Target, candidates
from longdraft.planner.hardware import Hardware
from longdraft.view import LayerKV
from tests.conftest import make_engine

DTYPES = [torch.float32, torch.bfloat16, torch.float64]


# --- the arithmetic


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 32, 16), (3, 5, 35, 8), (2, 2, 64, 80)])
def test_quant8_is_off_by_half_a_step_of_its_own_range(dtype, shape):
    """A channel of keys among its group, a token of values among its channels: no other's range has a say."""
    torch.manual_seed(sum(shape))
    k, v = torch.randn(2, *shape, dtype=torch.float64)
    k[..., 0] *= 1000  # a large channel, a shifted one, one without range; a large token, and one without range
    k[..., 1] += 50
    k[..., 2] = 7.3
    v[:, :, 0] *= 1000
    v[:, :, 1] = -3.1
    k, v = k.to(dtype), v.to(dtype)
    parts = Quant8().encode(k, v)
    assert [(x.shape, x.dtype) for x in parts] == [
        ((*shape[:2], *part.shape), part.dtype) for part in Quant8().parts(*shape[2:], dtype)
    ]
    for x, got, over in zip((k, v), Quant8().decode(parts, dtype), (2, 3), strict=True):
        assert got.dtype == dtype
        x, got = x.double(), got.double()
        step = (x.amax(over, keepdim=True) - x.amin(over, keepdim=True)) / LEVELS
        rounding = torch.finfo(dtype).eps / 2  # of the step, and of the result
        assert ((got - x).abs() <= 0.5 * step * (1 + 2 * rounding) + rounding * (x.abs() + step)).all()
        assert (got != x).any()
    assert torch.equal(Quant8().decode(parts, dtype)[0][..., 2], k[..., 2])
    assert torch.equal(Quant8().decode(parts, dtype)[1][:, :, 1], v[:, :, 1])


def test_what_quant8_takes():
    """Codes, and two numbers for each channel of keys and each token of values."""
    assert Quant8().group_bytes(32, 64, torch.bfloat16) == 2 * 32 * 64 + 2 * 2 * 64 + 2 * 2 * 32
    assert Quant8().group_bytes(32, 64, torch.bfloat16) < 0.55 * (2 * 32 * 64 * 2)
    assert [Quant8().group_size(n) for n in (1, 5, 16, 32, 48)] == [32, 35, 32, 32, 48]


# --- the store and what is read of it


def filled(layout, dtype, rows, pages=80):
    source = PagedStore(2, pages, layout, dtype, "cpu")
    for row, length in rows.items():
        assert source.reserve(row, 0, length)
        for layer in range(2):
            new = torch.randn(2, length, layout.num_kv_heads, layout.head_dim).to(dtype)
            source.write(layer, *new, source.slots(row, 0, length))
    return source


def rounded(x, group, over):
    """``x [n, G, D]`` of whole groups as ``Quant8`` gives it back."""
    parts = x.unflatten(0, (-1, group)).transpose(1, 2)
    k, v = Quant8().decode(Quant8().encode(parts, parts), x.dtype)
    return (k if over == "tokens" else v).transpose(1, 2).flatten(0, 1)


def check_span(store, reading, b, layer, chosen, tail):
    """Row ``b`` of a reading: the tokens ``chosen [G, size]`` as they were rounded, and the bits of ``tail``."""
    source, (row, start, stop) = store.source, tail
    view, layout = reading.view, source.layout
    at = torch.arange(int(view.lens[b]))
    slots = view.tables[b][at // layout.page_size] * layout.page_size + at % layout.page_size
    storage = reading.decode(layer, source.layers[layer])
    seen = layout.read_k(storage.k, slots), layout.read_v(storage.v, slots)
    size, whole = chosen.shape[1], -(-chosen.shape[1] // store.group) * store.group
    padded = torch.cat([chosen, chosen[:, -1:].expand(-1, whole - size)], dim=1)
    for got, x, over in zip(seen, source.read(layer, row, stop), ("tokens", "channels"), strict=True):
        assert torch.equal(got[size:], x[start:stop])
        if size:
            own = x[padded, torch.arange(len(chosen))[:, None]].transpose(0, 1)
            assert torch.equal(got[:size], rounded(own, store.group, over)[:size])


LAYOUTS = {
    "plain": PlainLayout(16, 2, 16),
    "small pages": PlainLayout(5, 3, 8),
    "blocked": BlockedLayout(16, 1, 32, pairs=False),
    "pairs": BlockedLayout(16, 2, 16, pairs=True),  # of bfloat16 only
}
STORED = [(name, dtype) for name in LAYOUTS for dtype in DTYPES if name != "pairs" or dtype == torch.bfloat16]


@pytest.mark.parametrize(("layout", "dtype"), STORED, ids=str)
def test_a_reading_is_the_encoded_tokens_and_the_sources_own_tail(layout, dtype):
    """Ragged rows: consecutive groups with a gap, a fork that shares some, nothing encoded, chosen tokens by head."""
    torch.manual_seed(0)
    layout = LAYOUTS[layout]
    source = filled(layout, dtype, {7: 190, 8: 20, 9: 150})
    store = CodedStore(source, Quant8(), 12)
    n, heads = store.group, layout.num_kv_heads
    assert store.hold(7, [0, 2, 3], 4 * n)
    assert store.hold(8, [], 0)
    assert store.open(9, 41, 140, 8)
    chosen = torch.stack([torch.randperm(140)[:41].sort().values for _ in range(2 * heads)]).view(2, heads, 41)
    store.fill(9, chosen)
    source.fork(7, 10, 100)
    store.fork(7, 10, 100)
    assert store.get(10).units == {n: unit for n, unit in store.get(7).units.items() if n < 100 // store.group}
    assert store.hold(10, [0, 1], 2 * n)
    assert store.get(10).units[0] == store.get(7).units[0]
    assert not store.hold(8, range(12), 12 * n)
    assert store.get(8).units == {}
    wanted = [(7, 4 * n + 3, 190), (8, 0, 20), (9, 140, 150), (10, 2 * n, 100)]
    held = [store.get(row) for row, _, _ in wanted]
    spans = [Span(r, list(c.units.values()), c.size, a, b) for c, (r, a, b) in zip(held, wanted, strict=True)]
    reading = Reading(store, spans)
    tokens = {7: [*range(n), *range(2 * n, 4 * n)], 8: [], 10: range(2 * n)}
    for layer in (1, 0, 1):
        for b, tail in enumerate(wanted):
            row = tail[0]
            own = chosen[layer] if row == 9 else torch.tensor([*tokens[row]], dtype=torch.int64).expand(heads, -1)
            check_span(store, reading, b, layer, own, tail)
    assert reading.num_pages * layout.page_size < sum(map(len, tokens.values())) + 2 * n + 6 + 20 + 10 + 8 * n
    store.check_integrity()
    for row in (7, 8, 9, 10, 11):
        store.free(row)
    store.check_integrity()
    assert store.pool.num_free == 12


def test_groups_are_encoded_once_and_kept_while_they_are_read():
    """As a row grows: what is there stays untouched, what is no longer read is given back."""
    source = filled(PlainLayout(16, 1, 8), torch.float32, {1: 400})
    store, encoded = CodedStore(source, Quant8(), 2), []  # no more than are ever read at once
    encode = store._encode
    store._encode = lambda units, slots: encoded.append(len(units)) or encode(units, slots)
    for length in (*range(1, 257), *range(257, 400, 32)):  # one by one, and several at a time
        numbers = old_groups(16, max(16, length - 80), length, store.group)
        assert store.hold(1, numbers, old_tokens(length, store.group))
        assert list(store.get(1).units) == numbers
        assert store.pool.size - store.pool.num_free == len(numbers) <= 2
    assert encoded == [1] * ((400 - 1 - LAG) // store.group)


@pytest.mark.parametrize("sinks", [0, 4, 16, 40])
@pytest.mark.parametrize("group", [32, 35])
def test_the_groups_of_two_ranges(sinks, group):
    for length in range(1, 300):
        for start in (0, max(sinks, length - 30), max(sinks, length - 100), length):
            seen = {*range(sinks), *range(start, length)}
            numbers = old_groups(sinks, start, length, group)
            whole = {n for n in range(length) if (n + 1) * group <= length - LAG}
            assert {n for n in whole if seen & {*range(n * group, (n + 1) * group)}} <= {*numbers} <= whole
            assert numbers == sorted({*numbers})
            assert length - (max(numbers, default=-1) + 1) * group >= LAG or not numbers
            # A group that nobody sees is only held behind the sinks, where what is read must not have a gap.
            for n in numbers:
                assert seen & {*range(n * group, (n + 1) * group)} or start >= max(whole) * group


# --- spelling, refusals, memory


def test_every_selection_that_is_not_of_pages_goes_with_every_format():
    coded = {f"{s}+{f}" for s, kind in SELECTORS.items() for f in FORMATS if not issubclass(kind, PageSelector)}
    assert {*KVS} == {*SELECTORS} | coded
    for kv in coded:
        assert resolve_draft(kv) == named(kv) == DraftConfig(kv=kv)
        assert kv in DraftConfig(kv=kv).label
        assert (named(kv).selection, named(kv).format) == tuple(kv.split("+"))


@pytest.mark.parametrize(
    ("kv", "words"),
    [
        ("pages+quant8", "pages reads the target's own pages.*Pass 'pages'"),
        ("verified+quant8", "verified reads the target's own pages"),
        ("snapkv+", "with '\\+quant8' behind or not"),
        ("+quant8", "must be one of"),
        ("snapkv+quant3", "'\\+quant8'"),
        ("quant8", "must be one of"),
        ("full+quant8+quant8", "must be one of"),
    ],
)
def test_other_combinations_are_refused_by_name(kv, words):
    with pytest.raises(InvalidValueError, match=words):
        check(DraftConfig(kv=kv))


def test_formats_are_for_drafts_over_the_targets_cache():
    with pytest.raises(InvalidValueError, match="for a small model, which has a cache of its own"):
        check(DraftConfig(weights="small", kv="full+quant8"))
    with pytest.raises(InvalidValueError, match="kv is None"):
        DraftConfig(kv=None)


def test_options_spell_it_so():
    assert draft_config("full+quant8", 64, 2, "coupled") == DraftConfig(kv="full+quant8", budget=64, gamma=2)
    int8 = draft_config("int8", 64, 2, "coupled", "snapkv+quant8")
    assert (int8.weights, int8.kv) == ("target@int8", "snapkv+quant8")
    assert [arm.budget for arm in make_arms(["full+quant8", "topk"], [8, 9], [2], None)] == [None, 8, 9]


def test_plans_leave_formats_out():
    target = Target("tiny", tiny_config(), Hardware("some", 1.0, 1.0, 1.0))
    for acceptance in (given(0.9), None):
        with pytest.raises(InvalidValueError, match="no format in a plan.*Plan for 'full'"):
            candidates(target, ["full+quant8"], acceptance=acceptance)


@pytest.mark.parametrize("kv", [kv for kv in KVS if "+" in kv])
def test_what_an_encoded_draft_takes_and_reads(tiny, kv):
    """Beside the target's cache: no more than a budget of encoded tokens; all of them where all are read."""
    config = tiny.config
    for budget in (1, 16, 48, 256):
        draft = make(DraftConfig(kv=kv, budget=budget), tiny, make_engine(tiny).store)
        group = config.num_layers * config.num_kv_heads * Quant8().group_bytes(32, config.head_dim, torch.float64)
        plain = kv_bytes_per_token(config, torch.float64)
        assert group < 0.25 * 32 * plain
        for length in (1, 31, 64, 65, 97, 130, 500, 5000):
            most = (length if kv == "full+quant8" else min(budget, length) + 31) / 32
            assert draft.bytes(length) <= most * group
            tail = 0 if length < LAG + 32 else LAG
            exact = length - tail if kv == "full+quant8" else budget
            assert draft.bytes_read(length) <= -(-exact // 32) * group + (tail + 64) * plain
        store = (draft.copies if hasattr(draft, "copies") else draft.coded).bytes_per_group
        assert store == group


def test_what_encoded_drafts_keep_counts():
    config, kv = tiny_config(), torch.bfloat16
    page = 16 * kv_bytes_per_token(config, kv)
    coded = config.num_layers * config.num_kv_heads * Quant8().group_bytes(32, config.head_dim, kv) // 2
    assert page_note_bytes(DraftConfig(kv="full+quant8"), config, kv, 16) == coded + page // config.num_layers
    assert kept_tokens(DraftConfig(kv="full+quant8")) == (0, 0)
    assert kept_tokens(DraftConfig(kv="streaming_llm+quant8", budget=99)) == (99, 0)
    assert kept_tokens(DraftConfig(kv="snapkv+quant8", budget=99)) == kept_tokens(DraftConfig(kv="snapkv", budget=99))
    for kv_name in ("streaming_llm+quant8", "snapkv+quant8", "full"):
        assert page_note_bytes(DraftConfig(kv=kv_name), config, kv, 16) == 0


def test_the_scratch_is_one_layer_of_what_is_read():
    source = filled(PlainLayout(16, 2, 8), torch.float32, {1: 190, 2: 190})
    store = CodedStore(source, Quant8(), 10)
    assert all(store.hold(row, [0, 1, 2], 96) for row in (1, 2))
    spans = [Span(row, list(store.get(row).units.values()), 96, 96, 190) for row in (1, 2)]
    storage = Reading(store, spans).decode(0, LayerKV(source.k[0], source.v[0]))
    assert storage.k.nbytes <= 2 * source.pages_for(190) * source.k[0, 0].nbytes
