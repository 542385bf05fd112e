"""Inputs of commands: a schedule by name or a file, how to lower it, its costs, saved timelines, and the user's own code."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import (
    ClusterFile,
    CostsText,
    Microbatches,
    Ranks,
    Source,
    check_file,
    complete_schedules,
    count_option,
    read_size,
    text_option,
)
from penstock.errors import CostsError, FileFormatError, PassError, ScheduleError, UsageError, nearest
from penstock.ir.formats.reading import read_json
from penstock.schedules.registry import algorithm, algorithms, schedule
from penstock.text.options import read_assignments, split_options
from penstock.text.units import SECONDS, Units, parse_size, seconds_per

if TYPE_CHECKING:
    from penstock.ir.action import Action
    from penstock.ir.cluster import Cluster
    from penstock.ir.costs import Costs
    from penstock.ir.placement import Placement
    from penstock.ir.program import Program
    from penstock.ir.table import Table
    from penstock.passes.offload import Offload
    from penstock.passes.pass_list import PassList
    from penstock.runtime.train.trainer import TrainingFile
    from penstock.simulator.timeline import Timeline


RANKS, MICROBATCHES = 4, 8
SUFFIXES = (".csv", ".json")
SHAPE = {
    "name": "it is the first argument",
    "ranks": "use -p",
    "microbatches": "use -m",
    "chunks": "use --chunks",
    "graph": "use a .json file",
}
"""The arguments of a schedule that are not its own options, and how to give them to a command."""
_COUNTS = {"ranks": "-p", "microbatches": "-m", "chunks": "--chunks"}
"""The counts that a name may have in braces, and their options."""


@dataclass(frozen=True)
class ScheduleSource:
    """NAME|FILE, and the shape and options that were given with it.

    A NAME may have them in braces: `interleaved-1f1b{chunks=4,ranks=2}` is the source `interleaved-1f1b` with chunks=4 and ranks=2.
    """

    source: Source
    ranks: Ranks = None
    microbatches: Microbatches = None
    chunks: Annotated[int | None, count_option("Stages per rank, for a NAME that lets you choose.", "--chunks")] = None
    options: Annotated[
        list[str] | None, text_option("An option of the schedule, such as group_size=8; may be repeated.", "KEY=VALUE", "-O", "--option")
    ] = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Options of the schedule that are not text."""

    def __post_init__(self) -> None:
        """Move what is written in braces to the other fields."""
        name, parts = split_options(self.source)
        if not parts:
            return
        written = [part for part in parts if part.partition("=")[0].strip() not in _COUNTS]
        for part in (part for part in parts if part not in written):
            key, _, value = map(str.strip, part.partition("="))
            if getattr(self, key) is not None:
                raise UsageError(f"{key} is given twice: in {self.source!r} and with {_COUNTS[key]}")
            try:
                object.__setattr__(self, key, int(value))
            except ValueError:
                raise UsageError(f"{self.source}: {key}={value} is not a whole number") from None
        parse_options([*written, *(self.options or ())])
        object.__setattr__(self, "source", name)
        object.__setattr__(self, "options", [*written, *(self.options or ())] or None)

    @property
    def is_file(self) -> bool:
        """Whether this is a file: by its suffix, or because it exists and no schedule has that name."""
        path = Path(self.source)
        return path.suffix.lower() in SUFFIXES or (self.source not in algorithms() and (path.exists() or len(path.parts) > 1))

    def table(self, *, strict: bool = True) -> Table:
        """Load or build the schedule or program."""
        return self._load(strict) if self.is_file else self._build()

    def _load(self, strict: bool) -> Table:
        from penstock.ir.formats.files import load

        self.refuse_shape()
        path = self.path()
        if path.suffix.lower() not in SUFFIXES:
            raise UsageError(f"{path} ends in none of {', '.join(SUFFIXES)}: 'penstock convert --from FORMAT' reads other names")
        return load(path, strict=strict)

    def path(self) -> Path:
        """Give the path of the file; refuse one that is not there."""
        return check_file(Path(self.source))

    def refuse_shape(self) -> None:
        """Refuse a shape or options for a file, which has its own."""
        options = {"--ranks": self.ranks, "--microbatches": self.microbatches, "--chunks": self.chunks, "--option": self.options}
        for option, value in options.items():
            if value:
                raise UsageError(f"{option} is for schedules by name; {self.source} is a file and has its own shape")

    def _build(self) -> Table:
        microbatches = MICROBATCHES if self.microbatches is None else self.microbatches
        options = {**self.extra, **parse_options(self.options)}
        if self.ranks is not None:
            return schedule(self.source, self.ranks, microbatches, chunks=self.chunks, **options)
        try:
            return schedule(self.source, RANKS, microbatches, chunks=self.chunks, **options)
        except ScheduleError as error:
            try:  # schedules without a pipeline, like data-parallel, have one rank
                return schedule(self.source, 1, microbatches, chunks=self.chunks, **options)
            except ScheduleError:
                raise error from None


