"""Backends that multiply: fp8bench's own emulation, torch's scaled products, torchao's layers, and DeepGEMM."""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fp8bench.errors import BackendMissing
from fp8bench.formats.hardware import (
    emulated,
    has_hopper_units,
    is_amd,
    is_nvidia,
    native,
    refuse_unknown_kind,
    refused,
)
from fp8bench.formats.recipe_support import recipe_on_device
from fp8bench.model import DeviceFacts, Support
from fp8bench.nn.shared_precisions import RecipePrecision, get_recipe, native_arithmetic, refuse_backend_pairing
from fp8bench.protocols import Arithmetic, Backend, Precision, Role
from fp8bench.registry import backends

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


@backends.register("emulated")
class EmulatedProducts(Backend):
    """Emulates products on every device, also if the device has hardware for the format."""

    name = "emulated"
    summary = "values rounded by fp8bench, products in fp32: any recipe and shape, but not faster"

    def support(self, precision: Precision, facts: DeviceFacts) -> Support:
        if facts.accelerated and not (is_nvidia(facts) or is_amd(facts)):
            return refuse_unknown_kind(facts, precision.name)
        return emulated("backend=emulated: values rounded, products in fp32")

    def arithmetic(self, precision: Precision, facts: DeviceFacts) -> Arithmetic:
        from fp8bench.nn.arithmetics import RecipeArithmetic

        return RecipeArithmetic(get_recipe(precision))


@backends.register("torch")
class TorchProducts(Backend):
    """Multiplies with torch's scaled products. Unlike the backend `auto` it never falls back to emulation."""

    name = "torch"
    summary = "only torch's scaled products: refused where torch has none"

    def support(self, precision: Precision, facts: DeviceFacts) -> Support:
        assert isinstance(precision, RecipePrecision)
        # Ask what torch supports: `own_support` does not depend on the chosen backend.
        support = precision.own_support(facts)
        if not support.is_emulated:
            return support
        return refused(f"torch has no such product here ({support.reason}): choose backend=emulated, or auto")

    def arithmetic(self, precision: Precision, facts: DeviceFacts) -> Arithmetic:
        return native_arithmetic(get_recipe(precision), facts)


# For each `plain_mode` (a precision with its options, but without its backend): torchao's name of its recipe.
TORCHAO_RECIPES = {
    "fp8": "tensorwise",
    "fp8-rowwise": "rowwise",
    "fp8-rowwise:weight-gradient=bf16": "rowwise_with_gw_hp",
}


@backends.register("torchao")
class Torchao(Backend):
    """Applies torchao's convert_to_float8_training to each linear layer. The weights are still the float32 parameters
    of fp8bench's model.
    """

    name = "torchao"
    summary = "torchao's float8 layers (tensorwise, rowwise, rowwise_with_gw_hp), native or in its own emulation"
    package = "torchao"
    install = "torchao"
    least = "0.13"
    whole_layers = True

    def support(self, precision: Precision, facts: DeviceFacts) -> Support:
        assert isinstance(precision, RecipePrecision)
        recipe = TORCHAO_RECIPES.get(precision.plain_mode)
        if recipe is None:
            return refuse_backend_pairing(self.name, precision, TORCHAO_RECIPES)
        support = precision.own_support(facts)
        if support.is_native:
            return native(f"torchao's recipe {recipe}, on torch's scaled product")
        if support.is_emulated:
            # Cut the reason at its colon: the rest describes fp8bench's emulation, which torchao does not use.
            reason = support.reason.partition(":")[0]
            return emulated(f"torchao's own emulation of its recipe {recipe}: {reason}")
        return support

    def imported(self) -> None:
        # Silence torchao's warnings about kernels that were built for other versions of Python and torch.
        logging.disable(logging.WARNING)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                import torchao.float8  # noqa: F401
        except (ImportError, RuntimeError, OSError, AttributeError) as error:
            raise BackendMissing(self.name, error) from error
        finally:
            logging.disable(logging.NOTSET)

    def arithmetic(self, precision: Precision, facts: DeviceFacts) -> Arithmetic:
        self.imported()
        import torch
        from torch import nn
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        from fp8bench.nn.whole_layers import LibraryLayer, LibraryLayerArithmetic

        assert isinstance(precision, RecipePrecision)
        recipe_config = Float8LinearConfig.from_recipe_name(TORCHAO_RECIPES[precision.plain_mode])
        config = replace(recipe_config, emulate=self.support(precision, facts).is_emulated)

        def make_linear(weight: nn.Parameter) -> LibraryLayer:
            outputs, inputs = weight.shape
            # On the meta device the layer draws no random numbers. So fp8bench's weights do not depend on the
            # backend.
            linear = nn.Linear(inputs, outputs, bias=False, device="meta")
            linear.weight = weight
            return LibraryLayer(convert_to_float8_training(linear, config=config))

        return LibraryLayerArithmetic(
            self.name, torch.bfloat16, make_linear, separate=lambda: _make_torchao_products(config)
        )

    def why_inseparable(self, precision: Precision) -> str:
        """Returns '', because `_make_torchao_products` calls the casts and products of torchao's layers separately."""
        return ""


