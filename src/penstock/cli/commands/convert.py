"""`penstock convert`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import STDOUT, check_file, check_writable, file_option, text_option
from penstock.cli.output import check_csv, describe_table, emit, to_json
from penstock.cli.sources import ScheduleSource, parse_options, read_json_object
from penstock.errors import FileFormatError, PlacementError, ScheduleError, UsageError
from penstock.text.numbers import format_percent

if TYPE_CHECKING:
    from penstock.integrations.layouts import Export
    from penstock.ir.table import Table
    from penstock.planner.plan import Plan


class Format(StrEnum):
    """A file format of schedules, programs and plans."""

    CSV = "csv"
    LOWERED_CSV = "lowered-csv"
    JSON = "json"
    DEEPSPEED = "deepspeed"
    MEGATRON = "megatron"
    TORCHTITAN = "torchtitan"


LAYOUTS = (Format.MEGATRON, Format.TORCHTITAN)
"""Formats that hold the stages of a plan, and no order of actions."""


def convert(
    source: ScheduleSource,
    target: Annotated[Path | None, typer.Argument(metavar="OUT", callback=check_writable, help="The file to write; - is stdout.")] = None,
    *,
    from_: Annotated[Format | None, typer.Option("--from", help="The format of the input.  [default: by suffix]")] = None,
    to: Annotated[Format | None, typer.Option("--to", help="The format of the output.  [default: by suffix]")] = None,
    profile: Annotated[
        Path | None, text_option("The model's layers, for a layout: a .json or .toml file (see 'penstock profile').", "FILE", "--profile")
    ] = None,
    kinds: Annotated[
        str | None,
        text_option(
            "The kind of each layer, if a layout needs it and the names in the profile do not tell: E embedding, t block, m multi-token "
            "prediction, L head, like E,t*61,m,L.",
            "LETTERS",
            "--kinds",
        ),
    ] = None,
    output: Annotated[Path | None, file_option("Another way to give OUT.", "-o", "--output", stdout=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a description of the file as JSON and nothing else.")] = False,
) -> None:
    """Convert between CSV, JSON and DeepSpeed streams, and layouts of Megatron and torchtitan.

    The CSV files are PyTorch's. csv holds only compute actions, so a program loses all others; lowered-csv holds the whole program, so
    a schedule is lowered first. By suffix, .csv and .json keep the input as it is, and .ds is deepspeed.

    megatron is the text of --pipeline-model-parallel-layout and torchtitan its module_fqns_per_model_part as JSON. Both are written
    from a plan, with the arguments that must agree. Read with --profile, -p and -m they become a plan: NAME|FILE is then the layout or
    a file with it, and -O group_size=N is Megatron's group size.

    \b
    Examples:
      penstock convert zbv.csv zbv.json
      penstock convert zbv.csv program.csv --to lowered-csv
      penstock convert 1f1b -p 4 -m 8 - --to deepspeed
      penstock convert plan.json layout.txt --to megatron
      penstock convert "Ettt|(tt|)*29,m|L" plan.json --from megatron --profile p.json -p 16 -m 64
    """
    from penstock.ir.formats.csv_form import write_whole

    path = _choose_target(target, output)
    if path == STDOUT and as_json:
        raise UsageError("--json describes the file on stdout, but OUT is stdout already: name a file")
    form = to or _choose_format(path)
    _check_layout_options(from_, form, profile, kinds)
    plan = _read_layout(source, from_, profile, kinds) if from_ in LAYOUTS else None
    if form in LAYOUTS:
        result = _convert_layout(plan or _load_plan(source, form), form, kinds, source.source)
    elif plan is not None and form is Format.JSON:
        result = _convert_plan(plan)
    else:
        result = _convert_table(_fit(_read(source, from_) if plan is None else plan.schedule, to), form, path)
    if path == STDOUT:
        emit([result.text])
        if result.arguments:
            typer.echo("\n".join(result.arguments), err=True)
        return
    write_whole(path, result.text)
    emit([to_json({"file": str(path), **result.data}) if as_json else "\n".join([f"{path}: {result.words}", *result.arguments]) + "\n"])


@dataclass(frozen=True)
class Conversion:
    """The text to write, and its description in words and as data."""

    text: str
    words: str
    data: dict[str, Any]
    arguments: tuple[str, ...] = ()
    """Lines with the arguments of another package that belong to the text."""


def _choose_target(target: Path | None, output: Path | None) -> Path:
    """OUT or -o FILE."""
    if (target is None) == (output is None):
        raise UsageError("give one file to write: OUT or -o FILE" + (", not both" if target else ""))
    return target or output or STDOUT


def _choose_format(path: Path) -> Format:
    known = {".csv": Format.CSV, ".json": Format.JSON, ".ds": Format.DEEPSPEED}
    form = known.get(path.suffix.lower())
    if form is None:
        where = "stdout has no suffix" if path == STDOUT else f"{path} ends in none of {', '.join(known)}"
        raise UsageError(f"{where}: give --to {'|'.join(Format)}")
    return form


def _read(source: ScheduleSource, form: Format | None) -> Table:
    """Read the input in this format, or by its suffix."""
    if form is None and Path(source.source).suffix.lower() != ".ds":
        return source.table()
    form = form or Format.DEEPSPEED
    from penstock.ir.formats.csv_form import read_csv
    from penstock.ir.formats.json_form import read_json
    from penstock.ir.formats.reading import read_text
    from penstock.passes.deepspeed.text import parse_streams, schedule_of

    source.refuse_shape()
    path = source.path()
    if form is Format.DEEPSPEED:
        return schedule_of(parse_streams(read_text(path, "DeepSpeed"), source.source), source.source)
    table = read_json(path) if form is Format.JSON else read_csv(path)
    if form is not Format.JSON and table.lowered != (form is Format.LOWERED_CSV):
        raise FileFormatError(source.source, f"the file holds a {'lowered program' if table.lowered else 'schedule'}, not {form}")
    return table


def _fit(table: Table, form: Format | None) -> Table:
    """Lower the table, or undo the lowering, if the format asks for it."""
    from penstock.ir.program import Program
    from penstock.passes.lower import lowering

    if form is Format.LOWERED_CSV and not table.lowered:
        return lowering().apply(table)
    if form is Format.CSV and isinstance(table, Program):
        return table.schedule()
    return table


def _write_text(table: Table, form: Format, path: Path) -> str:
    from penstock.ir.formats.csv_form import csv_text
    from penstock.passes.deepspeed.instructions import streams
    from penstock.passes.deepspeed.text import format_streams

    if form is Format.JSON:
        return to_json(table.to_json())
    if form is Format.DEEPSPEED:
        return format_streams(streams(table))
    check_csv(table, path)
    return csv_text(table)


def _convert_table(table: Table, form: Format, path: Path) -> Conversion:
    """Write a schedule or program."""
    written = Format.LOWERED_CSV if form is Format.CSV and table.lowered else form
    data = {"format": written.value, "type": type(table).__name__.lower(), "name": table.name, **_collect_shape(table)}
    return Conversion(_write_text(table, form, path), describe_table(table), data)


def _collect_shape(table: Table) -> dict[str, int]:
    shape = {"ranks": table.ranks, "stages": table.stages, "microbatches": table.microbatches}
    return shape | ({"slices": table.slices} if table.slices > 1 else {})


# Layouts --------------------------------------------------------------------------------------------------------------


def _check_layout_options(from_: Format | None, form: Format, profile: Path | None, kinds: str | None) -> None:
    """Refuse options that are missing or mean nothing before any work is done."""
    reads = from_ in LAYOUTS
    if reads and profile is None:
        raise UsageError(f"--from {from_} needs the model's layers: give --profile FILE")
    if not reads and profile is not None:
        raise UsageError("--profile goes with --from megatron or --from torchtitan: other inputs need no profile")
    if kinds is not None and not reads and form not in LAYOUTS:
        raise UsageError("--kinds goes with layouts: --from or --to megatron or torchtitan")


def _read_layout(source: ScheduleSource, form: Format | None, profile: Path | None, kinds: str | None) -> Plan:
    """Read a layout as a plan for the profile."""
    from penstock.integrations.layouts import read_megatron, read_torchtitan
    from penstock.planner.profile import Profile

    if source.ranks is None or source.microbatches is None:
        raise UsageError(f"--from {form} needs the shape of the pipeline: give -p and -m")
    if source.chunks is not None:
        raise UsageError("--chunks follows from the layout and -p: leave it out")
    options = parse_options(source.options)
    for name in options:
        if name != "group_size" or form is not Format.MEGATRON:
            raise UsageError(f"--option: a layout takes no {name}: only --from megatron has one option, group_size")
    text, name = _read_layout_text(source.source, form)
    assert profile is not None
    model = Profile.load(check_file(profile, "--profile: "))
    read = read_megatron if form is Format.MEGATRON else read_torchtitan
    return read(text, model, ranks=source.ranks, microbatches=source.microbatches, kinds=kinds, source=name, **options)


def _read_layout_text(source: str, form: Format | None) -> tuple[str, str]:
    """The text of a layout, and its name in errors: the source itself, or the file that it names."""
    from penstock.ir.formats.reading import read_text

    is_text = "|" in source if form is Format.MEGATRON else source.lstrip().startswith("[")
    if is_text:
        return source, "layout"
    if form is Format.MEGATRON and not Path(source).exists() and not set(source) & {".", "/", "\\"}:
        return source, "layout"  # a layout of one stage
    return read_text(check_file(Path(source)), f"{form} layout").strip(), source


def _load_plan(source: ScheduleSource, form: Format) -> Plan:
    from penstock.planner.plan import Plan

    data = read_json_object(Path(source.source))
    if data is None or data.get("type") != "plan":
        raise UsageError(
            f"--to {form} needs a plan, which says which layers a stage has, and {source.source} is not one: penstock plan -o plan.json"
        )
    source.refuse_shape()
    return Plan.load(source.source)


def _convert_plan(plan: Plan) -> Conversion:
    timeline = plan.predicted
    words = f"{describe_table(plan.schedule, 'plan')}; {plan.units.time(timeline.makespan)}, bubble {format_percent(timeline.bubble)}"
    data = {"format": Format.JSON.value, "type": "plan", "name": plan.name, **_collect_shape(plan.schedule)}
    return Conversion(to_json(plan.to_json()), words, {**data, "makespan": timeline.makespan, "bubble": timeline.bubble})


def _convert_layout(plan: Plan, form: Format, kinds: str | None, source: str) -> Conversion:
    from penstock.integrations.layouts import write_megatron, write_torchtitan

    try:
        export = (write_megatron if form is Format.MEGATRON else write_torchtitan)(plan, kinds)
    except (PlacementError, ScheduleError) as error:
        raise FileFormatError(source, str(error)) from None
    words = f"{form} layout of {describe_table(plan.schedule, 'plan')}"
    data: dict[str, Any] = {"format": form.value, "type": "layout", "name": plan.name, **_collect_shape(plan.schedule)}
    data |= {"layout": export.text, "arguments": export.settings, "notes": list(export.notes)}
    return Conversion(f"{export.text}\n", words, data, tuple(_write_arguments(export)))


def _write_arguments(export: Export) -> Iterator[str]:
    yield "arguments that must agree with it:"
    for name, value in export.settings.items():
        yield f"  {name} {value}".rstrip()
    for note in export.notes:
        yield f"note: {note}"
