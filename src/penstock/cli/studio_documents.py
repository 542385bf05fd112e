"""What `studio` and `export` show: schedules by name, and files of any kind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.costs import Per, divide_among_stages, read_costs
from penstock.cli.options import read_size
from penstock.cli.schedule_source import MICROBATCHES, RANKS, ScheduleSource, parse_options, parse_sources
from penstock.cli.timeline_source import TimelineSource
from penstock.errors import FileFormatError, UsageError

if TYPE_CHECKING:
    from penstock.cli.lowering import LoweringOptions

_SOURCES = typer.Argument(
    metavar="NAME|FILE",
    help="Schedules by name, with options like 'interleaved-1f1b{chunks=4}', .csv and .json files, saved timelines and plans.",
)
Sources = Annotated[list[str], _SOURCES]
AnySources = Annotated[list[str] | None, _SOURCES]
MemoryLimit = Annotated[
    str | None, typer.Option("--memory-limit", metavar="SIZE", help="The memory limit to draw: in activations, or like 40GiB.")
]
PerSource = Annotated[
    Per | None,
    typer.Option(
        "--per", help="What one number in the costs is for.  [default: each stage; with several sources, all stages of a rank together]"
    ),
]


def make_documents(
    texts: list[str],
    lowering: LoweringOptions | None,
    *,
    ranks: int | None,
    microbatches: int | None,
    costs: str | None,
    per: Per | None,
    memory_limit: str | None,
) -> list[Any]:
    """Make the documents of all sources."""
    if not texts and (ranks or microbatches or costs or memory_limit):
        raise UsageError("name a schedule or a file that these options are for, like 'zbv'")
    limit = read_size("--memory-limit", memory_limit)
    view = _View(costs, per or (Per.RANK if len(texts) > 1 else Per.STAGE), lowering, limit)
    sources = parse_sources(texts, ranks, microbatches)
    return [view.file_document(source) if source.is_file else view.schedule_document(source) for source in sources]


@dataclass(frozen=True)
class _View:
    """How all sources are timed and drawn."""

    costs: str | None
    per: Per
    lowering: LoweringOptions | None
    limit: float | None

    def schedule_document(self, source: ScheduleSource) -> Any:
        from penstock.schedules.registry import algorithm
        from penstock.studio.document import document
        from penstock.studio.limits import check_shape, check_table

        named = algorithm(source.source)
        check_shape(named.shape(source.ranks or RANKS, source.microbatches or MICROBATCHES, source.chunks))
        timeline = TimelineSource.read(source, self.costs, self.per, self.lowering).timeline()
        table = timeline.table
        check_table(table)
        about = {"kind": "schedule", "name": source.source, "ranks": table.ranks, "microbatches": table.microbatches}
        about |= {"chunks": table.chunks, "options": parse_options(source.options), "lower": table.lowered}
        about["fsdp"] = self.lowering is not None and self.lowering.fsdp
        return document(table, timeline.costs, source=about, memory_limit=self.limit, depends_on_costs="costs" in named.options)

    def file_document(self, source: ScheduleSource) -> Any:
        """A file as it is, with its mistakes."""
        from penstock.studio.handlers import file_document

        source.refuse_shape()
        path = source.path()
        document = file_document(path.name, _read_text(path))
        limit = document["memory_limit"] if self.limit is None else self.limit
        return {**document, "memory_limit": limit, **({} if self.costs is None else {"costs": self._file_costs(document, self.costs)})}

    def _file_costs(self, document: Any, text: str) -> Any:
        """The costs from the command line, if they fit the file."""
        costs = read_costs(text)
        costs = divide_among_stages(costs, document["stages"], document["ranks"]) if self.per is Per.RANK else costs
        costs.check(document["stages"], document["microbatches"])
        return costs.to_json()


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileFormatError(str(path), f"not a text file: {error}") from None
