"""What workloads share: what a precision or a device cannot do although products run there, and layers exercised alone.

No torch here: plans read it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from fp8bench.formats.hardware import emulated, refused
from fp8bench.formats.recipes import Recipe
from fp8bench.model import DeviceFacts, Level, Scalar, Support, TensorStatistics
from fp8bench.nn.sizes import GPTConfig, of_config
from fp8bench.protocols import Arithmetic, Phases, Precision, Setup, Workload
from fp8bench.protocols.axes import VALUES, Axis, one_of

if TYPE_CHECKING:
    import torch

    from fp8bench.nn.exercise import Exercise
    from fp8bench.nn.linear import Choose
    from fp8bench.numerics.ranges import Ledger


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


def carrier_bytes(precision: Precision) -> float:
    """Of an element of what a precision's values travel in."""
    return 4.0 if (precision.carried_by or precision.name) in ("fp32", "tf32") else 2.0


# A kernel that writes scores down has one matrix of them for backward, and so many more at once while it runs: in
# float32, whatever comes in.
SCORES_FORWARD, SCORES_KEPT, SCORES_BESIDE = 2.5, 1.0, 2.2


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


PASS = Axis(
    "pass", "forward alone, or training: forward and backward", ("training",), one_of("forward", "training")
)  # fmt: skip


def is_training(params: Mapping[str, Scalar]) -> bool:
    return params["pass"] == "training"


def convolution_support(precision: Precision, facts: DeviceFacts) -> Support:
    """The precision's own support, emulated where torch has no convolution of what it rounds to.

    TF32 is a switch of torch's own; operands that are rotated are matrices, windows written out, and are multiplied as
    those of linear layers.
    """
    support = precision.support(facts)
    rounded = bool(precision.carried_by) and precision.float32_products == "highest"
    recipe = getattr(precision, "recipe", None)
    if support.level is not Level.NATIVE or not rounded or (isinstance(recipe, Recipe) and recipe.hadamard):
        return support
    return emulated(f"torch has no convolution in {precision.name}: values rounded, convolved in fp32")


def misfit(precision: Precision, rows: int, features: Sequence[int], training: bool, shown: str) -> str:
    """Why a layer's products do not fit a native precision; '' if they do. `shown` are its sizes in words."""
    along_k, along_n = precision.multiples
    features_fit = not any(size % along for size in features for along in (along_k, along_n))
    if features_fit and not (training and rows % along_k):
        return ""
    return (
        f"native {precision.name} contracts in multiples of {along_k} and gives columns in multiples of {along_n}, and "
        f"weight gradients contract over the tokens; here {shown}: choose other sizes"
    )


def why_no_errors(params: Mapping[str, Scalar]) -> str:
    """Why a case has no numerical errors: of zeros every ratio is 0 over 0, and ones are on every grid."""
    kind = VALUES.of(params)
    constant = kind in ("ones", "zeros")
    return f"values={kind} are constant, so that a relative error would say nothing" if constant else ""


class TrainingWorkload(Workload):
    """Training steps of a GPT on text; a state is a TrainingState."""

    uses_corpus = True
    loads = "its batches"
    layer_kinds: ClassVar[tuple[str, ...]] = ("attn", "mlp", "head")

    def load(self, state: Any) -> None:
        state.loader.load_ahead(state.micro_batches)

    def step(self, state: Any, phase: Phases) -> None:
        state.step(phase)


class LayerWorkload(Workload):
    """One layer on random inputs, forward alone or forward and backward."""

    @abstractmethod
    def exercise(self, setup: Setup, choose: Choose, carrier: torch.dtype) -> Exercise:
        """The layer with its inputs in the carrier's dtype; `choose` gives its products their arithmetic."""

    def prepare(self, setup: Setup) -> Exercise:
        state = self.exercise(setup, self.arithmetics(setup), setup.arithmetic.carrier)
        if around := setup.around(self.around(dict(setup.case.params))):
            from fp8bench.nn.around import take_around

            take_around(state.layer, around)
        return state

    def step(self, state: Exercise, phase: Phases) -> None:
        state.step(phase)

    def error_refused(self, params: Mapping[str, Scalar]) -> str:
        return why_no_errors(params)

    def error(self, setup: Setup) -> dict[str, float]:
        """Output, and in training all gradients, against the same in fp64 throughout."""
        return self.prepare(setup).errors(self.exact(setup), setup.settles)

    def exact(self, setup: Setup) -> Exercise:
        """The layer in fp64 throughout."""
        import torch

        from fp8bench.nn.arithmetics import PlainArithmetic

        return self.all_in(setup, PlainArithmetic(torch.float64))

    def all_in(self, setup: Setup, arithmetic: Arithmetic) -> Exercise:
        return self.exercise(setup, lambda name: arithmetic, arithmetic.carrier)

    def statistics(self, setup: Setup) -> tuple[TensorStatistics, ...]:
        from fp8bench.numerics.ranges import Ledger

        ledger = Ledger()
        state = self.exercise(setup, self.counted(setup, ledger), setup.arithmetic.carrier)
        ledger.tallies.clear()  # preparing ran forward once
        state.outcome()
        return ledger.statistics()

    def counted(self, setup: Setup, ledger: Ledger) -> Choose:
        from fp8bench.nn.arithmetics import counted

        own = self.arithmetics(setup)
        return lambda name: counted(own(name), name, ledger)


class ConvolvedWorkload(LayerWorkload):
    """One that convolves: operands are counted by the kind of their layer."""

    def counted(self, setup: Setup, ledger: Ledger) -> Choose:
        """Where windows are written out, of the carrier: each pixel once."""
        from fp8bench.nn.arithmetics import PlainArithmetic, counted

        own, kinds = self.arithmetics(setup), {layer.name: layer.kind for layer in self.layers(dict(setup.case.params))}

        def watched(name: str) -> Arithmetic:
            inner = own(name)
            return counted(PlainArithmetic(inner.carrier) if inner.explicit else inner, kinds[name], ledger)

        return watched
