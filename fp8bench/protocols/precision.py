"""Defines the interfaces of precisions and backends. A precision is a mode of computing with options, and may change
settings of the process. A backend is a library that multiplies in such a mode.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from itertools import takewhile
from typing import Any, ClassVar, Self

from fp8bench.model import DeviceFacts, Scalar, Support
from fp8bench.protocols.arithmetic import Arithmetic
from fp8bench.protocols.axes import Option


class TensorScale(StrEnum):
    """Where the single float32 scale of a tensor comes from. NONE: the tensor has no scale, or several scales."""

    NONE = "none"
    CURRENT = "current"
    DELAYED = "delayed"


class Precision(ABC):
    """A mode of computing, which is more than a dtype: a format for each role, the kind of scales, and how a device
    executes casts and products.

    `options` may follow the name (`fp8-delayed:history=16`). An instance has the values of all its options in
    `chosen`. An impossible combination of values raises RecipeRefused.

    `rank` is the position in the order of precisions, not the number of a process. The highest precision has the lowest
    rank, and is the default reference of a run.
    `loss_scale` multiplies the loss of a training step, for formats in which gradients would underflow. `carried_by`
    names the precision of values between products; '' means this precision.

    `takes_backend` is whether libraries other than torch can multiply in this precision. `backend` is the library that
    was chosen, or None if any may be used. A precision that is not `listed` belongs to certain workloads only. If
    `unit_scaled` is True, the whole model is scaled by constants that follow from its shapes, so that casts need no
    scales.
    """

    listed: ClassVar[bool] = True
    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    summary: ClassVar[str]
    rank: ClassVar[int]
    loss_scale: ClassVar[float] = 1.0
    carried_by: ClassVar[str] = ""
    # The setting of torch's float32 matmul precision while this precision runs. The whole process has one setting, so a
    # case cannot mix two.
    float32_products: ClassVar[str] = "highest"
    # In native products, K must be a multiple of the first number, and N a multiple of the second.
    multiples: ClassVar[tuple[int, int]] = (1, 1)
    # In a graph compiled by torch, K and N of each product must be multiples of this number.
    compiled_multiple: ClassVar[int] = 1
    options: ClassVar[tuple[Option, ...]] = ()
    takes_backend: ClassVar[bool] = False
    unit_scaled: ClassVar[bool] = False
    backend: Backend | None = None

    def __init__(self, chosen: Mapping[str, Scalar] | None = None) -> None:
        # Give every option a value, so that code that reads `chosen` need not know the default values.
        default_values = {option.name: option.parse(option.default) for option in self.options}
        self.chosen: Mapping[str, Scalar] = {**default_values, **(chosen or {})}

    def by(self, backend: Backend) -> Self:
        """Returns a copy of this precision whose products the backend computes."""
        # Copy the precision, because it may be measured with several backends.
        precision = copy.copy(self)
        precision.backend = backend
        return precision

    @property
    def whole_layers(self) -> bool:
        """Whether the chosen backend offers whole layers instead of separate casts and products."""
        return self.backend is not None and self.backend.whole_layers

    @property
    def mode(self) -> str:
        return f"{self.plain_mode}:backend={self.backend.name}" if self.backend else self.plain_mode

    @property
    def plain_mode(self) -> str:
        chosen_options = [(option, self.chosen[option.name]) for option in self.options]
        # Leave out options that have their default values, so that a precision has only one name.
        chosen_option_texts = [
            f"{option.name}={value}" for option, value in chosen_options if value != option.parse(option.default)
        ]
        return ":".join([self.name, *chosen_option_texts])

    @property
    def tensor_scale(self) -> TensorScale:
        """Where the scale of a tensor comes from, if the precision has one scale for each tensor. Static scales can
        replace such a scale.
        """
        return TensorScale.NONE

    @property
    def remembers(self) -> bool:
        """Whether a cast depends on earlier casts: on the magnitudes of their tensors or on their number."""
        return False

    def prepares(self, facts: DeviceFacts) -> Support | None:
        """Returns whether a device can use the library that prepares models for this precision, such as Accelerate. The
        library converts a whole model. Returns None if models are converted layer by layer.
        """
        return None

    @abstractmethod
    def support(self, facts: DeviceFacts) -> Support: ...

    @abstractmethod
    def arithmetic(self, facts: DeviceFacts) -> Arithmetic:
        """Returns the casts and products for a device. Called only if `support` does not refuse the device."""

    def laid_out(self, facts: DeviceFacts) -> Arithmetic | str:
        """Returns an arithmetic that stores codes in memory as hardware with these formats would. It is used only to
        count memory. Returns the reason if it is unknown how hardware would store the codes.
        """
        # A native precision already stores codes as the device does.
        if self.support(facts).is_native:
            return self.arithmetic(facts)
        return f"{self.mode} is emulated, which does not show how hardware would store it"

    @contextmanager
    def scope(self) -> Iterator[None]:
        """A context in which the switches of the process are set for this precision. By default, float32 products are
        plain IEEE products.
        """
        # Set the float32 matmul precision for every case, because the process may have another setting.
        with float32_products(self.float32_products):
            yield


class Backend(ABC):
    """A library that multiplies. `package` is the name of its distribution, `least` is its first usable version, and
    `install` is the argument for `pip install`.

    If `whole_layers` is True, the library offers layers instead of separate casts and products. If `caches_weights` is
    True, these layers cast their weights only in the first pass of a step, which the caller marks. `refuses` has the
    values of axes that the library cannot execute, each with the reason.
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
        """Returns how the installed library supports a precision on a device. The reason of a refusal names the nearest
        alternative.
        """

    @abstractmethod
    def arithmetic(self, precision: Precision, facts: DeviceFacts) -> Arithmetic:
        """Returns the casts and products of a precision. Called only if `support` does not refuse the precision. Raises
        BackendMissing if the library cannot run.
        """

    def why_inseparable(self, precision: Precision) -> str:
        """Returns why the casts and products inside the library's layers cannot be called separately. Returns '' if
        they can be: `Arithmetic.separate` then returns an arithmetic that does this.
        """
        return f"{self.name} has whole layers, whose casts and products cannot be called one by one"

    def imported(self) -> None:
        """Imports the library in a worker process, if the backend has one to import besides torch. Raises
        BackendMissing if the library is installed but cannot be used.
        """

    def missing(self, version: str | None) -> str:
        """Returns why this version of the library cannot be used, or '' if it can be. `version` is None if the library
        is not installed.
        """
        if version is None:
            return f"{self.package} is not installed here: pip install '{self.install}'"
        if _parse_version(version) < _parse_version(self.least):
            return f"{self.package} {version} is too old: {self.least} or later is needed"
        return ""


