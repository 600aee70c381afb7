"""Denoisers and their sampler against plain functions, FLOPs by hand, errors by step, and mistakes that are planted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fp8bench.analysis.claims import label_false_claims
from fp8bench.analysis.findings import find
from fp8bench.errors import UsageError
from fp8bench.model import Label, Level, Scalar, Tape, Verdict
from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.diffusion import GUIDANCE_WEIGHT, DenoiserTraining, ImageSampling, compute_noise_angle
from fp8bench.nn.linear import Linear
from fp8bench.nn.sizes import SamplerPlan
from fp8bench.numerics.norms import joint_relative_frobenius
from fp8bench.protocols import SilentPhases
from fp8bench.registry import precisions
from fp8bench.workloads.diffusion import Diffusion, parse_high_precision_steps
from tests.counts import for_each
from tests.fakes import MS, record, steady
from tests.tapes import tape_in_phases
from tests.workloads.steps import CPU, SMALL, cast_again, kept_weights, setup_of, weight_bytes

DENOISERS = for_each("denoiser", ["dit", "unet"])
BATCH, IMAGE, STEPS = 2, 4, 4
WIDTH = {"dit": 128, "unet": 16}


def params_of(denoiser: str, **changes: Scalar) -> dict[str, Scalar]:
    made = SMALL["diffusion"] | {"denoiser": denoiser, "width": WIDTH[denoiser]} | changes
    return dict(Diffusion().expand(made)[0])


def state_of(
    denoiser: str, precision: str = "fp32", seed: int = 0, **changes: Scalar
) -> ImageSampling | DenoiserTraining:
    state = Diffusion().prepare(setup_of("diffusion", params_of(denoiser, **changes), precision, seed))
    assert isinstance(state, ImageSampling | DenoiserTraining)
    return state


def exact_of(denoiser: str, **changes: Scalar) -> ImageSampling | DenoiserTraining:
    exact = PlainArithmetic(torch.float64)
    setup = setup_of("diffusion", params_of(denoiser, **changes), "fp32")
    state = Diffusion().exercise(setup, lambda name: exact, exact.carrier)
    assert isinstance(state, ImageSampling | DenoiserTraining)
    return state


class Plain:
    """Computes a denoiser from its weights, with torch's own functions."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = weights

    def __call__(self, latents: Tensor, times: Tensor, conditions: Tensor) -> Tensor:
        angles = times.double()[:, None] * 10_000 ** (-torch.arange(128).double() / 128)
        waves = torch.cat((angles.cos(), angles.sin()), -1)
        hidden = self.times("time.down", functional.silu(self.times("time.up", waves)))
        return self.denoised(latents, functional.silu(hidden + conditions))

    def times(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, self.weights[f"{name}.weight"])

    def denoised(self, latents: Tensor, time: Tensor) -> Tensor:
        raise NotImplementedError

    def attention(self, name: str, rows: Tensor, heads: int) -> Tensor:
        parts = self.times(f"{name}.qkv", rows).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v)
        return self.times(f"{name}.out", mixed.transpose(1, 2).flatten(2))


def normed(x: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], eps=1e-6)


class PlainDiT(Plain):
    """Patches of 2 x 2 pixels, and two blocks."""

    def denoised(self, latents: Tensor, time: Tensor) -> Tensor:
        half = IMAGE // 2
        patches = latents.view(BATCH, half, 2, half, 2, 4).transpose(2, 3).reshape(BATCH, half * half, 16)
        x = self.times("first", patches) + self.weights["positions"]
        for block in ("blocks.0", "blocks.1"):
            modulation = self.times(f"{block}.modulation.product", time)[:, None]
            shift, scale, gate, shift2, scale2, gate2 = modulation.chunk(6, -1)
            x = x + gate * self.attention(f"{block}.attn", normed(x) * (1 + scale) + shift, WIDTH["dit"] // 64)
            up = self.times(f"{block}.mlp.up", normed(x) * (1 + scale2) + shift2)
            x = x + gate2 * self.times(f"{block}.mlp.down", functional.gelu(up, approximate="tanh"))
        shift, scale = self.times("modulation.product", time)[:, None].chunk(2, -1)
        patches = self.times("last", normed(x) * (1 + scale) + shift)
        return patches.view(BATCH, half, half, 2, 2, 4).transpose(2, 3).reshape(latents.shape)


class PlainUNet(Plain):
    """Images with channels first."""

    def denoised(self, latents: Tensor, time: Tensor) -> Tensor:
        x = self.convolved("first", latents.permute(0, 3, 1, 2))
        for name in ("down.0", "down.1"):
            x = self.block(name, x, time)
        inner = self.block("middle.0", functional.avg_pool2d(x, 2), time)
        rows = self.grouped("attn_norm", inner).flatten(2).transpose(1, 2)
        inner = inner + self.attention("attn", rows, 1).transpose(1, 2).reshape(inner.shape)
        inner = self.block("middle.1", inner, time)
        x = torch.cat((functional.interpolate(inner, scale_factor=2), x), 1)
        for name in ("up.0", "up.1"):
            x = self.block(name, x, time)
        return self.convolved("last", functional.silu(self.grouped("norm", x))).permute(0, 2, 3, 1)

    def block(self, name: str, x: Tensor, time: Tensor) -> Tensor:
        hidden = self.convolved(f"{name}.conv1", functional.silu(self.grouped(f"{name}.norms.0", x)))
        hidden = hidden + self.times(f"{name}.time", time)[..., None, None]
        skip = self.weights.get(f"{name}.skip.weight")
        kept = x if skip is None else functional.conv2d(x, skip[..., None, None])
        return kept + self.convolved(f"{name}.conv2", functional.silu(self.grouped(f"{name}.norms.1", hidden)))

    def convolved(self, name: str, x: Tensor) -> Tensor:
        """Weights are (outputs, 9 x inputs), the pixels of a window first."""
        weight = self.weights[f"{name}.weight"].unflatten(1, (3, 3, -1)).permute(0, 3, 1, 2)
        return functional.conv2d(x, weight, padding=1)

    def grouped(self, name: str, x: Tensor) -> Tensor:
        return functional.group_norm(x, 8, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])


