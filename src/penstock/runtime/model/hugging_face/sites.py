"""What stands in a model's own forward where its layers were: a layer, or nothing."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from penstock.runtime.model.random_streams import draw_from

_PLAIN = (bool, int, float, str)


class StageState:
    """Hidden states on their way into a stage's part of the forward, and out of it."""

    def __init__(self) -> None:
        self.given: Tensor | None = None
        self.made: Tensor | None = None
        self.begun: int | None = None
        """The stream that the forward begins with, where it draws from those of its layers."""
        self.passed = False
        """Whether the forward has come to its layers."""


class LayerSlot(nn.Module):
    """A layer's place. Without a module hidden states pass as they are; the first place of a stage puts in those that came from the
    stage before, and the first place after it takes out those that it made."""

    def __init__(self, like: nn.Module, slot: StageState, module: nn.Module | None, name: str) -> None:
        super().__init__()
        self.slot, self.module, self.name = slot, module, name
        self.enters = self.leaves = False
        self.layer = self.tuples = False
        copy_attributes(self, like)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        slot = self.slot
        slot.passed = slot.passed or self.layer
        if self.leaves and slot.made is None:
            slot.made = find_hidden(args, kwargs)
        if self.enters and slot.given is not None:
            args, kwargs = _swapped(args, kwargs, slot.given)
        if self.module is None:
            hidden = find_hidden(args, kwargs)
            return (hidden,) if self.tuples else hidden
        if slot.begun is not None:
            draw_from(slot.begun, self.name)
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """What a model asks of a module that is there: the type of its weight, say."""
        return get_attribute(self, name, "module")


class EmptySlot(nn.Module):
    """What stands in place of a module in front of the layers, where hidden states come from another stage: what it gives is not used."""

    def __init__(self, like: nn.Module, slot: StageState) -> None:
        super().__init__()
        self.slot, self.embeds = slot, is_embedding(like)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given, hidden = find_hidden(args, kwargs), self.slot.given
        if hidden is None or (given.is_floating_point() and not self.embeds):
            return given
        return hidden.new_zeros(1, 1, hidden.shape[-1])


class BeforeAndAfter(nn.Module):
    """In the place of a module without parameters that runs both before the layers and after them: a stand-in for each."""

    def __init__(self, slot: StageState, before: nn.Module, after: nn.Module) -> None:
        super().__init__()
        self.slot, self.before, self.after = slot, before, after

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return (self.after if self.slot.passed else self.before)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return get_attribute(self, name, "after")


def copy_attributes(stand_in: nn.Module, like: nn.Module) -> None:
    """Have a module's plain attributes: a model may ask a layer of what kind it is."""
    own = vars(stand_in)
    stand_in.__dict__ |= {key: value for key, value in vars(like).items() if isinstance(value, _PLAIN) and key not in own}


def is_embedding(module: nn.Module) -> bool:
    """Whether it looks something up, or stands in for a module that does."""
    return isinstance(getattr(module, "like", module), nn.Embedding)


def get_attribute(stand_in: nn.Module, name: str, inner: str) -> Any:
    """An attribute of a module, or else of the one that it stands in for."""
    try:
        return nn.Module.__getattr__(stand_in, name)
    except AttributeError:
        module = stand_in.__dict__.get("_modules", {}).get(inner)
        if module is None or name.startswith("__"):
            raise
        return getattr(module, name)


def find_hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a layer is given to work on."""
    at = _place(args, kwargs)
    return args[at] if isinstance(at, int) else kwargs[at]


def _place(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | str:
    """Where among its arguments that is: what is given by position comes first, and None counts as not given."""
    names = ("hidden_states", *kwargs) if "hidden_states" in kwargs else tuple(kwargs)
    found: list[int | str] = [at for at, value in enumerate(args) if value is not None]
    return (found + [name for name in names if kwargs[name] is not None])[0]


def _swapped(args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    at = _place(args, kwargs)
    return ((*args[:at], hidden, *args[at + 1 :]), kwargs) if isinstance(at, int) else (args, kwargs | {at: hidden})
