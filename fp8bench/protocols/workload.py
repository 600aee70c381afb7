"""The interface of workloads, the values that they receive and return, and the layers that a precision map can name."""

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

    `name` is a dotted path ('blocks.0.attn.qkv'). Similar layers have the same `kind` ('attn'). `group` is one more
    key for several layers. `high` layers stay in high precision unless a precision map names them. Embeddings and
    norms have no `product`. A map sets their precision only by their full name or their kind.
    """

    name: str
    kind: str
    high: bool = False
    product: bool = True
    group: str = ""


# Some kinds of layers have a second key.
_SECOND_KEY_OF_KIND = {"head": "output"}


def kind_keys(layer: Layer) -> tuple[str, ...]:
    """Returns the keys by which a precision map can name a set of layers that contains this one. The key of the
    smallest set comes first.
    """
    return tuple(filter(None, (layer.group, layer.kind, _SECOND_KEY_OF_KIND.get(layer.kind, ""))))


def list_map_keys(layers: Iterable[Layer]) -> dict[str, None]:
    """Returns every key that a precision map may have for these layers. Keys are kinds, names, and beginnings of
    names.
    """
    # A dictionary keeps the order of the layers. Messages list the keys in this order.
    keys: dict[str, None] = {}
    for layer in layers:
        # The beginning of a name stands for all layers below it that have a product. A layer without a product must
        # have its full name.
        prefixes = accumulate(layer.name.split("."), "{}.{}".format)
        keys.update(dict.fromkeys((*kind_keys(layer), *(prefixes if layer.product else (layer.name,)))))
    return keys


def key_of(layer: Layer, keys: Collection[str]) -> str | None:
    """Returns the one of `keys` that applies to a layer, or None. The longest key that is the layer's name or a
    beginning of it applies. Without such a key, one for the layer's kind applies.
    """
    name_keys = [key for key in keys if layer.name == key or (layer.product and layer.name.startswith(f"{key}."))]
    if name_keys:
        # The longest key is the most exact one: 'blocks.0.attn' comes before 'blocks.0'.
        return max(name_keys, key=len)
    return next((word for word in kind_keys(layer) if word in keys), None)


def explain_missing_product(precision: Precision, key: str) -> str:
    # Layers without a product need a precision that can round a single tensor.
    """Returns why a precision cannot be used for the layers that a map's `key` names, or '' if it can. These layers
    have no product: they are embeddings, norms and sums.
    """
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


Shared = Callable[[Callable[[], Any]], Any]


@dataclass(frozen=True)
class Setup:
    """The arguments with which a workload prepares a case.

    `arithmetic` is that of the case's precision, and `high` that of values between products. `layers` has the
    arithmetics that the precision map sets, by its keys. `corpus` is the path of the token file, for workloads that
    read one. `scales` keeps the static scales, if the case has any. Another `draw` gives other initial weights for
    the same data. `shared` calls a function whose result does not depend on the precision once for several cases, and
    returns the result. It is None if there is only one case.
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
        """Returns the arithmetic of one layer. It is a separate instance if casts have state."""
        key = key_of(layer, self.layers)
        selected_arithmetic = self.layers[key] if key is not None else self.high if layer.high else self.arithmetic
        arithmetic = selected_arithmetic.layer(layer.name)
        # Static scales are stored by the name of their layer.
        return arithmetic if self.scales is None else arithmetic.scaled_by(self.scales, layer.name)

    def around(self, layers: Iterable[Layer]) -> dict[str, Arithmetic]:
        """Returns the arithmetics of those layers without products (embeddings, norms) that the precision map names."""
        return {layer.name: self.layers[key] for layer in layers if (key := key_of(layer, self.layers)) is not None}

    @property
    def settles(self) -> bool:
        """Whether errors are measured in a second pass. That is so if the first pass fills the history from which a
        precision gets its scales.
        """
        return any(layer.settles for layer in (self.arithmetic, *self.layers.values()))


