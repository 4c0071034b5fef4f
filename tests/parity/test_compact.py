"""Bfloat16 weights in 12 bits: the same weights and the same sums, bit by bit."""

import pytest
import torch

from longdraft.kernels import native
from longdraft.kernels.linear.native import COMPACT, NativeLinear

pytestmark = pytest.mark.skipif(
    native.WHY_NOT or not native.runtime().has_compact, reason="no kernels for compact weights"
)
ROWS = (1, 2, 5, 8, 11, 12, 13, 24, 25, 40)


def pair(weight, bias=None):
    return [NativeLinear(weight, bias, None, torch.bfloat16, compact) for compact in (True, False)]


def with_rare(shape, *places):
    """Normal weights, and at ``places`` some whose exponents nothing else has."""
    weight = torch.randn(shape)
    for n, (row, column) in enumerate(places):
        weight[row, column] = 2.0 ** (-60 - n) if n % 2 else -(2.0 ** (40 + n))
    return weight.bfloat16()


@pytest.mark.parametrize("shape", [(16, 8), (100, 64), (33, 576), (48, 1544), (1, 16)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_the_same_bits(shape, bias):
    torch.manual_seed(0)
    weight, x = torch.randn(shape).bfloat16(), torch.randn(max(ROWS), shape[1])
    compact, whole = pair(weight, torch.randn(shape[0]) if bias else None)
    assert compact.type == COMPACT or shape[1] <= 16  # the head of a block outweighs so few inputs
    for rows in ROWS:
        assert torch.equal(compact(x[:rows]), whole(x[:rows])), rows
    assert torch.equal(compact.weight, whole.weight)
    some = torch.tensor([shape[0] - 1, 0, shape[0] // 2])
    assert torch.equal(compact.rows(some), whole.rows(some))


@pytest.mark.parametrize("column", [0, 1, 2, 7, 511, 512, 519, 1151])
def test_groups_that_stay_as_they_are(column):
    """Exponents without a code, in every word of a group, at the ends of a stretch, several in one block, in some."""
    torch.manual_seed(1)
    places = [(3, column), (3, 600), (20, column), (21, 1150), (22, 8)]
    weight, x = with_rare((56, 1152), *places), torch.randn(max(ROWS), 1152)
    x[:, column] *= 2.0**-30  # so that the large ones do not hide the others
    compact, whole = pair(weight)
    assert compact.type == COMPACT and compact.spill >= 2
    for rows in ROWS:
        assert torch.equal(compact(x[:rows]), whole(x[:rows])), rows
    assert torch.equal(compact.weight, weight.float())
    assert torch.equal(compact.rows(torch.arange(56)), weight)


def test_special_values():
    """Zeros of both signs, infinities, NaN and numbers below the normal ones are what they were."""
    weight = torch.randn(32, 64).bfloat16()
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, -1e-40]).bfloat16()
    weight[5, : len(special)] = special
    compact, _ = pair(weight)
    kept = compact.rows(torch.arange(32))
    assert compact.type == COMPACT
    assert torch.equal(
        kept.view(torch.int16),
        NativeLinear(weight, None, None, torch.bfloat16, False).rows(torch.arange(32)).view(torch.int16),
    )
    assert torch.equal(kept[5, [1, 5]].view(torch.int16), special[[1, 5]].view(torch.int16)) and kept[5, 4].isnan()


def test_weights_of_too_many_exponents_stay_as_they_are():
    torch.manual_seed(2)
    weight, x = (torch.randn(32, 256) * 2.0 ** torch.randint(-40, 40, (32, 256))).bfloat16(), torch.randn(3, 256)
    compact, whole = pair(weight)
    assert compact.type != COMPACT and torch.equal(compact(x), whole(x))


@pytest.mark.parametrize("shape", [(64, 20), (64, 33)], ids=str)
def test_odd_sizes_stay_as_they_are(shape):
    assert pair(torch.randn(shape))[0].type != COMPACT


def test_parts_and_8_bits():
    """A part shares the memory of the whole; 8-bit copies are made of the weights as they were."""
    torch.manual_seed(3)
    weight, x = with_rare((64, 128), (20, 3), (40, 77)), torch.randn(9, 128)
    compact, whole = pair(weight, torch.randn(64))
    assert torch.equal(compact.part(32)(x), whole(x)[:, 32:])
    assert compact.part(32).packed.data_ptr() == compact.packed[2:].data_ptr()
    assert torch.equal(compact.quantised()(x), whole.quantised()(x))


def test_a_quarter_of_the_bytes_is_saved():
    compact, whole = pair(torch.randn(512, 1024) / 30)
    assert compact.packed.nbytes < 0.77 * whole.packed.nbytes
