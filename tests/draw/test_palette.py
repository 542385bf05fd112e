"""The colours can be read and told apart."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from rich.color import Color, ColorSystem

from penstock.draw.palette import BASIC_INK, OPTIMIZER, TONES, ink_on, shade
from penstock.ir.kind import COMPUTE, WORK, Kind

ALL = list(dict.fromkeys(TONES.values()))

# Machado, Oliveira and Fernandes, "A physiologically-based model for simulation of color vision deficiency" (2009), severity 1,
# on linear RGB; and for the two common ones also Viénot, Brettel and Mollon (1999).
VISION = {
    "usual": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "protanopia, Viénot": [[0.11238, 0.88762, 0.0], [0.11238, 0.88762, 0.0], [0.00401, -0.00401, 1.0]],
    "deuteranopia, Viénot": [[0.29275, 0.70725, 0.0], [0.29275, 0.70725, 0.0], [-0.02234, 0.02234, 1.0]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def linear(colour: str) -> np.ndarray:
    """Linear RGB of a hexadecimal colour."""
    value = np.array([int(colour[k : k + 2], 16) for k in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIE L*a*b* of linear RGB."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(np.clip(to_xyz @ rgb, 1e-6, None) / [0.9505, 1.0, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def luminance(colour: str) -> float:
    return float(linear(colour) @ [0.2126, 0.7152, 0.0722])


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_every_kind_has_a_tone_and_each_compute_kind_its_own():
    assert set(TONES) == set(Kind)
    assert len({TONES[kind] for kind in (Kind.F, Kind.B, Kind.I, Kind.W, Kind.OVERLAP_F_B)}) == 5
    assert TONES[Kind.SEND_F] != TONES[Kind.RECV_F]


@pytest.mark.parametrize("tone", ALL, ids=lambda tone: tone.sample)
def test_ink_is_readable_on_its_fill(tone):
    """A contrast of at least 4.5 to 1, as accessibility guidelines require for small text, and the better of black and white."""
    inks = {ink: contrast(ink, tone.fill) for ink in ("#000000", "#ffffff")}
    assert inks[tone.ink] == max(inks.values()) >= 4.5


@pytest.mark.parametrize("vision", VISION)
def test_fills_can_be_told_apart_with_colour_blindness(vision):
    """A difference of 10 in L*a*b* is visible at a glance."""
    seen = {tone.sample: lab(np.clip(np.array(VISION[vision]) @ linear(tone.fill), 0, 1)) for tone in ALL}
    nearest = {(a, b): float(np.linalg.norm(seen[a] - seen[b])) for a, b in combinations(seen, 2)}
    assert min(nearest.values()) > 10, min(nearest, key=nearest.__getitem__)


def test_fills_can_be_told_apart_with_16_colours():
    assert len({Color.parse(tone.fill).downgrade(ColorSystem.EIGHT_BIT).number for tone in ALL}) == len(ALL)
    assert len({Color.parse(tone.basic).number for tone in ALL}) == len(ALL)


SHADES = {f"{kind.name}{chunk}": shade(TONES[kind], chunk, 2) for kind in COMPUTE for chunk in (0, 1)}


@pytest.mark.parametrize("vision", VISION)
def test_kinds_and_two_chunks_can_be_told_apart_with_colour_blindness(vision):
    seen = {name: lab(np.clip(np.array(VISION[vision]) @ linear(tone.fill), 0, 1)) for name, tone in SHADES.items()}
    nearest = {(a, b): float(np.linalg.norm(seen[a] - seen[b])) for a, b in combinations(seen, 2)}
    assert min(nearest.values()) > 10, min(nearest, key=nearest.__getitem__)


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 8])
def test_no_chunk_of_a_kind_looks_like_one_of_another_kind(vision, chunks):
    seen = {
        (kind, chunk): lab(np.clip(np.array(VISION[vision]) @ linear(shade(TONES[kind], chunk, chunks).fill), 0, 1))
        for kind in COMPUTE
        for chunk in range(chunks)
    }
    apart = {(a, b): float(np.linalg.norm(seen[a] - seen[b])) for a, b in combinations(seen, 2) if a[0] != b[0]}
    assert min(apart.values()) > 15, min(apart, key=apart.__getitem__)


def test_the_studio_has_the_same_colours():
    source = (Path(__file__).parents[2] / "web" / "src" / "draw" / "colours.ts").read_text()
    fills = dict(re.findall(r'^  ([FBIWST]|MEET): \{.*fill: "(#\w+)"', source, flags=re.MULTILINE))
    assert fills == {kind.name: TONES[kind].fill for kind in WORK} | {"MEET": TONES[Kind.BROADCAST].fill}
    ranges = {
        name: tuple(map(float, text.split(","))) for name, text in re.findall(r"^const (DARKER|LIGHTER) = \[(.*)\];", source, re.MULTILINE)
    }
    shades = re.search(r"^const SHADES.*= \{ (.*) \};", source, re.MULTILINE)
    assert shades is not None
    assert {kind: ranges[name] for kind, name in re.findall(r"(\w): (\w+)", shades[1])} == {
        kind.name: TONES[kind].shades for kind in COMPUTE
    }


@pytest.mark.parametrize("chunks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("kind", COMPUTE)
def test_shades_go_from_dark_to_light_with_readable_ink(kind, chunks):
    shades = [shade(TONES[kind], chunk, chunks) for chunk in range(chunks)]
    light = [luminance(tone.fill) for tone in shades]
    assert light == sorted(set(light))
    for tone in shades:
        inks = {ink: contrast(ink, tone.fill) for ink in ("#000000", "#ffffff")}
        assert inks[tone.ink] == max(inks.values()) >= 4.5
        assert tone.basic == TONES[kind].basic
    assert shades == [TONES[kind]] or chunks > 1


def test_the_optimizer_has_its_own_colours():
    assert OPTIMIZER.ink == ink_on(OPTIMIZER.fill)
    assert contrast(OPTIMIZER.ink, OPTIMIZER.fill) >= 4.5
    assert len(BASIC_INK) == len(ALL) + 1
