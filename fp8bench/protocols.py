"""The interfaces a leaf implements, and the small values that pass through them.

Each has at most four abstract methods. torch appears in annotations only: a leaf imports it inside its methods, so
that every name can be listed without it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from fp8bench.axes import Axis, Option
from fp8bench.model import (
    PHASES,
    Case,
    DeviceFacts,
    Params,
    Plan,
    Record,
    Scalar,
    Support,
    TensorStatistics,
    Work,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Role(StrEnum):
    """What a tensor is in a product; recipes give formats by role."""

    INPUT = "input"
    WEIGHT = "weight"
    GRADIENT = "gradient"


class Phases(Protocol):
    """The markers a workload sees: `with phase.gemm: ...`. Nested markers are exclusive."""

    @property
    def data_load(self) -> AbstractContextManager[None]: ...
    @property
    def cast(self) -> AbstractContextManager[None]: ...
    @property
    def gemm(self) -> AbstractContextManager[None]: ...
    @property
    def attention(self) -> AbstractContextManager[None]: ...
    @property
    def accumulate(self) -> AbstractContextManager[None]: ...
    @property
    def optimizer_step(self) -> AbstractContextManager[None]: ...
    @property
    def elementwise(self) -> AbstractContextManager[None]: ...


class SilentMarker:
    """A marker that marks nothing, for untimed passes."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc: object) -> None:
        return None


_SILENT = SilentMarker()


class SilentPhases:
    """Phases that mark nothing."""

    __slots__ = ("accumulate", "attention", "cast", "data_load", "elementwise", "gemm", "optimizer_step")

    data_load: SilentMarker
    cast: SilentMarker
    gemm: SilentMarker
    attention: SilentMarker
    accumulate: SilentMarker
    optimizer_step: SilentMarker
    elementwise: SilentMarker

    def __init__(self) -> None:
        for name in PHASES:
            setattr(self, name, _SILENT)


@dataclass(frozen=True)
class Operand:
    """A tensor made ready for a product: its codes or rounded values, and the scale that gives the values back.

    Two dimensions, contraction last. `scale` is None where the data are the values themselves.
    """

    data: Tensor
    scale: Tensor | None = None


class Arithmetic(ABC):
    """How a precision casts and multiplies on one device.

    `casts` is False where a cast changes nothing, so that nobody opens a CAST phase around nothing; `keeps_source`
    says that the second orientation of an operand must be cast from the source again (block scales run along the
    contraction) and cannot be had by transposing the codes.
    """

    carrier: torch.dtype
    casts: bool = True
    keeps_source: bool = False

    def layer(self, name: str) -> Arithmetic:
        """The arithmetic of one layer: one of its own where it remembers something of what it cast (scales, seeds)."""
        return self

    @abstractmethod
    def cast(self, tensor: Tensor, role: Role) -> Operand:
        """`tensor` (2-D, contraction last) in this precision."""

    @abstractmethod
    def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        """a (M, K) times b (N, K) transposed, as (M, N) in `dtype`."""

    def turn(self, operand: Operand, source: Tensor, role: Role) -> Operand:
        """The operand with its dimensions swapped, for a product that contracts over the other one."""
        return self.cast(source.t(), role)

    def unscaled(self, tensor: Tensor, role: Role) -> Operand:
        """`tensor` on the elements' own grid, without looking for a scale; the cast itself where it has none."""
        return self.cast(tensor, role)

    def restore(self, operand: Operand, dtype: torch.dtype) -> Tensor:
        """The values of an operand in `dtype`: the way back from low precision."""
        import torch

        if operand.scale is None:
            return operand.data.to(dtype)
        return (operand.data.to(torch.float32) * operand.scale).to(dtype)


