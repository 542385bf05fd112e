"""`penstock verify`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import AsJson, ClusterFile, TextOutput, read_size, text_option
from penstock.cli.output import deliver, show_steps
from penstock.cli.sources import DeferReduceGradWait, LoweringOptions, MaxOutstandingSends, OffloadShare, ScheduleSource, read_cluster
from penstock.errors import UsageError, VerifyError
from penstock.text.units import has_byte_unit

if TYPE_CHECKING:
    from penstock.ir.cluster import Cluster
    from penstock.ir.table import Table
    from penstock.verifier.proof import Proof


class Semantics(StrEnum):
    """The semantics of sends and receives."""

    CHANNELS = "channels"
    RENDEZVOUS = "rendezvous"
    BOTH = "both"


def verify(
    source: ScheduleSource,
    *,
    semantics: Annotated[
        Semantics,
        typer.Option(
            "--semantics",
            help="What messages wait for: channels (a send returns at once), rendezvous (one NCCL communicator: both ends meet), or both.",
        ),
    ] = Semantics.CHANNELS,
    memory_limit: Annotated[
        str | None, text_option("The memory limit of each rank: in activations of a stage, or like 40GiB.", "SIZE", "--memory-limit")
    ] = None,
    cluster: ClusterFile = None,
    host_memory_limit: Annotated[
        str | None, text_option("The same for activations that are moved to host memory.", "SIZE", "--host-memory-limit")
    ] = None,
    activation: Annotated[
        str | None, text_option("Memory per stage and microbatch from F to I or B.  [default: 1]", "SIZE", "--activation")
    ] = None,
    weight_stash: Annotated[
        str | None, text_option("Memory per stage and microbatch from I to W.  [default: 0]", "SIZE", "--weight-stash")
    ] = None,
    max_outstanding_sends: MaxOutstandingSends = None,
    defer_reduce_grad_wait: DeferReduceGradWait = False,
    offload: OffloadShare = None,
    as_json: AsJson = False,
    output: TextOutput = None,
) -> int:
    """Prove that a program runs, or say why not.

    The proof is that the program cannot hang, drop work or overflow memory. If there is none, every reason is printed and the exit
    code is 1. A NAME is lowered first; a FILE is checked as it is, even if actions are missing from it. With --cluster, the limit of each
    rank is the memory of its device.

    \b
    Examples:
      penstock verify zbv -p 4 -m 8
      penstock verify program.csv --semantics both
      penstock verify zb-h2 -p 8 -m 32 --memory-limit 15
      penstock verify 1f1b -p 8 -m 32 --offload 100 --memory-limit 3 --host-memory-limit 8
      penstock verify program.csv --max-outstanding-sends 4
      penstock verify zbv -p 8 -m 32 --memory-limit 40GiB --activation 1.5GiB --weight-stash 800MiB
      penstock verify 1f1b -m 32 --cluster cluster.toml --activation 1.5GiB
    """
    limits = _read_memory_limits(memory_limit, host_memory_limit, activation, weight_stash)
    devices = read_cluster(cluster)
    if devices is not None:
        limits["memory_limit"] = _find_device_limits(devices, memory_limit, activation)
        source = source if source.is_file else replace(source, ranks=source.ranks or len(devices))
    limits["max_outstanding_sends"] = max_outstanding_sends
    lowering = LoweringOptions(offload=offload, max_outstanding_sends=max_outstanding_sends, defer_reduce_grad_wait=defer_reduce_grad_wait)
    lowering.check()
    if source.is_file and offload is not None:
        raise UsageError("--offload lowers a NAME, but a FILE is checked as it is: use it with 'penstock lower'")
    if source.is_file and defer_reduce_grad_wait:
        raise UsageError("--defer-reduce-grad-wait lowers a NAME, but a FILE is checked as it is: use it with 'penstock lower'")
    chosen = [one.value for one in (Semantics.CHANNELS, Semantics.RENDEZVOUS) if semantics in (one, Semantics.BOTH)]
    results: dict[str, Proof | VerifyError] = {}
    with show_steps(1 + len(chosen)) as step:
        step("building")
        table = source.table(strict=False)
        if devices is not None:
            devices.check_ranks(table.ranks)
        table = table if source.is_file else lowering.lower(table)
        for name in chosen:
            step(f"proving, {name}")
            results[name] = _prove(table, name, limits)
    deliver(lambda _: _write_lines(results), lambda: _collect_data(source.source, results), as_json=as_json, output=output)
    return int(any(isinstance(result, Exception) for result in results.values()))


def _read_memory_limits(limit: str | None, host_limit: str | None, activation: str | None, weight_stash: str | None) -> dict[str, Any]:
    """Turn the options into arguments of the library's `verify`; refuse a limit in bytes if activations are not in bytes."""
    from penstock.ir.costs import Costs

    limits: dict[str, Any] = {}
    for name, text in (("memory_limit", limit), ("host_memory_limit", host_limit)):
        option = f"--{name.replace('_', '-')}"
        size = read_size(option, text)
        if has_byte_unit(text) and activation is None:
            raise UsageError(f"{option} {text} is in bytes: give the bytes per stage and microbatch with --activation")
        if size is not None:
            limits[name] = text if has_byte_unit(text) else size
    options = {"activation": read_size("--activation", activation), "weight_stash": read_size("--weight-stash", weight_stash)}
    sizes: dict[str, Any] = {name: size for name, size in options.items() if size is not None}
    return {"costs": Costs(**sizes), **limits} if limits or sizes else {}


def _find_device_limits(cluster: Cluster, limit: str | None, activation: str | None) -> tuple[float, ...]:
    """The memory of each device; refuse another limit, and a cluster in bytes if activations are not in bytes."""
    if limit is not None:
        raise UsageError("give one of the two: --memory-limit, or --cluster with the memory of each device")
    if cluster.memory_limit is None:
        raise UsageError("--cluster: its devices have no memory, which is all that is checked here: give them one, or --memory-limit")
    if cluster.size_unit == "B" and activation is None:
        raise UsageError("--cluster: its memory is in bytes: give the bytes per stage and microbatch with --activation")
    return cluster.memory_limit


def _prove(table: Table, semantics: str, limits: dict[str, Any]) -> Proof | VerifyError:
    from penstock.verifier.verify import verify as prove

    try:
        return prove(table, semantics=semantics, **limits)
    except VerifyError as error:
        return error


def _write_lines(results: dict[str, Proof | VerifyError]) -> Iterator[str]:
    for number, result in enumerate(results.values()):
        if number:
            yield ""
        yield from str(result).splitlines()


def _collect_data(source: str, results: dict[str, Proof | VerifyError]) -> dict[str, Any]:
    data: list[dict[str, Any]] = []
    for semantics, result in results.items():
        if isinstance(result, VerifyError):
            data.append({"semantics": semantics, "ok": False, "findings": [finding.to_json() for finding in result.findings]})
        else:
            data.append({"semantics": semantics, "ok": True, "proof": result.to_json()})
    return {"source": source, "ok": all(result["ok"] for result in data), "results": data}
