"""`penstock profile`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import AsJson, whole_number, writable
from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.draw.terminal import Line
    from penstock.planner.profile import Profile


def profile(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py:FUNCTION",
            help="A function without arguments that returns layers, or a Hugging Face model, and a sample; a loss function and a "
            "target too, if there are.",
        ),
    ],
    *,
    microbatch_sizes: Annotated[
        str | None,
        typer.Option(
            "--microbatch-sizes", metavar="N,N", help="Rows of a microbatch to measure.  [default: the sample's, half of it, a quarter]"
        ),
    ] = None,
    device: Annotated[str, typer.Option("--device", metavar="NAME", help="Where to measure: cpu, cuda, or auto.")] = "auto",
    optimizer: Annotated[str, typer.Option("--optimizer", metavar="NAME", help="Whose memory counts: adamw, adam, sgd or none.")] = "adamw",
    warmup: Annotated[int, typer.Option("--warmup", metavar="N", parser=whole_number, help="Runs of each layer before it is timed.")] = 3,
    repeats: Annotated[int, typer.Option("--repeats", metavar="N", parser=whole_number, help="Runs that the median is taken of.")] = 7,
    latency: Annotated[float, typer.Option("--latency", metavar="S", help="Seconds that a message between ranks takes at least.")] = 0.0,
    bandwidth: Annotated[
        str | None, typer.Option("--bandwidth", metavar="SIZE", help="What a link carries a second, like 50GB.  [default: unlimited]")
    ] = None,
    as_json: AsJson = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", callback=writable, help="Save the profile: .json or .toml.")
    ] = None,
) -> None:
    """Measure a model layer by layer.

    Times forward and both backwards of every layer, split as a pipeline splits them, and measures what each holds in memory.
    Needs torch.

    \b
    Examples:
      penstock profile examples/gpt.py:build -o p.json
      penstock profile examples/gpt.py:build --microbatch-sizes 1,2,4,8 --bandwidth 50GB -o p.json
    """
    from penstock.cli.loading import load_function
    from penstock.cli.output import deliver
    from penstock.cli.plan import numbers, size
    from penstock.cli.progress import progress
    from penstock.cli.timed import check_output
    from penstock.runtime.measure.profile import count_rows
    from penstock.runtime.measure.profile import profile as measure

    check_output(output, (".json", ".toml"))
    sizes, speed = numbers("--microbatch-sizes", microbatch_sizes), size("--bandwidth", bandwidth)
    layers, sample, given = _built(source, load_function(source))
    sizes = sizes or _halves(count_rows(sample))
    how: dict[str, Any] = {"microbatch_sizes": sizes, "warmup": warmup, "repeats": repeats, "latency": latency, "bandwidth": speed}
    how |= {"device": device, "optimizer": optimizer, **given}
    with progress(repeats * len(sizes)) as step:
        made = measure(layers, sample, **how, progress=lambda what, at, of: step(what))
    if output is not None:
        made.save(output)
    deliver(lambda _: _lines(made, output), made.to_json, as_json=as_json, output=None)


def _built(source: str, build: Callable[[], Any]) -> tuple[Any, Any, dict[str, Any]]:
    """The layers, the sample, and the loss function and target if there are."""
    made = build()
    if not isinstance(made, tuple) or not 2 <= len(made) <= 4 or not (hasattr(made[0], "__len__") or hasattr(made[0], "config")):
        what = f"a tuple of {len(made)}" if isinstance(made, tuple) else f"a {type(made).__name__}"
        raise UsageError(
            f"{source} returned {what}: return (layers, sample), a list of layers and a microbatch, or also loss_fn and target"
        )
    return made[0], made[1], dict(zip(("loss_fn", "target"), made[2:], strict=False))


def _halves(rows: int) -> list[int]:
    """Sizes to choose from: the sample's, half of it and a quarter, where they are whole."""
    return [rows // part for part in (1, 2, 4) if rows % part == 0]


def _lines(made: Profile, output: Path | None) -> Iterator[Line]:
    """A table for each microbatch size."""
    from penstock.planner.units import Units, table

    units = Units(made.time_unit, in_bytes=True)
    yield [(made.source, None)]
    for size in made.sizes:
        at = made.at(size)
        rows: list[tuple[str, ...]] = [("layer", "F", "I", "W", "activation", "stash", "output", "parameters", "gradients", "optimizer")]
        for place, layer in enumerate(at.layers):
            times = (units.time(time) for time in (layer.f, layer.i, layer.w))
            held = (layer.activation, layer.weight_stash, layer.output, layer.parameters, layer.gradients, layer.optimizer)
            rows.append((layer.name or str(place), *times, *map(units.size, held)))
        yield []
        yield [(f"microbatches of {size}: {units.time(at.time)} on one device", None)]
        yield from ([(line, None)] for line in table(rows, left=(0,)))
    if output is not None:
        yield []
        yield [(f"saved to {output}", None)]
