"""Typed errors. Each message says what was wrong, the value, the limit and the fix.

Owns every exception the package raises on purpose; imports nothing from the package.
"""

from __future__ import annotations


def _brief(value: object) -> str:
    """``repr`` cut to a line: values may be megabytes long."""
    try:
        shown = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        shown = f"an integer of {int(value).bit_length():,} bits"  # type: ignore[call-overload]
    return shown if len(shown) <= 120 else f"{shown[:117]}..."


class LongDraftError(Exception):
    """Base of every error that LongDraft raises on purpose."""


class InvalidValueError(LongDraftError, ValueError):
    """A parameter is out of range or of the wrong kind.

    ``what`` names the parameter, ``value`` is what was given, ``limit`` what is allowed, ``fix`` what to do.
    """

    def __init__(self, what: str, value: object, limit: str, fix: str = "") -> None:
        self.what, self.value, self.limit, self.fix = what, value, limit, fix
        super().__init__(f"{what} is {_brief(value)}, but {limit}." + (f" {fix}" if fix else ""))


class ContextLengthError(InvalidValueError):
    """A prompt does not fit: ``value`` tokens were given, ``limit`` says how many are allowed."""


class OutOfMemoryError(LongDraftError):
    """Weights or cache do not fit in memory; the message gives both sizes and what to change."""


class KVCapacityError(OutOfMemoryError):
    """The KV cache cannot be made large enough for what was asked."""


class ModelNotFoundError(LongDraftError):
    """No model at that path or of that name; the message says where it was looked for and what to run."""


class ModelFileError(LongDraftError):
    """A model file is damaged, incomplete or refused. Names the file and, where known, the byte offset."""

    def __init__(self, file: object, problem: str, *, offset: int | None = None, fix: str = "") -> None:
        self.file, self.problem, self.offset, self.fix = str(file), problem, offset, fix
        where = f"{file}" + (f" at byte {offset}" if offset is not None else "")
        super().__init__(f"{where}: {problem}." + (f" {fix}" if fix else ""))


class UnsupportedModelError(LongDraftError):
    """The model asks for something LongDraft does not do; refused, since ignoring it would change the output."""

    def __init__(self, what: str, value: object, supported: str, fix: str = "") -> None:
        self.what, self.value, self.supported = what, value, supported
        super().__init__(f"{what} = {_brief(value)} is not supported ({supported})." + (f" {fix}" if fix else ""))


class VocabularyMismatchError(LongDraftError):
    """A draft model's tokens are not the target's; the message names both models, the first difference and the fix."""

    def __init__(self, target: str, draft: str, problem: str, fix: str) -> None:
        self.target, self.draft, self.problem = target, draft, problem
        super().__init__(f"{draft!r} cannot propose tokens for {target!r}: {problem}. {fix}")


class TargetMismatchError(LongDraftError):
    """A draft was made for another target; the message names both, what differs and the fix."""

    def __init__(self, target: str, draft: str, problem: str) -> None:
        self.target, self.draft, self.problem = target, draft, problem
        fix = "Use the model it was made for, or make one for this model."
        super().__init__(f"{draft!r} cannot propose tokens for {target!r}: {problem}. {fix}")


class TemplateError(LongDraftError):
    """A chat template is missing, refused the messages (its own words are passed on), or broke its limits."""


class MissingDependencyError(LongDraftError):
    """An optional package is needed; the message gives the command that installs it."""

    def __init__(self, package: str, purpose: str, install: str, found: str = "") -> None:
        """``found``: the version that is there, if it is too old."""
        problem = f"of which {found} is installed and too old" if found else "which is not installed"
        super().__init__(f"{purpose} needs the package {package!r}, {problem}. Run: {install}")


class CalibrationError(LongDraftError):
    """A file of calibrations is damaged, or has none for what was asked; the message names the file and the fix."""

    def __init__(self, file: object, problem: str, fix: str) -> None:
        self.file, self.problem, self.fix = str(file), problem, fix
        super().__init__(f"{file}: {problem}. {fix}")


class BusyMachineError(LongDraftError):
    """Others use the processors so much that what is timed would say nothing; the message gives their share."""

    def __init__(self, share: float, limit: float, fix: str) -> None:
        self.share, self.limit, self.fix = share, limit, fix
        super().__init__(f"Others use {share:.0%} of the processors' time, but timing allows {limit:.0%}. {fix}")


class TrainingError(LongDraftError):
    """Training cannot go on: the loss is no number, or what was saved is not of this run. The message gives the fix."""


class RankError(LongDraftError):
    """One of a group of processes cannot go on where the others do; the message says why."""


class KernelError(LongDraftError):
    """No kernel serves a call; the message prints the call and every implementation's reason."""
