"""Measure the cluster that the ranks run on: the speed of each device, the links between them, and which links are shared.

The ranks of one machine profile the model one after the other, so that they do not share its cores. Then each pair of ranks exchanges
messages, and last two pairs at a time, to see whether their links are one: out of a machine, into it, and within it.
"""

from __future__ import annotations

import socket
import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import permutations
from typing import Any, NamedTuple

import torch

from penstock.errors import ScheduleError
from penstock.ir.cluster import Cluster, Device
from penstock.planner.profile import Profile
from penstock.runtime.device.connections import can_use_nccl, device_id
from penstock.runtime.device.gpu import device_name, total_memory
from penstock.runtime.measure.links import Link, count_seconds, measure_link, time_large_messages
from penstock.runtime.transport.current_group import get_group
from penstock.runtime.transport.processes import Processes

SAME = 0.05
"""Speeds of devices of one name that differ by at most this share are taken for equal."""
ALIKE = 0.3
"""The same for latencies and bandwidths of links, which vary more."""
_SLOWER = 1.5
"""A link counts as shared if messages on it take this many times as long while another pair is busy."""
_ALONE = 16
"""Up to this many ranks, each pair is measured alone; else disjoint pairs at once."""
_DEADLINE = 3600.0

Pair = tuple[int, int]
Say = Callable[[str], None]


class RankFacts(NamedTuple):
    """What a rank says of itself."""

    host: str
    name: str
    """The product name of its GPU, or `cpu`."""
    memory: float
    """Of its GPU, or of its machine."""


class SharingTest(NamedTuple):
    """Two pairs of ranks that send at once, and the machine whose link they may share: its way out, its way in, or the one within."""

    pairs: tuple[Pair, Pair]
    host: str
    way: str


def measure_cluster(
    profile_layers: Callable[[], Profile], device: torch.device, *, per_layer: bool = False, progress: Say | None = None
) -> tuple[Profile, Cluster]:
    """Measure all ranks and links; every rank calls it, and gets the same profile and cluster.

    `profile_layers` measures the model on this rank. The profile is that of rank 0, and the cluster's speeds are relative to it: one per
    kind of action, or one per layer too. On a CPU the ranks of one machine share its memory equally.
    """
    group, rank = get_group()
    if not isinstance(group, Processes):
        raise ScheduleError("a cluster is measured between processes: start them with launch(backend='gloo'), --ranks or torchrun")
    return _ClusterMeter(group, rank, device, progress or (lambda what: None)).run(profile_layers, per_layer)


