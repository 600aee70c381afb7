"""The work of an operator: the number of floating-point operations, and its kind, by its name and location.

FLOPs are the products and sums of operators that multiply tensors with each other. torch has formulas for some
operators (torch.utils.flop_counter), none for others, and a wrong one for the backward of grouped convolutions. An
operator is unknown if it has a formula neither here nor there and is not known to multiply nothing. Kinds follow rules
as data: first the phases of a suite, then optimizers and the nodes that keep gradients, then names.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import torch

from fp8bench.model import UNATTRIBUTED, Phase
from fp8bench.model.step import ShareKind
from fp8bench.tape.recorder import Call, TensorSeen, arguments_of, is_view, name_of, operator_name, tensors_in

# A formula gets the arguments by name, and the result under ''. FORMULAS pairs it with the argument whose dtype it
# multiplies in.
Named = Mapping[str, Any]
Formula = Callable[[Named], int]
# M, N, K and the number of products (..., M, K) times (..., K, N).
Product = tuple[int, int, int, int]


def _elements(tensor: TensorSeen) -> int:
    """Counts the numbers of a tensor: an element of torch's holds two in E2M1."""
    packed = getattr(torch, "float4_e2m1fn_x2", None)
    return math.prod(tensor.shape) * (2 if tensor.dtype is packed else 1)


def _product(first: str, second: str) -> tuple[str, Formula]:
    """Counts 2MNK, for any number of matrices: each number on the left meets a row of N on the right."""

    def flops(named: Named) -> int:
        columns = int(named[""].shape[-1]) if len(named[second].shape) > 1 else 1
        return 2 * _elements(named[first]) * columns

    return first, flops


def _grouped_flops(named: Named) -> int:
    """Counts products of groups of rows (or columns) with a matrix each; each row is in one group."""
    a = named["self"]
    b = named["mat2"]
    apart = len(a.shape) == 3 and len(b.shape) == 2  # columns of b are divided among the matrices of a
    return 2 * _elements(a) * int(b.shape[-1]) // (int(a.shape[0]) if apart else 1)


def _flops_formula(products: Callable[[Named], list[Product]]) -> Formula:
    return lambda named: sum(2 * m * n * k * times for m, n, k, times in products(named))


def convolution_shapes(named: Named) -> list[Product]:
    """Counts windows over the edge in full. Weights are (out, in / groups, window), or turned if transposed."""
    outputs, window, places, groups = _sides(named, named[""])
    return [(places, outputs, window, groups)]


def convolution_backward_shapes(named: Named) -> list[Product]:
    """Counts as much as forward for each requested gradient, of the input and of the weight."""
    outputs, window, places, groups = _sides(named, named["grad_output"])
    for_input, for_weight = named["output_mask"][:2]
    products = [((places, window, outputs, groups), for_input), ((outputs, window, places, groups), for_weight)]
    return [product for product, is_needed in products if is_needed]


def _sides(named: Named, out: Any) -> tuple[int, int, int, int]:
    """Returns, for each group, outputs, the numbers of a window and places; and the number of groups."""
    weight = named["weight"]
    x = named.get("input", named.get("self"))
    places = x if named.get("transposed") else out
    groups = int(named.get("groups", 1))
    return (
        weight.shape[0] // groups,
        math.prod(weight.shape[1:]),
        places.shape[0] * math.prod(places.shape[2:]),
        groups,
    )


def _pairs(named: Named) -> float:
    """Counts pairs of a query and a key that a head processes; under a causal mask half of the diagonal counts."""
    queries = int(named["query"].shape[-2])
    keys = int(named["key"].shape[-2])
    if not named.get("is_causal"):
        return queries * keys
    square = min(queries, keys)
    return square * square / 2 + (queries - square) * keys


def _attention(products: tuple[int, int]) -> Formula:
    """Returns a formula that counts these many products along the width of the keys' heads, and of the values'."""

    def flops(named: Named) -> int:
        query = named["query"]
        value = named["value"]
        heads = math.prod(query.shape[:-2])
        (of_keys, of_values) = products
        return int(2 * heads * _pairs(named) * (of_keys * query.shape[-1] + of_values * value.shape[-1]))

    return flops


# Backward recomputes the scores, and computes gradients of values, probabilities, queries and keys.
_FORWARD = ("query", _attention((1, 1)))
_BACKWARD = ("query", _attention((3, 2)))