def parse_sources(texts: list[str], ranks: int | None, microbatches: int | None) -> list[ScheduleSource]:
    """Read several sources, each with its own options; the shape is for the names among them that have none of their own."""
    sources = [ScheduleSource(text) for text in texts]
    if (ranks or microbatches) and all(source.is_file for source in sources):
        raise UsageError("--ranks and --microbatches are for schedules by name; files have their own shape")
    return [
        source if source.is_file else replace(source, ranks=source.ranks or ranks, microbatches=source.microbatches or microbatches)
        for source in sources
    ]


def parse_options(texts: list[str] | None) -> dict[str, Any]:
    """Read the options of a schedule, like `["group_size=8"]`, as keywords."""
    options = read_assignments("--option", texts or (), "KEY=VALUE, like -O group_size=8")
    for key in filter(SHAPE.__contains__, options):
        raise UsageError(f"{key} is part of the shape of a schedule, not one of its options: {SHAPE[key]}")
    return options


def read_json_object(path: Path) -> dict[str, Any] | None:
    """Read a .json file that holds an object; None for any other file, whose mistakes are reported when it is loaded."""
    if path.suffix.lower() != ".json" or not path.is_file():
        return None
    try:
        data = read_json(path)
    except FileFormatError:
        return None
    return data if isinstance(data, dict) else None


_FILES = (".toml", ".json")
# The costs that grow with a stage: its work and its memory. The size of messages does not depend on the partition.
_HELD = ("activation", "weight_stash", "kept", "kept_gradients")
_PER_STAGE = ("f", "i", "w", "b", *_HELD, "parameters", "shard", "unshard", "reduce", "optimizer")
_MEMORY_IN_BYTES = re.compile(r"\b(?:activation|weight_stash|kept|kept_gradients|logits|parameters|shard)\s*=[\s\[]*[\d.]+\s*[KMGTP]?i?B\b")
_PER_SLICE = ("f", "i", "w", "b", *_HELD, "output", "s", "t", "broadcast", "combine", "logits")


class Per(StrEnum):
    """The unit of one number in the costs."""

    STAGE = "stage"
    RANK = "rank"


PerOption = Annotated[
    Per,
    typer.Option(
        "--per", help="What one number in the costs is for: each stage, or all stages of a rank and all slices of a microbatch together."
    ),
]


def read_costs(text: str) -> Costs:
    """Read costs from a file, or from text like `f=1,latency=0.1,activation=[1,2]`."""
    from penstock.ir.costs import Costs

    path = Path(text)
    if path.suffix.lower() in _FILES or (text and "=" not in text and path.exists()):
        return Costs.load(check_file(path, "--costs: "))
    try:
        return Costs.from_json(_parse(text))
    except CostsError as error:
        raise UsageError(f"--costs: {error}") from None


def read_cluster(path: Path | None) -> Cluster | None:
    """Read the file of `--cluster`."""
    from penstock.ir.cluster import Cluster

    return None if path is None else Cluster.load(check_file(path, "--cluster: "))


def refuse_links(costs: Costs | None) -> None:
    """Refuse costs of messages if a cluster gives the links."""
    own = [] if costs is None else [name for name in ("latency", "bandwidth", "contention", "lanes") if name in costs.to_json()]
    if own:
        raise UsageError(f"--costs: leave out {' and '.join(own)}, because --cluster has the links of each pair of devices")


def refuse_unused(costs: Costs, table: Table) -> None:
    """Refuse a time of full backwards for a schedule that splits all of them, if its halves have no time either."""
    unused = costs.list_unused(table)
    if "b" in unused and table.training and not {"i", "w"} & costs.to_json().keys():
        raise UsageError(
            f"--costs: b is the time of a full backward, and {table.name or 'the schedule'} runs none: "
            "give i and w, the times of its two halves, or choose a schedule with full backwards"
        )


