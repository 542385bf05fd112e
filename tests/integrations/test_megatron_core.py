"""Our reading of Megatron's layouts and orders against megatron-core's own code, in a process of its own."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

import penstock as ps
from docs.blocks import text_of
from integrations.published_layouts import MISCOUNTED, PUBLISHED
from penstock.errors import PenstockError
from penstock.integrations.layouts import MegatronLayout, read_megatron, write_megatron

if find_spec("megatron") is None or find_spec("megatron.core") is None:
    pytest.skip("megatron-core is not installed: `make setup` installs it, on Linux", allow_module_level=True)

pytestmark = pytest.mark.slow  # importing megatron-core takes seconds
WORKER = Path(__file__).parent / "megatron_worker.py"


Ask = Callable[[list[list[Any]]], list[Any]]


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """Gives the answers of one worker to a list of questions: the name of a function and its arguments."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with subprocess.Popen([sys.executable, str(WORKER)], stdin=PIPE, stdout=PIPE, text=True, env=environment) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None

        def ask(questions: list[list[Any]]) -> list[Any]:
            worker.stdin.write(json.dumps(questions) + "\n")
            worker.stdin.flush()
            return json.loads(worker.stdout.readline())

        yield ask
        worker.stdin.close()


def draw_text(draw: random.Random) -> str:
    """A text of the grammar, with commas and repetitions anywhere, and now and then a wrong character."""
    pieces = []
    for _ in range(draw.randint(1, 8)):
        letters = "".join(draw.choice("EttttmL||,") for _ in range(draw.randint(1, 4)))
        pieces.append(draw.choice([letters, f"({letters})*{draw.randint(1, 12)}", f"{letters}*{draw.randint(1, 12)}"]))
    text = "".join(pieces)
    if draw.random() < 0.3:
        place = draw.randrange(len(text) + 1)
        text = text[:place] + draw.choice("*()09x ,E") + text[place:]
    return text


def test_texts_mean_what_they_mean_to_megatron(ask: Ask) -> None:
    """Everything that we read, Megatron reads as the same stages. We refuse more: empty groups, zero and double repetitions."""
    draw = random.Random(0)
    texts = [draw_text(draw) for _ in range(4000)]
    theirs = ask([["parse", text] for text in texts])
    refused = accepted = 0
    for text, stages in zip(texts, theirs, strict=True):
        try:
            ours = MegatronLayout.parse(text).stages
        except PenstockError:
            refused += 1
            continue
        accepted += 1
        assert stages == list(ours), text
    assert accepted > 2000
    both = sum(stages is None for stages in theirs)
    assert 100 < both <= refused


def draw_layout(draw: random.Random) -> tuple[MegatronLayout, int]:
    ranks, chunks = draw.randint(1, 4), draw.randint(1, 3)
    stages = ["t" * draw.choice([0, 1, 1, 2, 2, 7]) for _ in range(ranks * chunks)]
    stages[0] = draw.choice(["E", "E", "E", "E", "", "EE"]) + stages[0]
    for _ in range(draw.choice([0, 0, 1, 2])):
        place = draw.choice([len(stages) - 1, len(stages) - 1, max(len(stages) - 2, 0), draw.randrange(len(stages))])
        stages[place] += "m"
    stages[-1] += draw.choice(["L", "L", "L", "L", "", "LL"])
    return MegatronLayout(tuple(stages)), ranks


def refuses(layout: MegatronLayout, ranks: int) -> bool:
    try:
        layout.check(ranks)
    except PenstockError:
        return True
    return False


def test_what_we_write_megatron_reads_and_both_refuse_the_same_layouts(ask: Ask) -> None:
    draw = random.Random(1)
    layouts = [draw_layout(draw) for _ in range(3000)]
    texts = ask([["parse", str(layout)] for layout, _ in layouts])
    assert texts == [list(layout.stages) for layout, _ in layouts]
    verdicts = ask([["validate", str(layout), ranks, layout.count("t"), layout.count("m")] for layout, ranks in layouts])
    for (layout, ranks), verdict in zip(layouts, verdicts, strict=True):
        assert refuses(layout, ranks) == (verdict is not None), f"{layout} on {ranks} ranks: {verdict}"
    assert 500 < sum(verdict is None for verdict in verdicts) < 2500


def test_published_layouts_are_megatron_s_own(ask: Ask) -> None:
    parsed = ask([["parse", published.text] for published in PUBLISHED])
    assert parsed == [list(MegatronLayout.parse(published.text).stages) for published in PUBLISHED]
    questions = [["validate", published.text, published.ranks, published.blocks, published.predicting] for published in PUBLISHED]
    assert ask(questions) == [None] * len(PUBLISHED)


