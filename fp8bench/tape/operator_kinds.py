"""Which kind of work an operator does: rules as data, by its name and by where it runs.

The marks of a suite's own phases go first, then optimizers and the nodes that keep gradients, then names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fp8bench.model import UNATTRIBUTED, Phase
from fp8bench.model.step import ShareKind
from fp8bench.tape.formulas import FORMULAS, multiplies
from fp8bench.tape.recorder import operator_name

KEEPS_GRADIENTS = "AccumulateGrad"
# What a phase of a suite holds is of one kind, whatever its operators; of the other phases operators say it.
_OF_PHASE = {
    Phase.CAST: ShareKind.CAST,
    Phase.ATTENTION: ShareKind.ATTENTION,
    Phase.ACCUMULATE: ShareKind.ACCUMULATE,
    Phase.OPTIMIZER_STEP: ShareKind.OPTIMIZER,
}
# Beginnings of names, the first that fits.
_BEGINNINGS: tuple[tuple[str, ShareKind], ...] = (
    ("_scaled_dot_product", ShareKind.ATTENTION), ("scaled_dot_product", ShareKind.ATTENTION),
    ("_flash_attention", ShareKind.ATTENTION), ("_efficient_attention", ShareKind.ATTENTION),
    ("_cudnn_attention", ShareKind.ATTENTION), ("flex_attention", ShareKind.ATTENTION),
    ("_safe_softmax", ShareKind.ATTENTION), ("_fused_sdp_choice", ShareKind.ATTENTION),
    ("_fused_adam", ShareKind.OPTIMIZER), ("_fused_sgd", ShareKind.OPTIMIZER), ("_fused_adagrad", ShareKind.OPTIMIZER),
    ("fake_quantize", ShareKind.CAST), ("_fake_quantize", ShareKind.CAST), ("quantize", ShareKind.CAST),
    ("dequantize", ShareKind.CAST),
)  # fmt: skip
# What attention is made of where it is written out, in modules that say they are attention.
_IN_ATTENTION = frozenset(
    ("bmm", "baddbmm", "_softmax", "_softmax_backward_data", "_masked_softmax", "_masked_softmax_backward")
)
_SAYS_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
# Between two dtypes of floating-point numbers they are casts, else copies.
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
_KIND_OF_NAME = {name: kind for kind, names in _NAMES.items() for name in names.split()}
CONVOLUTION = "conv"


@dataclass(frozen=True, slots=True)
class Where:
    """What is known of a call beside its operator. `node` is that of the backward pass which runs, '' without one;
    `dtypes` are those that it reads and writes, of what converts."""

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
    kind, what = kind_of_name(name, where)
    if kind is not ShareKind.UNKNOWN:
        return kind, what
    if getattr(operator, "is_view", False):
        return ShareKind.VIEW, ""
    known = multiplies(operator)
    if known is None:
        return ShareKind.UNKNOWN, name
    return (ShareKind.GEMM if known else ShareKind.ELEMENTWISE), ""


def kind_of_place(where: Where) -> ShareKind | None:
    """What is said by where an operator runs, whatever it does."""
    if where.phase in _OF_PHASE:
        return _OF_PHASE[Phase(where.phase)]
    if where.optimizing:
        return ShareKind.OPTIMIZER
    return ShareKind.ACCUMULATE if where.node.endswith(KEEPS_GRADIENTS) else None


def kind_of_name(name: str, where: Where) -> tuple[ShareKind, str]:
    """What a name says; UNKNOWN where none of the lists has it."""
    base = name.removesuffix("_")
    if base in _IN_ATTENTION and _SAYS_ATTENTION.search(where.module):
        return ShareKind.ATTENTION, ""
    if "convolution" in name:
        return ShareKind.GEMM, CONVOLUTION
    if name in CONVERTING:
        return (ShareKind.CAST if converts(where.dtypes) else ShareKind.COPY), ""
    if name.startswith("fp8bench::"):  # of ours what multiplies nothing is a quantiser
        return (ShareKind.GEMM if name in FORMULAS else ShareKind.CAST), ""
    for beginning, kind in _BEGINNINGS:
        if name.startswith(beginning):
            return kind, ""
    kind = _KIND_OF_NAME.get(base, ShareKind.UNKNOWN)
    return kind, name if kind is ShareKind.UNKNOWN else ""


def converts(dtypes: tuple[torch.dtype, torch.dtype] | None) -> bool:
    """Whether it goes from one dtype of floating-point numbers to another."""
    return dtypes is not None and dtypes[0] != dtypes[1] and all(one.is_floating_point for one in dtypes)
