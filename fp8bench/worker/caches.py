"""What the last cache holds when a call begins: what the call before left, nothing of the state, or other states."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from fp8bench.model import DeviceFacts
from fp8bench.protocols import Device
from fp8bench.protocols.axes import CACHE_TIMES
from fp8bench.worker.prepared import State
from fp8bench.worker.state_tensors import address_of, tensors_of

# Beyond that preparing takes longer than measuring.
MOST_STATES = 256


def flush_of(facts: DeviceFacts) -> Callable[[], Any]:
    """What writes over all of the cache, in order with the device's other work.

    It reads what it writes: zeros alone may go past a cache. Integers, which no precision's switch concerns.
    """
    import torch

    covering = torch.zeros(CACHE_TIMES * facts.cache_bytes // 4, dtype=torch.int32, device=facts.key)
    return partial(covering.add_, 1)


def bytes_of(state: object) -> int:
    """Of the memory that its tensors lie in, each once."""
    return sum({address_of(part): part.untyped_storage().nbytes() for part in tensors_of(state)}.values())


def rotation(first: State, make: Callable[[], State], facts: DeviceFacts, device: Device) -> tuple[State, ...]:
    """The first state and as many more as it takes until each has left the cache when its turn comes again.

    At least one more; fewer than needed where memory ends.
    """
    wanted = max(2, math.ceil(CACHE_TIMES * facts.cache_bytes / max(bytes_of(first.held), 1)))
    found = [first]
    while len(found) < min(wanted, MOST_STATES):
        try:
            found.append(make())
        except Exception as error:
            if not device.is_out_of_memory(error):
                raise
            break
    return tuple(found)
