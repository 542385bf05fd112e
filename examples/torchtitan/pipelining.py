"""A `pipelining_fn` for torchtitan 0.3.0: Penstock plans the cut and the schedule, and runs them through its drop-in for torch."""

import atexit
import sys
import threading
import time
import traceback
from contextlib import suppress

import torch.distributed as dist
from torchtitan.distributed.pipeline_parallel import _build_get_mesh_callback, _split_module
from torchtitan.tools.logging import logger

import penstock as ps
from penstock.compat.torch import PipelineStage, as_torch

SCHEDULES = ["1f1b", "interleaved-1f1b", "zbv", "dualpipe-v"]


def make_plan(model, training, parallelism, *, flops=1e12, seconds=0.0, schedules=SCHEDULES) -> ps.Plan:
    """Plan a dense decoder from its configuration. Without time to search, every rank finds the same plan."""
    attention, size = model.first_attention, parallelism.pipeline_parallel_microbatch_size
    sizes = {"layers": len(model.layers), "hidden": model.dim, "vocabulary": model.vocab_size, "sequence": training.seq_len}
    heads = {"heads": attention.n_heads, "kv_heads": attention.n_kv_heads}
    ffn = {"ffn": model.layers[0].feed_forward.w1.out_features, "gated": True}
    profile = ps.Profile.transformer(**sizes, **heads, **ffn, microbatch=size, flops=flops)
    ranks, microbatches = parallelism.pipeline_parallel_degree, training.local_batch_size // size
    return ps.plan(profile, ranks=ranks, microbatches=microbatches, schedules=schedules, seconds=seconds)


def name_modules(plan: ps.Plan) -> list[list[str]]:
    """Return the stages of a plan as torchtitan's `module_fqns_per_model_part`."""
    blocks = ([f"layers.{index}"] for index in range(len(plan.profile) - 2))
    names = iter([["tok_embeddings"], *blocks, ["norm", "lm_head"]])
    return [[name for _ in range(count) for name in next(names)] for count in plan.partition]


def pipeline_with_penstock(model, *, parallel_dims, parallelism, training, device, model_config, parallelize_fn, loss_fn, **more):
    """Do by plan what torchtitan's `pipeline_llm` does; options of `make_plan` come as `plan_options`, by `functools.partial`."""
    plan = make_plan(model_config, training, parallelism, **more.pop("plan_options", {}))
    parallelism.module_fqns_per_model_part = name_modules(plan)
    mesh, stages = parallel_dims.get_mesh("pp"), []
    for stage in plan.placement.stages_of(mesh.get_local_rank()):
        part = _split_module(model, parallelism.module_fqns_per_model_part[stage])
        part = parallelize_fn(part, parallel_dims=parallel_dims, training=training, parallelism=parallelism, **more)
        get_mesh = _build_get_mesh_callback(parallel_dims)
        stages.append(PipelineStage(part, stage, plan.placement.stages, device, group=mesh.get_group("pp"), get_mesh=get_mesh))
    schedule = as_torch(plan.schedule, stages, loss_fn=lambda *args, **kwargs: loss_fn(*args, **kwargs)[0], scale_grads=False)
    report_failures(schedule)
    logger.info(f"Penstock runs {plan.name}, bubble {plan.predicted.bubble:.1%}: {parallelism.module_fqns_per_model_part}")
    return schedule, [stage.submod for stage in stages], any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)


def report_failures(schedule) -> None:
    """When a step fails or times out on a rank, log what every rank was doing."""
    store, rank, step, ended = dist.distributed_c10d._get_default_store(), dist.get_rank(), schedule.step, threading.Event()
    keys = [f"penstock/{other}" for other in range(dist.get_world_size())]

    def answer() -> None:
        with suppress(dist.DistError):  # the store is gone once its process has ended
            while not store.check(["penstock/failed"]):
                if ended.wait(0.2):
                    return
            stack = traceback.format_stack(sys._current_frames()[threading.main_thread().ident])
            store.compare_set(keys[rank], "", "was running\n" + "".join(stack[-2:]).rstrip())

    def step_and_report(*args, **kwargs):
        try:
            return step(*args, **kwargs)
        except Exception as error:
            store.set(keys[rank], "\n  ".join([f"failed: {type(error).__name__}: {error}", *getattr(error, "__notes__", ())]))
            store.set("penstock/failed", "")
            time.sleep(1)  # for the others to answer
            answers = [store.get(key).decode() if store.check([key]) else "did not answer" for key in keys]
            logger.error("\n".join(["Penstock: a step failed", *(f"rank {other} {text}" for other, text in enumerate(answers))]))
            raise

    schedule.step = step_and_report
    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    atexit.register(lambda: (ended.set(), thread.join(5)))  # a process that ends while a thread is in the store may crash
