"""The suite vision: a training step, or inference, of a model for images, or for images and text."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from fp8bench.errors import UsageError
from fp8bench.model import DeviceFacts, Params, Scalars, Support, Work
from fp8bench.nn import shared_workloads as shared
from fp8bench.nn.sizes import IMAGE_CLASS_COUNT, VisionSizes
from fp8bench.protocols import Grid, Layer, Precision, Setup
from fp8bench.protocols.axes import Axis
from fp8bench.registry import workloads

if TYPE_CHECKING:
    import torch

    from fp8bench.nn.linear import ChooseArithmetic
    from fp8bench.nn.training_step import TrainingState
    from fp8bench.nn.vision import InferenceState

_MODEL_NAMES = ("resnet", "vit", "two-input")
# The suite's parameters that each model ignores.
_UNUSED_PARAMETERS_BY_MODEL = {"resnet": ("patch", "text"), "vit": ("text",), "two-input": ()}


def read_sizes(params: Scalars) -> VisionSizes:
    model = str(params["model"])
    names = (
        name for name in ("image", "width", "layers", "patch", "text") if name not in _UNUSED_PARAMETERS_BY_MODEL[model]
    )
    return VisionSizes(model, **{name: int(params[name]) for name in names if name in params})


@workloads.register("vision")
class Vision(shared.TrainingWorkload):
    """Times a vision model. Its first product, its head and elementwise operations stay in high precision unless a
    precision map changes them. The core of attention always stays in high precision.
    """

    name = "vision"
    summary = "a ResNet stage by memory layout, a ViT block, or a model of images and text: training or inference"
    uses_corpus = False
    layer_kinds = ("stem", "block", "head")
    batch_axis = "batch"
    history = Grid(
        cpu={"model": _MODEL_NAMES, "width": ("64",), "layout": ("channels_last",)},
        gpu={"model": _MODEL_NAMES, "width": ("1024",), "layout": ("channels_last",)},
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
                "resnet: its stem and a stage of bottlenecks; vit: patches and blocks; two-input: a vit, "
                "then as many causal blocks over image and text tokens",
                *_MODEL_NAMES,
            ),
            Axis.count("batch", "images in a batch", batch, high=1 << 16),
            Axis.count("image", "height and width of an image", image, high=1 << 12),
            Axis.count("patch", "height and width of a patch, in all models but resnet", patch, high=1 << 10),
            Axis.count(
                "width",
                "features of the residual stream, a multiple of 16; inside a resnet's bottlenecks a quarter of it",
                width,
                high=1 << 14,
            ),
            Axis.count("layers", "blocks, or bottlenecks", layers, high=256),
            Axis.count("text", "text tokens for each image of two-input", text, high=1 << 14),
            Axis.choice(
                "layout",
                "memory layout of images and weights; auto: both layouts for a resnet, channels_last for other models",
                "auto",
                "contiguous",
                "channels_last",
            ),
            shared.PASS,
        )

    def expand(self, params: Scalars) -> tuple[Params, ...]:
        model = str(params["model"])
        model_params = {name: value for name, value in params.items() if name not in _UNUSED_PARAMETERS_BY_MODEL[model]}
        # Refuse sizes that would fail inside a layer, and suggest a change.
        if int(params["width"]) % 16:
            raise UsageError(
                f"width={params['width']} is not a multiple of 16, as heads and bottlenecks need. Choose a multiple."
            )
        if model != "resnet" and int(model_params["image"]) % int(model_params["patch"]):
            raise UsageError(
                f"image={model_params['image']} is not a multiple of patch={model_params['patch']}. Choose others."
            )
        values_per_channel = int(model_params["batch"]) * read_sizes(model_params).stage_side
        if model == "resnet" and shared.is_training(model_params) and values_per_channel == 1:
            raise UsageError(
                f"batch=1 with image={model_params['image']} leaves one value per channel, too few for a batch norm: "
                "choose a larger batch or image."
            )
        layouts = [params["layout"]]
        if layouts == ["auto"]:
            # Time a resnet in both layouts. Other models get channels_last images, from which they cut patches.
            layouts = ["contiguous", "channels_last"] if model == "resnet" else ["channels_last"]
        return tuple(tuple({**model_params, "layout": layout}.items()) for layout in layouts)

    def work(self, params: Scalars) -> Work:
        """Counts the FLOPs of a step. In training, the first layer has two products and all others three, because
        images need no gradient.
        """
        sizes = read_sizes(params)
        batch = int(params["batch"])
        is_training = shared.is_training(params)
        product_flops = 0.0
        weight_count = 0
        for kind, rows, weights in sizes.products():
            products_per_weight = 1 if not is_training else 2 if kind == "stem" else 3
            product_flops += 2.0 * rows * weights * products_per_weight
            weight_count += weights
        flops = (3 if is_training else 1) * sizes.attention_flops() + product_flops
        # The least memory: weights in fp32, in training also gradients and two moments, and a byte for each of three
        # colours of a pixel.
        least_memory_bytes = 4.0 * weight_count * (4 if is_training else 1) + 3.0 * batch * sizes.image**2
        tokens = 0 if sizes.model == "resnet" else batch * (sizes.patches + sizes.text)
        return Work(batch * flops, tokens, least_memory=least_memory_bytes)

    def layers(self, params: Scalars) -> tuple[Layer, ...]:
        sizes = read_sizes(params)
        first_layer_name = {"resnet": "stem", "vit": "patches", "two-input": "image.patches"}[sizes.model]
        convertible_layers = []
        for path in sizes.low_layers():
            group = "attn" if ".attn." in path else "mlp" if ".mlp." in path else ""
            convertible_layers.append(Layer(path, "block", group=group))
        return (Layer(first_layer_name, "stem", high=True), *convertible_layers, Layer("head", "head", high=True))

    def around(self, params: Scalars) -> tuple[Layer, ...]:
        return read_sizes(params).around()

    def support(self, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        return self.layer_support("block", params, precision, facts)

    def layer_support(self, kind: str, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        if kind not in self.layer_kinds:  # all other layers are elementwise operations
            return precision.support(facts)
        sizes = read_sizes(params)
        is_resnet = sizes.model == "resnet"
        is_convolution = kind == "stem" or (kind == "block" and is_resnet)
        support = shared.convolution_support(precision, facts) if is_convolution else precision.support(facts)
        outputs = sizes.vocabulary if sizes.model == "two-input" else IMAGE_CLASS_COUNT
        # The blocks' products have only multiples of this size as sides.
        common_product_side = sizes.inner_width if is_resnet else sizes.width
        stem_product_inputs = 3 * (7 if is_resnet else sizes.patch) ** 2
        sides = {
            "stem": (stem_product_inputs, common_product_side),
            "block": (common_product_side,),
            "head": (sizes.width, outputs),
        }[kind]
        for product_kind, image_rows, _ in sizes.products():
            if product_kind == kind:
                rows = int(params["batch"]) * image_rows
                size_text = f"a {kind} multiplies {rows} rows, with sides {' and '.join(map(str, sides))}"
                support = shared.refuse_unfit_sizes(
                    support, precision, rows, sides, shared.is_training(params), size_text
                )
        return support

    def prepare(self, setup: Setup) -> TrainingState | InferenceState:
        from fp8bench.nn.around import set_surrounding_arithmetics

        state = _make_vision_state(setup, self.arithmetics(setup), setup.arithmetic.carrier)
        set_surrounding_arithmetics(state.model, setup.around(self.around(setup.params)))
        return state

    def check(self, state: Any) -> str:
        from fp8bench.nn.vision import find_step_fault

        return find_step_fault(state)

    def error(self, setup: Setup) -> dict[str, float]:
        """Compares loss and gradients of a training step, or logits of inference, with the same results in fp64."""
        import torch

        from fp8bench.nn.arithmetics import PlainArithmetic
        from fp8bench.nn.vision import compute_batch_results
        from fp8bench.numerics import norms

        exact = PlainArithmetic(torch.float64)
        result, gradients = compute_batch_results(self.prepare(setup), setup.settles)
        exact_result, exact_gradients = compute_batch_results(
            _make_vision_state(setup, lambda name: exact, exact.carrier), False
        )
        if not gradients:
            return {"output_error": norms.relative_frobenius(result, exact_result)}
        return {
            "loss_error": norms.relative_error(float(result), float(exact_result)),
            "gradient_error": norms.joint_relative_frobenius(gradients, exact_gradients),
        }


def _make_vision_state(setup: Setup, choose: ChooseArithmetic, carrier: torch.dtype) -> TrainingState | InferenceState:
    """Builds the model and the batches of a case from its seed. Initial weights are the same for every arithmetic and
    layout.
    """
    import torch

    from fp8bench.nn import training_step, vision
    from fp8bench.nn.image_models import IMAGE_MODEL_CLASSES

    params = setup.params
    sizes = read_sizes(params)
    layout = vision.MEMORY_FORMATS[str(params["layout"])]
    with training_step.seed_weights(setup):
        model = IMAGE_MODEL_CLASSES[sizes.model](sizes, choose, layout)
    model = model.double() if carrier is torch.float64 else model
    loader = vision.ImageLoader(sizes, int(params["batch"]), layout, carrier, setup.facts.key, setup.seed)
    if not shared.is_training(params):
        return vision.make_inference_state(model, loader)
    return training_step.make_training_state(setup, model, loader, lambda phase: nullcontext())
