"""Long sequences on a GPU: `PYTHONPATH=src python benchmarks/long_context.py --out DIR [--tokens 16384,65536] [--only seq1f1b]`.

A decoder of about 1 billion parameters on 4 virtual ranks, each on multiprocessors of its own. For every length of a sequence, 1f1b, 1f1b
with recompute, seq1f1b and slimpipe run without and with activations in host memory. Time and memory are predicted from a profile of
one block that was measured on one rank's part of the GPU, and then measured.

Writes `long_context.md` and `long_context.json` after each row, so that a run that is stopped keeps what it has. Without a GPU, or with
`--small`, a tiny decoder runs on the host; the figures mean nothing then, but losses are still compared. Ends with 1 if a row says NO.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]

import torch  # noqa: E402
from benchmarks.gpu_partitions import profile_beside_others  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.nn.attention.bias import causal_lower_right  # noqa: E402

import penstock as ps  # noqa: E402
from penstock.errors import PipelineError  # noqa: E402
from penstock.ir.kind import Kind  # noqa: E402
from penstock.planner.partition.cut import cut_layers  # noqa: E402
from penstock.planner.partition.slices import choose_lengths, split_equally  # noqa: E402
from penstock.planner.problem import Problem  # noqa: E402
from penstock.planner.request import sum_slice_times  # noqa: E402
from penstock.runtime import Pipeline, launch, prefix_of  # noqa: E402
from penstock.runtime.device.streams import create_streams  # noqa: E402
from penstock.runtime.measure.profile import profile as measure_profile  # noqa: E402
from penstock.verifier.rules.offload import peak_host_memory  # noqa: E402

RANKS, SMS = 4, 32
SHARES = (100, 75, 50, 25)
"""Percentages of activations to move: the first that hides behind the computation and fits on the host."""
HIDDEN = 1.005
"""Copies are hidden if the predicted step takes no longer than this times the step without them."""
WANTED_TIME, WANTED_MEMORY = 1.03, 0.03
"""The measured step with hidden copies against that without, and the error of the predicted memory."""


# The model ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """The size of a decoder."""

    layers: int
    hidden: int
    heads: int
    key_heads: int
    ffn: int
    vocabulary: int
    dtype: torch.dtype

    @property
    def parameters(self) -> int:
        head = self.hidden // self.heads
        maps = 2 * self.hidden**2 + 2 * self.hidden * head * self.key_heads + 3 * self.hidden * self.ffn + 2 * self.hidden
        return self.layers * maps + 2 * self.vocabulary * self.hidden + self.hidden


FULL = Shape(16, 2048, 16, 4, 8192, 16384, torch.bfloat16)
TINY = Shape(8, 32, 4, 2, 64, 32, torch.float32)


class Block(nn.Module):
    """Grouped-query attention without a mask over the tokens so far, and a gated perceptron."""

    sliceable = True

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.key_heads, self.size = shape.heads, shape.key_heads, shape.hidden // shape.heads
        self.norm1, self.norm2 = nn.RMSNorm(shape.hidden), nn.RMSNorm(shape.hidden)
        self.queries = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.keys_values = nn.Linear(shape.hidden, 2 * self.size * shape.key_heads, bias=False)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.gate, self.up = (nn.Linear(shape.hidden, shape.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, hidden = x.shape
        inner = self.norm1(x)
        queries = self._split(self.queries(inner), self.heads)
        keys, values = (self._split(part, self.key_heads) for part in self.keys_values(inner).chunk(2, dim=-1))
        start = prefix_of(self).advance(tokens)
        queries, keys = self._turn(queries, start), self._turn(keys, start)
        keys, values = prefix_of(self).extend(keys, values, dim=2)
        bias = causal_lower_right(tokens, keys.shape[2])
        mixed = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, tokens, hidden))
        inner = self.norm2(x)
        return x + self.down(functional.silu(self.gate(inner)) * self.up(inner))

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:2], heads, self.size).transpose(1, 2)

    def _turn(self, x: Tensor, start: int) -> Tensor:
        """Rotary positions, from `start` on."""
        half = self.size // 2
        rates = 1e6 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
        angles = torch.arange(start, start + x.shape[2], device=x.device, dtype=torch.float32)[:, None] * rates
        cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        one, other = x[..., :half], x[..., half:]
        return torch.cat((one * cosine - other * sine, other * cosine + one * sine), dim=-1)


class Head(nn.Module):
    """The last norm and the scores of all words."""

    sliceable = True

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm, self.scores = nn.RMSNorm(shape.hidden), nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.norm(x))


def build_layers(shape: Shape, device: torch.device, blocks: int | None = None) -> list[nn.Module]:
    """The layers of a decoder, with another number of blocks if it is given."""
    torch.manual_seed(0)
    with torch.device(device):
        count = shape.layers if blocks is None else blocks
        layers = [nn.Embedding(shape.vocabulary, shape.hidden), *(Block(shape) for _ in range(count)), Head(shape)]
    for layer in layers:
        for parameter in layer.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
    return [layer.to(shape.dtype) for layer in layers]


def mean_loss(scores: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, 1).float(), target.flatten())


# Predictions ----------------------------------------------------------------------------------------------------------


def measure_decoder(setting: Setting, tokens: int, lanes: Sequence[Any]) -> ps.Profile:
    """The profile of the decoder: memory of each kind of layer on an idle device, and its times beside other ranks that compute."""
    shape, device, small = setting.shape, setting.device, setting.small
    layers = build_layers(shape, device, blocks=1)
    sample = torch.randint(shape.vocabulary, (1, tokens), device=device)
    options: dict[str, Any] = {"loss_fn": mean_loss, "target": sample, "optimizer": None, "slices": setting.slices, "warmup": 1}
    alone = measure_profile(layers, sample, **options, repeats=1)
    busy = torch.zeros(1, tokens, shape.hidden, device=device, dtype=shape.dtype)
    beside = profile_beside_others(layers, sample, lanes, layers[1], busy, small, **options, repeats=1 if small else 3)
    measured = []
    for held, timed in zip(alone.layers, beside.layers, strict=True):
        assert held.slices is not None
        assert timed.slices is not None
        times = {name: getattr(timed.slices, name) for name in ("f", "i", "w", "error")}
        measured.append(replace(held, f=timed.f, i=timed.i, w=timed.w, slices=replace(held.slices, **times)))
    embedding, block, head = measured
    links = {"host_bandwidth": setting.host_bandwidth, "host_link_shared": RANKS}
    return replace(alone, layers=[embedding, *[block] * shape.layers, head], **links)


def measure_host_bandwidth(device: torch.device, size: int) -> float | None:
    """Bytes per second of copies to pinned host memory and back at the same time, in each direction."""
    if device.type != "cuda":
        return None
    host, other = (torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    there, back = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    for rounds in (1, 4):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(rounds):
            with torch.cuda.stream(streams[0]):
                host.copy_(there, non_blocking=True)
            with torch.cuda.stream(streams[1]):
                back.copy_(other, non_blocking=True)
        torch.cuda.synchronize()
    return 4 * size / (time.perf_counter() - start)


@dataclass(frozen=True)
class Case:
    """A schedule with its options, on one length of sequences."""

    name: str
    recompute: bool = False
    offload: bool = False

    @property
    def label(self) -> str:
        return self.name + (", recomputed" if self.recompute else "") + (", offload" if self.offload else "")


CASES = [
    Case(name, recompute, offload)
    for name, recompute in (("1f1b", False), ("1f1b", True), ("seq1f1b", False), ("slimpipe", False))
    for offload in (False, True)
]


@dataclass(frozen=True)
class Prepared:
    """A case with everything that is predicted of it."""

    case: Case
    program: ps.Program
    sizes: tuple[int, ...]
    lengths: tuple[int, ...]
    problem: Problem
    share: int = 0
    hidden: bool = True
    """Whether the predicted step takes no longer than without copies."""

    @property
    def predicted(self) -> ps.Timeline:
        return ps.simulate(self.program, self.problem.costs)

    def count_moves(self) -> str:
        """How many activations move to the host, of how many."""
        rows = self.program.rows
        return f"{int(rows.is_kind(Kind.OFFLOAD).sum())} of {int(rows.is_kind(Kind.F).sum())}"

    @property
    def host_memory(self) -> float:
        """What all ranks have on the host at once, at most."""
        return sum(peak_host_memory(self.program, self.problem.costs))


def prepare(case: Case, profile: ps.Profile, microbatches: int, setting: Setting) -> Prepared:
    """Cut the model and the sequence for a case, and choose how much it moves to the host."""
    assert profile.tokens is not None
    slices, granularity = setting.slices, setting.granularity
    sliced = {} if case.name == "1f1b" else {"slices": slices}
    schedule = ps.schedule(case.name, ranks=RANKS, microbatches=microbatches, **sliced)
    lengths: tuple[int, ...] = ()
    if schedule.slices > 1:
        time_of_slice = sum_slice_times(profile, (True,) * len(profile))
        even = split_equally(profile.tokens, slices, granularity)
        lengths = even if case.name == "slimpipe" else choose_lengths(time_of_slice, profile.tokens, slices, RANKS, granularity)
    flags = (case.recompute,) * schedule.stages
    sizes = cut_layers(profile, schedule.placement, recompute=flags, lengths=lengths).sizes
    problem = Problem.cut(profile, schedule.placement, microbatches, sizes, flags, lengths=lengths)
    plain = Prepared(case, ps.lower(schedule), sizes, lengths, problem)
    if not case.offload:
        return plain
    step = plain.predicted.makespan
    choices = [replace(plain, program=ps.lower(schedule, offload=share), share=share) for share in SHARES]
    choices = [choice for choice in choices if choice.host_memory <= setting.host_limit] or choices[-1:]
    choices = [replace(choice, hidden=choice.predicted.makespan <= HIDDEN * step) for choice in choices]
    return next((choice for choice in choices if choice.hidden), choices[0])


# Measurements ---------------------------------------------------------------------------------------------------------


@dataclass
class Measured:
    """What a case took."""

    seconds: float
    loss: float
    peaks: list[float] | None
    """Bytes per rank, parameters included, if the allocator's history is at hand."""


