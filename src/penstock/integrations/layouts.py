"""Layouts of Megatron-Core and torchtitan: a plan written in their form, and their form read as a plan.

Both packages run the stages of a pipeline that a user cut by hand. Megatron-Core takes a text, `Ettt|(tt|)*29,m|L`, with one letter per
layer and a bar between stages; torchtitan takes lists of module names. Both are a partition of the model's layers, so either of them,
with a profile of these layers, becomes a `Plan` that can be simulated, compared with other plans and proved. Neither package is needed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, pairwise, takewhile
from typing import Any

from penstock.errors import CostsError, FileFormatError, PlacementError, ScheduleError
from penstock.ir.formats.reading import parse_json
from penstock.ir.kind import Kind
from penstock.ir.schedule import Schedule
from penstock.planner.bounds.lower_bound import lower_bound
from penstock.planner.bounds.overall import OverallBound
from penstock.planner.candidate import Candidate
from penstock.planner.plan import Plan
from penstock.planner.problem import Problem
from penstock.planner.profile import Profile
from penstock.schedules.registry import schedule as build_schedule
from penstock.text.numbers import format_count

EMBEDDING, BLOCK, MTP, HEAD = "E", "t", "m", "L"
"""The kinds of layers, as Megatron writes them; MTP is multi-token prediction."""
MOST_LETTERS = 1_000_000
"""The longest layout that is unrolled."""

_WORDS = {
    EMBEDDING: r"(?!un)\w*embed\w*|wte|wpe",
    MTP: r"mtp\w*",
    HEAD: r"(?:lm_?)?head|\w*norm|ln_f|output(?:_layer)?|unembed\w*|logits|loss",
}
_WAY_OUT = "plan with schedules=['1f1b', 'interleaved-1f1b'] (penstock plan --schedules 1f1b,interleaved-1f1b)"


@dataclass(frozen=True)
class Export:
    """A plan in the form of another package."""

    text: str
    """The layout itself."""
    settings: dict[str, str]
    """The other arguments of that package that must agree with the layout."""
    notes: tuple[str, ...] = ()
    """Other settings that must agree, and differences between the package and the plan, one sentence each."""


# Kinds of layers ------------------------------------------------------------------------------------------------------


def find_kinds(profile: Profile) -> str:
    """Find the kind of each layer by its name: one letter per layer, the embedding first and the head last.

    >>> find_kinds(Profile.transformer(layers=3, hidden=64, heads=4, sequence=128, vocabulary=1000, flops=1e12))
    'EtttL'
    """
    names = [layer.name for layer in profile.layers]
    first = _count_leading(names, EMBEDDING)
    rest = names[first:][::-1]
    last = _count_leading(rest, HEAD)
    predicting = _count_leading(rest[last:], MTP)
    blocks = len(names) - first - predicting - last
    return EMBEDDING * first + BLOCK * blocks + MTP * predicting + HEAD * last


def _count_leading(names: Iterable[str], kind: str) -> int:
    """Count the layers at the beginning whose name has a word of this kind."""
    pattern = re.compile(_WORDS[kind], flags=re.IGNORECASE)
    return sum(1 for _ in takewhile(lambda name: any(map(pattern.fullmatch, re.split(r"[\s.+]+", name))), names))


def _check_kinds(profile: Profile, kinds: str | None) -> str:
    """The kinds that the user gives, like `E,t*61,m,L`, or those that the layers' names tell."""
    letters = find_kinds(profile) if kinds is None else _unroll(kinds, "kinds of layers")
    if len(letters) != len(profile):
        raise CostsError(f"{len(letters)} kinds of layers for a profile of {len(profile)} layers: give one letter per layer, like E,t*8,L")
    if not re.fullmatch("E*t*m*L*", letters) or BLOCK not in letters:
        raise CostsError(
            f"kinds of layers are embeddings (E), blocks (t), multi-token prediction (m) and head (L) in this order, got {letters}"
        )
    return letters


# From layers to names and back ----------------------------------------------------------------------------------------


def _join_parts(names: Sequence[Sequence[str]], plan: Plan) -> list[list[str]]:
    """The names in each stage, from the names of each layer; a layer without names belongs to the one before it."""
    parts = []
    for stage, (first, last) in enumerate(pairwise([0, *accumulate(plan.partition)])):
        if not names[first]:
            raise PlacementError(
                f"the plan cuts between layer {first - 1} ({plan.profile.layers[first - 1].name!r}) and layer {first} "
                f"({plan.profile.layers[first].name!r}), at the beginning of stage {stage}, but both belong to one module there: "
                "join them to one layer of the profile and plan again"
            )
        parts.append([name for layer in names[first:last] for name in layer])
    return parts


