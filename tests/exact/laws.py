"""Toy models with known laws: exact enumeration of what decoding emits, simulation of the same, and the test between.

A context is a number: 1 for the empty one, ``context * V + token`` for one longer, so contexts of n tokens are the
numbers [V^n, 2 V^n).
"""

from collections import Counter

import torch
from scipy import stats

from longdraft.spec.acceptance import overlap
from longdraft.spec.probs import to_log_probs
from longdraft.spec.sample import draw
from longdraft.spec.verify import acceptance_probability, draft_draw, residual, verify_coupled, verify_maximal


class Toy:
    """A next-token law ``[V]`` of its own for every context of up to ``depth`` tokens."""

    def __init__(self, vocab, depth, seed, temperature=1.0):
        self.vocab = vocab
        logits = torch.randn(2 * vocab**depth, vocab, generator=torch.Generator().manual_seed(seed)).double() * 1.5
        # A fifth of the entries is masked, as filters do; entry 0 stays, so that no row is empty.
        mask = torch.rand(logits.shape, generator=torch.Generator().manual_seed(seed + 1)) < 0.2
        mask[:, 0] = False
        self.log_probs = (logits / temperature).masked_fill(mask, -torch.inf).log_softmax(dim=-1)

    def level(self, n):
        """Probabilities after every context of ``n`` tokens, ``[V] * n + [V]``."""
        rows = self.log_probs[self.vocab**n : 2 * self.vocab**n]
        return rows.exp().reshape([self.vocab] * (n + 1))


def joint(target, n):
    """The autoregressive law of the next ``n`` tokens, ``[V] * n``."""
    law = torch.ones((), dtype=torch.float64)
    for i in range(n):
        law = law[..., None] * target.level(i)
    return law


def speculative_joint(target, draft, gamma, n, *, accept=acceptance_probability, replace=residual, drawn=None, bonus=0):
    """The law of the next ``n`` tokens in rounds of ``gamma`` drafted ones under the maximal rule, ``[V] * n``.

    Enumerates the branches: ``mass[k]`` is the probability of each context with k tokens accepted so far in the round.
    What a mutant does differently: the rule's two functions, what the draft draws from (``drawn(q)``, while the rule
    is told q), and how many rows too early the bonus is read.
    """
    mass = {0: torch.ones((), dtype=torch.float64)}
    for i in range(n):
        p, q = target.level(i), draft.level(i)
        after = Counter()
        for k, weight in mass.items():
            if k == gamma:
                last = target.level(i - bonus).reshape([target.vocab] * (i - bonus) + [1] * bonus + [target.vocab])
                after[0] = after[0] + weight[..., None] * last
                continue
            kept = (drawn(q) if drawn else q) * accept(p, q)
            lost = 1 - kept.sum(dim=-1, keepdim=True)
            after[k + 1] = after[k + 1] + weight[..., None] * kept
            after[0] = after[0] + weight[..., None] * lost * replace(p, q)
        mass = after
    return sum(mass.values())


def distance(law, other):
    """Total variation."""
    return 1 - overlap(law.flatten(), other.flatten()).item()


def propose(draft, contexts, gamma, seeds, positions, choose):
    """``gamma`` tokens after each context by ``choose(log_q, seeds, positions)``: the contexts ``[B, gamma + 1]``."""
    chain = [contexts]
    for i in range(gamma):
        chain.append(chain[-1] * draft.vocab + choose(draft.log_probs[chain[-1]], seeds, positions + i))
    return torch.stack(chain, dim=1)


def maximal(log_p, tokens, log_q, seeds, positions):
    return verify_maximal(log_p, tokens, log_q.flatten(0, -2), seeds, positions)


def coupled(log_p, tokens, log_q, seeds, positions):
    return verify_coupled(log_p, tokens, seeds, positions)


def deterministic(log_p, tokens, log_q, seeds, positions):
    return verify_maximal(log_p, tokens, None, seeds, positions)


def generate(target, draft, gamma, n, seeds, verify=maximal, choose=draft_draw):
    """The first ``n`` tokens of every seed, ``[B, n]``, in rounds of propose and verify by the production functions."""
    out = [[] for _ in seeds]
    contexts = [1] * len(seeds)
    while rows := [b for b, tokens in enumerate(out) if len(tokens) < n]:
        positions = torch.tensor([len(out[b]) for b in rows])
        start = torch.tensor([contexts[b] for b in rows])
        chain = propose(draft, start, gamma, seeds[rows], positions, choose)
        log_p = target.log_probs[chain].flatten(0, 1)
        drafted = (chain[:, 1:] % target.vocab).tolist()
        verdict = verify(log_p, drafted, draft.log_probs[chain[:, :-1]], seeds[rows], positions)
        for b, tokens in zip(rows, verdict.tokens, strict=True):
            out[b] += tokens
            for token in tokens:
                contexts[b] = contexts[b] * target.vocab + token
    return torch.tensor([tokens[:n] for tokens in out])


def plain(target, n, seeds):
    """The first ``n`` tokens of every seed without speculation, ``[B, n]``."""
    contexts = propose(target, torch.ones_like(seeds), n, seeds, torch.zeros_like(seeds), draw)
    return contexts[:, 1:] % target.vocab


def counts(tokens, vocab):
    """How often each sequence ``[B, n]`` occurs, ``[V ** n]``."""
    code = torch.zeros(len(tokens), dtype=torch.int64)
    for column in tokens.T:
        code = code * vocab + column
    return torch.bincount(code, minlength=vocab ** tokens.shape[1]).double()


def g_test(observed, law):
    """p-value of counts ``[K]`` under ``law [K]``; cells are pooled to expect about 10. 0 if the impossible occurs."""
    law = law.flatten()
    if observed[law == 0].sum() > 0:
        return 0.0
    expected, order = (law * observed.sum()).sort(descending=True)
    group = (expected.cumsum(0) / 10).long()
    pooled = torch.zeros(2, int(group.max()) + 1, dtype=torch.float64)
    pooled[0].index_add_(0, group, observed[order])
    pooled[1].index_add_(0, group, expected)
    pooled = pooled[:, pooled[1] > 0]
    if pooled[1, -1] < 10:
        pooled = torch.cat([pooled[:, :-2], pooled[:, -2:].sum(dim=1, keepdim=True)], dim=1)
    return stats.power_divergence(pooled[0].numpy(), pooled[1].numpy(), lambda_="log-likelihood").pvalue


# Case O06: the draft's distribution must be the one its token was drawn from.
P = torch.tensor([0.30, 0.25, 0.20, 0.12, 0.08, 0.05]).double().log()
Q = torch.tensor([0.05, 0.10, 0.30, 0.25, 0.18, 0.12]).double().log()


def first_tokens(params, *, claimed=None, target=None, choose=draft_draw, rule=maximal, n=50_000):
    """Counts of the first emitted token; ``claimed`` and ``target`` stand in for the filtered q and p."""
    p, q = to_log_probs(torch.stack([P, Q]), [params, params])
    seeds, positions = torch.arange(n), torch.full((n,), 5)
    drafted = choose(q.expand(n, -1), seeds, positions)
    log_p = (p if target is None else target).expand(2 * n, -1)
    log_q = (q if claimed is None else claimed).expand(n, -1)
    verdict = rule(log_p, drafted[:, None].tolist(), log_q, seeds, positions)
    return torch.bincount(torch.tensor([row[0] for row in verdict.tokens]), minlength=6).double(), p.exp()
