"""Speed-ups that a roofline gives for tokens per round, by the assumptions of SPIRe's paper (arXiv:2504.06419) and by
others that leave less out.

These are models of time, not measurements: what is measured is in performance.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from longdraft.models.config import ModelConfig
from longdraft.planner.cost import Network, network, pass_work, times
from longdraft.planner.hardware import Hardware
from longdraft.planner.plan import Round

# One byte per element and 600 operations in the time of one, as on an H100 with 8-bit floats.
ROOF = Hardware("600 operations per byte", tflops=600, bandwidth_gb_s=1000, overlap="pass")


@dataclass(frozen=True)
class Setting:
    """What is counted. ``growing``: a window is an eighth of the context, not what it is."""

    name: str
    head: bool
    attention: bool
    growing: bool
    hardware: Hardware = ROOF


# The paper leaves the output layer and attention's operations out, and lets windows grow with the context.
PAPER = Setting("paper", head=False, attention=False, growing=True)
HONEST = Setting("honest", head=True, attention=True, growing=False)


@dataclass(frozen=True)
class Drafting:
    """What a draft runs per token: a model of ``config``, over the first and last ``read`` tokens (``None``: all).

    ``remembers``: a token's keys and values are made twice, the second time of its memory.
    """

    config: ModelConfig
    read: int | None = None
    remembers: bool = False

    @property
    def body(self) -> int:
        """Weights of its layers."""
        return network(self.config, head=False).weights

    def network(self, setting: Setting) -> Network:
        """What a pass costs."""
        found = _network(self.config, setting)
        twice = 2 * found.kv_elements * self.config.hidden_size if self.remembers else 0
        return replace(found, extra_flops=twice)

    def reads(self, length: int, setting: Setting) -> int:
        """Tokens of a context that it reads."""
        if self.read is None:
            return length
        return 1 + length // 8 if setting.growing else min(length, self.read)


def multiplier(
    target: ModelConfig, draft: Drafting, setting: Setting, *, batch: int, context: int, gamma: int, tokens: float
) -> float:
    """How much faster than plain decoding: ``batch`` rows of one length that get ``tokens`` per round of ``gamma``."""
    rows, whole, hardware = {context: batch}, _network(target, setting), setting.hardware
    plain, verify = (times(pass_work(whole, rows, n), hardware).total for n in (1, gamma + 1))
    step = pass_work(draft.network(setting), rows, reads=lambda length: draft.reads(length, setting))
    return Round(gamma, times(step, hardware).total, verify, tokens).speedup(Round(0, 0.0, plain, 1.0))


def _network(config: ModelConfig, setting: Setting) -> Network:
    return network(config, weight_bytes=1, kv_bytes=1, head=setting.head, attention=setting.attention)
