"""How long the host takes for the casts of a product by hand: `python -m tests.formats.triton_casts.host_time`.

Launches go to a driver that only notes them, so that no GPU is needed; the kernels themselves take no time. It prints
the median of this thread's time over batches of casts, and what eight of ten batches lie between. It is no test,
because machines differ.
"""

from __future__ import annotations

import gc
import sys
import time
from statistics import quantiles

import torch
from triton.runtime import driver

from fp8bench.formats import native_codes, operators
from fp8bench.protocols import Role
from fp8bench.registry import precisions
from tests.facts import B200, H200
from tests.formats.triton_casts.test_launch import LAUNCHES, Driver

BATCHES, CASTS = 100, 50


def host_micros(mode: str) -> list[float]:
    """Returns the least, the median and the most (in nine of ten batches) of both casts of a product."""
    arithmetic = precisions.get(mode).arithmetic(B200 if mode.startswith("mx") else H200).layer("one")
    a, b = (torch.randn(256, 512).bfloat16() for _ in range(2))
    micros = []

    def cast() -> None:
        arithmetic.cast(a, Role.INPUT)
        arithmetic.cast(b, Role.WEIGHT)

    cast()
    operators.KERNELS.compile(*list(operators.KERNELS.wanted))
    cast()
    gc.disable()  # as in timed slots
    for _ in range(BATCHES):
        begin = time.thread_time()
        for _ in range(CASTS):
            cast()
        micros.append(1e6 * (time.thread_time() - begin) / CASTS)
        LAUNCHES.clear()
    gc.enable()
    tenths = quantiles(micros, n=10)
    return [tenths[0], tenths[4], tenths[8]]


def main() -> None:
    native_codes.uses_triton = lambda device: True
    driver._active = Driver()
    for mode in sys.argv[1:] or ("fp8", "fp8-delayed", "fp8-rowwise", "fp8-block", "mxfp8"):
        low, middle, high = host_micros(mode)
        print(f"{mode:<12} {middle:5.1f} us for both casts, {low:.1f} to {high:.1f} in eight of ten batches")


if __name__ == "__main__":
    main()
