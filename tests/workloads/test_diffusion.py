"""Denoisers and their sampler against plain loops, FLOPs by hand, errors by step, and mistakes that are planted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from fp8bench.analysis.claims import label_false_claims
from fp8bench.analysis.findings import find
from fp8bench.errors import UsageError
from fp8bench.model import Label, Level, Scalar, Tape, Verdict
from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.diffusion import GUIDANCE_WEIGHT, DenoiserTraining, Sampling, compute_noise_angle
from fp8bench.nn.linear import Linear
from fp8bench.nn.sizes import SamplerPlan
from fp8bench.protocols import SilentPhases
from fp8bench.registry import precisions
from fp8bench.workloads.diffusion import Diffusion, parse_high_steps
from tests.counts import for_each
from tests.fakes import MS, record, steady
from tests.tapes import tape_in_phases
from tests.workloads.steps import CPU, SMALL, cast_again, kept_weights, setup_of, weight_bytes

Array = NDArray[np.float64]
DENOISERS = for_each("denoiser", ["dit", "unet"])
BATCH, IMAGE, STEPS = 2, 4, 4
WIDTH = {"dit": 128, "unet": 16}


def params_of(denoiser: str, **changes: Scalar) -> dict[str, Scalar]:
    made = SMALL["diffusion"] | {"denoiser": denoiser, "width": WIDTH[denoiser]} | changes
    return dict(Diffusion().expand(made)[0])


def state_of(denoiser: str, precision: str = "fp32", seed: int = 0, **changes: Scalar) -> Sampling | DenoiserTraining:
    state = Diffusion().prepare(setup_of("diffusion", params_of(denoiser, **changes), precision, seed))
    assert isinstance(state, Sampling | DenoiserTraining)
    return state


def exact_of(denoiser: str, **changes: Scalar) -> Sampling | DenoiserTraining:
    exact = PlainArithmetic(torch.float64)
    setup = setup_of("diffusion", params_of(denoiser, **changes), "fp32")
    state = Diffusion().exercise(setup, lambda name: exact, exact.carrier)
    assert isinstance(state, Sampling | DenoiserTraining)
    return state


# The same in numpy, by token, head, and pixel of a window.


def silu(x: Array) -> Array:
    return np.asarray(x / (1 + np.exp(-x)))


def gelu(x: Array) -> Array:
    return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))


class Loops:
    """Computes one image through a denoiser with plain loops, from its weights."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = {name: weight.detach().double().numpy() for name, weight in weights.items()}

    def __call__(self, latent: Array, time: float, condition: Array) -> Array:
        angles = [time * 10_000 ** (-number / 128) for number in range(128)]
        waves = np.array([math.cos(angle) for angle in angles] + [math.sin(angle) for angle in angles])
        hidden = self.times("time.down", silu(self.times("time.up", waves)))
        return self.denoised(latent, silu(hidden + condition))

    def times(self, name: str, x: Array) -> Array:
        return np.asarray([row @ x for row in self.weights[f"{name}.weight"]])

    def denoised(self, latent: Array, time: Array) -> Array:
        raise NotImplementedError

    def attention(self, name: str, rows: list[Array], head: int) -> list[Array]:
        width = len(rows[0])
        parts = [np.split(self.times(f"{name}.qkv", row), 3) for row in rows]
        mixed = [np.zeros(width) for _ in rows]
        for begin in range(0, width, head):
            of_head = slice(begin, begin + head)
            for number, (query, _, _) in enumerate(parts):
                scores = [math.exp(query[of_head] @ key[of_head] / math.sqrt(head)) for _, key, _ in parts]
                for score, (_, _, value) in zip(scores, parts, strict=True):
                    mixed[number][of_head] += score / sum(scores) * value[of_head]
        return [self.times(f"{name}.out", row) for row in mixed]


