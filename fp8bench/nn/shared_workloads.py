"""Helpers of workloads: limits of precisions and devices other than products', and the base of trainings. No torch
here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from fp8bench.formats.hardware import emulated, refused
from fp8bench.formats.recipes import Recipe
from fp8bench.model import DeviceFacts, Scalars, Support
from fp8bench.nn.sizes import GPTConfig, features_in
from fp8bench.protocols import Phases, Precision, Setup, Workload
from fp8bench.protocols.axes import VALUES, Axis

if TYPE_CHECKING:
    from fp8bench.nn.gpt import GPT


def storage_support(precision: Precision, facts: DeviceFacts, without: str) -> Support:
    """Returns the precision's support, refused for one that changes products only; `without` names what the case then
    lacks."""
    if precision.float32_products != "highest":
        return refused(
            f"{precision.name} changes what products read and leaves tensors float32: {without}, and fp32 is that case"
        )
    return precision.support(facts)


# Kernels of attention.
BACKENDS = ("math", "flash", "efficient", "cudnn")


def carrier_bytes(precision: Precision) -> float:
    return 4.0 if (precision.carried_by or precision.name) in ("fp32", "tf32") else 2.0


# Float32 copies of the scores in a kernel that stores them, for any input: in forward alone, kept for backward, and in
# addition while backward runs.
SCORES_FORWARD = 2.5
SCORES_KEPT = 1.0
SCORES_BESIDE = 2.2


def uncompilable(precision: Precision, config: GPTConfig, tokens: int) -> str:
    """Why a native model's products would stay out of a compiled graph; '' if they would not."""
    along = precision.compiled_multiple
    sizes = {tokens}
    for name, sides in features_in(config).items():
        if name != "head":
            sizes.update(sides)
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


PASS = Axis.choice(
    "pass", "forward alone, or training: forward and backward", "forward", "training", default="training"
)


def is_training(params: Scalars) -> bool:
    return params.get("pass") == "training"


def convolution_support(precision: Precision, facts: DeviceFacts) -> Support:
    """The precision's support, emulated where torch has no convolution of its rounded values.

    TF32 is a switch of torch. Rotated operands are windows written out as matrices, multiplied as in linear layers.
    """
    support = precision.support(facts)
    rounded = bool(precision.carried_by) and precision.float32_products == "highest"
    recipe = getattr(precision, "recipe", None)
    if not support.is_native or not rounded or (isinstance(recipe, Recipe) and recipe.hadamard):
        return support
    return emulated(f"torch has no convolution in {precision.name}: values rounded, convolved in fp32")


def require_fit(
    support: Support, precision: Precision, rows: int, features: Sequence[int], training: bool, shown: str
) -> Support:
    """Returns the support, refused where a native precision does not take a layer's products. `shown` are the sizes in
    words."""
    along_k, along_n = precision.multiples
    fits = not any(size % along_k or size % along_n for size in features) and not (training and rows % along_k)
    if fits or not support.is_native:
        return support
    return refused(
        f"native {precision.name} contracts in multiples of {along_k} and gives columns in multiples of {along_n}, and "
        f"weight gradients contract over the tokens; here {shown}: choose other sizes"
    )


def why_no_errors(params: Scalars) -> str:
    """Why a case has no numerical errors: with zeros every ratio is 0 over 0, and ones are on every grid."""
    kind = VALUES.of(params)
    constant = kind in ("ones", "zeros")
    return f"values={kind} are constant, so that a relative error would say nothing" if constant else ""


def make_gpt(workload: Workload, setup: Setup, config: GPTConfig) -> GPT:
    """Makes a GPT from the case's seed, its layers in the case's arithmetics."""
    from fp8bench.nn.around import set_around
    from fp8bench.nn.gpt import GPT
    from fp8bench.nn.training_step import seed_weights

    with seed_weights(setup):
        model = GPT(config, workload.arithmetics(setup), setup.arithmetic.carrier)
    set_around(model, setup.around(workload.around(setup.params)))
    return model


class TrainingWorkload(Workload):
    """Training steps on text; the state is a TrainingState."""

    uses_corpus = True
    loads = "its batches"
    layer_kinds: ClassVar[tuple[str, ...]] = ("attn", "mlp", "head")

    def load(self, state: Any) -> None:
        state.loader.load_ahead(state.micro_batches)

    def step(self, state: Any, phase: Phases) -> None:
        state.step(phase)
