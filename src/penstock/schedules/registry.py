"""Schedules by name: built-in ones, and those of other packages by entry point."""

from __future__ import annotations

import importlib
import inspect
import operator
import pkgutil
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, TypeVar, cast

from penstock.errors import ScheduleError, UnknownNameError, nearest
from penstock.ir import codes
from penstock.ir.placement import Placement

if TYPE_CHECKING:
    from penstock.ir.graph import StageGraph
    from penstock.ir.rows import Ints
    from penstock.ir.schedule import Schedule

ENTRY_POINT_GROUP = "penstock.schedules"


@dataclass(frozen=True)
class Shape:
    """The input of a generator: the number of ranks, of chunks per rank, and of microbatches."""

    ranks: int
    chunks: int
    microbatches: int


@dataclass(frozen=True)
class Layout:
    """A family of placements, and the number of chunks per rank: a fixed number, or a default that can be changed.

    `unit` is the name of a group of chunks and its size, if chunks do not come one by one: `("waves", 2)`.
    """

    place: Callable[[Shape], Placement]
    chunks: int
    fixed: bool = True
    unit: tuple[str, int] = ("chunks", 1)

    @property
    def counts(self) -> tuple[str, ...]:
        """The options that set the number of chunks per rank."""
        return () if self.fixed else tuple(dict.fromkeys((self.unit[0], "chunks")))


