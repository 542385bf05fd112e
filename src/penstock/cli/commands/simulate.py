"""`penstock simulate`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from penstock.cli.options import AsJson, ClusterFile, CostsText, Unit, check_suffix, check_unit, file_option, refuse_overwrite
from penstock.cli.output import can_print, deliver, show_steps
from penstock.cli.sources import OptionalLowering, Per, PerOption, ScheduleSource, TimelineSource, read_cluster

if TYPE_CHECKING:
    from penstock.draw.palette import Line
    from penstock.simulator.timeline import Timeline


def simulate(
    source: ScheduleSource,
    *,
    costs: CostsText = None,
    per: PerOption = Per.STAGE,
    cluster: ClusterFile = None,
    lowering: OptionalLowering,
    unit: Unit = None,
    as_json: AsJson = False,
    output: Annotated[
        Path | None,
        file_option(
            "Also save the timeline: .svg, .pdf, .png or .html as a picture, .trace.json for Perfetto, .json to load it again.",
            "-o",
            "--output",
        ),
    ] = None,
) -> None:
    """Time a schedule or program.

    Shows what runs when, the memory of each rank, and why ranks are idle. --fsdp, --merge-backward, --receive and --offload imply
    --lower. A FILE may also be a saved timeline; with --costs it is timed again. With --cluster, the costs are those of a device of
    speed 1, and each rank takes as long as its device does.

    \b
    Examples:
      penstock simulate zbv -p 4 -m 8
      penstock simulate 1f1b -p 8 -m 32 --costs "f=1,i=1.1,w=0.9,latency=0.1" -o 1f1b.svg
      penstock simulate zbv.csv --costs costs.toml --fsdp -o zbv.trace.json
      penstock simulate 1f1b -p 8 -m 32 --offload 100 --costs "host_bandwidth=1"
      penstock simulate interleaved-1f1b -p 4 -m 16 --chunks 4 --per rank --json
      penstock simulate 1f1b -m 16 --costs "f=0.01,i=0.01,w=0.01" --cluster cluster.toml
    """
    from penstock.draw.save import SUFFIXES

    check_unit(unit)
    suffix = check_suffix(output, SUFFIXES)
    refuse_overwrite("--output", output, {"NAME|FILE": source.path() if source.is_file else None, "--cluster": cluster})
    timed = TimelineSource.read(source, costs, per, lowering.read_lowering(), read_cluster(cluster), unit=unit)
    with show_steps(3) as step:
        step("timing")
        timeline = timed.timeline(unit)
        step("drawing")
        if output is not None:
            timeline.save(output, **({} if unit is None or suffix == ".json" else {"unit": unit}))
        step("summing up")
        figures = data(timeline)
    deliver(lambda width: _write_lines(timeline, width, unit), lambda: figures, as_json=as_json, output=None)


def data(timeline: Timeline) -> dict[str, Any]:
    """Sum up a timeline for JSON."""
    from penstock.draw.summary import summarize

    return {**summarize(timeline), "busy": timeline.busy.tolist(), "costs": timeline.costs.to_json()}


def _write_lines(timeline: Timeline, width: int | None, unit: str | None) -> Iterator[Line]:
    from penstock.draw.terminal import ASCII_BARS, BARS, timeline_lines

    return timeline_lines(timeline, width=width, bars=BARS if can_print(BARS) else ASCII_BARS, unit=unit)
