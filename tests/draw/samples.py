"""Timelines of every form that pictures must handle."""

from __future__ import annotations

import penstock as ps

TIMED = ps.Costs(
    f=1.1, i=0.9, w=0.7, latency=0.13, output=0.25, bandwidth=2.0, weight_stash=0.5, parameters=3.0, shard=0.4, unshard=0.6, reduce=0.8,
    optimizer=1.3,
)  # fmt: skip

SAMPLES = {
    "1f1b": ps.simulate(ps.schedule("1f1b", ranks=4, microbatches=8)),
    "zbv": ps.simulate(ps.schedule("zbv", ranks=4, microbatches=12), ps.Costs(weight_stash=0.5)),
    "dualpipe-v": ps.simulate(ps.schedule("dualpipe-v", ranks=3, microbatches=7), ps.Costs(f=0.4, i=0.3, w=0.37, overlap=0.8)),
    "dualpipe": ps.simulate(ps.schedule("dualpipe", ranks=4, microbatches=10), ps.Costs(f=[1, 1.5, 1, 1.2], latency=0.1)),
    "interleaved": ps.simulate(ps.schedule("interleaved-1f1b", ranks=3, microbatches=6, chunks=3), TIMED),
    "fsdp": ps.simulate(ps.lower(ps.schedule("interleaved-1f1b", ranks=4, microbatches=8), fsdp=True), TIMED),
    "zb-h1": ps.simulate(ps.lower(ps.schedule("zb-h1", ranks=12, microbatches=16)), ps.Costs(latency=0.3)),
    "shared links": ps.simulate(ps.lower(ps.schedule("zbv", ranks=4, microbatches=6)), ps.Costs(latency=0.4, contention="rank")),
    "inference": ps.simulate(ps.schedule("inference", ranks=2, microbatches=3)),
    "one rank": ps.simulate(ps.schedule("data-parallel", ranks=1, microbatches=3), ps.Costs(optimizer=2.0)),
    "no time": ps.simulate(ps.schedule("gpipe", ranks=2, microbatches=2), ps.Costs(f=0, i=0, w=0)),
    "tiny": ps.simulate(ps.schedule("gpipe", ranks=2, microbatches=3), ps.Costs(f=1e-7, i=2e-7, w=1e-7, activation=4e9)),
}
