"""The options of `penstock plan` that plan a whole job: GPUs, links, degrees."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

from penstock.cli.options import count_option, number_option, read_counts, read_rate, read_time, text_option
from penstock.errors import CostsError, UsageError
from penstock.text.options import read_assignments

if TYPE_CHECKING:
    from penstock.planner.job import Job, Machines
    from penstock.planner.profile import Profile


_RATES = {"peak_flops": "flops", "memory_limit": "memory"} | {name: name for name in ("memory_bandwidth", "node_bandwidth", "bandwidth")}
"""What is known of each kind of GPU: the options that give it for others, and its fields of `Machines`."""


@dataclass(frozen=True)
class JobOptions:
    """The options as they were given."""

    gpus: Annotated[int | None, count_option("Plan a whole job on N GPUs: all degrees, sharding and recompute.", "--gpus")] = None
    gpus_per_node: Annotated[int, count_option("GPUs per node, for --gpus.", "--gpus-per-node")] = 8
    global_batch: Annotated[int | None, count_option("Samples per step of the whole job, for --gpus.", "--global-batch")] = None
    gpu: Annotated[str | None, text_option("The kind of GPU, for its data sheet: a100, h100 or h200.", "KIND", "--gpu")] = None
    peak_flops: Annotated[float | None, number_option("Peak operations per second of a GPU, like 989e12.", "N", "--peak-flops")] = None
    memory_bandwidth: Annotated[str | None, text_option("Bytes per second of a GPU's memory, like 3TB.", "SIZE", "--memory-bandwidth")] = (
        None
    )
    node_bandwidth: Annotated[
        str | None, text_option("Bytes per second of a GPU within its node, like 400GB.", "SIZE", "--node-bandwidth")
    ] = None
    node_latency: Annotated[str | None, text_option("Latency of a message within a node, like 2us.", "TIME", "--node-latency")] = None
    shares: Annotated[
        str | None,
        text_option(
            'The share of each rate that is reached in practice: "matmul=0.76 attention=0.5 memory=0.7 link=0.8".', "SHARES", "--shares"
        ),
    ] = None
    optimizer: Annotated[str, text_option("adam or muon; a profile has its own.", "NAME", "--optimizer")] = "adam"
    pipeline: Annotated[str | None, text_option("Pipeline degrees to choose from.  [default: all]", "N,N", "--pipeline")] = None
    data: Annotated[str | None, text_option("Data degrees to choose from.  [default: all]", "N,N", "--data")] = None
    tensor: Annotated[str | None, text_option("Tensor degrees to choose from.  [default: all in a node]", "N,N", "--tensor")] = None
    context: Annotated[str | None, text_option("Context degrees to choose from.  [default: all]", "N,N", "--context")] = None
    sharding: Annotated[str | None, text_option("ZeRO stages to choose from.  [default: 1,2,3]", "N,N", "--sharding")] = None
    vocabulary: Annotated[
        str | None,
        text_option(
            "Where embedding and head may go: ends (the first and last stage), spread (all pipeline ranks) or, with --gpus, head (only "
            "the head on all ranks).  [default: any with --gpus, else ends]",
            "WHERE",
            "--vocabulary",
        ),
    ] = None

    def make_job(self, model: dict[str, Any] | Profile, links: dict[str, Any], headroom: float | None) -> Job:
        """The job of these options for these sizes or this profile; `links` has the memory of a GPU and the links between nodes."""
        from penstock.planner.job import Job

        if self.global_batch is None:
            raise UsageError("--gpus needs --global-batch, the samples per step of the whole job")
        if isinstance(model, dict) and "flops" in model:
            raise UsageError("--transformer: leave out flops with --gpus: the rate is --peak-flops, or that of --gpu")
        free = {} if headroom is None else {"headroom": headroom}
        try:
            machines = self._make_machines(links)
            return Job(model=model, machines=machines, batch=self.global_batch, optimizer=self.optimizer, **free)
        except CostsError as error:
            raise UsageError(str(error)) from None

    def _make_machines(self, links: dict[str, Any]) -> Machines:
        from penstock.planner.job import Machines

        values: dict[str, Any] = {"gpus": self.gpus, "gpus_per_node": self.gpus_per_node}
        rates = {"memory_bandwidth": self.memory_bandwidth, "node_bandwidth": self.node_bandwidth}
        read = {name: read_rate(f"--{name.replace('_', '-')}", text) for name, text in rates.items()}
        options = {**links, **read, "flops": self.peak_flops, "node_latency": read_time("--node-latency", self.node_latency)}
        values |= {name: value for name, value in options.items() if value is not None}
        missing = [f"--{option.replace('_', '-')}" for option, name in _RATES.items() if name not in values]
        if self.gpu is None and missing:
            raise UsageError(f"--gpus needs the rates of a GPU: give its kind with --gpu (a100, h100 or h200), or {', '.join(missing)}")
        parts = (self.shares or "").replace(",", " ").split()
        values |= {f"{name}_share": share for name, share in read_assignments("--shares", parts, '"matmul=0.76 link=0.8"').items()}
        return Machines.from_fields(values) if self.gpu is None else Machines.of(self.gpu, **values)

    def refuse_without_gpus(self) -> None:
        """Refuse the options that only a whole job takes, if it is one pipeline that is planned."""
        for field in fields(self):
            if field.name not in {"gpus", "vocabulary"} and getattr(self, field.name) != field.default:
                option = f"--{field.name.replace('_', '-')}"
                raise UsageError(f"{option} is for planning a whole job: add --gpus with the number of GPUs, or leave {option} out")

    @property
    def may_spread(self) -> bool:
        """Whether the plan of one pipeline may spread embedding and head over its ranks."""
        words = [] if self.vocabulary is None else [word.strip() for word in self.vocabulary.split(",")]
        wrong = [word for word in words if word not in ("ends", "spread")]
        if wrong:
            raise UsageError(f"--vocabulary: {wrong[0]!r} is not ends or spread{', and head needs --gpus' * (wrong[0] == 'head')}")
        return "spread" in words

    @property
    def choices(self) -> dict[str, Any]:
        """The values of dimensions that the search may choose from."""
        names = ("pipeline", "data", "tensor", "context", "sharding")
        values: dict[str, Any] = {name: read_counts(f"--{name}", getattr(self, name)) for name in names}
        return {**values, "vocabulary": None if self.vocabulary is None else [word.strip() for word in self.vocabulary.split(",")]}
