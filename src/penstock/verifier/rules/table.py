"""The table of rules, in the order in which they are tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from penstock.verifier.context import Context
from penstock.verifier.finding import Finding
from penstock.verifier.rules.complete import complete
from penstock.verifier.rules.deadlock import deadlock
from penstock.verifier.rules.known import known
from penstock.verifier.rules.matching import matching
from penstock.verifier.rules.memory import memory
from penstock.verifier.rules.offload import has_copies, host_memory, offload
from penstock.verifier.rules.order import order
from penstock.verifier.rules.placed import placed
from penstock.verifier.rules.reduction import is_reduced, reduction
from penstock.verifier.rules.retired import is_retired, outstanding, retired
from penstock.verifier.rules.sharding import is_sharded, sharding
from penstock.verifier.rules.vocabulary import is_spread, joined, vocabulary


class Rule(NamedTuple):
    """One invariant: the check that finds violations, the statement that holds without any, and whether it applies to a table."""

    name: str
    check: Callable[[Context], Iterator[Finding]]
    holds: str
    applies: Callable[[Context], bool] = lambda context: True


RULES = (
    Rule("known", known, "stages, microbatches and peers exist"),
    Rule("placed", placed, "every action is on the rank of its stage"),
    Rule("complete", complete, "all work and every message is there once"),
    Rule("order", order, "every action follows what it needs of its own rank"),
    Rule("matching", matching, "messages are received in the order of their channel", lambda context: context.table.lowered),
    Rule("vocabulary", vocabulary, "every rank runs its share of the vocabulary once per microbatch", is_spread),
    Rule("joined", joined, "every rank joins every collective once, in the same order", is_spread),
    Rule("retired", retired, "every send is waited for once", is_retired),
    Rule("deadlock", deadlock, "no rank waits forever"),
    Rule("sharding", sharding, "parameters are unsharded when used", is_sharded),
    Rule("reduction", reduction, "gradients are reduced once, after the last weight gradient", is_reduced),
    Rule("offload", offload, "every activation that is moved to the host comes back once, before its backward", has_copies),
    Rule(
        "outstanding",
        outstanding,
        "no rank has more sends outstanding than its limit",
        lambda context: context.max_outstanding_sends is not None,
    ),
    Rule("memory", memory, "no rank holds more than its limit", lambda context: context.limits is not None),
    Rule("host memory", host_memory, "no rank has more on the host than its limit", lambda context: context.host_limits is not None),
)