def divide_among_stages(costs: Costs, stages: int, ranks: int, slices: int = 1) -> Costs:
    """Turn the costs of all stages of a rank into the costs of one: divide each number that grows with a stage.

    Numbers that grow with a microbatch are divided among its slices as well. Lists have one value per stage already, and stay as they are.
    """
    share = ranks / stages
    values = {name: getattr(costs, name) for name in dict.fromkeys((*_PER_STAGE, *_PER_SLICE))}
    divided: dict[str, Any] = {
        name: value * (share if name in _PER_STAGE else 1.0) / (slices if name in _PER_SLICE else 1)
        for name, value in values.items()
        if isinstance(value, float)
    }
    return replace(costs, **divided)


def _parse(text: str) -> dict[str, Any]:
    parts = re.split(r",(?=[^\[\]]*(?:=|$))", text)
    costs = read_assignments("--costs", parts, '"f=1,i=1,w=1,latency=0.1", or name a .toml or .json file')
    return {name: _parse_size(value) if isinstance(value, str) else value for name, value in costs.items()}


def _parse_size(text: str) -> Any:
    """Read a size like 1.5GiB; any other word stays as it is."""
    try:
        return parse_size(text)
    except CostsError:
        return text


FEW = 100_000
"""Fewer actions than this are timed sooner than numba is loaded."""


@dataclass(frozen=True)
class TimelineSource:
    """One source, and how to time it."""

    source: ScheduleSource
    costs: Costs | None
    """None is the costs of a saved timeline, or else the default."""
    per: Per
    lowering: LoweringOptions | None
    """How to lower a schedule first; None is not at all."""
    in_bytes: bool = False
    """Whether the costs give memory in bytes."""
    cluster: Cluster | None = None
    """The devices of the ranks, and their links."""

    @classmethod
    def read(
        cls,
        source: ScheduleSource,
        costs: str | None,
        per: Per,
        lowering: LoweringOptions | None,
        cluster: Cluster | None = None,
        *,
        unit: str | None = None,
    ) -> TimelineSource:
        """Read the costs; a schedule by name has as many ranks as the cluster has devices, unless it says otherwise.

        `unit` is that of the costs' times, if it is given.
        """
        if cluster is not None and unit is not None and cluster.time_unit not in ("", unit):
            raise UsageError(
                f"--unit {unit}: the times of --cluster are in {cluster.time_unit}: give --costs in that unit, and leave out --unit"
            )
        in_bytes = costs is not None and _MEMORY_IN_BYTES.search(costs) is not None
        times = None if costs is None else read_costs(costs)
        if cluster is not None:
            refuse_links(times)
            source = source if source.is_file else replace(source, ranks=source.ranks or len(cluster))
        return cls(source, times, per, lowering, in_bytes, cluster)

    def get_measured(self) -> Timeline | None:
        """Give the timeline in the file if it was measured."""
        return None if self._saved is None or self._saved.source == "simulated" else self._saved

    def timeline(self, unit: str | None = None) -> Timeline:
        """Give the saved timeline, or simulate one; in `unit`, or in its own."""
        timeline = self._time()
        known = timeline.units.time_unit
        if unit is None or unit == known:
            return timeline
        if known in SECONDS:
            timeline = timeline.scaled(seconds_per(known) / seconds_per(unit))
        return timeline.in_units(replace(timeline.units, time_unit=unit))

    def _time(self) -> Timeline:
        saved = self._saved
        if saved is not None and self.costs is None and self.cluster is not None:
            raise UsageError(f"{self.source.source} has the costs of its own devices: give --costs to time it on those of --cluster")
        if saved is not None and self.costs is None and self.lowering is None:
            return saved
        table = self._table() if saved is None else saved.table
        if self.lowering is not None and not table.lowered:
            table = self.lowering.lower(table)
        return self._simulate(table)

    @cached_property
    def _saved(self) -> Timeline | None:
        """The timeline in the file, or the prediction of the plan in it."""
        data = read_json_object(Path(self.source.source))
        if data is None or data.get("type") not in ("timeline", "plan", "job-plan"):
            return None
        self.source.refuse_shape()
        if data["type"] == "plan":
            from penstock.planner.plan_file import decode as decode_plan

            return decode_plan(data, self.source.source).predicted
        if data["type"] == "job-plan":
            from penstock.planner.job.plan_file import decode as decode_job_plan

            return decode_job_plan(data, self.source.source).predicted
        from penstock.simulator.timeline_json import decode

        return decode(data, self.source.source)

    def _table(self) -> Table:
        """The schedule or program; a schedule that depends on costs gets them."""
        source = self.source
        named = None if source.is_file else algorithms().get(source.source)
        if named is None or (self.costs is None and self.cluster is None) or "costs" not in named.options:
            return source.table()
        placement = named.layout.place(named.shape(source.ranks or RANKS, 1, source.chunks))
        return replace(source, extra={"costs": self._stage_costs(placement)}).table()

    def _stage_costs(self, placement: Placement, slices: int = 1, microbatches: int | None = None) -> Costs:
        from penstock.ir.costs import Costs

        costs = self.costs or Costs()
        if self.per is Per.RANK:
            costs = divide_among_stages(costs, placement.stages, placement.ranks, slices)
        if self.cluster is None:
            return costs
        try:
            return self.cluster.apply(costs, placement, microbatches)
        except CostsError as error:  # of several sources, the one that does not suit the cluster
            raise CostsError(f"{self.source.source}: {error}") from None

    def _choose_units(self, units: Units) -> Units:
        """The units of a timeline: those of the cluster, if it has any, and bytes if the costs are in bytes."""
        if self.cluster is None:
            return replace(units, in_bytes=units.in_bytes or self.in_bytes)
        return Units(self.cluster.time_unit or units.time_unit, units.in_bytes or self.in_bytes or self.cluster.size_unit == "B")

    def _simulate(self, table: Table) -> Timeline:
        from penstock.simulator.simulate import simulate

        if self.costs is not None:
            refuse_unused(self.costs, table)
        engine = "plain" if len(table.rows.codes) < FEW else "auto"
        try:
            timeline = simulate(table, self._stage_costs(table.placement, table.slices, table.microbatches), engine=engine)
            units = self._choose_units(timeline.units)
            return timeline if units == timeline.units else timeline.in_units(units)
        except ScheduleError as error:
            if self.source.is_file:
                raise FileFormatError(self.source.source, str(error)) from None
            raise


