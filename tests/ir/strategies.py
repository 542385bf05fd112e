"""What hypothesis draws: actions, placements, graphs and tables that need not make sense."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from penstock.ir import codes
from penstock.ir.action import Action, pack_action
from penstock.ir.graph import StageGraph
from penstock.ir.kind import COMPUTE, RECEIVES, SEND_WAITS, SENDS, SPREAD, Kind
from penstock.ir.placement import Placement
from penstock.ir.rows import Rows

stages = st.integers(0, codes.MAX_STAGES - 1)
microbatches = st.integers(0, codes.MAX_MICROBATCHES - 1)
compute_actions = st.builds(Action, stages, st.sampled_from(COMPUTE), microbatches)
messages = st.builds(Action, stages, st.sampled_from((*SENDS, *RECEIVES)), microbatches)
peer_messages = st.builds(
    lambda ends, kind, microbatch: Action(ends[0], kind, microbatch, peer=ends[1]),
    st.lists(stages, min_size=2, max_size=2, unique=True),
    st.sampled_from((*SENDS, *RECEIVES, *SEND_WAITS)),
    microbatches,
)
stage_actions = st.builds(Action, stages, st.sampled_from((Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD)))
waits = st.one_of(
    st.builds(Action, stages, st.sampled_from(SEND_WAITS), microbatches), st.builds(Action, stages, st.just(Kind.WAIT_REDUCE_GRAD))
)
"""Known to PyTorch since 2.15."""
overlaps = st.lists(compute_actions, min_size=2, max_size=4).map(lambda parts: Action.overlap(*parts))
spread = st.builds(Action, stages, st.sampled_from(SPREAD), microbatches)
torch_actions = st.one_of(compute_actions, messages, stage_actions, overlaps)
actions = st.one_of(torch_actions, waits, peer_messages, spread)


@st.composite
def placements(draw: st.DrawFn, most_ranks: int = 4) -> Placement:
    """One of every family, custom maps of one to three copies included."""
    ranks = draw(st.integers(1, most_ranks))
    family = draw(st.sampled_from(("linear", "looped", "v", "wave", "bidirectional", "custom")))
    if family in ("looped", "wave"):
        return getattr(Placement, family)(ranks, draw(st.integers(1, 3)))
    if family == "custom":
        length = draw(st.integers(1, 6))
        maps = st.lists(st.integers(0, ranks - 1), min_size=length, max_size=length)
        return Placement.custom(*draw(st.lists(maps, min_size=1, max_size=3)), ranks=ranks)
    return getattr(Placement, family)(ranks)


@st.composite
def graphs(draw: st.DrawFn, num_stages: int) -> StageGraph:
    """The chain with up to three further edges."""
    pairs = [(a, b) for a in range(num_stages) for b in range(a + 2, num_stages)]
    return StageGraph.chain(num_stages, draw(st.lists(st.sampled_from(pairs), max_size=3)) if pairs else ())


@st.composite
def small_actions(draw: st.DrawFn, num_stages: int, num_microbatches: int) -> Action:
    """An action of few stages and microbatches, sometimes one past the counts, so that draws meet each other."""
    stage, microbatch = draw(st.integers(0, num_stages)), draw(st.integers(0, num_microbatches))
    kind = draw(st.sampled_from([kind for kind in Kind if kind is not Kind.OVERLAP_F_B]))
    peer = draw(st.integers(0, num_stages)) if (kind.is_communication or kind.is_send_wait) and draw(st.booleans()) else stage
    return Action(stage, kind, microbatch if kind.has_microbatch else None, peer=None if peer == stage else peer)


@st.composite
def grouped(draw: st.DrawFn, num_stages: int, num_microbatches: int) -> Action:
    """A small action, or two or three overlapped ones."""
    parts = draw(st.lists(small_actions(num_stages, num_microbatches), min_size=1, max_size=3))
    computing = [part for part in parts if part.kind in COMPUTE]
    return Action.overlap(*computing) if len(computing) > 1 else parts[0]


def row_lists(num_ranks: int, num_stages: int = 3, num_microbatches: int = 3, longest: int = 8) -> st.SearchStrategy[list[list[Action]]]:
    """Random rows, one per rank."""
    row = st.lists(grouped(num_stages, num_microbatches), max_size=longest)
    return st.lists(row, min_size=num_ranks, max_size=num_ranks)


def packed(rows: list[list[Action]]) -> Rows:
    """The rows as the library packs them."""
    return Rows.join([np.array([code for action in row for code in pack_action(action)], dtype=np.int64) for row in rows])