def _lstm(times: int, *weights: str) -> tuple[str, Formula]:
    def flops(named: Named) -> int:
        steps: int = math.prod(named["input"].shape[:2])
        return times * 2 * steps * sum(_elements(named[weight]) for weight in weights)

    return "input", flops


_SDPA = "_scaled_dot_product_{}attention{}"
FORMULAS: dict[str, tuple[str, Formula]] = {
    **dict.fromkeys(("mm", "bmm", "_int_mm", "_scaled_mm", "_scaled_mm_v2"), _product("self", "mat2")),
    **dict.fromkeys(("_weight_int8pack_mm", "_weight_int4pack_mm", "_weight_int4pack_mm_for_cpu"),
                    _product("self", "mat2")),
    **dict.fromkeys(("addmm", "_addmm_activation"), _product("mat1", "mat2")),
    **dict.fromkeys(("baddbmm", "addbmm"), _product("batch1", "batch2")),
    "mv": _product("self", "vec"),
    "addmv": _product("mat", "vec"),
    "dot": _product("self", "tensor"),
    "vdot": _product("self", "other"),
    # Squares of the lengths, and ones, are two more columns on each side.
    "_euclidean_dist": ("x1", lambda named: 2 * math.prod(named[""].shape) * (int(named["x1"].shape[-1]) + 2)),
    "addr": ("vec1", lambda named: 2 * _elements(named["vec1"]) * _elements(named["vec2"])),
    "_grouped_mm": ("self", _grouped_flops),
    "_scaled_grouped_mm": ("self", _grouped_flops),
    "_scaled_grouped_mm_v2": ("self", _grouped_flops),
    **dict.fromkeys(("convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution",
                     "convolution_overrideable"), ("weight", _flops_formula(convolution_shapes))),
    "convolution_backward": ("weight", _flops_formula(convolution_backward_shapes)),
    "convolution_backward_overrideable": ("weight", _flops_formula(convolution_backward_shapes)),
    **{_SDPA.format(kernel, end): formula
       for end, formula in (("", _FORWARD), ("_backward", _BACKWARD))
       for kernel in ("flash_", "efficient_", "cudnn_", "fused_")},
    "_scaled_dot_product_flash_attention_for_cpu": _FORWARD,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _BACKWARD,
    "mkldnn_rnn_layer": _lstm(1, "weight0", "weight1"),
    "mkldnn_rnn_layer_backward": _lstm(2, "weight1", "weight2"),
    "fp8bench::short_product": ("a", lambda named: 2 * _elements(named["a"]) * int(named["b"].shape[0])),
    "fp8bench::rotated_and_looked_at": (
        "matrix", lambda named: 2 * _elements(named["x"]) * int(named["matrix"].shape[-1]),
    ),
}  # fmt: skip