_SOURCES = typer.Argument(
    metavar="NAME|FILE",
    autocompletion=complete_schedules,
    help="Schedules by name, with options like 'interleaved-1f1b{chunks=4}', .csv and .json files, saved timelines and plans.",
)
Sources = Annotated[list[str], _SOURCES]
AnySources = Annotated[list[str] | None, _SOURCES]


@dataclass(frozen=True)
class DocumentOptions:
    """The options of commands that show documents."""

    ranks: Ranks = None
    microbatches: Microbatches = None
    costs: CostsText = None
    per: Annotated[
        Per | None,
        typer.Option(
            "--per",
            help="What one number in the costs is for.  [default: each stage; with several sources, all stages of a rank together]",
        ),
    ] = None
    memory_limit: Annotated[
        str | None,
        text_option("The memory limit to draw: in activations, or like 40GiB.  [default: that of the cluster]", "SIZE", "--memory-limit"),
    ] = None
    cluster: ClusterFile = None

    def documents(self, texts: list[str], lowering: LoweringOptions | None) -> list[Any]:
        """Make the documents of all sources."""
        if not texts and (self.ranks or self.microbatches or self.costs or self.memory_limit or self.cluster):
            raise UsageError("name a schedule or a file that these options are for, like 'zbv'")
        limit = read_size("--memory-limit", self.memory_limit)
        per = self.per or (Per.RANK if len(texts) > 1 else Per.STAGE)
        view = _View(self.costs, per, lowering, limit, read_cluster(self.cluster))
        sources = parse_sources(texts, self.ranks, self.microbatches)
        return [view.file_document(source) if source.is_file else view.schedule_document(source) for source in sources]


