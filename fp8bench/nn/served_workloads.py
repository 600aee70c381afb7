"""The base of workloads that run a served model. No torch here: plans read it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from fp8bench.errors import UsageError
from fp8bench.model import DeviceFacts, Params, Scalars, Support, Work
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
from fp8bench.nn.sizes import SERVED_SIZES, gpt_around, gpt_layers
from fp8bench.protocols import Layer, Phases, Precision, Setup, Workload
from fp8bench.protocols.axes import Axis, one_of

if TYPE_CHECKING:
    from fp8bench.nn.serving import ServedState


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
        # The usual sizes depend on the device: a CPU takes minutes for a GPU's.
        size, context = self.usual[facts.accelerated]
        return (
            Axis("size", f"the model: {', '.join(SERVED_SIZES)}", (size,), _model_name),
            Axis.count("batch", "sequences that are served together", "1", high=1 << 14),
            Axis.count("context", self.context_words, context, high=1 << 20),
            _format_axis("kv", "keys and values", KV_FORMATS),
            _format_axis("weights", "its blocks' weights", WEIGHT_FORMATS),
        )

    def expand(self, params: Scalars) -> tuple[Params, ...]:
        size = str(params["size"])
        context = int(params["context"])
        model = served_shape(size)
        if context > model.sequence:
            raise UsageError(f"context={context} is too long: {size} has positions for {model.sequence}. Choose less.")
        return super().expand(params)

    def work(self, params: Scalars) -> Work:
        model = served_shape(str(params["size"]))
        batch = int(params["batch"])
        context = int(params["context"])
        new = self.new or context
        flops = forward_flops(model, batch, new, context)
        return Work(flops, batch * new, least_memory=served_memory(model, batch, context))

    def support(self, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        return served_support(params, precision, facts)

    def layer_support(self, kind: str, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        return precision.support(facts)

    def layers(self, params: Scalars) -> tuple[Layer, ...]:
        """Returns no layers for a user's own model, which takes no precision map."""
        config = SERVED_SIZES.get(str(params["size"]))
        return gpt_layers(config.layers, config.experts) if config else ()

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


def _format_axis(name: str, tensors: str, formats: Iterable[str]) -> Axis:
    words = f"what {tensors} are kept in: {', '.join(formats)}; {OWN}: as the dtype says"
    return Axis.choice(name, words, OWN, *formats)


def _model_name(text: str) -> str:
    """The name of a model, or of a function that makes one, which only `fp8bench infer` can have introduced."""
    return text if ":" in text and text.isprintable() else one_of(*SERVED_SIZES)(text)