class AllocationTrace:
    """The allocator's history of a step: the most bytes that were allocated at once on each stream, and so by each virtual rank."""

    def __init__(self, device: torch.device) -> None:
        self._traces = device.type == "cuda"
        self.peaks: dict[int, int] = {}

    def start(self) -> None:
        if self._traces:
            torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=4_000_000)

    def stop(self) -> None:
        if not self._traces:
            return
        torch.cuda.synchronize()
        held: dict[int, int] = {}
        for event in torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]:
            sign = {"alloc": 1, "free_requested": -1}.get(event["action"], 0)
            stream = event["stream"]
            held[stream] = held.get(stream, 0) + sign * event["size"]
            self.peaks[stream] = max(self.peaks.get(stream, 0), held[stream])
        torch.cuda.memory._record_memory_history(enabled=None)


def run_case(prepared: Prepared, shape: Shape, batch: Tensor, steps: int, sms: int | None) -> Measured:
    """Run a case on virtual ranks: a warm-up step, one whose memory is traced, and some that are timed."""
    device, trace = batch.device, AllocationTrace(batch.device)

    def train() -> tuple[list[float], float, int, int]:
        layers = build_layers(shape, device)
        pipe = Pipeline(
            nn.Sequential(*layers),
            prepared.program,
            split=list(prepared.sizes),
            loss_fn=mean_loss,
            recompute=prepared.case.recompute,
            slice_lengths=list(prepared.lengths) or None,
            record=True,
        )
        del layers
        own = sum(parameter.numel() * parameter.element_size() for parameter in pipe.parameters())
        stream = torch.cuda.current_stream().cuda_stream if device.type == "cuda" else 0
        seconds, loss = [], 0.0
        for number in range(steps + 2):
            if number == 1 and pipe.rank == 0:
                trace.start()
            pipe.gather("begin", None)
            result = pipe.step(batch, target=batch)
            loss = float(result.loss)
            pipe.gather("end", None)
            if number == 1 and pipe.rank == 0:
                trace.stop()
            if number > 1:
                assert result.timeline is not None
                seconds.append(result.timeline.makespan)
            for parameter in pipe.parameters():
                parameter.grad = None
            pipe.gather("cleared", None)
        return seconds, loss, own, stream

    results = launch(train, RANKS, sms=sms)
    held = [own + trace.peaks.get(stream, 0) for _, _, own, stream in results] if trace.peaks else None
    return Measured(statistics.median(results[0][0]), results[0][1], held)