@dataclass(frozen=True)
class _View:
    """How all sources are timed and drawn."""

    costs: str | None
    per: Per
    lowering: LoweringOptions | None
    limit: float | None
    cluster: Cluster | None

    def schedule_document(self, source: ScheduleSource) -> Any:
        from penstock.studio.document import document
        from penstock.studio.limits import check_shape, check_table

        named = algorithm(source.source)
        slices = parse_options(source.options).get("slices")
        timed = TimelineSource.read(source, self.costs, self.per, self.lowering, self.cluster)
        check_shape(named.shape(timed.source.ranks or RANKS, source.microbatches or MICROBATCHES, source.chunks, slices))
        timeline = timed.timeline()
        table = timeline.table
        check_table(table)
        about = {"kind": "schedule", "name": named.name, "ranks": table.ranks, "microbatches": table.microbatches}
        about |= {"chunks": table.chunks, "options": parse_options(source.options), "lower": table.lowered}
        about["fsdp"] = self.lowering is not None and self.lowering.fsdp
        about["offload"] = "" if self.lowering is None else self.lowering.offload or ""
        options: dict[str, Any] = {"memory_limit": self.limit, "depends_on_costs": "costs" in named.options}
        if self.cluster is not None:
            limit = self.cluster.memory_limit if self.limit is None else self.limit
            options |= {"memory_limit": limit, "units": (self.cluster.time_unit, self.cluster.size_unit), "devices": self.cluster.devices}
            options["cluster"] = self.cluster
        return document(table, timeline.costs, source=about, **options)

    def file_document(self, source: ScheduleSource) -> Any:
        """A file as it is, with its mistakes."""
        from penstock.ir.formats.reading import read_text
        from penstock.studio.handlers import file_document

        source.refuse_shape()
        path = source.path()
        if self.cluster is not None:
            raise UsageError(f"--cluster is for schedules by name, and {path} is a file; the plan of 'penstock plan --cluster' has its own")
        document = file_document(path.name, read_text(path, "text"))
        limit = document["memory_limit"] if self.limit is None else self.limit
        return {**document, "memory_limit": limit, **({} if self.costs is None else {"costs": self._file_costs(document, self.costs)})}

    def _file_costs(self, document: Any, text: str) -> Any:
        """The costs from the command line, if they fit the file."""
        costs = read_costs(text)
        shape = document["stages"], document["ranks"], document["slices"]
        costs = divide_among_stages(costs, *shape) if self.per is Per.RANK else costs
        costs.check(document["stages"], document["microbatches"] * document["slices"], document["ranks"])
        return costs.to_json()


# How a command lowers a schedule: the passes in full, or the default passes with the options that change them ---------


MaxOutstandingSends = Annotated[
    int | None, count_option("Let no rank have more than N sends under way: it waits for the oldest first.", "--max-outstanding-sends")
]
DeferReduceGradWait = Annotated[
    bool,
    typer.Option("--defer-reduce-grad-wait", help="Wait for each gradient reduction only before the rank's next one, or at the end."),
]
OffloadShare = Annotated[
    str | None,
    text_option(
        "Move this percentage of each rank's activations to host memory until their backward; 50+100+0 for one per rank.",
        "PERCENT",
        "--offload",
    ),
]


@dataclass(frozen=True)
class LoweringOptions:
    """The options that change the default passes, and `passes`, which replaces them."""

    fsdp: Annotated[bool, typer.Option("--fsdp", help="Also gather and free sharded parameters.")] = False
    merge_backward: Annotated[bool, typer.Option("--merge-backward", help="Merge each I with its own W into B if they are neighbours.")] = (
        False
    )
    receive: Annotated[
        str | None,
        text_option(
            "Where to place receives: paired (with their sends), just-in-time, or N compute actions ahead.  [default: paired]",
            "WHERE",
            "--receive",
        ),
    ] = None
    offload: OffloadShare = None
    passes: str | None = None
    waits: bool = False
    max_outstanding_sends: int | None = None
    defer_reduce_grad_wait: bool = False

    def check(self) -> None:
        """Refuse options that cannot be read before any work is done."""
        if self.passes is not None and self != LoweringOptions(passes=self.passes):
            raise UsageError(
                "--passes lists all passes that run: leave out --fsdp, --merge-backward, --receive, --offload and the options for waits"
            )
        if self.max_outstanding_sends is not None and self.max_outstanding_sends < 1:
            raise UsageError(f"--max-outstanding-sends: a rank must be able to send, so give 1 or more, got {self.max_outstanding_sends}")
        try:
            option = "--offload"
            self._offload  # noqa: B018 - refuses a share that cannot be read
            option = "--receive" if self.passes is None else "--passes"
            self._pass_list()
        except PassError as error:
            raise UsageError(f"{option}: {error}") from None

    def lower(self, table: Table) -> Program:
        return self._pass_list().apply(table)

    def lower_rank(self, table: Table, rank: int) -> tuple[Action, ...]:
        """Give the actions of one rank, without lowering the other ranks if that is possible."""
        from penstock.ir.schedule import Schedule
        from penstock.passes.lower import lower_rank

        if isinstance(table, Schedule) and self == LoweringOptions(self.fsdp, self.merge_backward, self.receive):
            return lower_rank(table, rank, fsdp=self.fsdp, merge_backward=self.merge_backward, receive=self._receive)
        return self.lower(table)[rank]

    @property
    def _receive(self) -> str | int:
        place = "paired" if self.receive is None else self.receive
        return int(place) if place.isdecimal() else place

    @property
    def _offload(self) -> Offload | None:
        from penstock.passes.offload import Offload

        return None if self.offload is None else Offload.from_options({"share": self.offload})

    def _pass_list(self) -> PassList:
        from penstock.passes.lower import lowering
        from penstock.passes.pass_list import PassList

        if self.passes is not None:
            return PassList.parse(self.passes)
        return lowering(
            fsdp=self.fsdp,
            merge_backward=self.merge_backward,
            offload=self._offload,
            receive=self._receive,
            waits=self.waits,
            max_outstanding_sends=self.max_outstanding_sends,
            defer_reduce_grad_wait=self.defer_reduce_grad_wait,
        )


