"""Image models: ResNet's stem and first stage, a vision transformer, and a model of images and text. Images are
(batch, height, width, channels).

In the vision transformer a convolution embeds patches. The model of images and text first reads the tokens that a
vision transformer makes of the image, and then the text's tokens. It predicts the text.

Batch norm uses the batch's statistics in training, and otherwise random statistics that are drawn with the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8bench.nn.around import cast_to, start_stream
from fp8bench.nn.attention import FusedCore
from fp8bench.nn.block import build_blocks
from fp8bench.nn.convolution import BatchNorm, Convolution, ConvolutionGeometry, Layout
from fp8bench.nn.linear import ChooseArithmetic, Linear, make_part_chooser
from fp8bench.nn.parts import Norm, cross_entropy
from fp8bench.nn.sizes import IMAGE_CLASS_COUNT, VisionSizes
from fp8bench.protocols import Arithmetic, Phases, Role

_POINTWISE_GEOMETRY = ConvolutionGeometry((1, 1), padding=(0, 0))
_STEM_GEOMETRY = ConvolutionGeometry((7, 7), (2, 2), (3, 3))
ModelInputs = Sequence[Tensor]


class Bottleneck(nn.Module):
    """ResNet's bottleneck: 1x1, 3x3 and 1x1 convolutions, each with batch norm, and a shortcut. The shortcut is a
    convolution if the number of channels changes.
    """

    residual_arithmetic: Arithmetic | None = None

    def __init__(self, inputs: int, sizes: VisionSizes, choose: ChooseArithmetic, layout: Layout) -> None:
        super().__init__()
        inner_width = sizes.inner_width
        width = sizes.width
        convolutions = {
            "reduce": (inputs, inner_width, _POINTWISE_GEOMETRY),
            "spatial": (inner_width, inner_width, ConvolutionGeometry()),
            "expand": (inner_width, width, _POINTWISE_GEOMETRY),
        }
        # The shortcut is a convolution only if the widths differ.
        if inputs != width:
            convolutions["shortcut"] = (inputs, width, _POINTWISE_GEOMETRY)
        self.norms = nn.ModuleDict({name: _make_random_norm(outputs) for name, (_, outputs, _) in convolutions.items()})
        for name, (channels, outputs, geometry) in convolutions.items():
            self.add_module(name, Convolution(channels, outputs, choose(name), geometry, layout))

    def forward(self, x: Tensor, phase: Phases) -> Tensor:
        hidden = F.relu(self._convolve("reduce", x, phase))
        hidden = F.relu(self._convolve("spatial", hidden, phase))
        shortcut_output = self._convolve("shortcut", x, phase) if "shortcut" in self.norms else x
        return cast_to(F.relu(shortcut_output + self._convolve("expand", hidden, phase)), self.residual_arithmetic)

    def _convolve(self, name: str, x: Tensor, phase: Phases) -> Tensor:
        y: Tensor = self.norms[name](self.get_submodule(name)(x, phase))
        return y.to(x.dtype)


def _make_random_norm(channels: int) -> BatchNorm:
    """Returns a batch norm with random statistics, to resemble a trained one."""
    norm = BatchNorm(channels, running=True)
    assert norm.running_mean is not None and norm.running_var is not None
    norm.running_mean.normal_(std=0.1)
    norm.running_var.uniform_(0.5, 2)
    return norm


class ImageModel(nn.Module):
    """Maps images (and for some models text) and targets to the mean loss. `around` has the arithmetic of the
    embedding, the logits and the residual stream, where None means high precision.
    """

    around: Mapping[str, Arithmetic | None] = dict.fromkeys(("embedding", "logits", "residual"))
    blocks: nn.ModuleList

    def forward(self, inputs: ModelInputs, targets: Tensor, phase: Phases) -> Tensor:
        return cross_entropy(self.logits(inputs, phase), targets)

    def logits(self, inputs: ModelInputs, phase: Phases) -> Tensor:
        return cast_to(self.compute_logits(inputs, phase), self.around["logits"])

    def compute_logits(self, inputs: ModelInputs, phase: Phases) -> Tensor:
        raise NotImplementedError

    def add_positions(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + cast_to(positions, self.around["embedding"], Role.WEIGHT)

    def run_blocks(self, x: Tensor, carrier: torch.dtype, phase: Phases) -> Tensor:
        x = start_stream(x, carrier, self.around["residual"])
        for block in self.blocks:
            x = block(x, phase)
        return x


class ResNet(ImageModel):
    """A 7x7 stem with pooling, one stage of bottlenecks, a mean over positions, and a classifier head."""

    def __init__(self, sizes: VisionSizes, choose: ChooseArithmetic, layout: Layout) -> None:
        super().__init__()
        self.stem = Convolution(3, sizes.inner_width, choose("stem"), _STEM_GEOMETRY, layout)
        self.norm = _make_random_norm(sizes.inner_width)
        self.blocks = nn.ModuleList()
        for number in range(sizes.layers):
            inputs = sizes.width if number else sizes.inner_width
            self.blocks.append(Bottleneck(inputs, sizes, make_part_chooser(choose, f"blocks.{number}"), layout))
        self.head = Linear(sizes.width, IMAGE_CLASS_COUNT, choose("head"))

    def compute_logits(self, inputs: ModelInputs, phase: Phases) -> Tensor:
        x = F.relu(self.norm(self.stem(inputs[0], phase)))
        x = F.max_pool2d(x.permute(0, 3, 1, 2), 3, 2, 1).permute(0, 2, 3, 1)
        return self.head(self.run_blocks(x, x.dtype, phase).mean((1, 2)), phase)


class VisionTransformer(ImageModel):
    """A vision transformer: patches, blocks, a norm, and a head on the mean over tokens. The head is left out if
    another model reads the tokens.
    """

    def __init__(self, sizes: VisionSizes, choose: ChooseArithmetic, layout: Layout, has_head: bool = True) -> None:
        super().__init__()
        side = (sizes.patch, sizes.patch)
        self.patches = Convolution(3, sizes.width, choose("patches"), ConvolutionGeometry(side, side, (0, 0)), layout)
        self.positions = nn.Parameter(torch.randn(sizes.patches, sizes.width) * 0.01)
        self.blocks = build_blocks(sizes.blocks, choose, FusedCore(causal=False))
        self.norm = Norm(sizes.width, False)
        self.head = Linear(sizes.width, IMAGE_CLASS_COUNT, choose("head")) if has_head else None

    def encode_image(self, images: Tensor, phase: Phases) -> Tensor:
        x = self.add_positions(self.patches(images, phase).flatten(1, 2), self.positions)
        return self.norm(self.run_blocks(x, images.dtype, phase))

    def compute_logits(self, inputs: ModelInputs, phase: Phases) -> Tensor:
        assert self.head is not None
        return self.head(self.encode_image(inputs[0], phase).mean(1), phase)


class TwoInputModel(ImageModel):
    """Reads an image's projected tokens and then a text's tokens. Causal blocks over all tokens predict each next
    token of the text.
    """

    def __init__(self, sizes: VisionSizes, choose: ChooseArithmetic, layout: Layout) -> None:
        super().__init__()
        self.image = VisionTransformer(sizes, make_part_chooser(choose, "image"), layout, has_head=False)
        self.project = Linear(sizes.width, sizes.width, choose("project"))
        self.embedding = nn.Parameter(torch.randn(sizes.vocabulary, sizes.width) * 0.02)
        self.positions = nn.Parameter(torch.randn(sizes.text, sizes.width) * 0.01)
        self.blocks = build_blocks(sizes.blocks, choose, FusedCore(causal=True))
        self.norm = Norm(sizes.width, False)
        self.head = Linear(sizes.width, sizes.vocabulary, choose("head"))

    def compute_logits(self, inputs: ModelInputs, phase: Phases) -> Tensor:
        images, text = inputs
        image_tokens = self.project(self.image.encode_image(images, phase), phase)
        text_embeddings = F.embedding(text, cast_to(self.embedding, self.around["embedding"], Role.WEIGHT))
        x = torch.cat((image_tokens, self.add_positions(text_embeddings, self.positions)), 1)
        x = self.run_blocks(x, images.dtype, phase)
        return self.head(self.norm(x[:, -text.shape[1] :]), phase)  # only the text is predicted


IMAGE_MODEL_CLASSES = {"resnet": ResNet, "vit": VisionTransformer, "two-input": TwoInputModel}
