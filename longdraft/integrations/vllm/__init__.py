"""A draft over vLLM's own pages (MagicDec, arXiv:2408.11049), as a plug-in for stock vLLM 0.32 and 0.33.

    settings.py   what is set for a server and for one request
    tables.py     which blocks a draft step reads: vLLM's block tables, shortened
    sampling.py   what a draft's token is drawn from, and with which noise
    guard.py      when the plug-in steps aside, in sentences
    rows.py       which rows of a step draft, and how much
    drafter.py    a round of drafting
    graphs.py     its passes as CUDA graphs that vLLM has
    ranks.py      what tensor-parallel ranks do where drafting fails
    control.py    how much each row drafts, chosen at every step: LongDraft's online control over vLLM's rows
    auto.py       what that goes by here: curves
    measure.py    what passes take, timed when vLLM starts
    stored.py     where that is kept for the next start
    repair.py     a defect of vLLM's CPU build
    proposer.py   vLLM's "custom_class": the target's own forward pass over the shortened tables
    pages.py      vLLM's KV cache as pages of the native kernels
    notes.py      what is noted of the target's passes there: queries, and which blocks they wrote to
    choice.py     blocks chosen by their keys, for the shortened tables
    twin.py       a draft with 8-bit weights of its own, over those pages
    attention.py  those kernels in the place of vLLM's attention, on CPUs
    worker.py     vLLM's "worker_cls": hands the proposer the runner it drafts for
    args.py       the line for ``vllm serve``

Only ``proposer.py``, ``attention.py`` and ``worker.py`` import vLLM, inside its worker processes.
"""
