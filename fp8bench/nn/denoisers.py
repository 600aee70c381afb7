"""Denoisers on random weights, a DiT and a UNet.

Latents are (batch, height, width, channels). A time step becomes sinusoids; together with the condition, which stands
for an image's text or class, it shifts and scales the stream of every block. Time steps come in fp32, or rounded to the
carrier, as in a model that is moved to bf16 whole: then 750 is 752.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8bench.nn.around import cast_to, start_stream, wide_dtype
from fp8bench.nn.attention import Core, SelfAttention
from fp8bench.nn.block import ModulatedNorm, Modulation, build_blocks
from fp8bench.nn.convolution import Convolution
from fp8bench.nn.linear import Choose, Linear, prefix_names
from fp8bench.nn.sizes import CHANNELS, FREQUENCIES, PATCH, DenoiserSizes, heads_of
from fp8bench.protocols import Arithmetic, Phases, Role

_GROUPS = 8


class TimeEmbedding(nn.Module):
    """Turns times and conditions into vectors. `clock` is the dtype of time steps; angles are at least fp32."""

    def __init__(self, width: int, clock: torch.dtype, choose: Choose) -> None:
        super().__init__()
        self.clock = clock
        self.up = Linear(FREQUENCIES, width, choose("up"))
        self.down = Linear(width, width, choose("down"))

    def forward(self, times: Tensor, condition: Tensor, phase: Phases) -> Tensor:
        hidden = self.down(F.silu(self.up(sinusoids(times.to(self.clock)), phase)), phase)
        return F.silu(hidden + condition.to(hidden.dtype))


def sinusoids(times: Tensor) -> Tensor:
    wide = times.to(wide_dtype(times.dtype))
    half = FREQUENCIES // 2
    steps = torch.arange(half, dtype=wide.dtype, device=wide.device)
    angles = wide[:, None] * torch.exp(-math.log(10_000) / half * steps)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class DiT(nn.Module):
    """Patches of 2x2 as tokens, through blocks that time modulates; its positions count as its embedding."""

    around: Mapping[str, Arithmetic | None] = dict.fromkeys(("embedding", "residual"))

    def __init__(
        self, sizes: DenoiserSizes, choose: Choose, carrier: torch.dtype, clock: torch.dtype, core: Core
    ) -> None:
        super().__init__()
        self.carrier = carrier
        self.side = sizes.image // PATCH
        self.time = TimeEmbedding(sizes.width, clock, prefix_names(choose, "time"))
        self.first = Linear(PATCH * PATCH * CHANNELS, sizes.width, choose("first"))
        self.positions = nn.Parameter(torch.randn(self.side * self.side, sizes.width))
        self.blocks = build_blocks(sizes.blocks, choose, core, adaptive=True)
        self.modulation = Modulation(sizes.width, 2, choose)
        self.norm = ModulatedNorm()
        self.last = Linear(sizes.width, PATCH * PATCH * CHANNELS, choose("last"))

    def forward(self, latent: Tensor, times: Tensor, condition: Tensor, phase: Phases) -> Tensor:
        # 1. Patches as tokens.
        batch = len(latent)
        side = self.side
        grid = latent.view(batch, side, PATCH, side, PATCH, CHANNELS)
        patches = grid.transpose(2, 3).reshape(batch, side * side, -1)

        # 2. The stream through all blocks, which time and condition modulate.
        time = self.time(times, condition, phase)
        positions = cast_to(self.positions, self.around["embedding"], Role.WEIGHT).to(self.carrier)
        x = self.first(patches, phase).to(self.carrier) + positions
        x = start_stream(x, self.carrier, self.around["residual"])
        for block in self.blocks:
            x = block(x, phase, time=time)

        # 3. Tokens as patches.
        y = self.last(self.norm(x, *self.modulation(time, phase, x.dtype)), phase)
        y = y.view(batch, side, side, PATCH, PATCH, CHANNELS)
        return y.transpose(2, 3).reshape(latent.shape)


class GroupNorm(nn.Module):
    """Group norm in at least fp32, or in its arithmetic; the result has the input's dtype."""

    arithmetic: Arithmetic | None = None

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = (cast_to(parameter, self.arithmetic, Role.WEIGHT) for parameter in (self.weight, self.bias))
        wide = cast_to(x, self.arithmetic).to(weight.dtype).permute(0, 3, 1, 2)
        return F.group_norm(wide, _GROUPS, weight, bias).permute(0, 2, 3, 1).to(x.dtype)