def _count_layers(names: Sequence[Sequence[str]], parts: Sequence[Sequence[str]], profile: Profile) -> tuple[int, ...]:
    """The layers in each part: the reverse of `_join_parts`, for parts that hold all names in order."""
    part_of = [part for part, layers in enumerate(parts) for _ in layers]
    counts, place, here = [0] * len(parts), 0, 0
    for layer, own in enumerate(names):
        spread = part_of[place : place + len(own)]
        place += len(own)
        if len(set(spread)) > 1:
            raise PlacementError(
                f"{own[0]!r} is in stage {spread[0]} and {own[-1]!r} in stage {spread[-1]}, but both are layer {layer} of the profile "
                f"({profile.layers[layer].name!r}): put them into one stage, or profile them apart"
            )
        here = spread[0] if spread else here
        counts[here] += 1
    if 0 in counts:
        raise PlacementError(f"stage {counts.index(0)} holds no layer of the profile: every stage of a plan needs at least one")
    return tuple(counts)


def _build_plan(
    profile: Profile, partition: tuple[int, ...], *, ranks: int, microbatches: int, group_size: int | None = None, note: str
) -> Plan:
    """The plan of layers that are cut by hand, on 1f1b, or on interleaved-1f1b if ranks hold several stages."""
    profile, chunks = profile.at(profile.microbatch), len(partition) // ranks
    name = "1f1b" if chunks == 1 else "interleaved-1f1b"
    options: dict[str, Any] = {} if group_size is None else {"group_size": group_size}
    schedule = build_schedule(name, ranks, microbatches, chunks=chunks if chunks > 1 else None, **options)
    recompute = (False,) * len(partition)
    problem = Problem.cut(profile, schedule.placement, microbatches, partition, recompute)
    bound = lower_bound(problem)
    return Plan(
        name=name,
        profile=profile,
        schedule=schedule,
        partition=partition,
        recompute=recompute,
        memory_limit=None,
        barrier=True,
        split=True,
        bounds=dict(bound.all),
        overall_bound=OverallBound(profile, microbatches, ranks, copies=2).value(),
        alternatives=(replace(Candidate.time(name, problem, schedule), bound=bound.value, timed=None),),
        in_bytes=profile.size_unit == "B",
        notes=(note,),
    )


def _count_chunks(stages: int, ranks: int, what: str) -> int:
    """Stages per rank."""
    if ranks < 1 or stages % ranks:
        raise PlacementError(
            f"{what} has {format_count(stages, 'stage')}, which cannot be shared evenly among {format_count(ranks, 'rank')}"
        )
    return stages // ranks


# Megatron-Core --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MegatronLayout:
    """The stages of Megatron's `--pipeline-model-parallel-layout`; stage s is on rank s mod the pipeline size.

    >>> layout = MegatronLayout.parse("Ettt|(tt|)*29,m|L")
    >>> len(layout.stages), layout.stages[0], str(layout)
    (32, 'Ettt', 'Ettt|(tt|)*29,m|L')
    """

    stages: tuple[str, ...]
    """The layers of each stage, one letter each."""

    @classmethod
    def parse(cls, text: str, source: str = "layout") -> MegatronLayout:
        """Read a layout; `source` names it in errors."""
        return cls(tuple(_unroll(text, source).split("|")))

    def __str__(self) -> str:
        """The layout with its repetitions written as such."""
        *inner, last = map(_shorten, self.stages)
        repeated = [_repeat(f"{stage}|", sum(1 for _ in run)) for stage, run in groupby(inner)]
        return _separate([*repeated, last])

    def count(self, kind: str) -> int:
        return sum(stage.count(kind) for stage in self.stages)

    def check(self, ranks: int) -> None:
        """Refuse a layout that Megatron refuses on so many ranks."""
        chunks = _count_chunks(len(self.stages), ranks, "the layout")
        letters = "".join(self.stages)
        if not re.fullmatch("Et*m*L", letters):
            raise PlacementError(
                f"a layout begins with its only E, ends with its only L, and has m only behind the last t; it reads {letters}"
            )
        predicting = [stage for stage, layers in enumerate(self.stages) if MTP in layers]
        if len(predicting) > 1:
            raise PlacementError(f"Megatron wants all m in one stage, and they are in stages {', '.join(map(str, predicting))}")
        if predicting and predicting[0] < (chunks - 1) * ranks:
            raise PlacementError(
                f"Megatron wants m in the last stage of its rank, and it is in stage {predicting[0]}: rank {predicting[0] % ranks} also "
                f"has stage {predicting[0] + ranks}"
            )


