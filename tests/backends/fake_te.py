"""An emulated package with the names and arguments of Transformer Engine's sources.

The real package cannot be imported without CUDA libraries. An argument outside the table is an error.
"""

from __future__ import annotations

import types
from contextlib import AbstractContextManager
from enum import Enum
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8bench.nn.arithmetics import RecipeArithmetic
from fp8bench.nn.linear import linear
from fp8bench.nn.shared_precisions import get_recipe
from fp8bench.protocols import Operand, Role, SilentPhases
from fp8bench.registry import precisions
from tests.backends.te_names import recorded

# Transformer Engine's recipe -> the recipe here that computes the same.
MODES = {
    "Float8CurrentScaling": "fp8",
    "DelayedScaling": "fp8-delayed:history=4",
    "Float8BlockScaling": "fp8-block",
    "MXFP8BlockScaling": "mxfp8",
    "NVFP4BlockScaling": "nvfp4:stochastic=off:hadamard=off",
}
KEPT = recorded()


class Format(Enum):
    """Transformer Engine's enumeration."""

    E4M3 = "e4m3"
    HYBRID = "hybrid"
    E5M2 = "e5m2"


class Autocast(AbstractContextManager[None]):
    """Counts how often the outermost one was left: then scales are renewed."""

    open: ClassVar[list[Any]] = []
    left = 0

    def __init__(self, **given: Any) -> None:
        assert set(given) <= set(KEPT["autocast"]) and given["enabled"]
        self._recipe = given["recipe"]

    def __enter__(self) -> None:
        Autocast.open.append(self._recipe)

    def __exit__(self, *raised: object) -> None:
        Autocast.open.pop()
        Autocast.left += not Autocast.open


class Linear(nn.Module):
    """A linear layer whose weight is created on the requested device and may be replaced.

    The recipe comes from autocast.
    """

    def __init__(self, *sizes: int, **given: Any) -> None:
        super().__init__()
        assert set(given) <= set(KEPT["Linear"]) and given["device"] == "meta" and given["bias"] is False
        self.weight = nn.Parameter(torch.empty(sizes[1], sizes[0], dtype=given["params_dtype"], device=given["device"]))
        self.fp8_meta: dict[str, Any] = {}
        self._arithmetic: RecipeArithmetic | None = None
        self._kept: tuple[Operand, Operand] | None = None

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        assert Autocast.open, "te.Linear was called outside of te.autocast"
        recipe = Autocast.open[-1]
        name = type(recipe).__name__
        if self._arithmetic is None:
            self._arithmetic = RecipeArithmetic(get_recipe(precisions.get(MODES[name])))
        if name == "DelayedScaling":
            for key, columns in (("scaling_fwd", 3), ("scaling_bwd", 2)):
                history = torch.zeros(recipe.given["amax_history_len"], columns)
                history[-1, 0] = inp.detach().abs().max()
                self.fp8_meta[key] = SimpleNamespace(amax_history=history, scale=torch.full((columns,), 2.0))
        if is_first_microbatch is None:
            return linear(inp, self.weight, self._arithmetic, SilentPhases())
        if is_first_microbatch:  # stores the weight by its operand's name
            operand, turned = self._arithmetic.cast_both(self.weight, Role.WEIGHT)
            self._kept = operand, turned or self._arithmetic.turn(operand, self.weight, Role.WEIGHT)
        return linear(inp, self.weight, self._arithmetic, SilentPhases(), self._kept)


class LayerNormLinear(Linear):
    """RMS norm and the product behind it."""

    KIND = "LayerNormLinear"

    def __init__(self, *sizes: int, **given: Any) -> None:
        assert set(given) <= set(KEPT[self.KIND]) and given["normalization"] == "RMSNorm" and given["eps"] == 1e-5
        super().__init__(*sizes, **{name: given[name] for name in ("bias", "params_dtype", "device")})
        self.layer_norm_weight = nn.Parameter(torch.empty(sizes[0], device=given["device"]))
        self.activation = given.get("activation", "")

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        return super().forward(self.normed(inp), is_first_microbatch)

    def normed(self, inp: Tensor) -> Tensor:
        return F.rms_norm(inp.float(), inp.shape[-1:], self.layer_norm_weight, 1e-5).to(torch.bfloat16)


class LayerNormMLP(LayerNormLinear):
    """The whole block."""

    KIND = "LayerNormMLP"
    fc1_weight: nn.Parameter
    fc2_weight: nn.Parameter

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        assert is_first_microbatch is None, "two weights of this one share a place here"
        self.weight = self.fc1_weight
        hidden = Linear.forward(self, self.normed(inp))
        gate, *value = hidden.chunk(2, dim=-1) if self.activation == "swiglu" else (hidden,)
        hidden = F.silu(gate) * value[0] if value else F.gelu(gate, approximate="tanh")
        self.weight = self.fc2_weight
        return Linear.forward(self, hidden)


