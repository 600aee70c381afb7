"""The base class of workloads that run a served model. This module must not import torch, because planning imports
it.
"""

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
    check_served_support,
    choose_served_arm,
    count_forward_flops,
    estimate_min_memory,
    find_served_shape,
)
from fp8bench.nn.sizes import SERVED_SIZES, gpt_layers, make_gpt_surrounding_layers
from fp8bench.protocols import Layer, Phases, Precision, Setup, Workload
from fp8bench.protocols.axes import Axis, one_of

if TYPE_CHECKING:
    from fp8bench.nn.serving import ServedState


class ServedWorkload(Workload):
    """Runs a model with a static cache. A step runs the last `new_token_count` tokens of the context, or all tokens if
    `new_token_count` is None.

    `default_sizes` has two default pairs of size and context, one for a CPU and one for a GPU. `context_description` is
    the help text of the context.
    """

    dtypes = ("fp32", "bf16")
    layer_kinds = ("attn", "mlp", "head")
    fused = False  # so quantisers are not compiled before timing
    batch_axis = "batch"
    default_sizes: ClassVar[tuple[tuple[str, str], tuple[str, str]]]
    context_description: ClassVar[str]
    new_token_count: ClassVar[int | None] = None
    # Finds the function that makes a user's model, by name.
    find_make_function: Callable[[str], Callable[[], Any]]

    @abstractmethod
    def precision(self, setup: Setup) -> Precision:
        """Returns the case's precision."""

    def axes(self, facts: DeviceFacts) -> tuple[Axis, ...]:
        # Default sizes depend on the device: a CPU would take minutes for those of a GPU.
        size, context = self.default_sizes[facts.accelerated]
        return (
            Axis("size", f"the model: {', '.join(SERVED_SIZES)}", (size,), _parse_model_name),
            Axis.count("batch", "sequences that are served together", "1", high=1 << 14),
            Axis.count("context", self.context_description, context, high=1 << 20),
            _make_format_axis("kv", "keys and values", KV_FORMATS),
            _make_format_axis("weights", "its blocks' weights", WEIGHT_FORMATS),
        )

    def expand(self, params: Scalars) -> tuple[Params, ...]:
        size = str(params["size"])
        context = int(params["context"])
        model = find_served_shape(size)
        if context > model.sequence:
            raise UsageError(f"context={context} is too long: {size} has {model.sequence} positions. Choose fewer.")
        return super().expand(params)

    def work(self, params: Scalars) -> Work:
        model = find_served_shape(str(params["size"]))
        batch = int(params["batch"])
        context = int(params["context"])
        new_tokens = self.new_token_count or context
        flops = count_forward_flops(model, batch, new_tokens, context)
        return Work(flops, tokens=batch * new_tokens, least_memory=estimate_min_memory(model, batch, context))

    def support(self, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        return check_served_support(params, precision, facts)

    def layer_support(self, kind: str, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        return precision.support(facts)

    def layers(self, params: Scalars) -> tuple[Layer, ...]:
        """Returns the layers of the model. A user's model has none, because it takes no precision map."""
        config = SERVED_SIZES.get(str(params["size"]))
        return gpt_layers(config.layers, config.experts) if config else ()

    def around(self, params: Scalars) -> tuple[Layer, ...]:
        """Returns the layers without a matrix product, such as norms. A user's model has none."""
        config = SERVED_SIZES.get(str(params["size"]))
        return make_gpt_surrounding_layers(config.layers) if config else ()

    def prepare(self, setup: Setup) -> ServedState:
        from fp8bench.nn.serving import make_served_state

        return make_served_state(setup, *self._served_arguments(setup), self.find_make_function)

    def step(self, state: ServedState, phase: Phases) -> None:
        state.step(phase)

    def error(self, setup: Setup) -> dict[str, float]:
        from fp8bench.nn.serving import measure_logits_error

        return measure_logits_error(setup, *self._served_arguments(setup), self.find_make_function)

    def _served_arguments(self, setup: Setup) -> tuple[ServedArm, tuple[Layer, ...], int]:
        params = setup.params
        return (
            choose_served_arm(params, self.precision(setup)),
            self.layers(params),
            self.new_token_count or int(params["context"]),
        )


def _make_format_axis(name: str, tensors: str, formats: Iterable[str]) -> Axis:
    help_text = f"the format of {tensors}: {', '.join(formats)}; {OWN}: the format of the dtype"
    return Axis.choice(name, help_text, OWN, *formats)


def _parse_model_name(text: str) -> str:
    """Parses the name of a model in SERVED_SIZES, or of a function that makes a model, such as 'my_package:make'. Only
    `fp8bench infer` registers such functions.
    """
    return text if ":" in text and text.isprintable() else one_of(*SERVED_SIZES)(text)
