"""The SPIRe draft that comes with the sources, for the embedded model; not part of installed packages."""

from pathlib import Path

import pytest

from longdraft import LLM, SamplingParams
from longdraft.train.corpora import novel

DRAFT = Path(__file__).parents[2] / "drafts" / "spire-smollm2-135m"


@pytest.mark.skipif(not DRAFT.exists(), reason="the draft is not here")
def test_it_proposes_what_the_model_says():
    """Text from a part of a novel that it was not trained on. Untrained layers are right in 3 % of cases."""
    text = novel("northanger_abbey")
    prompt, params = text[len(text) // 2 :][:3000], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    llm = LLM(dtype="bfloat16", draft=str(DRAFT), max_model_len=2048)
    (plain,), (drafted,) = llm.generate([prompt], params, draft=None), llm.generate([prompt], params)
    stats = drafted.stats
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    assert stats.accepted_by_position[0] > 0.35 * stats.drafted_by_position[0] > 3
    assert DRAFT.joinpath("model.safetensors").stat().st_size < 60e6