class _ClusterMeter:
    """Measures on one rank, together with all others."""

    def __init__(self, group: Processes, rank: int, device: torch.device, say: Say) -> None:
        self.group, self.rank, self.device, self.say = group, rank, device, say

    def run(self, profile_layers: Callable[[], Profile], per_layer: bool) -> tuple[Profile, Cluster]:
        facts = self._gather("facts", RankFacts(socket.gethostname(), device_name(self.device), float(total_memory(self.device))))
        self.messages = "cuda" if can_use_nccl(self._gather("devices", device_id())) else "cpu"
        hosts = [fact.host for fact in facts]
        profiles = self._profile_in_turn(profile_layers, hosts)
        links = self._measure_links()
        shared = self._find_shared(hosts, links)
        return profiles[0], build_cluster(facts, profiles, links, shared, per_layer=per_layer)

    def _gather(self, name: str, value: Any) -> list[Any]:
        return self.group.gather(self.rank, name, value, _DEADLINE)

    def _profile_in_turn(self, profile_layers: Callable[[], Profile], hosts: Sequence[str]) -> list[Profile]:
        turns = [hosts[:place].count(host) for place, host in enumerate(hosts)]
        own: Profile | None = None
        for turn in range(max(turns) + 1):
            self.say(f"measuring the model, turn {turn + 1} of {max(turns) + 1}")
            if turns[self.rank] == turn:
                own = profile_layers()
            self._gather("turn", turn)
        return self._gather("profiles", own)

    def _measure_links(self) -> dict[Pair, Link]:
        found: dict[Pair, Link] = {}
        rounds = list_rounds(self.group.ranks)
        if self.group.ranks <= _ALONE:
            rounds = [[pair] for pairs in rounds for pair in pairs]
        for place, pairs in enumerate(rounds):
            self.say(f"measuring links, {place + 1} of {len(rounds)}")
            mine = next((pair for pair in pairs if self.rank in pair), None)
            link = None
            if mine is not None:
                peer = mine[0] + mine[1] - self.rank
                link = peer, measure_link(peer, first=self.rank == mine[0], device=self.messages)
            for source, measured in enumerate(self._gather("links", link)):
                if measured is not None:
                    found[source, measured[0]] = measured[1]
        return found

    def _find_shared(self, hosts: Sequence[str], links: dict[Pair, Link]) -> set[tuple[str, str]]:
        """The machines and ways whose links are shared."""
        shared = set()
        tests = list_sharing_tests(hosts)
        for place, test in enumerate(tests):
            self.say(f"looking for shared links, {place + 1} of {len(tests)}")
            self._gather("sharing", place)  # both pairs begin together
            mine = next((pair for pair in test.pairs if self.rank in pair), None)
            slower = 0.0
            if mine is not None:
                peer, sends = mine[0] + mine[1] - self.rank, self.rank == mine[0]
                seconds = time_large_messages(peer, sends=sends, device=self.messages)
                slower = seconds / count_seconds(links[mine]) if sends else 0.0
            ratios = [ratio for ratio in self._gather("slower", slower) if ratio]
            if statistics.fmean(ratios) >= _SLOWER:
                shared.add((test.host, test.way))
        return shared


# From measurements to a cluster ---------------------------------------------------------------------------------------