def _unroll(text: str, source: str) -> str:
    """Write out all repetitions of a layout."""
    return _LayoutReader(text, source).read()


@dataclass
class _LayoutReader:
    """Reads `x*n`, `(...)*n` and letters from left to right; commas mean nothing."""

    text: str
    source: str
    at: int = 0
    letters: list[tuple[int, str]] = field(init=False)

    def __post_init__(self) -> None:
        self.letters = [(place, letter) for place, letter in enumerate(self.text) if letter != ","]

    def read(self) -> str:
        unrolled = self._sequence(opened=None)
        if not unrolled:
            raise self._error("it is empty: write one letter per layer, E, t, m or L, and | between stages")
        return unrolled

    @property
    def _next(self) -> str:
        return self.letters[self.at][1] if self.at < len(self.letters) else ""

    def _sequence(self, opened: int | None) -> str:
        pieces, total = [], 0
        while self._next and not (self._next == ")" and opened is not None):
            piece = self._group(opened) if self._next == "(" else self._letter()
            piece *= self._times(len(piece))
            total += len(piece)
            if total > MOST_LETTERS:
                raise self._error(f"more than {MOST_LETTERS} letters when written out")
            pieces.append(piece)
        return "".join(pieces)

    def _letter(self) -> str:
        letter = self._next
        if letter == ")":
            raise self._error("')' closes no group")
        if letter == "*":
            raise self._error("'*' repeats nothing: it stands behind one letter, or behind a group in parentheses")
        if letter not in "EtmL|":
            raise self._error(f"{letter!r} is not one of E (embedding), t (block), m (multi-token prediction), L (loss) and | (next stage)")
        self.at += 1
        return letter

    def _group(self, opened: int | None) -> str:
        if opened is not None:
            raise self._error("a group within a group, which Megatron does not read")
        start = self.at
        self.at += 1
        inside = self._sequence(opened=start)
        if not self._next:
            raise self._error("this group is not closed", start)
        if not inside:
            raise self._error("this group is empty", start)
        self.at += 1
        if self._next != "*":
            raise self._error("a group needs a number of repetitions behind it, like (tt|)*4", start)
        return inside

    def _times(self, length: int) -> int:
        """How often the last letter or group is repeated."""
        if self._next != "*":
            return 1
        self.at += 1
        start = self.at
        while self._next and self._next in "0123456789":
            self.at += 1
        digits = "".join(letter for _, letter in self.letters[start : self.at])
        if not digits or not int(digits[:7]):
            raise self._error("'*' needs a whole number of at least 1 behind it", start)
        if len(digits) > 7 or int(digits) * length > MOST_LETTERS:
            raise self._error(f"more than {MOST_LETTERS} letters when written out", start)
        if self._next == "*":
            raise self._error("a second '*': give the product as one number")
        return int(digits)

    def _error(self, reason: str, at: int | None = None) -> FileFormatError:
        place = self.at if at is None else at
        character = self.letters[place][0] if place < len(self.letters) else len(self.text)
        return FileFormatError(self.source, f"character {character + 1} of {self.text!r}: {reason}")


def _shorten(stage: str) -> str:
    """A stage with more than three equal letters in a row written as a product."""
    runs = [(letter, sum(1 for _ in run)) for letter, run in groupby(stage)]
    return _separate([f"{letter}*{count}" if count > 3 else letter * count for letter, count in runs])


def _repeat(text: str, count: int) -> str:
    product = f"({text})*{count}"
    return product if len(product) < count * len(text) else text * count


def _separate(pieces: Sequence[str]) -> str:
    """Join pieces, with a comma between a number and a letter or parenthesis."""
    text = ""
    for piece in pieces:
        text += f",{piece}" if text[-1:].isdigit() and piece[:1] not in ("", "|") else piece
    return text