# Rows -----------------------------------------------------------------------------------------------------------------


@dataclass
class Setting:
    """What all rows of a run share."""

    shape: Shape
    device: torch.device
    small: bool
    microbatches: int
    """Sequences per step; 0 for 4 of them, or 2 if they are long."""
    slices: int
    granularity: int
    limit: float
    """Bytes that a rank may hold."""
    capacity: float
    """Bytes of the device, which all ranks share: nothing is run that is predicted to take more."""
    host_limit: float
    host_bandwidth: float | None
    steps: int

    def count_microbatches(self, tokens: int) -> int:
        return self.microbatches or (2 if tokens > 2**15 else 4)

    def describe(self) -> str:
        shape = self.shape
        return (
            f"a decoder of {shape.parameters / 1e9:.2f}G parameters ({shape.layers} blocks of {shape.hidden}, {shape.heads} heads, "
            f"{shape.key_heads} of keys), {str(shape.dtype).removeprefix('torch.')}; {RANKS} virtual ranks, microbatches of one sequence, "
            f"{self.slices} slices where there are any; at most {self.limit / 2**30:.3g} GiB per rank"
        )


def list_rows(setting: Setting, tokens: int, only: Sequence[str], lanes: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """One row per case on sequences of so many tokens."""
    profile = measure_decoder(setting, tokens, lanes)
    release_memory()
    microbatches = setting.count_microbatches(tokens)
    torch.manual_seed(tokens)
    batch = torch.randint(setting.shape.vocabulary, (microbatches, tokens), device=setting.device)
    before: dict[tuple[str, bool], float] = {}
    losses: list[float] = []
    for case in (case for case in CASES if not only or case.name in only):
        prepared = prepare(case, profile, microbatches, setting)
        timeline = prepared.predicted
        row: dict[str, Any] = {"tokens": tokens, "sequences": microbatches, "schedule": case.label, "moved": prepared.count_moves()}
        row |= {"predicted s": timeline.makespan, "predicted tokens/s": microbatches * tokens / timeline.makespan}
        row |= {"predicted GiB": max(timeline.peak_memory) / 2**30, "predicted to fit": say(max(timeline.peak_memory) <= setting.limit)}
        if sum(timeline.peak_memory) > setting.capacity or prepared.host_memory > setting.host_limit:
            yield row | {"note": "not run: over the memory of the device or of the host"}
            continue
        try:
            sms = SMS if setting.device.type == "cuda" else None
            measured = run_case(prepared, setting.shape, batch, 1 if tokens > 2**16 else setting.steps, sms)
        except (torch.OutOfMemoryError, PipelineError) as error:
            if not isinstance(error.__cause__ or error, torch.OutOfMemoryError):
                raise
            release_memory()
            yield row | {"note": "out of memory"}
            continue
        release_memory()
        row |= {"measured s": measured.seconds, "tokens/s": microbatches * tokens / measured.seconds}
        row["step off by"] = f"{timeline.makespan / measured.seconds - 1:+.1%}"
        good = []
        if measured.peaks is not None:
            errors = [predicted / peak - 1 for predicted, peak in zip(timeline.peak_memory, measured.peaks, strict=True)]
            worst = max(errors, key=abs)
            row |= {"GiB": max(measured.peaks) / 2**30, "fits": say(max(measured.peaks) <= setting.limit), "memory off by": f"{worst:+.1%}"}
            good.append(abs(worst) <= WANTED_MEMORY)
        if case.offload and (case.name, case.recompute) in before:
            ratio = measured.seconds / before[case.name, case.recompute]
            row |= {"hidden": say(prepared.hidden), "step over that without offload": ratio}
            good += [ratio <= WANTED_TIME] if prepared.hidden else []
        elif not case.offload:
            before[case.name, case.recompute] = measured.seconds
        losses.append(measured.loss)
        tolerance = 1e-5 if setting.shape.dtype is torch.float32 else 1e-2
        row |= {"loss": measured.loss, "same loss": say(abs(measured.loss - losses[0]) <= tolerance * abs(losses[0]))}
        yield row | {"good": say(all(good), no="NO")}


def say(holds: bool, no: str = "no") -> str:
    return "yes" if holds else no


def release_memory() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def summarise(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The longest sequence of each case that was predicted to fit, and that was measured to."""
    longest = []
    for label in dict.fromkeys(row["schedule"] for row in rows):
        own = [row for row in rows if row["schedule"] == label]
        predicted = [row for row in own if row["predicted to fit"] == "yes"]
        measured = [row for row in own if row.get("fits") == "yes"]
        best = max(measured or predicted, key=lambda row: row["tokens"], default=None)
        longest.append(
            {
                "schedule": label,
                "longest predicted": max((row["tokens"] for row in predicted), default=0),
                "longest measured": max((row["tokens"] for row in measured), default=0),
                "tokens/s there": "" if best is None else best.get("tokens/s", best["predicted tokens/s"]),
            }
        )
    return longest


def fails(rows: Sequence[dict[str, Any]], small: bool) -> bool:
    """Whether a row is not as it should be. At the tiny size losses are judged, and no figures."""
    return any("error" in row or row.get("same loss") == "no" or (not small and row.get("good") == "NO") for row in rows)


# The command ----------------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    options = read_options(arguments)
    there = torch.cuda.is_available() and not options.cpu
    small, device = options.small or not there, torch.device("cuda" if there else "cpu")
    if not there:
        torch.set_num_threads(1)
    memory = torch.cuda.get_device_properties(0).total_memory if there else 2**40
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = 0.8 * memory / RANKS if options.limit is None else options.limit * 2**30
    setting = Setting(
        shape=TINY if small else FULL,
        device=device,
        small=small,
        microbatches=options.microbatches,
        slices=options.slices or (4 if small else 16),
        granularity=4 if small else 128,
        limit=limit,
        capacity=0.95 * memory,
        host_limit=0.7 * host if options.host_limit is None else options.host_limit * 2**30,
        host_bandwidth=measure_host_bandwidth(device, 2**20 if small else 2**30),
        steps=options.steps,
    )
    about = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if there else "cpu",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": "PYTHONPATH=src python benchmarks/long_context.py" + "".join(f" {word}" for word in (arguments or sys.argv[1:])),
        "what": setting.describe(),
        "host bandwidth": "unlimited"
        if setting.host_bandwidth is None
        else f"{setting.host_bandwidth / 1e9:.1f} GB/s each way, shared by all",
        "size": "tiny, only to see that it runs" if small else "full",
    }
    lanes = create_streams(RANKS, SMS if there else None)
    rows: list[dict[str, Any]] = []
    for tokens in options.tokens or ([32, 64] if small else [16384, 32768, 65536, 131072]):
        try:
            for row in list_rows(setting, tokens, options.only, lanes):
                rows.append(row)
                print(row, flush=True)
                write(options.out, about, rows)
        except Exception:  # one length must not lose the others
            rows.append({"tokens": tokens, "schedule": "all", "predicted to fit": "", "error": traceback.format_exc()})
            print(rows[-1]["error"], flush=True)
            write(options.out, about, rows)
            release_memory()
    return int(fails(rows, small))


def read_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    names = list(dict.fromkeys(case.name for case in CASES))
    parser.add_argument("--out", type=Path, default=Path("long-context-report"))
    parser.add_argument("--tokens", type=lambda text: [int(word) for word in text.split(",")], help="lengths of sequences")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], help=f"schedules of {', '.join(names)}")
    parser.add_argument("--microbatches", type=int, default=0, help="sequences per step; 4 by default, 2 if they are long")
    parser.add_argument("--slices", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2, help="steps that are timed")
    parser.add_argument("--limit", type=float, help="GiB that a rank may hold; by default 0.8 of a quarter of the device")
    parser.add_argument("--host-limit", type=float, help="GiB on the host for all ranks; by default 0.7 of its memory")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--cpu", action="store_true", help="run without a GPU, at the tiny size")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.only if name not in names]
    if unknown:
        parser.error(f"no schedule {unknown[0]!r}; there are {', '.join(names)}")
    return options


def write(folder: Path, about: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    longest = summarise([row for row in rows if "error" not in row])
    (folder / "long_context.json").write_text(json.dumps({"about": about, "rows": rows, "longest": longest}, indent=1), encoding="utf-8")
    head = [f"- {name}: {value}" for name, value in about.items()]
    text = [
        "# Long sequences on a GPU",
        "",
        *head,
        "",
        *make_table(rows),
        "",
        "## The longest sequence that fits",
        "",
        *make_table(longest),
        "",
    ]
    (folder / "long_context.md").write_text("\n".join(text), encoding="utf-8")


def make_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    columns = list(dict.fromkeys(key for row in rows for key in row if key != "error"))
    cells = [[format_cell(row.get(column, "")) for column in columns] for row in rows]
    return ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns), *("| " + " | ".join(line) + " |" for line in cells)]


def format_cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    raise SystemExit(main())