def test_published_layouts_that_megatron_refuses(ask: Ask) -> None:
    """Recipes with more or fewer blocks than their model has: both refuse them for that."""
    for published in MISCOUNTED:
        (verdict,) = ask([["validate", published.text, published.ranks, published.blocks, published.predicting]])
        assert verdict is not None
        profile = ps.Profile([ps.Layer(f=1.0, i=1.0, w=1.0)] * (published.blocks + 2))
        with pytest.raises(PenstockError, match=rf"the layout has \d+ blocks \(t\), and the profile {published.blocks}"):
            read_megatron(published.text, profile, ranks=published.ranks, microbatches=64, kinds=published.kinds)


def test_plans_put_the_blocks_where_megatron_does(ask: Ask) -> None:
    """Plans of the planner, written as layouts: Megatron builds in each stage the blocks that the plan has there."""
    profile = ps.Profile.transformer(layers=22, hidden=512, heads=8, sequence=512, vocabulary=64000, flops=1e13)
    for schedules in (["1f1b"], ["interleaved-1f1b"]):
        plan = ps.plan(profile, ranks=4, microbatches=8, schedules=schedules, seconds=0.0)
        text = write_megatron(plan).text
        assert ask([["validate", text, 4, 22, 0]]) == [None]
        blocks = ask([["place", text, 4, stage] for stage in range(plan.placement.stages)])
        assert blocks == [
            [int(layer.name.removeprefix("block ")) for layer in plan.layers(stage) if layer.name.startswith("block")]
            for stage in range(plan.placement.stages)
        ]


def test_layouts_run_in_the_order_of_megatron(ask: Ask) -> None:
    """Megatron's table of microbatches and its warm-up give the actions of each rank; groups are whole."""
    draw = random.Random(2)
    plans, questions = [], []
    for _ in range(60):
        ranks, chunks, groups = draw.randint(2, 5), draw.randint(1, 3), draw.randint(1, 3)
        size = draw.randint(ranks, 2 * ranks)
        profile = ps.Profile([ps.Layer(f=1.0, i=1.0, w=1.0)] * (ranks * chunks))
        text = f"Et|{'t|' * (ranks * chunks - 2)}tL"
        plan = read_megatron(text, profile, ranks=ranks, microbatches=groups * size, group_size=size if chunks > 1 else None)
        plans.append(plan)
        questions += [["order", ranks, chunks, groups * size, size, rank] for rank in range(ranks)]
    answers = iter(ask(questions))
    for plan in plans:
        for rank in range(plan.placement.ranks):
            assert [str(action) for action in plan.schedule[rank]] == next(answers), f"{plan}, rank {rank}"


def test_a_smaller_last_group_takes_as_long_as_in_megatron(ask: Ask) -> None:
    """The orders differ there, and not the time on equal stages."""
    for ranks, chunks, microbatches, size in ((2, 2, 5, 3), (3, 2, 7, 4), (4, 3, 14, 5), (4, 2, 10, 6), (8, 3, 50, 17)):
        text, profile = f"Et|{'t|' * (ranks * chunks - 2)}tL", ps.Profile([ps.Layer(f=1.0, i=1.0, w=1.0)] * (ranks * chunks))
        plan = read_megatron(text, profile, ranks=ranks, microbatches=microbatches, group_size=size)
        rows = ask([["order", ranks, chunks, microbatches, size, rank] for rank in range(ranks)])
        theirs = ps.Schedule.from_actions(rows, plan.placement, microbatches=microbatches)
        assert theirs != plan.schedule
        assert ps.simulate(ps.lower(theirs), plan.costs).makespan == plan.predicted.makespan


def test_settings_on_the_page_exist(ask: Ask) -> None:
    """The page names settings in the second column of its table."""
    (known,) = ask([["list_settings"]])
    rows = [line.split(" | ") for line in text_of("docs/from-megatron.md").splitlines() if line.startswith("| `--")]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row[1])]
    assert len(named) > 12
    assert [name for name in named if name not in known] == []


def test_arguments_that_we_print_are_megatron_s(ask: Ask) -> None:
    """All but the batch size, which is a setting of the training script, not of megatron-core."""
    (known,) = ask([["list_settings"]])
    flags = {f"--{name.replace('_', '-')}" for name in known} | {flag for names in known.values() for flag in names}
    profile = ps.Profile([ps.Layer(name=name, f=1.0, i=1.0, w=1.0) for name in ("embedding", *["block"] * 6, "mtp", "head")])
    plan = read_megatron("Et|tt|tt|tmL", profile, ranks=2, microbatches=4)
    recomputed = replace(plan, recompute=(True,) * 4, bounds={"work": 0.0}, overall_bound=0.0)
    printed = write_megatron(recomputed).settings
    assert {"--mtp-num-layers", "--recompute-num-layers", "--microbatch-group-size-per-virtual-pipeline-stage"} <= set(printed)
    assert set(printed) - flags == {"--micro-batch-size"}
