"""Finds the FLOPs of an operator call and its kind (GEMM, cast, copy and others), from the operator's name and the
call's location.

FLOPs are the multiplications and additions of operators that multiply tensors with each other. torch has formulas for
some operators (torch.utils.flop_counter). It has none for others, and a wrong one for the backward pass of grouped
convolutions. FLOPs are unknown if neither torch nor this module has a formula, unless the operator is listed as one
that multiplies no tensors. Some phases determine the kind of a call. Otherwise calls in optimizers and gradient
accumulation have separate kinds, and the operator's name decides about the rest.
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
from fp8bench.tape.recorder import (
    Call,
    RecordedTensor,
    bind_arguments,
    get_operator_name,
    is_view,
    iterate_tensors,
    operator_name,
)

# A formula takes a dict of a call's arguments by name, with the call's result under ''. FORMULAS maps each operator to
# the argument with the dtype of the product, and to the formula.
ArgumentByName = Mapping[str, Any]
FlopsFormula = Callable[[ArgumentByName], int]
# The sizes M, N and K of a product (M, K) times (K, N), and the number of products with these sizes.
ProductDimensions = tuple[int, int, int, int]
ListProductSizes = Callable[[ArgumentByName], list[ProductDimensions]]


def _make_matrix_shapes(left_name: str, right_name: str) -> ListProductSizes:
    """Returns a function that lists the sizes of a matrix product, or of a batch of equal products, from a call's
    arguments. The parameters are the names of the two operands, which may be vectors.
    """

    def list_products(named: ArgumentByName) -> list[ProductDimensions]:
        a = named[left_name]
        sides = 1, *a.shape
        n = int(named[""].shape[-1]) if len(named[right_name].shape) > 1 else 1
        return [(sides[-2], n, _count_summed_numbers(a), math.prod(sides[:-2]))]

    return list_products


def _count_summed_numbers(a: RecordedTensor) -> int:
    """Counts the numbers along an operand's last dimension. An element of torch's packed E2M1 dtype holds two."""
    packed_fp4_dtype = getattr(torch, "float4_e2m1fn_x2", None)
    return int(a.shape[-1]) * (2 if a.dtype is packed_fp4_dtype else 1)


def _get_grouped_shapes(named: ArgumentByName) -> list[ProductDimensions]:
    """Returns the sizes of a grouped product. If one operand is divided into groups of rows or columns, with one matrix
    per group, all groups together count as one product. Two stacks of matrices are multiplied in pairs.
    """
    a = named["self"]
    b = named["mat2"]
    product_count = a.shape[0] if len(a.shape) == len(b.shape) == 3 else 1
    return [(a.shape[-2], b.shape[-1], _count_summed_numbers(a), product_count)]


def _make_flops_formula(products: ListProductSizes) -> FlopsFormula:
    return lambda named: sum(2 * m * n * k * product_count for m, n, k, product_count in products(named))


def get_convolution_shapes(named: ArgumentByName) -> list[ProductDimensions]:
    """Returns the sizes of the matrix products that compute a convolution: equal products, one per group. A window that
    reaches over the edge of an image counts as many multiplications as any other window.

    The dimensions of weights are (outputs, inputs / groups, window). In a transposed convolution outputs and inputs are
    swapped.
    """
    outputs, window, positions, groups = _get_conv_product_sizes(named, named[""])
    return [(positions, outputs, window, groups)]


def get_convolution_backward_shapes(named: ArgumentByName) -> list[ProductDimensions]:
    """Returns the sizes of the products in a convolution's backward pass: one for each requested gradient, of the
    input and of the weight. Each product is as large as the forward product.
    """
    outputs, window, positions, groups = _get_conv_product_sizes(named, named["grad_output"])
    for_input, for_weight = named["output_mask"][:2]
    products = [((positions, window, outputs, groups), for_input), ((outputs, window, positions, groups), for_weight)]
    return [product for product, is_needed in products if is_needed]


def _get_conv_product_sizes(named: ArgumentByName, out: Any) -> tuple[int, int, int, int]:
    """Returns the sizes of a convolution's matrix product: outputs per group, elements of a window, positions of
    windows in all images, and groups.
    """
    weight = named["weight"]
    x = named.get("input", named.get("self"))
    positions = x if named.get("transposed") else out
    groups = int(named.get("groups", 1))
    return (
        weight.shape[0] // groups,
        math.prod(weight.shape[1:]),
        positions.shape[0] * math.prod(positions.shape[2:]),
        groups,
    )


def _count_query_key_pairs(named: ArgumentByName) -> float:
    """Counts the pairs of a query and a key in one head. With a causal mask, a query and its own key count as half a
    pair.
    """
    query_count = int(named["query"].shape[-2])
    keys = int(named["key"].shape[-2])
    if not named.get("is_causal"):
        return query_count * keys
    # The mask hides half of a square. Queries after this square attend to all keys.
    masked_square_side = min(query_count, keys)
    return masked_square_side * masked_square_side / 2 + (query_count - masked_square_side) * keys


def _make_attention_formula(products: tuple[int, int]) -> FlopsFormula:
    """Returns a FLOP formula for attention. `products` are two numbers: how many matrix products contract over the
    key width, and how many contract over the value width.
    """

    def flops(named: ArgumentByName) -> int:
        query_tensor = named["query"]
        value = named["value"]
        heads = math.prod(query_tensor.shape[:-2])
        (key_products, value_products) = products
        return int(
            2
            * heads
            * _count_query_key_pairs(named)
            * (key_products * query_tensor.shape[-1] + value_products * value.shape[-1])
        )

    return flops


# The backward pass computes the scores again. It also computes the gradients of values, probabilities, queries and
# keys.
_ATTENTION_FORWARD = ("query", _make_attention_formula((1, 1)))
_ATTENTION_BACKWARD = ("query", _make_attention_formula((3, 2)))


def _make_lstm_formula(times: int, *weights: str) -> tuple[str, FlopsFormula]:
    def flops(named: ArgumentByName) -> int:
        steps: int = math.prod(named["input"].shape[:2])
        return times * 2 * steps * sum(math.prod(named[weight].shape) for weight in weights)

    return "input", flops


# For each operator that multiplies matrices: the argument with the dtype of the products, and a function that lists the
# sizes of the products.
PRODUCT_SHAPES: dict[str, tuple[str, ListProductSizes]] = {
    **dict.fromkeys(("mm", "bmm", "_int_mm", "_scaled_mm", "_scaled_mm_v2"),
                    ("self", _make_matrix_shapes("self", "mat2"))),
    **dict.fromkeys(("addmm", "_addmm_activation"), ("mat1", _make_matrix_shapes("mat1", "mat2"))),
    "baddbmm": ("batch1", _make_matrix_shapes("batch1", "batch2")),
    **dict.fromkeys(("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"), ("self", _get_grouped_shapes)),
    **dict.fromkeys(("convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution"),
                    ("weight", get_convolution_shapes)),
    "convolution_backward": ("weight", get_convolution_backward_shapes),
}  # fmt: skip


def _make_formula(left_name: str, right_name: str) -> tuple[str, FlopsFormula]:
    return left_name, _make_flops_formula(_make_matrix_shapes(left_name, right_name))


_SDPA_OPERATOR = "_scaled_dot_product_{}attention{}"
FORMULAS: dict[str, tuple[str, FlopsFormula]] = {
    **{name: (argument, _make_flops_formula(shapes)) for name, (argument, shapes) in PRODUCT_SHAPES.items()},
    **dict.fromkeys(("_weight_int8pack_mm", "_weight_int4pack_mm", "_weight_int4pack_mm_for_cpu"),
                    _make_formula("self", "mat2")),
    "addbmm": _make_formula("batch1", "batch2"),
    "mv": _make_formula("self", "vec"),
    "addmv": _make_formula("mat", "vec"),
    "dot": _make_formula("self", "tensor"),
    "vdot": _make_formula("self", "other"),
    # torch computes distances by one product, after it has appended two columns to each matrix.
    "_euclidean_dist": ("x1", lambda named: 2 * math.prod(named[""].shape) * (int(named["x1"].shape[-1]) + 2)),
    "addr": ("vec1", lambda named: 2 * math.prod(named["vec1"].shape) * math.prod(named["vec2"].shape)),
    "convolution_overrideable": ("weight", _make_flops_formula(get_convolution_shapes)),
    "convolution_backward_overrideable": ("weight", _make_flops_formula(get_convolution_backward_shapes)),
    **{_SDPA_OPERATOR.format(kernel, end): formula
       for end, formula in (("", _ATTENTION_FORWARD), ("_backward", _ATTENTION_BACKWARD))
       for kernel in ("flash_", "efficient_", "cudnn_", "fused_")},
    "_scaled_dot_product_flash_attention_for_cpu": _ATTENTION_FORWARD,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _ATTENTION_BACKWARD,
    "mkldnn_rnn_layer": _make_lstm_formula(1, "weight0", "weight1"),
    # The backward pass has two products for each product of the forward pass.
    "mkldnn_rnn_layer_backward": _make_lstm_formula(2, "weight1", "weight2"),
    "fp8bench::short_product": ("a", lambda named: 2 * math.prod(named["a"].shape) * int(named["b"].shape[0])),
    "fp8bench::rotated_and_looked_at": (
        "matrix", lambda named: 2 * math.prod(named["x"].shape) * int(named["matrix"].shape[-1]),
    ),
}  # fmt: skip

# Operators that multiply no matrices. Operators that torch tags as pointwise or as a reduction are not listed here.
_ELEMENTWISE_NAMES = """
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
_OPERATORS_WITHOUT_PRODUCTS = frozenset(_ELEMENTWISE_NAMES.split())
# torch's tags for operators without a matrix product.
_ELEMENTWISE_TAGS = ("pointwise", "reduction")


