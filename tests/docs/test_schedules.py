"""Figures of the schedules on the pages and in the README equal the simulator's."""

from __future__ import annotations

import pytest

import penstock as ps
from maker.advice import advice
from maker.figures import Figures, measured
from maker.formulas import FORMULAS, messages_of
from maker.pictures import pictures
from maker.table import README, readme_table, with_table
from penstock.schedules.registry import algorithms


def test_the_readme_contains_the_generated_table() -> None:
    text = README.read_text(encoding="utf-8")
    assert readme_table() in text, "run python docs/maker/table.py to write it"
    assert with_table(text) == text


def test_every_schedule_has_advice_a_formula_and_a_picture() -> None:
    names = set(ps.available())
    assert set(advice()) == set(FORMULAS) == names
    assert {f"pictures/schedules/{name}.svg" for name in names} <= set(pictures())


@pytest.mark.parametrize("name", sorted(algorithms()))
def test_formulas_match_the_simulator(name: str) -> None:
    """Idle time, peak memory and messages, for shapes with whole groups."""
    known = FORMULAS[name]
    for ranks in {"data-parallel": (1,), "dualpipe": (2, 4, 6), "chimera": (2, 4, 6), "v-half": (3, 4, 5, 8)}.get(name, (2, 3, 4, 8)):
        group = -(-ranks // 2) if name == "grouped-interleaved" else 1
        for microbatches in (2 * ranks * group, 3 * ranks * group):
            found = measured(name, ranks, microbatches, known.times)
            schedule = ps.schedule(name, ranks=ranks, microbatches=microbatches)
            shape = (ranks, microbatches, schedule.stages // ranks)
            if known.idle is not None:
                idle, said = found.span_idle if known.of_span else found.idle, known.idle(*shape, known.times)
                assert idle <= said + 1e-9 if known.at_most else idle == pytest.approx(said, abs=1e-9)
            if known.peak is not None:
                assert found.peak == pytest.approx(known.peak(*shape))
            assert found.messages == messages_of(name, schedule.placement.kind)[1](*shape)
            assert ps.verify(ps.lower(schedule)).messages == found.messages


@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 16), (8, 32), (16, 64)])
def test_comparisons_in_the_advice_are_true(ranks: int, microbatches: int) -> None:
    found = {name: measured(name, ranks, microbatches) for name in ps.available()}
    plain = found["1f1b"]

    def share(name: str, of: Figures = plain) -> tuple[float, float, float]:
        each = found[name]
        return each.idle / of.idle, each.peak / of.peak, each.messages / of.messages

    assert share("zbv") == pytest.approx((1 / 6, 1, 2))
    assert share("zb-h1") == pytest.approx((1 / 3, 1, 1))
    assert found["zb-h2"].idle == found["zb-h1"].idle
    assert found["zb-h2"].span_idle == pytest.approx(0)
    assert found["zb-h2"].peak == 2 * plain.peak - 1
    assert share("interleaved-zb")[:2] == pytest.approx((1 / 6, 1))
    idle, peak, messages = share("v-half")
    assert idle < 1 / 2
    assert peak < 0.8
    assert found["v-min"].idle < plain.idle
    assert found["v-min"].peak < found["v-half"].peak
    assert share("1f1b-v")[0] <= 1
    assert share("1f1b-v")[2] == 2
    assert found["chimera"].idle > plain.idle * (ranks >= 8)
    idle, peak, _ = share("grouped-interleaved", found["interleaved-1f1b"])
    assert 0.4 < peak < 0.6
    assert 0.7 < idle < 1.1
    sliced = measured("seq1f1b", ranks, microbatches, slices=ranks)
    assert (sliced.idle, sliced.peak) == pytest.approx((plain.idle / ranks, 2 - 1 / ranks))
    assert measured("seq-zb-h1", ranks, microbatches, slices=ranks).idle == pytest.approx(found["zb-h1"].idle / ranks)
    slim = measured("slimpipe", ranks, microbatches, slices=ranks)
    assert (slim.idle, slim.peak) == pytest.approx((sliced.idle / 2, 1 + 2 * (ranks - 1) / (2 * ranks)))
    assert 1.8 < slim.messages / sliced.messages < 2.5
    assert min(each.messages for each in found.values() if each.messages) == found["inference"].messages
    assert messages == 2
