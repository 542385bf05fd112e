"""`penstock verify`."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import AsJson, Chunks, Microbatches, Options, Output, Ranks, Source, read_size
from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.errors import VerifyError
    from penstock.ir.table import Table
    from penstock.verifier.proof import Proof


class Semantics(StrEnum):
    """What sends and receives wait for."""

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
            help="What messages wait for: channels (a send returns at once), rendezvous (one NCCL communicator: both ends meet), or both.",
        ),
    ] = Semantics.CHANNELS,
    memory_limit: Annotated[
        str | None,
        typer.Option("--memory-limit", metavar="SIZE", help="The memory limit of each rank: in activations of a stage, or like 40GiB."),
    ] = None,
    activation: Annotated[
        str | None,
        typer.Option("--activation", metavar="SIZE", help="Memory per stage and microbatch from F to I or B.  [default: 1]"),
    ] = None,
    weight_stash: Annotated[
        str | None,
        typer.Option("--weight-stash", metavar="SIZE", help="Memory per stage and microbatch from I to W.  [default: 0]"),
    ] = None,
    as_json: AsJson = False,
    output: Output = None,
) -> int:
    """Prove that a program runs, or say why not.

    The proof is that the program cannot hang, drop work or overflow memory. If there is none, every reason is printed and the exit
    code is 1. A NAME is lowered first; a FILE is checked as it is, even if actions are missing from it.

    \b
    Examples:
      penstock verify zbv -p 4 -m 8
      penstock verify program.csv --semantics both
      penstock verify zb-h2 -p 8 -m 32 --memory-limit 15
      penstock verify zbv -p 8 -m 32 --memory-limit 40GiB --activation 1.5GiB --weight-stash 800MiB
    """
    from penstock.cli.output import deliver
    from penstock.cli.schedule_source import ScheduleSource
    from penstock.passes.lower import lowering

    memory = _memory_keywords(memory_limit, activation, weight_stash)
    checked = ScheduleSource(source, ranks, microbatches, chunks, option)
    table = checked.table(strict=False)
    if not checked.is_file:
        table = lowering().apply(table)
    chosen = [one.value for one in (Semantics.CHANNELS, Semantics.RENDEZVOUS) if semantics in (one, Semantics.BOTH)]
    results = {name: _result(table, name, memory) for name in chosen}
    deliver(lambda _: _lines(results), lambda: _data(source, results), as_json=as_json, output=output)
    return int(any(isinstance(result, Exception) for result in results.values()))


def _memory_keywords(limit: str | None, activation: str | None, weight_stash: str | None) -> dict[str, Any]:
    """Turn the options into arguments of the library's `verify`; refuse a limit in bytes if activations are not in bytes."""
    from penstock.ir.costs import Costs
    from penstock.text.units import has_byte_unit

    checked_limit = read_size("--memory-limit", limit)
    options = {"activation": read_size("--activation", activation), "weight_stash": read_size("--weight-stash", weight_stash)}
    if has_byte_unit(limit) and activation is None:
        raise UsageError(f"--memory-limit {limit} is in bytes: give the bytes per stage and microbatch with --activation")
    sizes: dict[str, Any] = {name: size for name, size in options.items() if size is not None}
    if checked_limit is None and not sizes:
        return {}
    return {"costs": Costs(**sizes), "memory_limit": limit if has_byte_unit(limit) else checked_limit}


def _result(table: Table, semantics: str, memory: dict[str, Any]) -> Proof | VerifyError:
    from penstock.errors import VerifyError
    from penstock.verifier.verify import verify as prove

    try:
        return prove(table, semantics=semantics, **memory)
    except VerifyError as error:
        return error


def _lines(results: dict[str, Proof | VerifyError]) -> Iterator[str]:
    for number, result in enumerate(results.values()):
        if number:
            yield ""
        yield from str(result).splitlines()


def _data(source: str, results: dict[str, Proof | VerifyError]) -> dict[str, Any]:
    from penstock.errors import VerifyError

    data: list[dict[str, Any]] = []
    for semantics, result in results.items():
        if isinstance(result, VerifyError):
            data.append({"semantics": semantics, "ok": False, "findings": [finding.to_json() for finding in result.findings]})
        else:
            data.append({"semantics": semantics, "ok": True, "proof": result.to_json()})
    return {"source": source, "ok": all(result["ok"] for result in data), "results": data}
