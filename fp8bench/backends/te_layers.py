"""The backend te: layers of NVIDIA's Transformer Engine under its recipes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, ClassVar

from fp8bench.errors import BackendMissing
from fp8bench.formats.hardware import is_nvidia, native, nvidia_class, refused
from fp8bench.formats.product_rules import Product, te_refusal
from fp8bench.formats.recipes import Accumulator, ScaleRounding
from fp8bench.model import DeviceFacts, Scalar, Support
from fp8bench.nn.shared_precisions import RecipePrecision, wrong_pairing
from fp8bench.protocols import Arithmetic, Backend, Fused, Precision, Role
from fp8bench.registry import backends

if TYPE_CHECKING:
    from torch import Tensor, nn

# The class of Transformer Engine's recipe for each mode that may have one.
CLASSES = {
    "fp8": "Float8CurrentScaling",
    "fp8-e4m3": "Float8CurrentScaling",
    "fp8-delayed": "DelayedScaling",
    "fp8-block": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}
# Recipes whose casts depend on nothing but the tensor and its role.
_SEPARABLE = ("fp8", "fp8-e4m3", "fp8-block", "mxfp8")
_SIDE = 4096
# Options of TransformerLayer for a block like GPT-2's, in which qkv holds queries, keys, values and nothing is dropped.
_BLOCK = {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "self_attn_mask_type": "causal",
    "attn_input_format": "bshd",
    "normalization": "LayerNorm",
    "activation": "gelu",
    "fuse_qkv_params": True,
    "qkv_weight_interleaved": False,
}
_BLOCK_WEIGHTS = (
    "self_attention.layernorm_qkv.layer_norm_weight",
    "layernorm_mlp.layer_norm_weight",
    "self_attention.layernorm_qkv.weight",
    "self_attention.proj.weight",
    "layernorm_mlp.fc1_weight",
    "layernorm_mlp.fc2_weight",
)
_BLOCK_BIASES = ("self_attention.layernorm_qkv.layer_norm_bias", "layernorm_mlp.layer_norm_bias")


@backends.register("te")
class TransformerEngine(Backend):
    """Transformer Engine's layers around fp8bench's own float32 weights, which it casts itself in each pass."""

    name = "te"
    summary = "Transformer Engine's linear layers: current, delayed, block and MXFP8 scaling, NVFP4"
    package = "transformer_engine"
    install = "transformer-engine[pytorch]"  # the package by itself is empty, and raises when it is imported
    least = "2.0"
    whole_layers = True
    caches_weights = True
    refuses: ClassVar[Mapping[tuple[str, Scalar], str]] = {
        ("compile", "yes"): "te's layers do not become one graph with others: choose compile=no",
        ("checkpointing", "blocks"): "te's histories would count a recomputed block twice: choose checkpointing=no",
    }

    def support(self, precision: Precision, facts: DeviceFacts) -> Support:
        assert isinstance(precision, RecipePrecision)
        if arguments_of(precision) is None:
            return wrong_pairing(self.name, precision, CLASSES)
        if not is_nvidia(facts) or facts.capability is None:
            return refused("Transformer Engine runs on NVIDIA's GPUs: choose backend=auto, or another device")
        device = nvidia_class(facts.capability)
        for a, b in precision.recipe.products:
            if reason := te_refusal(Product(_SIDE, _SIDE, _SIDE, a, b), device):
                return refused(f"Transformer Engine: {reason}; this device has {device.words}")
        return native(f"Transformer Engine's {CLASSES[precision.name]}")

    def imported(self) -> None:
        # The empty package raises RuntimeError, missing CUDA libraries raise OSError.
        try:
            import transformer_engine.common.recipe
            import transformer_engine.pytorch  # noqa: F401
        except (ImportError, RuntimeError, OSError) as error:
            raise BackendMissing(self.name, error) from error

    def arithmetic(self, precision: Precision, facts: DeviceFacts) -> Arithmetic:
        self.imported()
        import torch
        import transformer_engine.pytorch as te

        from fp8bench.nn.whole_layers import WholeLayer, WholeLayers

        assert isinstance(precision, RecipePrecision)
        recipe = _recipe(precision)

        def autocast() -> AbstractContextManager[None]:
            entered: AbstractContextManager[None] = (
                te.autocast(enabled=True, recipe=recipe)
                if hasattr(te, "autocast")
                else te.fp8_autocast(enabled=True, fp8_recipe=recipe)
            )
            return entered

        # On meta layers draw no random numbers; then they get fp8bench's weights, which stay float32.
        plain = {"bias": False, "params_dtype": torch.float32, "device": "meta"}
        normed = {"eps": 1e-5, "normalization": "RMSNorm"}

        def layer(weight: nn.Parameter) -> WholeLayer:
            outputs, inputs = weight.shape
            return whole(te.Linear(inputs, outputs, **plain), {"weight": weight})

        def fuse(layers: Fused) -> WholeLayer:
            first, *further = layers.weights
            # A whole block, one product after a norm, or a feed-forward part: decided by what the layer fuses.
            if layers.heads:
                return block(layers)
            if not further:
                module = te.LayerNormLinear(first.shape[1], first.shape[0], **normed, **plain)
                return whole(module, {"layer_norm_weight": layers.norms[0], "weight": first})
            activation = "swiglu" if layers.gated else "gelu"
            module = te.LayerNormMLP(first.shape[1], further[0].shape[1], activation=activation, **normed, **plain)
            return whole(module, {"layer_norm_weight": layers.norms[0], "fc1_weight": first, "fc2_weight": further[0]})

        def block(layers: Fused) -> WholeLayer:
            qkv, _, up, _ = layers.weights
            options = {**_BLOCK, **plain}
            module = te.TransformerLayer(qkv.shape[1], up.shape[0], layers.heads, layernorm_epsilon=1e-5, **options)
            names = dict(zip(_BLOCK_WEIGHTS, (*layers.norms, *layers.weights), strict=True))
            # Its norms have biases that GPT-2's lack here: zeros that are not trained.
            zeros = torch.zeros_like(layers.norms[0])
            return whole(module, {**names, **{name: torch.nn.Parameter(zeros, False) for name in _BLOCK_BIASES}})

        def whole(module: Any, weights: Mapping[str, nn.Parameter]) -> WholeLayer:
            for name, weight in weights.items():
                *path, attribute = name.split(".")
                setattr(reduce(getattr, path, module), attribute, weight)

            def in_step(x: Tensor, first: bool | None) -> Tensor:
                with torch.autocast(facts.kind, dtype=torch.bfloat16), autocast():
                    y: Tensor = module(x, is_first_microbatch=first)
                    return y

            return WholeLayer(lambda x: in_step(x, None), partial(_scales, module), in_step)

        return WholeLayers(self.name, torch.bfloat16, layer, autocast, fuse, lambda: _single_products(recipe, facts))

    def why_inseparable(self, precision: Precision) -> str:
        if precision.name in _SEPARABLE:
            return ""
        return (
            f"Transformer Engine casts for {precision.name} within its layers alone: choose suite transformer, or "
            f"{', '.join(_SEPARABLE)} here"
        )


def _single_products(recipe: Any, facts: DeviceFacts) -> Arithmetic:
    """The quantisers that a recipe gives to a layer, and the product that layers call (2.20), one by one."""
    import torch

    from fp8bench.nn.whole_layers import SingleProducts

    try:
        from transformer_engine.pytorch.cpp_extensions import general_gemm
        from transformer_engine.pytorch.quantization import RecipeState
    except ImportError as error:  # a version with other modules
        raise BackendMissing("te", error) from error
    device = torch.device(facts.key)
    forward, backward = (
        RecipeState.create(recipe, mode=mode, num_quantizers=count, device=device).make_quantizers()
        for mode, count in (("forward", 3), ("backward", 2))
    )
    quantisers = {Role.INPUT: forward[0], Role.WEIGHT: forward[1], Role.GRADIENT: backward[0]}
    for quantiser in quantisers.values():
        quantiser.set_usage(rowwise=True, columnwise=False)  # each product's operands come with the contraction last

    def quantise(tensor: Tensor, role: Role, turned: bool) -> Tensor:
        quantised: Tensor = quantisers[role](tensor.contiguous())
        return quantised

    def multiply(a: Tensor, b: Tensor, dtype: torch.dtype, gradient: bool) -> Tensor:
        sums = getattr(recipe, "fp8_gemm_dgrad" if gradient else "fp8_gemm_fprop", None)
        split = getattr(sums, "use_split_accumulator", True)
        product: Tensor = general_gemm(b, a, out_dtype=dtype, layout="TN", use_split_accumulator=split)[0]
        return product

    def dequantise(tensor: Tensor) -> Tensor:
        values: Tensor = tensor.dequantize(dtype=torch.float32)  # type: ignore[call-arg]
        return values

    return SingleProducts(torch.bfloat16, quantise, multiply, dequantise)


def arguments_of(precision: RecipePrecision) -> dict[str, Any] | None:
    """The arguments for the class of a mode's recipe; None if it has no such recipe."""
    recipe, chosen = precision.recipe, precision.chosen
    # Its recipes have fixed accumulators and no high-precision weight gradient.
    if precision.name not in CLASSES or recipe.high_weight_gradient or recipe.accumulator is not Accumulator.FP32:
        return None
    formats = {"fp8_format": str(chosen["formats"]).upper()} if "formats" in chosen else {}
    if formats.get("fp8_format") == "E5M2":  # Transformer Engine refuses it
        return None
    power_of_two = chosen.get("scale") == ScaleRounding.POWER_OF_TWO
    match precision.name:
        case "fp8" | "fp8-e4m3":
            return {"use_power_2_scales": power_of_two, "fp8_format": "E4M3", **formats}
        case "fp8-delayed" if recipe.delayed is not None and recipe.delayed.interval == 1:
            delayed = recipe.delayed
            named = {"amax_history_len": delayed.history, "amax_compute_algo": str(delayed.algorithm)}
            return {"margin": delayed.margin, **named, **formats}
        case "fp8-block":
            return {"use_f32_scales": not power_of_two}
        case "mxfp8" if chosen["scale"] == ScaleRounding.RCEIL and chosen["formats"] == "e4m3":
            return {"fp8_format": "E4M3"}
        case "nvfp4" if chosen["scale"] == ScaleRounding.NEAREST:
            return {
                "disable_rht": not recipe.hadamard,
                "disable_stochastic_rounding": not recipe.gradient.stochastic,
                "disable_2d_quantization": chosen["weights"] == "1d",
            }
    return None


