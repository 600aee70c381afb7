"""Denoisers with random weights: a DiT and a UNet.

Latents are (batch, height, width, channels). A time step is encoded as sines and cosines. The condition stands for an
image's text or class. Time step and condition together shift and scale the stream of every block. Time steps are
fp32. In a model that is converted to bf16 as a whole they are rounded to the carrier, so that time step 750 becomes
752.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8bench.nn.around import cast_to, start_stream, widen_dtype
from fp8bench.nn.attention import AttentionCore, SelfAttention
from fp8bench.nn.block import ModulatedNorm, Modulation, build_blocks
from fp8bench.nn.convolution import Convolution
from fp8bench.nn.linear import ChooseArithmetic, Linear, make_part_chooser
from fp8bench.nn.sizes import LATENT_CHANNELS, PATCH_SIDE, TIME_EMBEDDING_FREQUENCIES, DenoiserSizes, count_heads
from fp8bench.protocols import Arithmetic, Phases, Role

_NORM_GROUPS = 8


class TimeEmbedding(nn.Module):
    """Turns time steps and conditions into vectors. Time steps are rounded to `time_dtype`. Then the angles of their
    sines and cosines are computed in fp32 or wider.
    """

    def __init__(self, width: int, time_dtype: torch.dtype, choose: ChooseArithmetic) -> None:
        super().__init__()
        self.time_dtype = time_dtype
        self.up = Linear(TIME_EMBEDDING_FREQUENCIES, width, choose("up"))
        self.down = Linear(width, width, choose("down"))

    def forward(self, times: Tensor, condition: Tensor, phase: Phases) -> Tensor:
        hidden = self.down(F.silu(self.up(encode_times(times.to(self.time_dtype)), phase)), phase)
        return F.silu(hidden + condition.to(hidden.dtype))


def encode_times(times: Tensor) -> Tensor:
    widened_times = times.to(widen_dtype(times.dtype))
    frequency_count = TIME_EMBEDDING_FREQUENCIES // 2
    frequency_indices = torch.arange(frequency_count, dtype=widened_times.dtype, device=widened_times.device)
    time_angles = widened_times[:, None] * torch.exp(-math.log(10_000) / frequency_count * frequency_indices)
    return torch.cat((time_angles.cos(), time_angles.sin()), dim=-1)


class DiT(nn.Module):
    """A diffusion transformer. Its tokens are 2x2 patches of a latent, and the time step modulates each block. For a
    precision map, its position vectors are the embedding.
    """

    around: Mapping[str, Arithmetic | None] = dict.fromkeys(("embedding", "residual"))

    def __init__(
        self,
        sizes: DenoiserSizes,
        choose: ChooseArithmetic,
        carrier: torch.dtype,
        time_dtype: torch.dtype,
        core: AttentionCore,
    ) -> None:
        super().__init__()
        self.carrier = carrier
        self.side = sizes.image // PATCH_SIDE
        self.time = TimeEmbedding(sizes.width, time_dtype, make_part_chooser(choose, "time"))
        self.first = Linear(PATCH_SIDE * PATCH_SIDE * LATENT_CHANNELS, sizes.width, choose("first"))
        self.positions = nn.Parameter(torch.randn(self.side * self.side, sizes.width))
        self.blocks = build_blocks(sizes.blocks, choose, core, adaptive=True)
        self.modulation = Modulation(sizes.width, 2, choose)
        self.norm = ModulatedNorm()
        self.last = Linear(sizes.width, PATCH_SIDE * PATCH_SIDE * LATENT_CHANNELS, choose("last"))

    def forward(self, latent: Tensor, times: Tensor, condition: Tensor, phase: Phases) -> Tensor:
        # 1. Turn patches into tokens.
        batch = len(latent)
        side = self.side
        patch_grid = latent.view(batch, side, PATCH_SIDE, side, PATCH_SIDE, LATENT_CHANNELS)
        patches = patch_grid.transpose(2, 3).reshape(batch, side * side, -1)

        # 2. Run the stream through all blocks, modulated by time and condition.
        time_embedding = self.time(times, condition, phase)
        positions = cast_to(self.positions, self.around["embedding"], Role.WEIGHT).to(self.carrier)
        x = self.first(patches, phase).to(self.carrier) + positions
        x = start_stream(x, self.carrier, self.around["residual"])
        for block in self.blocks:
            x = block(x, phase, time=time_embedding)

        # 3. Turn tokens back into patches.
        y = self.last(self.norm(x, *self.modulation(time_embedding, phase, x.dtype)), phase)
        y = y.view(batch, side, side, PATCH_SIDE, PATCH_SIDE, LATENT_CHANNELS)
        return y.transpose(2, 3).reshape(latent.shape)


class GroupNorm(nn.Module):
    """Group norm in `arithmetic`, or without one in fp32 or wider. The result has the input's dtype."""

    arithmetic: Arithmetic | None = None

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = (cast_to(parameter, self.arithmetic, Role.WEIGHT) for parameter in (self.weight, self.bias))
        cast_input = cast_to(x, self.arithmetic).to(weight.dtype).permute(0, 3, 1, 2)
        return F.group_norm(cast_input, _NORM_GROUPS, weight, bias).permute(0, 2, 3, 1).to(x.dtype)


