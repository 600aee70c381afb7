"""Convolutions whose three products run in a chosen arithmetic, and the residual block around two 3x3 ones.

Images are (batch, height, width, channels): every operand is then a matrix with its contraction last, as in a linear
layer, without a copy. Forward contracts over window and input channels, the input gradient over output channels, the
weight gradient over batch and positions. Arithmetics that round get their operands rounded along these and convolved
in fp32, pixel by pixel along the channels, as a kernel would read them; torch convolves nothing narrower than 16 bits.
Arithmetics whose products are more than products of values get the windows written out, as a matrix, instead.
So dimensions are called; in memory channels are last, too, unless a layer's layout is torch's contiguous one. Then what
is converted from dtype to dtype stays as it lies, and what is rounded along the channels is put back by its cast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8bench.nn.around import held
from fp8bench.nn.gpt import Norm
from fp8bench.nn.linear import Both, Choose, both_of, casting_of, linear, region
from fp8bench.protocols import Arithmetic, Operand, Phases, Role

Sides = tuple[int, int]


class Windows(NamedTuple):
    """How windows lie on an image: their height and width, and steps, zeros around and distances along each."""

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


def as_it_lies(arithmetic: Arithmetic, layout: Layout) -> bool:
    """Whether casts take images and windows whole: elements one by one, where they are not rows in memory."""
    return arithmetic.plain and layout == torch.contiguous_format


def _values(operand: Operand, arithmetic: Arithmetic) -> Tensor:
    """The operand's values in a dtype that torch convolves: its own, or fp32 where it has a scale."""
    return operand.data if operand.scale is None else arithmetic.restore(operand, torch.float32)


def _images(matrix: Tensor, shape: Sequence[int], layout: Layout) -> Tensor:
    """Rows of pixels as torch has images, (batch, channels, height, width), which lie as `layout` says."""
    images = matrix.reshape(*shape[:3], -1).permute(0, 3, 1, 2)
    # Windows of one place lie either way, and torch goes by their strides.
    return images if layout == torch.channels_last else images.contiguous().view(-1).view(images.shape)


def _windows(matrix: Tensor, size: Sides, layout: Layout = torch.channels_last) -> Tensor:
    """Rows of weights, (outputs, window x inputs), as torch has them: (outputs, inputs, height, width)."""
    return _images(matrix, (matrix.shape[0], *size), layout)


def laid(images: Tensor, layout: Layout) -> Tensor:
    """Torch's images as (batch, height, width, channels), in memory as `layout` says."""
    if layout == torch.contiguous_format:
        return images.contiguous().permute(0, 2, 3, 1)
    return images.permute(0, 2, 3, 1).contiguous()


def _gradient(g: Tensor, images: Tensor, windows: Tensor, lie: Windows, wanted: int) -> Tensor:
    """The gradient of a convolution by its images (wanted=0) or its windows (1), channels last in its dimensions.

    Of the one that is wanted only the shape is used.
    """
    gradient: Tensor = torch.ops.aten.convolution_backward(
        g, images, windows, None, lie.stride, lie.padding, lie.dilation, False, [0, 0], 1,
        [wanted == 0, wanted == 1, False],
    )[wanted]  # fmt: skip
    return gradient.permute(0, 2, 3, 1)


def _written_out(x: Tensor, lie: Windows) -> Tensor:
    """Every place's window of (B, H, W, I) beside each other, (B, places up, places across, window x I).

    By way of fp32 if need be: in backward all windows of a pixel are added up in it.
    """
    up, across = lie.places(x.shape[1:3])
    (along_up, along_across), (top, side) = lie.stride, lie.padding
    padded = F.pad(x.to(torch.promote_types(x.dtype, torch.float32)), (0, 0, side, side, top, top))
    begins = [(i * lie.dilation[0], j * lie.dilation[1]) for i in range(lie.size[0]) for j in range(lie.size[1])]
    shifts = [
        padded[:, i : i + along_up * (up - 1) + 1 : along_up, j : j + along_across * (across - 1) + 1 : along_across]
        for i, j in begins
    ]
    return torch.cat(shifts, dim=-1).to(x.dtype)


