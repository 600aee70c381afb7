"""What a way of training in parallel is: what it can do, said without torch, and the model of one rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fp8bench.model import DeviceFacts
from fp8bench.nn.sizes import GPTConfig
from fp8bench.protocols import Precision

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from fp8bench.nn.gpt import GPT
    from fp8bench.nn.parallel.model import ParallelModel

# What is a choice of some ways only: an axis of the workload, with what it says.
OPTIONS = {
    "wire": "what gradients, weights or tokens are while they are sent; stream: as a model computes them",
    "microbatches": "parts of a batch that follow each other through a pipeline",
    "amax": "whose largest magnitude scales a part of a tensor: own (the rank's), or group (of all that have parts)",
}


@dataclass(frozen=True)
class Asked:
    """One case as a rule sees it; `batch` is in sequences of all ranks together."""

    config: GPTConfig
    batch: int
    ranks: int
    precision: Precision
    options: Mapping[str, str]
    facts: DeviceFacts


@dataclass(frozen=True)
class Job:
    """What a rank makes its part of a model from.

    `make` gives the whole model, with the same weights on every rank. All that is sent goes through `group`, which may
    be one that sends nothing. `emulated` says that the device has no kernels for the precision.
    """

    make: Callable[[], GPT]
    config: GPTConfig
    batch: int
    facts: DeviceFacts
    emulated: bool
    loss_scale: float
    options: Mapping[str, str]
    group: ProcessGroup


class Way(ABC):
    """A way of training one model by several ranks.

    `options` are its own axes, of OPTIONS, each with all values that it takes. `least_ranks` is how many ranks it
    takes.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    options: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    least_ranks: ClassVar[int] = 2

    def refused(self, asked: Asked) -> str:
        """Why a case cannot be; '' where it can."""
        return ""

    @abstractmethod
    def model(self, job: Job) -> ParallelModel:
        """This rank's part. Called on all ranks at once."""


def equal_shares(asked: Asked) -> str:
    """Why ranks that divide a batch cannot; '' where they can."""
    if asked.batch % asked.ranks:
        return (
            f"{asked.batch} sequences are no equal share for each of {asked.ranks} ranks: choose a multiple of "
            f"{asked.ranks}"
        )
    return ""