PLAIN = {"dit": PlainDiT, "unet": PlainUNet}


def plain_samples(denoiser: str, state: ImageSampling, guidance: str) -> Iterator[Tensor]:
    """Samples by DDIM, with image and noise written out."""
    denoise = PLAIN[denoiser](dict(state.layer.named_parameters()))
    x, conditions = state.inputs
    for step in range(STEPS):
        time, following = (round(1000 * (STEPS - number) / STEPS) - 1 for number in (step, step + 1))
        kept, next_kept = (math.cos(math.pi / 2 * (t + 1) / 1001) ** 2 for t in (time, following))
        times = torch.full((BATCH,), time)
        v = denoise(x, times, conditions)
        if guidance != "none":
            free = denoise(x, times, 0 * conditions)
            v = free + 4 * (v - free)
        image = math.sqrt(kept) * x - math.sqrt(1 - kept) * v
        noise = math.sqrt(1 - kept) * x + math.sqrt(kept) * v
        x = math.sqrt(next_kept) * image + math.sqrt(1 - next_kept) * noise
        yield x


def mismatched(tape: Tape, reference: Tape) -> bool:
    """Whether a case with that tape gets the label for different work, which removes its verdict."""
    lead = replace(record(steady(10 * MS, 24), "fp32", is_reference=True), tape=reference)
    case = replace(record(steady(MS, 24), "bf16"), tape=tape)
    labels = [one for one in label_false_claims(case, lead) if one.label is Label.WORK_MISMATCH and one.hard]
    return bool(labels) and find([lead, case], {})[1].verdict is Verdict.UNSURE


@for_each("guidance", ["none", "twice", "batch"])
@DENOISERS
def test_sampling_is_what_plain_functions_compute(denoiser: str, guidance: str) -> None:
    state = exact_of(denoiser, guidance=guidance)
    assert isinstance(state, ImageSampling) and GUIDANCE_WEIGHT == 4
    ours = list(state.sample_latents(SilentPhases()))
    torch.testing.assert_close(ours, list(plain_samples(denoiser, state, guidance)), rtol=1e-9, atol=1e-9)


@DENOISERS
def test_training_goes_down_the_loss_of_plain_functions(denoiser: str) -> None:
    state = exact_of(denoiser, **{"pass": "training"})
    assert isinstance(state, DenoiserTraining)
    image, noise, conditions, times = state.inputs
    angles = math.pi / 2 * (times.double()[:, None, None, None] + 1) / 1001
    denoise = PLAIN[denoiser](dict(state.layer.named_parameters()))
    velocity = denoise(angles.cos() * image + angles.sin() * noise, times, conditions)
    loss = (velocity - (angles.cos() * noise - angles.sin() * image)).square().sum() / 2
    _, gradients = state.outcome()
    assert joint_relative_frobenius(gradients, torch.autograd.grad(loss, state.list_leaf_tensors())) < 1e-9


@pytest.mark.slow
@for_each("precision", ["fp32", "bf16", "fp8"])
@for_each("guidance", ["none", "twice", "batch"])
@DENOISERS
def test_the_flops_of_sampling_are_those_of_the_tape(denoiser: str, guidance: str, precision: str) -> None:
    tape = tape_in_phases(state_of(denoiser, precision, guidance=guidance).step)
    assert tape.flops == Diffusion().work(params_of(denoiser, guidance=guidance)).flops


