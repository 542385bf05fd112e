"""Scale on paper: a transformer of a trillion parameters on 4,096 GPUs, planned, proved and timed on this machine.

    python benchmarks/paper.py                         # a minute or two; writes benchmarks/results/paper/report.md and its figures
    python benchmarks/paper.py --memory-limit 130GiB   # on smaller GPUs

64 pipelines of 64 ranks each train copies of the model. The GPUs of a node belong to different pipelines, so that every message of
a pipeline crosses nodes, and so do the sums of gradients over the copies.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import penstock as ps
from penstock.planner.candidate import Candidate
from penstock.planner.profile.transformer import Transformer
from penstock.schedules.registry import algorithms

RESULTS = Path(__file__).parent / "results" / "paper"
FIGURES = ("candidates.svg", "timeline.png")


@dataclass(frozen=True)
class Setting:
    """The model, the machines, and how long to search."""

    pipe: int = 64
    data: int = 64
    microbatches: int = 128
    layers: int = 128
    hidden: int = 25600
    heads: int = 160
    sequence: int = 2048
    vocabulary: int = 51200
    flops: float = 900e12
    bandwidth: float = 50e9
    latency: float = 20e-6
    memory_limit: str = "160GiB"
    seconds: float = 30.0

    @property
    def model(self) -> Transformer:
        """In bfloat16, its optimizer's state shared among the copies."""
        sizes = {name: getattr(self, name) for name in ("layers", "hidden", "heads", "sequence", "vocabulary", "flops")}
        links = {"latency": self.latency, "bandwidth": self.bandwidth}
        return Transformer(**sizes, **links, gradient_bytes=2.0, optimizer_bytes=12.0 / self.data)

    @property
    def gpus(self) -> int:
        return self.pipe * self.data

    @property
    def tokens(self) -> int:
        """Of one step, by all copies."""
        return self.data * self.microbatches * self.sequence


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder to write to")
    for name, default in vars(Setting()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, help=f"default: {default}")
    given = vars(parser.parse_args(arguments))
    folder = given.pop("out")
    report = write(Setting(**given), folder)
    print(f"written to {report}")
    return 0


def write(setting: Setting, folder: Path) -> Path:
    """Plan, and write the report with its figures; the report's file."""
    folder.mkdir(parents=True, exist_ok=True)
    _say(f"planning {setting.model.parameters / 1e12:.3g}T parameters on {setting.pipe} ranks, {setting.microbatches} microbatches")
    seconds, plan = _timed(lambda: _plan(setting))
    for name, draw in zip(FIGURES, (plan.save, lambda path: plan.predicted.save(path, unit="s")), strict=True):
        _say(f"drawing {name}")
        draw(folder / name)
    parts = (_head(setting, seconds), _planned(setting, plan), _zoo(plan), _reduction(setting, plan), _start(setting, plan))
    path = folder / "report.md"
    path.write_text("\n\n".join("\n".join(part) for part in parts) + "\n", encoding="utf-8")
    return path


def _plan(setting: Setting) -> ps.Plan:
    asked = {"memory_limit": setting.memory_limit, "recompute": True, "seconds": setting.seconds}
    return ps.plan(setting.model.profile(), ranks=setting.pipe, microbatches=setting.microbatches, **asked)


def _head(setting: Setting, seconds: float) -> Iterator[str]:
    model = setting.model
    yield f"# {model.parameters / 1e12:.3g} trillion parameters on {setting.gpus:,} GPUs, on paper"
    yield ""
    yield (
        f"Made by `python benchmarks/paper.py` in {seconds:.0f} s of planning. Nothing here was run on GPUs: times follow from the "
        "model's size and the numbers below, and the simulator."
    )
    yield ""
    yield "| | |"
    yield "|---|---|"
    yield f"| model | {setting.layers} layers of width {setting.hidden}, {setting.heads} heads, {setting.vocabulary:,} tokens known |"
    yield f"| GPUs | {setting.pipe} ranks a pipeline x {setting.data} pipelines |"
    yield f"| a GPU | {setting.flops / 1e12:.0f} Tflop/s reached, {setting.memory_limit} to be had |"
    yield f"| a link between nodes | {setting.bandwidth / 1e9:g} GB/s, {setting.latency * 1e6:g} us |"
    yield f"| a step | {setting.microbatches} microbatches of one sequence a pipeline, {setting.tokens:,} tokens in all |"
    yield "| kept for a parameter | 2 bytes, its gradient 2, its share of the optimizer's 12 |"


def _planned(setting: Setting, plan: ps.Plan) -> Iterator[str]:
    units, again = plan.units, sum(plan.recompute)
    yield "## The plan"
    yield ""
    yield (
        f"**{plan.name}** ({plan.placement.kind} placement, {plan.placement.stages} stages, {again} of them recomputed): "
        f"{units.time(plan.objective)} per step, {setting.tokens / plan.objective:,.0f} tokens per second, "
        f"bubble {plan.predicted.bubble:.1%}; {_useful(plan):.1%} of the GPUs' time is forward and backward of the model, once."
    )
    yield ""
    yield (
        f"No schedule with this placement and partition takes less than {units.time(plan.bound)}, "
        f"and none that was considered less than {units.time(plan.overall_bound)}. "
        f"{len(plan.proof.rules)} rules are proved over {plan.proof.actions:,} actions and {plan.proof.messages:,} messages."
    )
    yield ""
    yield f"![time against memory of the candidates]({FIGURES[0]})"
    yield ""
    yield f"![the predicted step]({FIGURES[1]})"


