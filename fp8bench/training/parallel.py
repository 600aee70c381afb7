"""The ways in which ranks train together."""

from __future__ import annotations

import torch.distributed as dist

from fp8bench.model import DeviceFacts
from fp8bench.model.training import TrainerSettings
from fp8bench.nn.parallel.exchanges import Group
from fp8bench.nn.sizes import GPTConfig
from fp8bench.training.fully_sharded import FullySharded
from fp8bench.training.tensor_parallel import TensorParallel
from fp8bench.training.together import Alone, DataParallel


def together_of(settings: TrainerSettings, config: GPTConfig, facts: DeviceFacts) -> Alone:
    """As settings and the number of ranks have it."""
    if facts.ranks == 1:
        return Alone()
    own_amax = settings.amax_group == "own"
    if settings.parallel == "tp":
        assert dist.group.WORLD is not None
        return TensorParallel(Group(dist.group.WORLD), config, own_amax)
    return (FullySharded if settings.parallel == "fsdp" else DataParallel)(own_amax)
