"""`penstock show`."""

from __future__ import annotations

from penstock.cli.options import AsJson, ScheduleOutput
from penstock.cli.output import present
from penstock.cli.sources import ScheduleSource


def show(source: ScheduleSource, *, as_json: AsJson = False, output: ScheduleOutput = None) -> None:
    """Draw a schedule or program as a grid.

    One row per step, one column per rank: each action is in the first step in which it could run if every action took one step.
    A picture has the same steps; 'penstock simulate' draws one under other costs.

    \b
    Examples:
      penstock show zbv -p 4 -m 8
      penstock show interleaved-1f1b -p 4 -m 16 --chunks 2 -O group_size=8
      penstock show "interleaved-1f1b{chunks=4}" -p 4 -m 8
      penstock show zbv -p 4 -m 8 -o zbv.csv
      penstock show zbv -p 4 -m 8 -o zbv.svg
      penstock show zbv.csv
    """
    present(source.table(), as_json=as_json, output=output)
