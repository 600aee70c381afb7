"""Convolutions whose three products run in a chosen arithmetic, and residual blocks of 3x3 convolutions.

Images are (batch, height, width, channels), so every operand is a matrix whose last dimension is the contraction,
without a copy. Forward contracts over window and input channels, the input gradient over output channels, and the
weight gradient over batch and positions. An arithmetic that rounds its operands rounds them along these dimensions.
The rounded values are convolved in fp32, because torch has no convolution below 16 bits. An arithmetic that needs its
own products (`explicit`) gets the windows copied into a matrix, and multiplies as in a linear layer.

The order of the dimensions is the same for every memory layout. In memory, channels are last too, unless the layout
is torch's contiguous one. In the contiguous layout a conversion between dtypes keeps the strides, and after rounding
along the channels the strides are restored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8bench.nn.around import cast_to, widen_dtype
from fp8bench.nn.linear import (
    ChooseArithmetic,
    OperandPair,
    choose_cast_marker,
    free_weight,
    linear,
    refuse_double_backward,
    region,
)
from fp8bench.nn.parts import Norm
from fp8bench.protocols import Arithmetic, Operand, Phases, Role

HeightAndWidth = tuple[int, int]


class ConvolutionGeometry(NamedTuple):
    """Size, stride, padding and dilation of a convolution, each along height and width."""

    size: HeightAndWidth = (3, 3)
    stride: HeightAndWidth = (1, 1)
    padding: HeightAndWidth = (1, 1)
    dilation: HeightAndWidth = (1, 1)

    def count_output_positions(self, image: Sequence[int]) -> HeightAndWidth:
        position_counts = []
        for side, size, stride, padding, dilation in zip(image, *self, strict=True):
            position_counts.append((side + 2 * padding - dilation * (size - 1) - 1) // stride + 1)
        return position_counts[0], position_counts[1]


_DEFAULT_CONVOLUTION_GEOMETRY = ConvolutionGeometry()
Layout = torch.memory_format


def casts_in_memory_order(arithmetic: Arithmetic, layout: Layout) -> bool:
    """Returns whether images and weights can be cast element by element, in the order of their memory. Other casts get
    a matrix with one row per pixel or output channel.
    """
    return arithmetic.plain and layout == torch.contiguous_format


def _shape_images(matrix: Tensor, shape: Sequence[int], layout: Layout) -> Tensor:
    """Reshapes rows of pixels to images in torch's shape (batch, channels, height, width), with the strides of
    `layout`.
    """
    images = matrix.reshape(*shape[:3], -1).permute(0, 3, 1, 2)
    # torch chooses a kernel by strides, and the strides of 1x1 images fit both layouts. `view` makes them
    # unambiguous.
    return images if layout == torch.channels_last else images.contiguous().view(-1).view(images.shape)


def _shape_windows(matrix: Tensor, size: HeightAndWidth, layout: Layout = torch.channels_last) -> Tensor:
    return _shape_images(matrix, (matrix.shape[0], *size), layout)


def apply_layout(images: Tensor, layout: Layout) -> Tensor:
    """Returns torch's images with channels as the last dimension, stored in the layout's memory order."""
    if layout == torch.contiguous_format:
        return images.contiguous().permute(0, 2, 3, 1)
    return images.permute(0, 2, 3, 1).contiguous()


class _ConvolutionOperandForm(NamedTuple):
    """How a convolution casts its operands and lays them out in memory."""

    arithmetic: Arithmetic
    geometry: ConvolutionGeometry
    layout: Layout

    @property
    def casts_in_memory_order(self) -> bool:
        return casts_in_memory_order(self.arithmetic, self.layout)

    def convert_images_to_rows(self, images: Tensor) -> Tensor:
        return images if self.casts_in_memory_order else images.reshape(-1, images.shape[-1])

    def to_images(self, matrix: Tensor, shape: Sequence[int]) -> Tensor:
        return _shape_images(matrix, shape, self.layout)

    def convert_matrix_to_windows(self, matrix: Tensor) -> Tensor:
        return _shape_windows(matrix, self.geometry.size, self.layout)

    def decode_values(self, operand: Operand) -> Tensor:
        return operand.data if operand.scale is None else self.arithmetic.restore(operand, torch.float32)

    def decode_transpose(self, operand: Operand, source: Tensor, role: Role) -> Tensor:
        if self.casts_in_memory_order:
            return operand.data
        return self.decode_values(self.arithmetic.turn(operand, source, role)).t()

    def compute_gradient(self, output_gradient: Tensor, images: Tensor, windows: Tensor, for_windows: bool) -> Tensor:
        """Returns the gradient of the images, or of the windows if `for_windows`, with channels last. The values of the
        operand that the gradient belongs to are not read, only its shape.
        """
        stride, padding, dilation = self.geometry[1:]
        mask = [not for_windows, for_windows, False]
        gradients = torch.ops.aten.convolution_backward(
            output_gradient, images, windows, None, stride, padding, dilation, False, [0, 0], 1, mask
        )
        return gradients[for_windows].permute(0, 2, 3, 1)


def _copy_windows_to_rows(x: Tensor, geometry: ConvolutionGeometry) -> Tensor:
    """Copies the window of each output position of (B, H, W, I) into a row: (B, output height, output width, window x
    I).

    The copy is in fp32 or wider, because backward adds up all windows of a pixel in that dtype.
    """
    output_height, output_width = geometry.count_output_positions(x.shape[1:3])
    (stride_height, stride_width) = geometry.stride
    (top_padding, side_padding) = geometry.padding
    padded_images = F.pad(x.to(widen_dtype(x.dtype)), (0, 0, side_padding, side_padding, top_padding, top_padding))
    shifted_image_copies = []
    # One shifted copy for each position in the window. Together they are what im2col returns.
    for row in range(geometry.size[0]):
        for column in range(geometry.size[1]):
            row_offset = row * geometry.dilation[0]
            column_offset = column * geometry.dilation[1]
            rows = slice(row_offset, row_offset + stride_height * (output_height - 1) + 1, stride_height)
            columns = slice(column_offset, column_offset + stride_width * (output_width - 1) + 1, stride_width)
            shifted_image_copies.append(padded_images[:, rows, columns])
    return torch.cat(shifted_image_copies, dim=-1).to(x.dtype)


class _ConvolvedProduct(torch.autograd.Function):
    """Convolves images (B, H, W, I) with weights (O, window x I). Its backward also marks the phases of casts and
    products. Backward may run on another thread.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        operand_form: _ConvolutionOperandForm,
        phase: Phases,
        operands: OperandPair | None,
    ) -> Tensor:
        arithmetic = operand_form.arithmetic
        geometry = operand_form.geometry
        # 1. Cast inputs and weights, and shape them as torch's images and windows.
        with choose_cast_marker(arithmetic, phase):
            pixels = operand_form.convert_images_to_rows(x)
            a = arithmetic.cast(pixels, Role.INPUT)
            b = operands[0] if operands else arithmetic.cast(weight, Role.WEIGHT)
            images = operand_form.to_images(operand_form.decode_values(a), x.shape)
            windows = operand_form.convert_matrix_to_windows(operand_form.decode_values(b))
        # 2. Save the operands, and the original tensors only if backward must cast them again.
        source_tensors = (pixels, weight) if arithmetic.keeps_source else (None, None)
        ctx.save_for_backward(a.data, a.scale, b.data, b.scale, *source_tensors)
        ctx.operand_form = operand_form
        ctx.phase = phase
        ctx.shape = x.shape
        ctx.weight_shape = weight.shape
        # 3. Convolve.
        with phase.gemm:
            y = F.conv2d(images, windows, None, geometry.stride, geometry.padding, geometry.dilation)
            return apply_layout(y.to(arithmetic.carrier), operand_form.layout)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        operand_form = ctx.operand_form
        phase = ctx.phase
        arithmetic = ctx.operand_form.arithmetic
        a_data, a_scale, b_data, b_scale, pixels, weight = ctx.saved_tensors
        a = Operand(a_data, a_scale)
        b = Operand(b_data, b_scale)
        cast_phase_marker = choose_cast_marker(arithmetic, phase)

        # 1. Cast the incoming gradient. Restore the forward operands, whose shapes are needed below.
        with cast_phase_marker:
            output_shape = gradients[0].shape
            gradient = operand_form.convert_images_to_rows(gradients[0])
            gradient_operand = arithmetic.cast(gradient, Role.GRADIENT)
            images = operand_form.to_images(operand_form.decode_values(a), ctx.shape)
            windows = operand_form.convert_matrix_to_windows(operand_form.decode_values(b))

        # 2. The input gradient contracts over output channels.
        input_gradient = weight_gradient = None
        if ctx.needs_input_grad[0]:
            with cast_phase_marker:
                transposed_windows = operand_form.convert_matrix_to_windows(
                    operand_form.decode_transpose(b, weight, Role.WEIGHT)
                )
                output_gradient_images = operand_form.to_images(
                    operand_form.decode_values(gradient_operand), output_shape
                )
            with phase.gemm:
                input_gradient = operand_form.compute_gradient(
                    output_gradient_images, images, transposed_windows, False
                ).to(arithmetic.carrier)

        # 3. The weight gradient contracts over batch and positions.
        if ctx.needs_input_grad[1]:
            with cast_phase_marker:
                transposed_gradient = operand_form.to_images(
                    operand_form.decode_transpose(gradient_operand, gradient, Role.GRADIENT), output_shape
                )
                transposed_images = operand_form.to_images(
                    operand_form.decode_transpose(a, pixels, Role.INPUT), ctx.shape
                )
            with phase.gemm:
                windows_in_gradient_dtype = windows.to(transposed_gradient.dtype)
                weight_gradient = operand_form.compute_gradient(
                    transposed_gradient, transposed_images, windows_in_gradient_dtype, True
                ).reshape(ctx.weight_shape)
            # the master weight is fp32: without this conversion, autograd would convert the gradient outside of any
            # phase
            with cast_phase_marker:
                weight_gradient = weight_gradient.to(widen_dtype(arithmetic.carrier))
        return input_gradient, weight_gradient, None, None, None