def list_rounds(ranks: int) -> list[list[Pair]]:
    """All pairs of ranks in rounds of disjoint pairs, as in a tournament.

    >>> list_rounds(4)
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    """
    places = [*range(ranks), *([-1] if ranks % 2 else [])]
    rounds = []
    for _ in range(len(places) - 1):
        pairs = [tuple(sorted((places[place], places[-1 - place]))) for place in range(len(places) // 2)]
        rounds.append(sorted((one, other) for one, other in pairs if one >= 0))
        places = [places[0], *places[-1:], *places[1:-1]]
    return [pairs for pairs in rounds if pairs]


def list_sharing_tests(hosts: Sequence[str]) -> list[SharingTest]:
    """For each machine with several ranks: two that send out of it, two that receive, and two pairs within it, if there are any."""
    tests = []
    for host in dict.fromkeys(hosts):
        own = [rank for rank, of in enumerate(hosts) if of == host]
        # Ranks of different other machines, if there are several, so that only one machine's link is tested.
        others = sorted((rank for rank, of in enumerate(hosts) if of != host), key=lambda rank: (_place_in_host(hosts, rank), rank))
        if len(own) > 1 and len(others) > 1:
            tests.append(SharingTest(((own[0], others[0]), (own[1], others[1])), host, "out"))
            tests.append(SharingTest(((others[0], own[0]), (others[1], own[1])), host, "in"))
        if len(own) > 3:
            tests.append(SharingTest(((own[0], own[1]), (own[2], own[3])), host, "within"))
    return tests


def _place_in_host(hosts: Sequence[str], rank: int) -> int:
    return list(hosts[:rank]).count(hosts[rank])


def build_cluster(
    facts: Sequence[RankFacts],
    profiles: Sequence[Profile],
    links: dict[Pair, Link],
    shared: Iterable[tuple[str, str]],
    *,
    per_layer: bool = False,
) -> Cluster:
    """The cluster of these ranks. What differs by no more than measurements do is taken for equal."""
    ranks, hosts = len(facts), [fact.host for fact in facts]
    speeds = [_compare(profiles[0], profile, per_layer) for profile in profiles]
    if not per_layer:
        speeds = _merge_speeds([fact.name for fact in facts], speeds)
    sharing = [hosts.count(fact.host) if fact.name == "cpu" else 1 for fact in facts]
    devices = [Device(fact.name, speed, fact.memory / count, fact.host) for fact, speed, count in zip(facts, speeds, sharing, strict=True)]
    if ranks == 1:
        return Cluster(devices, time_unit="s", size_unit="B")
    latency = _fill_table(ranks, _merge_links({pair: link.latency for pair, link in links.items()}, hosts), 0.0)
    slow = {pair: link.bandwidth for pair, link in links.items() if link.bandwidth is not None}
    bandwidth = _fill_table(ranks, _merge_links(slow, hosts), None)
    return Cluster(devices, latency, bandwidth, _make_lanes(hosts, set(shared)), "s", "B")


def _compare(reference: Profile, own: Profile, per_layer: bool) -> dict[str, Any]:
    if per_layer:
        return dict(reference.compare_speeds(own))
    sums = {name: [sum(getattr(layer, name) for layer in profile.layers) for profile in (reference, own)] for name in ("f", "i", "w")}
    return {name: one / other if one and other else 1.0 for name, (one, other) in sums.items()}


def _merge_speeds(names: Sequence[str], speeds: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """Devices of one name get the same speeds if they differ by no more than `SAME`."""
    merged = list(speeds)
    for name in set(names):
        own = [place for place, other in enumerate(names) if other == name]
        spreads = [max(speeds[place][kind] for place in own) / min(speeds[place][kind] for place in own) for kind in ("f", "i", "w")]
        if max(spreads) <= 1 + SAME:
            middle = {kind: statistics.median(speeds[place][kind] for place in own) for kind in ("f", "i", "w")}
            if 0 in own:  # the profile is that of rank 0, whose speed is 1
                middle = dict.fromkeys(middle, 1.0)
            for place in own:
                merged[place] = middle
    return merged


def _merge_links(values: dict[Pair, float], hosts: Sequence[str]) -> dict[Pair, float]:
    """Links within machines get one value, and links between machines one, if they are alike; else those of each pair of machines."""
    merged = dict(values)
    for classify in (lambda one, other: one == other, lambda one, other: (one, other)):
        classes: dict[object, list[Pair]] = {}
        for source, target in values:
            classes.setdefault(classify(hosts[source], hosts[target]), []).append((source, target))
        for pairs in classes.values():
            own = [values[pair] for pair in pairs]
            if max(own) <= min(own) * (1 + ALIKE):
                middle = statistics.median(own)
                merged.update(dict.fromkeys([pair for pair in pairs if merged[pair] == values[pair]], middle))
    return merged


def _fill_table(ranks: int, values: dict[Pair, float], missing: float | None) -> Any:
    """One number if all pairs have the same, else a table."""
    pairs = list(permutations(range(ranks), 2))
    if len({values.get(pair, missing) for pair in pairs}) == 1:
        return values.get(pairs[0], missing)
    return [[values.get((source, target), missing) for target in range(ranks)] for source in range(ranks)]


def _make_lanes(hosts: Sequence[str], shared: set[tuple[str, str]]) -> Any:
    """A lane for each shared way, and one of its own for each other link; None if nothing is shared."""
    if not shared:
        return None
    numbers: dict[object, int] = {}

    def number(name: object) -> int:
        return numbers.setdefault(name, len(numbers))

    def find(source: int, target: int) -> Pair:
        one, other = hosts[source], hosts[target]
        if one == other:
            lane = number((one, "within") if (one, "within") in shared else (source, target))
            return lane, lane
        out = number((one, "out") if (one, "out") in shared else (source, target, "out"))
        return out, number((other, "in") if (other, "in") in shared else (source, target, "in"))

    return [[find(source, target) for target in range(len(hosts))] for source in range(len(hosts))]
