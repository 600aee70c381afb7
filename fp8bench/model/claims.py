"""What is held against what a workload says of itself: how much a device does at most, and what products ran on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ceilings:
    """The most that a device was seen to do in a second, measured once a machine; a processor with one thread.

    `flops` are those of products, by the dtype they multiply in; `bytes` those of copies, read and written.
    """

    flops: tuple[tuple[str, float], ...] = ()
    bytes: float | None = None

    def bound(self, dtype: str, kind: str) -> float | None:
        """'flops' of products in a dtype, or 'bytes' in whatever dtype; None where it was not measured."""
        return self.bytes if kind == "bytes" else dict(self.flops).get(dtype)

    def times(self, threads: int) -> Ceilings:
        """Of so many threads, if none ever waits for another one."""
        flops = tuple((dtype, rate * threads) for dtype, rate in self.flops)
        return Ceilings(flops, None if self.bytes is None else self.bytes * threads)


@dataclass(frozen=True)
class Ceiling:
    """Of one case: the most FLOPs and bytes a second that it can be; None where nobody knows."""

    flops: float | None = None
    bytes: float | None = None


@dataclass(frozen=True)
class Products:
    """What an untimed step ran: so many `operators`, and products up to the first with an operand of its formats.

    `low` says whether there was one, None where nobody knows which formats that would be. `count` products were looked
    at, and `operands` are the dtypes that they read. `attention` are the kernels that torch's attention took. `wide`
    says that native products had values of their formats in wider dtypes, and none codes; `looks_like` in what
    precision a product of the arithmetic really was, by its numbers, '' where it kept its promise. `kernels` are the
    names of those that multiplied in a profiled step, if there was one.
    """

    count: int
    low: bool | None
    operands: tuple[str, ...] = ()
    operators: int = 0
    attention: tuple[str, ...] = ()
    wide: bool = False
    looks_like: str = ""
    kernels: tuple[str, ...] = ()
