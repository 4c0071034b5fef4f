"""What several end-to-end tests share."""

import pytest

from longdraft.engine import decide
from tests.parity.models import tiny_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random model without a tokenizer."""
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama", std=0.3)


@pytest.fixture
def wrong_verify(monkeypatch):
    """Passes whose second token is another one than the model's: what every comparison must see."""
    right = decide.verify_draws

    def wrong(own, proposals):
        verdict = right(own, proposals)
        tokens = [[(t + 1) % 128 if n == 1 else t for n, t in enumerate(row)] for row in verdict.tokens]
        return type(verdict)(verdict.accepted, tokens)

    monkeypatch.setattr(decide, "verify_draws", wrong)
