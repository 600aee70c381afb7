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

from fp8bench.nn.around import cast_to, wide_dtype
from fp8bench.nn.linear import Both, Choose, cast_marker, let_go, linear, refuse_twice, region
from fp8bench.nn.parts import Norm
from fp8bench.protocols import Arithmetic, Operand, Phases, Role

Sides = tuple[int, int]


class Windows(NamedTuple):
    """Size, stride, padding and dilation of a convolution, each along height and width."""

    size: Sides = (3, 3)
    stride: Sides = (1, 1)
    padding: Sides = (1, 1)
    dilation: Sides = (1, 1)

    def places(self, image: Sequence[int]) -> Sides:
        places = []
        for side, size, stride, padding, dilation in zip(image, *self, strict=True):
            places.append((side + 2 * padding - dilation * (size - 1) - 1) // stride + 1)
        return places[0], places[1]


_USUAL = Windows()
Layout = torch.memory_format


def casts_whole(arithmetic: Arithmetic, layout: Layout) -> bool:
    """Whether casts take images and weights in the order of memory, element by element, instead of as rows."""
    return arithmetic.plain and layout == torch.contiguous_format


def _images(matrix: Tensor, shape: Sequence[int], layout: Layout) -> Tensor:
    """Rows of pixels as torch's images, (batch, channels, height, width), with the strides of `layout`."""
    images = matrix.reshape(*shape[:3], -1).permute(0, 3, 1, 2)
    # 1x1 windows fit both layouts, and torch chooses by their strides: `view` makes these unambiguous.
    return images if layout == torch.channels_last else images.contiguous().view(-1).view(images.shape)


def _windows(matrix: Tensor, size: Sides, layout: Layout = torch.channels_last) -> Tensor:
    return _images(matrix, (matrix.shape[0], *size), layout)


def in_layout(images: Tensor, layout: Layout) -> Tensor:
    """Returns torch's images with channels last, in the layout's order of memory."""
    if layout == torch.contiguous_format:
        return images.contiguous().permute(0, 2, 3, 1)
    return images.permute(0, 2, 3, 1).contiguous()


class _Form(NamedTuple):
    """How a convolution's operands are cast and laid out."""

    arithmetic: Arithmetic
    geometry: Windows
    layout: Layout

    @property
    def casts_whole(self) -> bool:
        return casts_whole(self.arithmetic, self.layout)

    def to_rows(self, images: Tensor) -> Tensor:
        return images if self.casts_whole else images.reshape(-1, images.shape[-1])

    def images(self, matrix: Tensor, shape: Sequence[int]) -> Tensor:
        return _images(matrix, shape, self.layout)

    def windows(self, matrix: Tensor) -> Tensor:
        return _windows(matrix, self.geometry.size, self.layout)

    def values(self, operand: Operand) -> Tensor:
        return operand.data if operand.scale is None else self.arithmetic.restore(operand, torch.float32)

    def turned_values(self, operand: Operand, source: Tensor, role: Role) -> Tensor:
        if self.casts_whole:
            return operand.data
        return self.values(self.arithmetic.turn(operand, source, role)).t()

    def gradient(self, g: Tensor, images: Tensor, windows: Tensor, by_windows: bool) -> Tensor:
        """Returns the gradient by images or windows, channels last. It reads only the shape of that operand."""
        stride, padding, dilation = self.geometry[1:]
        mask = [not by_windows, by_windows, False]
        gradients = torch.ops.aten.convolution_backward(
            g, images, windows, None, stride, padding, dilation, False, [0, 0], 1, mask
        )
        return gradients[by_windows].permute(0, 2, 3, 1)


def _write_out_windows(x: Tensor, geometry: Windows) -> Tensor:
    """The window of each output position of (B, H, W, I) as a row: (B, places up, places across, window x I).

    Copied in at least fp32: backward adds up all windows of a pixel in that dtype.
    """
    up, across = geometry.places(x.shape[1:3])
    (along_up, along_across) = geometry.stride
    (top, side) = geometry.padding
    padded = F.pad(x.to(wide_dtype(x.dtype)), (0, 0, side, side, top, top))
    shifts = []
    # One shifted copy for each place of the window, which together are what im2col gives.
    for row in range(geometry.size[0]):
        for column in range(geometry.size[1]):
            i = row * geometry.dilation[0]
            j = column * geometry.dilation[1]
            rows = slice(i, i + along_up * (up - 1) + 1, along_up)
            columns = slice(j, j + along_across * (across - 1) + 1, along_across)
            shifts.append(padded[:, rows, columns])
    return torch.cat(shifts, dim=-1).to(x.dtype)


class _ConvolvedProduct(torch.autograd.Function):
    """Images (B, H, W, I) convolved with (O, window x I). It marks its backward, which may run on another thread."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, form: _Form, phase: Phases, operands: Both | None) -> Tensor:
        arithmetic = form.arithmetic
        geometry = form.geometry
        with cast_marker(arithmetic, phase):
            pixels = form.to_rows(x)
            a = arithmetic.cast(pixels, Role.INPUT)
            b = operands[0] if operands else arithmetic.cast(weight, Role.WEIGHT)
            images = form.images(form.values(a), x.shape)
            windows = form.windows(form.values(b))
        sources = (pixels, weight) if arithmetic.keeps_source else (None, None)
        ctx.save_for_backward(a.data, a.scale, b.data, b.scale, *sources)
        ctx.form = form
        ctx.phase = phase
        ctx.shape = x.shape
        ctx.weight_shape = weight.shape
        with phase.gemm:
            y = F.conv2d(images, windows, None, geometry.stride, geometry.padding, geometry.dilation)
            return in_layout(y.to(arithmetic.carrier), form.layout)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        refuse_twice()
        form = ctx.form
        phase = ctx.phase
        arithmetic = ctx.form.arithmetic
        a_data, a_scale, b_data, b_scale, pixels, weight = ctx.saved_tensors
        a = Operand(a_data, a_scale)
        b = Operand(b_data, b_scale)
        casting = cast_marker(arithmetic, phase)

        # 1. Cast the incoming gradient, and restore what forward multiplied: its shapes are needed below.
        with casting:
            places = gradients[0].shape
            gradient = form.to_rows(gradients[0])
            g = arithmetic.cast(gradient, Role.GRADIENT)
            images = form.images(form.values(a), ctx.shape)
            windows = form.windows(form.values(b))

        # 2. The input gradient contracts over output channels.
        input_gradient = weight_gradient = None
        if ctx.needs_input_grad[0]:
            with casting:
                b_turned = form.windows(form.turned_values(b, weight, Role.WEIGHT))
                g_images = form.images(form.values(g), places)
            with phase.gemm:
                input_gradient = form.gradient(g_images, images, b_turned, False).to(arithmetic.carrier)

        # 3. The weight gradient contracts over batch and positions.
        if ctx.needs_input_grad[1]:
            with casting:
                g_turned = form.images(form.turned_values(g, gradient, Role.GRADIENT), places)
                a_turned = form.images(form.turned_values(a, pixels, Role.INPUT), ctx.shape)
            with phase.gemm:
                like = windows.to(g_turned.dtype)
                weight_gradient = form.gradient(g_turned, a_turned, like, True).reshape(ctx.weight_shape)
            with casting:  # the master weight is fp32, and autograd would convert outside any phase
                weight_gradient = weight_gradient.to(wide_dtype(arithmetic.carrier))
        return input_gradient, weight_gradient, None, None, None


def convolve(
    x: Tensor,
    weight: Tensor,
    geometry: Windows,
    arithmetic: Arithmetic,
    phase: Phases,
    layout: Layout = torch.channels_last,
    operands: Both | None = None,
) -> Tensor:
    """(B, H, W, I) convolved with windows (O, window x I), channels adjacent: (B, places up, places across, O).

    In the contiguous layout images come and go with torch's strides, and windows that are taken whole are
    (O, height, width, I). `operands` are those of the weight, if it was cast already.
    """
    x = x.to(arithmetic.carrier)
    # Without an explicit product torch's own convolution takes rounded operands.
    if not arithmetic.explicit:
        form = _Form(arithmetic, geometry, layout)
        return _ConvolvedProduct.apply(x, weight, form, phase, operands)  # type: ignore[no-untyped-call]
    # A product of a linear layer, with a row for each position.
    if x.requires_grad:
        windows = region(phase.gemm, _write_out_windows, x, geometry=geometry)
    else:
        with phase.gemm:
            windows = _write_out_windows(x, geometry)
    places = linear(windows, weight, arithmetic, phase, operands)
    return places if layout == torch.channels_last else in_layout(places.permute(0, 3, 1, 2), layout)


class Convolution(nn.Module):
    """Without bias; 3x3 with stride 1 and padding 1 by default.

    The fp32 master weight is (outputs, window x inputs), or torch's shape where the layout is contiguous.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        arithmetic: Arithmetic,
        geometry: Windows = _USUAL,
        layout: Layout = torch.channels_last,
    ) -> None:
        super().__init__()
        self.arithmetic = arithmetic
        self.geometry = geometry
        self.layout = layout
        self.operands: Both | None = None
        weight = torch.empty(outputs, math.prod(geometry.size) * inputs)
        nn.init.normal_(weight, std=math.sqrt(2 / weight.shape[1]))
        self.weight = nn.Parameter(weight if layout == torch.channels_last else _windows(weight, geometry.size, layout))

    def forward(self, x: Tensor, phase: Phases) -> Tensor:
        return convolve(x, self.windows(), self.geometry, self.arithmetic, phase, self.layout, self.operands)

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
    """Batch norm in at least fp32, or in its arithmetic; the result has the input's dtype.

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
        arithmetic = self.arithmetic
        weight = cast_to(self.weight, arithmetic, Role.WEIGHT)
        bias = cast_to(self.bias, arithmetic, Role.WEIGHT)
        wide = cast_to(x, arithmetic).to(weight.dtype).permute(0, 3, 1, 2)
        statistics = [tensor for tensor in (self.running_mean, self.running_var) if tensor is not None]
        by_batch = self.training or not statistics
        # Backward keeps the tensors that it is given: with an arithmetic these are copies, which are rounded below.
        running = statistics if arithmetic is None else [tensor.clone() for tensor in statistics]
        mean, variance = running or (None, None)
        y = F.batch_norm(wide, mean, variance, weight, bias, by_batch, momentum=0.1, eps=1e-5)
        if arithmetic is not None and self.training:
            for statistic, tensor in zip(statistics, running, strict=True):
                statistic.copy_(cast_to(tensor, arithmetic).detach())
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
        # Layers may return different carriers; the block keeps the dtype of its input.
        return F.relu(x + self.norm_second(self.second(hidden, phase)).to(x.dtype))
