"""The plan of a run: groups of cases, each case with the device's support for it and its amount of work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from fp8bench.model.request import StaticScales
from fp8bench.model.words import Level

Scalar = int | float | str | bool
Scalars = Mapping[str, Scalar]
Params = tuple[tuple[str, Scalar], ...]


@dataclass(frozen=True)
class Support:
    """How a device supports a precision, and the reason. `backend` is the library that multiplies, with its version."""

    level: Level
    reason: str
    backend: str = ""

    @property
    def is_native(self) -> bool:
        return self.level is Level.NATIVE

    @property
    def is_emulated(self) -> bool:
        return self.level is Level.EMULATED


@dataclass(frozen=True)
class Work:
    """The amounts of work in one step; 0 for an amount that does not apply.

    `bytes` is the size of the tensors that a step takes as input, each counted once in its input dtype. It is equal
    for every precision, so that throughputs can be compared. `least_memory` is the least number of bytes that one
    state needs: a case that needs more than its device has is not started. The preparation of a case may take
    `setup_seconds` longer than other requests to the worker, for example to compile.
    """

    flops: float = 0.0
    tokens: int = 0
    bytes: float = 0.0
    least_memory: float = 0.0
    setup_seconds: float = 0.0


@dataclass(frozen=True)
class DeviceFacts:
    """All facts about a device on which plans depend. Equal facts and requests give equal plans.

    `uuid` and `pci` identify the device in torch, '' if unknown; the driver may number devices differently. `unusable`
    is the reason why nothing can run on the device. `packages` are the versions of the installed packages that backends
    use. `scaled_products` is whether this torch has scaled products for the device; None if this depends only on the
    kind of device. `cache_bytes` is the size of the last-level cache, 0 if unknown. `cache_shared`
    processors share this cache (1 on a GPU). `ranks` processes measure together, each on a separate device of this
    kind, or all on the same CPU.
    """

    kind: str
    index: int
    name: str
    memory_bytes: int
    torch: str
    capability: tuple[int, int] | None = None
    cuda: str | None = None
    hip: str | None = None
    arch: str = ""
    uuid: str = ""
    pci: str = ""
    unusable: str = ""
    packages: tuple[tuple[str, str], ...] = ()
    scaled_products: bool | None = None
    cache_bytes: int = 0
    cache_shared: int = 0
    ranks: int = 1

    def version_of(self, package: str) -> str | None:
        """Returns the version of a package that a backend uses. Returns None if the package is not installed."""
        return self.torch if package == "torch" else dict(self.packages).get(package)

    @property
    def key(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"

    @property
    def accelerated(self) -> bool:
        """Whether the device is a GPU. On a GPU, workloads have realistic sizes by default."""
        return self.kind != "cpu"


@dataclass(frozen=True)
class Case:
    """The subject of a measurement: a workload with parameters, in a precision, on a device.

    `precision_map` gives some layers, or kinds of layers, a different precision than `precision`. `static` is the rule
    for scales derived from data. `version` is the version of the workload. It is raised when the work of a step
    changes, because numbers of different versions cannot be compared. `ranks` is the number of processes that run the
    case together.
    """

    workload: str
    params: Params
    precision: str
    device: str
    precision_map: tuple[tuple[str, str], ...] = ()
    version: str = "1"
    static: StaticScales | None = None
    ranks: int = 1

    @property
    def mode(self) -> str:
        """The precision with its map and the source of its scales, such as 'fp8', 'fp8{mlp=bf16}' or 'fp8+static=8'."""
        precision_map_text = ",".join(f"{kind}={name}" for kind, name in self.precision_map)
        mode_text = f"{self.precision}{{{precision_map_text}}}" if precision_map_text else self.precision
        return f"{mode_text}+{self.static.words}" if self.static else mode_text

    @property
    def setting(self) -> str:
        """A text for everything that all cases of a group have in common, such as 'gemm[k=512,m=512]@cpu'."""
        params_text = ",".join(f"{name}={value}" for name, value in self.params)
        rank_count_text = f"*{self.ranks}" if self.ranks > 1 else ""
        return f"{self.workload}[{params_text}]@{self.device}{rank_count_text}"

    @property
    def id(self) -> str:
        """A readable text that is different for each case of a run."""
        return f"{self.setting}/{self.mode}"

    def param(self, name: str) -> Scalar:
        return dict(self.params)[name]


@dataclass(frozen=True)
class PlannedCase:
    """A case, and how the device supports its precision. `skip` is the reason why the case will not run, or ''."""

    case: Case
    support: Support
    work: Work
    skip: str = ""

    @property
    def runs(self) -> bool:
        return not self.skip


@dataclass(frozen=True)
class Group:
    """Cases that differ only in precision. They are measured alternately in the same rounds.

    `reference` is the index of the case with which all other cases of the group are compared.
    """

    cases: tuple[PlannedCase, ...]
    reference: int

    @property
    def setting(self) -> str:
        return self.cases[0].case.setting


@dataclass(frozen=True)
class Plan:
    """All groups of a run, in the order in which they are measured."""

    groups: tuple[Group, ...]
    notes: tuple[str, ...] = ()

    # Notes about how much of a device's memory the cases need begin with this word.
    MEMORY: ClassVar[str] = "memory: "

    def __iter__(self) -> Iterator[Group]:
        return iter(self.groups)

    @property
    def memory_notes(self) -> tuple[str, ...]:
        return tuple(note for note in self.notes if note.startswith(self.MEMORY))

    @property
    def num_cases(self) -> int:
        return sum(len(group.cases) for group in self.groups)
