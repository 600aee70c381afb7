"""What workloads share: limits of precisions and devices beside products, and bases of those that run a layer, a
training, or a served model. No torch here: plans read it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from fp8bench.errors import UsageError
from fp8bench.formats.hardware import emulated, refused
from fp8bench.formats.recipes import Recipe
from fp8bench.model import DeviceFacts, Params, Scalars, Support, TensorStatistics, Work
from fp8bench.nn.served import (
    KV_FORMATS,
    OWN,
    WEIGHT_FORMATS,
    ServedArm,
    arm_of,
    forward_flops,
    served_memory,
    served_shape,
    served_support,
)
from fp8bench.nn.sizes import SERVED_SIZES, GPTConfig, features_in, gpt_around, gpt_layers
from fp8bench.protocols import Arithmetic, Layer, Phases, Precision, Setup, Workload
from fp8bench.protocols.axes import VALUES, Axis, one_of, whole_number

if TYPE_CHECKING:
    import torch

    from fp8bench.nn.exercise import Exercise
    from fp8bench.nn.linear import Choose
    from fp8bench.nn.serving import ServedState
    from fp8bench.numerics.ranges import Ledger


def storage_support(precision: Precision, facts: DeviceFacts, without: str) -> Support:
    """The precision's support, refused for one that changes products only; `without` says what the case then lacks."""
    if precision.float32_products != "highest":
        return refused(
            f"{precision.name} changes what products read and leaves tensors float32: {without}, and fp32 is that case"
        )
    return precision.support(facts)


# Kernels of attention.
BACKENDS = ("math", "flash", "efficient", "cudnn")


def carrier_bytes(precision: Precision) -> float:
    return 4.0 if (precision.carried_by or precision.name) in ("fp32", "tf32") else 2.0


# Float32 copies of the scores in a kernel that stores them, whatever comes in: one for backward, and so many more while
# it runs.
SCORES_FORWARD, SCORES_KEPT, SCORES_BESIDE = 2.5, 1.0, 2.2


def uncompilable(precision: Precision, config: GPTConfig, tokens: int) -> str:
    """Why a native model's products would stay out of a compiled graph; '' if they would not."""
    along = precision.compiled_multiple
    sizes = {size for name, sides in features_in(config).items() if name != "head" for size in sides} | {tokens}
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


PASS = Axis(
    "pass", "forward alone, or training: forward and backward", ("training",), one_of("forward", "training")
)  # fmt: skip


def is_training(params: Scalars) -> bool:
    return params["pass"] == "training"


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


def misfit(precision: Precision, rows: int, features: Sequence[int], training: bool, shown: str) -> str:
    """Why a native precision refuses a layer's products; '' if it takes them. `shown` are the sizes in words."""
    along_k, along_n = precision.multiples
    features_fit = not any(size % along for size in features for along in (along_k, along_n))
    if features_fit and not (training and rows % along_k):
        return ""
    return (
        f"native {precision.name} contracts in multiples of {along_k} and gives columns in multiples of {along_n}, and "
        f"weight gradients contract over the tokens; here {shown}: choose other sizes"
    )


def why_no_errors(params: Scalars) -> str:
    """Why a case has no numerical errors: with zeros every ratio is 0 over 0, and ones are on every grid."""
    kind = VALUES.of(params)
    constant = kind in ("ones", "zeros")
    return f"values={kind} are constant, so that a relative error would say nothing" if constant else ""


class TrainingWorkload(Workload):
    """Training steps on text; the state is a TrainingState."""

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
        """The layer with inputs in the carrier's dtype; `choose` gives each product its arithmetic by name."""

    def prepare(self, setup: Setup) -> Exercise:
        state = self.exercise(setup, self.arithmetics(setup), setup.arithmetic.carrier)
        if around := setup.around(self.around(setup.params)):
            from fp8bench.nn.around import set_around

            set_around(state.layer, around)
        return state

    def step(self, state: Exercise, phase: Phases) -> None:
        state.step(phase)

    def error_refused(self, params: Scalars) -> str:
        return why_no_errors(params)

    def error(self, setup: Setup) -> dict[str, float]:
        return self.prepare(setup).errors(self.exact(setup), setup.settles)

    def exact(self, setup: Setup) -> Exercise:
        import torch

        from fp8bench.nn.arithmetics import PlainArithmetic

        return self.all_in(setup, PlainArithmetic(torch.float64))

    def all_in(self, setup: Setup, arithmetic: Arithmetic) -> Exercise:
        return self.exercise(setup, lambda name: arithmetic, arithmetic.carrier)

    def statistics(self, setup: Setup) -> tuple[TensorStatistics, ...]:
        from fp8bench.numerics.ranges import Ledger

        ledger = Ledger()
        state = self.exercise(setup, self.counted(setup, ledger), setup.arithmetic.carrier)
        ledger.tallies.clear()  # the tallies of the forward pass in preparing
        state.outcome()
        return ledger.statistics()

    def counted(self, setup: Setup, ledger: Ledger) -> Choose:
        from fp8bench.nn.arithmetics import counted

        own = self.arithmetics(setup)
        return lambda name: counted(own(name), name, ledger)


