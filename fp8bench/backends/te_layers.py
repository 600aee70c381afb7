"""The backend te: layers of NVIDIA's Transformer Engine with its recipes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, ClassVar

from fp8bench.errors import BackendMissing
from fp8bench.formats.hardware import is_nvidia, native, nvidia_class, refused
from fp8bench.formats.product_rules import Product, explain_te_refusal
from fp8bench.formats.recipes import Accumulator, ScaleRounding
from fp8bench.model import DeviceFacts, Scalar, Support
from fp8bench.nn.shared_precisions import RecipePrecision, refuse_backend_pairing
from fp8bench.protocols import Arithmetic, Backend, Fused, Precision, Role
from fp8bench.registry import backends

if TYPE_CHECKING:
    from torch import Tensor, nn

# For each mode: the class of Transformer Engine's recipe.
RECIPE_CLASSES = {
    "fp8": "Float8CurrentScaling",
    "fp8-e4m3": "Float8CurrentScaling",
    "fp8-delayed": "DelayedScaling",
    "fp8-block": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}
# Modes whose casts depend only on the tensor and its role. Such casts can be called separately.
_SEPARABLE_CAST_MODES = ("fp8", "fp8-e4m3", "fp8-block", "mxfp8")
_COMPILE_REFUSAL = "te's layers do not become one graph with others: choose compile=no"
# Support is checked for square matrices of this side. It is a multiple of every size that a product requires, because
# the support of a precision must not depend on shapes.
_TYPICAL_MATRIX_SIDE = 4096
# Options of TransformerLayer for a GPT-2 block. The weight qkv holds queries, then keys, then values. Nothing is
# dropped out.
_BLOCK_OPTIONS = {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "self_attn_mask_type": "causal",
    "attn_input_format": "bshd",
    "normalization": "LayerNorm",
    "activation": "gelu",
    "fuse_qkv_params": True,
    "qkv_weight_interleaved": False,
}
_TE_BLOCK_WEIGHT_NAMES = (
    "self_attention.layernorm_qkv.layer_norm_weight",
    "layernorm_mlp.layer_norm_weight",
    "self_attention.layernorm_qkv.weight",
    "self_attention.proj.weight",
    "layernorm_mlp.fc1_weight",
    "layernorm_mlp.fc2_weight",
)
_BLOCK_BIAS_NAMES = ("self_attention.layernorm_qkv.layer_norm_bias", "layernorm_mlp.layer_norm_bias")


@backends.register("te")
class TransformerEngine(Backend):
    """Runs Transformer Engine's layers with fp8bench's float32 weights. The layers cast the weights in each pass, or
    only in the first pass of a step with cached weights.
    """

    name = "te"
    summary = "Transformer Engine's linear layers: current, delayed, block and MXFP8 scaling, NVFP4"
    package = "transformer_engine"
    # Without the extra [pytorch] the package is empty, and its import raises an error.
    install = "transformer-engine[pytorch]"
    least = "2.0"
    whole_layers = True
    caches_weights = True
    refuses: ClassVar[Mapping[tuple[str, Scalar], str]] = {
        ("compile", "yes"): _COMPILE_REFUSAL,
        ("compile", "blocks"): _COMPILE_REFUSAL,
        ("checkpointing", "blocks"): "te's histories would count a recomputed block twice: choose checkpointing=no",
    }

    def support(self, precision: Precision, facts: DeviceFacts) -> Support:
        assert isinstance(precision, RecipePrecision)
        if recipe_arguments(precision) is None:
            return refuse_backend_pairing(self.name, precision, RECIPE_CLASSES)
        if not is_nvidia(facts) or facts.capability is None:
            return refused("Transformer Engine runs on NVIDIA's GPUs: choose backend=auto, or another device")
        device = nvidia_class(facts.capability)
        for operands in precision.recipe.products:
            product = Product(_TYPICAL_MATRIX_SIDE, _TYPICAL_MATRIX_SIDE, _TYPICAL_MATRIX_SIDE, *operands)
            if reason := explain_te_refusal(product, device):
                return refused(f"Transformer Engine: {reason}; this device has {device.words}")
        return native(f"Transformer Engine's {RECIPE_CLASSES[precision.name]}")

    def imported(self) -> None:
        # An empty package raises RuntimeError. Missing CUDA libraries raise OSError.
        try:
            import transformer_engine.common.recipe
            import transformer_engine.pytorch  # noqa: F401
        except (ImportError, RuntimeError, OSError) as error:
            raise BackendMissing(self.name, error) from error

    def arithmetic(self, precision: Precision, facts: DeviceFacts) -> Arithmetic:
        self.imported()
        import torch
        import transformer_engine.pytorch as te

        from fp8bench.nn.whole_layers import LibraryLayer, LibraryLayerArithmetic

        assert isinstance(precision, RecipePrecision)
        recipe = _make_te_recipe(precision)

        def autocast() -> AbstractContextManager[None]:
            context: AbstractContextManager[None] = (
                te.autocast(enabled=True, recipe=recipe)
                if hasattr(te, "autocast")  # older versions have only fp8_autocast
                else te.fp8_autocast(enabled=True, fp8_recipe=recipe)
            )
            return context

        # Make layers on the meta device, where they draw no random numbers. They get fp8bench's weights afterwards.
        layer_options = {"bias": False, "params_dtype": torch.float32, "device": "meta"}
        norm_options = {"eps": 1e-5, "normalization": "RMSNorm"}

        def make_linear(weight: nn.Parameter) -> LibraryLayer:
            outputs, inputs = weight.shape
            return wrap_module(te.Linear(inputs, outputs, **layer_options), {"weight": weight})

        def make_fused_layer(layers: Fused) -> LibraryLayer:
            """Makes one of the three kinds of layers that `Fused` describes."""
            if layers.heads:
                return make_block(layers)
            first_weight, *later_weights = layers.weights
            if not later_weights:  # a norm and one product
                module = te.LayerNormLinear(
                    first_weight.shape[1], first_weight.shape[0], **norm_options, **layer_options
                )
                return wrap_module(module, {"layer_norm_weight": layers.norms[0], "weight": first_weight})
            # A norm and a feed-forward block.
            activation_name = "swiglu" if layers.gated else "gelu"
            options = {"activation": activation_name, **norm_options, **layer_options}
            module = te.LayerNormMLP(first_weight.shape[1], later_weights[0].shape[1], **options)
            return wrap_module(
                module,
                {"layer_norm_weight": layers.norms[0], "fc1_weight": first_weight, "fc2_weight": later_weights[0]},
            )

        def make_block(layers: Fused) -> LibraryLayer:
            """Makes a GPT-2 block."""
            qkv, _, up, _ = layers.weights
            options = {**_BLOCK_OPTIONS, **layer_options}
            module = te.TransformerLayer(qkv.shape[1], up.shape[0], layers.heads, layernorm_epsilon=1e-5, **options)
            weights_by_name = dict(zip(_TE_BLOCK_WEIGHT_NAMES, (*layers.norms, *layers.weights), strict=True))
            # The norms of TransformerLayer have biases, while those of fp8bench's model do not. Use zeros that are
            # not trained.
            zeros = torch.zeros_like(layers.norms[0])
            return wrap_module(
                module, {**weights_by_name, **{name: torch.nn.Parameter(zeros, False) for name in _BLOCK_BIAS_NAMES}}
            )

        def wrap_module(module: Any, weights: Mapping[str, nn.Parameter]) -> LibraryLayer:
            for name, weight in weights.items():
                *path, attribute = name.split(".")
                setattr(reduce(getattr, path, module), attribute, weight)

            def run_module(x: Tensor, is_first_pass: bool | None) -> Tensor:
                """Casts the weights in the first pass of a step, or in each pass if `is_first_pass` is None."""
                with torch.autocast(facts.kind, dtype=torch.bfloat16), autocast():
                    module_output: Tensor = module(x, is_first_microbatch=is_first_pass)
                    return module_output

            return LibraryLayer(
                multiply=lambda x: run_module(x, is_first_pass=None),
                scales=partial(_read_delayed_scales, module),
                multiply_in_step=run_module,
            )

        return LibraryLayerArithmetic(
            backend=self.name,
            carrier=torch.bfloat16,
            build=make_linear,
            around=autocast,
            fuse=make_fused_layer,
            separate=lambda: _make_single_products(recipe, facts),
        )

    def why_inseparable(self, precision: Precision) -> str:
        if precision.name in _SEPARABLE_CAST_MODES:
            return ""
        return (
            f"Transformer Engine casts for {precision.name} only within its layers: choose suite transformer, or "
            f"{', '.join(_SEPARABLE_CAST_MODES)} here"
        )


def _make_single_products(recipe: Any, facts: DeviceFacts) -> Arithmetic:
    """Returns the quantisers and the product that the layers of Transformer Engine 2.20 use, as separate functions."""
    import torch

    from fp8bench.nn.whole_layers import SeparateProductArithmetic

    try:
        from transformer_engine.pytorch.cpp_extensions import general_gemm
        from transformer_engine.pytorch.quantization import RecipeState
    except ImportError as error:  # another version of Transformer Engine has other modules
        raise BackendMissing("te", error) from error
    # A linear layer has quantisers for input, weight and output, and for the gradients of its output and its input.
    forward, backward = (
        RecipeState.create(recipe, mode=mode, num_quantizers=count, device=torch.device(facts.key)).make_quantizers()
        for mode, count in (("forward", 3), ("backward", 2))
    )
    quantisers = {Role.INPUT: forward[0], Role.WEIGHT: forward[1], Role.GRADIENT: backward[0]}
    for quantiser in quantisers.values():
        quantiser.set_usage(rowwise=True, columnwise=False)  # in every operand the last dimension is the contraction

    def quantise(tensor: Tensor, role: Role, transposed: bool) -> Tensor:
        quantised_tensor: Tensor = quantisers[role](tensor.contiguous())
        return quantised_tensor

    def multiply(a: Tensor, b: Tensor, dtype: torch.dtype, gradient: bool) -> Tensor:
        te_gemm_options = getattr(recipe, "fp8_gemm_dgrad" if gradient else "fp8_gemm_fprop", None)
        splits_accumulator = getattr(te_gemm_options, "use_split_accumulator", True)
        product: Tensor = general_gemm(b, a, out_dtype=dtype, layout="TN", use_split_accumulator=splits_accumulator)[0]
        return product

    def dequantise(tensor: Tensor) -> Tensor:
        values: Tensor = tensor.dequantize(dtype=torch.float32)  # type: ignore[call-arg]
        return values

    return SeparateProductArithmetic(torch.bfloat16, quantise, multiply, dequantise)


def recipe_arguments(precision: RecipePrecision) -> dict[str, Any] | None:
    """Returns the arguments with which Transformer Engine's recipe class is called for a precision. Returns None if
    the library has no such recipe.
    """
    recipe, chosen = precision.recipe, precision.chosen
    # Transformer Engine's recipes support only the defaults of the options `accumulator` and `weight-gradient`.
    if (
        precision.name not in RECIPE_CLASSES
        or recipe.high_weight_gradient
        or recipe.accumulator is not Accumulator.FP32
    ):
        return None
    format_keyword_arguments = {"fp8_format": str(chosen["formats"]).upper()} if "formats" in chosen else {}
    if format_keyword_arguments.get("fp8_format") == "E5M2":  # Transformer Engine refuses E5M2 for all roles
        return None
    uses_power_of_two_scales = chosen.get("scale") == ScaleRounding.POWER_OF_TWO
    match precision.name:
        case "fp8" | "fp8-e4m3":
            return {"use_power_2_scales": uses_power_of_two_scales, "fp8_format": "E4M3", **format_keyword_arguments}
        case "fp8-delayed" if recipe.delayed is not None and recipe.delayed.interval == 1:
            delayed = recipe.delayed
            history_arguments = {"amax_history_len": delayed.history, "amax_compute_algo": str(delayed.algorithm)}
            return {"margin": delayed.margin, **history_arguments, **format_keyword_arguments}
        case "fp8-block":
            return {"use_f32_scales": not uses_power_of_two_scales}
        case "mxfp8" if chosen["scale"] == ScaleRounding.RCEIL and chosen["formats"] == "e4m3":
            return {"fp8_format": "E4M3"}
        case "nvfp4" if chosen["scale"] == ScaleRounding.NEAREST:
            return {
                "disable_rht": not recipe.hadamard,
                "disable_stochastic_rounding": not recipe.gradient.stochastic,
                "disable_2d_quantization": chosen["weights"] == "1d",
            }
    return None


def _make_te_recipe(precision: RecipePrecision) -> Any:
    from transformer_engine.common import recipe

    arguments = recipe_arguments(precision)
    assert arguments is not None
    if "fp8_format" in arguments:
        arguments["fp8_format"] = getattr(recipe.Format, arguments["fp8_format"])
    try:
        return getattr(recipe, RECIPE_CLASSES[precision.name])(**arguments)
    except (AttributeError, TypeError) as error:  # this version's recipe class is missing or lacks an argument
        raise BackendMissing("te", error) from error


# Delayed scaling stores its amax histories in two tensors. Each product has three columns in scaling_fwd (its input,
# weight and output), and two in scaling_bwd (the gradients of its output and its input). For each tensor: the columns
# per product, and the roles of those that are listed, which come first.
_HISTORY_COLUMNS = {"scaling_fwd": (3, ("input", "weight")), "scaling_bwd": (2, ("gradient",))}


def _read_delayed_scales(module: nn.Module) -> list[tuple[str, str, float, float]]:
    """Returns four values for each amax history of a module: the name of the layer, the role of the tensor, its largest
    magnitude, and its scale. The list is empty without delayed scaling.
    """
    scales = []
    for part, layer in module.named_modules():
        for key, (columns, roles) in _HISTORY_COLUMNS.items():
            fp8_meta: Any = getattr(layer, "fp8_meta", {}).get(key)
            if not hasattr(fp8_meta, "amax_history"):
                continue
            amaxes_and_scales = enumerate(
                zip(fp8_meta.amax_history.amax(0).tolist(), fp8_meta.scale.tolist(), strict=True)
            )
            for index, (amax, scale) in amaxes_and_scales:
                product, operand_index = divmod(index, columns)
                if operand_index < len(roles):
                    role = roles[operand_index] if not product else f"{roles[operand_index]} of product {product + 1}"
                    scales.append((part, role, amax, scale))
    return scales
