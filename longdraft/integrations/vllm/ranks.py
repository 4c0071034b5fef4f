"""What the ranks of a tensor-parallel group owe each other when drafting fails. Imports no vLLM.

Every rank drafts: its part of the target's passes is waited for by all others, and its sampler checks drafts by the
distributions that it keeps itself. So either all ranks step aside or none does. What fails for a reason that lies in
the step fails on all of them alike, at the same place. Where one fails alone (out of memory, say) the others wait for
it, or would sample something else than it: the engine has to end then, as it does when a rank of vLLM's own fails.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

PATIENCE = timedelta(seconds=60)  # vLLM's own, with a step, is five minutes


def parted(group: Any, patience: timedelta = PATIENCE) -> bool:
    """After a failure here: whether other ranks of ``group``, a ``ProcessGroup`` of gloo's, have not failed.

    Waits for them; costs nothing while nothing fails. ``None``: this rank is the only one.
    """
    if group is None:
        return False
    try:
        group.barrier().wait(patience)
    except RuntimeError:  # not all came
        return True
    return False
