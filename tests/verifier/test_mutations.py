"""Broken programs: the verifier refuses a mutant exactly when the interpreter says that it goes wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import cycle, product
from random import Random

import pytest

import penstock as ps
from penstock.errors import VerifyError
from penstock.ir.graph import StageGraph
from penstock.ir.placement import Placement
from penstock.ir.program import Program
from penstock.ir.rows import pack_rows
from penstock.ir.schedule import Schedule
from penstock.ir.table import Table
from penstock.passes.pass_list import PassList
from penstock.schedules.registry import algorithm
from penstock.verifier.rules.table import RULES
from verifier.interpreter import explore, interpret
from verifier.mutations import OPERATORS, Rows, every, move, places, regroup, shift, some, swap

pytestmark = pytest.mark.slow

SEMANTICS = ("channels", "rendezvous")
RECEIVES = ("paired", "just-in-time", 2)


def mutant_of(program: Program, rows: Rows) -> Program:
    """Other rows, everything else as it was, buffers included."""
    rows = pack_rows(rows, program.slices)
    return Program(rows, program.placement, program.microbatches, graph=program.graph, buffers=program.buffers, slices=program.slices)


def refusal(program: Table, semantics: str) -> VerifyError | None:
    try:
        ps.verify(program, semantics=semantics)
    except VerifyError as error:
        return error
    return None


def is_right(program: Table, semantics: str, random: Random | None = None) -> bool:
    """The verdict of both; the test fails if they differ."""
    wrong, refused = interpret(program, semantics, random), refusal(program, semantics)
    if (wrong is None) != (refused is None):
        text = "\n".join(" ".join(map(str, row)) for row in program)
        pytest.fail(f"{semantics}, {program}\n{text}\ninterpreter: {wrong}\nverifier: {refused}")
    return wrong is None


def tally(program: Program, mutants: Iterable[Rows], semantics: Iterable[str], random: Random | None = None) -> Counter[bool]:
    return Counter(is_right(mutant_of(program, rows), each, random) for rows in mutants for each in semantics)


def tally_in_turns(program: Program, mutants: Iterable[Rows]) -> Counter[bool]:
    """Each mutant under one of the semantics, in turns."""
    return Counter(is_right(mutant_of(program, rows), each) for rows, each in zip(mutants, cycle(SEMANTICS)))


def assert_fair(counts: Counter[bool], right: float, wrong: float) -> None:
    """Both sorts of mutant come up, so that neither a verifier that takes all nor one that takes none could pass."""
    assert counts[True] >= right * counts.total()
    assert counts[False] >= wrong * counts.total()


# Every mutant of tiny programs ----------------------------------------------------------------------------------------


def overlapped() -> Schedule:
    rows = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "(1F1;1B0)OVERLAP_F_B", "1I1", "1W1"]]
    return Schedule.from_actions(rows, Placement.linear(2))


def skipping(microbatches: int = 1) -> Schedule:
    return ps.schedule("inference", 3, microbatches, graph=StageGraph.chain(3, [(0, 2)]))


def waiting(schedule: Schedule, *, receive: str | int = "paired", reduce: str = "deferred", outstanding: int | str = "all") -> Program:
    """A program that waits for its sends and its reductions."""
    passes = f"reduce-grad{{wait={reduce}}},send-receive{{receive={receive}}},wait-send{{outstanding={outstanding}}},buffers"
    return PassList.parse(passes).apply(schedule)


TINY = {
    "gpipe": lambda: ps.lower(ps.schedule("gpipe", 2, 1)),
    "gpipe, sharded": lambda: ps.lower(ps.schedule("gpipe", 2, 1), fsdp=True),
    "zb-h1, received late": lambda: ps.lower(ps.schedule("zb-h1", 2, 1), receive="just-in-time"),
    "seq1f1b, two slices": lambda: ps.lower(ps.schedule("seq1f1b", 2, 1, slices=2)),
    "inference": lambda: ps.lower(ps.schedule("inference", 2, 2), receive=2),
    "inference, sharded, skip edge": lambda: ps.lower(skipping(), fsdp=True),
    "one rank, two chunks": lambda: ps.lower(ps.schedule("zbv", 1, 1), fsdp=True),
    "data-parallel": lambda: ps.lower(ps.schedule("data-parallel", 1, 2), fsdp=True),
    "gpipe, waited for": lambda: waiting(ps.schedule("gpipe", 2, 1), reduce="now"),
    "two chunks, one reduction waited for after the other": lambda: waiting(ps.schedule("zbv", 1, 1), reduce="deferred"),
    "inference, at most one outstanding": lambda: waiting(ps.schedule("inference", 2, 2), outstanding=1),
    "inference, skip edge, waited for": lambda: waiting(skipping()),
}
SMALL = {
    "1f1b": lambda: ps.lower(ps.schedule("1f1b", 2, 2)),
    "overlapped": lambda: ps.lower(overlapped()),
    "both directions": lambda: ps.lower(ps.schedule("dualpipe", 2, 2)),
    "1f1b, at most one outstanding": lambda: waiting(ps.schedule("1f1b", 2, 2), outstanding=1),
    "training, skip edge": lambda: ps.lower(ps.schedule("1f1b", 3, 1, graph=StageGraph.chain(3, [(0, 2)]))),
}


@pytest.mark.parametrize("name", TINY)
def test_every_mutant_of_a_tiny_program_is_judged_alike(name: str) -> None:
    program = TINY[name]()
    assert_fair(tally_in_turns(program, every(tuple(program))), right=0.01, wrong=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_every_third_mutant_of_a_small_program_is_judged_alike(name: str) -> None:
    program = SMALL[name]()
    assert_fair(tally_in_turns(program, every(tuple(program))[::3]), right=0.01, wrong=0.5)


@pytest.mark.parametrize("semantics", SEMANTICS)
def test_the_interpreters_verdict_does_not_depend_on_who_goes_first(semantics: str) -> None:
    """Every interleaving of mutants of a tiny program ends alike: all right, or none."""
    program = ps.lower(ps.schedule("gpipe", 2, 2))
    random = Random(7)
    for _ in range(40):
        mutant = mutant_of(program, some(tuple(program), random))
        outcomes = explore(mutant, semantics)
        assert (outcomes == {None}) == (interpret(mutant, semantics) is None)
        assert outcomes == {None} or None not in outcomes


# Some mutants of every schedule ---------------------------------------------------------------------------------------


def schedules_of(name: str) -> list[Schedule]:
    """Two shapes of each name, small enough to interpret."""
    if name == "data-parallel":
        return [ps.schedule(name, 1, 2), ps.schedule(name, 1, 4)]
    if name in ("dualpipe", "chimera"):
        return [ps.schedule(name, 2, 4), ps.schedule(name, 4, 3)]
    if algorithm(name).slices is not None:
        return [ps.schedule(name, 2, 2, slices=2), ps.schedule(name, 3, 1, slices=3), ps.schedule(name, 2, 4, slices=1)]
    return [ps.schedule(name, 2, 4), ps.schedule(name, 3, 3)]


@pytest.mark.parametrize("name", sorted(ps.available()))
def test_mutants_of_every_schedule_are_judged_alike(name: str) -> None:
    random, counts = Random(name), Counter[bool]()
    for schedule, fsdp, receive in product(schedules_of(name), (False, True), RECEIVES):
        program = ps.lower(schedule, fsdp=fsdp, receive=receive)
        assert is_right(program, "channels")
        assert receive != "paired" or is_right(program, "rendezvous")
        counts += tally(program, [some(tuple(program), random) for _ in range(3)], SEMANTICS, random)
    assert_fair(counts, right=0.02, wrong=0.5)


@pytest.mark.parametrize("name", sorted(ps.available()))
def test_mutants_of_programs_that_wait_are_judged_alike(name: str) -> None:
    random, counts = Random(name), Counter[bool]()
    for schedule, receive, reduce in product(schedules_of(name), RECEIVES, ("now", "deferred")):
        most = random.choice((2 * schedule.stages, "all"))
        program = waiting(schedule, receive=receive, reduce=reduce, outstanding=most)
        assert is_right(program, "channels")
        assert receive != "paired" or is_right(program, "rendezvous")
        counts += tally(program, [some(tuple(program), random) for _ in range(2)], SEMANTICS, random)
    assert_fair(counts, right=0.02, wrong=0.5)


WIRED = {
    "one skip": (3, [(0, 2)]),
    "crossing skips": (4, [(0, 2), (1, 3), (0, 3)]),
}


@pytest.mark.parametrize("wires", WIRED)
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "inference"])
def test_mutants_with_edges_that_skip_stages_are_judged_alike(name: str, wires: str) -> None:
    stages, skips = WIRED[wires]
    random, counts = Random(name + wires), Counter[bool]()
    for fsdp, receive in product((False, True), RECEIVES):
        program = ps.lower(ps.schedule(name, stages, 3, graph=StageGraph.chain(stages, skips)), fsdp=fsdp, receive=receive)
        counts += tally(program, [some(tuple(program), random) for _ in range(5)], SEMANTICS, random)
    assert_fair(counts, right=0.04, wrong=0.5)


@pytest.mark.parametrize(
    "schedule",
    [
        ps.schedule("zbv", 2, 3, graph=StageGraph.chain(4, [(0, 3)])),  # a skip that stays on its rank
        ps.schedule("dualpipe", 4, 5, graph=StageGraph.chain(4, [(0, 2)])),
        ps.schedule("1f1b", 4, 3, graph=StageGraph(4, ((0, 1), (0, 2), (1, 3), (2, 3)))),  # no chain at all
        Schedule.from_actions([["0F0", "1F0", "1B0", "0B0"], ["2F0", "3F0", "3I0", "2I0", "3W0", "2W0"]], Placement.custom([0, 0, 1, 1])),
        Schedule.from_actions([["0F0", "0B0"], [], ["1F0", "1B0"]], Placement.custom([0, 2], ranks=3)),  # a rank with nothing to do
        overlapped(),
    ],
    ids=["skip on a rank", "skips both ways", "diamond", "neighbours on a rank", "idle rank", "overlapped"],
)
def test_mutants_of_unusual_pipelines_are_judged_alike(schedule: Schedule) -> None:
    random = Random(11)
    program = ps.lower(schedule, fsdp=True)
    assert_fair(tally(program, [some(tuple(program), random) for _ in range(50)], SEMANTICS, random), right=0.04, wrong=0.5)


@pytest.mark.parametrize("name", sorted(ps.available()))
def test_mutants_of_schedules_without_messages_are_judged_alike(name: str) -> None:
    random, counts = Random(name), Counter[bool]()
    for schedule in schedules_of(name):
        for _ in range(20):
            rows = some(tuple(schedule), random)
            mutant = Schedule.from_actions(
                rows, schedule.placement, microbatches=schedule.microbatches, graph=schedule.graph, slices=schedule.slices
            )
            counts[is_right(mutant, "channels", random)] += 1
    assert_fair(counts, right=0.04, wrong=0.2)


# Far away from where lowering leaves a program ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_long_walks_through_right_programs_are_judged_alike(seed: int) -> None:
    """Change upon change as long as the program stays right, with other slot counts than were counted for it."""
    random = Random(seed)
    name, semantics = random.choice(["1f1b", "gpipe", "zb-h1", "zbv", "dualpipe", "dualpipe-v"]), SEMANTICS[seed % 2]
    program = ps.lower(ps.schedule(name, 2, 3), fsdp=seed % 3 == 0, receive=random.choice(RECEIVES))
    assert program.buffers is not None
    slots = {channel: random.choice((1, 1, 2, count)) for channel, count in program.buffers.channels.items()}
    program = program.changed(buffers=replace(program.buffers, channels=slots))
    rows, counts = tuple(program), Counter[bool]()
    for _ in range(80):
        operator = random.choice((shift, shift, move, move, swap, regroup, *OPERATORS))
        mutants = list(operator(rows, *random.choice(places(rows))))
        if not mutants:
            continue
        changed = random.choice(mutants)
        right = is_right(mutant_of(program, changed), semantics, random)
        counts[right] += 1
        rows = changed if right else rows
    assert counts.total() > 40


def test_every_rule_catches_some_mutant() -> None:
    """No rule of the verifier is idle here, but for limits, which have to be asked for, and those of a spread vocabulary.

    `rules/test_vocabulary.py` changes programs with a spread vocabulary.
    """
    random, named = Random(5), set()
    for name, fsdp in product(("1f1b", "zbv"), (False, True)):
        program = ps.lower(ps.schedule(name, 2, 3), fsdp=True, offload=100) if fsdp else waiting(ps.schedule(name, 2, 3))
        for number in range(60):
            refused = refusal(mutant_of(program, some(tuple(program), random)), SEMANTICS[number % 2])
            named |= {finding.rule for finding in refused.findings} if refused else set()
    assert named == {rule.name for rule in RULES} - {"memory", "host memory", "outstanding", "vocabulary", "joined"}
