"""`penstock profile`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import (
    AsJson,
    check_suffix,
    count_option,
    file_option,
    read_counts,
    read_rate,
    read_time,
    refuse_overwrite,
    text_option,
)
from penstock.cli.output import deliver, show_steps
from penstock.cli.sources import load_function
from penstock.errors import UsageError
from penstock.text.table import format_table
from penstock.text.units import Units

if TYPE_CHECKING:
    from penstock.ir.cluster import Cluster
    from penstock.planner.profile import Profile


def profile(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py:FUNCTION",
            help="A function without arguments that returns layers or a Hugging Face model, a sample, and optionally a loss function "
            "and a target.",
        ),
    ],
    *,
    microbatch_sizes: Annotated[
        str | None,
        text_option("Microbatch sizes to measure.  [default: the sample's size, a half and a quarter of it]", "N,N", "--microbatch-sizes"),
    ] = None,
    device: Annotated[str, text_option("The device to measure on: cpu, cuda, or auto.", "NAME", "--device")] = "auto",
    optimizer: Annotated[str, text_option("The optimizer whose memory counts: adamw, adam, sgd or none.", "NAME", "--optimizer")] = "adamw",
    warmup: Annotated[int, count_option("Runs of each layer before it is timed.", "--warmup")] = 3,
    repeats: Annotated[int, count_option("Timed runs of each layer; the median counts.", "--repeats")] = 7,
    slices: Annotated[
        int | None,
        count_option("Also measure slices of the sequence, up to this many, so that a plan may cut it.", "--slices"),
    ] = None,
    latency: Annotated[
        str | None, text_option("Latency of a message between ranks, like 5us, or in seconds.  [default: 0]", "TIME", "--latency")
    ] = None,
    bandwidth: Annotated[
        str | None, text_option("Bandwidth of a link per second, like 50GB.  [default: unlimited]", "SIZE", "--bandwidth")
    ] = None,
    ranks: Annotated[
        int | None,
        count_option("Measure a cluster too: start so many processes on this machine, or start them with torchrun.", "-p", "--ranks"),
    ] = None,
    cluster: Annotated[
        Path | None,
        file_option("Save the cluster that was measured: .toml or .json, for 'penstock plan --cluster'.", "--cluster", stdout=False),
    ] = None,
    per_layer: Annotated[
        bool, typer.Option("--per-layer", help="With --cluster: the speed of each device on each layer, not only of each kind of action.")
    ] = False,
    as_json: AsJson = False,
    output: Annotated[Path | None, file_option("Save the profile: .json or .toml.", "-o", "--output", stdout=False)] = None,
) -> None:
    """Measure a model layer by layer, and the cluster that it runs on.

    Times the forward and both backwards of every layer, split as a pipeline splits them, and measures the memory of each. Needs torch.
    With --ranks, or under torchrun, it also measures how fast each rank's device is, the link between each two of them, and which links
    are shared.

    \b
    Examples:
      penstock profile examples/gpt.py:build -o p.json
      penstock profile examples/gpt.py:build --microbatch-sizes 1,2,4,8 --bandwidth 50GB -o p.json
      penstock profile long.py:build --slices 8 -o p.json
      torchrun --nproc-per-node 8 -m penstock profile examples/gpt.py:build --cluster cluster.toml -o p.json
    """
    from penstock.runtime.measure.profile import profile as measure

    check_suffix(output, (".json", ".toml"))
    check_suffix(cluster, (".json", ".toml"))
    refuse_overwrite("--output", output, {"--cluster": cluster})
    sizes, speed = read_counts("--microbatch-sizes", microbatch_sizes), read_rate("--bandwidth", bandwidth)
    delay = read_time("--latency", latency) or 0.0
    options: dict[str, Any] = {"microbatch_sizes": sizes, "warmup": warmup, "repeats": repeats, "latency": delay, "bandwidth": speed}
    options |= {"device": device, "optimizer": optimizer, "slices": slices}
    if ranks is not None or cluster is not None or per_layer:
        _measure_cluster(source, options, ranks, per_layer, _Outputs(output, cluster, as_json))
        return
    layers, sample, loss = _build(source, load_function(source))
    if not sizes:
        options["microbatch_sizes"] = sizes = _choose_sizes(sample)
    with show_steps(repeats * len(sizes)) as step:
        measured = measure(layers, sample, **options, **loss, progress=lambda what, at, of: step(what))
    if output is not None:
        measured.save(output)
    deliver(lambda _: _write_lines(measured, output), measured.to_json, as_json=as_json, output=None)


def _choose_sizes(sample: Any) -> list[int]:
    """The sample's size, a half and a quarter of it, if they are whole."""
    from penstock.runtime.measure.profile import count_rows

    rows = count_rows(sample)
    return [rows // part for part in (1, 2, 4) if rows % part == 0]


@dataclass(frozen=True)
class _Outputs:
    """Where results go."""

    profile: Path | None
    cluster: Path | None
    as_json: bool


def _measure_cluster(source: str, options: dict[str, Any], ranks: int | None, per_layer: bool, outputs: _Outputs) -> None:
    """Measure the model and the cluster on processes of this machine or of torchrun; the first process prints and saves the results."""
    from penstock.runtime.train.ranks import open_ranks
    from penstock.runtime.train.trainer import choose_device

    device = choose_device(options.pop("device"))
    with open_ranks(ranks) as processes:
        with show_steps(1) as step:
            measured, cluster = processes.run(_measure_rank, source, options, device, per_layer, report=step)[0]
        if not processes.is_first:
            return
        if outputs.profile is not None:
            measured.save(outputs.profile)
        if outputs.cluster is not None:
            cluster.save(outputs.cluster)
        lines = [*_write_lines(measured, outputs.profile), "", *_list_cluster(cluster, outputs.cluster)]
        both = {"profile": measured.to_json(), "cluster": cluster.to_json()}
        deliver(lambda _: iter(lines), lambda: both, as_json=outputs.as_json, output=None)


def _measure_rank(source: str, options: dict[str, Any], device: str, per_layer: bool, report: Callable[[Any], None]) -> Any:
    """Measure on this rank, together with all others; only the first one reports."""
    from penstock.runtime.device.gpu import claim_device
    from penstock.runtime.measure.cluster import measure_cluster
    from penstock.runtime.measure.profile import profile as measure
    from penstock.runtime.transport.current_group import rank

    own = claim_device(device, rank())

    def profile_layers() -> Profile:
        layers, sample, loss = _build(source, load_function(source))
        sizes = options["microbatch_sizes"] or _choose_sizes(sample)
        return measure(layers, sample, **{**options, "microbatch_sizes": sizes}, **loss, device=own)

    return measure_cluster(profile_layers, own, per_layer=per_layer, progress=report if rank() == 0 else None)


def _list_cluster(cluster: Cluster, output: Path | None) -> Iterator[str]:
    """Devices, then latency and bandwidth between each two."""
    units = Units("s", in_bytes=True)
    yield f"cluster: {cluster.describe()}"
    rows: list[tuple[str, ...]] = [("rank", "device", "node", "speed", "memory")]
    for rank, device in enumerate(cluster.devices):
        memory = "-" if device.size is None else units.size(device.size)
        rows.append((str(rank), device.name, device.node, device.speeds.describe(), memory))
    yield from format_table(rows, left=(1, 2), indent="  ")
    for name, value, write in (("latency", cluster.latency, units.time), ("bandwidth per second", cluster.bandwidth, units.size)):
        yield ""
        if not isinstance(value, tuple):
            yield f"{name}: {'unlimited' if value is None else write(value)} between all ranks"
            continue
        ranks = range(len(cluster))
        yield f"{name} from each rank (row) to each other"
        cells = [[("-" if value[a][b] is None else write(value[a][b] or 0.0)) if a != b else "" for b in ranks] for a in ranks]
        yield from format_table([("", *map(str, ranks)), *((str(a), *cells[a]) for a in ranks)], indent="  ")
    if cluster.lanes is not None:
        yield ""
        yield "some links are shared: messages on them go one after the other"
    if output is not None:
        yield ""
        yield f"saved to {output}"


def _build(source: str, build: Callable[[], Any]) -> tuple[Any, Any, dict[str, Any]]:
    """Call the user's function: the layers, the sample, and the loss function and target if there are any."""
    built = build()
    if not isinstance(built, tuple) or not 2 <= len(built) <= 4 or not (hasattr(built[0], "__len__") or hasattr(built[0], "config")):
        result = f"a tuple of {len(built)}" if isinstance(built, tuple) else f"a {type(built).__name__}"
        raise UsageError(
            f"{source} returned {result}: return (layers, sample), a list of layers and a microbatch, or also loss_fn and target"
        )
    return built[0], built[1], dict(zip(("loss_fn", "target"), built[2:], strict=False))


def _write_lines(measured: Profile, output: Path | None) -> Iterator[str]:
    """One table per microbatch size."""
    units = Units(measured.time_unit, in_bytes=True)
    yield measured.source
    for size in measured.sizes:
        at = measured.at(size)
        rows: list[tuple[str, ...]] = [("layer", "F", "I", "W", "activation", "stash", "output", "parameters", "gradients", "optimizer")]
        for place, layer in enumerate(at.layers):
            times = (units.time(time) for time in (layer.f, layer.i, layer.w))
            sizes = (layer.activation, layer.weight_stash, layer.output, layer.parameters, layer.gradients, layer.optimizer)
            rows.append((layer.name or str(place), *times, *map(units.size, sizes)))
        yield ""
        yield f"microbatches of {size}: {units.time(at.time)} on one device"
        yield from format_table(rows, indent="  ")
        if not at.lacks_slices:
            yield f"  slices are known too; their times are fitted with an error of {at.fit_error:.1%}"
        elif at.tokens is not None:
            yield f"  slices are not known: {at.lacks_slices}"
    if output is not None:
        yield ""
        yield f"saved to {output}"
