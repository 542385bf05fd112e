"""The model of a case: one module per stage, or the layers of all stages in a row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fuzz.case import Case, StageSpec
from fuzz.layers import Tied, make_layer
from fuzz.trees import WIDTH, WRITERS, Writer, change_in_place, read
from penstock.runtime import StageOutput


class Read(nn.Module):
    """The beginning of a stage: one tensor from whatever comes in."""

    def __init__(self, changes: str, transposed: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.changes, self.transposed, self.dtype = changes, transposed, dtype

    def forward(self, *values: Any, scale: Tensor | None = None) -> Tensor:
        if self.changes:
            change_in_place(values, self.changes)
        if self.transposed:
            values = tuple(value.t() if isinstance(value, Tensor) else value for value in values)
        h = read(*values).to(self.dtype)
        return h if scale is None else h * scale


class Write(nn.Module):
    """The end of a stage: the tree that it returns."""

    buffer: Tensor

    def __init__(self, gives: str) -> None:
        super().__init__()
        self.gives = gives
        self.late: nn.Parameter | None = None
        if gives == "buffer":
            self.register_buffer("buffer", torch.rand(WIDTH))
        if gives == "weight":
            self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, h: Tensor) -> Any:
        if self.late is not None:
            h = h * self.late
        if self.gives == "tensor":
            return h
        own = Writer(h * 1.0, self.buffer if self.gives == "buffer" else h, self.weight if self.gives == "weight" else h)
        return WRITERS[self.gives](own) if self.gives in WRITERS else _wrapped(own.h, self.gives)


def _wrapped(h: Tensor, gives: str) -> StageOutput:
    assert gives == "stage_output", gives
    return StageOutput(h, side_loss=0.1 * h.square().mean(), metrics={"output": h.detach().mean()})


class StageModule(nn.Module):
    """A stage as users write one."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, *values: Any, **kwargs: Any) -> Any:
        h: Any = self.layers[0](*values, **kwargs)
        for layer in list(self.layers)[1:]:
            h = layer(h)
        return h


class Model(nn.Module):
    """All stages of a case. `stages[s]` has the layers of stage s whatever form the pipeline gets the model in."""

    def __init__(self, case: Case, stages: int) -> None:
        super().__init__()
        self.case = case
        self.stages = nn.ModuleList(StageModule(_make_layers(case, stage)) for stage in range(stages))
        self.hook_calls: dict[str, int] = {}

    @property
    def sizes(self) -> list[int]:
        """How many layers each stage has."""
        return [len(stage.layers) for stage in self.layered]

    @property
    def layered(self) -> list[StageModule]:
        return [stage for stage in self.stages if isinstance(stage, StageModule)]

    def layer_names(self, stage: int) -> list[str]:
        """The names of a stage's layers in the model as one sequence."""
        first = sum(self.sizes[:stage])
        return [str(first + number) for number in range(self.sizes[stage])]

    def in_sequence(self) -> nn.Sequential:
        return nn.Sequential(*(layer for stage in self.layered for layer in stage.layers))

    def tensors_of(self, stages: list[int]) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of some stages under their names here, a tied one under each of its names."""
        for stage in stages:
            for name, parameter in self.stages[stage].named_parameters(remove_duplicate=False):
                yield f"{stage}.{name}", parameter

    def add_late_parameter(self) -> None:
        """Give the last stage one more parameter, if it has none yet."""
        last = self.layered[-1].layers[-1]
        assert isinstance(last, Write)
        if last.late is None:
            last.late = nn.Parameter(torch.full((WIDTH,), 1.5, dtype=getattr(torch, self.case.dtype)))

    def add_hooks(self) -> None:
        """Put the hooks of the case on every parameter."""
        seen: set[int] = set()
        for name, parameter in self.tensors_of(list(range(len(self.stages)))):
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                self._add_hook(name, parameter)

    def _add_hook(self, name: str, parameter: nn.Parameter) -> None:
        def count(parameter: Tensor) -> None:
            self.hook_calls[name] = self.hook_calls.get(name, 0) + 1

        @torch.no_grad()
        def step(parameter: Tensor) -> None:
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None

        if self.case.hooks == "count":
            parameter.register_post_accumulate_grad_hook(count)
        elif self.case.hooks == "step":
            parameter.register_post_accumulate_grad_hook(step)
        elif self.case.hooks == "double":
            parameter.register_hook(lambda grad: grad * 2)


def spec_of(case: Case, stage: int) -> StageSpec:
    return case.stages[stage] if stage < len(case.stages) else StageSpec()


def _make_layers(case: Case, stage: int) -> list[nn.Module]:
    spec = spec_of(case, stage)
    first = Read(spec.changes, transposed=stage == 0 and case.inputs == "second_dim", dtype=getattr(torch, case.dtype))
    return [first, *(make_layer(name) for name in spec.layers), Write(spec.gives)]


def find_tied(stage: nn.Module) -> list[str]:
    """The names of the layers of a stage whose weight is that of all such layers."""
    return [name for name, module in stage.named_modules() if isinstance(module, Tied)]


def build_model(case: Case, stages: int) -> Model:
    """The model of a case: the same values whenever and wherever it is built."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.number)
        model = Model(case, stages)
        model.to(getattr(torch, case.dtype))
    tied = [module for module in model.modules() if isinstance(module, Tied)]
    for module in tied[1:]:
        module.weight = tied[0].weight
    model.add_hooks()
    return model
