"""A denoiser of diffusion models, DiT or UNet, on random weights: all steps of a sampler, or a training step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from fp8bench.errors import UsageError
from fp8bench.formats.hardware import refused
from fp8bench.model import DeviceFacts, Level, Params, Scalars, Support, Work
from fp8bench.nn.layer_workloads import ConvolvedWorkload
from fp8bench.nn.shared_workloads import is_training, require_fit
from fp8bench.nn.sizes import CHANNELS, FREQUENCIES, PATCH, DenoiserSizes, SamplerPlan, layers_around
from fp8bench.protocols import Grid, Layer, Precision, Setup
from fp8bench.protocols.axes import VALUES, Axis, auto_or, whole_number
from fp8bench.registry import workloads

if TYPE_CHECKING:
    import torch

    from fp8bench.nn.exercise import Exercise
    from fp8bench.nn.linear import Choose

# Parameters that a training step does not have.
_SAMPLED = ("steps", "guidance", "high_steps")
_PASSES = ("sampling", "training")
_WIDTHS = {"dit": 1152, "unet": 320}


class _Product(NamedTuple):
    """A layer, its rows in one evaluation of the denoiser, and the sides of its weight."""

    layer: Layer
    rows: int
    inputs: int
    outputs: int


def ends_word(text: str) -> str:
    """Parses the numbers of first and last steps that stay high, as in 4+1."""
    first, plus, last = text.partition("+")
    if not (plus and first.isdecimal() and last.isdecimal()):
        raise ValueError("expected how many of the first and of the last steps, as in 4+1")
    return f"{int(first)}+{int(last)}"


def sizes_of(params: Scalars) -> DenoiserSizes:
    numbers = (int(params[name]) for name in DenoiserSizes._fields[1:])
    return DenoiserSizes(str(params["denoiser"]), *numbers)


def plan_of(params: Scalars) -> SamplerPlan:
    first, last = map(int, str(params["high_steps"]).split("+"))
    return SamplerPlan(int(params["steps"]), str(params["guidance"]), first, last)


def _products(sizes: DenoiserSizes) -> list[_Product]:
    """Returns all products. The time embedding's and those at either end stay high, unless they are mapped."""
    body = _dit_shapes(sizes) if sizes.denoiser == "dit" else _unet_shapes(sizes)
    shapes = [
        ("time.up", "time", sizes.batch, FREQUENCIES, sizes.width),
        ("time.down", "time", sizes.batch, sizes.width, sizes.width),
        *body,
    ]
    groups = ("output" if name == "last" else "mlp" if ".mlp." in name else "" for name, *_ in shapes)
    return [
        _Product(Layer(name, kind, kind in ("time", "ends"), group=group), *shape)
        for (name, kind, *shape), group in zip(shapes, groups, strict=True)
    ]


_Shape = tuple[str, str, int, int, int]