@dataclass(frozen=True)
class Grid:
    """The few cases of a workload that have a history from commit to commit, and their figures.

    `cpu` and `gpu` map axes to the values that are measured on that kind of device. Other axes have their defaults.
    Some axis must have no value in common in the two maps. Otherwise a machine that loses its GPU would continue the
    GPU's series.

    `phases` and `errors` are stored besides the time of a step. `per` names the count by which the time is also
    divided: 'flops', 'tokens', 'bytes' or ''. With `energy` the joules of a step are stored. `ranks` are numbers of
    processes, each with its own series, or () for one process. With several ranks the bytes that a rank sends are
    stored, but neither energy nor operator counts.
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
    """The data from which FLOP coverage is computed: the unchanged model, the weights of its products as the
    conversion stores them, and a step. Sides of native products must be multiples of `multiple`. After the step,
    `loss` describes how its loss was computed.
    """

    model: Any
    held: Sequence[Any]
    step: Callable[[], object]
    multiple: int
    loss: Callable[[], str]


class StepParts(NamedTuple):
    """Parts of a step of several ranks that are timed separately.

    `compute` is the step without communication, `communicate` the communication alone, and `together` both of them.
    `together` may be None. Then `compute` consists of products, and `communicate` starts a transfer and returns a
    handle with a method `wait()`. `sent` is what this rank sends in a step. `alone` are two steps by one rank, with
    the whole batch and with one rank's share.
    """

    compute: Callable[[], object]
    communicate: Callable[[], Any]
    together: Callable[[], object] | None = None
    sent: tuple[Sent, ...] = ()
    alone: tuple[Callable[[], object], Callable[[], object]] | None = None


class Workload(ABC):
    """Something to measure. `prepare` makes its state in a worker process, and `step` is timed.

    `layer_kinds` are the kinds of layers in all its cases. `dtypes` are the precisions of a run that names none.
    `history` has the cases whose figures are kept from commit to commit. With `fused`, quantisers are compiled before
    they are timed. `batch_axis` is the axis that --max-batch varies, or ''.

    With `may_diverge`, infinite or NaN state gives a case a label and does not fail it. With `linear_layers`, all
    low-precision products are those of linear layers, which a backend may replace. With `single_products`, the step
    calls casts and products separately. With `unit_scales`, the model can be unit-scaled. `loads` describes what
    `load` copies, or is ''.

    A workload that is not `listed` has a separate command, or needs several processes. `least_ranks` is the least
    number of processes. If a report shows the time of a step's parts, `part_ends` is the phase that ends each part.
    With `examined`, only a worker knows which cases and layers are possible. So the worker is asked (`examine`)
    before measuring.

    With `own_paths`, the operations of a step depend on its numbers, so that precisions may do different work.
    `numbers_ignore` are axes that change no number of a step. `not_on_device` explains why the memory of emulated cases
    on real hardware is unknown, or is ''.
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
        """Returns the axes of the workload, with defaults for this kind of device."""

    @abstractmethod
    def work(self, params: Mapping[str, Scalar]) -> Work:
        """Returns the operations, bytes and tokens of one step."""

    def preload(self, setup: Setup) -> None:
        """Loads what the process keeps for all cases. It is called before the memory of a case is counted, so that no
        case contains it.
        """

    @abstractmethod
    def prepare(self, setup: Setup) -> Any:
        """Makes the tensors and models of one case. They depend on the seed alone."""

    @abstractmethod
    def step(self, state: Any, phase: Phases) -> None:
        """Runs one step, each part under the marker of its phase."""

    def load(self, state: Any) -> None:
        """Copies the input of the next step from the host to the device, always to the same addresses.

        It is called before each step that is replayed as a captured graph. It is needed only if `loads` is not empty.
        """
        raise NotImplementedError

    def expand(self, params: Mapping[str, Scalar]) -> tuple[Params, ...]:
        """Returns the cases for which one combination of axis values stands."""
        return (tuple(params.items()),)

    def memory(self, params: Mapping[str, Scalar], precision: Precision) -> float:
        """Estimates the peak bytes of a state and its step. 0 means unknown. A case that needs more memory than is
        free is not started.
        """
        return 0.0

    def support(self, params: Mapping[str, Scalar], precision: Precision, facts: DeviceFacts) -> Support:
        """Returns how a device supports a precision with these parameters. The support is never better than that of
        the precision itself.

        It is worse if a shape does not fit, if an operation has no such kernel, or if the precision would change
        nothing.
        """
        return precision.support(facts)

    def layer_support(
        self, kind: str, params: Mapping[str, Scalar], precision: Precision, facts: DeviceFacts
    ) -> Support:
        """Returns how a device supports `precision` for the layers of this kind. It is asked if a precision map gives
        these layers another precision than the rest of the model.
        """
        return self.support(params, precision, facts)

    def layers(self, params: Mapping[str, Scalar]) -> tuple[Layer, ...]:
        """Returns the layers that a precision map can name. By default there is one for each kind."""
        return tuple(Layer(kind, kind) for kind in self.layer_kinds)

    def around(self, params: Mapping[str, Scalar]) -> tuple[Layer, ...]:
        """Returns the layers without products that a precision map can name: embeddings and norms."""
        return ()

    def examine(self, setup: Setup) -> Sequence[str]:
        """Raises UsageError for an impossible case, and returns notes for the run. If the workload is `examined`, a
        worker calls it before anything is measured.
        """
        return ()

    def covered(self, setup: Setup) -> Covered | None:
        """Returns the data from which FLOP coverage is computed. Returns None unless a case converts layers of a
        user's model.
        """
        return None

    def arithmetics(self, setup: Setup) -> Callable[[str], Arithmetic]:
        layers_by_name = {layer.name: layer for layer in self.layers(setup.params)}
        return lambda name: setup.layer(layers_by_name[name])

    def scales_refused(self, params: Mapping[str, Scalar], rule: StaticScales) -> str:
        """Returns why layers with these parameters cannot have static scales by this rule. Returns '' if they can."""
        return ""

    def error_refused(self, params: Mapping[str, Scalar]) -> str:
        """Returns why cases with these parameters have no numerical errors, or '' if they have some."""
        return ""

    def error(self, setup: Setup) -> Mapping[str, float]:
        """Returns numerical errors of one case by metric name. An error that is not finite fails the case.

        The end of a name is its unit (`specs.spec_of`): '_db', '_percent', '_ulp' or '_octaves'. Any other error is a
        plain ratio, and 'relative_loss' is a ratio near 1. A name that fp8bench's own figures or phases have
        (`model.specs`) fails the case too.
        """
        return {}

    def statistics(self, setup: Setup) -> tuple[TensorStatistics, ...]:
        """Returns statistics of the tensors in a step before any scaling. They are measured once for each group, in
        the precision of its reference.
        """
        return ()

    def losses(self, setup: Setup, steps: int) -> Sequence[float]:
        """Returns the losses of `steps` training steps, up to the first loss that is not finite. Returns () without
        training.
        """
        return ()

    def gradient_error(self, setup: Setup, reference: Setup) -> float | None:
        """Returns the relative difference between the gradients of the first step in two setups. Returns None without
        gradients.
        """
        return None

    def transfer(self, setup: Setup) -> Transfer | None:
        """Returns what a step moves between ranks. Returns None if the workload is not a collective. It is called
        only with several ranks.
        """
        return None

    def step_parts(self, setup: Setup) -> StepParts | str | None:
        """Returns the parts of a step of several ranks that are timed separately, because communication may hide
        behind computing. If these cannot be had, returns the reason. Returns None if the workload has no such parts.
        """
        return None

    def sent_by(self, case: Case) -> Params:
        """Returns the parameters that determine what a case sends. Cases whose parameters are equal here share one
        measurement of their parts.
        """
        return case.params

    def check(self, state: Any) -> str:
        """Returns what is wrong with a state after all its steps ('the loss went up'). Returns '' if nothing is
        wrong.

        Every workload is also checked for numbers that are not finite, without this method.
        """
        return ""
