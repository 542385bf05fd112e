"""`penstock plan`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.job_options import JobOptions
from penstock.cli.options import (
    AsJson,
    check_file,
    check_suffix,
    complete_schedule_list,
    count_option,
    file_option,
    number_option,
    read_counts,
    read_rate,
    read_size,
    read_time,
    refuse_overwrite,
    refuse_unitless,
    text_option,
)
from penstock.cli.output import INTERRUPTED, catch_interrupt, deliver, show_planning
from penstock.cli.sources import read_cluster
from penstock.errors import CostsError, PlanError, UsageError
from penstock.text.options import read_assignments, split_names
from penstock.text.units import Units, has_byte_unit

if TYPE_CHECKING:
    from penstock.planner.job import Job, JobPlan
    from penstock.planner.plan import Plan
    from penstock.planner.profile import Profile


def plan(
    *,
    profile: Annotated[
        Path | None, text_option("The model's layers: a .json or .toml file (see 'penstock profile').", "FILE", "--profile")
    ] = None,
    transformer: Annotated[
        str | None,
        text_option(
            'A transformer by its sizes instead: "layers=32 hidden=4096 heads=32 sequence=4096 vocabulary=32000 flops=400e12".',
            "SIZES",
            "--transformer",
        ),
    ] = None,
    ranks: Annotated[int | None, count_option("Ranks of the pipeline.  [required without --cluster and --gpus]", "-p", "--ranks")] = None,
    cluster: Annotated[
        Path | None,
        text_option(
            "Devices of different speeds, memory and links, one rank each: a .toml or .json file (see 'penstock profile --ranks').",
            "FILE",
            "--cluster",
        ),
    ] = None,
    microbatches: Annotated[int | None, count_option("Microbatches per step, of the profile's size.", "-m", "--microbatches")] = None,
    batch: Annotated[int | None, count_option("Samples per step; the microbatch size is then chosen too.", "--batch")] = None,
    microbatch_sizes: Annotated[
        str | None, text_option("The sizes to choose from.  [default: the sizes in the profile]", "N,N", "--microbatch-sizes")
    ] = None,
    slices: Annotated[
        str | None,
        text_option(
            "Slices to cut each sequence into, or several numbers to choose from.  [default: chosen, if the profile knows its slices]",
            "N,N",
            "--slices",
        ),
    ] = None,
    slice_granularity: Annotated[
        int | None, count_option("Make the length of each slice a multiple of this many tokens.  [default: 128]", "--slice-granularity")
    ] = None,
    memory_limit: Annotated[
        str | None, text_option("The memory limit per rank, like 40GiB; or one per rank, with commas.", "SIZE", "--memory-limit")
    ] = None,
    headroom: Annotated[
        float | None,
        number_option("The share of each limit to keep free.  [default: 0.05 for estimated profiles, else 0]", "SHARE", "--headroom"),
    ] = None,
    schedules: Annotated[
        str | None,
        text_option(
            "The schedules to try; 'searched' is an order found by search.  [default: all]",
            "NAME,NAME",
            "--schedules",
            complete=complete_schedule_list,
        ),
    ] = None,
    recompute: Annotated[bool, typer.Option("--recompute", help="Let stages recompute their forward if memory is short.")] = False,
    offload: Annotated[bool, typer.Option("--offload", help="Let activations move to host memory if memory is short.")] = False,
    host_memory: Annotated[
        str | None, text_option("With --offload: the most host memory per rank, like 100GiB.", "SIZE", "--host-memory")
    ] = None,
    host_bandwidth: Annotated[
        str | None,
        text_option(
            "With --offload: bandwidth to host memory per unit of time, like 25GB, instead of the profile's.", "SIZE", "--host-bandwidth"
        ),
    ] = None,
    barrier: Annotated[
        bool,
        typer.Option(
            "--barrier/--no-barrier",
            help="Whether the optimizer waits for all ranks: minimize the makespan, or else the longest span of a rank.",
        ),
    ] = True,
    split: Annotated[bool, typer.Option("--split/--no-split", help="Whether the backward may be split.")] = True,
    latency: Annotated[str | None, text_option("Latency of a message, like 5us, instead of the profile's.", "TIME", "--latency")] = None,
    bandwidth: Annotated[
        str | None, text_option("Bandwidth of a link per unit of time, like 50GB, instead of the profile's.", "SIZE", "--bandwidth")
    ] = None,
    seconds: Annotated[
        float | None,
        number_option(
            "How long to plan, besides what is compiled once per machine; named schedules may take 5 s even if it is less. "
            "0 tries only the named schedules, however long that takes.  [default: 7]",
            "S",
            "--seconds",
        ),
    ] = None,
    rounds: Annotated[
        float | None, number_option("Orders that the search times.  [default: as many as usually fit into --seconds]", "N", "--rounds")
    ] = None,
    seed: Annotated[int | None, count_option("The random seed of the search and of the jitter.  [default: 0]", "--seed")] = None,
    figure: Annotated[Path | None, file_option("Draw time against memory: .svg, .pdf or .png.", "--figure", stdout=False)] = None,
    as_json: AsJson = False,
    output: Annotated[Path | None, file_option("Save the plan: .json.", "-o", "--output", "--save")] = None,
    job: JobOptions,
) -> int:
    """Find the best schedule for a model and a memory limit.

    Chooses the partition, the schedule and its chunks, the microbatch size, the slices of long sequences, and what to recompute or
    offload. Prints why it chose them, the memory of each rank, and the gap to the lower bound. Ctrl-C ends the search and keeps the best
    plan so far, with exit code 130.

    With --gpus it plans a whole job: the pipeline, data, tensor and context degrees, the microbatch size, the sharding, the blocks to
    recompute, and where the vocabulary goes. A --profile, measured on such a GPU, keeps whole layers: its tensor and context degrees
    are 1. --memory-limit is then that of a GPU; --bandwidth and --latency are those of its link to other nodes.

    \b
    Examples:
      penstock plan --profile p.json --ranks 8 --memory-limit 40GiB --batch 512 -o plan.json
      penstock plan --transformer "layers=32 hidden=4096 heads=32 sequence=4096 vocabulary=32000 flops=400e12" -p 8 -m 32
      penstock plan --profile p.json -p 4 -m 16 --schedules 1f1b,zbv --recompute --figure plan.svg
      penstock plan --profile p.json -p 8 -m 64 --memory-limit 40GiB --recompute --offload --host-bandwidth 25GB
      penstock plan --profile p.json --cluster cluster.toml --batch 512 -o plan.json
      penstock plan --transformer "layers=80 hidden=8192 heads=64 sequence=8192 vocabulary=128256" --gpus 64 --gpu h100 --global-batch 256
      penstock plan --profile p.json --gpus 16 --gpu a100 --global-batch 256 -o job.json
    """
    from penstock.draw.save import FIGURES
    from penstock.planner import plan as planning
    from penstock.planner.request import is_in_bytes

    check_suffix(figure, FIGURES)
    check_suffix(output, (".json",))
    refuse_overwrite("--output", output, {"--profile": profile, "--cluster": cluster})
    limit = _limit(memory_limit)
    if job.gpus is not None:
        _refuse_with_gpus(
            {
                "--ranks": ranks is not None,
                "--cluster": cluster is not None,
                "--microbatches": microbatches is not None,
                "--batch": batch is not None,
                "--slices": slices is not None,
                "--slice-granularity": slice_granularity is not None,
                "--offload": offload,
                "--host-memory": host_memory is not None,
                "--host-bandwidth": host_bandwidth is not None,
                "--no-barrier": not barrier,
                "--no-split": not split,
                "--seconds": seconds is not None,
                "--rounds": rounds is not None,
                "--seed": seed is not None,
                "--figure": figure is not None,
            }
        )
        links = {
            "memory": read_size("--memory-limit", memory_limit),
            "latency": read_time("--latency", latency),
            "bandwidth": read_rate("--bandwidth", bandwidth),
        }
        refuse_unitless("--memory-limit", memory_limit)
        choices = {"schedules": _read_names(schedules), "microbatch": read_counts("--microbatch-sizes", microbatch_sizes), **job.choices}
        return _plan_job(job.make_job(_describe_model(profile, transformer), links, headroom), choices, as_json, output)
    job.refuse_without_gpus()
    devices = read_cluster(cluster)
    if ranks is None and devices is None:
        raise UsageError("Missing option '-p' / '--ranks': the ranks of the pipeline; or --cluster; --gpus plans a whole job instead")
    if devices is not None and (latency is not None or bandwidth is not None):
        raise UsageError("--latency and --bandwidth do not go with --cluster, which has the links of each pair of devices")
    if (microbatches is None) == (batch is None):
        raise UsageError("give one of the two: --microbatches, or --batch with the samples per step")
    if devices is not None and transformer is not None:
        own = [name for name in ("latency", "bandwidth") if name in _read_sizes(transformer)]
        if own:
            raise UsageError(f"--transformer: leave out {' and '.join(own)}, because --cluster has the links of each pair of devices")
    model = _replace_links(_load_model(profile, transformer), latency, bandwidth)
    in_bytes = is_in_bytes(model, None)
    if in_bytes:
        refuse_unitless("--memory-limit", memory_limit)
        refuse_unitless("--host-memory", host_memory)
    options: dict[str, Any] = {"microbatches": microbatches, "batch": batch, "memory_limit": limit, "recompute": recompute}
    if not offload and (host_memory is not None or host_bandwidth is not None):
        raise UsageError("--host-memory and --host-bandwidth are for plans that may move activations there: add --offload")
    options |= {"offload": offload, "host_memory": read_size("--host-memory", host_memory)}
    options |= {"host_bandwidth": read_rate("--host-bandwidth", host_bandwidth, in_bytes)}
    options |= {
        "vocabulary": job.may_spread,
        "barrier": barrier,
        "split": split,
        "headroom": headroom,
        "rounds": rounds,
    }
    options |= {"schedules": _read_names(schedules), "microbatch_sizes": read_counts("--microbatch-sizes", microbatch_sizes)}
    given = {"slices": read_counts("--slices", slices), "slice_granularity": slice_granularity, "seconds": seconds, "seed": seed}
    options |= {name: value for name, value in given.items() if value is not None}  # else the planner's own
    with catch_interrupt() as stopped, show_planning(Units(model.time_unit, is_in_bytes(model, limit))) as tell:
        try:
            best = planning.plan(model, ranks=ranks, cluster=devices, **options, progress=tell, stop=stopped)
        except PlanError as error:
            if not stopped():
                raise
            return _report_interrupt(str(error))
    if output is not None:
        best.save(output)
    if figure is not None:
        best.save(figure)
    deliver(lambda _: _write_lines(best, output), best.to_json, as_json=as_json, output=None)
    return _report_interrupt("this is the best plan so far") if stopped() else 0


def _refuse_with_gpus(options: Mapping[str, bool]) -> None:
    """Refuse the options that are given and that planning a whole job does not take."""
    for name, is_given in options.items():
        if is_given:
            raise UsageError(f"{name} does not go with --gpus, which plans a whole job for --global-batch: leave it out")


def _plan_job(job: Job, choices: dict[str, Any], as_json: bool, output: Path | None) -> int:
    from penstock.planner.job import plan_job

    with catch_interrupt() as stopped, show_planning(Units("s", True)) as tell:
        try:
            best = plan_job(job, **choices, progress=tell, stop=stopped)
        except PlanError as error:
            if not stopped():
                raise
            return _report_interrupt(str(error))
    if output is not None:
        best.save(output)
    deliver(lambda _: _write_lines(best, output), best.to_json, as_json=as_json, output=None)
    return _report_interrupt("this is the best plan so far") if stopped() else 0


def _report_interrupt(result: str) -> int:
    typer.echo(f"interrupted: {result}", err=True)
    return INTERRUPTED


def _write_lines(best: Plan | JobPlan, output: Path | None) -> Iterator[str]:
    yield from best.report().splitlines()
    if output is not None:
        yield ""
        yield f"saved to {output}"


def _load_model(profile: Path | None, transformer: str | None) -> Profile:
    """Load the profile, or estimate it from a transformer's sizes."""
    from penstock.planner.profile import Profile

    if (profile is None) == (transformer is None):
        raise UsageError("give one model: --profile FILE or --transformer SIZES" + (", not both" if profile else ""))
    if profile is not None:
        return Profile.load(check_file(profile, "--profile: "))
    try:
        return Profile.transformer(**_read_sizes(transformer))
    except CostsError as error:
        raise UsageError(f"--transformer: {error}") from None