class _ConvolvedProduct(torch.autograd.Function):
    """Images (B, H, W, I) under windows (O, window x I), marking its own backward: it may run on another thread."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, lie: Windows, arithmetic: Arithmetic, phase: Phases, layout: Layout,
        given: Both | None,
    ) -> Tensor:  # fmt: skip
        with casting_of(arithmetic, phase):
            pixels = x if as_it_lies(arithmetic, layout) else x.reshape(-1, x.shape[-1])
            a, b = arithmetic.cast(pixels, Role.INPUT), given[0] if given else arithmetic.cast(weight, Role.WEIGHT)
            images = _images(_values(a, arithmetic), x.shape, layout)
            windows = _windows(_values(b, arithmetic), lie.size, layout)
        sources = (pixels, weight) if arithmetic.keeps_source else (None, None)
        ctx.save_for_backward(a.data, a.scale, b.data, b.scale, *sources)
        ctx.arithmetic, ctx.phase, ctx.lie, ctx.layout = arithmetic, phase, lie, layout
        ctx.shapes = x.shape, weight.shape
        with phase.gemm:
            y = F.conv2d(images, windows, None, lie.stride, lie.padding, lie.dilation)
            return laid(y.to(arithmetic.carrier), layout)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        arithmetic, phase, lie, layout, (shape, weights) = ctx.arithmetic, ctx.phase, ctx.lie, ctx.layout, ctx.shapes
        a_data, a_scale, b_data, b_scale, pixels, weight = ctx.saved_tensors
        a, b = Operand(a_data, a_scale), Operand(b_data, b_scale)
        casting, whole = casting_of(arithmetic, phase), as_it_lies(arithmetic, layout)

        def turned(operand: Operand, source: Tensor, role: Role) -> Tensor:
            return operand.data if whole else _values(arithmetic.turn(operand, source, role), arithmetic).t()

        with casting:
            places = gradients[0].shape
            gradient = gradients[0] if whole else gradients[0].reshape(-1, places[-1])
            g = arithmetic.cast(gradient, Role.GRADIENT)
            images = _images(_values(a, arithmetic), shape, layout)
            windows = _windows(_values(b, arithmetic), lie.size, layout)
        input_gradient = weight_gradient = None
        if ctx.needs_input_grad[0]:
            with casting:
                b_turned = _windows(turned(b, weight, Role.WEIGHT), lie.size, layout)
                g_images = _images(_values(g, arithmetic), places, layout)
            with phase.gemm:
                input_gradient = _gradient(g_images, images, b_turned, lie, 0).to(arithmetic.carrier)
        if ctx.needs_input_grad[1]:
            with casting:
                g_turned = _images(turned(g, gradient, Role.GRADIENT), places, layout)
                a_turned = _images(turned(a, pixels, Role.INPUT), shape, layout)
            with phase.gemm:
                like = windows.to(g_turned.dtype)
                weight_gradient = _gradient(g_turned, a_turned, like, lie, 1).reshape(weights)
            with casting:  # the master weight is fp32, and autograd would convert outside any phase
                weight_gradient = weight_gradient.to(torch.promote_types(arithmetic.carrier, torch.float32))
        return input_gradient, weight_gradient, None, None, None, None, None


def convolved(
    x: Tensor, weight: Tensor, lie: Windows, arithmetic: Arithmetic, phase: Phases,
    layout: Layout = torch.channels_last, operands: Both | None = None,
) -> Tensor:  # fmt: skip
    """(B, H, W, I) under windows (O, window x I), a pixel's channels beside each other: (B, places, O).

    Images that lie otherwise come, and go, as `layout` says; windows that are taken as they lie are (O, height, width,
    I). `operands` of the weight, if it was cast.
    """
    x = x.to(arithmetic.carrier)
    if not arithmetic.explicit:
        y: Tensor = _ConvolvedProduct.apply(x, weight, lie, arithmetic, phase, layout, operands)  # type: ignore[no-untyped-call]
        return y
    # The same as one product of a linear layer, a row for every place.
    if x.requires_grad:
        windows = region(phase.gemm, _written_out, x, lie=lie)
    else:
        with phase.gemm:
            windows = _written_out(x, lie)
    places = linear(windows, weight, arithmetic, phase, operands)
    return places if layout == torch.channels_last else laid(places.permute(0, 3, 1, 2), layout)


class Convolution(nn.Module):
    """3x3, stride 1, as many positions out as in, unless told otherwise; without bias.

    The fp32 master weight is (outputs, window x inputs), and as torch has it where the layout is contiguous.
    """

    def __init__(
        self, inputs: int, outputs: int, arithmetic: Arithmetic, lie: Windows = _USUAL,
        layout: Layout = torch.channels_last,
    ) -> None:  # fmt: skip
        super().__init__()
        self.arithmetic, self.lie, self.layout = arithmetic, lie, layout
        self.operands: Both | None = None
        weight = torch.empty(outputs, math.prod(lie.size) * inputs)
        nn.init.normal_(weight, std=math.sqrt(2 / weight.shape[1]))
        self.weight = nn.Parameter(weight if layout == torch.channels_last else _windows(weight, lie.size, layout))

    def forward(self, x: Tensor, phase: Phases) -> Tensor:
        return convolved(x, self._windows(), self.lie, self.arithmetic, phase, self.layout, self.operands)

    def cast_once(self) -> None:
        """Have its weight cast ahead of all passes to come, which may not change it."""
        weight = self._windows().detach()
        whole = as_it_lies(self.arithmetic, self.layout)
        operand = self.arithmetic.cast(weight, Role.WEIGHT) if whole else None
        self.operands = (operand, operand) if operand else both_of(self.arithmetic, weight)

    def _windows(self) -> Tensor:
        if self.layout == torch.channels_last:
            return self.weight
        windows = self.weight.permute(0, 2, 3, 1)
        return windows if as_it_lies(self.arithmetic, self.layout) else windows.flatten(1)


class BatchNorm(nn.Module):
    """Batch norm by the batch's own statistics, computed in at least fp32 unless an arithmetic says otherwise, and
    handed back in the input's dtype.

    A `running` one keeps a mean of these while it is trained, as torch's does, and goes by that in eval mode. Its
    statistics are kept in the arithmetic, too.
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
        weight, bias = (held(parameter, own, Role.WEIGHT) for parameter in (self.weight, self.bias))
        wide = held(x, own).to(weight.dtype).permute(0, 3, 1, 2)
        mean, variance = self.running_mean, self.running_var
        by_batch = self.training or mean is None
        if own is not None:  # backward keeps those that it is given
            mean, variance = (None if tensor is None else tensor.clone() for tensor in (mean, variance))
        y = F.batch_norm(wide, mean, variance, weight, bias, by_batch, momentum=0.1, eps=1e-5)
        for name, statistic in (("running_mean", mean), ("running_var", variance)):
            if own is not None and self.training and statistic is not None:
                getattr(self, name).copy_(held(statistic, own).detach())
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
        # A layer of another precision hands back its own carrier; the block gives what it was given.
        return F.relu(x + self.norm_second(self.second(hidden, phase)).to(x.dtype))
