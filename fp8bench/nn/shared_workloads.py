"""Helpers of workloads: which precisions and devices they support, and the base class of trainings. This module must
not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from fp8bench.formats.hardware import emulated, refused
from fp8bench.formats.recipes import Recipe
from fp8bench.model import DeviceFacts, Scalars, Support
from fp8bench.nn.sizes import GPTConfig, list_features
from fp8bench.protocols import Phases, Precision, Setup, Workload
from fp8bench.protocols.axes import VALUES, Axis

if TYPE_CHECKING:
    from fp8bench.nn.gpt import GPT


def find_storage_support(precision: Precision, facts: DeviceFacts, without: str) -> Support:
    """Returns how a device supports storing tensors in this precision. Refuses a precision that changes only products,
    such as TF32. `without` completes the message, for example with "there is nothing to cast".
    """
    if precision.float32_products != "highest":
        return refused(f"{precision.name} only changes how products read float32 tensors: {without}, so choose fp32")
    return precision.support(facts)


# torch's attention kernels.
BACKENDS = ("math", "flash", "efficient", "cudnn")


def carrier_bytes(precision: Precision) -> float:
    return 4.0 if (precision.carried_by or precision.name) in ("fp32", "tf32") else 2.0


# An attention kernel that stores its scores needs memory for this many float32 copies of them.
FORWARD_SCORE_COPIES = 2.5  # in a forward pass without backward
SCORE_COPIES_KEPT_FOR_BACKWARD = 1.0  # between forward and backward
SCORE_COPIES_IN_BACKWARD = 2.2  # in addition, during backward


def explain_uncompilable(precision: Precision, config: GPTConfig, tokens: int) -> str:
    """Returns why torch cannot compile a model whose products run natively in this precision, or ''."""
    size_multiple = precision.compiled_multiple
    sizes = {tokens}
    for name, sides in list_features(config).items():
        # The head stays in high precision, so it may have any size.
        if name != "head":
            sizes.update(sides)
    misfit_sizes = sorted(size for size in sizes if size % size_multiple)
    if not misfit_sizes:
        return ""
    verb_phrase = "is no multiple" if len(misfit_sizes) == 1 else "are no multiples"
    return (
        f"in a compiled graph K and N of {precision.name} products must be multiples of {size_multiple}, and weight "
        f"gradients contract over the tokens, but {', '.join(map(str, misfit_sizes))} {verb_phrase}: choose "
        "compile=no, or other sizes"
    )


def explain_missing_kernel(attention: str, has_grouped_heads: bool, precision: Precision, facts: DeviceFacts) -> str:
    if not facts.accelerated and attention in ("efficient", "cudnn"):
        return f"torch has no {attention} attention on a CPU: choose auto, math or flash"
    if facts.hip and attention == "cudnn":
        return "cuDNN is NVIDIA's: choose auto, math, flash or efficient"
    is_fp32 = (precision.carried_by or precision.name) == "fp32"
    if facts.accelerated and attention == "efficient" and has_grouped_heads and not is_fp32:
        return "torch's efficient attention takes no grouped queries on a GPU, as this size has: choose auto or flash"
    if facts.accelerated and attention in ("flash", "cudnn") and is_fp32:
        return f"torch's {attention} attention takes no float32 on a GPU: choose auto, math or efficient"
    return ""


PASS = Axis.choice("pass", "forward only, or training: forward and backward", "forward", "training", default="training")


def is_training(params: Scalars) -> bool:
    return params.get("pass") == "training"


def convolution_support(precision: Precision, facts: DeviceFacts) -> Support:
    """Returns how a device supports convolutions in this precision. They are emulated if torch cannot convolve the
    rounded values.

    TF32 is a switch of torch's convolution, and needs no emulation. If operands are rotated, windows are copied into a
    matrix and multiplied as in linear layers.
    """
    support = precision.support(facts)
    rounds_before_products = bool(precision.carried_by) and precision.float32_products == "highest"
    recipe = getattr(precision, "recipe", None)
    if not support.is_native or not rounds_before_products or (isinstance(recipe, Recipe) and recipe.hadamard):
        return support
    return emulated(f"torch has no convolution in {precision.name}: values rounded, convolved in fp32")


def refuse_unfit_sizes(
    support: Support, precision: Precision, rows: int, features: Sequence[int], training: bool, sizes_text: str
) -> Support:
    """Returns `support` unchanged, or a refusal if it is native but native products of this precision do not accept a
    layer's sizes. `sizes_text` describes the sizes in the message.
    """
    along_k, along_n = precision.multiples
    layer_sizes_fit = not any(size % along_k or size % along_n for size in features) and not (
        training and rows % along_k
    )
    if layer_sizes_fit or not support.is_native:
        return support
    return refused(
        f"native {precision.name} products require K in multiples of {along_k} and N in multiples of {along_n}, and "
        f"weight gradients contract over the tokens; here {sizes_text}: choose other sizes"
    )


def explain_missing_errors(params: Scalars) -> str:
    """Returns why a case has no numerical errors, or ''. A case has none if its input data are constant. With zeros
    an error would be 0 divided by 0, and ones are exact in every format.
    """
    value_distribution = VALUES.of(params)
    has_constant_values = value_distribution in ("ones", "zeros")
    return (
        f"values={value_distribution} are constant, so a relative error would have no meaning"
        if has_constant_values
        else ""
    )


def make_gpt(workload: Workload, setup: Setup, config: GPTConfig) -> GPT:
    """Makes a GPT from the case's seed, with its layers in the case's arithmetics."""
    from fp8bench.nn.around import set_surrounding_arithmetics
    from fp8bench.nn.gpt import GPT
    from fp8bench.nn.training_step import seed_weights

    with seed_weights(setup):
        model = GPT(config, workload.arithmetics(setup), setup.arithmetic.carrier)
    set_surrounding_arithmetics(model, setup.around(workload.around(setup.params)))
    return model


class TrainingWorkload(Workload):
    """Runs training steps on text. Its state is a TrainingState."""

    uses_corpus = True
    loads = "its batches"
    layer_kinds: ClassVar[tuple[str, ...]] = ("attn", "mlp", "head")

    def load(self, state: Any) -> None:
        state.loader.preload_batches(state.micro_batches)

    def step(self, state: Any, phase: Phases) -> None:
        state.step(phase)
