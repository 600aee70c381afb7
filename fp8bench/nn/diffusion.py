"""Sampling with a denoiser, the error of the latent after each sampling step, and a training step of a denoiser.

The sampler is deterministic DDIM, and the denoiser predicts velocity. The time step determines an angle. With a = cos
and b = sin of that angle, x = a image + b noise and v = a noise - b image. Latents stay in fp32, and every precision
starts with the same noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.around import widen_dtype
from fp8bench.nn.attention import AttentionCore, FusedCore, HeadwiseAttentionCore, select_attention_kernel
from fp8bench.nn.convolution import Convolution
from fp8bench.nn.denoisers import DENOISERS
from fp8bench.nn.exercise import LayerExercise, make_exercise
from fp8bench.nn.linear import ChooseArithmetic, Linear, free_weight
from fp8bench.nn.sizes import LATENT_CHANNELS, TIME_STEPS, DenoiserSizes, SamplerPlan
from fp8bench.numerics.norms import relative_frobenius
from fp8bench.numerics.products import to_dtype
from fp8bench.protocols import Arithmetic, Operand, Phases, Role, Setup, SilentPhases

# The weight of the condition in classifier-free guidance.
GUIDANCE_WEIGHT = 4.0
_LayerAttributes = dict[str, object]


class AlternativeKernels(PlainArithmetic):
    """Computes the same products as PlainArithmetic with other torch kernels: it swaps the two operands, and turns
    convolutions into products of copied windows.
    """

    explicit = True

    def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        return to_dtype(torch.mm(b.data, a.data.t()).t().contiguous(), dtype)


def compute_noise_angle(time: int) -> float:
    return math.pi / 2 * (time + 1) / (TIME_STEPS + 1)  # time -1 is the image without noise


@dataclass
class ImageSampling(LayerExercise):
    """Samples an image from noise in several steps. `inputs` are the noise and the conditions. In the steps that `plan`
    runs in high precision, all layers use the arithmetic `high`. Weights are cast once before all steps, as in
    serving.
    """

    plan: SamplerPlan
    high: Arithmetic
    # The layers whose arithmetic changes between steps, each with its attributes for low-precision and for
    # high-precision steps.
    switched_layers: list[tuple[nn.Module, _LayerAttributes, _LayerAttributes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for layer in self.layer.modules():
            if not isinstance(layer, Linear | Convolution):
                continue
            # Convert the weights of plain products to the products' dtype now, so that no step converts them again.
            if layer.arithmetic.plain:
                layer.weight.data = layer.weight.data.to(layer.arithmetic.carrier)
                continue
            low_precision_attributes = _cast_layer_weight(layer, layer.arithmetic)
            vars(layer).update(low_precision_attributes)
            # The first and last steps may run in high precision, so prepare both casts of the weight.
            if self.plan.first + self.plan.last:
                self.switched_layers.append((layer, low_precision_attributes, _cast_layer_weight(layer, self.high)))
            free_weight(layer.weight)

    def step(self, phase: Phases) -> None:
        """Runs all sampling steps. Each of them ends with the phase ACCUMULATE, so that the phase markers separate it
        from the next sampling step.
        """
        with phase.elementwise:
            for _ in self.sample_latents(phase):
                pass

    def outcome(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        *_, last_latent = self.sample_latents(SilentPhases())
        return last_latent, ()

    def sample_latents(self, phase: Phases) -> Iterator[Tensor]:
        latent = self.inputs[0]
        for step in range(self.plan.steps):
            latent = self.take_sampling_step(latent, step, phase)
            yield latent

    @torch.no_grad()
    def take_sampling_step(self, latent: Tensor, step: int, phase: Phases) -> Tensor:
        for layer, low_precision_attributes, high_precision_attributes in self.switched_layers:
            vars(layer).update(
                high_precision_attributes if self.plan.runs_in_high_precision(step) else low_precision_attributes
            )
        diffusion_time = self.plan.time(step)
        next_diffusion_time = self.plan.time(step + 1)

        def predict(latent: Tensor, condition: Tensor) -> Tensor:
            diffusion_times = torch.full(
                (len(latent),), float(diffusion_time), dtype=latent.dtype, device=latent.device
            )
            return self.layer(latent, diffusion_times, condition, phase)

        # 1. Predict the velocity with one or two evaluations of the denoiser.
        condition = self.inputs[1]
        if self.plan.guidance == "none":
            predicted_velocity = predict(latent, condition)
        else:
            unconditional_input = torch.zeros_like(condition)
            if self.plan.guidance == "twice":
                conditioned_velocity = predict(latent, condition)
                unconditioned_velocity = predict(latent, unconditional_input)
            else:
                conditioned_velocity, unconditioned_velocity = predict(
                    torch.cat((latent, latent)), torch.cat((condition, unconditional_input))
                ).chunk(2)
            predicted_velocity = unconditioned_velocity + GUIDANCE_WEIGHT * (
                conditioned_velocity - unconditioned_velocity
            )

        # 2. Mix the image and noise that latent and velocity imply for the next time step.
        predicted_velocity = predicted_velocity.to(latent.dtype)
        with phase.accumulate:
            noise_angle_change = compute_noise_angle(diffusion_time) - compute_noise_angle(next_diffusion_time)
            return math.cos(noise_angle_change) * latent - math.sin(noise_angle_change) * predicted_velocity


def _cast_layer_weight(layer: Linear | Convolution, arithmetic: Arithmetic) -> _LayerAttributes:
    weight = layer.reshape_weight() if isinstance(layer, Convolution) else layer.weight
    operand = arithmetic.cast(weight.detach(), Role.WEIGHT)
    # sampling needs no gradient, so the operand is not transposed
    return {"arithmetic": arithmetic, "operands": (operand, operand)}


def measure_step_errors(
    low: ImageSampling, exact: ImageSampling, carrier_sampling: ImageSampling, variant: ImageSampling
) -> dict[str, float]:
    """Returns the relative error of the latent after each step, compared with the exact sampling. Each error is
    measured in two ways: 'free' for a whole sampling from noise, and 'single' for one step that starts at the exact
    latent.

    Each error has a noise floor: the difference between the latents of `carrier_sampling` and `variant`, relative to
    the exact latent. These two compute the same products by different kernels.
    """
    phases = SilentPhases()
    exact_latents = list(exact.sample_latents(phases))
    step_start_latents = [exact.inputs[0], *exact_latents[:-1]]

    def sample_whole_and_by_step(sampling: ImageSampling) -> dict[str, list[Tensor]]:
        latents_from_noise = list(sampling.sample_latents(phases))
        latents_after_one_step = []
        for step, start in enumerate(step_start_latents):
            latents_after_one_step.append(sampling.take_sampling_step(start.to(sampling.inputs[0].dtype), step, phases))
        return {"free": latents_from_noise, "single": latents_after_one_step}

    # 1. Sample with each model. `variant` also gets a different attention kernel, to show what kernels alone change.
    with select_attention_kernel("math"):
        variant_latents = sample_whole_and_by_step(variant)
    low_precision_latents = sample_whole_and_by_step(low)
    carrier_latents = sample_whole_and_by_step(carrier_sampling)

    # 2. Compare the latents after each step.
    errors: dict[str, float] = {}
    for name in ("free", "single"):
        for number, exact_latent in enumerate(exact_latents):
            prefix = f"step{number + 1}_error"
            noise_floor_latent = exact_latent + variant_latents[name][number] - carrier_latents[name][number]
            errors[f"{name}_{prefix}"] = relative_frobenius(low_precision_latents[name][number], exact_latent)
            errors[f"{name}_floor_{prefix}"] = relative_frobenius(noise_floor_latent, exact_latent)
    return {"latent_error": errors[f"free_step{len(exact_latents)}_error"], **errors}


@dataclass
class DenoiserTraining(LayerExercise):
    """A training step of a denoiser. It adds noise to images, each at its own time step, and predicts the velocity.
    The loss is half the summed squared error, so that gradients are of order one.

    `inputs` are images, noise, conditions and times. `output_gradient` holds the factors of image and noise at these
    times.
    """

    def step(self, phase: Phases) -> None:
        with phase.elementwise:
            _, loss = self._compute_output_and_loss(phase)
        with phase.elementwise:
            torch.autograd.grad(loss, self.list_leaf_tensors())
            del loss

    def list_leaf_tensors(self) -> list[Tensor]:
        return list(self.layer.parameters())

    def outcome(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        output, loss = self._compute_output_and_loss(SilentPhases())
        return output.detach(), torch.autograd.grad(loss, self.list_leaf_tensors())

    def _compute_output_and_loss(self, phase: Phases) -> tuple[Tensor, Tensor]:
        image, noise, condition, diffusion_times = self.inputs
        assert self.output_gradient is not None
        a, b = self.output_gradient
        output = self.layer(a * image + b * noise, diffusion_times, condition, phase)
        return output, (output.to(noise.dtype) - (a * noise - b * image)).square().sum() / 2


def make_denoiser_state(
    setup: Setup,
    sizes: DenoiserSizes,
    plan: SamplerPlan | None,
    choose: ChooseArithmetic,
    carrier: torch.dtype,
    rounded: bool,
) -> ImageSampling | DenoiserTraining:
    """Returns an ImageSampling if there is a sampling `plan`, and otherwise a DenoiserTraining. Noise, images,
    conditions and times follow from the case's seed and are the same for every precision. With `rounded`, time steps
    are rounded to the carrier.
    """
    input_dtype = widen_dtype(carrier)
    core: AttentionCore = FusedCore(causal=False)
    if carrier is torch.float64:  # no fused GPU kernel computes fp64
        core = HeadwiseAttentionCore(core)
        rounded = False  # the reference uses exact time steps
    diffusion_time_dtype = carrier if rounded else input_dtype
    latents = (sizes.batch, sizes.image, sizes.image, LATENT_CHANNELS)
    shapes = [latents, (sizes.batch, sizes.width), *([] if plan else [latents])]
    # The layer and its inputs are the same for every precision. Only the arithmetic differs.
    state = make_exercise(
        setup,
        lambda: DENOISERS[sizes.denoiser](sizes, choose, carrier, diffusion_time_dtype, core),
        shapes,
        input_dtype,
        training=False,
    )
    if plan is not None:
        return ImageSampling(state.layer, state.inputs, None, plan, setup.high)
    # Draw times on the CPU, whose random numbers are the same for every device.
    noise, condition, image = state.inputs
    time_generator = torch.Generator("cpu").manual_seed(setup.seed)
    diffusion_times = torch.randint(TIME_STEPS, (sizes.batch,), generator=time_generator, device="cpu")
    noise_angles = torch.tensor(
        [compute_noise_angle(time) for time in diffusion_times.tolist()], dtype=torch.float64, device="cpu"
    )
    image_and_noise_shares = torch.stack((noise_angles.cos(), noise_angles.sin())).to(noise)
    inputs = image, noise, condition, diffusion_times.to(noise)
    return DenoiserTraining(state.layer, inputs, image_and_noise_shares[..., None, None, None])
