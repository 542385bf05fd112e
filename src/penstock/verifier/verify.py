"""Prove a schedule or program, or refuse it with every reason."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import islice

import numpy as np

from penstock.errors import CostsError, ScheduleError, UnknownNameError, VerifyError, nearest
from penstock.ir.costs import Costs, check_costs
from penstock.ir.kind import SENDS
from penstock.ir.table import Table, check_table
from penstock.text.units import check_count, parse_size
from penstock.verifier.context import Context
from penstock.verifier.finding import Finding, report
from penstock.verifier.proof import Proof
from penstock.verifier.rules.known import malformed
from penstock.verifier.rules.memory import peak_memory
from penstock.verifier.rules.offload import has_copies, peak_host_memory
from penstock.verifier.rules.table import RULES
from penstock.verifier.rules.waits import slots_of

SEMANTICS = ("channels", "rendezvous")
MOST_FINDINGS = 1000
"""Per rule, because a table that is wrong everywhere need not be reported action by action."""

Limit = float | str | Sequence[float | str] | None


def verify(
    table: Table,
    *,
    semantics: str = "channels",
    memory_limit: Limit = None,
    host_memory_limit: Limit = None,
    costs: Costs | None = None,
    max_outstanding_sends: int | None = None,
) -> Proof:
    """A proof that a schedule or program neither hangs, drops work nor holds too much; else `VerifyError` with every finding.

    `semantics` says how messages wait: `channels` (a send returns at once) or `rendezvous` (one communicator, where both
    ends must meet in order). `memory_limit` is one size or one per rank, in the units of `costs` or like "40GiB"; `host_memory_limit`
    is the same for activations that are moved to host memory.
    `max_outstanding_sends` is how many sends a rank may have sent and not yet waited for (WAIT_SEND_F and WAIT_SEND_B).

    >>> from penstock.ir.placement import Placement
    >>> from penstock.ir.schedule import Schedule
    >>> verify(Schedule.from_actions([["0F0", "0B0"], ["1F0", "1B0"]], Placement.linear(2))).actions
    4
    """
    context = _build_context(table, semantics, costs, max_outstanding_sends, memory_limit=memory_limit, host_memory_limit=host_memory_limit)
    findings = _check(context)
    if findings:
        raise VerifyError(findings, report(table, semantics, findings))
    return _build_proof(context, with_memory=memory_limit is not None or host_memory_limit is not None or costs is not None)


def check(
    table: Table,
    *,
    semantics: str = "channels",
    memory_limit: Limit = None,
    host_memory_limit: Limit = None,
    costs: Costs | None = None,
    max_outstanding_sends: int | None = None,
    rules: Collection[str] | None = None,
) -> list[Finding]:
    """Every finding, the worst first, and none if the proof succeeds; `rules` limits them to some rules, by name."""
    return _check(
        _build_context(table, semantics, costs, max_outstanding_sends, memory_limit=memory_limit, host_memory_limit=host_memory_limit),
        rules,
    )


def _check(context: Context, rules: Collection[str] | None = None) -> list[Finding]:
    findings = list(islice(malformed(context.table), MOST_FINDINGS)) or list(_check_rules(context, rules))
    return sorted(findings, key=lambda finding: finding.severity)  # stable: within a severity the rules keep their order


def _check_rules(context: Context, rules: Collection[str] | None) -> Iterator[Finding]:
    for rule in RULES:
        if (rules is None or rule.name in rules) and rule.applies(context):
            yield from islice(rule.check(context), MOST_FINDINGS)


def _build_proof(context: Context, with_memory: bool) -> Proof:
    table = context.table
    return Proof(
        name=table.name,
        lowered=table.lowered,
        placement=table.placement.kind,
        ranks=table.ranks,
        stages=table.stages,
        microbatches=table.microbatches,
        slices=table.slices,
        semantics=context.semantics,
        rules={rule.name: rule.holds for rule in RULES if rule.applies(context)},
        actions=int(table.rows.group_offsets[-1]),
        messages=int(table.rows.is_kind(*SENDS).sum()),
        slots=slots_of(context) is not None,
        peak_memory=tuple(peak_memory(table, context.costs)) if with_memory else None,
        memory_limit=context.limits,
        host_memory=tuple(peak_host_memory(table, context.costs)) if with_memory and has_copies(context) else None,
        host_memory_limit=context.host_limits,
        in_bytes=context.in_bytes,
    )


# Arguments ------------------------------------------------------------------------------------------------------------


def _build_context(
    table: Table, semantics: str, costs: Costs | None, outstanding: int | None, *, memory_limit: Limit, host_memory_limit: Limit
) -> Context:
    check_table(table, "verify")
    if semantics not in SEMANTICS:
        raise UnknownNameError(f"there are no semantics {semantics!r}: {nearest(str(semantics), SEMANTICS)}")
    if outstanding is not None:
        check_count("max_outstanding_sends", outstanding, 0, error=ScheduleError)
    costs = check_costs(costs)
    costs.check(table.stages, table.units, table.ranks)
    limits, in_bytes = _read_limits("memory_limit", memory_limit, table.ranks)
    host_limits, host_in_bytes = _read_limits("host_memory_limit", host_memory_limit, table.ranks)
    return Context(table, semantics, costs, limits, host_limits, in_bytes=in_bytes or host_in_bytes, max_outstanding_sends=outstanding)


def _read_limits(name: str, limit: Limit, ranks: int) -> tuple[tuple[float, ...] | None, bool]:
    """One limit per rank, if there is one, and whether any was given with a unit."""
    if limit is None:
        return None, False
    one = isinstance(limit, str) or not isinstance(limit, Sequence | np.ndarray)
    sizes: Sequence[float | str] = [limit] * ranks if one else list(limit)  # type: ignore[list-item, arg-type]
    if len(sizes) != ranks:
        raise CostsError(f"{name} has {len(sizes)} values for {ranks} ranks: give one size or one per rank")
    in_bytes = any(isinstance(size, str) and size.rstrip()[-1:].isalpha() for size in sizes)
    return tuple(parse_size(size, f"{name} of rank {rank}") for rank, size in enumerate(sizes)), in_bytes
