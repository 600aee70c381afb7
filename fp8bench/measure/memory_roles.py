"""What the bytes at the highest point of a step are for."""

from __future__ import annotations

from collections.abc import Iterable

from fp8bench.measure.holdings import Holdings
from fp8bench.model import HeldBlock, MemoryRole, Phase

_LOW = (MemoryRole.LOW_WEIGHTS, MemoryRole.LOW_ACTIVATIONS)
# What these make and hand on is not a network's: unpacked sums, moments restored for an update.
_ASIDE = (Phase.CAST, Phase.ACCUMULATE, Phase.OPTIMIZER_STEP)


def roles(held: Iterable[HeldBlock], peak: int, before: Holdings, after: Holdings) -> dict[MemoryRole, int]:
    """Bytes by what they are for, in the order of the roles, and only those that occur; they sum to the peak.

    `before` and `after` the step is what the state holds. What an allocator counts and nobody sees is OTHER; empty
    where more is seen than it counts.
    """
    found = dict.fromkeys(MemoryRole, 0)
    for block in held:
        found[role_of(block, before, after)] += block.size
    missing = peak - sum(found.values())
    if missing < 0:
        return {}
    found[MemoryRole.OTHER] += missing
    return {role: size for role, size in found.items() if size}


def role_of(block: HeldBlock, before: Holdings, after: Holdings) -> MemoryRole:
    """What one allocation is for: who holds it says best, then what was said of it, then when it came and went."""
    old = not block.phase
    state = (after.get(block.address) if block.lasting else None) or (before.get(block.address) if old else None)
    copied = next((role for role in block.said if role in _LOW), None)
    if state or copied:
        return state or copied or MemoryRole.OTHER
    if block.phase == Phase.DATA_LOAD:
        return MemoryRole.DATA
    # A weight lasts. What a step makes to be cast as one is a weight on its way, as moments are that are cast alike.
    said = [role for role in block.said if old or role is not MemoryRole.WEIGHTS]
    return said[0] if said else MemoryRole.OTHER if old else _by_its_time(block)


def _by_its_time(block: HeldBlock) -> MemoryRole:
    """Of what a step makes and nobody says anything of."""
    if block.awaited:
        return MemoryRole.ACTIVATIONS
    if block.brief:
        return MemoryRole.WORKSPACE
    if block.backward:
        return MemoryRole.GRADIENTS
    if block.phase in _ASIDE:
        return MemoryRole.WORKSPACE
    return MemoryRole.OTHER if block.lasting else MemoryRole.ACTIVATIONS