class TransformerLayer(nn.Module):
    """GPT-2's block, of whole layers; attention by torch."""

    def __init__(self, width: int, hidden: int, heads: int, **given: Any) -> None:
        super().__init__()
        assert set(given) <= set(KEPT["TransformerLayer"]) and given["qkv_weight_interleaved"] is False
        assert given["hidden_dropout"] == given["attention_dropout"] == 0.0 and given["attn_input_format"] == "bshd"
        plain = {name: given[name] for name in ("bias", "params_dtype", "device")}
        self.heads = heads
        self.self_attention, self.layernorm_mlp = nn.Module(), nn.Module()
        self.self_attention.layernorm_qkv = Linear(width, 3 * width, **plain)
        self.self_attention.proj = Linear(width, width, **plain)
        self.up, self.down = Linear(width, hidden, **plain), Linear(hidden, width, **plain)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        first = is_first_microbatch
        attention, mlp, shape = self.self_attention, self.layernorm_mlp, x.shape[-1:]
        normed = F.layer_norm(
            x.float(), shape, attention.layernorm_qkv.layer_norm_weight, attention.layernorm_qkv.layer_norm_bias
        )
        parts = attention.layernorm_qkv(normed.to(x.dtype), first).chunk(3, dim=-1)
        q, k, v = (item.view(*x.shape[:2], self.heads, -1).transpose(1, 2) for item in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + attention.proj(mixed, first)
        normed = F.layer_norm(x.float(), shape, mlp.layer_norm_weight, mlp.layer_norm_bias).to(x.dtype)
        self.up.weight, self.down.weight = mlp.fc1_weight, mlp.fc2_weight
        y: Tensor = x + self.down(F.gelu(self.up(normed, first), approximate="tanh"), first)
        return y


def _recipe_class(name: str) -> type:
    def made(self: Any, **given: Any) -> None:
        assert set(given) <= set(KEPT[name]), f"{name} has no {set(given) - set(KEPT[name])}"
        self.given = given

    return type(name, (), {"__init__": made})


class Quantiser:
    """Stores only row-wise codes, as set before the cast; the result is a tensor of this package."""

    def __init__(self, recipe: str, role: Role, device: torch.device) -> None:
        assert device.type == "cpu"
        self._arithmetic, self._role = RecipeArithmetic(get_recipe(precisions.get(MODES[recipe]))), role
        self._usage: tuple[bool, bool] = True, True

    def set_usage(self, *, rowwise: bool, columnwise: bool) -> None:
        self._usage = rowwise, columnwise

    def __call__(self, tensor: Tensor) -> Quantised:
        assert self._usage == (True, False) and tensor.is_contiguous()
        return Quantised(self._arithmetic.cast(tensor, self._role).data)


class Quantised(NamedTuple):
    """The output of a quantiser."""

    values: Tensor

    def dequantize(self, *, dtype: torch.dtype) -> Tensor:
        return self.values.to(dtype)


class RecipeState:
    """Makes quantisers in the order of Transformer Engine's: input, weight, output; or both gradients."""

    ROLES: ClassVar[dict[str, tuple[Role, ...]]] = {
        "forward": (Role.INPUT, Role.WEIGHT, Role.INPUT),
        "backward": (Role.GRADIENT, Role.GRADIENT),
    }

    def __init__(self, recipe: Any, mode: str, device: torch.device) -> None:
        self._made = [Quantiser(type(recipe).__name__, role, device) for role in self.ROLES[mode]]

    @staticmethod
    def create(recipe: Any, *, mode: str, num_quantizers: int, device: torch.device) -> RecipeState:
        assert num_quantizers == len(RecipeState.ROLES[mode])
        return RecipeState(recipe, mode, device)

    def make_quantizers(self) -> list[Quantiser]:
        return self._made


def general_gemm(
    A: Quantised,  # noqa: N803
    B: Quantised,  # noqa: N803
    out_dtype: torch.dtype | None = None,
    layout: str = "TN",
    use_split_accumulator: bool = False,
) -> tuple[Tensor, None, None, None]:
    """B times transposed A, as its layers call it."""
    assert layout == "TN" and isinstance(use_split_accumulator, bool)
    return (B.values.float() @ A.values.float().t()).to(out_dtype), None, None, None


def install(patch: pytest.MonkeyPatch) -> None:
    """Installs the fake package and records calls of torch's CUDA autocast, which is missing here."""
    package, pytorch, common, recipe = (
        types.ModuleType(f"transformer_engine{name}") for name in ("", ".pytorch", ".common", ".common.recipe")
    )
    for name in MODES:
        setattr(recipe, name, _recipe_class(name))
    vars(recipe)["Format"] = Format
    vars(pytorch).update(Linear=Linear, LayerNormLinear=LayerNormLinear, LayerNormMLP=LayerNormMLP, autocast=Autocast)
    vars(pytorch).update(TransformerLayer=TransformerLayer)
    vars(common)["recipe"] = recipe
    vars(package).update(pytorch=pytorch, common=common)
    extensions, quantization = (
        types.ModuleType(f"{pytorch.__name__}.{name}") for name in ("cpp_extensions", "quantization")
    )
    vars(extensions)["general_gemm"], vars(quantization)["RecipeState"] = general_gemm, RecipeState
    for module in (package, pytorch, common, recipe, extensions, quantization):
        patch.setitem(__import__("sys").modules, module.__name__, module)
    patch.setattr(Autocast, "left", 0)

    class Cuda(AbstractContextManager[None]):
        def __init__(self, kind: str, dtype: torch.dtype) -> None:
            assert (kind, dtype) == ("cuda", torch.bfloat16)  # required for float32 weights

        def __exit__(self, *raised: object) -> None:
            return None

    patch.setattr(torch, "autocast", Cuda)
