"""Layouts of Megatron-Core and torchtitan, read and written."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from integrations.published_layouts import DEEPSEEK_LAYOUT, DOCUMENTED, PUBLISHED, Published
from penstock.errors import CostsError, FileFormatError, PlacementError, ScheduleError
from penstock.integrations.layouts import (
    TORCH_SCHEDULES,
    MegatronLayout,
    find_kinds,
    read_megatron,
    read_torchtitan,
    write_megatron,
    write_torchtitan,
)


def profile_of(*names: str) -> ps.Profile:
    """One layer per name, each with times of its own."""
    return ps.Profile([ps.Layer(name=name, f=1.0 + k / 8, i=1.0, w=0.5, activation=1.0) for k, name in enumerate(names)])


def model_of(blocks: int, predicting: int = 0) -> ps.Profile:
    return profile_of("embedding", *(f"block {k}" for k in range(blocks)), *(f"mtp {k}" for k in range(predicting)), "head")


# Megatron's text ------------------------------------------------------------------------------------------------------

stages = st.lists(st.sampled_from(["t", "tt", "ttt", "t" * 4, "t" * 13, ""]), min_size=1, max_size=8).flatmap(
    lambda middle: st.lists(st.sampled_from(middle), min_size=2, max_size=40)
)


@given(stages, st.integers(0, 2))
def test_a_layout_reads_back_from_its_text(middle: list[str], predicting: int) -> None:
    middle = [f"E{middle[0]}", *middle[1:-1], f"{middle[-1]}{'m' * predicting}L"]
    layout = MegatronLayout(tuple(middle))
    text = str(layout)
    assert MegatronLayout.parse(text) == layout
    assert len(text) <= len("|".join(middle))


@pytest.mark.parametrize(
    ("text", "unrolled"),
    [
        ("Ettt|(tt|)*29,m|L", ["Ettt", *["tt"] * 29, "m", "L"]),
        ("Et*3|(tt|)*2m|L", ["Ettt", "tt", "tt", "m", "L"]),
        ("E|(t*2|)*3,tL", ["E", "tt", "tt", "tt", "tL"]),
        ("E(tt|t|)*2,tL", ["Ett", "t", "tt", "t", "tL"]),
        ("E(|t)*2,L", ["E", "t", "tL"]),
        ("E|*3,L", ["E", "", "", "L"]),
        ("EtL", ["EtL"]),
        ("E,t,t*,2,|,L", ["Ettt", "L"]),
    ],
)
def test_texts_are_unrolled(text: str, unrolled: list[str]) -> None:
    assert MegatronLayout.parse(text).stages == tuple(unrolled)


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (["Ettt", *["tt"] * 29, "m", "L"], "Ettt|(tt|)*29,m|L"),
        (["E" + "t" * 5, "t" * 4, "t" * 4, "ttttmL"], "Et*5|t*4|t*4|t*4,mL"),
        (["E", *["tttttt"] * 6, "L"], "E|(t*6|)*6,L"),
        (["EttL"], "EttL"),
    ],
)
def test_repetitions_are_written_as_products(layout: list[str], text: str) -> None:
    assert str(MegatronLayout(tuple(layout))) == text


@pytest.mark.parametrize(
    ("text", "character", "reason"),
    [
        ("", 1, "it is empty"),
        ("Et|x|L", 4, "'x' is not one of E"),
        ("E t|L", 2, "' ' is not one of E"),
        ("Et|L ", 5, "' ' is not one of E"),
        ("Et*|L", 4, "needs a whole number"),
        ("Et*0|L", 4, "at least 1"),
        ("E,t*2*3|L", 6, "a second '*'"),
        ("*3t|L", 1, "repeats nothing"),
        ("E(tt|L", 2, "not closed"),
        ("E()*3|L", 2, "empty"),
        ("E(tt)|L", 2, "needs a number of repetitions"),
        ("E((t)*2|)*2L", 3, "within a group"),
        ("Et)*2|L", 3, "closes no group"),
        ("Et*99999999|L", 4, "more than 1000000 letters"),
        ("E(t*1000)*2000|L", 11, "more than 1000000 letters"),
        ("Et*٣|L", 4, "needs a whole number"),
    ],
)
def test_a_wrong_text_is_refused_with_its_place(text: str, character: int, reason: str) -> None:
    with pytest.raises(FileFormatError, match=re.escape(reason)) as caught:
        MegatronLayout.parse(text, "layout.txt")
    assert str(caught.value).startswith(f"layout.txt: character {character} of ")


@pytest.mark.parametrize(
    ("text", "ranks", "reason"),
    [
        ("Et|t|L", 2, "3 stages, which cannot be shared evenly among 2 ranks"),
        ("t|L", 2, "begins with its only E"),
        ("Et|t", 2, "ends with its only L"),
        ("Et|EtL", 2, "begins with its only E"),
        ("Em|tL", 2, "only behind the last t"),
        ("Et|m|mL", 3, "all m in one stage"),
        ("E|tm||L", 2, "m in the last stage of its rank, and it is in stage 1: rank 1 also has stage 3"),
    ],
)
def test_layouts_that_megatron_refuses_are_refused(text: str, ranks: int, reason: str) -> None:
    with pytest.raises(PlacementError, match=re.escape(reason)):
        MegatronLayout.parse(text).check(ranks)


@pytest.mark.parametrize("published", PUBLISHED, ids=str)
def test_published_layouts_are_read(published: Published) -> None:
    layout = MegatronLayout.parse(published.text)
    layout.check(published.ranks)
    assert MegatronLayout.parse(str(layout)) == layout


def test_the_table_of_megatron_s_docstring() -> None:
    """Ranks by virtual stages, as `pretty_repr` shows them."""
    layout = MegatronLayout.parse(DOCUMENTED[1].text)
    table = {rank: [layout.stages[rank], layout.stages[16 + rank]] for rank in range(16)}
    assert table == {0: ["Ett", "tt"], **{rank: ["tt", "tt"] for rank in range(1, 14)}, 14: ["tt", "m"], 15: ["tt", "L"]}


# Kinds of layers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "kinds"),
    [
        (["embedding", "block 0", "block 1", "head"], "EttL"),  # Profile.transformer
        (["0 Embedding", "1 Block", "2 Block", "3 Head"], "EttL"),  # a measured list of layers
        (["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm + lm_head"], "EttL"),  # a measured Llama
        (["transformer.wte + transformer.wpe + transformer.drop", "transformer.h.0", "transformer.ln_f + lm_head"], "EtL"),  # GPT-2
        (["tok_embeddings", "layers.0", "layers.1", "norm", "lm_head"], "EttLL"),  # torchtitan, by split=Layers(...)
        (["embedding", "block 0", "mtp 0", "head"], "EtmL"),
        (["", "", ""], "ttt"),
        (["0 MultiHeadBlock", "1 MultiHeadBlock"], "tt"),
        (["block 0", "norm", "block 1"], "ttt"),  # a norm between blocks is no head
        (["embedding", "block 0", "unembedding"], "EtL"),
    ],
)
def test_kinds_come_from_the_names_of_layers(names: list[str], kinds: str) -> None:
    assert find_kinds(profile_of(*names)) == kinds


def test_estimates_have_the_kinds_of_their_layers() -> None:
    assert find_kinds(DEEPSEEK_LAYOUT.profile(None)) == "E" + "t" * 62 + "L"


def test_measured_models_have_the_kinds_of_their_layers() -> None:
    import torch
    from torch import nn

    from penstock.runtime.measure.profile import profile

    class Head(nn.Linear):
        pass

    layers = [nn.Embedding(10, 4), nn.Linear(4, 4), nn.Linear(4, 4), Head(4, 10)]
    measured = profile(layers, torch.zeros(2, 3, dtype=torch.long), warmup=0, repeats=1)
    assert find_kinds(measured) == "EttL"


def test_explicit_kinds_replace_the_names() -> None:
    profile = profile_of(*"abcdef")
    plan = read_megatron("Et|tm|L", profile, ranks=3, microbatches=3, kinds="E*2,t*2,m,L")
    assert plan.partition == (3, 2, 1)
    with pytest.raises(CostsError, match="5 kinds of layers for a profile of 6 layers"):
        read_megatron("Et|tm|L", profile, ranks=3, microbatches=3, kinds="E,t*3,L")
    with pytest.raises(CostsError, match="in this order, got tEtttL"):
        read_megatron("Et|tm|L", profile, ranks=3, microbatches=3, kinds="tEtttL")
    with pytest.raises(FileFormatError, match="kinds of layers: character 2 "):
        read_megatron("Et|tm|L", profile, ranks=3, microbatches=3, kinds="Ex")


# From and to plans ----------------------------------------------------------------------------------------------------


@st.composite
def cut_models(draw: st.DrawFn) -> tuple[ps.Profile, list[int], int]:
    """A profile, its layers per stage, and a number of ranks that the stages can be shared among."""
    ranks, chunks = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    sizes = draw(st.lists(st.integers(1, 4), min_size=ranks * chunks, max_size=ranks * chunks))
    sizes[0] += 1
    sizes[-1] += 1
    blocks = sum(sizes)
    ends = draw(st.booleans())
    return (model_of(blocks - 2) if ends else profile_of(*[""] * blocks)), sizes, ranks


@given(cut_models())
def test_plans_survive_megatron_s_text(case: tuple[ps.Profile, list[int], int]) -> None:
    profile, sizes, ranks = case
    kinds = find_kinds(profile)
    parts = [kinds[first:last] for first, last in pairwise([0, *accumulate(sizes)])]
    text = "|".join(parts) if "E" in kinds else f"E{'|'.join(parts)}L"
    plan = read_megatron(text, profile, ranks=ranks, microbatches=2 * ranks)
    assert plan.partition == tuple(sizes)
    assert plan.placement.copies == (tuple(stage % ranks for stage in range(len(sizes))),)
    assert plan.schedule == ps.schedule("1f1b", ranks, 2 * ranks) or plan.placement.chunks > 1
    export = write_megatron(plan)
    assert MegatronLayout.parse(export.text) == MegatronLayout.parse(text)
    again = read_megatron(export.text, profile, ranks=ranks, microbatches=2 * ranks)
    assert (again.partition, again.schedule, again.objective) == (plan.partition, plan.schedule, plan.objective)


@given(cut_models())
def test_plans_survive_torchtitan_s_names(case: tuple[ps.Profile, list[int], int]) -> None:
    profile, sizes, ranks = case
    blocks = find_kinds(profile).count("t")
    names = [["tok_embeddings"], *([f"layers.{k}"] for k in range(blocks)), ["norm", "lm_head"]]
    if len(profile) == blocks:
        names = [[*names[0], *names[1]], *names[2:-2], [*names[-2], *names[-1]]]
    parts = [[name for layer in names[first:last] for name in layer] for first, last in pairwise([0, *accumulate(sizes)])]
    plan = read_torchtitan(json.dumps(parts), profile, ranks=ranks, microbatches=2 * ranks)
    assert plan.partition == tuple(sizes)
    export = write_torchtitan(plan)
    assert json.loads(export.text) == parts
    assert export.settings["--parallelism.pipeline_parallel_schedule"] == ("1F1B" if len(sizes) == ranks else "Interleaved1F1B")
    assert export.settings["--parallelism.pipeline_parallel_degree"] == str(ranks)


@pytest.mark.parametrize("group_size", [None, 4, 6, 12])
def test_the_group_size_is_read_and_written(group_size: int | None) -> None:
    plan = read_megatron("Et|t|t|t|t|t|t|tL", model_of(8), ranks=4, microbatches=12, group_size=group_size)
    assert plan.schedule == ps.schedule("interleaved-1f1b", 4, 12, chunks=2, group_size=group_size or 4)
    export = write_megatron(plan)
    assert export.settings["--microbatch-group-size-per-virtual-pipeline-stage"] == str(group_size or 4)
    assert not any("instead of" in note for note in export.notes)


@pytest.mark.parametrize(
    ("microbatches", "group_size", "reason"),
    [
        (3, None, "3 microbatches on 4 ranks"),
        (10, None, "10 microbatches in groups of 4: .*group_size=5 would do"),
        (12, 3, "groups of 4 to 12"),
        (12, 13, "groups of 4 to 12"),
        (12, 5, "leave none or at least 4 for the last one"),
        (12, "eight", "groups of 'eight'"),
    ],
)
def test_group_sizes_that_megatron_refuses_are_refused(microbatches: int, group_size: Any, reason: str) -> None:
    with pytest.raises(ScheduleError, match=reason):
        read_megatron("Et|t|t|t|t|t|t|tL", model_of(8), ranks=4, microbatches=microbatches, group_size=group_size)
    if group_size is not None:
        with pytest.raises(ScheduleError, match="this one has one"):
            read_megatron("Et|t|t|tL", model_of(4), ranks=4, microbatches=microbatches, group_size=group_size)


@pytest.mark.parametrize("name", ["zbv", "v-half", "hanayo", "dualpipe", "chimera"])
def test_placements_that_megatron_cannot_express_are_refused_with_the_way_out(name: str) -> None:
    plan = ps.plan(model_of(14), ranks=4, microbatches=8, schedules=[name], seconds=0.0)
    with pytest.raises(PlacementError, match=rf"{plan.placement.kind} placement.*schedules=\['1f1b', 'interleaved-1f1b'\]"):
        write_megatron(plan)


def test_an_order_that_megatron_does_not_have_is_noted_with_its_own_time() -> None:
    plan = ps.plan(model_of(14), ranks=4, microbatches=8, schedules=["zb-h1"], seconds=0.0)
    export = write_megatron(plan)
    own = ps.simulate(ps.lower(ps.schedule("1f1b", 4, 8)), plan.costs).makespan
    (note,) = (note for note in export.notes if "instead of" in note)
    assert own > plan.predicted.makespan
    assert f"Megatron runs 1f1b on these stages, not zb-h1: {own:.6g} instead of {plan.predicted.makespan:.6g}" in note
    same = ps.plan(model_of(14), ranks=4, microbatches=8, schedules=["1f1b"], seconds=0.0)
    assert not any("instead of" in note for note in write_megatron(same).notes)


def test_an_order_of_megatron_that_exceeds_the_limit_is_noted() -> None:
    plan = ps.plan(model_of(30), ranks=4, microbatches=8, schedules=["grouped-interleaved"], seconds=0.0)
    peak = max(plan.predicted.peak_memory)
    tight = ps.plan(model_of(30), ranks=4, microbatches=8, schedules=["grouped-interleaved"], memory_limit=peak, seconds=0.0)
    (note,) = (note for note in write_megatron(tight).notes if "instead of" in note)
    assert re.search(rf"rank \d holds [\d.]+, over its limit of {peak:g}", note)


def test_recompute_is_written_if_all_stages_recompute_and_noted_otherwise() -> None:
    plan = ps.plan(model_of(6), ranks=4, microbatches=8, schedules=["1f1b"], seconds=0.0)
    whole = replace(plan, recompute=(True,) * 4, bounds={"work": 0.0}, overall_bound=0.0)
    settings = write_megatron(whole).settings
    assert settings["--recompute-granularity"] == "full"
    assert settings["--recompute-num-layers"] == str(max(stage.count("t") for stage in write_megatron(plan).text.split("|")))
    partly = replace(plan, recompute=(True, False, True, False), bounds={"work": 0.0}, overall_bound=0.0)
    assert any("recomputes only stages 0, 2" in note for note in write_megatron(partly).notes)
    assert not any("--recompute" in name for name in [*write_megatron(partly).settings, *write_megatron(plan).settings])


def test_a_profile_of_blocks_gets_both_ends() -> None:
    profile = profile_of(*[""] * 8)
    plan = ps.plan(profile, ranks=4, microbatches=4, schedules=["1f1b"], seconds=0.0)
    export = write_megatron(plan)
    parts = export.text.split("|")
    assert (parts[0][0], parts[-1][-1]) == ("E", "L")
    assert [part.count("t") for part in parts] == list(plan.partition)
    assert any("no embedding and no head" in note for note in export.notes)
    with pytest.raises(PlacementError, match="'t' is in stage 2 and 'L' in stage 3, but both are layer 7 of the profile"):
        read_megatron("Ett|tt|tttt|L", profile, ranks=4, microbatches=4)


def test_layers_of_one_module_are_not_cut_apart() -> None:
    profile = profile_of("tok_embeddings", "layers.0", "layers.1", "norm", "lm_head")
    plan = read_torchtitan('[["tok_embeddings", "layers.0"], ["layers.1", "norm"], ["lm_head"]]', profile, ranks=3, microbatches=3)
    assert plan.partition == (2, 2, 1)
    assert json.loads(write_torchtitan(plan).text) == [["tok_embeddings", "layers.0"], ["layers.1", "norm"], ["lm_head"]]
    with pytest.raises(PlacementError, match=r"cuts between layer 3 \('norm'\) and layer 4 \('lm_head'\), at the beginning of stage 2"):
        write_megatron(plan)
    one_head = profile_of("embedding", "block", "block", "head")
    with pytest.raises(
        PlacementError, match=r"'norm' is in stage 1 and 'lm_head' in stage 2, but both are layer 3 of the profile \('head'\)"
    ):
        read_torchtitan('[["tok_embeddings", "layers.0"], ["layers.1", "norm"], ["lm_head"]]', one_head, ranks=3, microbatches=3)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Et|tt|ttL", r"the layout has 5 blocks \(t\), and the profile 6: its layers are taken for Et\*6,L; .*--kinds"),
        ("Ettt|tt|tmL", r"1 layers of multi-token prediction \(m\), and the profile 0"),
        ("Etttttt||L", "stage 1 holds no layer"),
    ],
)
def test_a_layout_of_another_model_is_refused(text: str, reason: str) -> None:
    with pytest.raises(PlacementError, match=reason):
        read_megatron(text, model_of(6), ranks=3, microbatches=3)


@pytest.mark.parametrize(
    ("parts", "error", "reason"),
    [
        ("{}", FileFormatError, "not a list of lists"),
        ("[]", FileFormatError, "not a list of lists"),
        ("[[1]]", FileFormatError, "not a list of lists"),
        ("[", FileFormatError, "not a JSON list of lists"),
        (
            '[["tok_embeddings", "layers.1"], ["layers.0", "norm", "lm_head"]]',
            PlacementError,
            "part 0 has 'layers.1' where 'layers.0' is due",
        ),
        ('[["tok_embeddings", "layers.0"], ["layers.1", "norm"]]', PlacementError, "'lm_head' is in no part"),
        ('[["tok_embeddings", "layers.0"], ["layers.1", "norm", "lm_head", "x"]]', PlacementError, "part 1 has 'x' where nothing is due"),
        ('[["tok_embeddings"], ["layers.0"], ["layers.1", "norm", "lm_head"]]', PlacementError, "3 stages, which cannot be shared"),
    ],
)
def test_wrong_module_names_are_refused(parts: str, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        read_torchtitan(parts, model_of(2), ranks=2, microbatches=2)


def test_torchtitan_s_limits_are_said() -> None:
    with pytest.raises(PlacementError, match="no multi-token prediction"):
        write_torchtitan(read_megatron("Et|tmL", model_of(2, predicting=1), ranks=2, microbatches=2))
    for name in ("dualpipe", "hanayo"):
        plan = ps.plan(model_of(14), ranks=4, microbatches=8, schedules=[name], seconds=0.0)
        with pytest.raises(PlacementError, match=f"{plan.placement.kind} placement: plan with schedules="):
            write_torchtitan(plan)


@pytest.mark.parametrize("name", [*TORCH_SCHEDULES, "zb-h1", "v-half", "grouped-interleaved"])
def test_torchtitan_gets_torch_s_name_of_the_schedule_or_a_file(name: str) -> None:
    plan = ps.plan(model_of(14), ranks=4, microbatches=8, schedules=[name], seconds=0.0)
    export = write_torchtitan(plan)
    schedule = export.settings["--parallelism.pipeline_parallel_schedule"]
    if name in TORCH_SCHEDULES:
        assert schedule == TORCH_SCHEDULES[name]
        assert "--parallelism.pipeline_parallel_schedule_csv" not in export.settings
    else:
        assert schedule == {"linear": "1F1B", "looped": "PipelineScheduleMulti", "v": "ZBVZeroBubble"}[plan.placement.kind]
        assert any("penstock convert PLAN schedule.csv" in note for note in export.notes)


# Plans of layouts -----------------------------------------------------------------------------------------------------


def test_a_plan_of_a_layout_can_be_saved_and_is_proved(tmp_path) -> None:
    profile = DEEPSEEK_LAYOUT.profile(None)
    plan = read_megatron(DEEPSEEK_LAYOUT.text, profile, ranks=16, microbatches=32, kinds=DEEPSEEK_LAYOUT.kinds)
    assert plan.partition == (4, *[2] * 29, 1, 1)
    plan.save(tmp_path / "plan.json")
    again = ps.Plan.load(tmp_path / "plan.json")
    assert (again.partition, again.objective, again.notes) == (plan.partition, plan.objective, plan.notes)
    assert DEEPSEEK_LAYOUT.text in again.report()
    assert 0 < plan.overall_bound <= plan.bound <= plan.objective


@pytest.mark.slow
@settings(max_examples=15)
@given(cut_models(), st.integers(1, 3))
def test_bounds_of_a_layout_hold_for_the_planner(case: tuple[ps.Profile, list[int], int], rounds: int) -> None:
    """The planner finds nothing below the overall bound."""
    profile, sizes, ranks = case
    kinds = find_kinds(profile)
    parts = [kinds[first:last] for first, last in pairwise([0, *accumulate(sizes)])]
    text = "|".join(parts) if "E" in kinds else f"E{'|'.join(parts)}L"
    layout = read_megatron(text, profile, ranks=ranks, microbatches=rounds * ranks)
    planned = ps.plan(profile, ranks=ranks, microbatches=rounds * ranks, seconds=5.0, rounds=20)
    assert layout.overall_bound <= planned.objective * (1 + 1e-9)