def count_flops(call: Call) -> tuple[int | None, str]:
    """Returns the FLOPs of a call, and the name of the argument whose dtype is the product's dtype. FLOPs are 0 if
    the call has no product, and None if they are unknown, for example for sparse tensors.
    """
    # The FLOPs of a sparse product depend on its values. A recorded tensor without strides is sparse.
    if is_tensor_multiplication(call.operator) and any(
        tensor.stride is None for tensor in iterate_tensors(call.positional)
    ):
        return None, ""
    argument_and_formula = _find_flops_formula(get_operator_name(call))
    if argument_and_formula is not None:
        argument, formula = argument_and_formula
        result = next(iterate_tensors(call.result), None)
        return formula({**bind_arguments(call), "": result}), argument
    # If FORMULAS has no formula for the operator, use torch's formula if there is one.
    torch_flops_formula = _find_torch_formula(call.operator)
    if torch_flops_formula is not None:
        return _apply_torch_flop_formula(call, torch_flops_formula), next(iter(bind_arguments(call)), "")
    return (None if is_tensor_multiplication(call.operator) is None else 0), ""


def is_tensor_multiplication(operator: Any) -> bool | None:
    """Returns whether an operator multiplies tensors with each other, or None if that is unknown."""
    name = operator_name(operator)
    if _find_flops_formula(name) is not None or _find_torch_formula(operator) is not None:
        return True
    return False if _multiplies_nothing(operator) else None


