"""Several names for what is written once: tied parameters, and options that parameters have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from penstock.runtime.held import Ties


def under_more_names(metadata: Metadata, results: Sequence[WriteResult], others: Callable[[str], Iterable[str]]) -> list[WriteResult]:
    """Make what was written be found under its other keys too."""
    known, paths = metadata.state_dict_metadata, metadata.planner_data
    more = []
    for result in results:
        key = result.index.fqn
        for other in others(key):
            if known.setdefault(other, known[key]) is known[key]:
                paths[other] = tuple(other.split(".", 1))
                more.append(replace(result, index=replace(result.index, fqn=other)))
    return more


def tied_keys(ties: Ties, key: str) -> list[str]:
    """The keys under the other names of a tied parameter, for one under its first name."""
    for first, *others in ties:
        for start, end in (("model.", ""), ("optimizer.state.", "."), ("optimizer.param_groups.", ".")):
            if f"{key}{end}".startswith(f"{start}{first}{end}") and (end or key == start + first):
                rest = key[len(start) + len(first) :]
                return [f"{start}{other}{rest}" for other in others]
    return []