def _make_torchao_products(config: Any) -> Arithmetic:
    """Returns the casts and products of torchao's layers (float8_linear.py) as separate functions."""
    import torch
    from torchao.float8.config import ScalingType
    from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim, hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import (
        Float8TrainingTensor,
        GemmInputRole,
        LinearMMConfig,
        ScaledMMConfig,
    )

    from fp8bench.nn.whole_layers import SeparateProductArithmetic

    gemm_configs = (config.gemm_config_output, config.gemm_config_grad_input, config.gemm_config_grad_weight)
    returns_fp8 = False
    mm_config = LinearMMConfig(
        *(
            ScaledMMConfig(config.emulate, gemm_config.use_fast_accum, returns_fp8, config.pad_inner_dim)
            for gemm_config in gemm_configs
        )
    )
    # Two products read each operand: one unchanged, and one transposed. The key has whether the cast is for the product
    # that reads it transposed.
    cast_configs = {
        (Role.INPUT, False): config.cast_config_input,
        (Role.WEIGHT, False): config.cast_config_weight,
        (Role.GRADIENT, False): config.cast_config_grad_output,
        (Role.INPUT, True): config.cast_config_input_for_grad_weight,
        (Role.WEIGHT, True): config.cast_config_weight_for_grad_input,
        (Role.GRADIENT, True): config.cast_config_grad_output_for_grad_weight,
    }
    roles = {
        Role.INPUT: GemmInputRole.INPUT,
        Role.WEIGHT: GemmInputRole.WEIGHT,
        Role.GRADIENT: GemmInputRole.GRAD_OUTPUT,
    }

    def quantise(tensor: Tensor, role: Role, transposed: bool) -> Tensor:
        cast_config = cast_configs[role, transposed]
        # Recipes such as rowwise_with_gw_hp leave some operands in high precision.
        if cast_config.scaling_type is ScalingType.DISABLED:
            return tensor
        quantised_tensor: Tensor = hp_tensor_to_float8_dynamic(
            tensor,
            cast_config.target_dtype,
            mm_config,
            gemm_input_role=roles[role],
            scaling_granularity=cast_config.scaling_granularity,
            axiswise_dim=get_maybe_axiswise_dim(-1, cast_config.scaling_granularity),
            round_scales_to_power_of_2=config.round_scales_to_power_of_2,
        )
        return quantised_tensor

    def restore(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, Float8TrainingTensor):
            return tensor
        # torchao stores the product of value and scale.
        values: Tensor = tensor._data.float() / tensor._scale
        return values

    def multiply(a: Tensor, b: Tensor, dtype: torch.dtype, gradient: bool) -> Tensor:
        # SeparateProductArithmetic expects a times b transposed. torchao does not need `gradient`, because its tensors
        # have their roles.
        return torch.mm(a, b.t()).to(dtype)

    return SeparateProductArithmetic(torch.bfloat16, quantise, multiply, restore)


@backends.register("deepgemm")
class DeepGemm(Backend):
    """Multiplies FP8 blocks with DeepGEMM. The casts are fp8bench's own."""

    name = "deepgemm"
    summary = "DeepGEMM's products of fp8-block on capability 9.0, with fp8bench's casts"
    package = "deep_gemm"
    install = "git+https://github.com/deepseek-ai/DeepGEMM"
    least = "2.0"

    def support(self, precision: Precision, facts: DeviceFacts) -> Support:
        if precision.plain_mode != "fp8-block":
            return refuse_backend_pairing(self.name, precision, ("fp8-block",))
        if not has_hopper_units(facts):
            return refused(
                "DeepGEMM takes float32 scales of blocks only on capability 9.0 (H100, H200): choose backend=auto"
            )
        return native("DeepGEMM's products of blocks, fp8bench's casts")

    def imported(self) -> None:
        try:
            import deep_gemm  # noqa: F401
        # deep_gemm raises AssertionError without a CUDA toolkit
        except (ImportError, AssertionError, RuntimeError, OSError) as error:
            raise BackendMissing(self.name, error) from error

    def arithmetic(self, precision: Precision, facts: DeviceFacts) -> Arithmetic:
        self.imported()
        from fp8bench.nn.block_arithmetic import DeepGemmArithmetic

        # Use the variants of the element formats that this device has in hardware.
        device_recipe = recipe_on_device(get_recipe(precision), facts)
        return DeepGemmArithmetic(device_recipe)
