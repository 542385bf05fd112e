"""What a case must give: the unpipelined model over the microbatches in a plain loop."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fuzz.batches import DIMS, Batch, join, make_batch, make_loss, weigh
from fuzz.case import Case
from fuzz.layers import collect_side
from fuzz.model import Model, build_model
from fuzz.records import Record, make_optimizer, record_gradients, record_result, record_state
from fuzz.trees import map_tensors
from penstock.ir.graph import StageGraph
from penstock.runtime import StageOutput


def run_plain(case: Case, stages: int, graph: StageGraph) -> Record:
    """Run the script of a case without a pipeline."""
    with torch.random.fork_rng(devices=[]):
        return _Loop(case, stages, graph).run()


class _Loop:
    def __init__(self, case: Case, stages: int, graph: StageGraph) -> None:
        self.case, self.graph = case, graph
        self.model: Model = build_model(case, stages)
        self.modules = self.model.layered
        self.loss = make_loss(case, self.modules[-1])
        self.steps = 0
        self.optimizers: dict[str, Any] = {}
        self.sums: dict[int, Tensor] = {}
        """The gradients of one step in the precision of `accumulate_dtype`, by the parameter's id."""

    def run(self) -> Record:
        record: Record = {}
        everything = list(range(len(self.modules)))
        for number, call in enumerate(self.case.script):
            self._call(record, number, call)
            if call in ("step", "list", "more"):
                record_gradients(record, f"{number}.{call}", self.model, everything)
        record_state(record, self.model, everything)
        return record

    def _call(self, record: Record, number: int, call: str) -> None:
        where = f"{number}.{call}"
        parameters = list(self.model.parameters())
        match call:
            case "step" | "list" | "more":
                with self._summed_apart(parameters):
                    record_result(record, where, *self._train(make_batch(self.case, number, call)))
                self.steps += 1
            case "eval" | "infer":
                self.model.eval()
                with torch.no_grad():
                    result = self._evaluate(make_batch(self.case, number, call), losses=call == "eval")
                self.model.train()
                record_result(record, where, *result)
            case "clip":
                record[f"{where}.norm"] = nn.utils.clip_grad_norm_(parameters, 0.5)
            case "zero":
                self.model.zero_grad()
            case "late":
                self.model.add_late_parameter()
            case "sgd" | "adamw":
                if call not in self.optimizers:
                    self.optimizers[call] = make_optimizer(call, parameters)
                if self.optimizers[call] is not None:
                    self.optimizers[call].step()
                self.model.zero_grad()

    @contextmanager
    def _summed_apart(self, parameters: list[nn.Parameter]) -> Iterator[None]:
        """Sum gradients of microbatches in the precision of `accumulate_dtype`, and round once."""
        if self.case.accumulate_dtype is None:
            yield
            return
        before = [parameter.grad for parameter in parameters]
        self.sums.clear()
        for parameter in parameters:
            parameter.grad = None
        yield
        for parameter, grad in zip(parameters, before, strict=True):
            total = self.sums.get(id(parameter))
            rounded = None if total is None else total.to(parameter.dtype)
            parameter.grad = rounded if grad is None else grad if rounded is None else grad + rounded

    def _sweep(self) -> None:
        """After a microbatch, move its gradients into the sums."""
        if self.case.accumulate_dtype is None:
            return
        dtype = getattr(torch, self.case.accumulate_dtype)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                grad, parameter.grad = parameter.grad.to(dtype), None
                self.sums[id(parameter)] = grad if id(parameter) not in self.sums else self.sums[id(parameter)] + grad

    # One batch --------------------------------------------------------------------------------------------------------

    def _scales(self, batch: Batch, targets: list[Any]) -> list[float]:
        """How much each microbatch's loss counts."""
        if self.case.weight and self.case.loss not in ("alone", "output"):
            weights = [weigh(target) for target in targets]
        elif self.case.reduction == "sum":
            return [1.0] * len(batch.sizes)
        else:
            weights = [float(size) for size in batch.sizes]
        return [weight / sum(weights) for weight in weights]

    def _train(self, batch: Batch) -> tuple[Any, ...]:
        args, targets, kwargs = batch.cut_args(), batch.cut_target(), batch.cut_kwargs()
        losses, side, outputs = [], [], []
        metrics: dict[str, list[Tensor]] = {}
        scales = self._scales(batch, targets)
        for microbatch, scale in enumerate(scales):
            given = {stage: pieces[microbatch] for stage, pieces in kwargs.items()}
            output, extra = self._forward(args[microbatch], given, microbatch, metrics)
            loss = self._loss_of(output, targets[microbatch])
            ends = [loss * scale] if scale else []
            ends += [each * scale for _, each in extra]
            roots = [end for end in ends if end.requires_grad]
            if roots:
                torch.autograd.backward(roots)
            self._sweep()
            losses.append(loss.detach())
            side += _sum_by_stage(extra, scale)
            outputs.append(detach(output))
        return self._total(losses, scales, side), losses, metrics, join(outputs, self._out_dim)

    def _evaluate(self, batch: Batch, losses: bool) -> tuple[Any, ...]:
        args, targets, kwargs = batch.cut_args(), batch.cut_target(), batch.cut_kwargs()
        found, side, outputs = [], [], []
        metrics: dict[str, list[Tensor]] = {}
        scales = self._scales(batch, targets)
        for microbatch, scale in enumerate(scales):
            given = {stage: pieces[microbatch] for stage, pieces in kwargs.items()}
            output, extra = self._forward(args[microbatch], given, microbatch, metrics)
            if losses:
                found.append(self._loss_of(output, targets[microbatch]))
            side += _sum_by_stage(extra, scale)
            outputs.append(detach(output))
        joined = join(outputs, self._out_dim)
        return (self._total(found, scales, side), found, metrics, joined) if losses else (None, None, None, joined)

    def _forward(
        self, args: tuple[Any, ...], kwargs: dict[int, Any], microbatch: int, metrics: dict[str, list[Tensor]]
    ) -> tuple[Any, list[tuple[int, Tensor]]]:
        """The output of one microbatch, and its side losses by stage."""
        made: dict[int, Any] = {}
        side: list[tuple[int, Tensor]] = []
        for stage, module in enumerate(self.modules):
            inputs = [made[other] for other in sorted(self.graph.inputs_of(stage), reverse=True)]
            with collect_side() as (losses, figures):
                made[stage] = self._run_stage(stage, module, inputs, args, kwargs.get(stage, {}), microbatch)
            if isinstance(made[stage], StageOutput):
                output = made[stage]
                losses += [] if output.side_loss is None else [output.side_loss]
                figures.update(output.metrics)
                made[stage] = output.value
            side += [(stage, loss) for loss in losses]
            for name, value in figures.items():
                metrics.setdefault(name, []).append(value.detach())
        return made[len(self.modules) - 1], side

    def _run_stage(self, stage: int, module: Any, inputs: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any], microbatch: int) -> Any:
        arguments = args if not inputs else tuple(inputs)
        if inputs and self.case.model != "sequential" and type(inputs[0]) is tuple:
            arguments = (*inputs[0], *inputs[1:])
        if self.case.seed is not None:
            stream = "layers" if self.case.model == "sequential" else stage
            draw_from(f"{self.case.seed}/{self.steps}", stream, microbatch)
        if self.case.model != "sequential" or self.case.seed is None:
            return module(*arguments, **kwargs)
        begun = torch.initial_seed()
        value: Any = None
        for number, (name, layer) in enumerate(zip(self.model.layer_names(stage), module.layers, strict=True)):
            draw_from(begun, name)
            value = layer(value) if number else layer(*arguments, **kwargs)
        return value

    def _loss_of(self, output: Any, target: Any) -> Tensor:
        if self.loss is None:
            return output
        return self.loss(output) if self.case.loss == "alone" else self.loss(output, target)

    @property
    def _out_dim(self) -> int:
        dims = DIMS.get(self.case.inputs, 0)
        return dims if isinstance(dims, int) else 0

    def _total(self, losses: list[Tensor], scales: list[float], side: list[Tensor]) -> Tensor | None:
        """The loss of the batch: of the microbatches that count, in order, and of the side losses after them."""
        total: Tensor | None = None
        for value in (*(loss * scale for loss, scale in zip(losses, scales, strict=False) if scale), *side):
            total = value if total is None else total + value
        return total


def draw_from(*key: object) -> None:
    """Start the documented random stream of this key."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "little") >> 1)


def _sum_by_stage(side: list[tuple[int, Tensor]], scale: float) -> list[Tensor]:
    """The weighted side losses of one microbatch, one sum per stage."""
    stages = sorted({stage for stage, _ in side})
    return [torch.stack([loss.detach() * scale for other, loss in side if other == stage]).sum() for stage in stages]


def detach(value: Any) -> Any:
    return map_tensors(lambda tensor: tensor.detach(), value)
