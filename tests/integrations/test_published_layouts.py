"""Published layouts on estimates of their models, against plans for the same profile, ranks and memory."""

from __future__ import annotations

from itertools import groupby

import pytest

import penstock as ps
from integrations.published_layouts import DEEPSEEK_LAYOUT, DOCUMENTED, RECIPE_LAYOUTS, Published
from penstock.integrations.layouts import MegatronLayout, read_megatron, write_megatron

MEGATRON = ["1f1b", "interleaved-1f1b"]


def compare(published: Published, profile: ps.Profile, schedules: list[str]) -> tuple[ps.Plan, ps.Plan]:
    """The published layout, and a plan in no more memory than the layout takes on its fullest rank."""
    layout = read_megatron(published.text, profile, ranks=published.ranks, microbatches=64, kinds=published.kinds)
    limit = max(layout.predicted.peak_memory)
    options = {"schedules": schedules, "memory_limit": limit, "headroom": 0.0, "seconds": 0.0}
    return layout, ps.plan(profile, ranks=published.ranks, microbatches=64, **options)


BEHIND = {("Ett|(tt|)*29,m|L", 50e9, 1): 0.006}
"""Layouts, bandwidths and heads for which the planner stays behind with Megatron's schedules alone, and by how much: its cuts have the same
load on the slowest rank, and no shift of one cut makes them faster."""

BANDWIDTHS = [None, 200e9, 50e9]
"""Bandwidths of all-to-alls: from unlimited, with equal blocks, to one that makes dense blocks half as long as the others."""


@pytest.mark.slow
@pytest.mark.parametrize(("expert_bandwidth", "heads"), [*zip(BANDWIDTHS, (2, 2, 1), strict=True)])
@pytest.mark.parametrize("published", DOCUMENTED, ids=str)
def test_the_planner_is_not_slower_with_megatron_s_own_schedules(published: Published, expert_bandwidth: float | None, heads: int) -> None:
    """The plan is a layout too, and takes the same time when it is read again. A second run of the head is for multi-token prediction."""
    profile = published.profile(expert_bandwidth, heads)
    layout, plan = compare(published, profile, MEGATRON)
    behind = BEHIND.get((published.text, expert_bandwidth, heads), 0.0)
    assert plan.predicted.makespan <= layout.predicted.makespan * (1 + behind)
    assert max(plan.predicted.peak_memory) <= max(layout.predicted.peak_memory) * (1 + 1e-9)
    export = write_megatron(plan, published.kinds)
    MegatronLayout.parse(export.text).check(published.ranks)
    group_size = export.settings.get("--microbatch-group-size-per-virtual-pipeline-stage")
    again = read_megatron(
        export.text,
        profile,
        ranks=published.ranks,
        microbatches=64,
        kinds=published.kinds,
        group_size=None if group_size is None else int(group_size),
    )
    assert again.predicted.makespan == pytest.approx(plan.predicted.makespan, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("expert_bandwidth", BANDWIDTHS)
@pytest.mark.parametrize("published", DOCUMENTED, ids=str)
def test_the_planner_is_never_slower_with_other_schedules(published: Published, expert_bandwidth: float | None) -> None:
    layout, plan = compare(published, published.profile(expert_bandwidth, 1), [*MEGATRON, "zbv", "dualpipe-v"])
    assert plan.predicted.makespan <= layout.predicted.makespan


@pytest.mark.slow
def test_schedules_that_megatron_lacks_are_faster_still() -> None:
    """The figures of docs/from-megatron.md: the layout takes 6.8% longer than Megatron's schedules need, and 11% longer than zbv."""
    profile = DEEPSEEK_LAYOUT.profile(200e9)
    layout, megatron = compare(DEEPSEEK_LAYOUT, profile, MEGATRON)
    _, other = compare(DEEPSEEK_LAYOUT, profile, ["zbv", "dualpipe-v"])
    assert other.name == "zbv"
    assert layout.predicted.makespan / megatron.predicted.makespan == pytest.approx(1.068, abs=5e-4)
    assert layout.predicted.makespan / other.predicted.makespan == pytest.approx(1.11, abs=5e-3)


def by_recipe(published: Published) -> tuple[str, int]:
    return published.source, published.ranks


def recipe_profile(published: Published) -> ps.Profile:
    return published.profile(200e9, heads=1 + published.predicting)


def compare_layout(published: Published) -> ps.Plan:
    return read_megatron(published.text, recipe_profile(published), ranks=published.ranks, microbatches=64, kinds=published.kinds)


FASTER = {"deepseek_v3 on 8": 1.024, "kimi_k2 on 8": 1.025, "moonlight_16b on 2": 1.067, "moonlight_16b on 4": 1.117}
"""How many times as long as the plan the fastest layout of a recipe takes, at least: the figures of docs/from-megatron.md."""
RECIPES = {
    f"{source.rpartition('/')[2].removesuffix('.py')} on {ranks}": list(layouts)
    for (source, ranks), layouts in groupby(sorted(RECIPE_LAYOUTS, key=by_recipe), by_recipe)
}
"""The layouts that a recipe has for a number of ranks."""


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_the_planner_is_not_slower_than_recipes(name: str) -> None:
    """In the memory of the fastest layout, with Megatron's own schedules."""
    layouts = [(compare_layout(published), published) for published in RECIPES[name]]
    fastest, published = min(layouts, key=lambda entry: entry[0].predicted.makespan)
    _, plan = compare(published, recipe_profile(published), MEGATRON)
    assert fastest.predicted.makespan / plan.predicted.makespan >= FASTER.get(name, 1.0)
    assert max(plan.predicted.peak_memory) <= max(fastest.predicted.peak_memory) * (1 + 1e-9)
