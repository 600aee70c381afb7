"""Models of images: ResNet's stem and first stage, a vision transformer, and a model of images and text.

Images are (batch, height, width, channels). Patches are embedded by a convolution. The model of two inputs puts the
tokens that a vision transformer makes of an image before the text's, and predicts the text. Batch norm uses its batch
in training, else statistics that were drawn with the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8bench.nn.around import cast_to, start_stream
from fp8bench.nn.attention import FusedCore
from fp8bench.nn.block import build_blocks
from fp8bench.nn.convolution import BatchNorm, Convolution, Layout, Windows
from fp8bench.nn.linear import Choose, Linear, prefix_names
from fp8bench.nn.parts import Norm, cross_entropy
from fp8bench.nn.sizes import CLASSES, VisionSizes
from fp8bench.protocols import Arithmetic, Phases, Role

_POINT = Windows((1, 1), padding=(0, 0))
_STEM = Windows((7, 7), (2, 2), (3, 3))
Inputs = Sequence[Tensor]


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, each with batch norm, and a shortcut, convolved where channels change."""

    residual: Arithmetic | None = None

    def __init__(self, inputs: int, sizes: VisionSizes, choose: Choose, layout: Layout) -> None:
        super().__init__()
        inner = sizes.inner
        width = sizes.width
        parts = {
            "reduce": (inputs, inner, _POINT),
            "spatial": (inner, inner, Windows()),
            "expand": (inner, width, _POINT),
        }
        # A shortcut is a product only where the widths differ.
        if inputs != width:
            parts["shortcut"] = (inputs, width, _POINT)
        self.norms = nn.ModuleDict({name: _drawn_norm(outputs) for name, (_, outputs, _) in parts.items()})
        for name, (channels, outputs, geometry) in parts.items():
            self.add_module(name, Convolution(channels, outputs, choose(name), geometry, layout))

    def forward(self, x: Tensor, phase: Phases) -> Tensor:
        hidden = F.relu(self._convolve("reduce", x, phase))
        hidden = F.relu(self._convolve("spatial", hidden, phase))
        shortcut = self._convolve("shortcut", x, phase) if "shortcut" in self.norms else x
        return cast_to(F.relu(shortcut + self._convolve("expand", hidden, phase)), self.residual)

    def _convolve(self, name: str, x: Tensor, phase: Phases) -> Tensor:
        y: Tensor = self.norms[name](self.get_submodule(name)(x, phase))
        return y.to(x.dtype)


def _drawn_norm(channels: int) -> BatchNorm:
    """A batch norm with random statistics, as a trained one has some."""
    norm = BatchNorm(channels, running=True)
    assert norm.running_mean is not None and norm.running_var is not None
    norm.running_mean.normal_(std=0.1)
    norm.running_var.uniform_(0.5, 2)
    return norm


class ImageModel(nn.Module):
    """Maps images (with text for some models) and targets to the mean loss; `around` is as in LanguageModel."""

    around: Mapping[str, Arithmetic | None] = dict.fromkeys(("embedding", "logits", "residual"))
    blocks: nn.ModuleList

    def forward(self, inputs: Inputs, targets: Tensor, phase: Phases) -> Tensor:
        return cross_entropy(self.logits(inputs, phase), targets)

    def logits(self, inputs: Inputs, phase: Phases) -> Tensor:
        return cast_to(self.compute_logits(inputs, phase), self.around["logits"])

    def compute_logits(self, inputs: Inputs, phase: Phases) -> Tensor:
        raise NotImplementedError

    def add_positions(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + cast_to(positions, self.around["embedding"], Role.WEIGHT)

    def run_blocks(self, x: Tensor, carrier: torch.dtype, phase: Phases) -> Tensor:
        x = start_stream(x, carrier, self.around["residual"])
        for block in self.blocks:
            x = block(x, phase)
        return x


class ResNet(ImageModel):
    """A 7x7 stem with pooling, a stage of bottlenecks, a mean over positions, a head."""

    def __init__(self, sizes: VisionSizes, choose: Choose, layout: Layout) -> None:
        super().__init__()
        self.stem = Convolution(3, sizes.inner, choose("stem"), _STEM, layout)
        self.norm = _drawn_norm(sizes.inner)
        self.blocks = nn.ModuleList()
        for number in range(sizes.layers):
            inputs = sizes.width if number else sizes.inner
            self.blocks.append(Bottleneck(inputs, sizes, prefix_names(choose, f"blocks.{number}"), layout))
        self.head = Linear(sizes.width, CLASSES, choose("head"))

    def compute_logits(self, inputs: Inputs, phase: Phases) -> Tensor:
        x = F.relu(self.norm(self.stem(inputs[0], phase)))
        x = F.max_pool2d(x.permute(0, 3, 1, 2), 3, 2, 1).permute(0, 2, 3, 1)
        return self.head(self.run_blocks(x, x.dtype, phase).mean((1, 2)), phase)


class VisionTransformer(ImageModel):
    """Patches, blocks, a norm, and a head on the mean over tokens, unless another model takes the tokens."""

    def __init__(self, sizes: VisionSizes, choose: Choose, layout: Layout, headed: bool = True) -> None:
        super().__init__()
        side = (sizes.patch, sizes.patch)
        self.patches = Convolution(3, sizes.width, choose("patches"), Windows(side, side, (0, 0)), layout)
        self.positions = nn.Parameter(torch.randn(sizes.patches, sizes.width) * 0.01)
        self.blocks = build_blocks(sizes.blocks, choose, FusedCore(causal=False))
        self.norm = Norm(sizes.width, False)
        self.head = Linear(sizes.width, CLASSES, choose("head")) if headed else None

    def tokens(self, images: Tensor, phase: Phases) -> Tensor:
        x = self.add_positions(self.patches(images, phase).flatten(1, 2), self.positions)
        return self.norm(self.run_blocks(x, images.dtype, phase))

    def compute_logits(self, inputs: Inputs, phase: Phases) -> Tensor:
        assert self.head is not None
        return self.head(self.tokens(inputs[0], phase).mean(1), phase)


class TwoInput(ImageModel):
    """An image's projected tokens before a text's; causal blocks over both predict each next token of the text."""

    def __init__(self, sizes: VisionSizes, choose: Choose, layout: Layout) -> None:
        super().__init__()
        self.image = VisionTransformer(sizes, prefix_names(choose, "image"), layout, headed=False)
        self.project = Linear(sizes.width, sizes.width, choose("project"))
        self.embedding = nn.Parameter(torch.randn(sizes.vocabulary, sizes.width) * 0.02)
        self.positions = nn.Parameter(torch.randn(sizes.text, sizes.width) * 0.01)
        self.blocks = build_blocks(sizes.blocks, choose, FusedCore(causal=True))
        self.norm = Norm(sizes.width, False)
        self.head = Linear(sizes.width, sizes.vocabulary, choose("head"))

    def compute_logits(self, inputs: Inputs, phase: Phases) -> Tensor:
        images, text = inputs
        image_tokens = self.project(self.image.tokens(images, phase), phase)
        words = F.embedding(text, cast_to(self.embedding, self.around["embedding"], Role.WEIGHT))
        x = torch.cat((image_tokens, self.add_positions(words, self.positions)), 1)
        x = self.run_blocks(x, images.dtype, phase)
        return self.head(self.norm(x[:, -text.shape[1] :]), phase)


MODELS = {"resnet": ResNet, "vit": VisionTransformer, "two-input": TwoInput}
