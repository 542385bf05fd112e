"""Published training runs against the job planner: predicted time of the published configuration, and the planner's own choice.

    python benchmarks/published_runs.py            # the table of docs/job-planning.md, half a minute
    python benchmarks/published_runs.py --plan     # also what the planner would choose for each run, some minutes
    python benchmarks/run.py published_runs        # the differences against what is allowed, and the time of planning

Two numbers are fitted, each on one published row: the share of an A100's peak that matrix products reach (`A100_FIT`), and that of an H100
(`H100_FIT`). Everything else follows from data sheets and from the defaults of `penstock.Machines`.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import penstock as ps
from penstock.planner.job.layer_costs import LayerCosts

if TYPE_CHECKING:
    from benchmarks.rows import Case, Row  # imported late, so that this file also runs by itself

GPT = {"sequence": 2048, "vocabulary": 51200, "flash": False}
LLAMA = {"layers": 126, "hidden": 16384, "heads": 128, "kv_heads": 8, "ffn": 53248, "gated": True, "vocabulary": 128256}
RECOMPUTATION = "Korthikanti et al. 2022, table 5"
"""Reducing Activation Recomputation in Large Transformer Models (arXiv 2205.05198): seconds per iteration."""
MEGATRON = "Narayanan et al. 2021, table 1"
"""Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM (arXiv 2104.04473): Tflop/s per GPU with recompute."""
LLAMA3 = "Llama 3, table 4"
"""The Llama 3 Herd of Models (arXiv 2407.21783): Tflop/s per GPU."""
A100_FIT = "zero-bubble, 14.6B, 48 microbatches: W of a stage"
H100_FIT = "Llama 3 405B, 8,192 GPUs"
ALLOWED = 0.10
"""The share by which a prediction may differ from the measured time."""
EXPLAINED = {"GPT 39.1B": 0.12, "GPT 76.1B": 0.12, "GPT 145.6B": 0.12}
"""Runs that are predicted more than that too fast, with what is allowed for them; `docs/job-planning.md` says why."""
PLANNING = 60.0
"""Seconds that planning the largest of the jobs may take."""


@dataclass(frozen=True)
class Run:
    """One published run: the job, the configuration as far as it is published, and what was measured."""

    name: str
    source: str
    model: dict[str, Any]
    kind: str
    gpus: int
    batch: int
    degrees: dict[str, Any]
    schedule: str
    recompute: bool = False
    """Whether every block was recomputed."""
    seconds: float | None = None
    """Measured seconds per step."""
    tflops: float | None = None
    """Or measured Tflop/s per GPU, as the paper counts operations."""
    microbatches: tuple[int, ...] = (1,)
    """Samples per microbatch; several if the paper does not say, and the fastest is taken."""

    @property
    def job(self) -> ps.Job:
        return ps.Job(model=self.model, machines=ps.Machines.of(self.kind, gpus=self.gpus), batch=self.batch)

    def list_configurations(self) -> Iterator[ps.Configuration]:
        degrees = {"tensor": 1, "pipeline": 1, "context": 1, **self.degrees}
        data = self.gpus // (degrees["tensor"] * degrees["pipeline"] * degrees["context"])
        for size in self.microbatches:
            if self.batch % (data * size) == 0:
                sharding = 1 if data * degrees["context"] > 1 and self.source == LLAMA3 else 0
                yield ps.Configuration(**degrees, data=data, microbatch=size, sharding=sharding)

    @property
    def counted(self) -> float:
        """Operations of a step as the paper counts them."""
        tokens, layers, hidden = self.batch * self.model["sequence"], self.model["layers"], self.model["hidden"]
        if self.source == LLAMA3:
            return self.job.operations
        sequence, words = self.model["sequence"], self.model["vocabulary"]
        again = 96 if self.recompute else 72
        return again * tokens * layers * hidden**2 * (1 + sequence / (6 * hidden) + words / (again / 6 * layers * hidden))

    @property
    def measured(self) -> float:
        """Seconds per step."""
        return self.seconds if self.seconds is not None else self.counted / (self.tflops or 1.0) / 1e12 / self.gpus

    def predict(self) -> ps.JobPlan:
        """The fastest of the configurations that the paper leaves open, recomputed as published."""
        return self._predict(self.recompute)

    def predict_within_limit(self) -> ps.JobPlan:
        """The published run if it fits by the sizes counted here, else its configuration with as much recompute as the memory asks for."""
        published = self.predict()
        return self._predict(None) if published.excess else published

    def _predict(self, recompute: bool | None) -> ps.JobPlan:
        plans = [
            ps.predict_job(self.job, configuration, schedule=self.schedule, recompute=recompute)
            for configuration in self.list_configurations()
        ]
        return min(plans, key=lambda plan: plan.seconds)


def _gpt(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    return {"layers": layers, "hidden": hidden, "heads": heads, **GPT}


def _recomputation() -> Iterator[Run]:
    """Four models without data parallelism, each with selective and with full recompute."""
    chunks = "interleaved-1f1b{chunks=3}"
    rows = (
        ("GPT 22B", _gpt(48, 6144, 64), 8, 4, {"tensor": 8}, "1f1b", 4, 1.10, 1.42),
        ("GPT 175B", _gpt(96, 12288, 96), 64, 64, {"tensor": 8, "pipeline": 8}, chunks, 1, 13.75, 18.13),
        ("GPT 530B", _gpt(105, 20480, 128), 280, 280, {"tensor": 8, "pipeline": 35}, chunks, 1, 37.83, 49.05),
        ("GPT 1T", _gpt(128, 25600, 160), 512, 512, {"tensor": 8, "pipeline": 64}, "1f1b", 1, 71.49, 94.42),
    )
    for name, model, gpus, batch, degrees, schedule, size, selective, full in rows:
        yield Run(
            f"{name}, selective recompute", RECOMPUTATION, model, "a100", gpus, batch, {**degrees, "selective": True}, schedule,
            seconds=selective, microbatches=(size,),
        )  # fmt: skip
        yield Run(
            f"{name}, full recompute",
            RECOMPUTATION,
            model,
            "a100",
            gpus,
            batch,
            degrees,
            schedule,
            True,
            seconds=full,
            microbatches=(size,),
        )


def _megatron() -> Iterator[Run]:
    """Weak scaling to a trillion parameters, everything recomputed; the table has no microbatch sizes and no numbers of chunks."""
    rows = (
        ("1.7B", 24, 2304, 24, 1, 1, 32, 512, 137),
        ("3.6B", 30, 3072, 32, 2, 1, 64, 512, 138),
        ("7.5B", 36, 4096, 32, 4, 1, 128, 512, 142),
        ("18.4B", 40, 6144, 48, 8, 1, 256, 1024, 135),
        ("39.1B", 48, 8192, 64, 8, 2, 512, 1536, 138),
        ("76.1B", 60, 10240, 80, 8, 4, 1024, 1792, 140),
        ("145.6B", 80, 12288, 96, 8, 8, 1536, 2304, 148),
        ("310.1B", 96, 16384, 128, 8, 16, 1920, 2160, 155),
        ("529.6B", 105, 20480, 128, 8, 35, 2520, 2520, 163),
        ("1008B", 128, 25600, 160, 8, 64, 3072, 3072, 163),
    )
    for name, layers, hidden, heads, tensor, pipeline, gpus, batch, tflops in rows:
        degrees = {"tensor": tensor, "pipeline": pipeline}
        yield Run(
            f"GPT {name}", MEGATRON, _gpt(layers, hidden, heads), "a100", gpus, batch, degrees, "1f1b", True,
            tflops=tflops, microbatches=(1, 2, 4, 8, 16),
        )  # fmt: skip


def _llama() -> Iterator[Run]:
    rows = ((8192, 1, 8192, 2048, 430), (16384, 1, 8192, 2048, 400), (16384, 16, 131072, 128, 380))
    for gpus, context, sequence, batch, tflops in rows:
        degrees = {"tensor": 8, "pipeline": 16, "context": context}
        tokens = f", {sequence:,} tokens" if context > 1 else ""
        yield Run(
            f"Llama 3 405B, {gpus:,} GPUs{tokens}", LLAMA3, {**LLAMA, "sequence": sequence}, "h100", gpus, batch, degrees,
            "interleaved-1f1b", tflops=tflops,
        )  # fmt: skip


RUNS = (*_recomputation(), *_megatron(), *_llama())


# Stages of the zero-bubble paper ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StageRow:
    """Measured times of one stage of three blocks, in milliseconds (Qi et al. 2023, arXiv 2401.10241; `tests/data/zero_bubble.csv`)."""

    model: str
    microbatches: int
    measured: dict[str, float]
    predicted: dict[str, float]

    @property
    def difference(self) -> float:
        """Of F, I and W together."""
        return sum(self.predicted.values()) / sum(self.measured.values()) - 1


ZERO_BUBBLE = {"1.5B": (22, 2304, 24, 8, 6), "14.6B": (46, 5120, 40, 16, 1)}
"""Layers, width, heads, ranks and samples per microbatch of the measured models; sequences of 1,024 tokens, three blocks per stage."""
BLOCKS_PER_STAGE = 3


def list_stages() -> Iterator[StageRow]:
    """Each measured stage with its prediction."""
    for row in csv.DictReader((Path(__file__).parents[1] / "tests" / "data" / "zero_bubble.csv").read_text().splitlines()):
        layers, hidden, heads, ranks, size = ZERO_BUBBLE[row["model"]]
        model = {"layers": layers, "hidden": hidden, "heads": heads, **GPT, "sequence": 1024}
        count = int(row["microbatches"])
        job = ps.Job(model=model, machines=ps.Machines.of("a100", gpus=ranks), batch=count * size)
        block = LayerCosts(job, ps.Configuration(pipeline=ranks, microbatch=size)).block
        names = ("f", "i", "w")
        predicted = {name: 1e3 * BLOCKS_PER_STAGE * getattr(block, name) for name in names}
        yield StageRow(row["model"], count, {name: float(row[name]) for name in names}, predicted)


# Tables ---------------------------------------------------------------------------------------------------------------


def list_run_rows() -> Iterator[str]:
    """The published runs as a table in Markdown."""
    yield "| run | source | degrees (pipeline x data x tensor x context) | measured | predicted | difference |"
    yield "|---|---|---|---|---|---|"
    for run in RUNS:
        plan = run.predict()
        chosen, difference = plan.configuration, plan.seconds / run.measured - 1
        degrees = f"{chosen.pipeline} x {chosen.data} x {chosen.tensor} x {chosen.context}"
        yield f"| {run.name} | {run.source} | {degrees} | {run.measured:.2f} s | {plan.seconds:.2f} s | {difference:+.1%} |"


def list_stage_rows() -> Iterator[str]:
    """The stages of the zero-bubble paper as a table in Markdown."""
    yield "| model, microbatches | F measured | F predicted | I measured | I predicted | W measured | W predicted | difference of the sum |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in list_stages():
        cells = " | ".join(f"{row.measured[name]:.2f} ms | {row.predicted[name]:.2f} ms" for name in ("f", "i", "w"))
        yield f"| {row.model}, {row.microbatches} | {cells} | {row.difference:+.1%} |"


def list_choice_rows(runs: Sequence[Run]) -> Iterator[str]:
    """What the planner chooses for each job, against the prediction of the published configuration within the same memory."""
    yield "| run | published configuration | planner's choice | its time | speedup |"
    yield "|---|---|---|---|---|"
    listed: list[ps.Job] = []
    for run in runs:
        if run.job in listed:
            continue
        listed.append(run.job)
        print(f"planning {run.name} ...", file=sys.stderr, flush=True)
        published, fitting, choice = run.predict(), run.predict_within_limit(), ps.plan_job(run.job)
        chosen, again = choice.configuration, sum(choice.recomputed)
        words = f"{chosen.pipeline} x {chosen.data} x {chosen.tensor} x {chosen.context}, microbatches of {chosen.microbatch}, "
        words += f"ZeRO-{chosen.sharding}, {choice.name}, vocabulary {chosen.vocabulary}, {again} blocks recomputed"
        words += ", selective" if chosen.selective else ""
        over = f" ({published.seconds:.2f} s if it had {published.excess / 2**30:.0f} GiB more per GPU)" if published.excess else ""
        speedup = fitting.seconds / choice.seconds
        yield f"| {run.name} | {fitting.seconds:.2f} s{over} | {words} | {choice.seconds:.2f} s | {speedup:.2f}x |"


@contextmanager
def suite(short: bool) -> Iterator[list[Case]]:
    """The differences from what was published; a short one has the stages and the smallest model."""
    from benchmarks.rows import Case

    runs = RUNS[:2] if short else RUNS
    largest = RUNS[0] if short else next(run for run in RUNS if run.name == H100_FIT)
    yield [
        Case("stages of the zero-bubble paper", _compare_stages),
        *(Case(run.name, partial(_compare, run)) for run in runs),
        Case("planning", partial(_time_planning, largest)),
    ]


def _compare_stages() -> list[Row]:
    from benchmarks.rows import Row

    allowed = f"{ALLOWED:.0%} of the measured time"
    return [
        Row(f"stage of {row.model}, m={row.microbatches}", [abs(row.difference)], [ALLOWED], allowed, limit=1.0, unit="of the time")
        for row in list_stages()
    ]


def _compare(run: Run) -> list[Row]:
    from benchmarks.rows import Row

    predicted, allowed = run.predict().seconds, EXPLAINED.get(run.name, ALLOWED)
    note, against = f"{predicted:.2f} s predicted, {run.measured:.2f} s measured ({run.source})", f"{allowed:.0%} of the measured time"
    return [Row(run.name, [abs(predicted / run.measured - 1)], [allowed], against, limit=1.0, unit="of the time", note=note)]


def _time_planning(run: Run) -> list[Row]:
    from benchmarks.rows import within

    start = time.perf_counter()
    ps.plan_job(run.job)
    return [within(f"planning {run.name}", [time.perf_counter() - start], PLANNING)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", action="store_true", help="also plan each job")
    parser.add_argument("--only", default="", help="plan only the runs whose names contain this text")
    options = parser.parse_args(arguments)
    tables = [list_stage_rows(), list_run_rows()]
    if options.plan:
        tables.append(list_choice_rows([run for run in RUNS if options.only in run.name]))
    for table in tables:
        for line in table:
            print(line, flush=True)
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
