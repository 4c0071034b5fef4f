"""Drafts inside transformers in float32 and bfloat16, where passes of several tokens round as they like.

What is returned is then certified as ``longdraft.exactness`` says it. ε is four times the rounding of ``generate``
itself: how far the logits of its steps lie from those of one pass over the same text. Every logit that a verify pass
gave, and every token drawn with it, must be within ε of such a pass over its own text; and where two texts part, both
tokens must be within ε of the best.
"""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from longdraft import LLM
from longdraft.bench.peers.hand_over import as_folder
from longdraft.spec.noise import all_gumbels
from tests.exact.test_in_transformers import FAMILIES, drafting, model_of, prompts

KEPT = {"return_dict_in_generate": True, "output_logits": True}
TEMPERATURE = 0.7
DTYPES = [torch.float32, torch.bfloat16]


@torch.no_grad()
def in_one_pass(model, inputs, sequences):
    """Logits ``[B, n, V]`` before each new token of ``sequences``, row by row without padding, by plain attention."""
    start, rows = inputs["input_ids"].shape[1], []
    for ids, mask in zip(sequences, inputs["attention_mask"], strict=True):
        ids = torch.cat([ids[:start][mask.bool()], ids[start:]])
        rows.append(model(ids[None], use_cache=False).logits[0, -(sequences.shape[1] - start) - 1 : -1].float())
    return torch.stack(rows)


def steps(output):
    return torch.stack(output.logits, dim=1)


def epsilon_of(model, inputs, plain):
    return 4 * float((steps(plain) - in_one_pass(model, inputs, plain.sequences)).abs().max())


def certify(model, inputs, output, epsilon, noise=0):
    """That each logit is right, and each token the best of all with ``noise``; how many are not so in one pass."""
    alone = in_one_pass(model, inputs, output.sequences)
    new = output.sequences[:, inputs["input_ids"].shape[1] :, None]
    assert (steps(output) - alone).abs().max() <= epsilon
    assert torch.equal((steps(output) + noise).argmax(dim=-1), new[..., 0])
    short = (alone + noise).amax(dim=-1) - (alone + noise).gather(2, new)[..., 0]
    assert short.max() <= epsilon
    return int((short > 0).sum())


def partings(plain, drafted, start):
    """Of each row that differs: by how much its first other token is worse than that of ``generate``, and the place."""
    found = []
    for row, (a, b) in enumerate(zip(plain.sequences, drafted.sequences, strict=True)):
        places = (a != b).nonzero()
        if len(places):
            at = int(places[0])
            logits = plain.logits[at - start][row]
            found.append((row, at - start, float(logits[a[at]] - logits[b[at]])))
    return found


def noise_of(inputs, count, seed, vocabulary):
    """T · G of each new token, ``[B, n, V]``, by the definition: a function of seed, position and id."""
    length = inputs["attention_mask"].sum(dim=1)
    at = (length[:, None] + torch.arange(count)).flatten()
    noise = all_gumbels(torch.full_like(at, seed), at, vocabulary)
    return TEMPERATURE * noise.view(len(length), count, vocabulary)


def check(model, inputs, count, draft):
    """Greedy and sampled; what there is to report."""
    start = inputs["input_ids"].shape[1]
    options = {"max_new_tokens": count, "eos_token_id": None, "pad_token_id": 0, **KEPT}
    plain = model.generate(**inputs, **options, do_sample=False)
    epsilon = epsilon_of(model, inputs, plain)
    greedy = model.generate(**inputs, **options, do_sample=False, custom_generate=draft)
    accepted = sum(sum(s.accepted) for s in draft.stats)
    off = certify(model, inputs, greedy, epsilon)
    parted = partings(plain, greedy, start)
    assert all(margin <= epsilon for *_, margin in parted)
    sampling = {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0}
    sampled = model.generate(**inputs, **options, **sampling, custom_generate=draft)
    noise = noise_of(inputs, count, draft.seed, model.config.vocab_size)
    off += certify(model, inputs, sampled, epsilon, noise)
    assert accepted + sum(sum(s.accepted) for s in draft.stats) > 0
    return {"epsilon": epsilon, "parted": parted, "not the best in one pass": off}


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "overrides"), FAMILIES, ids=[f for f, _ in FAMILIES])
def test_tiny_models(family, overrides, dtype):
    """One prompt, and a ragged batch."""
    model = copy.deepcopy(model_of(family, **overrides)).to(dtype)
    for rows, draft in ((1, "snapkv"), (3, "streaming_llm")):
        found = check(model, prompts(rows), 10, drafting(draft, seed=5))
        assert found["epsilon"] < (1e-4 if dtype == torch.float32 else 0.25)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_the_embedded_model(dtype, embedded_path, novels, tmp_path, capsys):
    llm = LLM(str(embedded_path), dtype=str(dtype).removeprefix("torch."), max_model_len=512, max_num_seqs=1)
    model = AutoModelForCausalLM.from_pretrained(as_folder(llm, tmp_path), dtype=dtype).eval()
    width, lengths = 400, (400, 301, 357)
    texts = [llm.checkpoint.tokenizer.encode(text[20_000:24_000])[:width] for text in list(novels.values())[:3]]
    mask = torch.stack([(torch.arange(width) >= width - n).long() for n in lengths])
    inputs = {"input_ids": torch.tensor(texts) * mask, "attention_mask": mask}
    for rows, name in ((1, "snapkv"), (3, "streaming_llm")):
        part = {key: value[:rows] for key, value in inputs.items()}
        found = check(model, part, 32, drafting(name, budget=96, seed=5))
        with capsys.disabled():
            print(f"\n{dtype}, {rows} rows: {found}")
