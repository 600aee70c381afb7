"""What a workload is, what it is given, and which of its layers answer to which words of a precision map."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from fp8bench.model import Case, DeviceFacts, Params, Scalar, StaticScales, Support, TensorStatistics, Work
from fp8bench.model.ranks import Sent, Transfer
from fp8bench.protocols.arithmetic import Arithmetic, ScaleBook
from fp8bench.protocols.axes import Axis
from fp8bench.protocols.phases import Phases
from fp8bench.protocols.precision import Precision


class Layer(NamedTuple):
    """A layer whose products run in an arithmetic of its own.

    `name` is a path of words with points between ('blocks.0.attn.qkv'); `kind` is what alike layers have in common
    ('attn'). `high` ones stay in high precision unless a map says otherwise. Without a `product` it is what stands
    around products (embeddings, norms): it has a precision only where a map has its whole name, or its kind. `group` is
    one more word for it.
    """

    name: str
    kind: str
    high: bool = False
    product: bool = True
    group: str = ""


# What people call a layer of a kind, too.
_ALSO = {"head": "output"}


def words_for(layer: Layer) -> tuple[str, ...]:
    """What a map may say for layers like this one, the most exact word first."""
    return tuple(filter(None, (layer.group, layer.kind, _ALSO.get(layer.kind, ""))))


def keys_of(layers: Iterable[Layer]) -> dict[str, None]:
    """Every key that a precision map may have for these layers: kinds, front parts of names, names."""
    found: dict[str, None] = {}
    for layer in layers:
        words = layer.name.split(".")
        fronts = [".".join(words[:count]) for count in range(1, len(words) + 1)]
        found.update(dict.fromkeys((*words_for(layer), *(fronts if layer.product else fronts[-1:]))))
    return found


def key_of(layer: Layer, keys: Collection[str]) -> str | None:
    """The key that a layer obeys: the longest that is its name or the front part of it, else its kind, else none."""
    fitting = [key for key in keys if layer.name == key or (layer.product and layer.name.startswith(f"{key}."))]
    if fitting:
        return max(fitting, key=len)
    return next((word for word in words_for(layer) if word in keys), None)


def around_refused(precision: Precision, key: str) -> str:
    """Why what stands around products cannot be in a precision; '' where it can."""
    if precision.whole_layers:
        return (
            f"{precision.mode} has products of a library alone, and {key} multiplies nothing: choose backend=emulated"
        )
    if precision.float32_products != "highest":
        return f"{precision.mode} rounds what products read, and {key} multiplies nothing: choose fp32 or bf16"
    if precision.remembers:
        return (
            f"{precision.mode} takes scales or draws from casts before, which products alone have, and {key} is none: "
            "choose a precision that looks at its tensor alone, like fp8, mxfp8 or mxfp4"
        )
    return ""


Shared = Callable[[Callable[[], Any]], Any]


@dataclass(frozen=True)
class Setup:
    """What a workload gets to prepare a case.

    `arithmetic` is the case's own precision, `high` its high-precision partner (the carrier of activations),
    `layers` the exceptions of the precision map by its keys; `corpus` is the token file, where the workload reads one.
    `scales` keeps what layers take from data, where the case asks for it. `draw` chooses other initial weights for the
    same data. `shared` gives what does not depend on a case's precision: cases that are asked for their errors one
    after another make it once; None where nobody comes after it.
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

    def layer(self, layer: Layer) -> Arithmetic:
        """The arithmetic of one layer, its own where it remembers something."""
        key = key_of(layer, self.layers)
        chosen = self.layers[key] if key is not None else self.high if layer.high else self.arithmetic
        own = chosen.layer(layer.name)
        return own if self.scales is None else own.scaled_by(self.scales, layer.name)

    def around(self, layers: Iterable[Layer]) -> dict[str, Arithmetic]:
        """The arithmetics of what stands around products, where the map has one."""
        keyed = {layer.name: key_of(layer, self.layers) for layer in layers}
        return {name: self.layers[key] for name, key in keyed.items() if key is not None}

    @property
    def settles(self) -> bool:
        """Whether errors are those of a second pass: the first one fills what an arithmetic remembers."""
        return any(layer.settles for layer in (self.arithmetic, *self.layers.values()))


