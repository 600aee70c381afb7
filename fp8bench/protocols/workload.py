"""Defines the interface of workloads, the values that they receive and return, and the layers that a precision map can
name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

from fp8bench.model import Case, DeviceFacts, Params, Scalar, StaticScales, Support, TensorStatistics, Work
from fp8bench.model.ranks import Sent, Transfer
from fp8bench.protocols.arithmetic import Arithmetic, ScaleBook
from fp8bench.protocols.axes import Axis
from fp8bench.protocols.measuring import Phases
from fp8bench.protocols.precision import Precision


class Layer(NamedTuple):
    """A layer of a model, whose arithmetic can be chosen separately.

    `name` is a dotted path ('blocks.0.attn.qkv'). Similar layers have the same `kind` ('attn'). A precision map can
    also name several layers by their `group`. Layers with `high` stay in high precision unless a precision map names
    them. `product` is False for layers without a matrix product: embeddings, norms and sums. A map names these only by
    their full name, their group or their kind.
    """

    name: str
    kind: str
    high: bool = False
    product: bool = True
    group: str = ""


# Aliases for kinds of layers in a precision map.
_ALIAS_BY_LAYER_KIND = {"head": "output"}


def list_layer_kind_keys(layer: Layer) -> tuple[str, ...]:
    """Returns the keys by which a precision map can name a layer together with similar layers. The key for the fewest
    layers comes first.
    """
    return tuple(filter(None, (layer.group, layer.kind, _ALIAS_BY_LAYER_KIND.get(layer.kind, ""))))


def list_map_keys(layers: Iterable[Layer]) -> dict[str, None]:
    """Returns every key by which a precision map can name some of these layers: kinds, names, and beginnings of
    names.
    """
    # Use a dictionary, because it keeps the order of the layers, in which messages list the keys.
    keys: dict[str, None] = {}
    for layer in layers:
        # Only a layer with a product can be named by a prefix of its name, such as 'blocks.0'.
        dotted_name_prefixes = accumulate(layer.name.split("."), "{}.{}".format)
        layer_name_keys = dotted_name_prefixes if layer.product else (layer.name,)
        keys.update(dict.fromkeys((*list_layer_kind_keys(layer), *layer_name_keys)))
    return keys


def find_map_key(layer: Layer, keys: Collection[str]) -> str | None:
    """Returns the key that applies to a layer, or None if no key does. Keys that are the layer's name or a beginning of
    it take precedence over keys for its kind, and among them the longest one applies.
    """
    matching_map_keys = [
        key for key in keys if layer.name == key or (layer.product and layer.name.startswith(f"{key}."))
    ]
    if matching_map_keys:
        # The longest key is the most exact one: 'blocks.0.attn' comes before 'blocks.0'.
        return max(matching_map_keys, key=len)
    return next((word for word in list_layer_kind_keys(layer) if word in keys), None)


def explain_missing_product(precision: Precision, key: str) -> str:
    """Returns why a precision cannot be used for the layers without a product that `key` names in a precision map.
    Returns '' if it can be used.
    """
    # A layer without a product would only need the casts. Its backend must offer them, so a library of whole layers
    # cannot be used. Neither can TF32 (whose `float32_products` is not "highest"), which only rounds inside a product.
    if precision.whole_layers:
        return f"{precision.mode} has a library's products only, and {key} multiplies nothing: choose backend=emulated"
    if precision.float32_products != "highest":
        return f"{precision.mode} rounds what products read, and {key} multiplies nothing: choose fp32 or bf16"
    if precision.remembers:
        return (
            f"{precision.mode} takes scales or draws from earlier casts, and {key} has none: "
            "choose a precision that needs the tensor only, like fp8, mxfp8 or mxfp4"
        )
    return ""


# Calls the function that it gets and returns the result, or returns the result of an earlier case's call.
Shared = Callable[[Callable[[], Any]], Any]


@dataclass(frozen=True)
class Setup:
    """The arguments with which a workload prepares a case.

    `arithmetic` is the arithmetic of the case's precision, and `high` that of the layers that stay in high precision.
    `layers` has the arithmetics that the precision map sets, by the keys of the map. `corpus` is the path of the token
    file, for workloads that read one. `scales` stores the static scales, if the case has any. A different `draw` gives
    different initial weights for the same data. `shared` calls a function once and returns its result in several cases,
    so the result must not depend on the precision. It is None if there is only one case.
    """

    case: Case
    facts: DeviceFacts
    seed: int
    arithmetic: Arithmetic
    high: Arithmetic
    layers: Mapping[str, Arithmetic]
    loss_scale: float = 1.0
    corpus: str | None = None
    scales: ScaleBook | None = None
    draw: int = 0
    shared: Shared | None = None

    @property
    def params(self) -> dict[str, Scalar]:
        return dict(self.case.params)

    def layer(self, layer: Layer) -> Arithmetic:
        """Returns the arithmetic of one layer, which is a separate instance if casts have state."""
        key = find_map_key(layer, self.layers)
        default_layer_arithmetic = self.high if layer.high else self.arithmetic
        selected_arithmetic = default_layer_arithmetic if key is None else self.layers[key]
        arithmetic = selected_arithmetic.layer(layer.name)
        # The name selects the static scales of the layer.
        return arithmetic if self.scales is None else arithmetic.scaled_by(self.scales, layer.name)

    def around(self, layers: Iterable[Layer]) -> dict[str, Arithmetic]:
        """Returns by layer name the arithmetics that the precision map sets for layers without a product."""
        return {
            layer.name: self.layers[key] for layer in layers if (key := find_map_key(layer, self.layers)) is not None
        }

    @property
    def settles(self) -> bool:
        """Whether errors are measured in a second pass of a step. The first pass then only fills the history from which
        the precision gets its scales.
        """
        return any(layer.settles for layer in (self.arithmetic, *self.layers.values()))


@dataclass(frozen=True)
class Grid:
    """The few cases of a workload that have a history from commit to commit, and their figures.

    `cpu` and `gpu` have the values of axes that are measured on a CPU and on a GPU. Other axes have their defaults. At
    least one axis must have entirely different values in `cpu` and `gpu`. Otherwise a machine that loses its GPU would
    continue the series of the GPU.

    Besides the time of a step, the times of `phases` and the figures `errors` are stored. `per` names a count of work
    ('flops', 'tokens', 'bytes' or ''). The time for a fixed amount of this work (such as 10^12 FLOPs) is stored too. If
    `energy` is True, the joules of a step are stored. `ranks` are numbers of processes, which all have separate series;
    () means one process. With several ranks, the bytes that a rank sends are stored, but neither energy nor operator
    counts.
    """

    cpu: Mapping[str, tuple[str, ...]]
    gpu: Mapping[str, tuple[str, ...]]
    dtypes: tuple[str, ...] = ("fp32", "bf16", "fp8")
    phases: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    per: str = ""
    energy: bool = True
    ranks: tuple[int, ...] = ()


class Covered(NamedTuple):
    """The data from which FLOP coverage is computed: the share of a step's FLOPs that a case converts to low precision.

    `model` is the unchanged model, and `step` runs it. `held` describes the weights of its products, and which of them
    the conversion replaces. Native products require sizes that are multiples of `multiple`. After the step, `loss`
    returns a text for reports: from which tensor the backward pass started.
    """

    model: Any
    held: Sequence[Any]
    step: Callable[[], object]
    multiple: int
    loss: Callable[[], str]


class StepParts(NamedTuple):
    """The parts of a step on several ranks, which are timed separately.

    `compute` runs the step without communication, `communicate` runs only the communication, and `together` runs both
    at the same time. `sent` is what this rank sends in a step. `alone` has two functions that run the step on a single
    rank: with the whole batch, and with one rank's share of the batch.

    `together` is None for a step that only communicates. Then `compute` runs any products, which fp8bench repeats until
    they take long enough to be timed. `communicate` only starts the transfer and returns a handle with a method
    `wait()`, so that the products run during the transfer.
    """

    compute: Callable[[], object]
    communicate: Callable[[], Any]
    together: Callable[[], object] | None = None
    sent: tuple[Sent, ...] = ()
    alone: tuple[Callable[[], object], Callable[[], object]] | None = None


class Workload(ABC):
    """Something to measure. `prepare` makes its state in a worker process, and `step` is timed.

    `layer_kinds` are the kinds of layers in all cases of the workload. `dtypes` are the default precisions of a run.
    `history` has the cases whose figures are stored for each commit. If `fused` is True, quantisers are compiled before
    they are timed. `batch_axis` is the axis that --max-batch varies, or ''.

    If `may_diverge` is True, a case whose state has infinite or NaN numbers gets a label and does not fail. If
    `linear_layers` is True, all low-precision products are those of linear layers, which a backend may replace. If
    `single_products` is True, the step calls casts and products separately, and so can use a library of whole layers
    only if the library's casts and products can be called separately. If `unit_scales` is True, the model can be
    unit-scaled. `loads` describes what `load` copies, or is ''.

    A workload that is not `listed` has a separate command, or needs several processes. `least_ranks` is the smallest
    number of processes. A step may repeat a sequence of phases, such as one sampling step, whose times a report shows:
    then `part_ends` is the last phase of the sequence. If `examined` is True, only a worker knows the possible cases
    and layers.

    If `own_paths` is True, values decide which operations a step runs, so that precisions may do different work.
    `numbers_ignore` are the axes that change no numerical result. `not_on_device` explains why it is unknown how much
    memory an emulated case would need on hardware with its formats. It is '' if this is known.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    version: ClassVar[str] = "1"
    uses_corpus: ClassVar[bool] = False
    layer_kinds: ClassVar[tuple[str, ...]] = ()
    dtypes: ClassVar[tuple[str, ...]] = ("fp32", "bf16", "fp8")
    history: ClassVar[Grid | None] = None
    fused: ClassVar[bool] = True
    batch_axis: ClassVar[str] = ""
    may_diverge: ClassVar[bool] = False
    linear_layers: ClassVar[bool] = False
    single_products: ClassVar[bool] = False
    unit_scales: ClassVar[bool] = False
    loads: ClassVar[str] = ""
    listed: ClassVar[bool] = True
    least_ranks: ClassVar[int] = 1
    part_ends: ClassVar[str] = ""
    examined: ClassVar[bool] = False
    numbers_ignore: ClassVar[tuple[str, ...]] = ()
    own_paths: ClassVar[bool] = False
    not_on_device: ClassVar[str] = ""

    @abstractmethod
    def axes(self, facts: DeviceFacts) -> tuple[Axis, ...]:
        """Returns the axes of the workload, with default values for this kind of device."""

    @abstractmethod
    def work(self, params: Mapping[str, Scalar]) -> Work:
        """Returns the operations, bytes and tokens of one step."""

    def preload(self, setup: Setup) -> None:
        """Loads what the process keeps for all cases, such as libraries. Called before the memory of a case is counted,
        so that this memory counts for no case.
        """

    @abstractmethod
    def prepare(self, setup: Setup) -> Any:
        """Returns the state of one case: its tensors and models. Their values depend only on the seed."""

    @abstractmethod
    def step(self, state: Any, phase: Phases) -> None:
        """Runs one step, and each part of it within the marker of its phase."""

    def load(self, state: Any) -> None:
        """Copies the input of the next step (see `loads`) from the host to the device, always to the same addresses.
        Called before each replay of a step that was captured as a graph.
        """
        raise NotImplementedError

    def expand(self, params: Mapping[str, Scalar]) -> tuple[Params, ...]:
        """Returns the parameters of the cases that belong to one combination of axis values: by default one case."""
        return (tuple(params.items()),)

    def memory(self, params: Mapping[str, Scalar], precision: Precision) -> float:
        """Returns an estimate of the peak bytes of a state and its step, 0 if unknown. A case that needs more memory
        than the device has is not started.
        """
        return 0.0

    def support(self, params: Mapping[str, Scalar], precision: Precision, facts: DeviceFacts) -> Support:
        """Returns how a device supports a precision in a case with these parameters. The support is never better than
        the support of the precision itself.

        The support is worse if a shape does not fit, if an operation has no kernel in this precision, or if the
        precision would change nothing.
        """
        return precision.support(facts)

    def layer_support(
        self, kind: str, params: Mapping[str, Scalar], precision: Precision, facts: DeviceFacts
    ) -> Support:
        """Returns how a device supports `precision` for the layers of this kind. Called if a precision map sets the
        precision of these layers.
        """
        return self.support(params, precision, facts)

    def layers(self, params: Mapping[str, Scalar]) -> tuple[Layer, ...]:
        """Returns the layers that a precision map can name: by default one layer for each kind."""
        return tuple(Layer(kind, kind) for kind in self.layer_kinds)

    def around(self, params: Mapping[str, Scalar]) -> tuple[Layer, ...]:
        """Returns the layers without a product that a precision map can name: by default none."""
        return ()

    def examine(self, setup: Setup) -> Sequence[str]:
        """Returns notes for the run, and raises UsageError for an impossible case. If `examined` is True, a worker
        calls this before anything is measured.
        """
        return ()

    def covered(self, setup: Setup) -> Covered | None:
        """Returns the data from which FLOP coverage is computed, or None unless the case converts layers of a user's
        model.
        """
        return None

    def arithmetics(self, setup: Setup) -> Callable[[str], Arithmetic]:
        """Returns a function from the name of a layer to the arithmetic of this layer."""
        layers_by_name = {layer.name: layer for layer in self.layers(setup.params)}
        return lambda name: setup.layer(layers_by_name[name])

    def scales_refused(self, params: Mapping[str, Scalar], rule: StaticScales) -> str:
        """Returns why cases with these parameters cannot have the static scales of `rule`, or '' if they can."""
        return ""

    def error_refused(self, params: Mapping[str, Scalar]) -> str:
        """Returns why the numerical errors of cases with these parameters are not measured, or '' if they are."""
        return ""

    def error(self, setup: Setup) -> Mapping[str, float]:
        """Returns the numerical errors of one case, as figures by name. An error that is not finite fails the case.

        The suffix of a name determines the unit (`specs.find_metric_spec`): '_db', '_percent', '_ulp' or '_octaves'.
        Any other error is a plain ratio. 'relative_loss', a ratio near 1, is shown with more decimals, because a
        difference of a thousandth matters. A name that fp8bench uses for a figure or a phase (`model.specs`) also fails
        the case.
        """
        return {}

    def statistics(self, setup: Setup) -> tuple[TensorStatistics, ...]:
        """Returns statistics of the tensors in a step before any scaling. They are measured once for each group of
        compared cases, in the precision of the reference.
        """
        return ()

    def losses(self, setup: Setup, steps: int) -> Sequence[float]:
        """Returns the losses of `steps` training steps, up to the first loss that is not finite. Returns () for a
        workload that does not train.
        """
        return ()

    def gradient_error(self, setup: Setup, reference: Setup) -> float | None:
        """Returns the relative difference between the gradients of the first step in two setups. Returns None for a
        workload without gradients.
        """
        return None

    def transfer(self, setup: Setup) -> Transfer | None:
        """Returns the bytes that a step moves between ranks, or None if the workload is not a collective. Called only
        with several ranks.
        """
        return None

    def step_parts(self, setup: Setup) -> StepParts | str | None:
        """Returns functions that run the parts of a step separately, to find out how much they overlap. Returns the
        reason if the parts cannot run separately, and None if the workload has no such parts.
        """
        return None

    def sent_by(self, case: Case) -> Params:
        """Returns the parameters that determine what the ranks of a case send to each other. Cases with equal results
        share one measurement of `step_parts`.
        """
        return case.params

    def check(self, state: Any) -> str:
        """Returns what is wrong with a state after all its steps ('the loss went up'), or '' if nothing is wrong.

        This method need not look for numbers that are not finite: every workload is checked for these.
        """
        return ""