# Operators that multiply tensors at most elementwise, in addition to those that torch has tags for.
_WORDS = """
_adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward
adaptive_max_pool2d adaptive_max_pool2d_backward alias_copy _aminmax _amp_foreach_non_finite_check_and_unscale_
_amp_update_scale_ arange as_strided as_strided_scatter _assert_async _assert_scalar avg_pool2d avg_pool2d_backward
avg_pool3d avg_pool3d_backward batch_norm_backward _batch_norm_no_update _batch_norm_with_update
_batch_norm_with_update_functional bernoulli binary_cross_entropy binary_cross_entropy_backward bincount block_diag
bucketize cat cauchy _chunk_cat col2im complex _conj_copy constant_pad_nd copy cudnn_batch_norm
cudnn_batch_norm_backward cummax cummin cumprod cumsum diag_embed diagonal_backward diagonal_scatter elu_backward
embedding _embedding_bag _embedding_bag_backward _embedding_bag_dense_backward _embedding_bag_forward_only
_embedding_bag_per_sample_weights_backward embedding_dense_backward embedding_renorm empty empty_like empty_permuted
empty_strided exponential eye _fake_quantize_learnable_per_channel_affine
_fake_quantize_learnable_per_tensor_affine fake_quantize_per_channel_affine_cachemask
fake_quantize_per_tensor_affine_cachemask _fake_quantize_per_tensor_affine_cachemask_tensor_qparams fill flip
floor_divide _foreach_clone _foreach_copy _foreach_max _foreach_norm _foreach_powsum _foreach_zero full full_like
_functional_assert_async _fused_adagrad _fused_adam _fused_adamw _fused_dropout _fused_rms_norm
_fused_rms_norm_backward _fused_sdp_choice _fused_sgd gather geometric glu glu_backward grid_sampler_2d
grid_sampler_2d_backward hardshrink_backward hardsigmoid_backward hardswish hardswish_backward hardtanh_backward histc
huber_loss huber_loss_backward im2col index index_add index_copy index_fill index_put _index_put_impl index_reduce
index_select _is_all_true _is_any_true is_pinned is_same_size isin kthvalue leaky_relu_backward lift lift_fresh
lift_fresh_copy _linalg_check_errors linspace _local_scalar_dense log_normal log_sigmoid_backward log_sigmoid_forward
_log_softmax _log_softmax_backward_data _logcumsumexp logcumsumexp logspace masked_fill _masked_scale masked_scatter
masked_select _masked_softmax _masked_softmax_backward max_pool2d_with_indices max_pool2d_with_indices_backward
max_pool3d_with_indices max_pool3d_with_indices_backward median miopen_batch_norm miopen_batch_norm_backward mish mode
mse_loss mse_loss_backward multinomial nanmedian narrow_copy native_batch_norm native_batch_norm_backward
_native_batch_norm_legit _native_batch_norm_legit_functional _native_batch_norm_legit_no_training native_dropout
native_dropout_backward native_group_norm native_group_norm_backward native_layer_norm native_layer_norm_backward
new_empty new_empty_strided new_full new_ones new_zeros nll_loss2d_backward nll_loss2d_forward nll_loss_backward
nll_loss_forward nonzero normal ones ones_like _pin_memory pixel_shuffle pixel_unshuffle poisson polar _prelu_kernel
_prelu_kernel_backward put rand rand_like randint randint_like randn randn_like random randperm record_stream
reflection_pad1d reflection_pad1d_backward reflection_pad2d reflection_pad2d_backward renorm repeat repeat_interleave
replication_pad2d replication_pad2d_backward _reshape_copy resize _resize_output roll rot90 rrelu_with_noise
_safe_softmax scalar_tensor scatter scatter_add scatter_reduce searchsorted select_backward select_scatter set
slice_backward slice_scatter smooth_l1_loss smooth_l1_loss_backward _softmax _softmax_backward_data softplus_backward
softshrink_backward sort split_with_sizes_copy _stack stack take _thnn_fused_gru_cell _thnn_fused_gru_cell_backward
_thnn_fused_lstm_cell _thnn_fused_lstm_cell_backward_impl threshold _to_copy _to_dense topk trace tril tril_indices
triu triu_indices unfold_backward uniform _unique _unique2 unique_consecutive unique_dim _unsafe_index
_unsafe_index_put _unsafe_masked_index _unsafe_masked_index_put_accumulate unsafe_split unsafe_split_with_sizes
_unsafe_view upsample_bicubic2d upsample_bicubic2d_backward upsample_bilinear2d upsample_bilinear2d_backward
upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest2d_backward view_copy _weight_norm_interface
_weight_norm_interface_backward zero zeros zeros_like
"""
_NOTHING = frozenset(_WORDS.split())
# torch's tags of operators that work elementwise, or add numbers up.
_TAGS = ("pointwise", "reduction")


def flops_of(call: Call) -> tuple[int | None, str]:
    """Returns the FLOPs of a call, and the argument whose dtype it multiplies in. FLOPs are None if unknown, as those
    of sparse tensors, and 0 if the call multiplies nothing."""
    # Sparse tensors have no strides, and their work depends on the values.
    if multiplies(call.operator) and any(tensor.stride is None for tensor in tensors_in(call.given)):
        return None, ""
    entry = _formula_of(name_of(call))
    if entry is not None:
        argument, formula = entry
        result = next(tensors_in(call.result), None)
        return formula({**arguments_of(call), "": result}), argument
    # torch knows some operators that have no formula here.
    formula_of_torch = _formula_of_torch(call.operator)
    if formula_of_torch is not None:
        return _by_torch(call, formula_of_torch), next(iter(arguments_of(call)), "")
    return (None if multiplies(call.operator) is None else 0), ""


