"""Models of images, or of images with text: a training step with every phase, or inference."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from fp8bench.errors import UsageError
from fp8bench.model import DeviceFacts, Params, Scalars, Support, Work
from fp8bench.nn import shared_workloads as shared
from fp8bench.nn.sizes import CLASSES, VisionSizes
from fp8bench.protocols import Grid, Layer, Precision, Setup
from fp8bench.protocols.axes import Axis
from fp8bench.registry import workloads

if TYPE_CHECKING:
    import torch

    from fp8bench.nn.linear import Choose
    from fp8bench.nn.training_step import TrainingState
    from fp8bench.nn.vision import InferenceState

_MODELS = ("resnet", "vit", "two-input")
# Parameters that a model does not have.
_UNUSED = {"resnet": ("patch", "text"), "vit": ("text",), "two-input": ()}


def sizes_of(params: Scalars) -> VisionSizes:
    model = str(params["model"])
    names = (name for name in ("image", "width", "layers", "patch", "text") if name not in _UNUSED[model])
    return VisionSizes(model, **{name: int(params[name]) for name in names if name in params})


@workloads.register("vision")
class Vision(shared.TrainingWorkload):
    """A vision model. Its first product and its head stay high, and so do elementwise operations, unless a map changes
    that. Attention's core always stays high."""

    name = "vision"
    summary = "a ResNet stage by memory layout, a ViT block, or an image beside text: a training step, or inference"
    uses_corpus = False
    layer_kinds = ("stem", "block", "head")
    batch_axis = "batch"
    history = Grid(
        cpu={"model": _MODELS, "width": ("64",), "layout": ("channels_last",)},
        gpu={"model": _MODELS, "width": ("1024",), "layout": ("channels_last",)},
        phases=("data_load", "cast", "gemm", "attention", "accumulate", "optimizer_step", "elementwise"),
        errors=("gradient_error", "loss_error"),
        per="flops",
    )

    def axes(self, facts: DeviceFacts) -> tuple[Axis, ...]:
        batch, image, patch, width, layers, text = (
            ("64", "224", "16", "1024", "2", "128") if facts.accelerated else ("8", "32", "8", "64", "1", "16")
        )
        return (
            Axis.each(
                "model",
                "resnet: its stem and a stage of bottlenecks; vit: patches and blocks; two-input: the tokens "
                "of a vit ahead of a text's, and as many causal blocks over both",
                *_MODELS,
            ),
            Axis.count("batch", "images in a batch", batch, high=1 << 16),
            Axis.count("image", "height and width of an image", image, high=1 << 12),
            Axis.count("patch", "of a vit: height and width of a patch", patch, high=1 << 10),
            Axis.count(
                "width",
                "of the stream, in multiples of 16; of a resnet's stage a quarter is between",
                width,
                high=1 << 14,
            ),
            Axis.count("layers", "blocks, or bottlenecks", layers, high=256),
            Axis.count("text", "of two-input: tokens beside each image", text, high=1 << 14),
            Axis.choice(
                "layout",
                "of images and windows in memory; auto: both for a resnet, one after the other, and "
                "channels_last for patches",
                "auto",
                "contiguous",
                "channels_last",
            ),
            shared.PASS,
        )

    def expand(self, params: Scalars) -> tuple[Params, ...]:
        model = str(params["model"])
        layout = params["layout"]
        model_params = {name: value for name, value in params.items() if name not in _UNUSED[model]}
        # Sizes that would fail inside a layer are refused here, with a message on what to change.
        if int(params["width"]) % 16:
            raise UsageError(
                f"width={params['width']} is not a multiple of 16, as heads and bottlenecks need. Choose a multiple."
            )
        if model != "resnet" and int(model_params["image"]) % int(model_params["patch"]):
            raise UsageError(
                f"image={model_params['image']} is not a multiple of patch={model_params['patch']}. Choose others."
            )
        if (
            model == "resnet"
            and shared.is_training(model_params)
            and int(model_params["batch"]) * sizes_of(model_params).stage == 1
        ):
            raise UsageError(
                f"batch=1 with image={model_params['image']} leaves one value per channel, too few for a batch norm: "
                "choose a larger batch or image."
            )
        # auto: both for a resnet, one after the other; patches are cut out of channels_last images.
        both = ("contiguous", "channels_last") if model == "resnet" else ("channels_last",)
        return tuple(
            tuple({**model_params, "layout": chosen}.items()) for chosen in (both if layout == "auto" else (layout,))
        )

    def work(self, params: Scalars) -> Work:
        """Counts two products in training for the first layer and three for others: images need no gradient."""
        sizes = sizes_of(params)
        batch = int(params["batch"])
        training = shared.is_training(params)
        flops = (3 if training else 1) * sizes.attention_flops() + sum(
            2.0 * rows * weights * ((2 if kind == "stem" else 3) if training else 1)
            for kind, rows, weights in sizes.products()
        )
        weights = sum(weights for _, _, weights in sizes.products())
        least = 4.0 * weights * (4 if training else 1) + 3.0 * batch * sizes.image**2
        tokens = 0 if sizes.model == "resnet" else batch * (sizes.patches + sizes.text)
        return Work(batch * flops, tokens, least_memory=least)

    def layers(self, params: Scalars) -> tuple[Layer, ...]:
        sizes = sizes_of(params)
        first = {"resnet": "stem", "vit": "patches", "two-input": "image.patches"}[sizes.model]
        low = []
        for path in sizes.low_layers():
            group = "attn" if ".attn." in path else "mlp" if ".mlp." in path else ""
            low.append(Layer(path, "block", group=group))
        return (Layer(first, "stem", high=True), *low, Layer("head", "head", high=True))

    def around(self, params: Scalars) -> tuple[Layer, ...]:
        return sizes_of(params).around()

    def support(self, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        return self.layer_support("block", params, precision, facts)

    def layer_support(self, kind: str, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        if kind not in self.layer_kinds:  # an elementwise operation
            return precision.support(facts)
        sizes = sizes_of(params)
        resnet = sizes.model == "resnet"
        convolved = kind == "stem" or (kind == "block" and resnet)
        support = shared.convolution_support(precision, facts) if convolved else precision.support(facts)
        outputs = sizes.vocabulary if sizes.model == "two-input" else CLASSES
        narrow = sizes.inner if resnet else sizes.width  # all other sides are multiples of it
        stem = 3 * (7 if resnet else sizes.patch) ** 2
        sides = {"stem": (stem, narrow), "block": (narrow,), "head": (sizes.width, outputs)}[kind]
        for product_kind, of_image, _ in sizes.products():
            if product_kind == kind:
                rows = int(params["batch"]) * of_image
                shown = f"a {kind} multiplies {rows} rows, with sides {' and '.join(map(str, sides))}"
                support = shared.require_fit(support, precision, rows, sides, shared.is_training(params), shown)
        return support

    def prepare(self, setup: Setup) -> TrainingState | InferenceState:
        from fp8bench.nn.around import set_around

        state = _state(setup, self.arithmetics(setup), setup.arithmetic.carrier)
        set_around(state.model, setup.around(self.around(setup.params)))
        return state

    def check(self, state: Any) -> str:
        from fp8bench.nn.vision import fault_of

        return fault_of(state)

    def error(self, setup: Setup) -> dict[str, float]:
        """Compares loss and all gradients of a step, or logits, with the same in fp64 throughout."""
        import torch

        from fp8bench.nn.arithmetics import PlainArithmetic
        from fp8bench.nn.vision import outcome
        from fp8bench.numerics import norms

        exact = PlainArithmetic(torch.float64)
        result, gradients = outcome(self.prepare(setup), setup.settles)
        exact_result, exact_gradients = outcome(_state(setup, lambda name: exact, exact.carrier), False)
        if not gradients:
            return {"output_error": norms.relative_frobenius(result, exact_result)}
        return {
            "loss_error": norms.relative_error(float(result), float(exact_result)),
            "gradient_error": norms.joint_relative_frobenius(gradients, exact_gradients),
        }


def _state(setup: Setup, choose: Choose, carrier: torch.dtype) -> TrainingState | InferenceState:
    """Builds a case's model from its seed, with the same weights for every arithmetic and layout, and its batches."""
    import torch

    from fp8bench.nn import training_step, vision
    from fp8bench.nn.image_models import MODELS

    params = setup.params
    sizes = sizes_of(params)
    layout = vision.LAYOUTS[str(params["layout"])]
    with training_step.seed_weights(setup):
        model = MODELS[sizes.model](sizes, choose, layout)
    model = model.double() if carrier is torch.float64 else model
    loader = vision.ImageLoader(sizes, int(params["batch"]), layout, carrier, setup.facts.key, setup.seed)
    if not shared.is_training(params):
        return vision.inference(model, loader)
    return training_step.new_state(setup, model, loader, lambda phase: nullcontext())
