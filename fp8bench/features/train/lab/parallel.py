"""The ways in which ranks train together."""

from __future__ import annotations

import torch.distributed as dist

from fp8bench.features.train.lab.fully_sharded import FullySharded
from fp8bench.features.train.lab.tensor_parallel import TensorParallel
from fp8bench.features.train.lab.together import Alone, DataParallel
from fp8bench.features.train.request import TrainerSettings
from fp8bench.model import DeviceFacts
from fp8bench.nn.parallel.exchanges import Group
from fp8bench.nn.sizes import GPTConfig


def together_of(settings: TrainerSettings, config: GPTConfig, facts: DeviceFacts) -> Alone:
    """As settings and the number of ranks have it."""
    if facts.ranks == 1:
        return Alone()
    assert dist.group.WORLD is not None
    group, own_amax = Group(dist.group.WORLD), settings.amax_group == "own"
    if settings.parallel == "tp":
        return TensorParallel(group, config, own_amax)
    return (FullySharded if settings.parallel == "fsdp" else DataParallel)(group, own_amax)
