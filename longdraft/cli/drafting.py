"""Options that describe a draft, and how a comparison of plain and speculative decoding is shown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from longdraft.config import AutoDraft, DraftConfig
from longdraft.errors import InvalidValueError

if TYPE_CHECKING:
    from longdraft.compare import Comparison

REFRESH: dict[str, int | str] = {"never": 0, "auto": "auto"}
ROUNDS = re.compile("[1-9][0-9]{0,8}")
LEAST_SHARE = 0.005  # of a choice that is shown
UNCODED = "streaming_llm, snapkv, verified, pages, topk, full, layer_skip, int8, ngram"
NAMES = f"{UNCODED}, full+quant8 and the like"
OWN = "a small model's or a SPIRe draft's path or name"
Name = Annotated[
    str,
    typer.Option(
        "--draft",
        help=f"Who proposes tokens: {NAMES}, or {OWN}; auto: whoever is predicted to gain most, anew at every step "
        "(auto+PATH: a SPIRe draft may be chosen, too); default: auto where output stays the same bit for bit, else "
        "none; off for none.",
    ),
]
Kv = Annotated[
    str | None,
    typer.Option(
        "--kv",
        help="What a draft with a model reads of its cache: streaming_llm, snapkv, topk or full, the target itself "
        "also verified or pages. The target's, but for the last two, may have +quant8 behind: kept in 8 bits.",
    ),
]
Budget = Annotated[int, typer.Option(help="Tokens per KV head that the draft reads, sinks included; not with auto.")]
_REFRESH = (
    "When snapkv, topk, pages and verified choose anew what they read: after so many rounds, auto (when fewer of their "
    "proposals stand), or never (but for a full budget). Left out: as is usual for them."
)
Refresh = Annotated[str | None, typer.Option("--refresh", metavar="ROUNDS", help=_REFRESH)]
Refreshes = Annotated[list[str] | None, typer.Option("--refresh", metavar="ROUNDS", help=f"{_REFRESH} Repeatable.")]
Gamma = Annotated[int, typer.Option(help="Most tokens proposed per verify pass; not with auto, which chooses.")]
Rule = Annotated[
    str, typer.Option("--sampling-rule", help="coupled (equal output) or maximal (the target's exact law).")
]


def draft_config(
    name: str, budget: int, gamma: int, rule: str, kv: str | None = None, refresh: str | None = None
) -> DraftConfig | AutoDraft | None:
    """The draft that the options describe; ``None`` for ``off``. Unknown names are refused."""
    draft = _draft_config(name, budget, gamma, rule, kv)
    return draft if refresh is None else replace(draft, refresh=parse_refresh(refresh, [draft]))


def _draft_config(name: str, budget: int, gamma: int, rule: str, kv: str | None) -> DraftConfig | AutoDraft | None:
    if name == "off":
        return None
    from longdraft.drafts.registry import check
    from longdraft.llm_draft import resolve_draft

    base = resolve_draft(name)
    if isinstance(base, AutoDraft):
        if rule != AutoDraft.sampling_rule:
            raise InvalidValueError("--sampling-rule", rule, "must be coupled with --draft auto")
        return base
    return check(replace(base, kv=kv or base.kv, budget=budget, gamma=gamma, sampling_rule=rule))


def parse_refresh(text: str, drafts: Iterable[DraftConfig | AutoDraft | None]) -> int | str:
    """What ``--refresh`` says, as in ``DraftConfig``. ``InvalidValueError`` for what it cannot be, and if none of
    ``drafts`` chooses what it reads.
    """
    from longdraft.drafts.registry import watches

    if not any(isinstance(draft, DraftConfig) and watches(draft) for draft in drafts):
        limit = "must be left out, as no draft here chooses what it reads by the text"
        raise InvalidValueError("--refresh", text, limit, "Or take --draft snapkv, topk, pages or verified.")
    if text in REFRESH:
        return REFRESH[text]
    if not ROUNDS.fullmatch(text):
        raise InvalidValueError("--refresh", text, "must be never, auto, or a number of rounds from 1 to 999999999")
    return int(text)


def require_draft(draft: DraftConfig | AutoDraft | None) -> DraftConfig | AutoDraft:
    """The draft; comparing needs one."""
    if draft is None:
        raise InvalidValueError("--draft", "off", "must name a draft to compare with plain decoding")
    return draft


def comparison_table(result: Comparison, draft: DraftConfig | AutoDraft, where: dict[str, object]) -> Table:
    """Plain beside speculative."""
    plain, fast = result.plain, result.speculative
    out = Table(title=f"{draft.label}, gamma {draft.gamma}" if "control" not in fast else "auto", title_justify="left")
    for name in ("", "plain", "speculative"):
        out.add_column(name, justify="left" if not name else "right", style="bold" if not name else None)
    both = (plain, fast)
    out.add_row("decode", *(f"{x['tokens_per_s']:.1f} tokens/s" for x in both))
    out.add_row("", *(f"{x['decode_tokens']:,} tokens in {x['decode_s']:.1f} s" for x in both))
    out.add_row("draft, verify", "", f"{fast['draft_s']:.1f} s, {fast['verify_s']:.1f} s")
    out.add_row("tokens per verify", *(f"{x['tokens_per_verify']:.2f}" for x in both))
    if control := fast.get("control"):
        for name, value in control_lines(control):
            out.add_row(name, "", value)
    read = [fast[f"kv_bytes_read_per_{name}_token"] / 2**20 for name in ("plain", "draft")]
    most = " at most" if control else ""
    out.add_row("KV read per token", f"{read[0]:.1f} MiB", f"{read[1]:.1f} MiB{most} by the draft")
    extra = fast["draft_kv_bytes"] / 2**20
    out.add_row("KV of the draft's own", "", f"{extra:.1f} MiB")
    if fast["draft_note_bytes"]:
        out.add_row("what it chooses by", "", f"{fast['draft_note_bytes'] / 2**20:.1f} MiB")
    out.add_row("acceptance by position", "", " ".join(f"{x:.2f}" for x in fast["acceptance_by_position"]))
    out.add_row("speed", "1", f"{result.ratio:.2f} x")
    draft_fill = fast["prefill_s"] - plain["prefill_s"]
    out.add_row(
        "prefill, shared", f"{plain['prefill_s']:.1f} s", f"{draft_fill:.1f} s more" if draft_fill > 0.05 else ""
    )
    out.add_row("output", "", verdict(result))
    exactness = result.label if result.lossless else f"{result.label}; {result.exactness} to plain decoding"
    out.add_row("exactness", "", exactness)
    kernels = ", ".join(f"{op}: {name}" for op, name in where["kernels"].items())
    out.add_row("kernels", "", f"{kernels} ({where['dtype']})")
    return out


def control_lines(control: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and values of what online control did, from ``ControlStats.report``."""
    shown = [(one["share"], _chosen(one["draft"], one["gamma"])) for one in control["chosen"]]
    yield "chosen", ", ".join(f"{share:.0%} {name}" for share, name in shown if share >= LEAST_SHARE)
    total = sum(control["off"].values())
    if total:
        yield "why off", ", ".join(f"{reason} ({count / total:.0%})" for reason, count in control["off"].items())
    yield "predicted, realised", f"{control['predicted_speedup']:.2f} x, {control['realised_speedup']:.2f} x"
    yield "Eq. 2 residual", f"{control['eq2_residual']:+.1%}"


def _chosen(draft: str, gamma: int) -> str:
    return f"{draft} γ{gamma}" if gamma else draft


def verdict(result: Comparison) -> str:
    """In words: identical, or the first difference and whether it is allowed."""
    if result.errors:
        return f"FAILED: {result.errors[0]}"
    if result.identical:
        return "identical"
    if result.exactness == "distribution":
        return "differs, as it may under the maximal rule"
    first = result.first_difference
    where = f"prompt {first['prompt'] + 1}, token {first['position'] + 1}"
    if result.held:
        return f"near-tie at {where} (margin {first['margin']:.1e})"
    return f"DIFFERS at {where}: {first.get('first')} against {first.get('second')}"


def note_on_speed(result: Comparison) -> str | None:
    """Why speculation may not be faster here."""
    if result.ratio >= 1:
        return None
    return (
        "Speculation is slower here: it pays where decoding is bound by reading the KV cache, at long context and "
        "batch; on plain torch kernels that takes longer contexts than on native ones."
    )
