"""What a precision is: a mode, with its options and the switches of the process that it needs; who multiplies in it."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, ClassVar, Self

from fp8bench.model import DeviceFacts, Level, Scalar, Support
from fp8bench.protocols.arithmetic import Arithmetic
from fp8bench.protocols.axes import Option


class TensorScale(StrEnum):
    """Where the one float32 scale of a tensor comes from: NONE where it has another kind of scale, or none."""

    NONE = "none"
    CURRENT = "current"
    DELAYED = "delayed"


class Precision(ABC):
    """A mode, not a dtype: formats by role, a scaling, and what a device makes of it.

    `options` are what may stand behind its name (`fp8-delayed:history=16`); an instance holds them as `chosen`, all of
    them, by name. Whoever cannot be with what was chosen raises RecipeRefused when it is made.
    `rank` orders precisions from the highest down: the default reference is the lowest rank of a run. `loss_scale`
    multiplies the loss of a training step, for formats whose gradients would underflow. `carried_by` names the
    precision in which values travel between products, where it is not this one: all that is no product runs in it.
    `takes_backend` says that others than torch may multiply in it; `backend` is who was chosen to, None is whoever can.
    One that is not `listed` is of one workload alone. With one that is `unit_scaled` a whole model is scaled by
    constants of its shapes, so that its casts need no scales.
    """

    listed: ClassVar[bool] = True
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
    # The same of every contraction and column in a graph that torch compiles.
    compiled_multiple: ClassVar[int] = 1
    options: ClassVar[tuple[Option, ...]] = ()
    takes_backend: ClassVar[bool] = False
    unit_scaled: ClassVar[bool] = False
    backend: Backend | None = None

    def __init__(self, chosen: Mapping[str, Scalar] | None = None) -> None:
        defaults = {option.name: option.parse(option.default) for option in self.options}
        self.chosen: Mapping[str, Scalar] = {**defaults, **(chosen or {})}

    def by(self, backend: Backend) -> Self:
        other = copy.copy(self)
        other.backend = backend
        return other

    @property
    def whole_layers(self) -> bool:
        return self.backend is not None and self.backend.whole_layers

    @property
    def mode(self) -> str:
        """Its name with the options that differ from their defaults: one word for one meaning."""
        return f"{self.plain_mode}:backend={self.backend.name}" if self.backend else self.plain_mode

    @property
    def plain_mode(self) -> str:
        given = [(option, self.chosen[option.name]) for option in self.options]
        words = [f"{option.name}={value}" for option, value in given if value != option.parse(option.default)]
        return ":".join([self.name, *words])

    @property
    def tensor_scale(self) -> TensorScale:
        """Where a tensor's scale comes from, if it has one: it may then come from data instead."""
        return TensorScale.NONE

    @property
    def remembers(self) -> bool:
        """Whether what becomes of a tensor depends on casts before: on their magnitudes, or on how many there were."""
        return False

    def prepares(self, facts: DeviceFacts) -> Support | None:
        """How a library makes its own of a whole model for a device; None where layers are converted one by one."""
        return None

    @abstractmethod
    def support(self, facts: DeviceFacts) -> Support:
        """Native, emulated or refused on that device, and why."""

    @abstractmethod
    def arithmetic(self, facts: DeviceFacts) -> Arithmetic:
        """The operations for that device; only called where `support` does not refuse."""

    def laid_out(self, facts: DeviceFacts) -> Arithmetic | str:
        """The operations of hardware that keeps the precision's codes, which are only asked how these lie; `arithmetic`
        where nothing is emulated, else why nobody can say."""
        if self.support(facts).level is Level.NATIVE:
            return self.arithmetic(facts)
        return f"{self.mode} is emulated, and says nothing of how hardware would keep it"

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Global switches this precision needs, set and restored; plain IEEE fp32 products by default."""
        with float32_products(self.float32_products):
            yield


class Backend(ABC):
    """`package` is the distribution that it comes with, `least` the first version that will do; `install` brings it.

    `whole_layers` says that it has no casts and products by themselves, but layers that do both, and `caches_weights`
    that these cast their weights in a step's first pass alone where they are told which that is; `refuses` are values
    of axes that they cannot be with, and why.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    package: ClassVar[str] = "torch"
    least: ClassVar[str] = "0"
    install: ClassVar[str] = "torch"
    whole_layers: ClassVar[bool] = False
    caches_weights: ClassVar[bool] = False
    refuses: ClassVar[Mapping[tuple[str, Scalar], str]] = {}

    @abstractmethod
    def support(self, precision: Precision, facts: DeviceFacts) -> Support:
        """How it does a precision on a device, where it is installed; refused with the reason and the nearest."""

    @abstractmethod
    def arithmetic(self, precision: Precision, facts: DeviceFacts) -> Arithmetic:
        """The operations; only called where `support` does not refuse. Raises BackendMissing where it cannot run."""

    def imported(self) -> None:
        """Raise BackendMissing where it is installed and cannot be used all the same. Imports it: for workers."""

    def missing(self, version: str | None) -> str:
        """Why the installed version of its package (None: there is none) will not do; '' if it will."""
        if version is None:
            return f"{self.package} is not installed here: pip install '{self.install}'"
        if _numbers(version) < _numbers(self.least):
            return f"{self.package} {version} is too old: {self.least} or later is needed"
        return ""


def _numbers(version: str) -> tuple[int, ...]:
    """'2.13.0+cpu' as (2, 13, 0); what is no number ends it."""
    found = []
    for word in version.partition("+")[0].split("."):
        if not word.isdigit():
            break
        found.append(int(word))
    return tuple(found)


@contextmanager
def float32_products(setting: str) -> Iterator[None]:
    """torch's float32 matmul precision for the body, cuDNN's convolutions included; restored also if it raises."""
    import torch

    before, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    # Newer switches, which the older one writes: 'as the others' is a value of theirs, and of theirs alone.
    backends: Any = torch.backends
    newer = [(switch, switch.fp32_precision) for switch in (backends.cuda.matmul, backends.mkldnn.matmul)]
    torch.set_float32_matmul_precision(setting)
    # A switch of its own, and on unless told otherwise: fp32 convolutions would be TF32's.
    torch.backends.cudnn.allow_tf32 = setting != "highest"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = convolutions
        for switch, own in newer:
            switch.fp32_precision = own


@contextmanager
def one_thread() -> Iterator[None]:
    """torch's work on the processor in this thread alone: it shares out even the smallest tensor, and on a machine with
    other work its threads then wait for each other. Several would make another sum of the same numbers, too."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