def _write_letters(kinds: str) -> list[list[str]]:
    """Megatron's letters of each layer: layers of the embedding have one E together, those of the head one L."""
    letters = [[letter] for letter in kinds]
    for place in range(1, len(kinds)):
        if kinds[place] == kinds[place - 1] and kinds[place] in (EMBEDDING, HEAD):
            letters[place] = []
    return _add_ends(letters, kinds, [EMBEDDING], [HEAD])


def _add_ends(names: list[list[str]], kinds: str, first: list[str], last: list[str]) -> list[list[str]]:
    """Give the names of an embedding and a head that the profile does not have to its first and last layer."""
    if EMBEDDING not in kinds:
        names[0] = [*first, *names[0]]
    if HEAD not in kinds:
        names[-1] = [*names[-1], *last]
    return names


def write_megatron(plan: Plan, kinds: str | None = None) -> Export:
    """Write a plan as Megatron's layout, with the arguments that go with it.

    `kinds` has one letter per layer of the plan's profile, like `E,t*61,m,L`, if the layers' names do not tell.
    """
    placement, ranks = plan.placement, plan.placement.ranks
    if (
        len(placement.copies) > 1
        or any(rank != stage % ranks for stage, rank in enumerate(placement.copies[0]))
        or placement.stages % ranks
    ):
        raise PlacementError(
            f"Megatron puts stage s on rank s mod {ranks}, and {plan.name} has a {placement.kind} placement, which no layout can express: "
            f"{_WAY_OUT}"
        )
    kinds = _check_kinds(plan.profile, kinds)
    layout = MegatronLayout(tuple(map("".join, _join_parts(_write_letters(kinds), plan))))
    layout.check(ranks)
    order, group_size = _find_megatron_order(plan.schedule)
    settings = {"--pipeline-model-parallel-size": str(ranks), "--num-layers": str(layout.count(BLOCK))}
    if layout.count(MTP):
        settings["--mtp-num-layers"] = str(layout.count(MTP))
    if group_size is not None:
        settings["--microbatch-group-size-per-virtual-pipeline-stage"] = str(group_size)
    settings["--micro-batch-size"] = str(plan.microbatch)
    batch = plan.microbatches * plan.microbatch
    notes = [
        f"--global-batch-size is {batch} times the number of data-parallel replicas: {format_count(plan.microbatches, 'microbatch')} each"
    ]
    if placement.chunks > 1:
        notes.append(
            f"virtual_pipeline_model_parallel_size is {placement.chunks}: Megatron takes it from the layout, so give no argument for it"
        )
    notes += [*_note_added_ends(kinds), *_note_order(plan, order)]
    if all(plan.recompute):
        most = max(layers.count(BLOCK) for layers in layout.stages)
        settings |= {"--recompute-granularity": "full", "--recompute-method": "uniform", "--recompute-num-layers": str(max(most, 1))}
    elif any(plan.recompute):
        stages = [str(stage) for stage, again in enumerate(plan.recompute) if again]
        notes.append(
            f"the plan recomputes only stages {', '.join(stages)}: Megatron recomputes all stages alike, so it holds more or takes longer"
        )
    return Export(str(layout), settings, tuple(notes))


def read_megatron(
    text: str,
    profile: Profile,
    *,
    ranks: int,
    microbatches: int,
    group_size: int | None = None,
    kinds: str | None = None,
    source: str = "layout",
) -> Plan:
    """Read Megatron's layout as a plan for a profile of the same layers, on 1f1b or interleaved-1f1b as Megatron runs it.

    `group_size` is `--microbatch-group-size-per-virtual-pipeline-stage`, by default the number of ranks. If it does not divide the
    microbatches, the order differs from Megatron's in places, and takes the same time on equal stages.
    """
    kinds, layout = _check_kinds(profile, kinds), MegatronLayout.parse(text, source)
    layout.check(ranks)
    for kind, name in ((BLOCK, "blocks (t)"), (MTP, "layers of multi-token prediction (m)")):
        if layout.count(kind) != kinds.count(kind):
            raise PlacementError(
                f"the layout has {layout.count(kind)} {name}, and the profile {kinds.count(kind)}: its layers are taken for "
                f"{_shorten(kinds)}; take the profile of the same model, or say which layer is which with kinds= (--kinds)"
            )
    partition = _count_layers(_write_letters(kinds), layout.stages, profile)
    if len(partition) > ranks:
        group_size = ranks if group_size is None else group_size
        _check_group(ranks, microbatches, group_size)
    elif group_size is not None:
        raise ScheduleError(f"group_size={group_size} is for layouts with several stages per rank, and this one has one")
    note = f"read from Megatron's layout {layout}"
    return _build_plan(profile, partition, ranks=ranks, microbatches=microbatches, group_size=group_size, note=note)