def _dit_shapes(sizes: DenoiserSizes) -> Iterator[_Shape]:
    _, batch, image, width, layers = sizes
    tokens = batch * (image // PATCH) ** 2
    patch = PATCH * PATCH * CHANNELS
    yield "first", "ends", tokens, patch, width
    for block in (f"blocks.{number}" for number in range(layers)):
        yield f"{block}.modulation", "time", batch, width, 6 * width
        yield f"{block}.attn.qkv", "attn", tokens, width, 3 * width
        yield f"{block}.attn.out", "attn", tokens, width, width
        yield f"{block}.mlp.up", "body", tokens, width, 4 * width
        yield f"{block}.mlp.down", "body", tokens, 4 * width, width
    yield "modulation", "time", batch, width, 2 * width
    yield "last", "ends", tokens, width, patch


def _unet_shapes(sizes: DenoiserSizes) -> Iterator[_Shape]:
    """Yields a UNet's products, with convolutions as products of windows of 9 pixels."""
    _, batch, image, width, layers = sizes
    pixels = batch * image * image
    # The middle has half the resolution in both directions.
    inner = pixels // 4

    def block(name: str, rows: int, inputs: int, outputs: int) -> Iterator[_Shape]:
        yield f"{name}.conv1", "body", rows, 9 * inputs, outputs
        yield f"{name}.conv2", "body", rows, 9 * outputs, outputs
        yield f"{name}.time", "time", batch, width, outputs
        if inputs != outputs:
            yield f"{name}.skip", "body", rows, inputs, outputs

    yield "first", "ends", pixels, 9 * CHANNELS, width
    for number in range(layers):
        yield from block(f"down.{number}", pixels, width, width)
        # The first upward block also takes the middle's output, with twice the width.
        yield from block(f"up.{number}", pixels, width if number else 3 * width, width)
    yield from block("middle.0", inner, width, 2 * width)
    yield from block("middle.1", inner, 2 * width, 2 * width)
    yield "attn.qkv", "attn", inner, 2 * width, 6 * width
    yield "attn.out", "attn", inner, 2 * width, 2 * width
    yield "last", "ends", pixels, 9 * width, CHANNELS


@workloads.register("diffusion")
class Diffusion(ConvolvedWorkload):
    """A diffusion model. A step of sampling goes all the way from noise to image; a report shows the time and error of
    each of its steps. The text encoder and the decoder of images are left out."""

    name = "diffusion"
    summary = "a denoiser (DiT, UNet) on random weights: all steps of a sampler with its error by step, or training"
    layer_kinds = ("attn", "body", "time", "ends")
    batch_axis = "batch"
    part_ends = "accumulate"
    history = Grid(
        cpu={"denoiser": ("dit", "unet"), "pass": _PASSES, "image": ("8",)},
        gpu={"denoiser": ("dit", "unet"), "pass": _PASSES, "image": ("64",)},
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
            Axis.count("image", f"height and width of a latent of {CHANNELS} channels", image, high=1 << 10),
            Axis("width", "features of the stream", (width,), auto_or(whole_number(high=1 << 14))),
            Axis.count("layers", "blocks of a DiT; of a UNet at full resolution, down and up", layers, high=64),
            Axis.choice("pass", "sampling: all steps from noise to image; training: forward and backward", *_PASSES),
            Axis.count("steps", "of the sampler, DDIM", steps, high=250),
            Axis.choice(
                "guidance",
                "none; twice: two evaluations a step, with the condition and without; batch: one of twice the batch",
                "none",
                "twice",
                "batch",
            ),
            Axis(
                "high_steps",
                "how many of the first and the last steps multiply in high precision, as in 4+1",
                ("0+0",),
                ends_word,
            ),
            Axis.choice(
                "time",
                "what time steps come in: fp32, or the carrier, as in a model moved to bf16 whole",
                "fp32",
                "carrier",
            ),
            VALUES,
        )

    def expand(self, params: Scalars) -> tuple[Params, ...]:
        if params["width"] == "auto":
            params = {**params, "width": _WIDTHS[str(params["denoiser"])]}
        for name, multiple in (("image", 2), ("width", 8)):
            if int(params[name]) % multiple:
                raise UsageError(f"{name}={params[name]} is not a multiple of {multiple}: choose one that is.")
        if is_training(params):
            return super().expand({name: value for name, value in params.items() if name not in _SAMPLED})
        plan = plan_of(params)
        if plan.first + plan.last > plan.steps:
            raise UsageError(f"high_steps={params['high_steps']} are more than steps={plan.steps}: choose fewer.")
        return super().expand(params)

    def layers(self, params: Scalars) -> tuple[Layer, ...]:
        return tuple(product.layer for product in _products(sizes_of(params)))

    def around(self, params: Scalars) -> tuple[Layer, ...]:
        sizes = sizes_of(params)
        if sizes.denoiser == "dit":
            norms = []
            for number in range(sizes.layers):
                norms += [f"blocks.{number}.norm_attn", f"blocks.{number}.norm_mlp"]
            return layers_around((*norms, "norm"), "embedding", "residual")
        # A UNet's blocks have two norms each.
        down = [f"down.{number}" for number in range(sizes.layers)]
        up = [f"up.{number}" for number in range(sizes.layers)]
        norms = []
        for block in (*down, *up, "middle.0", "middle.1"):
            norms += [f"{block}.norms.0", f"{block}.norms.1"]
        return layers_around((*norms, "attn_norm", "norm"), "residual")

    def work(self, params: Scalars) -> Work:
        sizes = sizes_of(params)
        tokens = (sizes.image // 2) ** 2
        width = sizes.width * (1 if sizes.denoiser == "dit" else 2)
        blocks = sizes.layers if sizes.denoiser == "dit" else 1
        products = _products(sizes)
        flops = 4.0 * blocks * sizes.batch * tokens * tokens * width
        flops += sum(2.0 * rows * inputs * outputs for _, rows, inputs, outputs in products)
        least = 4.0 * sum(inputs * outputs for *_, inputs, outputs in products)  # fp32 weights
        if not is_training(params):
            plan = plan_of(params)
            return Work(flops * plan.steps * (1 if plan.guidance == "none" else 2), least_memory=least)
        # Noised latents and the time's sinusoids need no gradient.
        entering = (product for product in products if product.layer.name in ("first", "time.up"))
        return Work(
            3 * flops - sum(2.0 * rows * inputs * outputs for _, rows, inputs, outputs in entering),
            least_memory=2 * least,
        )

    def support(self, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        if not is_training(params) and precision.carried_by:
            high = params["high_steps"]
            plan = plan_of(params)
            if plan.first + plan.last == plan.steps:
                return refused(f"high_steps={high} leaves none of {plan.steps} steps to {precision.mode}")
        kinds = (self.layer_support(kind, params, precision, facts) for kind in ("attn", "body"))
        return max(kinds, key=lambda support: list(Level).index(support.level))

    def layer_support(self, kind: str, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        """Returns the support of layers: a UNet's convolutions as in suite conv; without them it has neither body nor
        ends."""
        sizes = sizes_of(params)
        support = precision.support(facts)
        if sizes.denoiser == "unet" and kind in ("body", "ends"):
            channels = sizes.width if kind == "body" else CHANNELS
            sizes_of_conv = {"batch": sizes.batch, "channels": channels, "image": sizes.image // 2}
            passing = "training" if is_training(params) else "forward"
            return workloads.get("conv").support({**sizes_of_conv, "pass": passing}, precision, facts)
        products = [product for product in _products(sizes) if product.layer.kind == kind]
        sides: set[int] = set()
        for product in products:
            sides |= {product.inputs, product.outputs}
        shown = f"width={sizes.width}, image={sizes.image}, batch={sizes.batch}"
        rows = next((product.rows for product in products if product.rows % precision.multiples[0]), 0)
        return require_fit(support, precision, rows, sorted(sides), is_training(params), shown)

    def exercise(self, setup: Setup, choose: Choose, carrier: torch.dtype) -> Exercise:
        from fp8bench.nn.diffusion import denoiser_state

        params = setup.params
        plan = None if is_training(params) else plan_of(params)
        return denoiser_state(setup, sizes_of(params), plan, choose, carrier, params["time"] == "carrier")

    def error(self, setup: Setup) -> dict[str, float]:
        """Compares a training step like any layer, and a sampling by step, with the number of denoiser evaluations."""
        from fp8bench.nn import diffusion

        state = self.prepare(setup)
        exact = self.exact(setup)
        if not isinstance(state, diffusion.Sampling):
            return state.errors(exact, setup.settles)
        if setup.settles:
            state.outcome()
        wide = (
            self.all_in(setup, arithmetic) for arithmetic in (setup.high, diffusion.OtherKernel(setup.high.carrier))
        )
        samplings = [sampling for sampling in (exact, *wide) if isinstance(sampling, diffusion.Sampling)]
        evaluations = plan_of(setup.params).evaluations
        return {**diffusion.errors_by_step(state, *samplings), "evaluations": float(evaluations)}