def multiplies(operator: Any) -> bool | None:
    """Whether an operator multiplies tensors with each other; None if unknown."""
    name = operator_name(operator)
    if _formula_of(name) is not None or _formula_of_torch(operator) is not None:
        return True
    return False if _multiplies_nothing(operator) else None


def _formula_of(name: str) -> tuple[str, Formula] | None:
    return FORMULAS.get(name) or FORMULAS.get(name.removesuffix("_"))


def _formula_of_torch(operator: Any) -> Callable[..., int] | None:
    """Returns torch's formula, or one registered with torch, of an operator that may multiply."""
    # The module imports triton, which takes 0.3 s; nobody has registered a formula before it is imported.
    if "torch.utils.flop_counter" not in sys.modules and _multiplies_nothing(operator):
        return None
    from torch.utils.flop_counter import flop_registry

    return flop_registry.get(getattr(operator, "overloadpacket", operator))


def _by_torch(call: Call, formula: Callable[..., int]) -> int | None:
    """Returns the result of torch's formula, or one registered with torch; None if it needs the numbers of tensors."""

    def shapes(value: Any) -> Any:
        return value.shape if isinstance(value, TensorSeen) else value

    try:
        named = {name: shapes(argument) for name, argument in call.named.items()}
        return int(formula(*map(shapes, call.given), **named, out_val=shapes(call.result)))
    except Exception:  # noqa: BLE001 - the formula may be foreign code
        return None


@cache
def _multiplies_nothing(operator: Any) -> bool:
    name = operator_name(operator)
    if name.startswith("fp8bench::"):
        return True  # quantisers; operators that multiply have a formula above
    if operator.namespace != "aten":
        return False
    base = name.removesuffix("_").removeprefix("_foreach_")
    if name.removesuffix("_") in _NOTHING or base in _NOTHING or is_view(operator):
        return True
    packets = [getattr(torch.ops.aten, text, None) for text in (name, base)]
    overloads = [operator]
    for packet in packets:
        if packet is not None:
            overloads += [getattr(packet, word) for word in packet.overloads()]
    tags = chain.from_iterable(overload.tags for overload in overloads)
    return any(tag.name in _TAGS for tag in tags)


KEEPS_GRADIENTS = "AccumulateGrad"
# All of such a phase is of one kind; in other phases the operators decide.
_PHASE_KINDS = {
    Phase.CAST: ShareKind.CAST,
    Phase.ATTENTION: ShareKind.ATTENTION,
    Phase.ACCUMULATE: ShareKind.ACCUMULATE,
    Phase.OPTIMIZER_STEP: ShareKind.OPTIMIZER,
}
# Prefixes of names; the first that matches decides.
_PREFIXES: tuple[tuple[str, ShareKind], ...] = (
    ("_scaled_dot_product", ShareKind.ATTENTION), ("scaled_dot_product", ShareKind.ATTENTION),
    ("_flash_attention", ShareKind.ATTENTION), ("_efficient_attention", ShareKind.ATTENTION),
    ("_cudnn_attention", ShareKind.ATTENTION), ("flex_attention", ShareKind.ATTENTION),
    ("_safe_softmax", ShareKind.ATTENTION), ("_fused_sdp_choice", ShareKind.ATTENTION),
    ("_fused_adam", ShareKind.OPTIMIZER), ("_fused_sgd", ShareKind.OPTIMIZER), ("_fused_adagrad", ShareKind.OPTIMIZER),
    ("fake_quantize", ShareKind.CAST), ("_fake_quantize", ShareKind.CAST), ("quantize", ShareKind.CAST),
    ("dequantize", ShareKind.CAST),
)  # fmt: skip
# Operators of unfused attention, in modules whose name contains attention.
_IN_ATTENTION = frozenset(
    ("bmm", "baddbmm", "_softmax", "_softmax_backward_data", "_masked_softmax", "_masked_softmax_backward")
)
_SAYS_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
# Casts if they convert between floating-point dtypes, else copies.
CONVERTING = frozenset(("_to_copy", "copy_", "copy", "_foreach_copy_", "_copy_from"))
_NAMES: Mapping[ShareKind, str] = {
    ShareKind.COPY: """
clone _foreach_clone cat stack _stack _chunk_cat contiguous repeat repeat_interleave _reshape_copy view_copy
expand_copy slice_backward select_backward slice_scatter select_scatter diagonal_backward diagonal_scatter
as_strided_scatter unfold_backward narrow_copy split_with_sizes_copy constant_pad_nd roll flip rot90 im2col col2im
pixel_shuffle pixel_unshuffle channel_shuffle native_channel_shuffle block_diag _pin_memory copy_to_gpu _to_dense
""",
    ShareKind.GATHER: """
embedding embedding_dense_backward embedding_renorm _embedding_bag _embedding_bag_backward
_embedding_bag_dense_backward _embedding_bag_forward_only _embedding_bag_per_sample_weights_backward index index_put
_index_put_impl _unsafe_index _unsafe_index_put _unsafe_masked_index _unsafe_masked_index_put_accumulate index_select
index_add index_copy index_fill index_reduce gather scatter scatter_add scatter_reduce take put masked_select
masked_scatter nonzero sort argsort topk kthvalue unique_consecutive unique_dim _unique _unique2 bincount histc
searchsorted bucketize one_hot grid_sampler_2d grid_sampler_2d_backward randperm
""",
    ShareKind.VIEW: """
view _unsafe_view reshape _reshape_alias transpose permute t expand slice select split split_with_sizes unbind unsqueeze
squeeze as_strided detach alias lift lift_fresh empty empty_like empty_strided empty_permuted new_empty
new_empty_strided resize _resize_output set record_stream is_pinned is_same_size unsafe_split unsafe_split_with_sizes
unfold
""",
}  # fmt: skip
_KIND_OF_NAME: dict[str, ShareKind] = {}
for _kind, _words in _NAMES.items():
    _KIND_OF_NAME |= dict.fromkeys(_words.split(), _kind)