def _fits_group(ranks: int, microbatches: int, group_size: int) -> bool:
    """Whether Megatron takes this group size."""
    return ranks <= group_size <= microbatches and not 0 < microbatches % group_size < ranks


def _check_group(ranks: int, microbatches: int, group_size: int) -> None:
    if microbatches < ranks:
        raise ScheduleError(
            f"{format_count(microbatches, 'microbatch')} on {ranks} ranks: Megatron's interleaved schedule needs at least one per rank; "
            "take more, or one stage per rank"
        )
    if type(group_size) is not int or not _fits_group(ranks, microbatches, group_size):
        raise ScheduleError(
            f"{microbatches} microbatches in groups of {group_size!r}: Megatron takes groups of {ranks} to {microbatches} that leave none "
            f"or at least {ranks} for the last one; group_size={_find_group_size(ranks, microbatches)} would do"
        )


def _find_group_size(ranks: int, microbatches: int) -> int:
    """The least group size that Megatron takes."""
    return next(size for size in range(ranks, microbatches + 1) if _fits_group(ranks, microbatches, size))


def _find_megatron_order(schedule: Schedule) -> tuple[Schedule, int | None]:
    """The schedule that Megatron runs on this placement, and its group size; the plan's own group size if it has one."""
    ranks, microbatches = schedule.ranks, schedule.microbatches
    if schedule.chunks == 1:
        return build_schedule("1f1b", ranks, microbatches), None
    if microbatches < ranks:
        _check_group(ranks, microbatches, ranks)
    own = sum(1 for _ in takewhile(lambda action: (action.kind, action.stage) == (Kind.F, 0), schedule[0]))
    size = own if _fits_group(ranks, microbatches, own) else _find_group_size(ranks, microbatches)
    return build_schedule("interleaved-1f1b", ranks, microbatches, chunks=schedule.chunks, group_size=size), size


def _note_order(plan: Plan, order: Schedule) -> Iterable[str]:
    """Say what Megatron's order takes if it is not that of the plan."""
    if order == plan.schedule:
        return
    timeline, limits, units = plan.problem.evaluate(order), plan.problem.limits, plan.units
    times = f"{units.time(timeline.makespan)} instead of {units.time(plan.predicted.makespan)}"
    note = f"Megatron runs {order.name} on these stages, not {plan.name}: {times}"
    if not plan.problem.fits(timeline):
        rank = max(range(order.ranks), key=lambda rank: timeline.peak_memory[rank] - limits[rank])
        note += f", and rank {rank} holds {units.size(timeline.peak_memory[rank], up=True)}, over its limit of {units.size(limits[rank])}"
    yield f"{note}; for an order that Megatron has, {_WAY_OUT}"


def _note_added_ends(kinds: str) -> Iterable[str]:
    missing = [name for kind, name in ((EMBEDDING, "embedding"), (HEAD, "head")) if kind not in kinds]
    if missing:
        yield f"the profile has no {' and no '.join(missing)}: the first and the last stage get them, at no cost in the plan"


# torchtitan -----------------------------------------------------------------------------------------------------------

TORCH_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved-1f1b": "Interleaved1F1B",
    "looped-bfs": "LoopedBFS",
    "zbv": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}
"""Our schedules under torch's names; torch runs the same order."""
_SCHEDULE, _CSV = "--parallelism.pipeline_parallel_schedule", "--parallelism.pipeline_parallel_schedule_csv"


def _list_modules(kinds: str) -> list[list[str]]:
    """torchtitan's modules of each layer. A head of two layers is the last norm and the projection, one of one layer is both."""
    first, last = ["tok_embeddings"], ["norm", "lm_head"]
    if MTP in kinds:
        raise PlacementError("torchtitan has no multi-token prediction in a pipeline: plan the model without these layers")
    names: list[list[str]] = [[] for _ in kinds]
    blocks = [place for place, kind in enumerate(kinds) if kind == BLOCK]
    for number, place in enumerate(blocks):
        names[place] = [f"layers.{number}"]
    if EMBEDDING in kinds:
        names[0] = first
    heads = kinds.count(HEAD)
    if heads == 2:
        names[-2:] = [[name] for name in last]
    elif heads:
        names[-heads] = last
    return _add_ends(names, kinds, first, last)


