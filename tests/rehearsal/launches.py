"""How many kernels a GPU launches for an operator. Those of torch's that are more than one were counted on its CUDA
build 2.13, with a CUDA runtime that computes nothing."""

from __future__ import annotations

from typing import Any

# Nothing is launched: memory is taken, or looked at in another way.
NOTHING = (
    "aten::empty", "aten::new_empty", "aten::detach", "aten::_unsafe_view", "aten::lift_fresh", "aten::promote_types",
    "aten::_reshape_alias", "profiler::",
)  # fmt: skip
SEVERAL = {
    "aten::native_layer_norm_backward": 2,
    "aten::_scaled_dot_product_flash_attention_backward": 3,
    "aten::embedding_dense_backward": 24,
    "aten::nll_loss_backward": 2,
    "aten::slice_backward": 2,
}


def launches_of(schema: Any) -> int:
    """Of one call; fp8bench's own quantisers are not among them."""
    view = any(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns)
    if view or schema.name.startswith(NOTHING):
        return 0
    return SEVERAL.get(schema.name, 1)