def _describe_model(profile: Path | None, transformer: str | None) -> dict[str, Any] | Profile:
    """The model of a whole job: the sizes of a transformer, or a profile."""
    if (profile is None) == (transformer is None):
        raise UsageError("--gpus plans one model: give --transformer SIZES or --profile FILE" + (", not both" if profile else ""))
    return _read_sizes(transformer) if profile is None else _load_model(profile, None)


def _read_sizes(transformer: str | None) -> dict[str, Any]:
    assert transformer is not None
    parts = re.split(r"[\s,]+(?=\w+\s*=)", transformer.strip())
    sizes = read_assignments("--transformer", parts, '"layers=32 hidden=4096 heads=32 ... flops=400e12"')
    for name in sizes:
        if name.endswith("bandwidth"):
            sizes[name] = read_rate(f"--transformer: {name}", str(sizes[name]))
        elif name in ("latency", "overhead"):
            sizes[name] = read_time(f"--transformer: {name}", str(sizes[name]))
    return sizes


def _replace_links(model: Profile, latency: str | None, bandwidth: str | None) -> Profile:
    """Replace the latency and the bandwidth of the profile, if they are given."""
    time, speed = read_time("--latency", latency, model.time_unit), read_rate("--bandwidth", bandwidth, model.size_unit == "B")
    try:
        model = model if time is None else replace(model, latency=time)
        return model if speed is None else replace(model, bandwidth=speed)
    except CostsError as error:
        raise UsageError(f"--latency or --bandwidth: {error}") from None


def _limit(text: str | None) -> Any:
    """Read one size or several; a plain number is in the profile's unit."""
    if text is None:
        return None
    sizes = [(part.strip(), read_size("--memory-limit", part)) for part in text.split(",")]
    limits = [part if has_byte_unit(part) else size for part, size in sizes]
    return limits[0] if len(limits) == 1 else limits


def _read_names(text: str | None) -> list[str] | None:
    return None if text is None else split_names(text)