@for_each("precision", ["fp32", "bf16", "fp8"])
@DENOISERS
def test_the_flops_of_training_are_those_of_the_tape(denoiser: str, precision: str) -> None:
    changes = {"pass": "training", "layers": 1} if denoiser == "unet" else {"pass": "training"}
    work = Diffusion().work(params_of(denoiser, **changes)).flops
    # Torch's fused attention recomputes the scores in backward: five products there, two in forward.
    tokens, width, blocks = (8, 128, 2) if denoiser == "dit" else (8, 32, 1)
    scores_again = blocks * 2 * tokens * (IMAGE // 2) ** 2 * width
    assert tape_in_phases(state_of(denoiser, precision, **changes).step).flops == work + scores_again


def test_an_arm_that_does_other_work_has_no_verdict() -> None:
    reference, other = (tape_in_phases(state_of("dit", layers=layers).step) for layers in (2, 1))
    assert mismatched(other, reference) and mismatched(reference, other)
    low = tape_in_phases(state_of("dit", "fp8", high_steps="1+1").step)
    assert not mismatched(low, reference)


def errors(precision: str, denoiser: str = "dit", **changes: Scalar) -> dict[str, float]:
    return Diffusion().error(setup_of("diffusion", params_of(denoiser, **changes), precision))


@pytest.mark.slow
@DENOISERS
def test_errors_grow_as_bits_go_and_stand_above_their_floor(denoiser: str) -> None:
    of = {precision: errors(precision, denoiser) for precision in ("fp32", "bf16", "fp8", "nvfp4")}
    for step in range(1, STEPS + 1):
        for kind in ("single", "free"):
            values = [of[precision][f"{kind}_step{step}_error"] for precision in of]
            assert values == sorted(values) and values[0] < 1e-5
            floors = [of[precision][f"{kind}_floor_step{step}_error"] for precision in of]
            assert 0 < floors[0] < 1e-5 < floors[1] == floors[2] == floors[3] < values[2]
    for own in of.values():
        assert own["single_step1_error"] == own["free_step1_error"]
        assert own["latent_error"] == own[f"free_step{STEPS}_error"] >= own[f"single_step{STEPS}_error"]
        assert own["evaluations"] == STEPS


@pytest.mark.slow
@DENOISERS
def test_steps_in_high_precision_err_as_the_carrier_does(denoiser: str) -> None:
    """Each step begins at the exact latents: steps at the ends have bf16's bits, the others fp8's."""
    low = errors("fp8", denoiser)
    high = errors("bf16", denoiser)
    mixed = errors("fp8", denoiser, high_steps="2+1")
    for step in range(1, STEPS + 1):
        wanted = high if step in (1, 2, 4) else low
        assert mixed[f"single_step{step}_error"] == wanted[f"single_step{step}_error"]
    assert errors("bf16", denoiser, high_steps="2+1") == high  # nothing is above its carrier


@pytest.mark.slow
def test_time_steps_in_the_carrier_are_other_time_steps() -> None:
    """750 is 752 in bf16: an error of bf16, and none of fp32."""
    assert torch.tensor(750.0).to(torch.bfloat16) == 752
    assert errors("fp32", time="carrier") == errors("fp32")
    for precision in ("bf16", "fp8"):
        # The first of four steps is at 999, and 1000 in bf16.
        assert errors(precision, time="carrier")["single_step1_error"] > 2 * errors(precision)["single_step1_error"]


def test_times_and_angles_go_from_noise_to_image() -> None:
    assert [SamplerPlan(4, "none", 0, 0).time(step) for step in range(5)] == [999, 749, 499, 249, -1]
    assert len({SamplerPlan(250, "none", 0, 0).time(step) for step in range(251)}) == 251
    assert compute_noise_angle(-1) == 0 and 0 < compute_noise_angle(0) < compute_noise_angle(999) < math.pi / 2
    assert [SamplerPlan(5, "none", 1, 2).runs_in_high_precision(step) for step in range(5)] == [
        True,
        False,
        False,
        True,
        True,
    ]


def test_weights_are_cast_ahead_of_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_of("dit", "fp8")
    assert weight_bytes(state.layer.modules()) == 8 * 4  # one number each
    assert all(
        layer.weight.dtype == torch.bfloat16
        for layer in state.layer.modules()
        if isinstance(layer, Linear) and layer.operands is None
    )
    kept_weights(monkeypatch)
    other = state_of("dit", "fp8")
    # Those of time and of the ends are used and cached in the carrier.
    assert cast_again(other.layer.modules()) == 8
    assert torch.equal(state.outcome()[0], other.outcome()[0])


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match=r"high_steps=3\+2 are more than steps=4"):
        params_of("dit", high_steps="3+2")
    with pytest.raises(UsageError, match="image=5 is not a multiple of 2"):
        params_of("dit", image=5)
    with pytest.raises(UsageError, match="width=12 is not a multiple of 8"):
        params_of("unet", width=12)
    for text in ("", "4", "4+", "+1", "-1+2", "a+b"):
        with pytest.raises(ValueError, match="as in 4"):
            parse_high_precision_steps(text)
    assert parse_high_precision_steps("04+1") == "4+1"
    support = Diffusion().support
    params = params_of("dit", high_steps="3+1")
    assert "leaves no step of 4 to fp8" in support(params, precisions.get("fp8"), CPU).reason
    assert support(params, precisions.get("bf16"), CPU).level is Level.NATIVE
    training = params_of("dit", **{"pass": "training"})
    assert not {"steps", "guidance", "high_steps"} & set(training)