class LoopedDiT(Loops):
    """Computes patch by patch."""

    def denoised(self, latent: Array, time: Array) -> Array:
        places = [(up, across) for up in range(0, IMAGE, 2) for across in range(0, IMAGE, 2)]
        rows = [latent[i : i + 2, j : j + 2].ravel() for i, j in places]
        stream = [self.times("first", row) + own for row, own in zip(rows, self.weights["positions"], strict=True)]
        for block in ("blocks.0", "blocks.1"):
            shift, scale, gate, shift2, scale2, gate2 = np.split(self.times(f"{block}.modulation.product", time), 6)
            mixed = self.attention(f"{block}.attn", [normed(x) * (1 + scale) + shift for x in stream], 64)
            stream = [x + gate * y for x, y in zip(stream, mixed, strict=True)]
            for number, x in enumerate(stream):
                up = gelu(self.times(f"{block}.mlp.up", normed(x) * (1 + scale2) + shift2))
                stream[number] = x + gate2 * self.times(f"{block}.mlp.down", up)
        shift, scale = np.split(self.times("modulation.product", time), 2)
        image = np.zeros_like(latent)
        for (i, j), x in zip(places, stream, strict=True):
            image[i : i + 2, j : j + 2] = self.times("last", normed(x) * (1 + scale) + shift).reshape(2, 2, 4)
        return image


def normed(x: Array) -> Array:
    return np.asarray((x - x.mean()) / math.sqrt(x.var() + 1e-6))


