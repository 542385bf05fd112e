"""What was considered, and what came of it: a line of a report."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from penstock.errors import FileFormatError
from penstock.planner.named import Attempt, Verdict
from penstock.planner.setting import Trial


@dataclass(frozen=True)
class Candidate:
    """One schedule in one setting; figures are None where it was not timed."""

    name: str
    placement: str
    chunks: int
    microbatch: int
    """Samples a microbatch."""
    microbatches: int
    recompute: int
    """How many of its stages are recomputed."""
    verdict: str
    reason: str = ""
    sizes: tuple[int, ...] | None = None
    """How many layers each stage has."""
    objective: float | None = None
    bubble: float | None = None
    peak: float | None = None
    """The most that the rank with the least room holds."""
    peak_rank: int | None = None
    excess: float | None = None
    """How much that is over the rank's limit; negative where it is under."""
    bound: float | None = None
    """No schedule in this setting that fits takes less; None where none fits at all."""
    p95: float | None = None
    """What 95 in 100 runs with jitter stay under, where that was tried."""

    @property
    def fits(self) -> bool:
        return self.verdict == Verdict.FITS

    @classmethod
    def of(cls, attempt: Attempt, bound: float | None = None, p95: float | None = None) -> Candidate:
        return cls(
            name=attempt.name,
            placement=attempt.placement.kind,
            chunks=attempt.placement.chunks,
            microbatch=attempt.case.profile.microbatch,
            microbatches=attempt.case.microbatches,
            recompute=attempt.recompute,
            verdict=attempt.verdict.value,
            reason=attempt.reason,
            bound=bound,
            p95=p95,
            **({} if attempt.trial is None else _figures(attempt.trial)),
        )

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_json(cls, data: Any, file: str) -> Candidate:
        known = {each.name for each in fields(cls)}
        if not isinstance(data, dict) or not set(data) <= known:
            raise FileFormatError(file, f"an alternative has other fields than {', '.join(sorted(known))}: {data!r}")
        sizes = data.get("sizes")
        try:
            return cls(**{**data, "sizes": None if sizes is None else tuple(sizes)})
        except TypeError as error:
            raise FileFormatError(file, f"an alternative: {error}") from None


def _figures(trial: Trial) -> dict[str, Any]:
    excess = trial.excess if trial.setting.limits is not None else None
    return {
        "sizes": trial.setting.sizes,
        "objective": trial.objective,
        "bubble": trial.timeline.bubble,
        "peak": trial.timeline.peak_memory[trial.worst_rank],
        "peak_rank": trial.worst_rank,
        "excess": excess,
    }