class Precision(ABC):
    """A mode, not a dtype: formats by role, a scaling, and what a device makes of it.

    `options` are what may stand behind its name (`fp8-delayed:history=16`); an instance holds them as `chosen`, all of
    them, by name. Whoever cannot be with what was chosen raises RecipeRefused when it is made.
    `rank` orders precisions from the highest down: the default reference is the lowest rank of a run. `loss_scale`
    multiplies the loss of a training step, for formats whose gradients would underflow. `carried_by` names the
    precision in which values travel between products, where it is not this one: all that is no product runs in it.
    """

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    summary: ClassVar[str]
    rank: ClassVar[int]
    loss_scale: ClassVar[float] = 1.0
    carried_by: ClassVar[str] = ""
    # torch's float32 matmul precision while it runs; a switch of the process, so one case cannot mix two.
    float32_products: ClassVar[str] = "highest"
    # Dimensions a native product needs as multiples: (of the contraction, of the columns).
    multiples: ClassVar[tuple[int, int]] = (1, 1)
    options: ClassVar[tuple[Option, ...]] = ()

    def __init__(self, chosen: Mapping[str, Scalar] | None = None) -> None:
        defaults = {one.name: one.parse(one.default) for one in self.options}
        self.chosen: Mapping[str, Scalar] = {**defaults, **(chosen or {})}

    @property
    def mode(self) -> str:
        """Its name with the options that differ from their defaults: one word for one meaning."""
        given = [(one, self.chosen[one.name]) for one in self.options]
        words = [f"{one.name}={value}" for one, value in given if value != one.parse(one.default)]
        return ":".join([self.name, *words])

    @abstractmethod
    def support(self, facts: DeviceFacts) -> Support:
        """Native, emulated or refused on that device, and why."""

    @abstractmethod
    def arithmetic(self, facts: DeviceFacts) -> Arithmetic:
        """The operations for that device; only called where `support` does not refuse."""

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Global switches this precision needs, set and restored; plain IEEE fp32 products by default."""
        with float32_products(self.float32_products):
            yield


@contextmanager
def float32_products(setting: str) -> Iterator[None]:
    """torch's float32 matmul precision for the body, cuDNN's convolutions included; restored also if it raises."""
    import torch

    before, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision(setting)
    # A switch of its own, and on unless told otherwise: fp32 convolutions would be TF32's.
    torch.backends.cudnn.allow_tf32 = setting != "highest"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = convolutions


class Stamper(ABC):
    """A device's clock. A stamp is cheap to take and may be read only after `intervals_ns`."""

    @abstractmethod
    def source(self) -> Callable[[], Any]:
        """The function that takes a stamp; fetched once, called on the hot path."""

    @abstractmethod
    def intervals_ns(self, stamps: Sequence[Any]) -> list[int]:
        """Nanoseconds between neighbouring stamps; waits for the device if it must."""

    def recycle(self) -> None:
        """Stamps taken so far will not be read any more."""


class MemoryMeter(ABC):
    """How much memory a stretch of work holds at most. For untimed passes: it may slow down what runs under it."""

    @abstractmethod
    def start(self) -> None:
        """Count from here on; what is allocated already is not counted, now or later."""

    @abstractmethod
    def mark(self) -> None:
        """The stretch whose highest point is wanted begins; what has been allocated since `start` counts in it."""

    @abstractmethod
    def stop(self) -> int | None:
        """Count no more: bytes at the highest point since `mark`, None without one. Also called after an exception."""


class Device(ABC):
    """A kind of device. CUDA events, synchronising, memory and its errors reach measuring through this only."""

    kind: ClassVar[str]

    @abstractmethod
    def available(self) -> tuple[DeviceFacts, ...]:
        """The devices of this kind on this machine, none if there is none."""

    @abstractmethod
    def stamper(self, index: int) -> Stamper:
        """A clock for one device."""

    @abstractmethod
    def synchronise(self, index: int) -> None:
        """Wait until the device has nothing left to do."""

    @abstractmethod
    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether an exception means that the device's memory did not suffice."""

    def select(self, index: int) -> None:
        """Make it the device that the calling thread works on; clocks record there."""

    def empty_cache(self) -> None:
        """Give memory that nobody uses back."""

    def memory_meter(self, index: int) -> MemoryMeter | None:
        """What counts the memory of one device; None where nobody can say."""
        return None


