"""Interfaces of workloads: what they provide, what they get, and the layers that a precision map addresses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from fp8bench.model import Case, DeviceFacts, Params, Scalar, StaticScales, Support, TensorStatistics, Work
from fp8bench.model.ranks import Sent, Transfer
from fp8bench.protocols.arithmetic import Arithmetic, ScaleBook
from fp8bench.protocols.axes import Axis
from fp8bench.protocols.measuring import Phases
from fp8bench.protocols.precision import Precision


class Layer(NamedTuple):
    """A layer whose products run in an arithmetic of its own.

    `name` is a path of words with points between ('blocks.0.attn.qkv'); `kind` is common to alike layers ('attn').
    `high` layers stay in high precision unless a map says otherwise. A layer without a `product` (embeddings, norms)
    has a precision only where a map has its whole name, or its kind. `group` is one more word for it.
    """

    name: str
    kind: str
    high: bool = False
    product: bool = True
    group: str = ""


# Other words for a kind of layer.
_ALSO = {"head": "output"}


def words_for(layer: Layer) -> tuple[str, ...]:
    """Words of a map that mean layers like this one, the most exact first."""
    return tuple(filter(None, (layer.group, layer.kind, _ALSO.get(layer.kind, ""))))


def keys_of(layers: Iterable[Layer]) -> dict[str, None]:
    """Every key that a precision map may have for these layers: kinds, prefixes of names, names."""
    # A dictionary as an ordered set: messages list the keys in the order of the layers.
    keys: dict[str, None] = {}
    for layer in layers:
        words = layer.name.split(".")
        # Every prefix of a product's name means the products below it; a layer without one has its whole name only.
        fronts = [".".join(words[:count]) for count in range(1, len(words) + 1)]
        keys.update(dict.fromkeys((*words_for(layer), *(fronts if layer.product else fronts[-1:]))))
    return keys


def key_of(layer: Layer, keys: Collection[str]) -> str | None:
    """The key that applies to a layer: the longest that is its name or a prefix of it, else its kind, else None."""
    fitting = [key for key in keys if layer.name == key or (layer.product and layer.name.startswith(f"{key}."))]
    if fitting:
        # The longest prefix is the most exact: 'blocks.0.attn' beats 'blocks.0'.
        return max(fitting, key=len)
    return next((word for word in words_for(layer) if word in keys), None)


def around_objection(precision: Precision, key: str) -> str:
    # Embeddings, norms and sums need a precision that rounds one tensor by itself.
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
    """What a workload gets to prepare a case.

    `arithmetic` is the case's own precision, `high` the high-precision one that carries activations, `layers` the
    exceptions of the precision map by its keys; `corpus` is the token file, where the workload reads one. `scales`
    keeps what layers take from data, where the case asks for it. `draw` chooses other initial weights for the same
    data. `shared` returns what does not depend on a case's precision: cases whose errors are measured one after another
    make it once; None without further cases.
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
        """The arithmetic of one layer: a separate instance if it has state."""
        key = key_of(layer, self.layers)
        chosen = self.layers[key] if key is not None else self.high if layer.high else self.arithmetic
        arithmetic = chosen.layer(layer.name)
        # Scales from data are kept for each layer by its name.
        return arithmetic if self.scales is None else arithmetic.scaled_by(self.scales, layer.name)

    def around(self, layers: Iterable[Layer]) -> dict[str, Arithmetic]:
        """The arithmetics of layers without products, where the map has one."""
        keyed = {layer.name: key_of(layer, self.layers) for layer in layers}
        return {name: self.layers[key] for name, key in keyed.items() if key is not None}

    @property
    def settles(self) -> bool:
        """Whether errors are taken from a second pass, because the first one fills what an arithmetic remembers."""
        return any(layer.settles for layer in (self.arithmetic, *self.layers.values()))


