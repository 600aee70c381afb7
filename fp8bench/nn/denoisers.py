"""Denoisers on random weights, a DiT and a UNet: what a sampler of diffusion models evaluates.

Latents are (batch, height, width, channels). A time step becomes sinusoids, and with its image's condition, which
stands for text or a class, what shifts and scales the stream of every block. It comes in fp32, or rounded to the
carrier, as in a model that is moved to bf16 whole: then 750 is 752.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8bench.nn.attention import Core, SelfAttention
from fp8bench.nn.convolution import Convolution
from fp8bench.nn.gpt import FeedForward
from fp8bench.nn.linear import Choose, Linear, within
from fp8bench.nn.sizes import CHANNELS, FREQUENCIES, PATCH, DenoiserSizes, heads_of
from fp8bench.protocols import Phases

_GROUPS = 8


class TimeEmbedding(nn.Module):
    """`clock` is the dtype that time steps come in; angles are computed in at least fp32 of what that leaves."""

    def __init__(self, width: int, clock: torch.dtype, choose: Choose) -> None:
        super().__init__()
        self.clock = clock
        self.up = Linear(FREQUENCIES, width, choose("up"))
        self.down = Linear(width, width, choose("down"))

    def forward(self, times: Tensor, condition: Tensor, phase: Phases) -> Tensor:
        hidden = self.down(F.silu(self.up(sinusoids(times.to(self.clock)), phase)), phase)
        return F.silu(hidden + condition.to(hidden.dtype))


def sinusoids(times: Tensor) -> Tensor:
    wide = times.to(torch.promote_types(times.dtype, torch.float32))
    half = FREQUENCIES // 2
    steps = torch.arange(half, dtype=wide.dtype, device=wide.device)
    angles = wide[:, None] * torch.exp(-math.log(10_000) / half * steps)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class Modulation(nn.Module):
    """As many vectors of an image's time and condition, each (batch, 1, width)."""

    def __init__(self, width: int, count: int, choose: Choose) -> None:
        super().__init__()
        self.count = count
        self.product = Linear(width, count * width, choose("modulation"))

    def forward(self, time: Tensor, phase: Phases, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return self.product(time, phase).to(dtype)[:, None].chunk(self.count, dim=-1)  # type: ignore[no-any-return]


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """A layer norm without weights, computed in at least fp32, shifted and scaled."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.layer_norm(wide, x.shape[-1:], eps=1e-6).to(x.dtype) * (1 + scale) + shift


class DiTBlock(nn.Module):
    """Attention and a feed-forward part, each shifted, scaled and weighed by time and condition."""

    def __init__(self, width: int, choose: Choose, core: Core) -> None:
        super().__init__()
        heads = heads_of(width)
        self.modulation = Modulation(width, 6, choose)
        self.attn = SelfAttention(width, heads, heads, 1.0, within(choose, "attn"), core)
        self.mlp = FeedForward(width, 4 * width, False, 1.0, within(choose, "mlp"))

    def forward(self, x: Tensor, time: Tensor, phase: Phases) -> Tensor:
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = self.modulation(time, phase, x.dtype)
        x = x + gate * self.attn(modulated(x, shift, scale), phase)
        # A layer of another precision hands back its own carrier; the stream keeps the model's.
        added: Tensor = gate_mlp * self.mlp(modulated(x, shift_mlp, scale_mlp), phase).to(x.dtype)
        return x + added


class DiT(nn.Module):
    """Patches of 2x2 as tokens, through blocks that time modulates."""

    def __init__(
        self, sizes: DenoiserSizes, choose: Choose, carrier: torch.dtype, clock: torch.dtype, core: Core
    ) -> None:  # fmt: skip
        super().__init__()
        self.carrier, self.side = carrier, sizes.image // PATCH
        self.time = TimeEmbedding(sizes.width, clock, within(choose, "time"))
        self.first = Linear(PATCH * PATCH * CHANNELS, sizes.width, choose("first"))
        self.positions = nn.Parameter(torch.randn(self.side * self.side, sizes.width))
        self.blocks = nn.ModuleList(
            DiTBlock(sizes.width, within(choose, f"blocks.{number}"), core) for number in range(sizes.layers)
        )
        self.modulation = Modulation(sizes.width, 2, choose)
        self.last = Linear(sizes.width, PATCH * PATCH * CHANNELS, choose("last"))

    def forward(self, latent: Tensor, times: Tensor, condition: Tensor, phase: Phases) -> Tensor:
        grid = (len(latent), self.side, PATCH, self.side, PATCH, CHANNELS)
        patches = latent.view(grid).transpose(2, 3).reshape(len(latent), self.side * self.side, -1)
        time = self.time(times, condition, phase)
        x = self.first(patches, phase).to(self.carrier) + self.positions.to(self.carrier)
        for block in self.blocks:
            x = block(x, time, phase)
        y = self.last(modulated(x, *self.modulation(time, phase, x.dtype)), phase)
        return y.view(len(y), self.side, self.side, PATCH, PATCH, CHANNELS).transpose(2, 3).reshape(latent.shape)  # type: ignore[no-any-return]


class GroupNorm(nn.Module):
    """Of channels in groups, computed in at least fp32 and handed back in the input's dtype."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(self.weight.dtype).permute(0, 3, 1, 2)
        return F.group_norm(wide, _GROUPS, self.weight, self.bias).permute(0, 2, 3, 1).to(x.dtype)


class TimedResidual(nn.Module):
    """Two 3x3 convolutions behind norms, time added between them; the input, of as many channels, is added."""

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
        kept = x if self.skip is None else self.skip(x, phase).to(x.dtype)
        return kept + self.conv2(F.silu(second(hidden)), phase).to(x.dtype)  # type: ignore[no-any-return]


class UNet(nn.Module):
    """Residual blocks at full resolution, at half of it, with attention and twice the channels, and at full again."""

    def __init__(
        self, sizes: DenoiserSizes, choose: Choose, carrier: torch.dtype, clock: torch.dtype, core: Core
    ) -> None:  # fmt: skip
        super().__init__()
        self.carrier, width = carrier, sizes.width

        def block(inputs: int, outputs: int, name: str) -> TimedResidual:
            return TimedResidual(inputs, outputs, width, within(choose, name))

        self.time = TimeEmbedding(width, clock, within(choose, "time"))
        self.first = Convolution(CHANNELS, width, choose("first"))
        self.down = nn.ModuleList(block(width, width, f"down.{number}") for number in range(sizes.layers))
        self.middle = nn.ModuleList((block(width, 2 * width, "middle.0"), block(2 * width, 2 * width, "middle.1")))
        heads = heads_of(2 * width)
        self.attn = SelfAttention(2 * width, heads, heads, 1.0, within(choose, "attn"), core)
        self.attn_norm = GroupNorm(2 * width)
        self.up = nn.ModuleList(
            block(3 * width if number == 0 else width, width, f"up.{number}") for number in range(sizes.layers)
        )
        self.norm = GroupNorm(width)
        self.last = Convolution(width, CHANNELS, choose("last"))

    def forward(self, latent: Tensor, times: Tensor, condition: Tensor, phase: Phases) -> Tensor:
        time = self.time(times, condition, phase)
        x = self.first(latent, phase).to(self.carrier)
        for block in self.down:
            x = block(x, time, phase)
        before, after = self.middle
        inner = before(F.avg_pool2d(x.permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1), time, phase)
        mixed = self.attn(self.attn_norm(inner).flatten(1, 2), phase)
        inner = after(inner + mixed.view(inner.shape), time, phase)
        x = torch.cat((inner.repeat_interleave(2, 1).repeat_interleave(2, 2), x), dim=-1)
        for block in self.up:
            x = block(x, time, phase)
        y: Tensor = self.last(F.silu(self.norm(x)), phase)
        return y


DENOISERS = {"dit": DiT, "unet": UNet}
