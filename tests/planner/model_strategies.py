"""Small models for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

import penstock as ps

numbers = st.integers(0, 12).map(float)


@st.composite
def models(draw: st.DrawFn, most: int = 8) -> ps.Profile:
    count = draw(st.integers(1, most))
    names = ("f", "i", "w", "activation", "weight_stash", "workspace", "output", "parameters")
    layers = [ps.Layer(**{name: draw(numbers) for name in names}) for _ in range(count)]
    return ps.Profile(layers, input=draw(numbers), keeps_output=draw(st.booleans()))