class ConvolvedWorkload(LayerWorkload):
    """A workload with convolutions: operands are counted by the kind of their layer."""

    def counted(self, setup: Setup, ledger: Ledger) -> Choose:
        """Of windows that are written out the carrier is counted: each pixel once."""
        from fp8bench.nn.arithmetics import PlainArithmetic, counted

        own, kinds = self.arithmetics(setup), {layer.name: layer.kind for layer in self.layers(setup.params)}

        def watched(name: str) -> Arithmetic:
            inner = own(name)
            return counted(PlainArithmetic(inner.carrier) if inner.explicit else inner, kinds[name], ledger)

        return watched


class ServedWorkload(Workload):
    """A model with a static cache. A step is `new` tokens at the end of the context, by default all of it. `usual` are
    size and context on a CPU and on a GPU, and `context_words` explain a context."""

    dtypes = ("fp32", "bf16")
    layer_kinds = ("attn", "mlp", "head")
    fused = False
    batch_axis = "batch"
    usual: ClassVar[tuple[tuple[str, str], tuple[str, str]]]
    context_words: ClassVar[str]
    new: ClassVar[int | None] = None
    # Finds the function that makes a user's own model, by its name.
    named: Callable[[str], Callable[[], Any]]

    @abstractmethod
    def precision(self, setup: Setup) -> Precision:
        """The case's precision."""

    def axes(self, facts: DeviceFacts) -> tuple[Axis, ...]:
        size, context = self.usual[facts.accelerated]
        formats = (("kv", "keys and values", KV_FORMATS), ("weights", "its blocks' weights", WEIGHT_FORMATS))
        return (
            Axis("size", f"the model: {', '.join(SERVED_SIZES)}", (size,), _model_name),
            Axis("batch", "sequences that are served together", ("1",), whole_number(high=1 << 14)),
            Axis("context", self.context_words, (context,), whole_number(high=1 << 20)),
            *(
                Axis(name, f"what {what} are kept in: {', '.join(known)}; {OWN}: as the dtype says", (OWN,),
                     one_of(OWN, *known))
                for name, what, known in formats
            ),
        )  # fmt: skip

    def expand(self, params: Scalars) -> tuple[Params, ...]:
        size, context = str(params["size"]), int(params["context"])
        model = served_shape(size)
        if context > model.sequence:
            raise UsageError(f"context={context} is too long: {size} has positions for {model.sequence}. Choose less.")
        return super().expand(params)

    def work(self, params: Scalars) -> Work:
        model, batch, context = served_shape(str(params["size"])), int(params["batch"]), int(params["context"])
        new = self.new or context
        flops = forward_flops(model, batch, new, context)
        return Work(flops, batch * new, least_memory=served_memory(model, batch, context))

    def support(self, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        return served_support(params, precision, facts)

    def layer_support(self, kind: str, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        return precision.support(facts)

    def layers(self, params: Scalars) -> tuple[Layer, ...]:
        """None for a user's own model, which takes no precision map."""
        size = str(params["size"])
        return gpt_layers(config.layers, config.experts) if (config := SERVED_SIZES.get(size)) else ()

    def around(self, params: Scalars) -> tuple[Layer, ...]:
        config = SERVED_SIZES.get(str(params["size"]))
        return gpt_around(config.layers) if config else ()

    def prepare(self, setup: Setup) -> ServedState:
        from fp8bench.nn.serving import served_state

        return served_state(setup, *self._served_arguments(setup), self.named)

    def step(self, state: ServedState, phase: Phases) -> None:
        state.step(phase)

    def error(self, setup: Setup) -> dict[str, float]:
        from fp8bench.nn.serving import logits_error

        return logits_error(setup, *self._served_arguments(setup), self.named)

    def _served_arguments(self, setup: Setup) -> tuple[ServedArm, tuple[Layer, ...], int]:
        params = setup.params
        return arm_of(params, self.precision(setup)), self.layers(params), self.new or int(params["context"])


def _model_name(text: str) -> str:
    """The name of a model, or of a function that makes one, which only `fp8bench infer` can have introduced."""
    return text if ":" in text and text.isprintable() else one_of(*SERVED_SIZES)(text)
