"""The plan of a run: cases with their support and work, in groups."""

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
    """How a device supports a precision, and why. `backend` is who multiplies in a case, with its version."""

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
    """The work of one step, by count; 0 where a count does not apply.

    `bytes` are those of the tensors that a step takes in, each once, in the dtype they come in: the same for every
    precision, so that throughputs compare. `least_memory` is what one state needs at least, in bytes: a case that needs
    more than its device has is not begun. `setup_seconds` is how much longer than a step preparing may take
    (compiling).
    """

    flops: float = 0.0
    tokens: int = 0
    bytes: float = 0.0
    least_memory: float = 0.0
    setup_seconds: float = 0.0


@dataclass(frozen=True)
class DeviceFacts:
    """All that a plan needs to know of a device; plans are pure functions of it.

    `uuid` and `pci` are torch's, '' if unknown; the driver counts devices in a different order. `unusable` is the
    reason why nothing can run on it, whatever the precision. `packages` are the versions of installed packages that
    backends come with. `scaled_products` is whether this torch has any for it, None where its kind determines that.
    `cache_bytes` is the size of the last cache before its memory, which `cache_shared` processors share (1 on a GPU); 0
    where unknown. `ranks` processes measure together, each on a separate device of that kind (on a processor all on the
    same one).
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
        """The version of an installed package that a backend comes with; None where it is not installed."""
        return self.torch if package == "torch" else dict(self.packages).get(package)

    @property
    def key(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"

    @property
    def accelerated(self) -> bool:
        """Whether it is a GPU, where workloads get their real sizes."""
        return self.kind != "cpu"


@dataclass(frozen=True)
class Case:
    """One thing to measure: workload x parameters x precision x device.

    `precision_map` names layers (or kinds of them) with a precision that differs from the case's, `static` the rule of
    scales from data. `version` is the workload's: it is raised when a step's work changes, and numbers of different
    versions do not compare. `ranks` processes run it together.
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
        """The precision with its map and the origin of its scales: 'fp8', 'fp8{mlp=bf16}', 'fp8+static=8'."""
        inside = ",".join(f"{kind}={name}" for kind, name in self.precision_map)
        mapped = f"{self.precision}{{{inside}}}" if inside else self.precision
        return f"{mapped}+{self.static.words}" if self.static else mapped

    @property
    def setting(self) -> str:
        """Describes what the case shares with its group: 'gemm[k=512,m=512]@cpu'."""
        inside = ",".join(f"{name}={value}" for name, value in self.params)
        several = f"*{self.ranks}" if self.ranks > 1 else ""
        return f"{self.workload}[{inside}]@{self.device}{several}"

    @property
    def id(self) -> str:
        """Readable and unique within a run."""
        return f"{self.setting}/{self.mode}"

    def param(self, name: str) -> Scalar:
        return dict(self.params)[name]


@dataclass(frozen=True)
class PlannedCase:
    """A case with its support on the device; `skip` is the reason why it will not run."""

    case: Case
    support: Support
    work: Work
    skip: str = ""

    @property
    def runs(self) -> bool:
        return not self.skip


@dataclass(frozen=True)
class Group:
    """Cases that differ in precision only, and are measured together, interleaved.

    `reference` is the index of the case that the others are compared with.
    """

    cases: tuple[PlannedCase, ...]
    reference: int

    @property
    def setting(self) -> str:
        return self.cases[0].case.setting


@dataclass(frozen=True)
class Plan:
    """All groups of a run, in order."""

    groups: tuple[Group, ...]
    notes: tuple[str, ...] = ()

    # Prefix of notes on what cases take of a device's memory.
    MEMORY: ClassVar[str] = "memory: "

    def __iter__(self) -> Iterator[Group]:
        return iter(self.groups)

    @property
    def what_fits(self) -> tuple[str, ...]:
        return tuple(note for note in self.notes if note.startswith(self.MEMORY))

    @property
    def num_cases(self) -> int:
        return sum(len(group.cases) for group in self.groups)