@dataclass(frozen=True)
class Grid:
    """The few cases of a workload whose history is kept, and their figures.

    `cpu` and `gpu` map axes to the values that are measured on that class of device; other axes have their defaults.
    Some axis has no value in common, so that a machine that loses its GPU does not go on in the GPU's series. `phases`
    and `errors` are kept beside a step's time; `per` is the count of Work that time is also given per: 'flops',
    'tokens', 'bytes' or ''. `energy` says whether joules of a step are kept. `ranks` are the numbers of processes whose
    cases are kept, each in series of its own; () for one process. With ranks, figures of one process (energy, counts of
    operators) are left out, and the bytes that a rank sends are kept.
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
    """What coverage is counted from: the model as it came, the weights that its products are made with as a conversion
    holds them, and a step. `multiple` is what sides of native products have to be multiples of; `loss` says, after the
    step, how its loss was found."""

    model: Any
    held: Sequence[Any]
    step: Callable[[], object]
    multiple: int
    loss: Callable[[], str]


class StepParts(NamedTuple):
    """Parts of a step of several ranks: without what it sends, the sending alone, and both.

    Without `together` they are products, and a function that begins a communication and returns what to `wait()` for.
    `sent` is what this rank sends in a step. `alone` are one rank's steps of the whole batch and of its share.
    """

    compute: Callable[[], object]
    communicate: Callable[[], Any]
    together: Callable[[], object] | None = None
    sent: tuple[Sent, ...] = ()
    alone: tuple[Callable[[], object], Callable[[], object]] | None = None


class Workload(ABC):
    """Something to measure. State lives in the worker; `step` is what is timed.

    `layer_kinds` are the kinds of layers in all its cases, `dtypes` the precisions of a run that names none, `history`
    the cases whose figures are kept from commit to commit. `fused`: quantisers are compiled before they are timed.
    `batch_axis` is the axis that --max-batch varies, '' for none. `may_diverge`: the state may become infinite or NaN,
    which labels the case instead of failing it. `linear_layers`: all its products in low precision are those of
    linear layers, which a backend may replace; `single_products`: it calls casts and products one by one;
    `unit_scales`: unit scaling knows its model. `loads` says what `load` brings. A workload that is not `listed`
    has a command of its own, or needs `least_ranks` processes. `part_ends` is the phase that ends each part of a
    step whose time is shown by itself. `examined`: only a worker knows its possible cases and layers, and is asked
    beforehand (`examine`). `own_paths`: what a step does depends on its numbers, so precisions may do different
    work. `numbers_ignore` are axes that change no number of a step. `not_on_device` says why the memory of emulated
    cases on real hardware is unknown; '' where it is known.
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
        """The parameters, with defaults for that class of device."""

    @abstractmethod
    def work(self, params: Mapping[str, Scalar]) -> Work:
        """The work of one step, counted."""

    @abstractmethod
    def prepare(self, setup: Setup) -> Any:
        """Makes tensors and models for one case, from the seed alone."""

    @abstractmethod
    def step(self, state: Any, phase: Phases) -> None:
        """Runs one step, its parts under their phases."""

    def load(self, state: Any) -> None:
        """Brings what the next step takes from its host to the device, always to the same place, from which steps take
        it from now on.

        Called only where `loads` is not empty, before each step that is replayed without its host.
        """
        raise NotImplementedError

    def expand(self, params: Mapping[str, Scalar]) -> tuple[Params, ...]:
        """The cases that one combination of axis values stands for."""
        return (tuple(params.items()),)

    def memory(self, params: Mapping[str, Scalar], precision: Precision) -> float:
        """Estimates the peak bytes of a state and its step; 0 if unknown. A case that needs more than there is is not
        begun."""
        return 0.0

    def support(self, params: Mapping[str, Scalar], precision: Precision, facts: DeviceFacts) -> Support:
        """How a device supports these parameters in that precision: never better than the precision itself.

        Worse where a shape does not fit, an operation has no such kernel, or the precision would change nothing.
        """
        return precision.support(facts)

    def layer_support(
        self, kind: str, params: Mapping[str, Scalar], precision: Precision, facts: DeviceFacts
    ) -> Support:
        """Like `support`, for layers of a kind that a precision map gives another precision."""
        return self.support(params, precision, facts)

    def layers(self, params: Mapping[str, Scalar]) -> tuple[Layer, ...]:
        """The layers that a precision map may name; by default one of each kind."""
        return tuple(Layer(kind, kind) for kind in self.layer_kinds)

    def around(self, params: Mapping[str, Scalar]) -> tuple[Layer, ...]:
        """Layers without products that a precision map may name, too: embeddings, norms."""
        return ()

    def examine(self, setup: Setup) -> Sequence[str]:
        """Raises UsageError for an impossible case; called in a worker before anything is kept, where `examined`. What
        it returns becomes notes of the run."""
        return ()

    def covered(self, setup: Setup) -> Covered | None:
        """What coverage is counted from, where a case converts layers of a user's model."""
        return None

    def arithmetics(self, setup: Setup) -> Callable[[str], Arithmetic]:
        named = {layer.name: layer for layer in self.layers(setup.params)}
        return lambda name: setup.layer(named[name])

    def scales_refused(self, params: Mapping[str, Scalar], rule: StaticScales) -> str:
        """Why layers with these parameters cannot take scales from data by this rule; '' where they can."""
        return ""

    def error_refused(self, params: Mapping[str, Scalar]) -> str:
        """Returns why these parameters have no numerical errors; '' if they have."""
        return ""

    def error(self, setup: Setup) -> Mapping[str, float]:
        """Numerical errors of one case, by metric name. One that is not finite fails the case.

        The end of a name says the unit (`specs.spec_of`): '_db', '_percent', '_ulp', '_octaves'; else a plain ratio;
        'relative_loss' is one near 1. Names of fp8bench's own figures and phases (`model.specs`) fail the case, too.
        """
        return {}

    def statistics(self, setup: Setup) -> tuple[TensorStatistics, ...]:
        """The values that a step works on, before any scaling; once a group, in its reference's precision."""
        return ()

    def losses(self, setup: Setup, steps: int) -> Sequence[float]:
        """The loss of each of `steps` training steps, up to one that is not finite; () where nothing is trained."""
        return ()

    def gradient_error(self, setup: Setup, reference: Setup) -> float | None:
        """The relative difference of the first step's gradients from those of another setup; None where there are
        none."""
        return None

    def transfer(self, setup: Setup) -> Transfer | None:
        """Returns what a step moves between ranks; None except for collectives. Only called with several
        ranks."""
        return None

    def step_parts(self, setup: Setup) -> StepParts | str | None:
        """The parts of a step of several ranks, one of which may hide the other; the reason where they cannot be had;
        None for a workload without."""
        return None

    def sent_by(self, case: Case) -> Params:
        """The parameters that determine what a case sends: parts are measured once for cases that send the same."""
        return case.params

    def check(self, state: Any) -> str:
        """What is wrong with a state after all its steps ('the loss went up'); '' if nothing is.

        That its numbers are finite is checked for every workload.
        """
        return ""
