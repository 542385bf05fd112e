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
    from penstock.integrations.profiler_traces import TracedStep


def read(
    traces: Annotated[list[Path], typer.Argument(metavar="TRACE", help="One trace of torch.profiler per rank: .json or .json.gz.")],
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

    Takes the files of one pipeline, in any order, of torch.distributed.pipelining (ranges PP:0F0, or Forward 0 of ScheduleGPipe; its
    Schedule1F1B writes none) or of Penstock. Aligns the ranks' clocks, and says how long ranks were idle, who waited for whom, and which
    rank is slow.

    \b
    Examples:
      penstock read trace/rank*.json
      penstock read trace/rank*.json -o measured.json --profile stages.json
      penstock plan --profile stages.json --ranks 4 --microbatches 16
    """
    from penstock.draw.save import SUFFIXES
    from penstock.integrations.profiler_traces import read_step, stage_profile
    from penstock.ir.formats.csv_form import write_whole

    check_suffix(output, SUFFIXES)
    traced = read_step([check_file(path) for path in traces], step)
    timeline = traced.timeline
    if output is not None:
        timeline.save(output)
    if profile is not None:
        write_whole(profile, to_json(stage_profile(timeline).to_json()))
    deliver(lambda _: _write_lines(traced), lambda: _collect_data(traced), as_json=as_json, output=None)


def _collect_data(traced: TracedStep) -> dict[str, Any]:
    from penstock.cli.commands.simulate import data
    from penstock.integrations.profiler_traces import find_busiest_rank, find_slow_rank, waits_between_ranks

    timeline, slow = traced.timeline, find_slow_rank(traced)
    busiest = find_busiest_rank(timeline)
    return {
        **data(timeline),
        "processes": traced.processes,
        "waits": waits_between_ranks(timeline),
        "slow_rank": None if slow is None else slow.rank,
        "busiest_rank": None if busiest is None else busiest.rank,
    }


def _write_lines(traced: TracedStep) -> Iterator[str]:
    from penstock.draw.summary import shape_of
    from penstock.integrations.profiler_traces import find_busiest_rank, find_slow_rank, waits_between_ranks

    timeline = traced.timeline
    time, makespan = timeline.units.time, timeline.makespan
    yield f"traced: {', '.join(shape_of(timeline))}"
    if traced.processes != tuple(range(timeline.ranks)) and None not in traced.processes:
        yield f"ranks 0 to {timeline.ranks - 1} of the pipeline are the processes {', '.join(map(str, traced.processes))}"
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
    nobody = (
        "no rank is slow: none takes 1.15 times as long as others for the same operators, or computes 1.15 times as long as their median"
    )
    yield str(find_slow_rank(traced) or find_busiest_rank(timeline) or nobody)
