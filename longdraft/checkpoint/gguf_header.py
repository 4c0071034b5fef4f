"""The header of a GGUF file, read strictly: nothing that a damaged or hostile file says is believed unchecked.

Owns the file format's rules up to where each tensor's bytes lie; knows nothing of models or of the bytes themselves.
Imports neither torch nor numpy nor the gguf library, whose reader trusts counts, lengths and offsets.

    | magic, version, counts | key-values | tensor records | padding | tensor data ... |
    0                        24           |                ^ end of header, at most MAX_HEADER
"""

from __future__ import annotations

import mmap
import os
import reprlib
import struct
from dataclasses import dataclass
from typing import NoReturn

from longdraft.errors import ModelFileError

# Limits far above any real file, so that the worst file still costs seconds and a few hundred MB. The largest
# vocabularies (0.26 M tokens with 0.6 M merges) make headers of about 20 MiB and 1.5 M array elements.
MAX_HEADER = 64 << 20
MAX_STRING = 1 << 20
MAX_KEY = 64 << 10
MAX_ENTRIES = 1 << 16  # key-values; tensors
MAX_ELEMENTS = 4 << 20  # of all arrays together

# ggml type → (name, weights per block, bytes per block)
GGML_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
_OTHER_GGML_TYPES = {
    **{4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS"},
    **{18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16"},
    **{26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 34: "TQ1_0"},
    **{35: "TQ2_0", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0"},
}

_BOOL, _STRING, _ARRAY = 7, 8, 9
_short = reprlib.Repr()
_short.maxstring = 80  # names come from the file and may be 64 KiB long
_shown = _short.repr
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "B", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class GGUFTensor:
    """Where one tensor lies. ``shape`` is in torch order, ``offset`` and ``nbytes`` are bytes from the file's start."""

    shape: tuple[int, ...]
    type: str  # a name of GGML_TYPES
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GGUFHeader:
    """A checked header. Metadata values are ``int``, ``float``, ``bool``, ``str`` or a list of one of them."""

    path: str
    version: int
    alignment: int
    metadata: dict[str, object]
    tensors: dict[str, GGUFTensor]


def read_header(path: str | os.PathLike[str]) -> GGUFHeader:
    """Read and check the header of the file at ``path``; raises ``ModelFileError`` for anything wrong with it."""
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:  # which mmap refuses in its own words
                raise ModelFileError(path, "the file is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return parse_header(data, path)
    except OSError as error:
        raise ModelFileError(path, f"cannot be read ({error.strerror or error})") from error


def parse_header(data: bytes | mmap.mmap, path: str | os.PathLike[str]) -> GGUFHeader:
    """Check the header at the start of ``data``, the whole file. Raises ``ModelFileError`` naming ``path``."""
    reader = _Reader(data, os.fspath(path))
    version = reader.preamble()
    num_tensors, num_keys = reader.scalar("Q"), reader.scalar("Q")
    reader.check_count("tensors", num_tensors, smallest=32, at=8)
    reader.check_count("metadata keys", num_keys, smallest=13, at=16)
    metadata: dict[str, object] = {}
    for _ in range(num_keys):
        at = reader.pos
        key = reader.string(MAX_KEY, "a metadata key")
        if key in metadata:
            reader.fail(f"metadata key {_shown(key)} appears twice", at)
        metadata[key] = reader.value(reader.scalar("I"), key)
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 8 <= alignment <= 65536 or alignment & (alignment - 1):
        reader.fail(f"general.alignment is {_shown(alignment)}, not a power of two from 8 to 65536", reader.pos)
    tensors = reader.tensors(num_tensors, alignment)
    return GGUFHeader(os.fspath(path), version, alignment, metadata, tensors)


class _Reader:
    """A position in the file that moves forward; every step first checks that the bytes are there."""

    def __init__(self, data: bytes | mmap.mmap, path: str) -> None:
        self.data, self.path, self.size = data, path, len(data)
        self.end = min(self.size, MAX_HEADER)
        self.pos = 0
        self.elements_left = MAX_ELEMENTS

    def fail(self, problem: str, at: int) -> NoReturn:
        raise ModelFileError(self.path, problem, offset=at)

    def need(self, count: int, what: str) -> int:
        """Claim the next ``count`` bytes for ``what`` and return where they start."""
        start = self.pos
        if count > self.end - start:
            where = "the file ends" if self.end == self.size else f"the header is longer than {MAX_HEADER >> 20} MiB"
            self.fail(f"{where} inside {what} ({count} bytes needed, {self.end - start} left)", start)
        self.pos = start + count
        return start

    def scalar(self, code: str) -> int | float:
        return struct.unpack_from("<" + code, self.data, self.need(struct.calcsize("<" + code), "a number"))[0]

    def string(self, limit: int, what: str) -> str:
        at = self.pos
        length = self.scalar("Q")
        if length > limit:
            self.fail(f"{what} has {length} bytes, at most {limit} are allowed", at)
        start = self.need(length, what)
        try:
            return str(self.data[start : self.pos], "utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} is not valid UTF-8", start)

    def preamble(self) -> int:
        """Check magic and version and return the version."""
        if self.data[:4] != b"GGUF":
            self.fail("not a GGUF file (its first four bytes are not 'GGUF')", 0)
        self.pos = 4
        version = self.scalar("I")
        if version in (2 << 24, 3 << 24):
            self.fail("a big-endian GGUF file; only little-endian files are supported", 4)
        if version not in (2, 3):
            self.fail(f"GGUF version {version} is not supported, only 2 and 3 are", 4)
        return version

    def check_count(self, what: str, count: int, smallest: int, at: int) -> None:
        """Refuse a count before anything loops over it: each entry takes at least ``smallest`` bytes."""
        fits = min((self.end - self.pos) // smallest, MAX_ENTRIES)
        if count > fits:
            self.fail(f"the header promises {count} {what}, but at most {fits} can follow", at)

    def value(self, kind: int, key: str) -> object:
        at = self.pos - 4  # where the type was read
        if kind == _STRING:
            return self.string(MAX_STRING, f"the string of {_shown(key)}")
        if kind == _ARRAY:
            return self.array(key)
        if kind not in _SCALARS:
            self.fail(f"metadata key {_shown(key)} has the unknown value type {kind}", at)
        number = self.scalar(_SCALARS[kind])
        return self.as_bools([number], key, self.pos - 1)[0] if kind == _BOOL else number

    def array(self, key: str) -> list:
        at = self.pos
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind == _ARRAY:
            self.fail(f"metadata key {_shown(key)} is an array of arrays, which no supported model has", at)
        if kind != _STRING and kind not in _SCALARS:
            self.fail(f"the array of {_shown(key)} has the unknown value type {kind}", at)
        size = 8 if kind == _STRING else struct.calcsize(_SCALARS[kind])  # an empty string is just its length
        fits = min((self.end - self.pos) // size, self.elements_left)
        if count > fits:
            self.fail(f"the array of {_shown(key)} promises {count} elements, but at most {fits} can follow", at + 4)
        self.elements_left -= count
        if kind == _STRING:
            what = f"a string of {_shown(key)}"
            return [self.string(MAX_STRING, what) for _ in range(count)]
        start = self.need(count * size, "an array")
        numbers = list(struct.unpack_from(f"<{count}{_SCALARS[kind]}", self.data, start))
        return self.as_bools(numbers, key, start) if kind == _BOOL else numbers

    def as_bools(self, numbers: list[int], key: str, at: int) -> list[bool]:
        if not set(numbers) <= {0, 1}:
            self.fail(f"metadata key {_shown(key)} has a truth value that is neither 0 nor 1", at)
        return [bool(n) for n in numbers]

    def tensors(self, count: int, alignment: int) -> dict[str, GGUFTensor]:
        """Read all tensor records; the result is in the order of the data."""
        records: dict[str, tuple[int, tuple[int, ...], str, int, int]] = {}
        for _ in range(count):
            at = self.pos
            name = self.string(MAX_KEY, "a tensor name")
            if name in records:
                self.fail(f"tensor {_shown(name)} appears twice", at)
            records[name] = (at, *self.tensor(name, alignment))
        data_start = -(-self.pos // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        previous, free_from = "", data_start
        for name, (at, shape, kind, nbytes, offset) in sorted(records.items(), key=lambda item: item[1][-1]):
            start = data_start + offset
            if start + nbytes > self.size:
                self.fail(f"tensor {_shown(name)} ends at byte {start + nbytes} of a file of {self.size} bytes", at)
            if start < free_from:
                self.fail(f"tensors {_shown(previous)} and {_shown(name)} overlap", at)
            previous, free_from = name, start + nbytes
            tensors[name] = GGUFTensor(shape, kind, start, nbytes)
        return tensors

    def tensor(self, name: str, alignment: int) -> tuple[tuple[int, ...], str, int, int]:
        """Read one tensor record after its name: shape, type, bytes, offset within the data."""
        at = self.pos
        rank = self.scalar("I")
        if not 1 <= rank <= 4:
            self.fail(f"tensor {_shown(name)} has {rank} dimensions, expected 1 to 4", at)
        dims = [self.scalar("Q") for _ in range(rank)]  # GGUF order: row length first
        if min(dims) < 1:
            self.fail(f"tensor {_shown(name)} has an empty dimension in {dims}", at + 4)
        at = self.pos
        number, offset = self.scalar("I"), self.scalar("Q")
        if number not in GGML_TYPES:
            known = _OTHER_GGML_TYPES.get(number)
            problem = f"the type {known}, which is not supported" if known else f"the unknown type {number}"
            supported = ", ".join(t[0] for t in GGML_TYPES.values())
            self.fail(f"tensor {_shown(name)} has {problem} (supported: {supported})", at)
        kind, block, block_bytes = GGML_TYPES[number]
        if dims[0] % block:
            self.fail(f"tensor {_shown(name)} has rows of {dims[0]}, not a multiple of the {kind} block of {block}", at)
        if offset % alignment:
            self.fail(f"tensor {_shown(name)} starts at {offset}, which is not aligned to {alignment}", at + 4)
        nbytes = dims[0] // block * block_bytes
        for dim in dims[1:]:
            nbytes *= dim  # Python integers: no wrap-around
        return tuple(reversed(dims)), kind, nbytes, offset