@dataclass(frozen=True)
class Setup:
    """What a workload gets to prepare a case.

    `arithmetic` is the case's own precision, `high` its high-precision partner (the carrier of activations),
    `layers` the exceptions of the precision map by layer kind; `corpus` is the token file, where the workload reads
    one.
    """

    case: Case
    facts: DeviceFacts
    seed: int
    arithmetic: Arithmetic
    high: Arithmetic
    layers: Mapping[str, Arithmetic]
    loss_scale: float = 1.0
    corpus: str | None = None


@dataclass(frozen=True)
class Grid:
    """The few cases of a workload whose history is kept, and what is told of each.

    `cpu` and `gpu` map axes to the values that are measured on that class of device; other axes have their defaults.
    Some axis has no value in common: a machine that loses its GPU must not go on in the GPU's series. `phases` and
    `errors` are those that a step has, beside its time; `per` is the count of Work that time is told per, if any:
    'flops', 'tokens' or 'bytes'.
    """

    cpu: Mapping[str, tuple[str, ...]]
    gpu: Mapping[str, tuple[str, ...]]
    dtypes: tuple[str, ...] = ("fp32", "bf16", "fp8")
    phases: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    per: str = ""


class Workload(ABC):
    """Something to measure. State lives in the worker; `step` is what is timed.

    `layer_kinds` are the names a precision map may use, `dtypes` the precisions of a run that names none, `history` the
    cases whose numbers are followed from commit to commit. `error`, `statistics` and `check` run apart from any timing.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    version: ClassVar[str] = "1"
    uses_corpus: ClassVar[bool] = False
    layer_kinds: ClassVar[tuple[str, ...]] = ()
    dtypes: ClassVar[tuple[str, ...]] = ("fp32", "bf16", "fp8")
    history: ClassVar[Grid | None] = None

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

    def expand(self, params: Mapping[str, Scalar]) -> tuple[Params, ...]:
        """The cases one combination of axis values stands for."""
        return (tuple(params.items()),)

    def support(self, params: Mapping[str, Scalar], precision: Precision, facts: DeviceFacts) -> Support:
        """How a device does these parameters in that precision: never better than the precision itself.

        Worse where a shape does not fit, an operation has no such kernel, or the precision would change nothing.
        """
        return precision.support(facts)

    def layer_support(
        self, kind: str, params: Mapping[str, Scalar], precision: Precision, facts: DeviceFacts
    ) -> Support:
        """The same for a layer kind that a precision map gives another precision, in a case of its own."""
        return self.support(params, precision, facts)

    def error(self, setup: Setup) -> Mapping[str, float]:
        """Relative numerical errors of one case, by metric name. One that is not finite fails the case."""
        return {}

    def statistics(self, setup: Setup) -> tuple[TensorStatistics, ...]:
        """The values that a step works on, before any scaling; asked once a group, in its reference's precision."""
        return ()

    def check(self, state: Any) -> str:
        """What is wrong with a state after all its steps ('the loss is NaN'); '' if nothing is."""
        return ""


class Observer(Protocol):
    """Told how a run goes along; measuring code reports here and never prints."""

    def planned(self, plan: Plan) -> None:
        """The plan stands."""

    def working(self, case: Case, doing: str, share: float) -> None:
        """A case is being worked on; `share` of its group's time has gone."""

    def finished(self, record: Record) -> None:
        """A record is complete."""


class SilentObserver:
    """An observer that ignores everything."""

    def planned(self, plan: Plan) -> None:
        return None

    def working(self, case: Case, doing: str, share: float) -> None:
        return None

    def finished(self, record: Record) -> None:
        return None