def convolve(
    x: Tensor,
    weight: Tensor,
    geometry: ConvolutionGeometry,
    arithmetic: Arithmetic,
    phase: Phases,
    layout: Layout = torch.channels_last,
    operands: OperandPair | None = None,
) -> Tensor:
    """Convolves images (B, H, W, I) with weights (O, window x I). Returns (B, output height, output width, O).

    In the contiguous layout, images have torch's strides. If casts then work in the order of memory
    (`casts_in_memory_order`), weights are (O, height, width, I). If the weight was already cast, `operands` are its
    operands.
    """
    x = x.to(arithmetic.carrier)
    # With fp32 accumulation and no Hadamard rotation, torch's convolution can compute the product of rounded operands.
    if not arithmetic.explicit:
        operand_form = _ConvolutionOperandForm(arithmetic, geometry, layout)
        return _ConvolvedProduct.apply(x, weight, operand_form, phase, operands)  # type: ignore[no-untyped-call]
    # An explicit arithmetic has matrix products only. So copy the windows into a matrix, with one row for each output
    # position, and multiply as in a linear layer.
    if x.requires_grad:
        windows = region(phase.gemm, _copy_windows_to_rows, x, geometry=geometry)
    else:
        with phase.gemm:
            windows = _copy_windows_to_rows(x, geometry)
    outputs = linear(windows, weight, arithmetic, phase, operands)
    return outputs if layout == torch.channels_last else apply_layout(outputs.permute(0, 3, 1, 2), layout)


