"""`penstock verify`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import AsJson, Chunks, Microbatches, Options, Output, Ranks, Source
from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.draw.terminal.lines import Line
    from penstock.errors import VerifyError
    from penstock.ir.table import Table
    from penstock.verifier.proof import Proof


class Semantics(StrEnum):
    """What a send and a receive wait for."""

    CHANNELS = "channels"
    RENDEZVOUS = "rendezvous"
    BOTH = "both"


def verify(
    source: Source,
    *,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    chunks: Chunks = None,
    option: Options = None,
    semantics: Annotated[
        Semantics,
        typer.Option(
            "--semantics",
            help="How messages wait: channels (a send returns at once), rendezvous (one NCCL communicator: both ends meet), or both.",
        ),
    ] = Semantics.CHANNELS,
    memory_limit: Annotated[
        str | None,
        typer.Option("--memory-limit", metavar="SIZE", help="The most that a rank may hold: in activations of a stage, or like 40GiB."),
    ] = None,
    activation: Annotated[
        str | None,
        typer.Option("--activation", metavar="SIZE", help="What a stage holds of a microbatch from F to I or B.  [default: 1]"),
    ] = None,
    weight_stash: Annotated[
        str | None,
        typer.Option("--weight-stash", metavar="SIZE", help="What a stage holds of a microbatch from I to W.  [default: 0]"),
    ] = None,
    as_json: AsJson = False,
    output: Output = None,
) -> int:
    """Prove that a program runs, or say why not.

    Proved is that it can neither hang, drop work nor overflow memory. If it can, every reason is printed and the exit code is 1.

    A NAME is lowered first; a FILE is taken as it is, with whatever is missing from it.

    \b
    Examples:
      penstock verify zbv -p 4 -m 8
      penstock verify program.csv --semantics both
      penstock verify zb-h2 -p 8 -m 32 --memory-limit 15
      penstock verify zbv -p 8 -m 32 --memory-limit 40GiB --activation 1.5GiB --weight-stash 800MiB
    """
    from penstock.cli.output import deliver
    from penstock.cli.source import Wanted
    from penstock.passes.lower import lowering

    memory = _Memory(memory_limit, activation, weight_stash)
    memory.check()
    wanted = Wanted(source, ranks, microbatches, chunks, option)
    table = wanted.table(strict=False)
    if not wanted.is_file:
        table = lowering().apply(table)
    chosen = [each.value for each in (Semantics.CHANNELS, Semantics.RENDEZVOUS) if semantics in (each, Semantics.BOTH)]
    results = {each: _result(table, each, memory) for each in chosen}
    deliver(lambda _: _lines(results), lambda: _data(source, results), as_json=as_json, output=output)
    return int(any(isinstance(result, Exception) for result in results.values()))


@dataclass(frozen=True)
class _Memory:
    """The limit and the sizes, as they were written."""

    limit: str | None
    activation: str | None
    weight_stash: str | None

    def check(self) -> None:
        """Refuse what is no size, and a limit in bytes for activations that are counted in pieces."""
        for name, text in (("--memory-limit", self.limit), ("--activation", self.activation), ("--weight-stash", self.weight_stash)):
            _size(name, "0" if text is None else text)
        if self.limit is not None and self.limit.strip().endswith("B") and self.activation is None:
            raise UsageError(f"--memory-limit {self.limit} is in bytes: say with --activation how many a stage holds of a microbatch")

    @property
    def keywords(self) -> dict[str, Any]:
        """The arguments of the library's `verify`."""
        from penstock.ir.costs import Costs

        if self.limit is None and self.activation is None and self.weight_stash is None:
            return {}
        given = {"activation": self.activation, "weight_stash": self.weight_stash}
        sizes: dict[str, Any] = {name: _size(name, text) for name, text in given.items() if text is not None}
        return {"costs": Costs(**sizes), "memory_limit": _limit(self.limit)}


def _limit(text: str | None) -> float | str | None:
    """A plain number as one, so that it is not taken for bytes."""
    return float(text) if text is not None and not text.strip().endswith("B") else text


def _size(name: str, text: str) -> float:
    from penstock.errors import CostsError
    from penstock.ir.costs import parse_size

    try:
        return parse_size(text)
    except CostsError as error:
        raise UsageError(f"{name}: {error}") from None


def _result(table: Table, semantics: str, memory: _Memory) -> Proof | VerifyError:
    from penstock.errors import VerifyError
    from penstock.verifier.verify import verify as prove

    try:
        return prove(table, semantics=semantics, **memory.keywords)
    except VerifyError as error:
        return error


def _lines(results: dict[str, Proof | VerifyError]) -> Iterator[Line]:
    for number, result in enumerate(results.values()):
        if number:
            yield []
        yield from ([(line, None)] for line in str(result).splitlines())


def _data(source: str, results: dict[str, Proof | VerifyError]) -> dict[str, Any]:
    from penstock.errors import VerifyError

    found = []
    for semantics, result in results.items():
        if isinstance(result, VerifyError):
            said = {"ok": False, "findings": [finding.to_json() for finding in result.findings]}
        else:
            said = {"ok": True, "proof": result.to_json()}
        found.append({"semantics": semantics, **said})
    return {"source": source, "ok": all(each["ok"] for each in found), "results": found}
