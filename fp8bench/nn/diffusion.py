"""Sampling from noise, a training step, and how far the latent is from the exact one after each step of a sampler.

The sampler is DDIM, without noise of its own, for a denoiser that predicts velocity: a = cos, b = sin of an angle that
time goes through, x = a image + b noise, v = a noise - b image. Latents stay in fp32; in every precision they begin
as the same noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.attention import Core, FusedCore, HeadwiseCore
from fp8bench.nn.convolution import Convolution
from fp8bench.nn.denoisers import DENOISERS
from fp8bench.nn.exercise import Exercise, exercise
from fp8bench.nn.linear import Choose, Linear
from fp8bench.nn.shared_workloads import attention_by
from fp8bench.nn.sizes import CHANNELS, TIME_STEPS, DenoiserSizes, SamplerPlan
from fp8bench.numerics.norms import relative_frobenius
from fp8bench.numerics.products import in_dtype
from fp8bench.protocols import Arithmetic, Operand, Phases, Role, Setup, SilentPhases

# How much further than without its condition a guided prediction goes with it.
GUIDANCE = 4.0
_Way = dict[str, object]


class OtherKernel(PlainArithmetic):
    """The same products by other kernels of torch's: sides swapped, and convolutions as one product of windows."""

    explicit = True

    def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        return in_dtype(torch.mm(b.data, a.data.t()).t().contiguous(), dtype)


def angle(time: int) -> float:
    """Of a time step; at -1, which is the image, 0."""
    return math.pi / 2 * (time + 1) / (TIME_STEPS + 1)


@dataclass
class Sampling(Exercise):
    """All steps from noise to image. `inputs` are the noise, and a condition for each image; `high` is what all layers
    multiply in in the plan's high steps. Weights are cast once, ahead of all steps, as who serves a model keeps them;
    those of convolutions that are emulated are not."""

    plan: SamplerPlan
    high: Arithmetic
    # Layers that are switched from step to step: what they multiply by as a rule, and in high steps.
    switched: list[tuple[nn.Module, _Way, _Way]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for layer in self.layer.modules():
            if not isinstance(layer, Linear | Convolution):
                continue
            if layer.arithmetic.plain:
                layer.weight.data = layer.weight.data.to(layer.arithmetic.carrier)
                continue
            own = _way(layer, layer.arithmetic)
            vars(layer).update(own)
            if self.plan.first + self.plan.last:
                self.switched.append((layer, own, _way(layer, self.high)))

    def step(self, phase: Phases) -> None:
        """The latent of each step is added up in ACCUMULATE, which ends it: so the clock tells them apart."""
        with phase.elementwise:
            for _ in self.latents(phase):
                pass

    def outcome(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        *_, last = self.latents(SilentPhases())
        return last, ()

    def latents(self, phase: Phases) -> Iterator[Tensor]:
        """That after each step."""
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
            # What image and noise make at the next time, where each is what latent and velocity say now.
            turn = angle(time) - angle(next_time)
            return math.cos(turn) * latent - math.sin(turn) * velocity

    def _velocity(self, latent: Tensor, time: int, phase: Phases) -> Tensor:
        """By one evaluation, or, guided, by two: one after the other, or as one of twice the batch."""

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


def _way(layer: Linear | Convolution, arithmetic: Arithmetic) -> _Way:
    if isinstance(layer, Convolution):
        return {"arithmetic": arithmetic}
    operand = arithmetic.cast(layer.weight.detach(), Role.WEIGHT)
    return {"arithmetic": arithmetic, "operands": (operand, operand)}  # none is turned: no gradient goes back


def errors_by_step(own: Sampling, exact: Sampling, usual: Sampling, other: Sampling) -> dict[str, float]:
    """Of the latent after each step, relative to the exact one: sampled freely from the noise, and of one step from the
    exact latent before it. The floor of each is what another kernel makes of the carrier's own products (`usual`,
    `other`), relative to the exact latent as well.
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
            floor = right + low - high  # as far from the exact latent as these are from each other
            errors[f"{name}_floor_step{step}_error"] = relative_frobenius(floor, right)
    return {"latent_error": errors[f"free_step{len(wanted)}_error"], **errors}


@dataclass
class DenoiserTraining(Exercise):
    """Noise is added to images, each at a time step of its own; velocity is predicted, and the squared error goes back,
    halved and summed, so that gradients are of order one. `inputs` are images, noise, conditions and times, `pull`
    how much there is of images and of noise at these."""

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


def made(
    setup: Setup, sizes: DenoiserSizes, plan: SamplerPlan | None, choose: Choose, carrier: torch.dtype, rounded: bool
) -> Sampling | DenoiserTraining:  # fmt: skip
    """From the case's seed: the same noise, images, conditions and times for every precision. Without a plan a step of
    training; time steps are `rounded` to the carrier, or not."""
    wide = torch.promote_types(carrier, torch.float32)
    core: Core = FusedCore(causal=False)
    if carrier is torch.float64:  # no fused kernel of a GPU takes it
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