@dataclass(frozen=True)
class Grid:
    """The few cases of a workload whose history is kept, and what is told of each.

    `cpu` and `gpu` map axes to the values that are measured on that class of device; other axes have their defaults.
    Some axis has no value in common: a machine that loses its GPU must not go on in the GPU's series. `phases` and
    `errors` are those that a step has, beside its time; `per` is the count of Work that time is told per, if any:
    'flops', 'tokens' or 'bytes'. `energy` says whether joules of a step are told: not where nobody asks for its time.
    `ranks` are the numbers of processes that run a case together and are followed, each in series of its own; () for
    one process alone. What only one process tells (energy, counts of operators) is then left out, and the bytes that a
    rank sends come instead.
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
    """What the coverage of a model is counted of: the model as it came, the weights that its products are made with as
    a conversion holds them, and a step. `multiple` is what native products want of sides; `loss` says how the step's
    loss was found, after it."""

    model: Any
    held: Sequence[Any]
    step: Callable[[], object]
    multiple: int
    loss: Callable[[], str]


class StepParts(NamedTuple):
    """What a step of several ranks takes by itself: without what it sends, the sending alone, and both.

    Without `together` they are no step: products, and what begins a communication and returns what to `wait()` for.
    `sent` is what this rank sends in a step. `alone` are one rank's steps of the whole batch and of its share.
    """

    compute: Callable[[], object]
    communicate: Callable[[], Any]
    together: Callable[[], object] | None = None
    sent: tuple[Sent, ...] = ()
    alone: tuple[Callable[[], object], Callable[[], object]] | None = None


class Workload(ABC):
    """Something to measure. State lives in the worker; `step` is what is timed.

    `layer_kinds` are kinds that layers have in all its cases, `dtypes` the precisions of a run that names none,
    `history` the cases whose numbers are followed from commit to commit. `fused` says whether quantisers are compiled
    before they are timed: not where numbers are all that it is about. `batch_axis` is the axis that --max-batch
    varies, which says how much a step takes in at once; '' if there is none. `may_diverge` says that numbers of the
    state may become infinite or NaN: the case is then labelled, and fails otherwise. `linear_layers` says that all its
    products in low precision are those of linear layers, which a backend may make its own; `unit_scales` that unit
    scaling knows its model. `loads` says what `load`
    brings. `error`, `statistics` and `check` run apart from any timing. One that is not `listed` has a command of its
    own, or takes `least_ranks` processes together. `part_ends` is the phase that ends each part of a step whose time is
    told by itself, if it has such parts. `examined` says that which cases there can be, and which layers,
    only a worker knows: it is asked beforehand (`examine`), and a plan takes the keys of a precision map as they are.
    `own_paths` says that what a step does depends on its numbers, so that precisions may do different work.
    `not_on_device` says why nobody can tell what hardware would hold of its emulated cases; '' where somebody can.
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
    unit_scales: ClassVar[bool] = False
    loads: ClassVar[str] = ""
    listed: ClassVar[bool] = True
    least_ranks: ClassVar[int] = 1
    part_ends: ClassVar[str] = ""
    examined: ClassVar[bool] = False
    own_paths: ClassVar[bool] = False
    not_on_device: ClassVar[str] = ""

    @abstractmethod
    def axes(self, facts: DeviceFacts) -> tuple[Axis, ...]:
        """The parameters, with defaults for that class of device."""

    @abstractmethod
    def work(self, params: Mapping[str, Scalar]) -> Work:
        """What one step does, by count."""

    @abstractmethod
    def prepare(self, setup: Setup) -> Any:
        """Tensors and models for one case, from the seed alone."""

    @abstractmethod
    def step(self, state: Any, phase: Phases) -> None:
        """One step, its parts under their phases."""

    def load(self, state: Any) -> None:
        """Bring what the next step takes from its host to the device, always to the same place: steps take it from
        there from now on.

        Asked only where `loads` says what it is, and before each step that is done again without its host.
        """
        raise NotImplementedError

    def expand(self, params: Mapping[str, Scalar]) -> tuple[Params, ...]:
        """The cases one combination of axis values stands for."""
        return (tuple(params.items()),)

    def memory(self, params: Mapping[str, Scalar], precision: Precision) -> float:
        """About what a state and its step take at their highest, in bytes, said before anything is measured; 0 where
        nobody has worked it out. What takes more than there is is not begun."""
        return 0.0

    def support(self, params: Mapping[str, Scalar], precision: Precision, facts: DeviceFacts) -> Support:
        """How a device does these parameters in that precision: never better than the precision itself.

        Worse where a shape does not fit, an operation has no such kernel, or the precision would change nothing.
        """
        return precision.support(facts)

    def layer_support(
        self, kind: str, params: Mapping[str, Scalar], precision: Precision, facts: DeviceFacts
    ) -> Support:
        """The same for layers of a kind that a precision map gives another precision."""
        return self.support(params, precision, facts)

    def layers(self, params: Mapping[str, Scalar]) -> tuple[Layer, ...]:
        """The layers that a precision map may name; by default one of each kind."""
        return tuple(Layer(kind, kind) for kind in self.layer_kinds)

    def around(self, params: Mapping[str, Scalar]) -> tuple[Layer, ...]:
        """What stands around their products and a precision map may name, too: embeddings, norms."""
        return ()

    def examine(self, setup: Setup) -> None:
        """Raise UsageError for a case that cannot be; asked in a worker before anything is kept, where `examined`."""

    def covered(self, setup: Setup) -> Covered | None:
        """What the coverage of a case is counted of, where it converts layers of a model that is not fp8bench's own."""
        return None

    def arithmetics(self, setup: Setup) -> Callable[[str], Arithmetic]:
        named = {layer.name: layer for layer in self.layers(dict(setup.case.params))}
        return lambda name: setup.layer(named[name])

    def scales_refused(self, params: Mapping[str, Scalar], rule: StaticScales) -> str:
        """Why layers with these parameters cannot take scales from data so; '' where they can."""
        return ""

    def error_refused(self, params: Mapping[str, Scalar]) -> str:
        """Why there are no numerical errors with these parameters; '' where there are, or where nobody asks for any."""
        return ""

    def error(self, setup: Setup) -> Mapping[str, float]:
        """Numerical errors of one case, by metric name. One that is not finite fails the case.

        The end of a name says the unit (`specs.spec_of`): '_db', '_percent', '_ulp', '_octaves'; else a plain ratio;
        'relative_loss' is one near 1.
        Names of fp8bench's own figures and phases (`model.specs`) fail it too.
        """
        return {}

    def statistics(self, setup: Setup) -> tuple[TensorStatistics, ...]:
        """The values that a step works on, before any scaling; asked once a group, in its reference's precision."""
        return ()

    def losses(self, setup: Setup, steps: int) -> Sequence[float]:
        """The loss of each of so many training steps, up to one that is not finite; () where nothing is trained."""
        return ()

    def gradient_error(self, setup: Setup, reference: Setup) -> float | None:
        """How far the first step's gradients are from those in another setup, relative; None where there are none."""
        return None

    def transfer(self, setup: Setup) -> Transfer | None:
        """What a step moves between ranks; None where that is not what it is about. Asked of several ranks alone."""
        return None

    def step_parts(self, setup: Setup) -> StepParts | str | None:
        """What a step of several ranks is made of: one part may hide the other. Why it cannot, where that is known;
        None where that is not what a step is about."""
        return None

    def sent_by(self, case: Case) -> Params:
        """The parameters that what a case sends depends on: its parts are measured once of cases that send the same."""
        return case.params

    def check(self, state: Any) -> str:
        """What is wrong with a state after all its steps ('the loss went up'); '' if nothing is.

        Whether its numbers are finite is looked at for every workload.
        """
        return ""