CONVOLUTION = "conv"


@dataclass(frozen=True, slots=True)
class Where:
    """The location of a call. `node` is the running node of backward, or ''; `dtypes` are source and target of a
    conversion."""

    phase: str = UNATTRIBUTED
    module: str = ""
    node: str = ""
    optimizing: bool = False
    dtypes: tuple[torch.dtype, torch.dtype] | None = None


def kind_of(operator: Any, where: Where) -> tuple[ShareKind, str]:
    placed = kind_of_place(where)
    if placed is not None:
        return placed, ""
    name = operator_name(operator)
    kind, detail = kind_of_name(name, where)
    if kind is not ShareKind.UNKNOWN:
        return kind, detail
    # Views move nothing, whatever they are called.
    if getattr(operator, "is_view", False):
        return ShareKind.VIEW, ""
    does_multiply = multiplies(operator)
    if does_multiply is None:
        return ShareKind.UNKNOWN, name
    return (ShareKind.GEMM if does_multiply else ShareKind.ELEMENTWISE), ""


def kind_of_place(where: Where) -> ShareKind | None:
    if where.phase in _PHASE_KINDS:
        return _PHASE_KINDS[Phase(where.phase)]
    if where.optimizing:
        return ShareKind.OPTIMIZER
    return ShareKind.ACCUMULATE if where.node.endswith(KEEPS_GRADIENTS) else None


def kind_of_name(name: str, where: Where) -> tuple[ShareKind, str]:
    base = name.removesuffix("_")
    if base in _IN_ATTENTION and _SAYS_ATTENTION.search(where.module):
        return ShareKind.ATTENTION, ""
    if "convolution" in name:
        return ShareKind.GEMM, CONVOLUTION
    if name in CONVERTING:
        return (ShareKind.CAST if converts(where.dtypes) else ShareKind.COPY), ""
    if name.startswith("fp8bench::"):  # an operator of ours that multiplies nothing is a quantiser
        return (ShareKind.GEMM if name in FORMULAS else ShareKind.CAST), ""
    for beginning, kind in _PREFIXES:
        if name.startswith(beginning):
            return kind, ""
    kind = _KIND_OF_NAME.get(base, ShareKind.UNKNOWN)
    return kind, name if kind is ShareKind.UNKNOWN else ""


def converts(dtypes: tuple[torch.dtype, torch.dtype] | None) -> bool:
    return dtypes is not None and dtypes[0] != dtypes[1] and all(dtype.is_floating_point for dtype in dtypes)
