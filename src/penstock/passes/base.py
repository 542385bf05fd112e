"""The base class of passes, and checks of their options."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import MISSING, Field, fields
from typing import Any, ClassVar, Self

from penstock.errors import PassError
from penstock.ir.program import Program

Stages = tuple[int, ...] | None
"""The stages that a pass is limited to; None is all."""


class Pass(ABC):
    """A step of lowering.

    `apply` gets a valid program and returns a valid one; `PassList` calls it once, after the passes before it. Subclasses are frozen
    dataclasses: `name` is the name in the text form, and the fields are the options.
    """

    name: ClassVar[str]

    @abstractmethod
    def apply(self, program: Program) -> Program:
        """Return the program after this pass."""

    def __str__(self) -> str:
        options = [f"{f.name}={_print(getattr(self, f.name))}" for f in self._fields() if getattr(self, f.name) != f.default]
        return f"{self.name}{{{','.join(options)}}}" if options else self.name

    @classmethod
    def _fields(cls) -> tuple[Field[Any], ...]:
        return fields(cls)  # type: ignore[arg-type]

    @classmethod
    def from_options(cls, options: dict[str, str]) -> Self:
        """The pass with options as they are written in its text form."""
        known = {f.name: f for f in cls._fields()}
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise PassError(f"pass {cls.name} has no option {unknown[0]!r}; its options: {', '.join(known) or 'none'}")
        missing = [f.name for f in known.values() if f.default is MISSING and f.name not in options]
        if missing:
            raise PassError(f"pass {cls.name} needs the option {missing[0]!r}")
        return cls(**{name: _read(cls.name, name, text) for name, text in options.items()})

    def _record(self, program: Program, **fields: Any) -> Program:
        """Return the changed program, with this pass added to its list of passes."""
        done = f"{program.passes},{self}" if program.passes else str(self)
        return program.changed(passes=done, **fields)


def _print(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "+".join(map(str, value))
    return "all" if value is None else str(value)


def _read(pass_name: str, option: str, text: str) -> Any:
    """An option's value: whole numbers, lists of them joined by +, true, false, all (None), or a word."""
    words = {"true": True, "false": False, "all": None}
    if text in words:
        return words[text]
    parts = text.split("+")
    try:
        if option == "stages" or "+" in text:
            return tuple(int(part) for part in parts)
        return int(text) if text.lstrip("-").isdigit() else text
    except ValueError:
        what = "stages" if option == "stages" else "numbers"
        raise PassError(f"option {option}={text} of pass {pass_name} is not a list of {what} like 0+2+5") from None


def check_stages(pass_name: str, stages: Stages, program: Program) -> None:
    """Refuse stages that the program does not have."""
    wrong = [stage for stage in stages or () if not 0 <= stage < program.stages]
    if wrong:
        raise PassError(f"pass {pass_name} is limited to stage {wrong[0]}, but the program has stages 0 to {program.stages - 1}")


def is_within(stages: Stages, column: Any) -> Any:
    """Whether each entry of a stage column is within the limit."""
    import numpy as np

    return np.ones(len(column), dtype=np.bool_) if stages is None else np.isin(column, stages)
