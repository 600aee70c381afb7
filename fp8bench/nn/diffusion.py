"""Denoisers on random weights, a DiT and a UNet: sampling with the latent's error after each step, and a training step.

Latents are (batch, height, width, channels). A time step becomes sinusoids; together with the condition, which stands
for an image's text or class, it shifts and scales the stream of every block. Time steps come in fp32, or rounded to the
carrier, as in a model that is moved to bf16 whole: then 750 is 752.

The sampler is deterministic DDIM for a denoiser that predicts velocity: with a = cos and b = sin of an angle that
moves with time, x = a image + b noise and v = a noise - b image. Latents stay in fp32; every precision begins with the
same noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.around import cast_to, start_stream
from fp8bench.nn.attention import Core, FusedCore, HeadwiseCore, SelfAttention, attention_by
from fp8bench.nn.convolution import Convolution
from fp8bench.nn.exercise import Exercise, exercise
from fp8bench.nn.gpt import FeedForward
from fp8bench.nn.linear import Choose, Linear, let_go, scoped
from fp8bench.nn.sizes import CHANNELS, FREQUENCIES, PATCH, TIME_STEPS, DenoiserSizes, SamplerPlan, heads_of
from fp8bench.numerics.norms import relative_frobenius
from fp8bench.numerics.products import in_dtype
from fp8bench.protocols import Arithmetic, Operand, Phases, Role, Setup, SilentPhases

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
    wide = times.to(torch.promote_types(times.dtype, torch.float32))
    half = FREQUENCIES // 2
    steps = torch.arange(half, dtype=wide.dtype, device=wide.device)
    angles = wide[:, None] * torch.exp(-math.log(10_000) / half * steps)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class Modulation(nn.Module):
    """`count` vectors from an image's time and condition, each (batch, 1, width)."""

    def __init__(self, width: int, count: int, choose: Choose) -> None:
        super().__init__()
        self.count = count
        self.product = Linear(width, count * width, choose("modulation"))

    def forward(self, time: Tensor, phase: Phases, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return self.product(time, phase).to(dtype)[:, None].chunk(self.count, dim=-1)  # type: ignore[no-any-return]


class ModulatedNorm(nn.Module):
    """Layer norm without weights in at least fp32, unless an arithmetic says otherwise, then shifted and scaled in the
    input's dtype."""

    arithmetic: Arithmetic | None = None

    def forward(self, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        own = self.arithmetic
        dtype = own.carrier if own is not None and own.plain else torch.promote_types(x.dtype, torch.float32)
        wide = cast_to(x, own).to(dtype)
        return F.layer_norm(wide, x.shape[-1:], eps=1e-6).to(x.dtype) * (1 + scale) + shift


class DiTBlock(nn.Module):
    """Attention and a feed-forward part, each shifted, scaled and gated by time and condition."""

    residual: Arithmetic | None = None

    def __init__(self, width: int, choose: Choose, core: Core) -> None:
        super().__init__()
        heads = heads_of(width)
        self.modulation = Modulation(width, 6, choose)
        self.attn = SelfAttention(width, heads, heads, 1.0, scoped(choose, "attn"), core)
        self.mlp = FeedForward(width, 4 * width, False, 1.0, scoped(choose, "mlp"))
        self.norm_attn, self.norm_mlp = ModulatedNorm(), ModulatedNorm()

    def forward(self, x: Tensor, time: Tensor, phase: Phases) -> Tensor:
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = self.modulation(time, phase, x.dtype)
        # A layer of another precision returns its own carrier; the stream keeps the model's.
        x = cast_to(x + gate * self.attn(self.norm_attn(x, shift, scale), phase).to(x.dtype), self.residual)
        added: Tensor = gate_mlp * self.mlp(self.norm_mlp(x, shift_mlp, scale_mlp), phase).to(x.dtype)
        return cast_to(x + added, self.residual)


class DiT(nn.Module):
    """Patches of 2x2 as tokens, through blocks that time modulates; its positions count as its embedding."""

    around: Mapping[str, Arithmetic | None] = dict.fromkeys(("embedding", "residual"))

    def __init__(
        self, sizes: DenoiserSizes, choose: Choose, carrier: torch.dtype, clock: torch.dtype, core: Core
    ) -> None:  # fmt: skip
        super().__init__()
        self.carrier, self.side = carrier, sizes.image // PATCH
        self.time = TimeEmbedding(sizes.width, clock, scoped(choose, "time"))
        self.first = Linear(PATCH * PATCH * CHANNELS, sizes.width, choose("first"))
        self.positions = nn.Parameter(torch.randn(self.side * self.side, sizes.width))
        self.blocks = nn.ModuleList(
            DiTBlock(sizes.width, scoped(choose, f"blocks.{number}"), core) for number in range(sizes.layers)
        )
        self.modulation = Modulation(sizes.width, 2, choose)
        self.norm = ModulatedNorm()
        self.last = Linear(sizes.width, PATCH * PATCH * CHANNELS, choose("last"))

    def forward(self, latent: Tensor, times: Tensor, condition: Tensor, phase: Phases) -> Tensor:
        grid = (len(latent), self.side, PATCH, self.side, PATCH, CHANNELS)
        patches = latent.view(grid).transpose(2, 3).reshape(len(latent), self.side * self.side, -1)
        time = self.time(times, condition, phase)
        places = cast_to(self.positions, self.around["embedding"], Role.WEIGHT).to(self.carrier)
        x = start_stream(self.first(patches, phase).to(self.carrier) + places, self.carrier, self.around["residual"])
        for block in self.blocks:
            x = block(x, time, phase)
        y = self.last(self.norm(x, *self.modulation(time, phase, x.dtype)), phase)
        return y.view(len(y), self.side, self.side, PATCH, PATCH, CHANNELS).transpose(2, 3).reshape(latent.shape)  # type: ignore[no-any-return]


class GroupNorm(nn.Module):
    """Group norm in at least fp32, unless an arithmetic says otherwise; the result has the input's dtype."""

    arithmetic: Arithmetic | None = None

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

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
        kept = x if self.skip is None else self.skip(x, phase).to(x.dtype)
        return cast_to(kept + self.conv2(F.silu(second(hidden)), phase).to(x.dtype), self.residual)


class UNet(nn.Module):
    """Residual blocks at full resolution, at half of it with attention and twice the channels, and at full again."""

    around: Mapping[str, Arithmetic | None] = dict.fromkeys(("residual",))

    def __init__(
        self, sizes: DenoiserSizes, choose: Choose, carrier: torch.dtype, clock: torch.dtype, core: Core
    ) -> None:  # fmt: skip
        super().__init__()
        self.carrier, width = carrier, sizes.width

        def block(inputs: int, outputs: int, name: str) -> TimedResidual:
            return TimedResidual(inputs, outputs, width, scoped(choose, name))

        self.time = TimeEmbedding(width, clock, scoped(choose, "time"))
        self.first = Convolution(CHANNELS, width, choose("first"))
        self.down = nn.ModuleList(block(width, width, f"down.{number}") for number in range(sizes.layers))
        self.middle = nn.ModuleList((block(width, 2 * width, "middle.0"), block(2 * width, 2 * width, "middle.1")))
        heads = heads_of(2 * width)
        self.attn = SelfAttention(2 * width, heads, heads, 1.0, scoped(choose, "attn"), core)
        self.attn_norm = GroupNorm(2 * width)
        self.up = nn.ModuleList(
            block(3 * width if number == 0 else width, width, f"up.{number}") for number in range(sizes.layers)
        )
        self.norm = GroupNorm(width)
        self.last = Convolution(width, CHANNELS, choose("last"))

    def forward(self, latent: Tensor, times: Tensor, condition: Tensor, phase: Phases) -> Tensor:
        time = self.time(times, condition, phase)
        residual = self.around["residual"]
        x = start_stream(self.first(latent, phase), self.carrier, residual)
        for block in self.down:
            x = block(x, time, phase)
        before, after = self.middle
        inner = before(F.avg_pool2d(x.permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1), time, phase)
        mixed = self.attn(self.attn_norm(inner).flatten(1, 2), phase)
        inner = after(cast_to(inner + mixed.view(inner.shape).to(inner.dtype), residual), time, phase)
        x = torch.cat((inner.repeat_interleave(2, 1).repeat_interleave(2, 2), x), dim=-1)
        for block in self.up:
            x = block(x, time, phase)
        y: Tensor = self.last(F.silu(self.norm(x)), phase)
        return y


DENOISERS = {"dit": DiT, "unet": UNet}


# The weight of the condition in a guided prediction.
GUIDANCE = 4.0
_Multiplier = dict[str, object]


class OtherKernel(PlainArithmetic):
    """The same products by other kernels of torch: operands swapped, and convolutions as a product of windows."""

    explicit = True

    def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        return in_dtype(torch.mm(b.data, a.data.t()).t().contiguous(), dtype)


def angle(time: int) -> float:
    return math.pi / 2 * (time + 1) / (TIME_STEPS + 1)


@dataclass
class Sampling(Exercise):
    """All steps from noise to image. `inputs` are the noise and the conditions; `high` is the arithmetic of all layers
    in the plan's high steps. Weights are cast once, ahead of all steps, as in serving."""

    plan: SamplerPlan
    high: Arithmetic
    # Layers that change from step to step: what they multiply by otherwise, and in high steps.
    switched: list[tuple[nn.Module, _Multiplier, _Multiplier]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for layer in self.layer.modules():
            if not isinstance(layer, Linear | Convolution):
                continue
            if layer.arithmetic.plain:
                layer.weight.data = layer.weight.data.to(layer.arithmetic.carrier)
                continue
            own = _multiplier(layer, layer.arithmetic)
            vars(layer).update(own)
            if self.plan.first + self.plan.last:
                self.switched.append((layer, own, _multiplier(layer, self.high)))
            let_go(layer.weight)

    def step(self, phase: Phases) -> None:
        """ACCUMULATE ends each step, so that the clock can tell steps apart."""
        with phase.elementwise:
            for _ in self.latents(phase):
                pass

    def outcome(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        *_, last = self.latents(SilentPhases())
        return last, ()

    def latents(self, phase: Phases) -> Iterator[Tensor]:
        latent = self.inputs[0]
        for step in range(self.plan.steps):
            latent = self.after(latent, step, phase)
            yield latent

    @torch.no_grad()
    def after(self, latent: Tensor, step: int, phase: Phases) -> Tensor:
        for layer, own, high in self.switched:
            vars(layer).update(high if self.plan.high(step) else own)
        time, next_time = self.plan.time(step), self.plan.time(step + 1)
        velocity = self._velocity(latent, time, phase).to(latent.dtype)
        with phase.accumulate:
            # Image and noise as latent and velocity imply them, mixed for the next time.
            turn = angle(time) - angle(next_time)
            return math.cos(turn) * latent - math.sin(turn) * velocity

    def _velocity(self, latent: Tensor, time: int, phase: Phases) -> Tensor:

        def predicted(latent: Tensor, condition: Tensor) -> Tensor:
            times = torch.full((len(latent),), float(time), dtype=latent.dtype, device=latent.device)
            return self.layer(latent, times, condition, phase)  # type: ignore[no-any-return]

        condition = self.inputs[1]
        if self.plan.guidance == "none":
            return predicted(latent, condition)
        without = torch.zeros_like(condition)
        if self.plan.guidance == "twice":
            given, free = predicted(latent, condition), predicted(latent, without)
        else:
            given, free = predicted(torch.cat((latent, latent)), torch.cat((condition, without))).chunk(2)
        return free + GUIDANCE * (given - free)


def _multiplier(layer: Linear | Convolution, arithmetic: Arithmetic) -> _Multiplier:
    weight = layer.windows() if isinstance(layer, Convolution) else layer.weight
    operand = arithmetic.cast(weight.detach(), Role.WEIGHT)
    return {"arithmetic": arithmetic, "operands": (operand, operand)}  # no gradient needs a turned one


def errors_by_step(own: Sampling, exact: Sampling, usual: Sampling, other: Sampling) -> dict[str, float]:
    """Errors of the latent after each step, relative to the exact one: sampled from the noise ('free'), and of one step
    from the exact latent before it ('single'). The floor of each is what other kernels (`other`) change in the
    carrier's own products (`usual`), relative to the exact latent as well.
    """
    silent = SilentPhases()
    wanted = list(exact.latents(silent))
    starts = [exact.inputs[0], *wanted[:-1]]

    def ways(sampling: Sampling) -> tuple[list[Tensor], list[Tensor]]:
        given = (start.to(sampling.inputs[0].dtype) for start in starts)
        return list(sampling.latents(silent)), [sampling.after(x, step, silent) for step, x in enumerate(given)]

    with attention_by("math"):
        others = ways(other)
    errors: dict[str, float] = {}
    for name, ours, highs, lows in zip(("free", "single"), ways(own), ways(usual), others, strict=True):
        for step, (x, high, low, right) in enumerate(zip(ours, highs, lows, wanted, strict=True), 1):
            errors[f"{name}_step{step}_error"] = relative_frobenius(x, right)
            floor = right + low - high  # `low` is that far from `high`
            errors[f"{name}_floor_step{step}_error"] = relative_frobenius(floor, right)
    return {"latent_error": errors[f"free_step{len(wanted)}_error"], **errors}


@dataclass
class DenoiserTraining(Exercise):
    """Noise is added to images, each at its own time step, and the velocity predicted; the squared error is halved and
    summed, so that gradients are of order one. `inputs` are images, noise, conditions and times, `pull` the shares of
    images and noise at these times."""

    def step(self, phase: Phases) -> None:
        with phase.elementwise:
            _, loss = self._predicted(phase)
        with phase.elementwise:
            torch.autograd.grad(loss, self.leaves())
            del loss

    def leaves(self) -> list[Tensor]:
        return list(self.layer.parameters())

    def outcome(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        output, loss = self._predicted(SilentPhases())
        return output.detach(), torch.autograd.grad(loss, self.leaves())

    def _predicted(self, phase: Phases) -> tuple[Tensor, Tensor]:
        image, noise, condition, times = self.inputs
        assert self.pull is not None
        a, b = self.pull
        output = self.layer(a * image + b * noise, times, condition, phase)
        return output, (output.to(noise.dtype) - (a * noise - b * image)).square().sum() / 2


def denoiser_state(
    setup: Setup, sizes: DenoiserSizes, plan: SamplerPlan | None, choose: Choose, carrier: torch.dtype, rounded: bool
) -> Sampling | DenoiserTraining:  # fmt: skip
    """A sampling by the plan, or a training step without one, from the case's seed: the same noise, images, conditions
    and times for every precision. `rounded` says whether time steps are rounded to the carrier."""
    wide = torch.promote_types(carrier, torch.float32)
    core: Core = FusedCore(causal=False)
    if carrier is torch.float64:  # no fused GPU kernel takes it
        core, rounded = HeadwiseCore(core), False
    clock, latents = carrier if rounded else wide, (sizes.batch, sizes.image, sizes.image, CHANNELS)
    shapes = [latents, (sizes.batch, sizes.width), *([] if plan else [latents])]
    state = exercise(
        setup, lambda: DENOISERS[sizes.denoiser](sizes, choose, carrier, clock, core), shapes, wide, training=False
    )
    if plan is not None:
        return Sampling(state.layer, state.inputs, None, plan, setup.high)
    noise, condition, image = state.inputs
    chance = torch.Generator("cpu").manual_seed(setup.seed)
    times = torch.randint(TIME_STEPS, (sizes.batch,), generator=chance, device="cpu")
    angles = torch.tensor([angle(time) for time in times.tolist()], dtype=torch.float64, device="cpu")
    mixed = torch.stack((angles.cos(), angles.sin())).to(noise)
    inputs = image, noise, condition, times.to(noise)
    return DenoiserTraining(state.layer, inputs, mixed[..., None, None, None])
