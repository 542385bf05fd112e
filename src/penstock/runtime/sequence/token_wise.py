"""Modules that can run on slices of a sequence: those that treat each token by itself, and those that say so.

A module that mixes tokens without asking for its prefix would compute something else on slices, silently. So every module of a stage must
be one of torch's that are known to treat each token by itself, or inside one that declares `sliceable = True`.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from penstock.errors import ScheduleError
from penstock.runtime.torch_internals.modules import NormBase, own_children

DECLARATION = "sliceable"
"""The attribute by which a module declares that its tokens see earlier ones only through `prefix_of`, itself and all modules inside it."""

_TOKEN_WISE: set[type[nn.Module]] = {
    *(nn.Linear, nn.Bilinear, nn.Embedding, nn.Identity, nn.RMSNorm, nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout),
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.RReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.LogSigmoid),
    *(nn.Tanh, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.Hardshrink, nn.Softshrink, nn.Tanhshrink, nn.Softplus, nn.Softsign),
    *(nn.Threshold,),
}
"""Modules whose output for a token depends on that token alone."""
_CONTAINERS: set[type[nn.Module]] = {nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict}
_ALONG_LAST: set[type[nn.Module]] = {nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.GLU}
"""Modules that work along one dimension, which must be the last one."""

_MIXERS: tuple[tuple[tuple[type[nn.Module], ...], str], ...] = (
    (
        (nn.MultiheadAttention, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder),
        "attends to the slice alone, not to the prefix",
    ),
    ((nn.TransformerEncoderLayer, nn.TransformerDecoderLayer), "attends to the slice alone, not to the prefix"),
    ((nn.RNNBase, nn.RNNCellBase), "starts each slice without the state that the slice before has left"),
    ((nn.Conv1d, nn.Conv2d, nn.Conv3d), "convolves neighbouring tokens, and those at the start of a slice lack the tokens before them"),
    ((NormBase,), "normalises over all tokens of a batch, and a slice has other statistics than the whole sequence"),
)


def check_sliceable(name: str, module: nn.Module) -> None:
    """Refuse a module that may mix the tokens of a sequence in a way that slices would change."""
    for path, part in _find_undeclared(name, module):
        kind = type(part).__name__
        reason = next((reason for kinds, reason in _MIXERS if isinstance(part, kinds)), None)
        if isinstance(part, NormBase):
            raise ScheduleError(f"module {path} ({kind}) {reason}: replace it by a LayerNorm, or use a schedule without slices")
        raise ScheduleError(
            f"module {path} ({kind}) {reason or 'may mix the tokens of a sequence, which cannot be seen from outside'}: use a schedule "
            "without slices, or let the module around it reach earlier tokens through penstock.runtime.prefix_of and declare "
            f"{DECLARATION} = True in its class; a module that treats each token by itself needs the declaration only"
        )


def _find_undeclared(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that are not known to treat each token by itself."""
    if getattr(module, DECLARATION, False) is True:
        for name, part in module.named_modules():
            if isinstance(part, NormBase) and getattr(part, DECLARATION, False) is not True:
                yield f"{path}.{name}", part
        return
    kind = _find_class(module)
    if kind in _CONTAINERS:
        for name, child in own_children(module).items():
            if child is not None:
                yield from _find_undeclared(f"{path}.{name}", child)
    elif not _is_token_wise(kind, module):
        yield path, module


def _is_token_wise(kind: type[nn.Module], module: nn.Module) -> bool:
    if kind is nn.LayerNorm:
        return len(module.normalized_shape) == 1  # type: ignore[arg-type]
    return kind in _TOKEN_WISE or (kind in _ALONG_LAST and getattr(module, "dim", None) == -1)


def _find_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module; `fully_shard` puts one of its own in front of it."""
    kind = type(module)
    return kind.__mro__[2] if len(kind.__mro__) > 2 and kind.__mro__[1].__name__ == "FSDPModule" else kind
