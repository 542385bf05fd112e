"""Every error the library raises on purpose: one root, and children that are also the builtin that fits."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.verifier.finding import Finding


class PenstockError(Exception):
    """The root: catch it to catch everything Penstock refuses."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors go between processes, also those that are made of other things than their text."""
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(kind: type[PenstockError], args: tuple[Any, ...], state: dict[str, Any]) -> PenstockError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class ActionError(PenstockError, ValueError):
    """A text or a combination of fields that is not an action."""


class PlacementError(PenstockError, ValueError):
    """A map of stages to ranks that cannot be."""


class ScheduleError(PenstockError, ValueError):
    """Arguments that no schedule can be built from."""


class ScheduleTypeError(ScheduleError, TypeError):
    """Something else than a schedule or program, such as a name; the message says how to get one."""


class UnknownNameError(ScheduleError, LookupError):
    """A name that is not registered; the message offers the nearest ones."""


class CostsError(PenstockError, ValueError):
    """Costs, sizes or limits that are negative, not a number, or of the wrong length."""


class FileFormatError(PenstockError, ValueError):
    """A file that is not a schedule or program: names the file and, if there is one, the row and the cell."""

    def __init__(self, file: str, reason: str, *, row: int | None = None, cell: int | None = None) -> None:
        self.file, self.reason, self.row, self.cell = file, reason, row, cell
        place = "" if row is None else f", row {row + 1} (rank {row})"
        place += "" if cell is None else f", cell {cell + 1}"
        super().__init__(f"{file}{place}: {reason}")


class PassError(PenstockError, ValueError):
    """A pass that cannot be applied to this program, or a pass text that cannot be read."""


class UsageError(PenstockError, ValueError):
    """Arguments of a command that do not go together, or that name what is not there."""


class BusyError(PenstockError, RuntimeError):
    """Work that is refused because other work is still going on."""


class TooLongError(PenstockError, TimeoutError):
    """Work that was ended because it took longer than it may."""


class ScriptError(PenstockError, ValueError):
    """A training file that does not have what training needs."""


class PlanError(PenstockError, ValueError):
    """Limits that no plan was found within; the message says by how much, where, and what would fit."""


class VerifyError(PenstockError, ValueError):
    """A program that was refused, with every finding."""

    def __init__(self, findings: Iterable[Finding], report: str) -> None:
        self.findings = tuple(findings)
        super().__init__(report)


class LoweringError(PassError, VerifyError):
    """A schedule that cannot become a program, with every finding of the verifier about it."""


class StageCallError(PenstockError, RuntimeError, TypeError):
    """A stage's module does not take the arguments of a step; torch says so with one type in the first step and the other later."""


class NotAnIteratorError(PenstockError, TypeError):
    """Data that begin anew each time they are asked for, in place of an iterator over them."""


class CopyError(PenstockError, TypeError):
    """An object that is bound to this process, and can be neither copied nor sent to another."""


class PipelineError(PenstockError, RuntimeError):
    """A step that failed on some rank; every rank raises it, with the first failure as its cause."""


class LostRankError(PipelineError):
    """A rank whose process has ended before its work was done, or that the others have given up."""

    def __init__(self, text: str, lost: tuple[int, ...] | None = None) -> None:
        super().__init__(text)
        self.lost = lost
        """The ranks that are gone, if this one can go on without them; empty if only a connection was lost."""


class CheckpointError(PenstockError, RuntimeError):
    """A checkpoint that could not be written, or is refused: names its folder and what is wrong with it."""


class WeightsError(PenstockError, ValueError):
    """Values that a parameter should have and cannot get: a file without it, or a layer that does not say how it begins."""


class IntegrationError(PenstockError, ValueError):
    """An option of another training stack that has no meaning on a pipeline; the message names the way out."""


class SplitError(PenstockError, RuntimeError):
    """A stage whose backward for the weights cannot be had apart from that for the input."""


class WholeBackwardNeeded(BaseException):
    """Raised when a split forward asks autograd for something that the weights' stand-ins keep from it.

    It is no `Exception`, so that handlers in the forward's own code let it pass.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        """The stage's behaviour, as the end of a sentence."""


class MissingExtraError(PenstockError, ImportError):
    """An optional dependency that is not installed, named with the extra that brings it."""

    def __init__(self, what: str, package: str, extra: str) -> None:
        super().__init__(f"{what} needs {package}, which is not installed: {name_extra(extra)}")


class TorchVersionError(PenstockError, ImportError):
    """A version of torch that the runtime does not work with, or that lacks a private name which the runtime needs."""


def name_extra(extra: str) -> str:
    """End of a sentence about something that is not installed: the extra that brings it.

    >>> name_extra("plot")
    "install the extra 'plot', pip install '.[plot]' in a clone of Penstock"
    """
    return f"install the extra {extra!r}, pip install '.[{extra}]' in a clone of Penstock"


def nearest(name: object, known: Iterable[str]) -> str:
    """End of a sentence about an unknown name, which may be of any type: the nearest known ones, then all of them."""
    names = sorted(known)
    folded = {candidate.lower(): candidate for candidate in names}
    close = [folded[c] for c in difflib.get_close_matches(str(name).lower(), folded, n=3, cutoff=0.5)]
    hint = f"did you mean {' or '.join(repr(c) for c in close)}? " if close else ""
    return f"{hint}known: {', '.join(names)}" if names else "there are none"
