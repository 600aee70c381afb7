"""What the suites prefill and decode have in common. No torch here: plans read it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from fp8bench.errors import UsageError
from fp8bench.model import DeviceFacts, Params, Scalar, Support, Work
from fp8bench.nn.served import (
    KV_FORMATS,
    OWN,
    WEIGHT_FORMATS,
    ServedArm,
    arm_of,
    by_layer,
    forward_flops,
    kept_word,
    served_memory,
    served_shape,
    served_support,
)
from fp8bench.nn.sizes import SERVED_SIZES, gpt_around, gpt_layers
from fp8bench.protocols import Layer, Phases, Precision, Setup, Workload
from fp8bench.protocols.axes import Axis, one_of, whole_number

if TYPE_CHECKING:
    from fp8bench.nn.serving import ServedState


class ServedWorkload(Workload):
    """A model with a static cache. A step is `new` tokens at the end of the context, by default all of it; `usual` are
    the size and context on a CPU, and on a GPU, and `context_words` what a context is."""

    dtypes = ("fp32", "bf16")
    layer_kinds = ("attn", "mlp", "head")
    fused = False
    batch_axis = "batch"
    usual: ClassVar[tuple[tuple[str, str], tuple[str, str]]]
    context_words: ClassVar[str]
    new: ClassVar[int | None] = None
    # The function of a name, which makes a model of one's own.
    named: Callable[[str], Callable[[], Any]]

    @abstractmethod
    def precision(self, setup: Setup) -> Precision:
        """That of the case."""

    def axes(self, facts: DeviceFacts) -> tuple[Axis, ...]:
        size, context = self.usual[facts.accelerated]
        formats = (("kv", "keys and values", KV_FORMATS), ("weights", "its blocks' weights", WEIGHT_FORMATS))
        return (
            Axis("size", f"the model: {', '.join(SERVED_SIZES)}", (size,), _size),
            Axis("batch", "sequences that are served together", ("1",), whole_number(high=1 << 14)),
            Axis("context", self.context_words, (context,), whole_number(high=1 << 20)),
            *(
                Axis(name, f"what {what} are kept in: {', '.join(known)}, as in {list(known)[2]}@0-3=bf16 by layer; "
                     f"{OWN}: as the dtype says", (OWN,), kept_word(known, OWN))
                for name, what, known in formats
            ),
        )  # fmt: skip

    def expand(self, params: Mapping[str, Scalar]) -> tuple[Params, ...]:
        """Raise for a context that the model does not have, and for layers that it has not."""
        size, context = str(params["size"]), int(params["context"])
        model = served_shape(size)
        if context > model.sequence:
            raise UsageError(f"context={context} is too long: {size} has positions for {model.sequence}. Choose less.")
        for axis in ("kv", "weights"):
            by_layer(str(params[axis]), model.layers)
        return super().expand(params)

    def work(self, params: Mapping[str, Scalar]) -> Work:
        model, batch, context = served_shape(str(params["size"])), int(params["batch"]), int(params["context"])
        new = self.new or context
        flops = forward_flops(model, batch, new, context)
        return Work(flops, batch * new, least_memory=served_memory(model, batch, context))

    def support(self, params: Mapping[str, Scalar], precision: Precision, facts: DeviceFacts) -> Support:
        return served_support(params, precision, facts)

    def layer_support(
        self, kind: str, params: Mapping[str, Scalar], precision: Precision, facts: DeviceFacts
    ) -> Support:
        return precision.support(facts)

    def layers(self, params: Mapping[str, Scalar]) -> tuple[Layer, ...]:
        """None of a model of one's own, of which no precision map is written."""
        size = str(params["size"])
        return gpt_layers(config.layers, config.experts) if (config := SERVED_SIZES.get(size)) else ()

    def around(self, params: Mapping[str, Scalar]) -> tuple[Layer, ...]:
        config = SERVED_SIZES.get(str(params["size"]))
        return gpt_around(config.layers) if config else ()

    def prepare(self, setup: Setup) -> ServedState:
        from fp8bench.nn.serving import served_state

        return served_state(setup, *self._asked(setup), self.named)

    def step(self, state: ServedState, phase: Phases) -> None:
        state.step(phase)

    def error(self, setup: Setup) -> dict[str, float]:
        from fp8bench.nn.serving import logits_error

        return logits_error(setup, *self._asked(setup), self.named)

    def _asked(self, setup: Setup) -> tuple[ServedArm, tuple[Layer, ...], int]:
        params = dict(setup.case.params)
        return arm_of(params, self.precision(setup)), self.layers(params), self.new or int(params["context"])


def _size(text: str) -> str:
    """A model's name, or a function that makes one, of which a plan knows what `fp8bench infer` was told."""
    return text if ":" in text and text.isprintable() else one_of(*SERVED_SIZES)(text)
