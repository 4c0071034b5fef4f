"""The GGUF header check: sound files are read in full, broken ones refused in bounded time and memory."""

import struct
import subprocess
import sys
import time

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longdraft.checkpoint.gguf import GGUFWeights, eos_token_ids, hf_config
from longdraft.checkpoint.gguf_header import _OTHER_GGML_TYPES, GGML_TYPES, parse_header, read_header
from longdraft.errors import InvalidValueError, ModelFileError, UnsupportedModelError
from longdraft.models.config import parse_hf_config
from longdraft.models.registry import tiny_config
from longdraft.models.weights import check_names_and_shapes
from tests.unit.gguf_files import (
    ARRAY,
    BOOL,
    STRING,
    U32,
    array,
    broken_files,
    pair,
    random_tensors,
    raw_gguf,
    record,
    text,
    write_llama_gguf,
)

BROKEN = broken_files()
TOKENIZER = {"model": "gpt2", "tokens": ["a", "é", "<|end|>"], "token_type": [1, 1, 3], "eos_token_id": 2}
SMALL = tiny_config(vocab_size=3, hidden_size=32, intermediate_size=32, num_layers=1)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A sound file of a few KiB: (path, bytes, bytes before the data)."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    write_llama_gguf(path, SMALL, random_tensors(SMALL), quant="Q8_0", tokenizer=TOKENIZER)
    header = read_header(path)
    return path, path.read_bytes(), min(t.offset for t in header.tensors.values())


def load_all(path):
    """Everything that loading a model asks of the file; only our own errors may come out of it."""
    began = time.monotonic()
    try:
        header = read_header(path)
        raw, weights = hf_config(header), GGUFWeights(header)
        eos_token_ids(header)
        for name, shape in weights.shapes().items():
            assert tuple(weights.load(name).shape) == shape
        try:
            check_names_and_shapes(parse_hf_config(raw), weights)
        except InvalidValueError:  # the config parser's word for a number out of range
            return "refused"
        return "loaded"
    except (ModelFileError, UnsupportedModelError):
        return "refused"
    finally:
        assert time.monotonic() - began < 5


def test_sound_file_is_read_in_full(small):
    path, data, data_start = small
    header = read_header(path)
    assert header == parse_header(data, path)
    assert (header.path, header.version, header.alignment) == (str(path), 3, 32)
    assert header.metadata["general.architecture"] == "llama"
    assert header.metadata["llama.block_count"] == 1
    assert {key: header.metadata[f"tokenizer.ggml.{key}"] for key in TOKENIZER} == TOKENIZER
    embedding = header.tensors["token_embd.weight"]
    assert (embedding.shape, embedding.type, embedding.nbytes) == ((3, 32), "Q8_0", 3 * 34)
    reader = gguf.GGUFReader(path)
    expected = {t.name: (tuple(int(d) for d in t.shape[::-1]), t.data_offset, t.n_bytes) for t in reader.tensors}
    assert {name: (t.shape, t.offset, t.nbytes) for name, t in header.tensors.items()} == expected
    assert load_all(path) == "loaded"


def test_every_value_type():
    values = {0: ("B", 200), 1: ("b", -3), 2: ("H", 60000), 3: ("h", -300), 4: ("I", 1 << 31), 5: ("i", -5)}
    values |= {6: ("f", 0.5), 7: ("?", True), 10: ("Q", 1 << 63), 11: ("q", -(1 << 62)), 12: ("d", 0.1)}
    pairs = [pair(b"%d" % kind, kind, struct.pack("<" + code, value)) for kind, (code, value) in values.items()]
    pairs += [
        pair(b"a%d" % kind, ARRAY, array(kind, 2, struct.pack(f"<2{code}", value, value)))
        for kind, (code, value) in values.items()
    ]
    pairs += [pair(b"none", ARRAY, array(STRING, 0)), pair(b"", STRING, text("ü€😀".encode()))]
    metadata = parse_header(raw_gguf(pairs), "x").metadata
    for kind, (_, value) in values.items():
        assert metadata[f"{kind}"] == value and metadata[f"a{kind}"] == [value, value]
        assert type(metadata[f"{kind}"]) is type(metadata[f"a{kind}"][0]) is type(value)
    assert metadata["none"] == [] and metadata[""] == "ü€😀"


@pytest.mark.parametrize("alignment", [8, 32, 4096, 65536])
@pytest.mark.parametrize("version", [2, 3])
def test_alignment_and_version(alignment, version):
    pairs = [pair(b"general.alignment", U32, struct.pack("<I", alignment))]
    records = [record(b"t", (2,), offset=alignment), record(b"u", (1,))]
    header = parse_header(raw_gguf(pairs, records, data=3 * alignment, version=version), "x")
    assert (header.alignment, header.version) == (alignment, version)
    start = header.tensors["u"].offset
    assert start % alignment == 0 and header.tensors["t"].offset == start + alignment


def test_type_table_is_that_of_the_format():
    for number, entry in GGML_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert entry == (kind.name, *gguf.GGML_QUANT_SIZES[kind])
    named = {number: name for number, (name, _, _) in GGML_TYPES.items()} | _OTHER_GGML_TYPES
    assert {int(kind): kind.name for kind in gguf.GGMLQuantizationType}.items() <= named.items()


