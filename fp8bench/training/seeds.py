"""Numbers to seed torch with, from what they are for."""

from __future__ import annotations

import hashlib

from fp8bench.model.training import Arm, ArmRole


def seed_of(purpose: str, *numbers: int) -> int:
    """32 bits, all that a generator on a processor takes, unlike for any other purpose or numbers."""
    words = "/".join((purpose, *map(str, numbers)))
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:4], "big")


def own_seed(seed: int, arm: Arm) -> int:
    """The seed of an arm's weights, batches and dropout: its neighbours', but for one that is to have another."""
    return seed_of("other", seed) if arm.role is ArmRole.OTHER_SEED else seed
