"""Batches of images and states of models that take them, and checks of a step's layouts and batch norms.

The order of images in memory is the model's layout throughout its convolutions, which `fault_of` checks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

from fp8bench.nn.convolution import BatchNorm, Convolution, Layout, in_layout
from fp8bench.nn.image_models import ImageModel, Inputs
from fp8bench.nn.linear import cast_once
from fp8bench.nn.sizes import CLASSES, VisionSizes
from fp8bench.nn.training_step import TrainingState
from fp8bench.numerics.operands import OperatorWatch
from fp8bench.protocols import Phases, SilentPhases

# The number of batches kept ready on the host.
POOL = 4
# Means and deviations of the colours' bytes in ImageNet's images.
MEANS = (123.675, 116.28, 103.53)
DEVIATIONS = (58.395, 57.12, 57.375)
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


class ImageLoader:
    """Batches of a pool on the host, in turn and the same for the same seed: images as bytes, channels last as decoders
    give them, and their classes or text. A batch goes to the device as bytes, and is normalised and laid out there.
    """

    def __init__(
        self, sizes: VisionSizes, batch: int, layout: Layout, dtype: torch.dtype, device: str, seed: int
    ) -> None:
        self._layout = layout
        self._dtype = dtype
        self._device = device
        self._has_text = sizes.text > 0
        self._pin = device != "cpu"

        # 1. Draw the pool.
        generator = torch.Generator("cpu").manual_seed(seed)
        sides = (POOL, batch, sizes.image, sizes.image, 3)
        images = torch.randint(256, sides, generator=generator, dtype=torch.uint8, device="cpu")
        high, length = (sizes.vocabulary, (sizes.text + 1,)) if self._has_text else (CLASSES, ())
        words = torch.randint(high, (POOL, batch, *length), generator=generator, dtype=torch.int64, device="cpu")

        # 2. Keep it where copies to the device are fast.
        if self._pin:
            images = images.pin_memory()
            words = words.pin_memory()
        self._pool = cycle(zip(images, words, strict=True))
        self._means = torch.tensor(MEANS, device=device)
        self._deviations = torch.tensor(DEVIATIONS, device=device)
        self._ahead: list[tuple[Tensor, Tensor]] = []
        self._turns: Iterator[tuple[Tensor, Tensor]] = iter(())

    def next(self) -> tuple[Inputs, Tensor]:
        images, words = next(self._turns) if self._ahead else self._next_on_device()
        images = images.to(torch.float32).sub_(self._means).div_(self._deviations).to(self._dtype)
        images = in_layout(images.permute(0, 3, 1, 2), self._layout)
        return ((images, words[:, :-1]), words[:, 1:]) if self._has_text else ((images,), words)

    def load_ahead(self, batches: int) -> None:
        for place in range(batches):
            images, words = self._next_on_device()
            if place == len(self._ahead):
                self._ahead.append((images.clone(), words.clone()))  # on a CPU it is the pool's memory
            self._ahead[place][0].copy_(images)
            self._ahead[place][1].copy_(words)
        self._turns = cycle(self._ahead)

    def _next_on_device(self) -> tuple[Tensor, Tensor]:
        images, words = next(self._pool)
        return images.to(self._device, non_blocking=self._pin), words.to(self._device, non_blocking=self._pin)


@dataclass
class InferenceState:
    """A model in eval mode, its weights cast once."""

    model: ImageModel
    loader: ImageLoader
    micro_batches: int = 1

    def step(self, phase: Phases) -> None:
        with phase.data_load:
            inputs, _ = self.loader.next()
        with phase.elementwise, torch.no_grad():
            self.model.logits(inputs, phase)


def inference(model: ImageModel, loader: ImageLoader) -> InferenceState:
    for layer in model.modules():
        if isinstance(layer, Convolution) and layer.arithmetic.casts:
            layer.cast_once()
    cast_once(model)
    return InferenceState(model.eval(), loader)


def outcome(state: TrainingState | InferenceState, settles: bool) -> tuple[Tensor, list[Tensor]]:
    """The loss of the first batch and all gradients, or its logits alone; from a second pass where casts settle."""
    state.loader.load_ahead(1)  # the same batch again
    if settles:
        _pass(state)
    return _pass(state)


def _pass(state: TrainingState | InferenceState) -> tuple[Tensor, list[Tensor]]:
    inputs, targets = state.loader.next()
    if isinstance(state, InferenceState):
        with torch.no_grad():
            return state.model.logits(inputs, SilentPhases()), []
    loss = state.forward(inputs, targets, SilentPhases())
    gradients = torch.autograd.grad(loss * state.loss_scale, state.parameters)
    return loss.detach(), [gradient / state.loss_scale for gradient in gradients]


def fault_of(state: TrainingState | InferenceState) -> str:
    """Takes a step and returns its fault: a wrong layout of images, batch norm in the wrong mode; '' if it is right.

    Layouts do not matter where convolutions run on rounded values, which are put into rows and back.
    """
    # 1. Remember the statistics of batch norms, and watch the layout of every image.
    training = isinstance(state, TrainingState)
    convolutions = [layer for layer in state.model.modules() if isinstance(layer, Convolution)]
    norms: dict[str, tuple[BatchNorm, Tensor]] = {}
    for name, norm in state.model.named_modules():
        if isinstance(norm, BatchNorm) and norm.running_mean is not None:
            norms[name] = norm, norm.running_mean.clone()
    watch = _LayoutWatch(convolutions[0].layout)
    watched = [*convolutions, *(norm for norm, _ in norms.values())]
    hooks = [layer.register_forward_hook(watch.look_at_layer) for layer in watched]

    # 2. Take the step.
    with watch:
        state.step(SilentPhases())
    for hook in hooks:
        hook.remove()

    # 3. Compare.
    if watch.fault and all(layer.arithmetic.plain for layer in convolutions):
        return watch.fault
    for name, (norm, mean) in norms.items():
        if torch.equal(norm.running_mean, mean) == training:  # type: ignore[arg-type]
            return f"batch norm {name} goes by {'kept statistics' if training else 'its batch'} in this pass"
    return ""


class _LayoutWatch(OperatorWatch):  # type: ignore[no-untyped-call]
    """Checks the layout of images that convolutions and norms take and give, and of what is convolved."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.layout = layout
        self.fault = ""

    def look_at_layer(self, layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        self._look(type(layer).__name__, [image.permute(0, 3, 1, 2) for image in (inputs[0], output)])

    def see(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        result = super().see(func, args, named)
        name = func.overloadpacket.__name__
        if "convolution" in name:
            self._look(name, [*args, *(result if isinstance(result, tuple) else (result,))])
        return result

    def _look(self, source: str, images: Sequence[object]) -> None:
        for image in images:
            if isinstance(image, Tensor) and image.dim() == 4 and not image.is_contiguous(memory_format=self.layout):
                expected = next(name for name, layout in LAYOUTS.items() if layout == self.layout)
                self.fault = (
                    f"a tensor of {source} lies by strides {image.stride()}, and this case is layout={expected}"
                )
