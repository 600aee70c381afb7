"""What a precision or a device cannot do although products run there: tensors kept in it, kernels for attention.

No torch here: plans read it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from fp8bench.formats.hardware import refused
from fp8bench.model import DeviceFacts, Support
from fp8bench.nn.sizes import GPTConfig, of_config
from fp8bench.protocols import Precision


def storage_support(precision: Precision, facts: DeviceFacts, without: str) -> Support:
    """The precision's own support, refused for one that changes products only; `without` says what it then lacks."""
    if precision.float32_products != "highest":
        return refused(
            f"{precision.name} changes what products read and leaves tensors float32: {without}, and fp32 is that case"
        )
    return precision.support(facts)


BACKENDS = {
    "math": "MATH", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "cudnn": "CUDNN_ATTENTION",
}  # fmt: skip


def attention_by(name: str) -> AbstractContextManager[None]:
    """The kernel that attention takes in the body, backward included: recomputed blocks choose again there."""
    if name == "auto":
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(getattr(SDPBackend, BACKENDS[name]))


def uncompilable(precision: Precision, config: GPTConfig, tokens: int) -> str:
    """Why a native model's products would not become part of a compiled graph; '' if they would."""
    along = precision.compiled_multiple
    sizes = {size for name, sides in of_config(config).items() if name != "head" for size in sides} | {tokens}
    wrong = sorted(size for size in sizes if size % along)
    if not wrong:
        return ""
    verb = "is no multiple" if len(wrong) == 1 else "are no multiples"
    return (
        f"in a compiled graph torch takes products of {precision.name} whose contraction and columns are multiples of "
        f"{along}, weight gradients contract over the tokens, and {', '.join(map(str, wrong))} {verb}: choose "
        "compile=no, or other sizes"
    )


def missing_kernel(attention: str, grouped: bool, precision: Precision, facts: DeviceFacts) -> str:
    """Why a device has no such kernel for the dtype that a precision's values travel in; '' if it has one."""
    if not facts.accelerated and attention in ("efficient", "cudnn"):
        return f"torch has no {attention} attention on a CPU: choose auto, math or flash"
    if facts.hip and attention == "cudnn":
        return "cuDNN is NVIDIA's: choose auto, math, flash or efficient"
    fp32 = (precision.carried_by or precision.name) == "fp32"
    if facts.accelerated and attention == "efficient" and grouped and not fp32:
        return "torch's efficient attention takes no grouped queries on a GPU, as this size has: choose auto or flash"
    if facts.accelerated and attention in ("flash", "cudnn") and fp32:
        return f"torch's {attention} attention takes no float32 on a GPU: choose auto, math or efficient"
    return ""