@pytest.mark.parametrize("wrong", BROKEN)
def test_broken_file(wrong, tmp_path):
    data, message = BROKEN[wrong]
    path = tmp_path / "broken.gguf"
    path.write_bytes(data)
    began = time.monotonic()
    with pytest.raises(ModelFileError) as caught:
        read_header(path)
    assert time.monotonic() - began < 2
    assert message in str(caught.value) and str(path) in str(caught.value)
    assert caught.value.offset is not None or wrong == "empty file"
    assert len(str(caught.value)) < 1000


def test_broken_files_under_resource_limits(tmp_path):
    files = [f"{i}.gguf" for i in range(len(BROKEN))]
    for name, (data, _) in zip(files, BROKEN.values(), strict=True):
        (tmp_path / name).write_bytes(data)
    assert run_limited(tmp_path, files) == ["refused"] * len(files)


@pytest.mark.slow
def test_largest_files_under_resource_limits(tmp_path):
    """The most expensive files within the limits: 4 Mi short strings; 63 MiB of text that Python stores as UCS-4."""
    strings = array(STRING, 4 << 20, text(b"ab") * (4 << 20))
    wide = text("😀".encode() + bytes((1 << 20) - 4))
    (tmp_path / "strings.gguf").write_bytes(raw_gguf([pair(b"k", ARRAY, strings)]))
    (tmp_path / "wide.gguf").write_bytes(raw_gguf([pair(b"%d" % i, STRING, wide) for i in range(63)]))
    (tmp_path / "wider.gguf").write_bytes(raw_gguf([pair(b"%d" % i, STRING, wide) for i in range(65)]))
    for name, outcome in (("strings", "loaded"), ("wide", "loaded"), ("wider", "refused")):
        assert run_limited(tmp_path, [f"{name}.gguf"]) == [outcome]


def run_limited(folder, files):
    """Read ``files`` in a process that has 1 GiB of address space and 10 s, and loads neither torch nor numpy."""
    code = """if True:
        import resource, sys
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        from longdraft.checkpoint.gguf_header import read_header
        from longdraft.errors import ModelFileError
        for name in sys.argv[1:]:
            try:
                read_header(name)
                print("loaded")
            except ModelFileError:
                print("refused")
        assert not {"torch", "numpy", "gguf"} & set(sys.modules)
    """
    command = [sys.executable, "-c", code, *files]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_not_a_file(tmp_path):
    for path in (tmp_path, tmp_path / "absent.gguf"):
        with pytest.raises(ModelFileError, match="cannot be read"):
            read_header(path)


def test_truncation_at_every_64th(small, tmp_path):
    _, data, _ = small
    path = tmp_path / "cut.gguf"
    for part in range(64):
        path.write_bytes(data[: len(data) * part // 64])
        with pytest.raises(ModelFileError):
            read_header(path)


def test_flipped_header_bytes(small, tmp_path):
    _, data, data_start = small
    path = tmp_path / "flipped.gguf"
    outcomes = []
    for at in range(data_start):
        for mask in (0x01, 0x80, 0xFF):
            path.write_bytes(data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :])
            outcomes.append(load_all(path))
    assert outcomes.count("refused") > len(outcomes) // 2  # flips in free text and in padding are not to be noticed


NUMBERS = [0, 1, 2, 3, 7, 8, 9, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**61, 2**63, 2**64 - 32, 2**64 - 1]
mutations = st.lists(
    st.tuples(
        st.sampled_from(["byte", "u32", "u64", "cut", "repeat", "insert", "end"]),
        st.integers(0, 10**6),
        st.sampled_from(NUMBERS) | st.integers(0, 2**64 - 1),
    ),
    min_size=1,
    max_size=4,
)


def mutate(data, header_size, changes):
    """Apply (what, where, value) changes, nine in ten of them within the header."""
    data = bytearray(data)
    for what, where, value in changes:
        at = where % (header_size if where % 10 else len(data) + 1)
        length = value % 64 + 1
        if what == "byte":
            data[at : at + 1] = bytes([value & 0xFF])
        elif what == "u32":
            data[at : at + 4] = struct.pack("<I", value & 0xFFFFFFFF)
        elif what == "u64":
            data[at : at + 8] = struct.pack("<Q", value)
        elif what == "cut":
            del data[at : at + length]
        elif what == "repeat":
            data[at:at] = data[at : at + length]
        elif what == "insert":
            data[at:at] = bytes(length)
        else:
            del data[at:]
    return bytes(data)


def check_mutation(small, tmp_path_factory, changes):
    _, data, header_size = small
    path = tmp_path_factory.getbasetemp() / "mutated.gguf"
    path.write_bytes(mutate(data, header_size, changes))
    load_all(path)


quiet = settings(deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # block scales that became infinite
@settings(quiet, max_examples=300)
@given(changes=mutations)
def test_mutations(small, tmp_path_factory, changes):
    check_mutation(small, tmp_path_factory, changes)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # block scales that became infinite
@settings(quiet, max_examples=5000)
@given(changes=mutations)
def test_many_mutations(small, tmp_path_factory, changes):
    check_mutation(small, tmp_path_factory, changes)


def test_embedded_model_is_read_quickly(embedded_path):
    began = time.monotonic()
    header = read_header(embedded_path)
    assert time.monotonic() - began < 1
    assert len(header.metadata["tokenizer.ggml.tokens"]) == 49152 and len(header.tensors) == 272
    assert header.metadata["tokenizer.ggml.add_bos_token"] is False


def test_bool_is_not_taken_for_a_number():
    assert parse_header(raw_gguf([pair(b"k", BOOL, b"\1")]), "x").metadata["k"] is True
