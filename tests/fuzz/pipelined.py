"""A case on a pipeline: what each rank runs, and the records of all ranks as one."""

from __future__ import annotations

from typing import Any

import torch

from fuzz.batches import DIMS, Batch, count_of, make_batch, make_loss, weigh
from fuzz.case import Case
from fuzz.model import Model, build_model, find_tied
from fuzz.orders import build_table
from fuzz.records import Record, make_optimizer, record_gradients, record_result, record_state
from penstock.ir.table import Table
from penstock.runtime import Pipeline, StepResult, launch
from penstock.runtime.launch.workers import Workers

DEADLINE = 20.0
"""Seconds that a rank waits for another."""


def run_on_threads(case: Case, table: Table) -> Record:
    """The case on virtual ranks."""
    model = build_model(case, table.stages) if case.share else None
    return merge_records(launch(train, table.ranks, args=(case, table, model)))


def run_on_processes(case: Case, table: Table, workers: Workers) -> Record:
    """The case on processes, which build everything from its text."""
    return merge_records(workers.run(train_from_text, (case.to_json(),), ranks=table.ranks))


def train_from_text(text: str) -> Record:
    case = Case.from_json(text)
    return train(case, build_table(case), None)


def train(case: Case, table: Table, model: Model | None) -> Record:
    """The script of a case on one rank; the record of this rank's stages."""
    torch.set_num_threads(1)  # a setting of each thread, on which the order of sums depends
    if model is None:
        model = build_model(case, table.stages)
    pipe = make_pipeline(case, table, model)
    stages = sorted(pipe.stages)
    record: Record = {}
    optimizers: dict[str, Any] = {}
    for number, call in enumerate(case.script):
        where = f"{number}.{call}"
        match call:
            case "step" | "list" | "more":
                result = run_step(case, pipe, make_batch(case, number, call), call)
                record_result(record, where, result.loss, result.losses, result.metrics, result.outputs)
                record_gradients(record, where, model, stages)
            case "eval":
                batch = make_batch(case, number, call)
                result = pipe.eval_step(*batch.args, stage_kwargs=batch.kwargs or None, outputs=True, **_targets(case, batch))
                record_result(record, where, result.loss, result.losses, result.metrics, result.outputs)
            case "infer":
                batch = make_batch(case, number, call)
                record_result(record, where, None, None, None, pipe.infer(*batch.args, stage_kwargs=batch.kwargs or None))
            case "clip":
                record[f"{where}.norm"] = pipe.clip_grad_norm_(0.5)
            case "zero":
                _zero(pipe)
            case "sgd" | "adamw":
                if call not in optimizers:
                    optimizers[call] = make_optimizer(call, list(pipe.parameters()))
                if optimizers[call] is not None:
                    optimizers[call].step()
                _zero(pipe)
            case "late":
                model.add_late_parameter()
    pipe.gather("end", None)  # no rank records a shared model that another is still using
    record_state(record, model, stages)
    return record


def _zero(pipe: Pipeline) -> None:
    """Clear the gradients of this rank's stages, after all ranks have used them."""
    pipe.gather("zero", None)
    for _, parameter in pipe.local_parameters():
        parameter.grad = None
    pipe.gather("cleared", None)


def run_step(case: Case, pipe: Pipeline, batch: Batch, call: str) -> StepResult:
    """One training step."""
    if call != "list":
        count = count_of(case, call) if call == "more" else None
        return pipe.step(*batch.args, microbatches=count, stage_kwargs=batch.kwargs or None, outputs=True, **_targets(case, batch))
    targets = batch.cut_target() if _targets(case, batch) else None
    return pipe.step_list(batch.cut_args(), targets, stage_kwargs=batch.cut_kwargs() or None, outputs=True)


def _targets(case: Case, batch: Batch) -> dict[str, Any]:
    return {} if case.loss in ("alone", "output") else {"target": batch.target}


def make_pipeline(case: Case, table: Table, model: Model) -> Pipeline:
    """The pipeline of a case on this rank."""
    options: dict[str, Any] = {
        "loss_fn": make_loss(case, model.stages[-1]),
        "loss_reduction": case.reduction,
        "weight": weigh if case.weight else None,
        "seed": case.seed,
        "recompute": [stage in case.recompute for stage in range(table.stages)] if case.recompute else None,
        "accumulate": case.accumulate,
        "accumulate_dtype": None if case.accumulate_dtype is None else getattr(torch, case.accumulate_dtype),
        "batch_dims": DIMS.get(case.inputs, 0),
        "record": case.record,
        "deadline": DEADLINE,
    }
    if case.form == "text":
        options |= {"schedule": case.schedule, "microbatches": case.microbatches}
    else:
        options["plan"] = table
    if case.model == "sequential":
        return Pipeline(model.in_sequence(), split=model.sizes, **options)
    if case.model == "map":
        from penstock.runtime import rank

        tied = [f"{stage}.{name}.weight" for stage, module in enumerate(model.stages) for name in find_tied(module)]
        held = {stage: model.stages[stage] for stage in table.placement.stages_of(rank())}
        return Pipeline(held, **options, ties=[tied] if len(tied) > 1 else [])
    return Pipeline(list(model.stages), **options)


class RanksDisagreeError(Exception):
    """Two ranks have different values under one name."""


def merge_records(records: list[Record]) -> Record:
    """One record from all ranks', which must agree on what several of them have."""
    from fuzz.compare import describe_difference

    merged: Record = {}
    for rank, record in enumerate(records):
        for name, value in record.items():
            difference = describe_difference(value, merged.setdefault(name, value))
            if difference is not None:
                raise RanksDisagreeError(f"{name} on rank {rank} and before it: {difference}")
    return merged
