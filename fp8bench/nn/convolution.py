"""Convolutions whose three products run in a chosen arithmetic, and residual blocks of 3x3 ones.

Images are (batch, height, width, channels): every operand is a matrix with its contraction last, as in a linear layer,
without a copy. Forward contracts over window and input channels, the input gradient over output channels, the weight
gradient over batch and positions. Arithmetics that round have their operands rounded along these dimensions and
convolved in fp32, pixel by pixel along the channels, as a kernel would read them; torch convolves nothing narrower than
16 bits. Arithmetics whose products are more than products of values get the windows written out as a matrix instead.

The order of dimensions is the same in every layout. In memory channels are last too, unless the layout is torch's
contiguous one: then a conversion between dtypes keeps the strides, and rounding along the channels restores them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8bench.nn.around import cast_to
from fp8bench.nn.gpt import Norm
from fp8bench.nn.linear import Both, Choose, cast_marker, let_go, linear, refuse_twice, region
from fp8bench.protocols import Arithmetic, Operand, Phases, Role

Sides = tuple[int, int]


class Windows(NamedTuple):
    """Size, stride, padding and dilation of a convolution, each along height and width."""

    size: Sides = (3, 3)
    stride: Sides = (1, 1)
    padding: Sides = (1, 1)
    dilation: Sides = (1, 1)

    def places(self, image: Sequence[int]) -> Sides:
        up, across = (
            (side + 2 * padding - dilation * (size - 1) - 1) // stride + 1
            for side, size, stride, padding, dilation in zip(image, *self, strict=True)
        )
        return up, across


_USUAL = Windows()
Layout = torch.memory_format


def casts_whole(arithmetic: Arithmetic, layout: Layout) -> bool:
    """Whether casts take images and weights as they lie in memory, element by element, and not as rows."""
    return arithmetic.plain and layout == torch.contiguous_format


def _values(operand: Operand, arithmetic: Arithmetic) -> Tensor:
    return operand.data if operand.scale is None else arithmetic.restore(operand, torch.float32)


def _images(matrix: Tensor, shape: Sequence[int], layout: Layout) -> Tensor:
    """Rows of pixels as torch's images, (batch, channels, height, width), with the strides of `layout`."""
    images = matrix.reshape(*shape[:3], -1).permute(0, 3, 1, 2)
    # 1x1 windows fit both layouts, and torch chooses by their strides: `view` makes these unambiguous.
    return images if layout == torch.channels_last else images.contiguous().view(-1).view(images.shape)


def _windows(matrix: Tensor, size: Sides, layout: Layout = torch.channels_last) -> Tensor:
    return _images(matrix, (matrix.shape[0], *size), layout)


def in_layout(images: Tensor, layout: Layout) -> Tensor:
    if layout == torch.contiguous_format:
        return images.contiguous().permute(0, 2, 3, 1)
    return images.permute(0, 2, 3, 1).contiguous()


def _gradient(g: Tensor, images: Tensor, windows: Tensor, geometry: Windows, wanted: int) -> Tensor:
    """The gradient of a convolution by its images (wanted=0) or its windows (1), channels as its last dimension.

    Of the wanted one only the shape is used.
    """
    gradient: Tensor = torch.ops.aten.convolution_backward(
        g, images, windows, None, geometry.stride, geometry.padding, geometry.dilation, False, [0, 0], 1,
        [wanted == 0, wanted == 1, False],
    )[wanted]  # fmt: skip
    return gradient.permute(0, 2, 3, 1)


def _written_out(x: Tensor, geometry: Windows) -> Tensor:
    """The window of each output position of (B, H, W, I) as a row: (B, places up, places across, window x I).

    Copied in at least fp32: backward adds up all windows of a pixel in that dtype.
    """
    up, across = geometry.places(x.shape[1:3])
    (along_up, along_across), (top, side) = geometry.stride, geometry.padding
    padded = F.pad(x.to(torch.promote_types(x.dtype, torch.float32)), (0, 0, side, side, top, top))
    begins = [
        (i * geometry.dilation[0], j * geometry.dilation[1])
        for i in range(geometry.size[0])
        for j in range(geometry.size[1])
    ]
    shifts = [
        padded[:, i : i + along_up * (up - 1) + 1 : along_up, j : j + along_across * (across - 1) + 1 : along_across]
        for i, j in begins
    ]
    return torch.cat(shifts, dim=-1).to(x.dtype)


