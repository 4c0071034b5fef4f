"""What an engine lets follow prompts: the texts that ``train/onpolicy.py`` keeps."""

from __future__ import annotations

from longdraft.llm import LLM
from longdraft.sampling_params import SamplingParams
from longdraft.train.onpolicy import Write


def continuations(llm: LLM, temperature: float, length: int) -> Write:
    """By ``llm``, until prompt and output have ``length`` tokens; a text's end does not end it, as in packed texts.

    Greedy at temperature 0. Drafts that ``llm`` has make it faster, and change nothing.
    """

    def write(prompts: list[list[int]], seeds: list[int]) -> list[list[int]]:
        params = [
            SamplingParams(temperature=temperature, seed=seed, max_tokens=length - len(prompt), ignore_eos=True)
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        return [list(done.outputs[0].token_ids) for done in llm.generate(prompts, params)]

    return write
