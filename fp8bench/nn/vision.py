"""Models of images: ResNet's stem and first stage, a vision transformer, and a model of images and text.

Images are (batch, height, width, channels); their order in memory is the model's layout throughout its convolutions,
which `fault_of` checks. Patches are embedded by a convolution. The model of two inputs puts the tokens that a vision
transformer makes of an image before the text's, and predicts the text. Batch norm uses its batch in training, else
statistics that were drawn with the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8bench.nn.around import cast_to, start_stream
from fp8bench.nn.attention import FusedCore
from fp8bench.nn.convolution import BatchNorm, Convolution, Layout, Windows, in_layout
from fp8bench.nn.gpt import Block, Norm, loss_of
from fp8bench.nn.linear import Choose, Linear, cast_once, scoped
from fp8bench.nn.sizes import CLASSES, VisionSizes
from fp8bench.nn.training_step import TrainingState
from fp8bench.numerics.operands import OperatorWatch
from fp8bench.protocols import Arithmetic, Phases, Role, SilentPhases

# The number of batches kept ready on the host.
POOL = 4
_POINT = Windows((1, 1), padding=(0, 0))
_STEM = Windows((7, 7), (2, 2), (3, 3))
# Means and deviations of the colours' bytes in ImageNet's images.
MEANS, DEVIATIONS = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
Inputs = Sequence[Tensor]


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, each with batch norm, and a shortcut, convolved where channels change."""

    residual: Arithmetic | None = None

    def __init__(self, inputs: int, sizes: VisionSizes, choose: Choose, layout: Layout) -> None:
        super().__init__()
        inner, width = sizes.inner, sizes.width
        parts = {
            "reduce": (inputs, inner, _POINT),
            "spatial": (inner, inner, Windows()),
            "expand": (inner, width, _POINT),
        }
        if inputs != width:
            parts["shortcut"] = (inputs, width, _POINT)
        self.norms = nn.ModuleDict({name: _batch_norm(outputs) for name, (_, outputs, _) in parts.items()})
        for name, (channels, outputs, geometry) in parts.items():
            self.add_module(name, Convolution(channels, outputs, choose(name), geometry, layout))

    def forward(self, x: Tensor, phase: Phases) -> Tensor:
        hidden = F.relu(self._normed("reduce", x, phase))
        hidden = F.relu(self._normed("spatial", hidden, phase))
        shortcut = self._normed("shortcut", x, phase) if "shortcut" in self.norms else x
        return cast_to(F.relu(shortcut + self._normed("expand", hidden, phase)), self.residual)

    def _normed(self, name: str, x: Tensor, phase: Phases) -> Tensor:
        y: Tensor = self.norms[name](self.get_submodule(name)(x, phase))
        return y.to(x.dtype)


def _batch_norm(channels: int) -> BatchNorm:
    norm = BatchNorm(channels, running=True)
    assert norm.running_mean is not None and norm.running_var is not None
    norm.running_mean.normal_(std=0.1)
    norm.running_var.uniform_(0.5, 2)
    return norm