class _ConvolvedProduct(torch.autograd.Function):
    """Images (B, H, W, I) convolved with (O, window x I). It marks its backward, which may run on another thread."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, geometry: Windows, arithmetic: Arithmetic, phase: Phases, layout: Layout,
        given: Both | None,
    ) -> Tensor:  # fmt: skip
        with cast_marker(arithmetic, phase):
            pixels = x if casts_whole(arithmetic, layout) else x.reshape(-1, x.shape[-1])
            a, b = arithmetic.cast(pixels, Role.INPUT), given[0] if given else arithmetic.cast(weight, Role.WEIGHT)
            images = _images(_values(a, arithmetic), x.shape, layout)
            windows = _windows(_values(b, arithmetic), geometry.size, layout)
        sources = (pixels, weight) if arithmetic.keeps_source else (None, None)
        ctx.save_for_backward(a.data, a.scale, b.data, b.scale, *sources)
        ctx.arithmetic, ctx.phase, ctx.geometry, ctx.layout = arithmetic, phase, geometry, layout
        ctx.shapes = x.shape, weight.shape
        with phase.gemm:
            y = F.conv2d(images, windows, None, geometry.stride, geometry.padding, geometry.dilation)
            return in_layout(y.to(arithmetic.carrier), layout)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        refuse_twice()
        arithmetic, phase, geometry, layout, (shape, weights) = (
            ctx.arithmetic,
            ctx.phase,
            ctx.geometry,
            ctx.layout,
            ctx.shapes,
        )
        a_data, a_scale, b_data, b_scale, pixels, weight = ctx.saved_tensors
        a, b = Operand(a_data, a_scale), Operand(b_data, b_scale)
        casting, whole = cast_marker(arithmetic, phase), casts_whole(arithmetic, layout)

        def turned(operand: Operand, source: Tensor, role: Role) -> Tensor:
            return operand.data if whole else _values(arithmetic.turn(operand, source, role), arithmetic).t()

        with casting:
            places = gradients[0].shape
            gradient = gradients[0] if whole else gradients[0].reshape(-1, places[-1])
            g = arithmetic.cast(gradient, Role.GRADIENT)
            images = _images(_values(a, arithmetic), shape, layout)
            windows = _windows(_values(b, arithmetic), geometry.size, layout)
        input_gradient = weight_gradient = None
        if ctx.needs_input_grad[0]:
            with casting:
                b_turned = _windows(turned(b, weight, Role.WEIGHT), geometry.size, layout)
                g_images = _images(_values(g, arithmetic), places, layout)
            with phase.gemm:
                input_gradient = _gradient(g_images, images, b_turned, geometry, 0).to(arithmetic.carrier)
        if ctx.needs_input_grad[1]:
            with casting:
                g_turned = _images(turned(g, gradient, Role.GRADIENT), places, layout)
                a_turned = _images(turned(a, pixels, Role.INPUT), shape, layout)
            with phase.gemm:
                like = windows.to(g_turned.dtype)
                weight_gradient = _gradient(g_turned, a_turned, like, geometry, 1).reshape(weights)
            with casting:  # the master weight is fp32, and autograd would convert outside any phase
                weight_gradient = weight_gradient.to(torch.promote_types(arithmetic.carrier, torch.float32))
        return input_gradient, weight_gradient, None, None, None, None, None


def convolved(
    x: Tensor, weight: Tensor, geometry: Windows, arithmetic: Arithmetic, phase: Phases,
    layout: Layout = torch.channels_last, operands: Both | None = None,
) -> Tensor:  # fmt: skip
    """(B, H, W, I) convolved with windows (O, window x I), channels adjacent: (B, places up, places across, O).

    In the contiguous layout images come and go with torch's strides, and windows that are taken whole are
    (O, height, width, I). `operands` are those of the weight, if it was cast already.
    """
    x = x.to(arithmetic.carrier)
    if not arithmetic.explicit:
        y: Tensor = _ConvolvedProduct.apply(x, weight, geometry, arithmetic, phase, layout, operands)  # type: ignore[no-untyped-call]
        return y
    # A product of a linear layer, with a row for each position.
    if x.requires_grad:
        windows = region(phase.gemm, _written_out, x, geometry=geometry)
    else:
        with phase.gemm:
            windows = _written_out(x, geometry)
    places = linear(windows, weight, arithmetic, phase, operands)
    return places if layout == torch.channels_last else in_layout(places.permute(0, 3, 1, 2), layout)


class Convolution(nn.Module):
    """Without bias; 3x3 with stride 1 and padding 1 by default.

    The fp32 master weight is (outputs, window x inputs), or torch's shape where the layout is contiguous.
    """

    def __init__(
        self, inputs: int, outputs: int, arithmetic: Arithmetic, geometry: Windows = _USUAL,
        layout: Layout = torch.channels_last,
    ) -> None:  # fmt: skip
        super().__init__()
        self.arithmetic, self.geometry, self.layout = arithmetic, geometry, layout
        self.operands: Both | None = None
        weight = torch.empty(outputs, math.prod(geometry.size) * inputs)
        nn.init.normal_(weight, std=math.sqrt(2 / weight.shape[1]))
        self.weight = nn.Parameter(weight if layout == torch.channels_last else _windows(weight, geometry.size, layout))

    def forward(self, x: Tensor, phase: Phases) -> Tensor:
        return convolved(x, self.windows(), self.geometry, self.arithmetic, phase, self.layout, self.operands)

    def cast_once(self) -> None:
        """Does for a convolution what `linear.cast_once` does."""
        operand = self.arithmetic.cast(self.windows().detach(), Role.WEIGHT)
        self.operands = operand, operand
        let_go(self.weight)

    def windows(self) -> Tensor:
        if self.layout == torch.channels_last:
            return self.weight
        windows = self.weight.permute(0, 2, 3, 1)
        return windows if casts_whole(self.arithmetic, self.layout) else windows.flatten(1)


class BatchNorm(nn.Module):
    """Batch norm in at least fp32, unless an arithmetic says otherwise; the result has the input's dtype.

    It normalises by the batch's statistics. A `running` one keeps a mean of them in training, as torch's does, and
    normalises by that in eval mode; the mean is kept in the arithmetic too.
    """

    arithmetic: Arithmetic | None = None
    running_mean: Tensor | None
    running_var: Tensor | None

    def __init__(self, channels: int, running: bool = False) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(channels) if running else None)
        self.register_buffer("running_var", torch.ones(channels) if running else None)
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        own = self.arithmetic
        weight, bias = (cast_to(parameter, own, Role.WEIGHT) for parameter in (self.weight, self.bias))
        wide = cast_to(x, own).to(weight.dtype).permute(0, 3, 1, 2)
        mean, variance = self.running_mean, self.running_var
        by_batch = self.training or mean is None
        if own is not None:  # backward keeps the tensors that it is given
            mean, variance = (None if tensor is None else tensor.clone() for tensor in (mean, variance))
        y = F.batch_norm(wide, mean, variance, weight, bias, by_batch, momentum=0.1, eps=1e-5)
        for name, statistic in (("running_mean", mean), ("running_var", variance)):
            if own is not None and self.training and statistic is not None:
                getattr(self, name).copy_(cast_to(statistic, own).detach())
        return y.permute(0, 2, 3, 1).to(x.dtype)


class ResidualBlock(nn.Module):
    """ResNet's basic block: convolution and norm twice, ReLU after each, the input added before the last."""

    def __init__(self, channels: int, choose: Choose, layer_norm: bool = False, running: bool = False) -> None:
        super().__init__()
        self.first, self.second = (Convolution(channels, channels, choose(name)) for name in ("first", "second"))
        self.norm_first, self.norm_second = (
            Norm(channels, root_mean_square=False) if layer_norm else BatchNorm(channels, running) for _ in range(2)
        )

    def forward(self, x: Tensor, phase: Phases) -> Tensor:
        hidden = F.relu(self.norm_first(self.first(x, phase)))
        # A layer of another precision returns its own carrier; the block keeps the dtype of its input.
        return F.relu(x + self.norm_second(self.second(hidden, phase)).to(x.dtype))