def _parse_version(version: str) -> tuple[int, ...]:
    """Returns the parts of a version up to the first one that is not a number: (2, 13, 0) for '2.13.0+cpu'."""
    return tuple(map(int, takewhile(str.isdigit, version.partition("+")[0].split("."))))


@contextmanager
def float32_products(setting: str) -> Iterator[None]:
    """A context in which torch's float32 matmul precision has this setting. It also sets whether convolutions use
    TF32.
    """
    import torch

    matmul_setting, cudnn_tf32 = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    # Save torch's newer switches, because setting the older one overwrites them. They may have values that it cannot
    # express.
    backends: Any = torch.backends
    newer_switches = [(switch, switch.fp32_precision) for switch in (backends.cuda.matmul, backends.mkldnn.matmul)]
    torch.set_float32_matmul_precision(setting)
    # cuDNN has a separate switch. It is on by default, which makes fp32 convolutions compute in TF32.
    torch.backends.cudnn.allow_tf32 = setting != "highest"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul_setting)
        torch.backends.cudnn.allow_tf32 = cudnn_tf32
        for switch, fp32_precision in newer_switches:
            switch.fp32_precision = fp32_precision


@contextmanager
def limit_to_one_thread() -> Iterator[None]:
    """A context in which torch uses one CPU thread.

    torch divides even the smallest tensor among threads, which then wait for each other on a busy machine. Several
    threads would also sum the same numbers in a different order.
    """
    import torch

    previous_num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(previous_num_threads)