def _recipe(precision: RecipePrecision) -> Any:
    from transformer_engine.common import recipe

    arguments = arguments_of(precision)
    assert arguments is not None
    if "fp8_format" in arguments:
        arguments["fp8_format"] = getattr(recipe.Format, arguments["fp8_format"])
    try:
        return getattr(recipe, CLASSES[precision.name])(**arguments)
    except (AttributeError, TypeError) as error:  # a version without that class or argument
        raise BackendMissing("te", error) from error


# Where delayed scaling keeps its histories: the columns for each product, of which the first belong to operands.
_META = {"scaling_fwd": (3, ("input", "weight")), "scaling_bwd": (2, ("gradient",))}


def _scales(module: nn.Module) -> list[tuple[str, str, float, float]]:
    """Part, product and role, largest magnitude and scale of each history; empty without delayed scaling."""
    scales = []
    for part, layer in module.named_modules():
        for key, (columns, roles) in _META.items():
            meta: Any = getattr(layer, "fp8_meta", {}).get(key)
            if not hasattr(meta, "amax_history"):
                continue
            pairs = enumerate(zip(meta.amax_history.amax(0).tolist(), meta.scale.tolist(), strict=True))
            for index, (amax, scale) in pairs:
                product, place = divmod(index, columns)
                if place < len(roles):
                    role = roles[place] if not product else f"{roles[place]} of product {product + 1}"
                    scales.append((part, role, amax, scale))
    return scales
