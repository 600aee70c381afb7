"""GPU kernel launches of an operator, and of fp8bench's operators once compiled.

Values above one were counted with torch's CUDA build 2.13 for compute capability 9.0, on a CUDA runtime that computes
nothing. List operations count once although long lists are split, and reductions too although large ones first zero a
few bytes.
"""

from __future__ import annotations

from typing import Any

from fp8bench.formats import operators
from fp8bench.formats.compiling import Compiled, Kernel
from fp8bench.formats.fused import Layout, ValuesKernel
from fp8bench.formats.grids import E4M3

# No launch: these allocate memory or make views.
NOTHING = (
    "aten::empty",
    "aten::new_empty",
    "aten::detach",
    "aten::_unsafe_view",
    "aten::lift_fresh",
    "aten::promote_types",
    "aten::_reshape_alias",
    "profiler::",
)
SEVERAL = {
    "aten::native_layer_norm_backward": 2,
    "aten::_scaled_dot_product_flash_attention_backward": 3,
    "aten::embedding_dense_backward": 24,
    "aten::nll_loss_backward": 2,
    "aten::slice_backward": 2,
    "aten::_foreach_norm": 3,
}
# Emulated quantisers: with block scales for each that a kernel computes, and with NVFP4's two.
BLOCKS = {Layout.BLOCKS: (1, 5), Layout.UPRIGHT: (2, 2), Layout.RECTANGLES: (2, 3)}


def launches_of(schema: Any) -> int:
    view = any(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns)
    if view or schema.name.startswith(NOTHING):
        return 0
    return SEVERAL.get(schema.name, 1)


class AllCompiled(operators.Kernels):
    """Every kernel as a GPU would have it: a call computes nothing, and is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = 0

    def get(self, kernel: Kernel) -> Compiled:
        def run(*tensors: object) -> None:
            self.launches += _of_kernel(kernel)

        return Compiled(run)


def _of_kernel(kernel: Kernel) -> int:
    """Kernels that a GPU's compiler makes; native casts use native_codes.LAUNCHES."""
    if not isinstance(kernel, ValuesKernel):
        return 1
    nvfp4 = kernel.scaling is not None and kernel.scaling.scale is E4M3
    return BLOCKS.get(kernel.layout, (1, 1))[nvfp4]