class TimedResidual(nn.Module):
    """Two 3x3 convolutions behind norms, the time added between them, and a shortcut."""

    residual: Arithmetic | None = None

    def __init__(self, inputs: int, outputs: int, width: int, choose: Choose) -> None:
        super().__init__()
        self.norms = nn.ModuleList((GroupNorm(inputs), GroupNorm(outputs)))
        self.conv1 = Convolution(inputs, outputs, choose("conv1"))
        self.conv2 = Convolution(outputs, outputs, choose("conv2"))
        self.time = Linear(width, outputs, choose("time"))
        self.skip = Linear(inputs, outputs, choose("skip")) if inputs != outputs else None

    def forward(self, x: Tensor, time: Tensor, phase: Phases) -> Tensor:
        first, second = self.norms
        hidden = self.conv1(F.silu(first(x)), phase).to(x.dtype) + self.time(time, phase).to(x.dtype)[:, None, None]
        shortcut = x if self.skip is None else self.skip(x, phase).to(x.dtype)
        return cast_to(shortcut + self.conv2(F.silu(second(hidden)), phase).to(x.dtype), self.residual)


class UNet(nn.Module):
    """Residual blocks at full resolution, at half of it with attention and twice the channels, and at full again."""

    around: Mapping[str, Arithmetic | None] = dict.fromkeys(("residual",))

    def __init__(
        self, sizes: DenoiserSizes, choose: Choose, carrier: torch.dtype, clock: torch.dtype, core: Core
    ) -> None:
        super().__init__()
        self.carrier = carrier
        width = sizes.width

        def block(inputs: int, outputs: int, name: str) -> TimedResidual:
            return TimedResidual(inputs, outputs, width, prefix_names(choose, name))

        # Every block reads the time, so that one network serves all steps of the noise.
        self.time = TimeEmbedding(width, clock, prefix_names(choose, "time"))
        self.first = Convolution(CHANNELS, width, choose("first"))
        self.down = nn.ModuleList(block(width, width, f"down.{number}") for number in range(sizes.layers))
        self.middle = nn.ModuleList((block(width, 2 * width, "middle.0"), block(2 * width, 2 * width, "middle.1")))
        # Attention only at the lowest resolution, where it is cheapest.
        heads = heads_of(2 * width)
        self.attn = SelfAttention(2 * width, heads, heads, 1.0, prefix_names(choose, "attn"), core)
        self.attn_norm = GroupNorm(2 * width)
        # The way up also reads what the way down passed on, hence the wider inputs.
        self.up = nn.ModuleList(
            block(3 * width if number == 0 else width, width, f"up.{number}") for number in range(sizes.layers)
        )
        self.norm = GroupNorm(width)
        self.last = Convolution(width, CHANNELS, choose("last"))

    def forward(self, latent: Tensor, times: Tensor, condition: Tensor, phase: Phases) -> Tensor:
        # 1. The stream begins at full resolution.
        time = self.time(times, condition, phase)
        residual = self.around["residual"]
        x = start_stream(self.first(latent, phase), self.carrier, residual)
        for block in self.down:
            x = block(x, time, phase)
        # 2. The middle runs at half the resolution, where attention is affordable.
        enter, leave = self.middle
        inner = enter(F.avg_pool2d(x.permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1), time, phase)
        mixed = self.attn(self.attn_norm(inner).flatten(1, 2), phase)
        inner = leave(cast_to(inner + mixed.view(inner.shape).to(inner.dtype), residual), time, phase)
        # 3. Back at full resolution, next to what the way down passed on.
        x = torch.cat((inner.repeat_interleave(2, 1).repeat_interleave(2, 2), x), dim=-1)
        for block in self.up:
            x = block(x, time, phase)
        return self.last(F.silu(self.norm(x)), phase)


DENOISERS = {"dit": DiT, "unet": UNet}
