"""What is seen of a model in one step: attached to its layers for as long as that takes.

It changes no number: what is looked at are tensors that the step makes anyway, and nothing is drawn at random. A tensor
is read where it is first met: in the first micro-batch, and not again where a block is computed once more. Inside a
compiled module nothing is looked at but its weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from fp8bench.formats.scaled import largest_magnitude
from fp8bench.nn.attention import Core, SelfAttention
from fp8bench.nn.convolution import BatchNorm
from fp8bench.nn.whole_layers import WholeLayers
from fp8bench.protocols import Arithmetic, Operand, Role, WatchedArithmetic
from fp8bench.training.gradient_noise import GradientNoise
from fp8bench.training.readings import Cast, Figures, Number, cast_of, figures_of
from fp8bench.training.side_figures import (
    attention_score,
    batch_norm_drift,
    begin_peak,
    bytes_in_use,
    embedding_spread,
    running_mean,
)

_MATRIX = 2


class Parts:
    """What of a model is watched: found once, for all steps."""

    def __init__(self, model: nn.Module, inside: bool = True) -> None:
        """Not `inside`: its weights alone."""
        found = {one: path for path, one in reversed([*_uncompiled(model, "")])} if inside else {}
        self.modules = [(path, one) for one, path in found.items() if _is_watched(one)]
        self.inside = bool(found)
        self.parameters = {
            path.removeprefix("_orig_mod."): one for path, one in model.named_parameters() if one.requires_grad
        }
        self.weights = {
            path.removesuffix(".weight"): one for path, one in self.parameters.items() if one.ndim >= _MATRIX
        }
        tables = {path for path, one in model.named_modules() if isinstance(one, nn.Embedding)}
        self.embeddings = {path for path in self.weights if path in tables or path.split(".")[-1] == "embedding"}
        self.device = next(iter(self.parameters.values())).device


class WatchedStep:
    """Figures of tensors by layer and role, and others by name and layer, as far as the step has come."""

    def __init__(self, parts: Parts, stack: ExitStack, micro_batches: int) -> None:
        """Attached until the stack is unwound."""
        self.tensors: dict[tuple[str, str], Figures] = {}
        self.named: dict[tuple[str, str], Number] = {}
        self.noise = GradientNoise(parts.parameters)
        self._parts = parts
        if micro_batches > 1 and parts.inside:
            self.noise.attach(stack)
        begin_peak(parts.device)
        for path, module in parts.modules:
            self._attach(path, module, stack)

    @torch.no_grad()
    def updated(self, moved: Mapping[str, Tensor], sizes: Mapping[str, Tensor]) -> None:
        """The weights were changed: norms of the changes and of the weights, by parameter."""
        self.named["memory", ""] = bytes_in_use(self._parts.device)
        for layer, weight in self._parts.weights.items():
            self._see(layer, Role.WEIGHT, weight)
        for layer in self._parts.embeddings:
            self.named["embedding_spread", layer] = embedding_spread(self._parts.weights[layer])
        for path, norm in moved.items():
            self.named["update_ratio", path.removesuffix(".weight")] = norm / sizes[path]

    def _attach(self, path: str, module: nn.Module, stack: ExitStack) -> None:
        arithmetic: object = getattr(module, "arithmetic", None)
        casts = isinstance(arithmetic, Arithmetic) and not isinstance(arithmetic, WholeLayers)
        if isinstance(arithmetic, Arithmetic) and casts:
            stack.callback(setattr, module, "arithmetic", arithmetic)
            setattr(module, "arithmetic", self._watched(path, arithmetic))  # noqa: B010 - a module declares no such thing
        if casts or _has_weights(module):
            stack.callback(module.register_forward_hook(self._passed(path, not casts)).remove)
        if isinstance(module, SelfAttention):
            stack.callback(setattr, module, "core", module.core)
            module.core = self._scored(path, module.core)
        if running_mean(module) is not None:
            stack.callback(module.register_forward_pre_hook(self._normed(path)).remove)

    def _watched(self, path: str, inner: Arithmetic) -> WatchedArithmetic:
        def told(operand: Operand, source: Tensor | None, role: Role, before: Operand | None) -> None:
            assert source is not None
            self._see(path, role, source, lambda x: cast_of(inner, operand, x, role))

        return WatchedArithmetic(inner, told, turned=False)

    def _passed(self, path: str, all_of_it: bool) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        """Sees a layer's output; `all_of_it`, its input and the gradient of its output, too."""

        def passed(module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
            if not torch.is_grad_enabled() or not isinstance(output, Tensor):
                return
            if ("output_amax", path) not in self.named and output.is_floating_point():
                self.named["output_amax", path] = largest_magnitude(output)
            if all_of_it and given and isinstance(given[0], Tensor):
                self._see(path, Role.INPUT, given[0])
            if all_of_it and output.requires_grad and output.numel() > 1:
                seen = functools.partial(self._see, path, Role.GRADIENT)
                output.register_hook(seen)  # type: ignore[no-untyped-call]

        return passed

    def _scored(self, path: str, core: Core) -> Core:
        def scored(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if ("attention_score", path) not in self.named:
                with torch.no_grad():
                    self.named["attention_score", path] = attention_score(q, k, getattr(core, "causal", True))
            return core(q, k, v)

        return scored

    def _normed(self, path: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def normed(module: nn.Module, given: tuple[Any, ...]) -> None:
            mean, own = running_mean(module), isinstance(module, BatchNorm)
            if mean is not None and ("batch_norm_drift", path) not in self.named:
                with torch.no_grad():
                    self.named["batch_norm_drift", path] = batch_norm_drift(given[0], mean, channels_last=own)

        return normed

    def _see(self, layer: str, role: str, x: Tensor, cast: Callable[[Tensor], Cast] | None = None) -> None:
        if (layer, role) not in self.tensors and x.is_floating_point() and x.numel() > 1:
            with torch.no_grad():
                self.tensors[layer, str(role)] = figures_of(x, cast and cast(x))


def _has_weights(module: nn.Module) -> bool:
    return any(one.ndim >= _MATRIX for one in module.parameters(recurse=False))


def _is_watched(module: nn.Module) -> bool:
    return (
        _has_weights(module)
        or isinstance(getattr(module, "arithmetic", None), Arithmetic)
        or isinstance(module, SelfAttention)
        or hasattr(module, "running_mean")
    )


def _uncompiled(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """A module and those in it that run as they are written; into a compiled graph nobody looks."""
    if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
        return
    yield path, module
    for name, child in module.named_children():
        yield from _uncompiled(child, f"{path}.{name}".lstrip("."))