def _find_flops_formula(name: str) -> tuple[str, FlopsFormula] | None:
    # An operator that works in place, such as addmm_, has the formula of addmm.
    return FORMULAS.get(name) or FORMULAS.get(name.removesuffix("_"))


def _find_torch_formula(operator: Any) -> Callable[..., int] | None:
    """Returns the FLOP formula that is registered with torch for an operator, or None."""
    # Importing torch.utils.flop_counter takes 0.3 s. As long as nobody has imported it, no user can have registered a
    # formula there. Then operators without products need no import.
    if "torch.utils.flop_counter" not in sys.modules and _multiplies_nothing(operator):
        return None
    from torch.utils.flop_counter import flop_registry

    return flop_registry.get(getattr(operator, "overloadpacket", operator))


def _apply_torch_flop_formula(call: Call, formula: Callable[..., int]) -> int | None:
    """Returns a call's FLOPs by a formula that is registered with torch. Returns None if the formula raises an error;
    it gets only the shapes of tensors.
    """

    def shapes(value: Any) -> Any:
        return value.shape if isinstance(value, RecordedTensor) else value

    try:
        keyword_argument_shapes = {name: shapes(argument) for name, argument in call.named.items()}
        return int(formula(*map(shapes, call.positional), **keyword_argument_shapes, out_val=shapes(call.result)))
    except Exception:  # noqa: BLE001 - the formula may be foreign code
        return None


@cache
def _multiplies_nothing(operator: Any) -> bool:
    name = operator_name(operator)
    if name.startswith("fp8bench::"):
        return True  # fp8bench's own operators without an entry in FORMULAS are quantisers
    if operator.namespace != "aten":
        return False
    operator_base_name = name.removesuffix("_").removeprefix("_foreach_")
    if (
        name.removesuffix("_") in _OPERATORS_WITHOUT_PRODUCTS
        or operator_base_name in _OPERATORS_WITHOUT_PRODUCTS
        or is_view(operator)
    ):
        return True
    operator_packets = [getattr(torch.ops.aten, text, None) for text in (name, operator_base_name)]
    operator_overloads = [operator]
    for operator_packet in operator_packets:
        if operator_packet is not None:
            operator_overloads += [
                getattr(operator_packet, overload_name) for overload_name in operator_packet.overloads()
            ]
    operator_tags = chain.from_iterable(overload.tags for overload in operator_overloads)
    return any(tag.name in _ELEMENTWISE_TAGS for tag in operator_tags)


