"""`penstock read`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import AsJson, check_file, check_suffix, count_option, file_option
from penstock.cli.output import deliver, to_json
from penstock.text.numbers import format_percent
from penstock.text.table import format_table

if TYPE_CHECKING:
    from penstock.simulator.timeline import Timeline


def read(
    traces: Annotated[list[Path], typer.Argument(metavar="TRACE...", help="One trace of torch.profiler per rank: .json or .json.gz.")],
    *,
    step: Annotated[int | None, count_option("The step to read, from 0.  [default: the last]", "--step")] = None,
    profile: Annotated[
        Path | None, file_option("Also write a profile with one layer per stage, for 'penstock plan'.", "--profile", stdout=False)
    ] = None,
    as_json: AsJson = False,
    output: Annotated[
        Path | None,
        file_option(
            "Also save the timeline: .json to compare or load it, .svg, .pdf, .png or .html as a picture, .trace.json for Perfetto.",
            "-o",
            "--output",
        ),
    ] = None,
) -> None:
    """Read profiler traces of a pipeline as one timeline.

    Takes runs of torch.distributed.pipelining (ranges PP:0F0, or Forward 0 and Backward 0) and of Penstock. Aligns the ranks' clocks,
    and says how long ranks were idle, who waited for whom, and which rank is slow.

    \b
    Examples:
      penstock read trace/rank*.json
      penstock read trace/rank*.json -o measured.json --profile stages.json
      penstock plan --profile stages.json --ranks 4 --microbatches 16
    """
    from penstock.draw.save import SUFFIXES
    from penstock.integrations.profiler_traces import read_traces, stage_profile
    from penstock.ir.formats.csv_form import write_whole

    check_suffix(output, SUFFIXES)
    timeline = read_traces([check_file(path) for path in traces], step)
    if output is not None:
        timeline.save(output)
    if profile is not None:
        write_whole(profile, to_json(stage_profile(timeline).to_json()))
    deliver(lambda _: _lines(timeline), lambda: _data(timeline), as_json=as_json, output=None)


def _data(timeline: Timeline) -> dict[str, Any]:
    from penstock.cli.commands.simulate import data
    from penstock.integrations.profiler_traces import find_slow_rank, waits_between_ranks

    slow = find_slow_rank(timeline)
    return {**data(timeline), "waits": waits_between_ranks(timeline), "slow_rank": None if slow is None else slow.rank}


def _lines(timeline: Timeline) -> Iterator[str]:
    from penstock.draw.summary import shape_of
    from penstock.integrations.profiler_traces import find_slow_rank, waits_between_ranks

    time, makespan = timeline.units.time, timeline.makespan
    yield f"traced: {', '.join(shape_of(timeline))}"
    yield ""
    yield f"makespan  {time(makespan)}"
    yield f"bubble    {format_percent(timeline.bubble)} of all ranks' time"
    yield ""
    waits, busy = waits_between_ranks(timeline), timeline.busy.tolist()
    rows = [("rank", "computes", "idle", "waited for")]
    for rank, by_rank in enumerate(waits):
        others = sorted(((seconds, other) for other, seconds in enumerate(by_rank) if seconds > 0.01 * makespan), reverse=True)
        blamed = ", ".join(f"rank {other} {time(seconds)}" for seconds, other in others)
        rows.append((str(rank), time(busy[rank]), format_percent(1 - busy[rank] / makespan), blamed or "-"))
    yield from format_table(rows, left=(3,))
    yield ""
    yield str(find_slow_rank(timeline) or "no rank is slow: none computes for more than 1.15 times the median of the others")