linear = Layout(lambda shape: Placement.linear(shape.ranks), chunks=1)
looped = Layout(lambda shape: Placement.looped(shape.ranks, shape.chunks), chunks=2, fixed=False)
v = Layout(lambda shape: Placement.v(shape.ranks), chunks=2)
wave = Layout(lambda shape: Placement.wave(shape.ranks, shape.chunks // 2), chunks=2, fixed=False, unit=("waves", 2))
bidirectional = Layout(lambda shape: Placement.bidirectional(shape.ranks), chunks=2)

Generate = Callable[..., Any]
"""`generate(shape, rank, **options)` yields one rank's packed compute actions (an `Iterator[int]`), chunk numbers in place of
stages; a whole pipeline's `generate(shape, **options)` returns every rank's (a `Sequence[Sequence[int]]`)."""


@dataclass(frozen=True)
class Algorithm:
    """One registered schedule."""

    name: str
    generate: Generate
    layout: Layout
    accepts: Callable[..., int] | None
    check: Callable[..., None] | None
    whole: bool

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        return self._doc[0]

    @property
    def bubble(self) -> str:
        """The bubble formula: the docstring's `Bubble:` line."""
        return self._read_line("Bubble:")

    @property
    def memory(self) -> str:
        """The memory formula: the docstring's `Memory:` line."""
        return self._read_line("Memory:")

    def _read_line(self, label: str) -> str:
        return next((line.removeprefix(label).strip() for line in self._doc if line.startswith(label)), "")

    @property
    def _doc(self) -> list[str]:
        return (inspect.getdoc(self.generate) or "").splitlines()

    @property
    def options(self) -> dict[str, Any]:
        """The options of this algorithm and their defaults."""
        parameters = inspect.signature(self.generate).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}

    def shape(self, ranks: Any, microbatches: Any, chunks: Any) -> Shape:
        """The checked shape."""
        layout = self.layout
        shape = Shape(
            _count("ranks", ranks, codes.MAX_STAGES),
            _count("chunks", layout.chunks if chunks is None else chunks, codes.MAX_STAGES),
            _count("microbatches", microbatches, codes.MAX_MICROBATCHES),
        )
        unit, size = layout.unit
        if layout.fixed and shape.chunks != layout.chunks:
            raise ScheduleError(
                f"{self.name} places {layout.chunks} stage{'s'[: layout.chunks > 1]} on each rank, got chunks={shape.chunks}"
            )
        if shape.chunks % size:
            raise ScheduleError(f"{self.name} places {size} chunks per rank for each of its {unit}, got chunks={shape.chunks}")
        return shape

    def build(self, ranks: Any, microbatches: Any, chunks: Any = None, graph: StageGraph | None = None, **options: Any) -> Schedule:
        """The schedule for this shape, generated when read, rank by rank if the algorithm allows it."""
        from penstock.ir.schedule import Schedule

        shape = self.shape(ranks, microbatches, self._chunks(chunks, options))
        unknown = sorted(set(options) - set(self.options))
        if unknown:
            allowed = ", ".join([*self.options, *self.layout.counts]) or "none"
            raise ScheduleError(f"{self.name} has no option {unknown[0]!r}; its options: {allowed}")
        if self.check is not None:
            self.check(shape, **options)
        placement = self.layout.place(shape)
        built = shape
        if self.accepts is not None:
            accepted = _count(
                "microbatches, rounded up to what the algorithm takes,", self.accepts(shape, **options), codes.MAX_MICROBATCHES
            )
            built = Shape(shape.ranks, shape.chunks, accepted)
        generated = self._generated(built, options)

        def source(rank: int) -> Ints:
            return pack_row(generated(rank), placement.stages_of(rank), shape.microbatches, built.microbatches)

        def remake(count: int) -> Schedule:
            return self.build(shape.ranks, count, shape.chunks, graph, **options)

        return Schedule(placement, shape.microbatches, source, graph=graph, name=self.name, options=options, remake=remake)

    def _chunks(self, chunks: Any, options: dict[str, Any]) -> Any:
        """The requested chunks, by their number or in the layout's unit, which is removed from the options."""
        unit, size = self.layout.unit
        if unit not in options:
            return chunks
        wanted = size * _count(unit, options.pop(unit), codes.MAX_STAGES)
        if chunks not in (None, wanted):
            raise ScheduleError(f"{self.name} has {wanted} chunks for {unit}={wanted // size}, got chunks={chunks}: give one of the two")
        return wanted

    def _generated(self, shape: Shape, options: dict[str, Any]) -> Callable[[int], Iterable[int]]:
        """Each rank's row; a whole pipeline is generated once, when the first row is read."""
        if not self.whole:
            return lambda rank: cast("Iterable[int]", self.generate(shape, rank, **options))
        pipeline: list[Sequence[Iterable[int]]] = []  # a plain list, so that a schedule can go to another process

        def row(rank: int) -> Iterable[int]:
            if not pipeline:
                pipeline.append(self.generate(shape, **options))
            return pipeline[0][rank]

        return row


def pack_row(generated: Iterable[int], stages: tuple[int, ...], microbatches: int, built: int) -> Ints:
    """One rank's row: chunks become stages, and microbatches that were only built to make the count fit are dropped."""
    import numpy as np

    from penstock.ir.rows import Rows

    row = np.fromiter(generated, dtype=np.int64)
    stage = np.array(stages, dtype=np.int64)[codes.stage_of(row)]
    row = (row & ~codes.STAGE_FIELD) | codes.pack(stage, 0)
    if built > microbatches:
        whole = Rows.join([row])
        row = whole.keep(whole.microbatch < microbatches).codes
    return row


_ALGORITHMS: dict[str, Algorithm] = {}
_Generator = TypeVar("_Generator", bound=Generate)


def register(
    name: str,
    *,
    placement: Layout,
    accepts: Callable[..., int] | None = None,
    check: Callable[..., None] | None = None,
    whole: bool = False,
) -> Callable[[_Generator], _Generator]:
    """Make a generator known by name.

    `accepts(shape, **options)` is the next microbatch count that the algorithm can be built for; the actions of the
    microbatches beyond the wanted count are dropped. `check(shape, **options)` refuses shapes that cannot work. A `whole` generator
    builds all ranks together and takes no rank. The generator's docstring starts with a one-line summary and has a
    `Bubble:` and a `Memory:` line.
    """

    def add(generate: _Generator) -> _Generator:
        known = _ALGORITHMS.get(name)
        if known is not None and known.generate is not generate:
            raise ScheduleError(f"there is already a schedule {name!r}, from {known.generate.__module__}: choose another name")
        if not inspect.getdoc(generate):
            raise ScheduleError(f"schedule {name!r} needs a docstring that starts with a one-line summary")
        _ALGORITHMS[name] = Algorithm(name, generate, placement, accepts, check, whole)
        return generate

    return add


@cache
def _load_all() -> None:
    """Import every file of the zoo and every entry point once."""
    package = importlib.import_module("penstock.schedules")
    for module in pkgutil.iter_modules(package.__path__):
        if not module.name.startswith("_"):
            importlib.import_module(f"{package.__name__}.{module.name}")
    for point in entry_points(group=ENTRY_POINT_GROUP):
        try:
            point.load()
        except Exception as error:
            warnings.warn(f"schedules of entry point {point.name!r} ({point.value}) could not be loaded: {error!r}", stacklevel=2)


def algorithms() -> Mapping[str, Algorithm]:
    """Every registered schedule by name, sorted."""
    _load_all()
    return dict(sorted(_ALGORITHMS.items()))


def algorithm(name: str) -> Algorithm:
    """The schedule registered under this name."""
    known = algorithms()
    if name not in known:
        raise UnknownNameError(f"there is no schedule {name!r}: {nearest(name, known)}")
    return known[name]


def available() -> dict[str, str]:
    """Every schedule's name and one-line summary."""
    return {name: known.summary for name, known in algorithms().items()}


def schedule(
    name: str, ranks: int, microbatches: int, *, chunks: int | None = None, graph: StageGraph | None = None, **options: Any
) -> Schedule:
    """Build a schedule by name: `schedule("zbv", ranks=4, microbatches=8)`; further options by keyword."""
    return algorithm(name).build(ranks, microbatches, chunks, graph, **options)


def _count(name: str, value: Any, most: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise ScheduleError(f"{name} must be a whole number, got {value!r}") from None
    if isinstance(value, bool) or not 1 <= number <= most:
        raise ScheduleError(f"{name} must be from 1 to {most}, got {value!r}")
    return number