class SeeingModel(nn.Module):
    """Images, text if the model takes some, and targets in, mean loss out; `around` is as in LanguageModel."""

    around: Mapping[str, Arithmetic | None] = dict.fromkeys(("embedding", "logits", "residual"))

    def forward(self, inputs: Inputs, targets: Tensor, phase: Phases) -> Tensor:
        return loss_of(self.logits(inputs, phase), targets)

    def logits(self, inputs: Inputs, phase: Phases) -> Tensor:
        return cast_to(self.given(inputs, phase), self.around["logits"])

    def given(self, inputs: Inputs, phase: Phases) -> Tensor:
        raise NotImplementedError

    def placed(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + cast_to(positions, self.around["embedding"], Role.WEIGHT)


class ResNet(SeeingModel):
    """A 7x7 stem with pooling, a stage of bottlenecks, a mean over positions, a head."""

    def __init__(self, sizes: VisionSizes, choose: Choose, layout: Layout) -> None:
        super().__init__()
        self.stem, self.norm = Convolution(3, sizes.inner, choose("stem"), _STEM, layout), _batch_norm(sizes.inner)
        channels = [sizes.inner, *[sizes.width] * (sizes.layers - 1)]
        parts = [scoped(choose, f"blocks.{number}") for number in range(sizes.layers)]
        self.blocks = nn.ModuleList(
            Bottleneck(inputs, sizes, part, layout) for inputs, part in zip(channels, parts, strict=True)
        )
        self.head = Linear(sizes.width, CLASSES, choose("head"))

    def given(self, inputs: Inputs, phase: Phases) -> Tensor:
        x = F.relu(self.norm(self.stem(inputs[0], phase)))
        x = F.max_pool2d(x.permute(0, 3, 1, 2), 3, 2, 1).permute(0, 2, 3, 1)
        x = start_stream(x, x.dtype, self.around["residual"])
        for block in self.blocks:
            x = block(x, phase)
        y: Tensor = self.head(x.mean((1, 2)), phase)
        return y


class VisionTransformer(SeeingModel):
    """Patches, blocks, a norm, and a head on the mean over tokens, unless another model takes the tokens."""

    def __init__(self, sizes: VisionSizes, choose: Choose, layout: Layout, headed: bool = True) -> None:
        super().__init__()
        side = (sizes.patch, sizes.patch)
        self.patches = Convolution(3, sizes.width, choose("patches"), Windows(side, side, (0, 0)), layout)
        self.positions = nn.Parameter(torch.randn(sizes.patches, sizes.width) * 0.01)
        self.blocks, self.norm = _blocks(sizes, choose, causal=False), Norm(sizes.width, False)
        self.head = Linear(sizes.width, CLASSES, choose("head")) if headed else None

    def tokens(self, images: Tensor, phase: Phases) -> Tensor:
        x = self.placed(self.patches(images, phase).flatten(1, 2), self.positions)
        x = start_stream(x, images.dtype, self.around["residual"])
        for block in self.blocks:
            x = block(x, phase, None)
        y: Tensor = self.norm(x)
        return y

    def given(self, inputs: Inputs, phase: Phases) -> Tensor:
        assert self.head is not None
        y: Tensor = self.head(self.tokens(inputs[0], phase).mean(1), phase)
        return y


class TwoInput(SeeingModel):
    """An image's projected tokens before a text's; causal blocks over both predict each next token of the text."""

    def __init__(self, sizes: VisionSizes, choose: Choose, layout: Layout) -> None:
        super().__init__()
        self.image = VisionTransformer(sizes, scoped(choose, "image"), layout, headed=False)
        self.project = Linear(sizes.width, sizes.width, choose("project"))
        self.embedding = nn.Parameter(torch.randn(sizes.vocabulary, sizes.width) * 0.02)
        self.positions = nn.Parameter(torch.randn(sizes.text, sizes.width) * 0.01)
        self.blocks, self.norm = _blocks(sizes, choose, causal=True), Norm(sizes.width, False)
        self.head = Linear(sizes.width, sizes.vocabulary, choose("head"))

    def given(self, inputs: Inputs, phase: Phases) -> Tensor:
        images, text = inputs
        seen = self.project(self.image.tokens(images, phase), phase)
        words = F.embedding(text, cast_to(self.embedding, self.around["embedding"], Role.WEIGHT))
        x = torch.cat((seen, self.placed(words, self.positions)), 1)
        x = start_stream(x, images.dtype, self.around["residual"])
        for block in self.blocks:
            x = block(x, phase, None)
        y: Tensor = self.head(self.norm(x[:, -text.shape[1] :]), phase)
        return y


def _blocks(sizes: VisionSizes, choose: Choose, causal: bool) -> nn.ModuleList:
    parts = [scoped(choose, f"blocks.{number}") for number in range(sizes.layers)]
    return nn.ModuleList(Block(sizes.blocks, part, FusedCore(causal)) for part in parts)


MODELS = {"resnet": ResNet, "vit": VisionTransformer, "two-input": TwoInput}


class ImageLoader:
    """Batches of a pool on the host, in turn and the same for the same seed: images as bytes, channels last as decoders
    give them, and their classes or text. A batch goes to the device as bytes, and is normalised and laid out there.
    """

    def __init__(
        self, sizes: VisionSizes, batch: int, layout: Layout, dtype: torch.dtype, device: str, seed: int
    ) -> None:  # fmt: skip
        generator = torch.Generator("cpu").manual_seed(seed)

        def drawn(high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.randint(high, (POOL, batch, *shape), generator=generator, dtype=dtype, device="cpu")

        images = drawn(256, sizes.image, sizes.image, 3, dtype=torch.uint8)
        words = drawn(sizes.vocabulary, sizes.text + 1) if sizes.text else drawn(CLASSES)
        self._pin, self._device = device != "cpu", device
        self._pool = cycle(zip(*(part.pin_memory() if self._pin else part for part in (images, words)), strict=True))
        self._means, self._deviations = (torch.tensor(row, device=device) for row in (MEANS, DEVIATIONS))
        self._layout, self._dtype, self._reads = layout, dtype, sizes.text > 0
        self._ahead: list[tuple[Tensor, Tensor]] = []
        self._turns: Iterator[tuple[Tensor, Tensor]] = iter(())

    def next(self) -> tuple[Inputs, Tensor]:
        images, words = next(self._turns) if self._ahead else self._moved()
        images = images.to(torch.float32).sub_(self._means).div_(self._deviations).to(self._dtype)
        images = in_layout(images.permute(0, 3, 1, 2), self._layout)
        return ((images, words[:, :-1]), words[:, 1:]) if self._reads else ((images,), words)

    def load_ahead(self, batches: int) -> None:
        for place in range(batches):
            moved = self._moved()
            if place == len(self._ahead):
                self._ahead.append((moved[0].clone(), moved[1].clone()))  # on a CPU it is the pool's memory
            for kept, part in zip(self._ahead[place], moved, strict=True):
                kept.copy_(part)
        self._turns = cycle(self._ahead)

    def _moved(self) -> tuple[Tensor, Tensor]:
        images, words = (part.to(self._device, non_blocking=self._pin) for part in next(self._pool))
        return images, words


@dataclass
class InferenceState:
    """A model in eval mode, its weights cast once."""

    model: SeeingModel
    loader: ImageLoader
    micro_batches: int = 1

    def step(self, phase: Phases) -> None:
        with phase.data_load:
            inputs, _ = self.loader.next()
        with phase.elementwise, torch.no_grad():
            self.model.logits(inputs, phase)


def inference(model: SeeingModel, loader: ImageLoader) -> InferenceState:
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
    """Takes a step and says what is wrong with it: images in another layout than its own, batch norm in the wrong mode.

    Layouts do not matter where convolutions run on rounded values, which are put into rows and back.
    """
    modules, training = dict(state.model.named_modules()), isinstance(state, TrainingState)
    norms = {name: norm for name, norm in modules.items() if isinstance(norm, BatchNorm)}
    convolutions = [layer for layer in modules.values() if isinstance(layer, Convolution)]
    before = [norm.running_mean.clone() for norm in norms.values() if norm.running_mean is not None]
    seen = _LayoutWatch(convolutions[0].layout)
    hooks = [layer.register_forward_hook(seen.passed) for layer in (*convolutions, *norms.values())]
    with seen:
        state.step(SilentPhases())
    for hook in hooks:
        hook.remove()
    if seen.wrong and all(layer.arithmetic.plain for layer in convolutions):
        return seen.wrong
    for (name, norm), mean in zip(norms.items(), before, strict=True):
        if norm.running_mean is not None and torch.equal(norm.running_mean, mean) == training:
            return f"batch norm {name} goes by {'kept statistics' if training else 'its batch'} in this pass"
    return ""


class _LayoutWatch(OperatorWatch):  # type: ignore[no-untyped-call]
    """Checks the layout of images that convolutions and norms take and give, and of what is convolved."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.layout, self.wrong = layout, ""

    def passed(self, layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        self._look(type(layer).__name__, [image.permute(0, 3, 1, 2) for image in (inputs[0], output)])

    def see(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        given = super().see(func, args, named)
        if "convolution" in (name := func.overloadpacket.__name__):
            self._look(name, [*args, *(given if isinstance(given, tuple) else (given,))])
        return given

    def _look(self, what: str, images: Sequence[object]) -> None:
        for image in images:
            if isinstance(image, Tensor) and image.dim() == 4 and not image.is_contiguous(memory_format=self.layout):
                wanted = next(name for name, layout in LAYOUTS.items() if layout == self.layout)
                self.wrong = f"a tensor of {what} lies by strides {image.stride()}, and this case is layout={wanted}"
