"""Batches of images, states of image models, and checks of a step's memory layouts and batch norms.

All convolutions of a model keep images in the model's memory layout, which `find_step_fault` checks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

from fp8bench.nn.convolution import BatchNorm, Convolution, Layout, apply_layout
from fp8bench.nn.image_models import ImageModel, ModelInputs
from fp8bench.nn.linear import cast_once
from fp8bench.nn.sizes import IMAGE_CLASS_COUNT, VisionSizes
from fp8bench.nn.training_step import TrainingState
from fp8bench.numerics.operands import OperatorWatch
from fp8bench.protocols import Phases, SilentPhases

# The number of batches that an ImageLoader draws once and then repeats.
IMAGE_POOL_BATCHES = 4
# Means and standard deviations of the colour bytes of ImageNet's images.
COLOUR_AVERAGES = (123.675, 116.28, 103.53)
COLOUR_DEVIATIONS = (58.395, 57.12, 57.375)
MEMORY_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


class ImageLoader:
    """Reads the batches of a pool on the host again and again. The seed determines the pool.

    A batch has images and their classes or text. Images are bytes with channels last, as decoders write them. A batch
    is copied to the device as bytes. The device normalises it and changes its memory layout.
    """

    def __init__(
        self, sizes: VisionSizes, batch: int, layout: Layout, dtype: torch.dtype, device: str, seed: int
    ) -> None:
        self._layout = layout
        self._dtype = dtype
        self._device = device
        self._has_text = sizes.text > 0
        self._pin = device != "cpu"

        # 1. Draw the batches.
        generator = torch.Generator("cpu").manual_seed(seed)
        pool_shape = (IMAGE_POOL_BATCHES, batch, sizes.image, sizes.image, 3)
        images = torch.randint(256, pool_shape, generator=generator, dtype=torch.uint8, device="cpu")
        value_count, length = (sizes.vocabulary, (sizes.text + 1,)) if self._has_text else (IMAGE_CLASS_COUNT, ())
        labels = torch.randint(
            value_count, (IMAGE_POOL_BATCHES, batch, *length), generator=generator, dtype=torch.int64, device="cpu"
        )

        # 2. Pin the memory of the batches, so that copies to the device are fast.
        if self._pin:
            images = images.pin_memory()
            labels = labels.pin_memory()
        self._pool = cycle(zip(images, labels, strict=True))
        self._means = torch.tensor(COLOUR_AVERAGES, device=device)
        self._deviations = torch.tensor(COLOUR_DEVIATIONS, device=device)
        self._loaded: list[tuple[Tensor, Tensor]] = []
        self._loaded_cycle: Iterator[tuple[Tensor, Tensor]] = iter(())

    def next(self) -> tuple[ModelInputs, Tensor]:
        images, labels = next(self._loaded_cycle) if self._loaded else self._copy_next_batch_to_device()
        images = images.to(torch.float32).sub_(self._means).div_(self._deviations).to(self._dtype)
        images = apply_layout(images.permute(0, 3, 1, 2), self._layout)
        return ((images, labels[:, :-1]), labels[:, 1:]) if self._has_text else ((images,), labels)

    def preload_batches(self, batches: int) -> None:
        for index in range(batches):
            images, labels = self._copy_next_batch_to_device()
            if index == len(self._loaded):
                # on a CPU, `to` copies nothing, so copy the pool's tensors here
                self._loaded.append((images.clone(), labels.clone()))
            self._loaded[index][0].copy_(images)
            self._loaded[index][1].copy_(labels)
        self._loaded_cycle = cycle(self._loaded)

    def _copy_next_batch_to_device(self) -> tuple[Tensor, Tensor]:
        images, labels = next(self._pool)
        return images.to(self._device, non_blocking=self._pin), labels.to(self._device, non_blocking=self._pin)


@dataclass
class InferenceState:
    """An image model in eval mode, with weights that were cast once."""

    model: ImageModel
    loader: ImageLoader
    micro_batches: int = 1

    def step(self, phase: Phases) -> None:
        with phase.data_load:
            inputs, _ = self.loader.next()
        with phase.elementwise, torch.no_grad():
            self.model.logits(inputs, phase)


def make_inference_state(model: ImageModel, loader: ImageLoader) -> InferenceState:
    for layer in model.modules():
        if isinstance(layer, Convolution) and layer.arithmetic.casts:
            layer.cast_once()
    cast_once(model)
    return InferenceState(model.eval(), loader)


def compute_batch_results(state: TrainingState | InferenceState, settles: bool) -> tuple[Tensor, list[Tensor]]:
    """Returns the loss and the gradients of one training batch, or the logits of one inference batch. With `settles`
    the batch runs twice, because the first pass only makes the scales of the second one.
    """
    state.loader.preload_batches(1)  # both passes must read the same batch
    if settles:
        _run_pass(state)
    return _run_pass(state)


def _run_pass(state: TrainingState | InferenceState) -> tuple[Tensor, list[Tensor]]:
    inputs, targets = state.loader.next()
    if isinstance(state, InferenceState):
        with torch.no_grad():
            return state.model.logits(inputs, SilentPhases()), []
    loss = state.forward(inputs, targets, SilentPhases())
    gradients = torch.autograd.grad(loss * state.loss_scale, state.parameters)
    return loss.detach(), [gradient / state.loss_scale for gradient in gradients]


def find_step_fault(state: TrainingState | InferenceState) -> str:
    """Runs a step and returns a sentence about its fault, or ''. A fault is an image in the wrong memory layout, or a
    batch norm in the wrong mode.

    If convolutions run on rounded values, layouts are not checked, because such values are converted to rows and
    back.
    """
    # 1. Copy the statistics of batch norms, and watch the layout of every image.
    training = isinstance(state, TrainingState)
    convolutions = [layer for layer in state.model.modules() if isinstance(layer, Convolution)]
    norms: dict[str, tuple[BatchNorm, Tensor]] = {}
    for name, norm in state.model.named_modules():
        if isinstance(norm, BatchNorm) and norm.running_mean is not None:
            norms[name] = norm, norm.running_mean.clone()
    output_layout_watch = _MemoryLayoutWatch(convolutions[0].layout)
    watched_layers = [*convolutions, *(norm for norm, _ in norms.values())]
    hooks = [layer.register_forward_hook(output_layout_watch.check_layer) for layer in watched_layers]

    # 2. Run the step.
    with output_layout_watch:
        state.step(SilentPhases())
    for hook in hooks:
        hook.remove()

    # 3. Check layouts and statistics.
    if output_layout_watch.fault and all(layer.arithmetic.plain for layer in convolutions):
        return output_layout_watch.fault
    for name, (norm, mean) in norms.items():
        # Training must update the running statistics, and inference must not.
        if torch.equal(norm.running_mean, mean) == training:  # type: ignore[arg-type]
            return f"batch norm {name} uses {'its running statistics' if training else 'the batch'} in this pass"
    return ""


class _MemoryLayoutWatch(OperatorWatch):  # type: ignore[no-untyped-call]
    """Checks the memory layout of images at the inputs and outputs of convolutions and norms, and inside convolution
    operators.
    """

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.layout = layout
        self.fault = ""

    def check_layer(self, layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        # Layers take images with channels last, but torch defines layouts for images with channels first.
        self._check_layouts(type(layer).__name__, [image.permute(0, 3, 1, 2) for image in (inputs[0], output)])

    def watch_operator(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        result = super().watch_operator(func, args, named)
        name = func.overloadpacket.__name__
        if "convolution" in name:
            self._check_layouts(name, [*args, *(result if isinstance(result, tuple) else (result,))])
        return result

    def _check_layouts(self, source: str, images: Sequence[object]) -> None:
        for image in images:
            if isinstance(image, Tensor) and image.dim() == 4 and not image.is_contiguous(memory_format=self.layout):
                expected = next(name for name, layout in MEMORY_FORMATS.items() if layout == self.layout)
                self.fault = f"a tensor of {source} has strides {image.stride()}, but this case has layout={expected}"
