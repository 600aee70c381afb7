"""A second clock beside the one that times: what has been put in the place of a clock is noticed by its going wrong.

Identity is watched, too (user_code/switches.py); but a clock may have been replaced before anybody looked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

# Daemons that set the time make the system's clock faster or slower by up to 0.05%, some for a while by more.
MOST_APART = 0.02
# That of the hardware, which nobody sets. Kept from the start: what is replaced later is not asked.
_READ, _RAW = time.clock_gettime_ns, getattr(time, "CLOCK_MONOTONIC_RAW", time.CLOCK_MONOTONIC)


class ClocksDisagree(RuntimeError):
    """A clock that times does not go like the hardware's."""


@contextmanager
def agreeing(clocks: Mapping[str, Callable[[], float]]) -> Iterator[None]:
    """Raise if one of some clocks, in nanoseconds, does not count the body's time as the hardware's does.

    Each is read between two readings of that one, so that a process that is interrupted here accuses nobody.
    """
    before = {name: (_READ(_RAW), clock(), _READ(_RAW)) for name, clock in clocks.items()}
    yield
    for name, clock in clocks.items():
        first, began, then = before[name]
        earliest, ended, latest = _READ(_RAW), clock(), _READ(_RAW)
        counted, least, most = ended - began, earliest - then, latest - first
        if not least * (1 - MOST_APART) <= counted <= most * (1 + MOST_APART):
            raise ClocksDisagree(
                f"{name} counted {counted * 1e-9:.6f} s where the hardware's clock counted {most * 1e-9:.6f} s: "
                "something has replaced a clock of this process, or is setting the system's. Times are none then: end "
                "it, and measure again."
            )