@dataclass(frozen=True)
class OptionalLowering(LoweringOptions):
    """The options of commands that lower on request."""

    lower_first: Annotated[bool, typer.Option("--lower", help="Lower schedules first, so that message slots and reductions count too.")] = (
        False
    )

    def read_lowering(self) -> LoweringOptions | None:
        """Give the options if they ask for lowering, else None."""
        if not (self.lower_first or self.fsdp or self.merge_backward or self.receive is not None or self.offload is not None):
            return None
        self.check()
        return self


def load_function(source: str) -> Callable[[], Any]:
    """Load the function that `FILE.py:FUNCTION` or `MODULE:FUNCTION` names."""
    place, colon, name = source.rpartition(":")
    if not colon or not name.isidentifier() or not _is_place(place):
        raise UsageError(f"{source!r} is not FILE.py:FUNCTION, like examples/gpt.py:build, nor MODULE:FUNCTION")
    module = load_module(place)
    known = [other for other, value in vars(module).items() if callable(value) and not other.startswith("_")]
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"{place} has no function {name!r}: {nearest(name, known)}")
    return function  # type: ignore[no-any-return]


def load_script(source: str, folder: str = ".") -> TrainingFile:
    """Load the training file that `FILE.py` or `MODULE` names; after a colon comes the function that builds its model.

    Names are relative to `folder`, the one that the command ran in: ranks may run in another.
    """
    from penstock.runtime.train.trainer import TrainingFile

    place, colon, name = source.rpartition(":")
    if not colon:
        place, name = source, "build"
    if not name.isidentifier() or not _is_place(place):
        raise UsageError(f"{source!r} is not a training file: name FILE.py, FILE.py:FUNCTION or MODULE:FUNCTION")
    return TrainingFile.of(place, vars(load_module(place, folder)), name)


def load_module(place: str, folder: str = ".") -> ModuleType:
    """Run a file, or import a module."""
    path = Path(folder, place)
    if path.is_dir():
        raise UsageError(f"{place} is a folder, not a file")
    if path.suffix == ".py" and not path.is_file():
        raise UsageError(f"there is no file {place}")
    try:
        return _run(path) if path.suffix == ".py" else _import(place, folder)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{place} could not be run: {type(error).__name__}: {error}") from error


def _is_place(place: str) -> bool:
    return Path(place).suffix == ".py" or Path(place).is_dir() or all(part.isidentifier() for part in place.split("."))


def _import(name: str, folder: str) -> ModuleType:
    """Import a module by name, looking into the folder of the command first."""
    with _add_to_path(os.path.abspath(folder)):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # the module exists, and one of its own imports is missing
            raise UsageError(f"there is no module {name}: name a file with its suffix, {name}.py") from None


def _run(path: Path) -> ModuleType:
    """Run a file as a module; it can import the files beside it."""
    spec = importlib.util.spec_from_file_location(f"__penstock_{path.stem}__", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses look up their module there
    with _add_to_path(str(path.parent.resolve())):
        spec.loader.exec_module(module)
    return module


@contextmanager
def _add_to_path(folder: str) -> Iterator[None]:
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