class TimeConditionedResidual(nn.Module):
    """A residual block of two 3x3 convolutions after norms. The time vector is added between them."""

    residual_arithmetic: Arithmetic | None = None

    def __init__(self, inputs: int, outputs: int, width: int, choose: ChooseArithmetic) -> None:
        super().__init__()
        self.norms = nn.ModuleList((GroupNorm(inputs), GroupNorm(outputs)))
        self.conv1 = Convolution(inputs, outputs, choose("conv1"))
        self.conv2 = Convolution(outputs, outputs, choose("conv2"))
        self.time = Linear(width, outputs, choose("time"))
        self.skip = Linear(inputs, outputs, choose("skip")) if inputs != outputs else None

    def forward(self, x: Tensor, time: Tensor, phase: Phases) -> Tensor:
        first_norm, second_norm = self.norms
        hidden = (
            self.conv1(F.silu(first_norm(x)), phase).to(x.dtype) + self.time(time, phase).to(x.dtype)[:, None, None]
        )
        shortcut_output = x if self.skip is None else self.skip(x, phase).to(x.dtype)
        return cast_to(
            shortcut_output + self.conv2(F.silu(second_norm(hidden)), phase).to(x.dtype), self.residual_arithmetic
        )


class UNet(nn.Module):
    """A UNet: residual blocks at full resolution, at half resolution with twice the channels and attention, and at full
    resolution again.
    """

    around: Mapping[str, Arithmetic | None] = dict.fromkeys(("residual",))

    def __init__(
        self,
        sizes: DenoiserSizes,
        choose: ChooseArithmetic,
        carrier: torch.dtype,
        time_dtype: torch.dtype,
        core: AttentionCore,
    ) -> None:
        super().__init__()
        self.carrier = carrier
        width = sizes.width

        def block(inputs: int, outputs: int, name: str) -> TimeConditionedResidual:
            return TimeConditionedResidual(inputs, outputs, width, make_part_chooser(choose, name))

        # Every block reads the time step, so that one network serves all noise levels.
        self.time = TimeEmbedding(width, time_dtype, make_part_chooser(choose, "time"))
        self.first = Convolution(LATENT_CHANNELS, width, choose("first"))
        self.down = nn.ModuleList(block(width, width, f"down.{number}") for number in range(sizes.layers))
        self.middle = nn.ModuleList((block(width, 2 * width, "middle.0"), block(2 * width, 2 * width, "middle.1")))
        # Attention runs only at the lowest resolution, where it is cheapest.
        heads = count_heads(2 * width)
        self.attn = SelfAttention(2 * width, heads, heads, 1.0, make_part_chooser(choose, "attn"), core)
        self.attn_norm = GroupNorm(2 * width)
        # The first block of `up` reads the outputs of `middle` (2 x width channels) and of `down` (width).
        self.up = nn.ModuleList(
            block(3 * width if number == 0 else width, width, f"up.{number}") for number in range(sizes.layers)
        )
        self.norm = GroupNorm(width)
        self.last = Convolution(width, LATENT_CHANNELS, choose("last"))

    def forward(self, latent: Tensor, times: Tensor, condition: Tensor, phase: Phases) -> Tensor:
        # 1. Start the stream at full resolution.
        time_embedding = self.time(times, condition, phase)
        residual_arithmetic = self.around["residual"]
        x = start_stream(self.first(latent, phase), self.carrier, residual_arithmetic)
        for block in self.down:
            x = block(x, time_embedding, phase)
        # 2. Run the middle blocks and attention at half the resolution.
        first_middle_block, second_middle_block = self.middle
        half_resolution = first_middle_block(
            F.avg_pool2d(x.permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1), time_embedding, phase
        )
        attention_output = self.attn(self.attn_norm(half_resolution).flatten(1, 2), phase)
        half_resolution = second_middle_block(
            cast_to(
                half_resolution + attention_output.view(half_resolution.shape).to(half_resolution.dtype),
                residual_arithmetic,
            ),
            time_embedding,
            phase,
        )
        # 3. Return to full resolution, and append the output of `down`.
        x = torch.cat((half_resolution.repeat_interleave(2, 1).repeat_interleave(2, 2), x), dim=-1)
        for block in self.up:
            x = block(x, time_embedding, phase)
        return self.last(F.silu(self.norm(x)), phase)


DENOISERS = {"dit": DiT, "unet": UNet}
