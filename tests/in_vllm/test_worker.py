"""Tokens are drawn in the call that runs the model, unless something has to come in between."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from longdraft.integrations.vllm.worker import _Bound


class Stock:
    """Of vLLM's worker, the two calls of a step."""

    ran = None

    def execute_model(self, scheduler_output):
        return self.ran

    def sample_tokens(self, grammar_output):
        assert grammar_output is None
        return "tokens"


class Worker(_Bound, Stock):
    """As our workers are made."""


@pytest.mark.parametrize(
    ("bound", "ran", "step", "answer"),
    [
        (True, None, dict(has_structured_output_requests=False), "tokens"),
        (True, None, dict(has_structured_output_requests=True), None),
        (True, None, {}, None),
        (True, "nothing to do", dict(has_structured_output_requests=False), "nothing to do"),
        (False, None, dict(has_structured_output_requests=False), None),
    ],
)
def test_who_waits_for_a_grammar_and_who_does_not(bound, ran, step, answer):
    worker = Worker()
    worker._at_once, worker.ran = bound, ran
    assert worker.execute_model(SimpleNamespace(**step)) == answer
