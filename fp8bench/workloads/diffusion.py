"""The suite diffusion: a denoiser (DiT or UNet) with random weights, in all steps of a sampler or in a training
step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from fp8bench.errors import UsageError
from fp8bench.formats.hardware import refused
from fp8bench.model import DeviceFacts, Level, Params, Scalars, Support, Work
from fp8bench.nn.layer_workloads import ConvolvedWorkload
from fp8bench.nn.shared_workloads import is_training, refuse_unfit_sizes
from fp8bench.nn.sizes import (
    LATENT_CHANNELS,
    PATCH_SIDE,
    TIME_EMBEDDING_FREQUENCIES,
    DenoiserSizes,
    SamplerPlan,
    make_surrounding_layers,
)
from fp8bench.protocols import Grid, Layer, Precision, Setup
from fp8bench.protocols.axes import VALUES, Axis, make_auto_parser, read_integers, whole_number
from fp8bench.registry import workloads

if TYPE_CHECKING:
    import torch

    from fp8bench.nn.exercise import LayerExercise
    from fp8bench.nn.linear import ChooseArithmetic

# Parameters of sampling that a training step does not have.
_SAMPLING_PARAMETERS = ("steps", "guidance", "high_steps")
_PASS_NAMES = ("sampling", "training")
_DEFAULT_WIDTH_BY_DENOISER = {"dit": 1152, "unet": 320}


class _LayerProduct(NamedTuple):
    """A layer, the number of rows that it multiplies in one evaluation of the denoiser, and its weight's numbers of
    inputs and outputs.
    """

    layer: Layer
    rows: int
    inputs: int
    outputs: int


def parse_high_precision_steps(text: str) -> str:
    """Parses how many of the first and of the last sampling steps stay in high precision, for example '4+1'."""
    first_text, separator, last_text = text.partition("+")
    if not (separator and first_text.isdecimal() and last_text.isdecimal()):
        raise ValueError("expected the numbers of first and of last steps, as in 4+1")
    return f"{int(first_text)}+{int(last_text)}"


def read_sizes(params: Scalars) -> DenoiserSizes:
    return DenoiserSizes(str(params["denoiser"]), *read_integers(params, *DenoiserSizes._fields[1:]))


def read_sampler_plan(params: Scalars) -> SamplerPlan:
    first_high_step_count, last_high_step_count = map(int, str(params["high_steps"]).split("+"))
    return SamplerPlan(int(params["steps"]), str(params["guidance"]), first_high_step_count, last_high_step_count)


def _list_products(sizes: DenoiserSizes) -> list[_LayerProduct]:
    """Lists all layers of a denoiser that multiply matrices. The first layer, the last layer and the layers of the time
    embedding stay in high precision, unless a precision map names them.
    """
    products = []
    for name, kind, *shape in (
        ("time.up", "time", sizes.batch, TIME_EMBEDDING_FREQUENCIES, sizes.width),
        ("time.down", "time", sizes.batch, sizes.width, sizes.width),
        *(_iterate_dit_shapes(sizes) if sizes.denoiser == "dit" else _iterate_unet_shapes(sizes)),
    ):
        group = "output" if name == "last" else "mlp" if ".mlp." in name else ""
        products.append(_LayerProduct(Layer(name, kind, kind in ("time", "ends"), group=group), *shape))
    return products


_ProductShape = tuple[str, str, int, int, int]


def _iterate_dit_shapes(sizes: DenoiserSizes) -> Iterator[_ProductShape]:
    _, batch, image, width, layers = sizes
    tokens = batch * (image // PATCH_SIDE) ** 2
    patch = PATCH_SIDE * PATCH_SIDE * LATENT_CHANNELS
    yield "first", "ends", tokens, patch, width
    for block in (f"blocks.{number}" for number in range(layers)):
        yield f"{block}.modulation", "time", batch, width, 6 * width
        yield f"{block}.attn.qkv", "attn", tokens, width, 3 * width
        yield f"{block}.attn.out", "attn", tokens, width, width
        yield f"{block}.mlp.up", "body", tokens, width, 4 * width
        yield f"{block}.mlp.down", "body", tokens, 4 * width, width
    yield "modulation", "time", batch, width, 2 * width
    yield "last", "ends", tokens, width, patch


def _iterate_unet_shapes(sizes: DenoiserSizes) -> Iterator[_ProductShape]:
    """Yields the shapes of a UNet's products. A 3x3 convolution counts as a product with one row per pixel and 9
    columns per input channel.
    """
    _, batch, image, width, layers = sizes
    pixel_count = batch * image * image
    # In the middle of the UNet, an image has half the height and half the width.
    middle_pixel_count = pixel_count // 4

    def iterate_block_shapes(name: str, rows: int, inputs: int, outputs: int) -> Iterator[_ProductShape]:
        yield f"{name}.conv1", "body", rows, 9 * inputs, outputs
        yield f"{name}.conv2", "body", rows, 9 * outputs, outputs
        yield f"{name}.time", "time", batch, width, outputs
        if inputs != outputs:
            yield f"{name}.skip", "body", rows, inputs, outputs

    yield "first", "ends", pixel_count, 9 * LATENT_CHANNELS, width
    for number in range(layers):
        yield from iterate_block_shapes(f"down.{number}", pixel_count, width, width)
        # The first block after the middle also reads the output of the middle, which has twice the width.
        yield from iterate_block_shapes(f"up.{number}", pixel_count, width if number else 3 * width, width)
    yield from iterate_block_shapes("middle.0", middle_pixel_count, width, 2 * width)
    yield from iterate_block_shapes("middle.1", middle_pixel_count, 2 * width, 2 * width)
    yield "attn.qkv", "attn", middle_pixel_count, 2 * width, 6 * width
    yield "attn.out", "attn", middle_pixel_count, 2 * width, 2 * width
    yield "last", "ends", pixel_count, 9 * width, LATENT_CHANNELS


@workloads.register("diffusion")
class Diffusion(ConvolvedWorkload):
    """Times a diffusion model. With pass=sampling a step denoises a whole image, starting from noise. A report then
    shows time and error of each sampling step inside it. The text encoder and the image decoder are left out.
    """

    name = "diffusion"
    summary = "a denoiser (DiT, UNet) on random weights: all steps of a sampler with its error by step, or training"
    layer_kinds = ("attn", "body", "time", "ends")
    batch_axis = "batch"
    part_ends = "accumulate"
    history = Grid(
        cpu={"denoiser": ("dit", "unet"), "pass": _PASS_NAMES, "image": ("8",)},
        gpu={"denoiser": ("dit", "unet"), "pass": _PASS_NAMES, "image": ("64",)},
        phases=("cast", "gemm", "attention", "accumulate", "elementwise"),
        errors=("latent_error", "output_error", "gradient_error"),
        per="flops",
    )

    def axes(self, facts: DeviceFacts) -> tuple[Axis, ...]:
        batch, image, width, layers, steps = (
            ("4", "64", "auto", "8", "20") if facts.accelerated else ("2", "8", "64", "2", "6")
        )
        return (
            Axis.each(
                "denoiser",
                "dit: a transformer of patches; unet: convolutions, attention at half the resolution",
                "dit",
                "unet",
            ),
            Axis.count("batch", "latents that are denoised together", batch, high=1 << 16),
            Axis.count("image", f"height and width of a latent of {LATENT_CHANNELS} channels", image, high=1 << 10),
            Axis("width", "features of the residual stream", (width,), make_auto_parser(whole_number(high=1 << 14))),
            Axis.count(
                "layers",
                "blocks of a DiT, or blocks of a UNet at full resolution, both downward and upward",
                layers,
                high=64,
            ),
            Axis.choice(
                "pass", "sampling: all steps from noise to image; training: forward and backward", *_PASS_NAMES
            ),
            Axis.count("steps", "steps of the DDIM sampler", steps, high=250),
            Axis.choice(
                "guidance",
                "none; twice: two evaluations a step, with and without the condition; batch: one "
                "evaluation of a doubled batch",
                "none",
                "twice",
                "batch",
            ),
            Axis(
                "high_steps",
                "numbers of first and of last steps that multiply in high precision, as in 4+1",
                ("0+0",),
                parse_high_precision_steps,
            ),
            Axis.choice(
                "time",
                "dtype of time steps: fp32, or the carrier's, as in a model that was moved to bf16",
                "fp32",
                "carrier",
            ),
            VALUES,
        )

    def expand(self, params: Scalars) -> tuple[Params, ...]:
        if params["width"] == "auto":
            params = {**params, "width": _DEFAULT_WIDTH_BY_DENOISER[str(params["denoiser"])]}
        for name, multiple in (("image", 2), ("width", 8)):
            if int(params[name]) % multiple:
                raise UsageError(f"{name}={params[name]} is not a multiple of {multiple}: choose one that is.")
        if is_training(params):
            return super().expand({name: value for name, value in params.items() if name not in _SAMPLING_PARAMETERS})
        sampler_plan = read_sampler_plan(params)
        if sampler_plan.first + sampler_plan.last > sampler_plan.steps:
            raise UsageError(
                f"high_steps={params['high_steps']} are more than steps={sampler_plan.steps}: choose fewer."
            )
        return super().expand(params)

    def layers(self, params: Scalars) -> tuple[Layer, ...]:
        return tuple(product.layer for product in _list_products(read_sizes(params)))

    def around(self, params: Scalars) -> tuple[Layer, ...]:
        sizes = read_sizes(params)
        numbers = range(sizes.layers)
        norms: list[str] = []
        if sizes.denoiser == "dit":
            for number in numbers:
                norms += [f"blocks.{number}.norm_attn", f"blocks.{number}.norm_mlp"]
            return make_surrounding_layers((*norms, "norm"), "embedding", "residual")
        # Each block of a UNet has two norms.
        for block in (*map("down.{}".format, numbers), *map("up.{}".format, numbers), "middle.0", "middle.1"):
            norms += [f"{block}.norms.0", f"{block}.norms.1"]
        return make_surrounding_layers((*norms, "attn_norm", "norm"), "residual")

    def work(self, params: Scalars) -> Work:
        sizes = read_sizes(params)
        tokens = (sizes.image // 2) ** 2
        width = sizes.width * (1 if sizes.denoiser == "dit" else 2)
        attention_blocks = sizes.layers if sizes.denoiser == "dit" else 1
        products = _list_products(sizes)
        flops = 4.0 * attention_blocks * sizes.batch * tokens * tokens * width
        flops += sum(2.0 * rows * inputs * outputs for _, rows, inputs, outputs in products)
        weight_bytes = 4.0 * sum(inputs * outputs for *_, inputs, outputs in products)  # weights are in fp32
        if not is_training(params):
            sampler_plan = read_sampler_plan(params)
            return Work(
                flops * sampler_plan.steps * (1 if sampler_plan.guidance == "none" else 2), least_memory=weight_bytes
            )
        # The noisy latents and the encoded time step need no gradient.
        input_layer_products = (product for product in products if product.layer.name in ("first", "time.up"))
        return Work(
            3 * flops - sum(2.0 * rows * inputs * outputs for _, rows, inputs, outputs in input_layer_products),
            least_memory=2 * weight_bytes,
        )

    def support(self, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        if not is_training(params) and precision.carried_by:
            plan = read_sampler_plan(params)
            if plan.first + plan.last == plan.steps:
                return refused(
                    f"high_steps={params['high_steps']} leaves no step of {plan.steps} to {precision.mode}: choose "
                    "fewer of them"
                )
        layer_kind_supports = (
            self.layer_support(layer_kind, params, precision, facts) for layer_kind in ("attn", "body")
        )
        # The kind of layer with the worse support decides.
        return max(layer_kind_supports, key=lambda support: list(Level).index(support.level))

    def layer_support(self, kind: str, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        """Returns how a device supports one kind of layer. In a UNet, layers of the kinds `body` and `ends` contain
        convolutions, so they are supported or refused as in the suite conv.
        """
        sizes = read_sizes(params)
        support = precision.support(facts)
        if sizes.denoiser == "unet" and kind in ("body", "ends"):
            channels = sizes.width if kind == "body" else LATENT_CHANNELS
            conv_sizes = {"batch": sizes.batch, "channels": channels, "image": sizes.image // 2}
            conv_pass = "training" if is_training(params) else "forward"
            return workloads.get("conv").support({**conv_sizes, "pass": conv_pass}, precision, facts)
        rows = 0  # a row count that the precision does not support, or 0 if it supports all
        side_lengths: set[int] = set()
        for product in _list_products(sizes):
            if product.layer.kind == kind:
                side_lengths |= {product.inputs, product.outputs}
                if product.rows % precision.multiples[0]:
                    rows = product.rows
        size_text = f"width={sizes.width}, image={sizes.image}, batch={sizes.batch}"
        return refuse_unfit_sizes(support, precision, rows, sorted(side_lengths), is_training(params), size_text)

    def exercise(self, setup: Setup, choose: ChooseArithmetic, carrier: torch.dtype) -> LayerExercise:
        from fp8bench.nn.diffusion import make_denoiser_state

        params = setup.params
        sampler_plan = None if is_training(params) else read_sampler_plan(params)
        return make_denoiser_state(
            setup, read_sizes(params), sampler_plan, choose, carrier, params["time"] == "carrier"
        )

    def error(self, setup: Setup) -> dict[str, float]:
        """Compares a training step with the exact step, like the suites of single layers. For sampling, compares each
        sampling step with exact sampling, and adds the number of denoiser evaluations.
        """
        from fp8bench.nn import diffusion

        state = self.prepare(setup)
        exact = self.exact(setup)
        if not isinstance(state, diffusion.ImageSampling):
            return state.measure_errors(exact, setup.settles)
        if setup.settles:
            state.outcome()
        high_precision_exercises = (
            self.make_exercise_in_arithmetic(setup, arithmetic)
            for arithmetic in (setup.high, diffusion.AlternativeKernels(setup.high.carrier))
        )
        sampling_exercises = [
            sampling for sampling in (exact, *high_precision_exercises) if isinstance(sampling, diffusion.ImageSampling)
        ]
        denoiser_call_count = read_sampler_plan(setup.params).denoiser_calls
        return {**diffusion.measure_step_errors(state, *sampling_exercises), "evaluations": float(denoiser_call_count)}
