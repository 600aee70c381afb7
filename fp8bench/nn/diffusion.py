"""Sampling by a denoiser, with the latent's error after each step, and a training step of one.

The sampler is deterministic DDIM for a denoiser that predicts velocity: with a = cos and b = sin of an angle that
moves with time, x = a image + b noise and v = a noise - b image. Latents stay in fp32; every precision begins with the
same noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.around import wide_dtype
from fp8bench.nn.attention import Core, FusedCore, HeadwiseCore, attention_by
from fp8bench.nn.convolution import Convolution
from fp8bench.nn.denoisers import DENOISERS
from fp8bench.nn.exercise import Exercise, exercise
from fp8bench.nn.linear import Choose, Linear, let_go
from fp8bench.nn.sizes import CHANNELS, TIME_STEPS, DenoiserSizes, SamplerPlan
from fp8bench.numerics.norms import relative_frobenius
from fp8bench.numerics.products import in_dtype
from fp8bench.protocols import Arithmetic, Operand, Phases, Role, Setup, SilentPhases

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
            # Plain products multiply by weights in the carrier, so that no step casts them again.
            if layer.arithmetic.plain:
                layer.weight.data = layer.weight.data.to(layer.arithmetic.carrier)
                continue
            low = _multiplier(layer, layer.arithmetic)
            vars(layer).update(low)
            # The first and last steps may run in high precision: both multipliers are kept ready.
            if self.plan.first + self.plan.last:
                self.switched.append((layer, low, _multiplier(layer, self.high)))
            let_go(layer.weight)

    def step(self, phase: Phases) -> None:
        """Runs all steps. ACCUMULATE ends each, so that the clock can separate them."""
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
        for layer, low, high in self.switched:
            vars(layer).update(high if self.plan.high(step) else low)
        time = self.plan.time(step)
        next_time = self.plan.time(step + 1)

        def predict(latent: Tensor, condition: Tensor) -> Tensor:
            times = torch.full((len(latent),), float(time), dtype=latent.dtype, device=latent.device)
            return self.layer(latent, times, condition, phase)

        # 1. The velocity, by one or two evaluations.
        condition = self.inputs[1]
        if self.plan.guidance == "none":
            velocity = predict(latent, condition)
        else:
            without = torch.zeros_like(condition)
            if self.plan.guidance == "twice":
                conditioned = predict(latent, condition)
                free = predict(latent, without)
            else:
                conditioned, free = predict(torch.cat((latent, latent)), torch.cat((condition, without))).chunk(2)
            velocity = free + GUIDANCE * (conditioned - free)

        # 2. Image and noise as latent and velocity imply them, mixed for the next time.
        velocity = velocity.to(latent.dtype)
        with phase.accumulate:
            turn = angle(time) - angle(next_time)
            return math.cos(turn) * latent - math.sin(turn) * velocity


def _multiplier(layer: Linear | Convolution, arithmetic: Arithmetic) -> _Multiplier:
    weight = layer.windows() if isinstance(layer, Convolution) else layer.weight
    operand = arithmetic.cast(weight.detach(), Role.WEIGHT)
    return {"arithmetic": arithmetic, "operands": (operand, operand)}  # no gradient needs a turned one


def errors_by_step(low: Sampling, exact: Sampling, usual: Sampling, variant: Sampling) -> dict[str, float]:
    """Errors of the latent after each step, relative to the exact one: sampled from the noise ('free'), and of one step
    from the exact latent before it ('single'). The floor of each is what other kernels (`variant`) change in the
    carrier's own products (`usual`), relative to the exact latent as well.
    """
    silent = SilentPhases()
    exact_latents = list(exact.latents(silent))
    starts = [exact.inputs[0], *exact_latents[:-1]]

    def sample_both_ways(sampling: Sampling) -> dict[str, list[Tensor]]:
        free = list(sampling.latents(silent))
        single = []
        for step, start in enumerate(starts):
            single.append(sampling.after(start.to(sampling.inputs[0].dtype), step, silent))
        return {"free": free, "single": single}

    # 1. Sample by all arithmetics; the variant also has a different kernel for attention.
    with attention_by("math"):
        variants = sample_both_ways(variant)
    lows = sample_both_ways(low)
    usuals = sample_both_ways(usual)

    # 2. Compare step by step.
    errors: dict[str, float] = {}
    for name in ("free", "single"):
        for number, exact_latent in enumerate(exact_latents):
            prefix = f"step{number + 1}_error"
            floor = exact_latent + variants[name][number] - usuals[name][number]
            errors[f"{name}_{prefix}"] = relative_frobenius(lows[name][number], exact_latent)
            errors[f"{name}_floor_{prefix}"] = relative_frobenius(floor, exact_latent)
    return {"latent_error": errors[f"free_step{len(exact_latents)}_error"], **errors}


@dataclass
class DenoiserTraining(Exercise):
    """Noise is added to images, each at its own time step, and the velocity predicted; the squared error is halved and
    summed, so that gradients are of order one. `inputs` are images, noise, conditions and times, `pull` the shares of
    images and noise at these times."""

    def step(self, phase: Phases) -> None:
        with phase.elementwise:
            _, loss = self._predict(phase)
        with phase.elementwise:
            torch.autograd.grad(loss, self.leaves())
            del loss

    def leaves(self) -> list[Tensor]:
        return list(self.layer.parameters())

    def outcome(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        output, loss = self._predict(SilentPhases())
        return output.detach(), torch.autograd.grad(loss, self.leaves())

    def _predict(self, phase: Phases) -> tuple[Tensor, Tensor]:
        image, noise, condition, times = self.inputs
        assert self.pull is not None
        a, b = self.pull
        output = self.layer(a * image + b * noise, times, condition, phase)
        return output, (output.to(noise.dtype) - (a * noise - b * image)).square().sum() / 2


def denoiser_state(
    setup: Setup, sizes: DenoiserSizes, plan: SamplerPlan | None, choose: Choose, carrier: torch.dtype, rounded: bool
) -> Sampling | DenoiserTraining:
    """Makes a sampling by the plan, or a training step without one, from the case's seed: the same noise, images,
    conditions and times for every precision. Time steps are rounded to the carrier if `rounded`."""
    wide = wide_dtype(carrier)
    core: Core = FusedCore(causal=False)
    if carrier is torch.float64:  # no fused GPU kernel takes it
        core = HeadwiseCore(core)
        rounded = False
    clock = carrier if rounded else wide
    latents = (sizes.batch, sizes.image, sizes.image, CHANNELS)
    shapes = [latents, (sizes.batch, sizes.width), *([] if plan else [latents])]
    # The layer and its inputs are drawn alike for every precision; only the arithmetic differs.
    state = exercise(
        setup, lambda: DENOISERS[sizes.denoiser](sizes, choose, carrier, clock, core), shapes, wide, training=False
    )
    if plan is not None:
        return Sampling(state.layer, state.inputs, None, plan, setup.high)
    # Times come from a generator of the CPU, whose numbers are the same on every device.
    noise, condition, image = state.inputs
    chance = torch.Generator("cpu").manual_seed(setup.seed)
    times = torch.randint(TIME_STEPS, (sizes.batch,), generator=chance, device="cpu")
    angles = torch.tensor([angle(time) for time in times.tolist()], dtype=torch.float64, device="cpu")
    mixed = torch.stack((angles.cos(), angles.sin())).to(noise)
    inputs = image, noise, condition, times.to(noise)
    return DenoiserTraining(state.layer, inputs, mixed[..., None, None, None])
