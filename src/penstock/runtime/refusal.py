"""Input that a rank refuses: the other ranks, whose input may be in order, must not take its next step for this one."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from penstock.errors import PipelineError
from penstock.runtime.alarm import describe

Made = TypeVar("Made", bound=Callable[..., Any])


def told(make: Made) -> Made:
    """A pipeline's method that refuses input: this rank raises why, and all others, in the call that they make meanwhile, that it has."""

    @wraps(make)
    def made(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return make(self, *args, **kwargs)
        except PipelineError as error:
            self.group.fail(self.rank, error)
            raise
        except Exception as error:
            _tell(self, error)
            raise
        except BaseException as error:
            self.group.fail(self.rank, error)
            raise

    return cast(Made, made)


def _tell(pipeline: Any, error: Exception) -> None:
    try:
        pipeline.group.enter(pipeline.rank, pipeline.deadline)
    except PipelineError:  # a failure that this rank had yet to raise; its own error does instead
        return
    headline = f"{pipeline.group.called(pipeline.rank)} refused what it was given for the step: {describe(error)}"
    pipeline.group.report_failure(pipeline.rank, headline, error)
