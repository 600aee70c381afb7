"""How a rank trains together with others, by what a training asks."""

from __future__ import annotations

import torch.distributed as dist

from fp8bench.features.train.lab.sequence_parallel import SequenceParallel
from fp8bench.features.train.lab.together import Alone, DataParallel, FullySharded, TensorParallel
from fp8bench.features.train.lab.zero import ZeroTensors
from fp8bench.features.train.request import TrainerSettings
from fp8bench.model import DeviceFacts
from fp8bench.nn.parallel.exchanges import RankGroup
from fp8bench.nn.sizes import GPTConfig


def together_of(settings: TrainerSettings, config: GPTConfig, facts: DeviceFacts) -> Alone:
    if facts.ranks == 1:
        return Alone()
    assert dist.group.WORLD is not None
    group, own_amax = RankGroup(dist.group.WORLD), settings.amax_group == "own"
    match settings.parallel:
        case "tp":
            return TensorParallel(group, config, own_amax)
        case "sp":
            return SequenceParallel(group, config, own_amax, settings.wire)
        case "zero":
            return ZeroTensors(group, own_amax, settings.wire)
        case "fsdp":
            return FullySharded(group, own_amax)
    return DataParallel(group, own_amax)
