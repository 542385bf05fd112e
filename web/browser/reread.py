"""Reads what the page exported, and says whether it is what the library makes itself."""

from __future__ import annotations

import json
import sys

import penstock as ps
from penstock.simulator.timeline import Timeline

timeline, order = Timeline.load(sys.argv[1]), ps.load(sys.argv[2])
wanted = ps.schedule("zbv", ranks=4, microbatches=8)
same = timeline.start.tolist() == ps.simulate(wanted, ps.Costs(f=1.5)).start.tolist()
sys.stdout.write(json.dumps({"timeline": same, "order": all(order[rank] == wanted[rank] for rank in range(4))}))