def _useful(plan: ps.Plan) -> float:
    """The work that must be done, as a share of all ranks' time."""
    work = plan.microbatches * sum(layer.f + layer.i + layer.w for layer in plan.profile.layers)
    return work / (plan.placement.ranks * plan.objective)


def _zoo(plan: ps.Plan) -> Iterator[str]:
    """Every schedule: the quickest way in which it fits, or by how much it does not."""
    units = plan.units
    yield "## The zoo against the planner"
    yield ""
    yield "Each schedule in the quickest form that fits, with as many stages recomputed as that takes, and what it would take without."
    yield ""
    yield "| schedule | takes | to the plan | bubble | peak | recomputed stages | with nothing recomputed |"
    yield "|---|---|---|---|---|---|---|"
    best = _by_name(plan)
    for name, each in sorted(best.items(), key=lambda pair: (not pair[1].fits, pair[1].objective or 0.0)):
        free = [other for other in plan.alternatives if other.name == name and not other.recompute and other.objective is not None]
        quickest = min(free, key=lambda other: other.objective or 0.0, default=None)
        without = "not timed" if quickest is None else _free(plan, quickest)
        if not each.fits:
            yield f"| {name} | does not fit | | | | | {without} |"
            continue
        said = (units.time(each.objective or 0.0), f"{(each.objective or 0.0) / plan.objective:.3f}x", f"{each.bubble or 0.0:.1%}")
        yield f"| {name} | {' | '.join(said)} | {units.size(each.peak or 0.0)} | {each.recompute} | {without} |"


def _by_name(plan: ps.Plan) -> dict[str, Candidate]:
    found: dict[str, Candidate] = {}
    for each in sorted((one for one in plan.alternatives if one.placement), key=lambda one: (not one.fits, one.objective or float("inf"))):
        found.setdefault(each.name, each)
    return found


def _free(plan: ps.Plan, each: Candidate) -> str:
    time_ = plan.units.time(each.objective or 0.0)
    return f"{time_}, fits" if each.fits else f"{time_}, {plan.units.size(each.excess or 0.0)} over"


def _reduction(setting: Setting, plan: ps.Plan) -> Iterator[str]:
    """What the sum of gradients over the copies adds: a ring over the same links, each stage's once its last W is done."""
    share = (setting.data - 1) / setting.data
    first, times = 0, []
    for size in plan.partition:
        gradients = sum(layer.gradients for layer in plan.profile.layers[first : first + size])
        times.append(share * gradients / setting.bandwidth)
        first += size
    reduced = ps.simulate(plan.program, replace(plan.costs, reduce=tuple(times)))
    units, longer = plan.units, reduced.makespan - plan.predicted.makespan
    heaviest = max(sum(times[stage] for stage in plan.placement.stages_of(rank)) for rank in range(plan.placement.ranks))
    yield "## Gradients over the pipelines"
    yield ""
    yield (
        f"Sharing out the sum of the gradients over {setting.data} copies takes a rank {units.time(heaviest)} on its link. "
        f"Each stage's begins with its last weight gradient, while other stages compute: "
        f"the step takes {units.time(reduced.makespan)}, {units.time(longer)} more "
        f"({longer / plan.predicted.makespan:.1%}). Gathering the updated parameters takes the same again if nothing hides it."
    )


def _start(setting: Setting, plan: ps.Plan) -> Iterator[str]:
    """What a rank computes before its first step: its own program, and, where it is asked for, the whole one's proof."""
    rank = setting.pipe // 2
    yield "## Start-up of a rank"
    yield ""
    yield f"Rank {rank}'s own program, generated without the others', against the whole pipeline's, on this machine."
    yield ""
    yield "| schedule | actions of the rank | its own program | the whole program | proved | timed |"
    yield "|---|---|---|---|---|---|"
    for name, each in algorithms().items():
        if each.whole or name in ("data-parallel", "inference"):
            continue
        _say(f"start-up of {name}")
        yield _start_row(name, setting, rank)
    _say("start-up of the plan")
    whole, program = _timed(lambda: ps.lower(plan.schedule))
    proved, timed = _timed(lambda: ps.verify(program))[0], _timed(lambda: ps.simulate(program, plan.costs))[0]
    yield f"| the plan, from its file | {len(program[rank]):,} | | {_ms(whole)} | {_ms(proved)} | {_ms(timed)} |"


def _start_row(name: str, setting: Setting, rank: int) -> str:
    own, actions = _timed(lambda: ps.lower_rank(ps.schedule(name, setting.pipe, setting.microbatches), rank))
    whole, program = _timed(lambda: ps.lower(ps.schedule(name, setting.pipe, setting.microbatches)))
    proved, timed = _timed(lambda: ps.verify(program))[0], _timed(lambda: ps.simulate(program, ps.Costs()))[0]
    return f"| {name} | {len(actions):,} | {_ms(own)} | {_ms(whole)} | {_ms(proved)} | {_ms(timed)} |"


def _timed(work):
    begun = time.perf_counter()
    made = work()
    return time.perf_counter() - begun, made


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms"


def _say(what: str) -> None:
    print(f"{what} ...", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
