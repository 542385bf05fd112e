"""Schedules by name: built-in ones, and those of other packages by entry point."""

from __future__ import annotations

import importlib
import inspect
import operator
import pkgutil
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, TypeVar, cast

from penstock.errors import ScheduleError, UnknownNameError, UsageError, nearest
from penstock.ir import codes
from penstock.ir.placement import Placement
from penstock.text.options import read_assignments, split_options

if TYPE_CHECKING:
    from penstock.ir.graph import StageGraph
    from penstock.ir.rows import Ints
    from penstock.ir.schedule import Schedule

ENTRY_POINT_GROUP = "penstock.schedules"


@dataclass(frozen=True)
class Shape:
    """The input of a generator: the number of ranks, of chunks per rank, of microbatches, and of slices per microbatch.

    A *unit* is a microbatch, or a slice of one if there are several: number microbatch x slices + slice. Generators that take slices
    yield units in place of microbatches.
    """

    ranks: int
    chunks: int
    microbatches: int
    slices: int = 1

    @property
    def units(self) -> int:
        return self.microbatches * self.slices

    def forwards(self, group: int | None = None) -> list[tuple[int, int]]:
        """The (chunk, unit) of each forward, if a `group` of microbatches at a time, by default all, passes the chunks one by one."""
        size = (group or self.microbatches) * self.slices
        groups = (range(first, first + size) for first in range(0, self.units, size))
        return [(chunk, unit) for members in groups for chunk in range(self.chunks) for unit in members]

    def backwards(self, group: int | None = None) -> list[tuple[int, int]]:
        """The (chunk, unit) of each backward: as the forwards, but the chunks in reverse, and the slices of each microbatch too."""
        return [(self.chunks - 1 - chunk, self.mirror(unit)) for chunk, unit in self.forwards(group)]

    def mirror(self, unit: int) -> int:
        """The unit that the backwards reach when the forwards reach this one: its microbatch's slices from the last to the first."""
        return unit + self.slices - 1 - 2 * (unit % self.slices)


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
LAYOUTS = {"linear": linear, "looped": looped, "v": v, "wave": wave, "bidirectional": bidirectional}

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
    slices: int | None = None
    """The default number of slices per microbatch; None if the order is not made for slices."""

    @property
    def is_sliced(self) -> bool:
        """Whether it cuts sequences into slices unless told otherwise."""
        return self.slices is not None and self.slices > 1

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
        own = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        return own if self.slices is None else {**own, "slices": self.slices}

    def shape(self, ranks: Any, microbatches: Any, chunks: Any, slices: Any = None) -> Shape:
        """The checked shape."""
        layout = self.layout
        if slices is not None and self.slices is None:
            able = ", ".join(name for name, known in algorithms().items() if known.slices is not None)
            raise ScheduleError(f"{self.name} has no option 'slices': its order is not made for them; schedules that take slices: {able}")
        shape = Shape(
            _count("ranks", ranks, codes.MAX_STAGES),
            _count("chunks", layout.chunks if chunks is None else chunks, codes.MAX_STAGES),
            _count("microbatches", microbatches, codes.MAX_MICROBATCHES),
            _count("slices", self.slices or 1 if slices is None else slices, codes.MAX_MICROBATCHES),
        )
        if shape.units > codes.MAX_MICROBATCHES:
            raise ScheduleError(
                f"{shape.microbatches} microbatches of {shape.slices} slices: at most {codes.MAX_MICROBATCHES} slices in all"
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

        shape = self.shape(ranks, microbatches, self.take_chunks(chunks, options), options.pop("slices", None))
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
            built = replace(shape, microbatches=accepted)
        generated = self._generated(built, options)

        sliced = {} if self.slices is None else {"slices": shape.slices}

        def source(rank: int) -> Ints:
            stages = tuple(stage for copy in placement.copies for stage, holder in enumerate(copy) if holder == rank)
            return pack_row(generated(rank), stages, shape.units, built.units)

        def remake(count: int) -> Schedule:
            return self.build(shape.ranks, count, shape.chunks, graph, **options, **sliced)

        return Schedule(
            placement,
            shape.microbatches,
            source,
            graph=graph,
            name=self.name,
            options=options | (sliced if shape.slices > 1 else {}),
            remake=remake,
            slices=shape.slices,
        )

    def take_chunks(self, chunks: Any, options: dict[str, Any]) -> Any:
        """The requested chunks, by their number or in the layout's unit, which is removed from the options."""
        unit, size = self.layout.unit
        if unit not in options:
            return chunks
        implied = size * _count(unit, options.pop(unit), codes.MAX_STAGES)
        if chunks not in (None, implied):
            raise ScheduleError(f"{self.name} has {implied} chunks for {unit}={implied // size}, got chunks={chunks}: give one of the two")
        return implied

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


def pack_row(generated: Iterable[int], stages: tuple[int, ...], units: int, built: int) -> Ints:
    """One rank's row: chunks become stages, and units that were only built to make the count fit are dropped."""
    import numpy as np

    from penstock.ir.rows import Rows

    row = np.fromiter(generated, dtype=np.int64)
    stage = np.array(stages, dtype=np.int64)[codes.stage_of(row)]
    row = (row & ~codes.STAGE_FIELD) | codes.pack(stage, 0)
    if built > units:
        whole = Rows.join([row])
        row = whole.keep(whole.microbatch < units).codes
    return row


_ALGORITHMS: dict[str, Algorithm] = {}
_Generator = TypeVar("_Generator", bound=Generate)


def register(
    name: str,
    *,
    placement: Layout | str,
    accepts: Callable[..., int] | None = None,
    check: Callable[..., None] | None = None,
    whole: bool = False,
    slices: int | None = None,
) -> Callable[[_Generator], _Generator]:
    """Make a generator known by name.

    `placement` is `linear`, `looped`, `v`, `wave` or `bidirectional`, or a `Layout` of your own.
    `accepts(shape, **options)` is the next microbatch count that the algorithm can be built for; the actions of the
    microbatches beyond the wanted count are dropped. `check(shape, **options)` refuses shapes that cannot work. A `whole` generator
    builds all ranks together and takes no rank. `slices` is the default number of slices per microbatch of a generator that yields units
    (see `Shape`); without it the schedule has no option `slices`. The generator's docstring starts with a one-line summary and has a
    `Bubble:` and a `Memory:` line.
    """

    def add(generate: _Generator) -> _Generator:
        known = _ALGORITHMS.get(name)
        if known is not None and known.generate is not generate:
            raise ScheduleError(f"there is already a schedule {name!r}, from {known.generate.__module__}: choose another name")
        if not inspect.getdoc(generate):
            raise ScheduleError(f"schedule {name!r} needs a docstring that starts with a one-line summary")
        layout = LAYOUTS.get(placement) if isinstance(placement, str) else placement
        if not isinstance(layout, Layout):
            raise ScheduleError(f"schedule {name!r} has no placement {placement!r}: {nearest(str(placement), LAYOUTS)}, or a Layout")
        _ALGORITHMS[name] = Algorithm(name, generate, layout, accepts, check, whole, slices)
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


class AlgorithmsByName(dict[str, Algorithm]):
    """Schedules by name. A name is also found in any case, with or without hyphens, and as a class name of PyTorch or torchtitan."""

    def find(self, name: object) -> str | None:
        """The registered name that is meant; None if there is none."""
        if not isinstance(name, str):
            return None
        if super().__contains__(name):
            return name
        folded = _fold(name)
        return next((known for known in self if _fold(known) == folded), None)

    def __contains__(self, name: object) -> bool:
        return self.find(name) is not None

    def get(self, name: object, default: Any = None) -> Any:
        known = self.find(name)
        return default if known is None else self[known]

    def __missing__(self, name: str) -> Algorithm:
        known = self.find(name)
        if known is None:
            raise UnknownNameError(f"there is no schedule {name!r}: {nearest(str(name), self)}")
        return self[known]


_PEER_NAMES = {"zbvzerobubble": "zbv", "interleavedzerobubble": "interleavedzb"}
"""PyTorch's and torchtitan's names that are more than another spelling of ours."""


CLASS_NAMES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""PyTorch's schedules as torchtitan names them, which is PyTorch's class name without `Schedule`."""


def _fold(name: str) -> str:
    """
    >>> _fold("ScheduleInterleaved1F1B"), _fold("interleaved-1f1b"), _fold("ZBVZeroBubble")
    ('interleaved1f1b', 'interleaved1f1b', 'zbv')
    """
    letters = "".join(filter(str.isalnum, name.lower())).removeprefix("schedule")
    return _PEER_NAMES.get(letters, letters)


def algorithms() -> AlgorithmsByName:
    """Every registered schedule by name, sorted."""
    _load_all()
    return AlgorithmsByName(sorted(_ALGORITHMS.items()))


def algorithm(name: str) -> Algorithm:
    """The schedule registered under this name, or under the name that it stands for: `1F1B`, `ZBVZeroBubble`."""
    return algorithms()[name]


def parse_name(text: str) -> tuple[Algorithm, dict[str, Any]]:
    """The schedule and the options of a name as reports print it: `interleaved-1f1b{chunks=4}`."""
    name, parts = split_options(str(text))
    entry = algorithm(name)
    try:
        options = read_assignments(str(text), parts, f"{entry.name}{{OPTION=VALUE,...}}")
    except UsageError as error:
        raise ScheduleError(str(error)) from None
    for key in ("ranks", "microbatches", "graph"):
        if key in options:
            raise ScheduleError(f"{text}: {key} is not an option of a schedule: leave it out of the braces and give {key}=")
    return entry, options


def available() -> dict[str, str]:
    """Every schedule's name and one-line summary."""
    return {name: known.summary for name, known in algorithms().items()}


def schedule(
    name: str, ranks: int, microbatches: int, *, chunks: int | None = None, graph: StageGraph | None = None, **options: Any
) -> Schedule:
    """Build a schedule by name: `schedule("zbv", ranks=4, microbatches=8)`; further options by keyword.

    A name is accepted in any case, as PyTorch's or torchtitan's (`schedule("ZBVZeroBubble", 4, 8).name` is `zbv`), and with options as
    reports print it: `interleaved-1f1b{chunks=4}`.
    """
    entry, written = parse_name(name)
    for key in written:
        if key in options or (key == "chunks" and chunks is not None):
            raise ScheduleError(f"{key} is given twice: in {name!r} and as an argument")
    return entry.build(ranks, microbatches, written.pop("chunks", chunks), graph, **written, **options)


def _count(name: str, value: Any, most: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise ScheduleError(f"{name} must be a whole number, got {value!r}") from None
    if isinstance(value, bool) or not 1 <= number <= most:
        raise ScheduleError(f"{name} must be from 1 to {most}, got {value!r}")
    return number
