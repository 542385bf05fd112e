"""One rank of torchtitan's own Trainer, started by torchrun: runs the cases of a JSON file and writes what the last stage's rank saw.

A case has the `steps`, and the `plan` for our pipelining function (options of `make_plan`) or the `settings` of `parallelism` for
torchtitan's own. It may ask for the same cut as an earlier case (`cut`), for the plain cross entropy (`loss`), for no recompute
(`recompute`), or for a forward that fails or hangs (`fail`, `hang`: its number on rank 1).
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "torchtitan"))
import train_debugmodel
from pipelining import pipeline_with_penstock
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.tools.logging import init_logger


def build_config(case: dict[str, Any], folder: str) -> Any:
    config = train_debugmodel.penstock_debugmodel()
    config.dump_folder, config.training.steps = folder, case["steps"]
    if "plan" in case:
        config.model_spec.pipelining_fn = partial(pipeline_with_penstock, plan_options=case["plan"])
    else:
        config.model_spec.pipelining_fn = pipeline_llm
        for name, value in case["settings"].items():
            assert hasattr(config.parallelism, name), name
            setattr(config.parallelism, name, value)
    if "hang" in case:
        config.comm.init_timeout_seconds = 30  # gloo keeps the timeout that it was started with
    if case.get("loss") == "plain":
        config.loss = config.loss.loss_fn
    if case.get("recompute") == "none":
        config.activation_checkpoint = None
    return config


def run(config: Any, case: dict[str, Any]) -> dict[str, Any]:
    """Train, and return the losses and norms of all steps as this rank logged them, and the parameters without a gradient in the last."""
    trainer = config.build()
    losses: list[float] = []
    norms: list[float] = []
    log = trainer.metrics_processor.log

    def record(step: int, loss: float, worst: float, norm: float, **more: Any) -> None:
        losses.append(loss)
        norms.append(norm)
        log(step, loss, worst, norm, **more)

    trainer.metrics_processor.log = record
    if torch.distributed.get_rank() == 1:
        calls = iter(range(1000))

        def stop_forward(*_: Any) -> None:
            call = next(calls)
            if call == case.get("hang"):
                time.sleep(600)
            if call == case.get("fail"):
                raise FloatingPointError("this layer is broken")

        trainer.model_parts[0].register_forward_pre_hook(stop_forward)
    trainer.train()
    trainer.close()
    modules = config.parallelism.module_fqns_per_model_part
    missing = [name for part in trainer.model_parts for name, parameter in part.named_parameters() if parameter.grad is None]
    return {"losses": losses, "norms": norms, "modules": modules, "missing": missing, "has_loss": trainer.pp_has_last_stage}


if __name__ == "__main__":
    cases, out = sys.argv[1:]
    init_logger()
    results: dict[str, Any] = {}
    for name, case in json.loads(Path(cases).read_text()).items():
        config = build_config(case, f"{out}/outputs")
        if "cut" in case:
            config.parallelism.module_fqns_per_model_part = results[case["cut"]]["modules"]
        results[name] = run(config, case)
        if results[name]["has_loss"]:
            (Path(out) / f"{name}.json").write_text(json.dumps(results[name]))
    torch.distributed.destroy_process_group()
    os._exit(0)  # torchtitan's threads may outlive the process group