def write_torchtitan(plan: Plan, kinds: str | None = None) -> Export:
    """Write a plan as torchtitan's `parallelism.module_fqns_per_model_part`, with the settings that go with it."""
    kinds, placement = _check_kinds(plan.profile, kinds), plan.placement
    if placement.kind not in ("linear", "looped", "v"):
        raise PlacementError(
            f"torchtitan puts stages in a loop or in a V, and {plan.name} has a {placement.kind} placement: plan with schedules= that "
            f"torchtitan has, such as {', '.join(TORCH_SCHEDULES)}"
        )
    parts = _join_parts(_list_modules(kinds), plan)
    settings = {"--parallelism.pipeline_parallel_degree": str(placement.ranks), **_name_torch_schedule(plan)}
    notes = list(_note_added_ends(kinds))
    if _CSV in settings:
        notes.append(f"torch has no schedule with this order: 'penstock convert PLAN {settings[_CSV]}' writes it for torchtitan to load")
    settings["--training.local_batch_size"] = str(plan.microbatches * plan.microbatch)
    settings["--parallelism.pipeline_parallel_microbatch_size"] = str(plan.microbatch)
    settings["--training.disable_cuda_graphs"] = ""
    lines = ",\n".join(f" {json.dumps(part)}" for part in parts)
    return Export(f"[\n{lines}\n]", settings, tuple(notes))


def _name_torch_schedule(plan: Plan) -> dict[str, str]:
    """Torch's name of the schedule, or a file and the name that tells torchtitan where the stages are."""
    name = plan.name.partition("{")[0]
    if name in TORCH_SCHEDULES and _is_default_order(plan.schedule, name):
        return {_SCHEDULE: TORCH_SCHEDULES[name]}
    styles = {"linear": "1F1B", "looped": "PipelineScheduleMulti", "v": "ZBVZeroBubble"}
    return {_SCHEDULE: styles[plan.placement.kind], _CSV: "schedule.csv"}


def _is_default_order(schedule: Schedule, name: str) -> bool:
    ranks, microbatches = schedule.ranks, schedule.microbatches
    if name == "interleaved-1f1b" and microbatches % max(1, microbatches // ranks):
        return False  # torch refuses this count
    chunks = schedule.chunks if schedule.placement.kind == "looped" else None
    return build_schedule(name, ranks, microbatches, chunks=chunks) == schedule


def read_torchtitan(
    text: str, profile: Profile, *, ranks: int, microbatches: int, kinds: str | None = None, source: str = "module names"
) -> Plan:
    """Read torchtitan's lists of module names, written as JSON, as a plan for a profile of the same layers."""
    parts = _parse_parts(text, source)
    chunks = _count_chunks(len(parts), ranks, "the list")
    names = _list_modules(_check_kinds(profile, kinds))
    expected = [name for own in names for name in own]
    listed = [(part, name) for part, names_in_part in enumerate(parts) for name in names_in_part]
    for place, (part, name) in enumerate(listed):
        if place >= len(expected) or name != expected[place]:
            due = repr(expected[place]) if place < len(expected) else "nothing"
            raise PlacementError(
                f"part {part} has {name!r} where {due} is due: the profile's {len(profile)} layers "
                f"are {expected[0]} to {expected[-1]} in order"
            )
    if len(listed) < len(expected):
        raise PlacementError(
            f"{expected[len(listed)]!r} is in no part: the profile's {len(profile)} layers are {expected[0]} to {expected[-1]}"
        )
    partition = _count_layers(names, parts, profile)
    note = f"read from torchtitan's module names of {format_count(len(parts), 'part')}, {format_count(chunks, 'part')} per rank"
    return _build_plan(profile, partition, ranks=ranks, microbatches=microbatches, note=note)


def _parse_parts(text: str, source: str) -> list[list[str]]:
    parts = parse_json(text, source, "JSON list of lists of module names")
    if (
        not isinstance(parts, list)
        or not parts
        or not all(isinstance(part, list) and all(isinstance(name, str) for name in part) for part in parts)
    ):
        raise FileFormatError(
            source, 'not a list of lists of module names, like [["tok_embeddings", "layers.0"], ["layers.1", "norm", "lm_head"]]'
        )
    return parts
