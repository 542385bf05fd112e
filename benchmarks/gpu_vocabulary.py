"""A vocabulary on all ranks against the best uneven cut, planned and run: virtual ranks on multiprocessors of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from benchmarks.gpu_models import blocks
from benchmarks.gpu_partitions import (
    LIMIT,
    RANKS,
    ROWS,
    WANTED,
    compare_kinds,
    get_timeline,
    leave_out_workspace,
    measure_step,
    profile_beside_others,
)
from benchmarks.gpu_time import wait
from torch import Tensor, nn

import penstock as ps
from penstock.runtime import TokenCrossEntropy
from penstock.runtime.batch.result import StepResult
from penstock.runtime.device.streams import create_streams

SMS = 16
"""Multiprocessors of each rank: half of a GPU in all, for the reason that `gpu_uneven.SHARES` gives."""
FAMILIES = {"1f1b": ("1f1b",), "the best of four": ("1f1b", "interleaved-1f1b", "zb-h1", "zbv")}


def vocabulary(device: Any, small: bool) -> dict[str, Any]:
    there = torch.cuda.is_available()
    width, length, layers, count, words = (16, 8, 8, 6, 64) if small else (2048, 1024, 16, 24, 262144)
    dtype = torch.float64 if small else torch.bfloat16
    sms, lanes = (SMS, create_streams(RANKS, SMS)) if there else (None, [None])
    torch.manual_seed(0)
    with torch.device(device):
        ends = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        tokens, targets = torch.randint(words, (2, ROWS * count, length))
    nn.init.normal_(ends[1].weight, std=0.02)
    model = nn.Sequential(ends[0], *blocks(layers, width, device), ends[1]).to(dtype)
    profile = _measure_profile(model, tokens[:ROWS], targets[:ROWS], lanes, small)
    if small:
        profile = _pretend_large_head(profile)
    rows = []
    for family, schedules in FAMILIES.items():
        options: dict[str, Any] = {"ranks": RANKS, "microbatches": count, "schedules": schedules, "memory_limit": LIMIT, "seconds": 0}
        plans = [ps.plan(profile, **options, vocabulary=may_spread) for may_spread in (False, True)]
        steps = [measure_step(plan, model, tokens, RANKS, sms, target=targets, loss_fn=TokenCrossEntropy()) for plan in plans]
        rows += _compare(family, plans, steps, 1e-12 if small else 1e-2)
    embedding, block, *_, head = profile.layers
    collective = 1e3 * profile.layers[0].output / (profile.bandwidth or torch.inf)
    what = (
        f"{RANKS} virtual ranks, each on {SMS} multiprocessors that no other has: a decoder with {words:,} words, {layers} {dtype} blocks "
        f"of {width} and {count} microbatches of {ROWS * length} tokens. Predicted from a profile of the whole layers that was measured in "
        f"one part while the others ran such blocks too: F, I and W {_list_times(embedding)} ms of the embedding, {_list_times(block)} ms "
        f"of a block, {_list_times(head)} ms of the head with the loss; a collective of a microbatch's activations {collective:.2f} ms. "
        f"Wanted: a step within {WANTED:.0%} of the prediction."
    )
    return {"what": what, "rows": rows}


def _measure_profile(model: nn.Sequential, tokens: Tensor, targets: Tensor, lanes: list[Any], small: bool) -> ps.Profile:
    """Of every layer in the first part, while every other part runs a block; links are copies within the device."""
    hidden = model[0](tokens).detach()
    options: dict[str, Any] = {
        "loss_fn": TokenCrossEntropy(),
        "target": targets,
        "optimizer": None,
        "warmup": 1,
        "repeats": 1 if small else 5,
    }
    options["bandwidth"] = _measure_bandwidth(hidden)
    return leave_out_workspace(profile_beside_others(list(model), tokens, lanes, model[1], hidden, small, **options))


def _pretend_large_head(profile: ps.Profile) -> ps.Profile:
    """At the tiny size: with a head as long as all blocks, so that both programs run whatever the tiny layers took."""
    *layers, head = [replace(layer, f=1e-4, i=1e-4, w=1e-4) for layer in profile.layers]
    blocks = 1e-4 * (len(layers) - 1)
    return replace(profile, layers=[*layers, replace(head, f=blocks, i=blocks, w=blocks)])


def _measure_bandwidth(hidden: Tensor) -> float | None:
    """Bytes per second of a collective of virtual ranks, in which every rank copies the tensor; None without a GPU."""
    if not hidden.is_cuda:
        return None
    copies, rounds = [torch.empty_like(hidden) for _ in range(RANKS)], 20
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for event in (begin, end):
        event.record()
        for _ in range(rounds):
            for copied in copies:
                copied.copy_(hidden)
    wait()
    return float(rounds * hidden.nbytes / (begin.elapsed_time(end) * 1e-3))


def _compare(family: str, plans: list[ps.Plan], steps: list[StepResult], tolerance: float) -> list[dict[str, Any]]:
    """One row per plan: the best uneven cut, and the vocabulary on all ranks with what it gains."""
    rows = []
    for name, plan, step in zip(("the best uneven cut", "on all ranks"), plans, steps, strict=True):
        measured = get_timeline(step).makespan
        simulated = ps.simulate(get_timeline(step).table, replace(plan.costs, optimizer=0.0))
        predicted = simulated.makespan
        rows.append(
            {
                "schedules": family,
                "vocabulary": name if plan.vocabulary or not rows else "on its ranks, which is predicted to be faster",
                "plan": plan.name,
                "layers": ", ".join(map(str, plan.partition)),
                "step ms measured": measured * 1e3,
                "predicted": predicted * 1e3,
                "off by": f"{predicted / measured - 1:+.1%}",
                "compute over predicted": compare_kinds(get_timeline(step), simulated),
                "gain": "",
                "gain predicted": "",
                "same losses": "",
                "good": "yes" if abs(predicted / measured - 1) <= WANTED else "NO",
            }
        )
    cut, spread = rows
    cut_losses, spread_losses = (torch.tensor([float(loss) for loss in step.losses]) for step in steps)
    spread["gain"] = f"{cut['step ms measured'] / spread['step ms measured'] - 1:.0%}"
    spread["gain predicted"] = f"{cut['predicted'] / spread['predicted'] - 1:.0%}"
    spread["same losses"] = "yes" if torch.allclose(cut_losses, spread_losses, rtol=tolerance, atol=0.0) else "NO"
    return rows


def _list_times(layer: ps.Layer) -> str:
    return ", ".join(f"{1e3 * getattr(layer, kind):.2f}" for kind in ("f", "i", "w"))