class LoopedUNet(Loops):
    """Computes pixel by pixel."""

    def denoised(self, latent: Array, time: Array) -> Array:
        x = self.convolved("first", latent)
        for name in ("down.0", "down.1"):
            x = self.block(name, x, time)
        half = IMAGE // 2
        inner = np.array(
            [[x[2 * i : 2 * i + 2, 2 * j : 2 * j + 2].mean((0, 1)) for j in range(half)] for i in range(half)]
        )
        inner = self.block("middle.0", inner, time)
        rows = list(self.grouped("attn_norm", inner).reshape(half * half, -1))
        inner = inner + np.array(self.attention("attn", rows, len(rows[0]))).reshape(inner.shape)
        inner = self.block("middle.1", inner, time)
        x = np.array([[np.concatenate((inner[i // 2, j // 2], x[i, j])) for j in range(IMAGE)] for i in range(IMAGE)])
        for name in ("up.0", "up.1"):
            x = self.block(name, x, time)
        return self.convolved("last", silu(self.grouped("norm", x)))

    def block(self, name: str, x: Array, time: Array) -> Array:
        hidden = self.convolved(f"{name}.conv1", silu(self.grouped(f"{name}.norms.0", x)))
        hidden = hidden + self.times(f"{name}.time", time)
        skip = f"{name}.skip"
        kept = np.array([[self.times(skip, y) for y in row] for row in x]) if f"{skip}.weight" in self.weights else x
        return np.asarray(kept + self.convolved(f"{name}.conv2", silu(self.grouped(f"{name}.norms.1", hidden))))

    def convolved(self, name: str, x: Array) -> Array:
        """Pads with zeros; weights are (outputs, 9 x inputs), the pixels of a window first."""
        side = x.shape[0]
        inputs = x.shape[2]
        weight = self.weights[f"{name}.weight"].reshape(-1, 3, 3, inputs)
        out = np.zeros((side, side, len(weight)))
        for i, j, up, across in np.ndindex(side, side, 3, 3):
            row = i + up - 1
            column = j + across - 1
            if 0 <= row < side and 0 <= column < side:
                out[i, j] += weight[:, up, across] @ x[row, column]
        return out

    def grouped(self, name: str, x: Array) -> Array:
        out = np.empty_like(x)
        for channels in np.split(np.arange(x.shape[2]), 8):
            part = x[:, :, channels]
            out[:, :, channels] = (part - part.mean()) / math.sqrt(part.var() + 1e-5)
        return np.asarray(out * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"])


LOOPED = {"dit": LoopedDiT, "unet": LoopedUNet}


def by_loops(denoiser: str, state: Sampling, guidance: str = "none") -> list[Array]:
    """Samples by DDIM with plain loops, image by image, with image and noise written out."""
    denoise = LOOPED[denoiser](dict(state.layer.named_parameters()))
    latents, conditions = (tensor.double().numpy() for tensor in state.inputs)
    after = []
    for step in range(STEPS):
        time, following = (round(1000 * (STEPS - number) / STEPS) - 1 for number in (step, step + 1))
        kept, next_kept = (math.cos(math.pi / 2 * (t + 1) / 1001) ** 2 for t in (time, following))
        moved = []
        for x, condition in zip(latents, conditions, strict=True):
            v = denoise(x, time, condition)
            if guidance != "none":
                free = denoise(x, time, 0 * condition)
                v = free + 4 * (v - free)
            image = math.sqrt(kept) * x - math.sqrt(1 - kept) * v
            noise = math.sqrt(1 - kept) * x + math.sqrt(kept) * v
            moved.append(math.sqrt(next_kept) * image + math.sqrt(1 - next_kept) * noise)
        latents = np.array(moved)
        after.append(latents)
    return after


def agree(denoiser: str, state: Sampling, guidance: str = "none") -> bool:
    ours = [latent.numpy() for latent in state.sample_latents(SilentPhases())]
    wanted = by_loops(denoiser, state, guidance)
    return len(ours) == len(wanted) and all(
        np.allclose(a, b, rtol=1e-9, atol=1e-9) for a, b in zip(ours, wanted, strict=True)
    )


def mismatched(tape: Tape, reference: Tape) -> bool:
    """Whether a case with that tape gets the label for different work, which removes its verdict."""
    lead = replace(record(steady(10 * MS, 24), "fp32", is_reference=True), tape=reference)
    case = replace(record(steady(MS, 24), "bf16"), tape=tape)
    labels = [one for one in label_false_claims(case, lead) if one.label is Label.WORK_MISMATCH and one.hard]
    return bool(labels) and find([lead, case], {})[1].verdict is Verdict.UNSURE


@pytest.mark.slow
@for_each("guidance", ["none", "twice", "batch"])
@DENOISERS
def test_sampling_is_what_plain_loops_compute(denoiser: str, guidance: str) -> None:
    state = exact_of(denoiser, guidance=guidance)
    assert isinstance(state, Sampling) and GUIDANCE_WEIGHT == 4
    assert agree(denoiser, state, guidance)


@for_each("order", [0, 1])
@DENOISERS
def test_training_goes_down_the_loss_that_loops_compute(denoiser: str, order: int) -> None:
    """Compares gradients along a random direction with differences of the looped loss, in fp64."""
    state = exact_of(denoiser, **{"pass": "training"})
    assert isinstance(state, DenoiserTraining)
    _, gradients = state.outcome()
    torch.manual_seed(order)
    names = [name for name, _ in state.layer.named_parameters()]
    directions = [torch.randn_like(parameter) for parameter in state.leaves()]
    slope = sum(float((g * d).sum()) for g, d in zip(gradients, directions, strict=True))

    def loss(reach: float) -> float:
        moved = (p.detach() + reach * d for p, d in zip(state.leaves(), directions, strict=True))
        denoise = LOOPED[denoiser](dict(zip(names, moved, strict=True)))
        total = 0.0
        for image, noise, condition, time in zip(*(tensor.double().numpy() for tensor in state.inputs), strict=True):
            a = math.cos(math.pi / 2 * (time + 1) / 1001)
            b = math.sin(math.pi / 2 * (time + 1) / 1001)
            total += ((denoise(a * image + b * noise, time, condition) - (a * noise - b * image)) ** 2).sum() / 2
        return total

    assert (loss(1e-6) - loss(-1e-6)) / 2e-6 == pytest.approx(slope, rel=1e-5)


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
    assert [SamplerPlan(5, "none", 1, 2).is_high(step) for step in range(5)] == [True, False, False, True, True]


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
            parse_high_steps(text)
    assert parse_high_steps("04+1") == "4+1"
    support = Diffusion().support
    params = params_of("dit", high_steps="3+1")
    assert "leaves no step of 4 to fp8" in support(params, precisions.get("fp8"), CPU).reason
    assert support(params, precisions.get("bf16"), CPU).level is Level.NATIVE
    training = params_of("dit", **{"pass": "training"})
    assert not {"steps", "guidance", "high_steps"} & set(training)