GRADIENT_ACCUMULATION_NODE = "AccumulateGrad"
# In these phases, all operators have the same kind. In all other phases, each operator's kind depends on the operator.
_SHARE_KIND_BY_PHASE = {
    Phase.CAST: ShareKind.CAST,
    Phase.ATTENTION: ShareKind.ATTENTION,
    Phase.ACCUMULATE: ShareKind.ACCUMULATE,
    Phase.OPTIMIZER_STEP: ShareKind.OPTIMIZER,
}
# Kinds by the beginning of an operator's name. The first match decides.
_SHARE_KINDS_BY_PREFIX: tuple[tuple[str, ShareKind], ...] = (
    ("_scaled_dot_product", ShareKind.ATTENTION), ("scaled_dot_product", ShareKind.ATTENTION),
    ("_flash_attention", ShareKind.ATTENTION), ("_efficient_attention", ShareKind.ATTENTION),
    ("_cudnn_attention", ShareKind.ATTENTION), ("flex_attention", ShareKind.ATTENTION),
    ("_safe_softmax", ShareKind.ATTENTION), ("_fused_sdp_choice", ShareKind.ATTENTION),
    ("_fused_adam", ShareKind.OPTIMIZER), ("_fused_sgd", ShareKind.OPTIMIZER), ("_fused_adagrad", ShareKind.OPTIMIZER),
    ("fake_quantize", ShareKind.CAST), ("_fake_quantize", ShareKind.CAST), ("quantize", ShareKind.CAST),
    ("dequantize", ShareKind.CAST),
)  # fmt: skip
# Operators that count as attention if they run in a module whose name contains attention.
_UNFUSED_ATTENTION = frozenset(
    ("bmm", "baddbmm", "_softmax", "_softmax_backward_data", "_masked_softmax", "_masked_softmax_backward")
)
_ATTENTION_MODULE = re.compile(r"attn|attention", re.IGNORECASE)
# These operators are casts if they convert between floating-point dtypes, and copies otherwise.
COPY_OPERATORS = frozenset(("_to_copy", "copy_", "copy", "_foreach_copy_", "_copy_from"))
_OPERATOR_NAMES_BY_KIND: Mapping[ShareKind, str] = {
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
_SHARE_KIND_BY_OPERATOR: dict[str, ShareKind] = {}
for _share_kind, _operator_names in _OPERATOR_NAMES_BY_KIND.items():
    _SHARE_KIND_BY_OPERATOR |= dict.fromkeys(_operator_names.split(), _share_kind)
CONVOLUTION = "conv"


@dataclass(frozen=True, slots=True)
class CallLocation:
    """Where a call ran. `node` is the name of the autograd node that was running, or ''. `dtypes` are the dtypes of
    source and target if the call copies. `is_optimizing` is whether an optimizer's step was running.
    """

    phase: str = UNATTRIBUTED
    module: str = ""
    node: str = ""
    is_optimizing: bool = False
    dtypes: tuple[torch.dtype, torch.dtype] | None = None


def classify_call(operator: Any, location: CallLocation) -> tuple[ShareKind, str]:
    share_kind_of_location = classify_location(location)
    if share_kind_of_location is not None:
        return share_kind_of_location, ""
    name = operator_name(operator)
    kind, detail = classify_name(name, location)
    if kind is not ShareKind.UNKNOWN:
        return kind, detail
    # For views that `classify_name` does not know, torch's flag `is_view` is set.
    if getattr(operator, "is_view", False):
        return ShareKind.VIEW, ""
    is_product_operator = is_tensor_multiplication(operator)
    if is_product_operator is None:
        return ShareKind.UNKNOWN, name
    return (ShareKind.GEMM if is_product_operator else ShareKind.ELEMENTWISE), ""


def classify_location(location: CallLocation) -> ShareKind | None:
    if location.phase in _SHARE_KIND_BY_PHASE:
        return _SHARE_KIND_BY_PHASE[Phase(location.phase)]
    if location.is_optimizing:
        return ShareKind.OPTIMIZER
    return ShareKind.ACCUMULATE if location.node.endswith(GRADIENT_ACCUMULATION_NODE) else None


def classify_name(name: str, location: CallLocation) -> tuple[ShareKind, str]:
    base_name = name.removesuffix("_")
    if base_name in _UNFUSED_ATTENTION and _ATTENTION_MODULE.search(location.module):
        return ShareKind.ATTENTION, ""
    if "convolution" in name:
        return ShareKind.GEMM, CONVOLUTION
    if name in COPY_OPERATORS:
        dtypes = location.dtypes or ()
        is_dtype_cast = len(set(dtypes)) > 1 and all(dtype.is_floating_point for dtype in dtypes)
        return (ShareKind.CAST if is_dtype_cast else ShareKind.COPY), ""
    if name.startswith("fp8bench::"):  # an fp8bench operator without products is a quantiser
        return (ShareKind.GEMM if name in FORMULAS else ShareKind.CAST), ""
    for prefix, kind in _SHARE_KINDS_BY_PREFIX:
        if name.startswith(prefix):
            return kind, ""
    kind = _SHARE_KIND_BY_OPERATOR.get(base_name, ShareKind.UNKNOWN)
    return kind, name if kind is ShareKind.UNKNOWN else ""
