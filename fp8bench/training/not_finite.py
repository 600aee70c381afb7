"""Where a step first was not finite: found by doing it once more and looking at every tensor in turn."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fp8bench.model import Params
from fp8bench.protocols import Arithmetic, Operand, Role, WatchedArithmetic
from fp8bench.training.readings import cast_of, figures_of, read, reading_of

# What a tensor was multiplied by, found where it is wanted.
Scale = Callable[[], float]


@dataclass(frozen=True)
class Place:
    """The first tensor that was not finite: a parameter's or a layer's by its path in the model.

    `amax` is the largest of its finite magnitudes, `share` how many of its elements are not finite. `scale` is what it
    had been multiplied by before it was rounded, None where nothing of the kind was.
    """

    layer: str
    tensor: str
    backward: bool
    amax: float
    share: float
    scale: float | None

    @property
    def words(self) -> str:
        scaled = "" if self.scale is None else f", scaled by {self.scale:g}"
        direction = "backward" if self.backward else "forward"
        return (
            f"the {self.tensor} of {self.layer}, in {direction}: {self.share:.3%} of it is not finite, the rest is up "
            f"to {self.amax:g}{scaled}"
        )

    @property
    def values(self) -> Params:
        direction = "backward" if self.backward else "forward"
        scale = () if self.scale is None else (("scale", self.scale),)
        return ("direction", direction), ("amax", self.amax), ("share", self.share), *scale


class Finder:
    """Looks at tensors until one is not finite. It waits for each of them."""

    def __init__(self) -> None:
        self.place: Place | None = None

    def see(self, layer: str, tensor: str, x: Tensor, backward: bool = False, scale: Scale | None = None) -> None:
        if self.place is not None or not x.is_floating_point():
            return
        values = x.detach().to(torch.float32)
        finite = values.isfinite()
        if bool(finite.all()):
            return
        amax = float(values[finite].abs().max()) if bool(finite.any()) else 0.0
        self.place = Place(layer, tensor, backward, amax, 1 - float(finite.double().mean()), scale and scale())

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        """Look at whatever a model does in the body, in its order."""
        with ExitStack() as stack:
            for name, parameter in model.named_parameters():
                self.see(name, "parameter", parameter)
                hook = partial(self._gradient, name, "gradient")
                stack.callback(parameter.register_hook(hook).remove)  # type: ignore[no-untyped-call]
            for name, module in model.named_modules():
                if name:
                    stack.callback(module.register_forward_hook(partial(self._output, name)).remove)
                if isinstance(arithmetic := getattr(module, "arithmetic", None), Arithmetic):
                    watched = WatchedArithmetic(arithmetic, partial(self._cast, name, arithmetic), turned=False)
                    module.arithmetic = watched
                    stack.callback(setattr, module, "arithmetic", arithmetic)
            yield

    def _output(self, name: str, module: nn.Module, given: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            self.see(name, "output", output)
            if output.requires_grad:
                hook = partial(self._gradient, name, "gradient of the output")
                output.register_hook(hook)  # type: ignore[no-untyped-call]

    def _gradient(self, name: str, tensor: str, gradient: Tensor) -> None:
        self.see(name, tensor, gradient, backward=True)

    def _cast(
        self, name: str, arithmetic: Arithmetic, operand: Operand, source: Tensor | None, role: Role, _: Operand | None
    ) -> None:
        assert source is not None
        backward = role is Role.GRADIENT

        def scale() -> float:
            (figures,) = read([figures_of(source, cast_of(arithmetic, operand, source, role))])
            return reading_of("", 0, 0, name, role, figures, None).scale

        wanted = None if arithmetic.plain else scale
        self.see(name, role.value, source, backward, wanted)
        if self.place is None:
            rounded = arithmetic.restore(operand, torch.float32)
            self.see(name, f"{role.value} as it was rounded", rounded, backward, wanted)


def whole_words(place: Place | None, loss: float, norm: float) -> str:
    """What was not finite, and where."""
    if math.isfinite(loss + norm):
        what = "the weights are not after an update"
    else:
        what = f"the loss is {loss:g}" if not math.isfinite(loss) else f"the norm of the gradients is {norm:g}"
    if place is None:
        return f"{what}; the same step once more was finite: it is not deterministic, or only the sum was too large"
    return f"{what}; first was {place.words}"
