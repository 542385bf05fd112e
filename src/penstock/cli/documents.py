"""What `studio` and `export` show: schedules by name, and files of any kind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.costs import Per, of_stages, read_costs
from penstock.errors import FileFormatError, UsageError

if TYPE_CHECKING:
    from penstock.cli.lower import Recipe
    from penstock.cli.source import Wanted

_SOURCES = typer.Argument(
    metavar="NAME|FILE",
    help="Schedules by name, with options like 'interleaved-1f1b{chunks=4}', .csv and .json files, saved timelines and plans.",
)
Sources = Annotated[list[str], _SOURCES]
AnySources = Annotated[list[str] | None, _SOURCES]
MemoryLimit = Annotated[
    str | None, typer.Option("--memory-limit", metavar="SIZE", help="The limit line of the memory: in activations, or like 40GiB.")
]
PerSource = Annotated[
    Per | None,
    typer.Option("--per", help="What one number in the costs is for.  [default: each stage; with several sources, all stages of a rank]"),
]


@dataclass(frozen=True)
class Shown:
    """How everything that is shown is timed."""

    costs: str | None
    per: Per
    recipe: Recipe | None
    limit: float | None

    @classmethod
    def read(cls, count: int, costs: str | None, per: Per | None, recipe: Recipe | None, memory_limit: str | None) -> Shown:
        from penstock.cli.plan import size

        return cls(costs, per or (Per.RANK if count > 1 else Per.STAGE), recipe, size("--memory-limit", memory_limit))

    def documents(self, wanted: list[Wanted]) -> list[Any]:
        return [self._of_file(each) if each.is_file else self._of_name(each) for each in wanted]

    def _of_name(self, wanted: Wanted) -> Any:
        from penstock.cli.source import MICROBATCHES, RANKS, parse_options
        from penstock.cli.timed import Timed
        from penstock.schedules.registry import algorithm
        from penstock.studio.document import document
        from penstock.studio.limits import check_shape, check_table

        named = algorithm(wanted.source)
        check_shape(named.shape(wanted.ranks or RANKS, wanted.microbatches or MICROBATCHES, wanted.chunks))
        timeline = Timed.read(wanted, self.costs, self.per, self.recipe).timeline()
        table = timeline.table
        check_table(table)
        source = {"kind": "schedule", "name": wanted.source, "ranks": table.ranks, "microbatches": table.microbatches}
        source |= {"chunks": table.chunks, "options": parse_options(wanted.options), "lower": table.lowered}
        source["fsdp"] = self.recipe is not None and self.recipe.fsdp
        return document(table, timeline.costs, source=source, memory_limit=self.limit, depends_on_costs="costs" in named.options)

    def _of_file(self, wanted: Wanted) -> Any:
        """A file as it is, whatever is wrong with the order in it."""
        from penstock.studio.answers import file_document

        wanted.refuse_shape()
        path = wanted.path()
        made = file_document(path.name, _text(path))
        limit = made["memory_limit"] if self.limit is None else self.limit
        return {**made, "memory_limit": limit, **({} if self.costs is None else {"costs": self._costs(made)})}

    def _costs(self, made: Any) -> Any:
        """The costs that were asked for, where they fit the file."""
        costs = read_costs(self.costs or "")
        costs = of_stages(costs, made["stages"], made["ranks"]) if self.per is Per.RANK else costs
        costs.check(made["stages"], made["microbatches"])
        return costs.to_json()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileFormatError(str(path), f"not a text file: {error}") from None


def shown(
    sources: list[str],
    how: Recipe | None,
    *,
    ranks: int | None,
    microbatches: int | None,
    costs: str | None,
    per: Per | None,
    memory_limit: str | None,
) -> list[Any]:
    """The documents of all sources."""
    from penstock.cli.compare import wanted_sources

    if not sources and (ranks or microbatches or costs or memory_limit):
        raise UsageError("name a schedule or a file that this is for, like 'zbv'")
    return Shown.read(len(sources), costs, per, how, memory_limit).documents(wanted_sources(sources, ranks, microbatches))
