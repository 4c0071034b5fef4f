"""The noise generator: known answers, purity, uniformity, independence."""

import torch
from scipy import stats

from longdraft.spec.noise import all_gumbels, gumbels, philox, uniforms


def words(counter, seed):
    out = philox(tuple(torch.tensor([c]) for c in counter), torch.tensor([seed]))
    return [f"{w:08x}" for w in out[0].tolist()]


def test_philox_known_answers():
    """The published vectors of Philox4x32-10."""
    assert words((0, 0, 0, 0), 0) == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]
    full = 0xFFFFFFFF
    assert words((full,) * 4, -1) == ["408f276d", "41c83b0e", "a20bc7c6", "6d5451fd"]
    key = 0x299F31D0A4093822
    assert words((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), key) == [
        "d16cfe09",
        "94fdcceb",
        "5001e420",
        "24126ea1",
    ]


def test_sparse_and_full_noise_agree():
    seed, position = torch.tensor([5, 2**62 + 1]), torch.tensor([0, 9000])
    full = all_gumbels(seed, position, 49)
    row, token = torch.meshgrid(torch.arange(2), torch.arange(49), indexing="ij")
    some = gumbels(seed[row.flatten()], position[row.flatten()], token.flatten())
    assert torch.equal(full.flatten(), some)
    assert full.isfinite().all()


def test_uniform_over_ids_positions_and_seeds():
    n, zero = 40_000, torch.zeros(40_000, dtype=torch.int64)
    sweep = torch.arange(n)
    for u in (uniforms(zero, zero, sweep), uniforms(zero, sweep, zero), uniforms(sweep, zero, zero)):
        counts = torch.histc(u, bins=64, min=0, max=1).numpy()
        assert stats.chisquare(counts).pvalue > 1e-4
        pairs = (u[:-1] * 8).long() * 8 + (u[1:] * 8).long()  # neighbours must look independent
        assert stats.chisquare(torch.bincount(pairs[::2], minlength=64).numpy()).pvalue > 1e-4


def test_neighbouring_seeds_draw_evenly():
    """First token of seeds 1..3000 with three equally likely candidates (case O07)."""
    seeds = torch.arange(1, 3001)
    noise = all_gumbels(seeds, torch.full_like(seeds, 17), 3)
    winners = noise.argmax(dim=-1)
    assert stats.chisquare(torch.bincount(winners, minlength=3).numpy()).pvalue > 1e-3
    both = torch.bincount(winners[:-1:2] * 3 + winners[1::2], minlength=9)
    assert stats.chisquare(both.numpy()).pvalue > 1e-3