class Convolution(nn.Module):
    """A convolution without bias, by default 3x3 with stride 1 and padding 1.

    The fp32 master weight is (outputs, window x inputs), or has torch's shape if the layout is contiguous.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        arithmetic: Arithmetic,
        geometry: ConvolutionGeometry = _DEFAULT_CONVOLUTION_GEOMETRY,
        layout: Layout = torch.channels_last,
    ) -> None:
        super().__init__()
        self.arithmetic = arithmetic
        self.geometry = geometry
        self.layout = layout
        self.operands: OperandPair | None = None
        weight = torch.empty(outputs, math.prod(geometry.size) * inputs)
        nn.init.normal_(weight, std=math.sqrt(2 / weight.shape[1]))  # He's initialisation, for ReLU
        self.weight = nn.Parameter(
            weight if layout == torch.channels_last else _shape_windows(weight, geometry.size, layout)
        )

    def forward(self, x: Tensor, phase: Phases) -> Tensor:
        return convolve(x, self.reshape_weight(), self.geometry, self.arithmetic, phase, self.layout, self.operands)

    def cast_once(self) -> None:
        """Casts the weight once for all later forward passes and frees the original, as `linear.cast_once` does."""
        operand = self.arithmetic.cast(self.reshape_weight().detach(), Role.WEIGHT)
        self.operands = operand, operand  # without gradients nothing needs a transpose
        free_weight(self.weight)

    def reshape_weight(self) -> Tensor:
        if self.layout == torch.channels_last:
            return self.weight
        windows = self.weight.permute(0, 2, 3, 1)
        return windows if casts_in_memory_order(self.arithmetic, self.layout) else windows.flatten(1)


class BatchNorm(nn.Module):
    """Batch norm in `arithmetic`, or without one in fp32 or wider. The result has the input's dtype.

    It normalises by the batch's statistics. With `running` it also updates running means in training, as torch does,
    and normalises by these in eval mode. The running means are stored in `arithmetic` too.
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
        cast_input = cast_to(x, arithmetic).to(weight.dtype).permute(0, 3, 1, 2)
        statistics = [tensor for tensor in (self.running_mean, self.running_var) if tensor is not None]
        uses_batch_statistics = self.training or not statistics
        # Autograd saves the statistics that it gets. Pass copies if the module's own are rounded below.
        running_statistics = statistics if arithmetic is None else [tensor.clone() for tensor in statistics]
        mean, variance = running_statistics or (None, None)
        y = F.batch_norm(cast_input, mean, variance, weight, bias, uses_batch_statistics, momentum=0.1, eps=1e-5)
        if arithmetic is not None and self.training:
            for statistic, tensor in zip(statistics, running_statistics, strict=True):
                statistic.copy_(cast_to(tensor, arithmetic).detach())
        return y.permute(0, 2, 3, 1).to(x.dtype)


class ResidualBlock(nn.Module):
    """ResNet's basic block: two convolutions with norms, ReLU after each norm, and the input added before the last
    ReLU.
    """

    def __init__(
        self, channels: int, choose: ChooseArithmetic, layer_norm: bool = False, running: bool = False
    ) -> None:
        super().__init__()
        self.first, self.second = (Convolution(channels, channels, choose(name)) for name in ("first", "second"))
        self.norm_first, self.norm_second = (
            Norm(channels, root_mean_square=False) if layer_norm else BatchNorm(channels, running) for _ in range(2)
        )

    def forward(self, x: Tensor, phase: Phases) -> Tensor:
        hidden = F.relu(self.norm_first(self.first(x, phase)))
        # The convolution's result may have a different dtype. The block keeps the dtype of its input.
        return F.relu(x + self.norm_second(self.second(hidden, phase)).to(x.dtype))
