"""The interface of precisions: modes with options and global switches; and of backends that multiply in them."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, ClassVar, Self

from fp8bench.model import DeviceFacts, Scalar, Support
from fp8bench.protocols.arithmetic import Arithmetic
from fp8bench.protocols.axes import Option


class TensorScale(StrEnum):
    """Where the one float32 scale of a tensor comes from; NONE for other scales, or none."""

    NONE = "none"
    CURRENT = "current"
    DELAYED = "delayed"


class Precision(ABC):
    """A mode, not a dtype: formats by role, a scaling, and how a device executes it.

    `options` may follow its name (`fp8-delayed:history=16`); an instance holds all their values as `chosen`. An
    impossible choice raises RecipeRefused. `rank` orders precisions from the highest down: the default reference of a
    run has the lowest rank. `loss_scale` multiplies the loss of a training step, for formats whose gradients would
    underflow. `carried_by` names the precision in which values travel between products, '' for this one.
    `takes_backend`: others than torch may multiply in it; `backend` is the chosen one, None for any. A precision that
    is not `listed` belongs to one workload. With a `unit_scaled` one a whole model is scaled by constants of its
    shapes, so that its casts need no scales.
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
    # The same for every contraction and column in a graph that torch compiles.
    compiled_multiple: ClassVar[int] = 1
    options: ClassVar[tuple[Option, ...]] = ()
    takes_backend: ClassVar[bool] = False
    unit_scaled: ClassVar[bool] = False
    backend: Backend | None = None

    def __init__(self, chosen: Mapping[str, Scalar] | None = None) -> None:
        # An instance has a value for every option, so that no reader has to know defaults.
        defaults = {option.name: option.parse(option.default) for option in self.options}
        self.chosen: Mapping[str, Scalar] = {**defaults, **(chosen or {})}

    def by(self, backend: Backend) -> Self:
        # A copy: the same precision may take part with several backends.
        copied = copy.copy(self)
        copied.backend = backend
        return copied

    @property
    def whole_layers(self) -> bool:
        return self.backend is not None and self.backend.whole_layers

    @property
    def mode(self) -> str:
        return f"{self.plain_mode}:backend={self.backend.name}" if self.backend else self.plain_mode

    @property
    def plain_mode(self) -> str:
        choices = [(option, self.chosen[option.name]) for option in self.options]
        # Only options that differ from their defaults are part of the name, so that one precision has one name.
        words = [f"{option.name}={value}" for option, value in choices if value != option.parse(option.default)]
        return ":".join([self.name, *words])

    @property
    def tensor_scale(self) -> TensorScale:
        """Where a tensor's scale comes from; one that is not NONE may come from data instead."""
        return TensorScale.NONE

    @property
    def remembers(self) -> bool:
        """Whether a cast depends on earlier casts: on their magnitudes, or on how many there were."""
        return False

    def prepares(self, facts: DeviceFacts) -> Support | None:
        """How a library converts a whole model for a device; None where layers are converted one by one."""
        return None

    @abstractmethod
    def support(self, facts: DeviceFacts) -> Support: ...

    @abstractmethod
    def arithmetic(self, facts: DeviceFacts) -> Arithmetic:
        """The operations for that device; only called where `support` does not refuse."""

    def laid_out(self, facts: DeviceFacts) -> Arithmetic | str:
        """The arithmetic of hardware that stores the precision's codes, used for their layout only: `arithmetic` where
        nothing is emulated, else the reason why it is unknown."""
        # A native arithmetic stores codes already, in the layout of the device.
        if self.support(facts).is_native:
            return self.arithmetic(facts)
        return f"{self.mode} is emulated, and says nothing of how hardware would keep it"

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Sets the global switches of this precision for the body; plain IEEE fp32 products by default."""
        # Set for every case, because an earlier one may have left another setting.
        with float32_products(self.float32_products):
            yield


class Backend(ABC):
    """Who multiplies. `package` is its distribution, `least` the first version that will do; `install` is what pip
    installs.

    `whole_layers`: it has no separate casts and products, but layers that do both; `caches_weights`: these cast their
    weights in a step's first pass only, where they are told which that is; `refuses` are values of axes that it cannot
    do, and why.
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
        """How it supports a precision on a device, where it is installed; a refusal has the reason and the nearest
        alternative."""

    @abstractmethod
    def arithmetic(self, precision: Precision, facts: DeviceFacts) -> Arithmetic:
        """The operations; only called where `support` does not refuse. Raises BackendMissing where it cannot run."""

    def why_inseparable(self, precision: Precision) -> str:
        """Why the arithmetic of whole layers has no casts and products one by one (`separate`); '' if it has."""
        return f"{self.name} has whole layers, whose casts and products cannot be called one by one"

    def imported(self) -> None:
        """Imports it, in workers. Raises BackendMissing where it is installed and cannot be used."""

    def missing(self, version: str | None) -> str:
        """Why the installed version of its package (None: not installed) will not do; '' if it will."""
        if version is None:
            return f"{self.package} is not installed here: pip install '{self.install}'"
        if _numbers(version) < _numbers(self.least):
            return f"{self.package} {version} is too old: {self.least} or later is needed"
        return ""


def _numbers(version: str) -> tuple[int, ...]:
    """Returns (2, 13, 0) for '2.13.0+cpu', up to the first word that is not a number."""
    numbers = []
    for word in version.partition("+")[0].split("."):
        if not word.isdigit():
            break
        numbers.append(int(word))
    return tuple(numbers)


@contextmanager
def float32_products(setting: str) -> Iterator[None]:
    import torch

    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    # Newer switches, which the older one overwrites, have a value that the older one lacks.
    backends: Any = torch.backends
    newer = [(switch, switch.fp32_precision) for switch in (backends.cuda.matmul, backends.mkldnn.matmul)]
    torch.set_float32_matmul_precision(setting)
    # A switch of its own that is on by default: fp32 convolutions would be TF32's.
    torch.backends.cudnn.allow_tf32 = setting != "highest"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions
        for switch, setting in newer:
            switch.fp32_precision = setting


@contextmanager
def one_thread() -> Iterator[None]:
    """Limits torch to one CPU thread for the body.

    torch splits even the smallest tensor, and on a busy machine its threads then wait for each other. Several threads
    would also sum the same numbers differently.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
