"""The bench of one rank: joins the others in a process group, and says how far it has come."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fp8bench.model import Case, DeviceFacts, Scalar, StepEffect
from fp8bench.model.codec import PlainUnpickler
from fp8bench.model.ranks import MEETING, Sent, Transfer
from fp8bench.model.raw import Settings
from fp8bench.model.run import OperationBits
from fp8bench.registry import workloads
from fp8bench.worker.bench import Bench
from fp8bench.worker.clock import PhaseClock
from fp8bench.worker.ranks.heart import Heart, StartLine
from fp8bench.worker.ranks.overlap import RankMeeting, Rounds, step_rounds
from fp8bench.worker.ranks.strangers import watch_groups

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# What a rank sends in a step, and seconds of each round of what a step is made of; or why nobody can tell.
StepAnswer = tuple[tuple[Sent, ...], Rounds] | str | None
# Beginnings of the variables that launchers and libraries of communication are set by.
RECORDED = (
    "OMP_",
    "MKL_NUM",
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "NCCL_",
    "GLOO_",
    "TORCH_",
)


# Ranks import torch and people's own code at their own pace; only then does anybody count the seconds.
_MEETING_SECONDS = 300.0


def _meet(folder: Path, rank: int, ranks: int) -> Store:
    """Wait until all ranks have come here; where they tell each other the ports that they listen on."""
    from torch._C._distributed_c10d import FileStore, PrefixStore

    # A file in a private folder: whatever listens on a port would believe whoever connects.
    store = FileStore(str(folder / MEETING), ranks)
    store.set(f"here/{rank}", "")
    store.wait([f"here/{one}" for one in range(ranks)], timedelta(seconds=_MEETING_SECONDS))
    return PrefixStore("group", store)


class RankBench(Bench):
    """One of `size` benches, which are all asked the same at the same time."""

    def __init__(self, settings: Settings, heart: Heart, wait_seconds: float) -> None:
        import torch
        import torch.distributed as dist

        super().__init__(settings)
        self._clock = partial(PhaseClock, told=heart.phase)
        self._unmarked = heart.markers
        self._alone = False
        self._parts: dict[Case, StepAnswer] = {}
        self._size, self._rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
        # Lists of objects that ranks send each other are pickles: what anybody has sent runs nothing.
        dist.distributed_c10d._unpickler = PlainUnpickler
        watch_groups(dist.distributed_c10d)
        on_gpu = torch.cuda.is_available()
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            timeout=timedelta(seconds=wait_seconds),
            store=_meet(heart.folder, self._rank, self._size), rank=self._rank, world_size=self._size,
            device_id=torch.device("cuda", 0) if on_gpu else None,
        )  # fmt: skip
        # Slots begin together; how late each rank is from then on is what is measured.
        self._meet = StartLine(heart.folder, self._rank, self._size, wait_seconds).meet

    def probe(self) -> tuple[DeviceFacts, ...]:
        return tuple(replace(one, ranks=self._size) for one in super().probe())

    def software(self) -> dict[str, Scalar | None]:
        """With the settings of this rank, which a launcher may have changed."""
        own = {name: text for name, text in sorted(os.environ.items()) if name.startswith(RECORDED)}
        return {**super().software(), **{f"env {name}": text for name, text in own.items()}}

    def release(self, key: str) -> tuple[str, ...]:
        """What is there without a state was imported for one, and lives as long as this process.

        Looking through DTensor and torchao for garbage takes 0.1 s a time.
        """
        left = super().release(key)
        if not (self._prepared or self._kept):
            gc.freeze()
        return left

    def effect(self, case: Case, facts: DeviceFacts) -> StepEffect:
        return StepEffect(None, "several ranks take its steps together, and would have to be given the same changes")

    def bits(self, facts: DeviceFacts) -> tuple[OperationBits, ...]:
        """Of this rank's device, and of what all ranks come to."""
        from fp8bench.worker.bits import bits_of_ranks

        whose = f"{facts.key} of rank {self._rank} of {self._size}"
        own = tuple(replace(bit, device=whose) for bit in super().bits(facts))
        return (*own, *bits_of_ranks(facts))

    def transfer(self, case: Case, facts: DeviceFacts) -> Transfer | None:
        """What a step moves between the ranks."""
        with self._apart(case, facts) as (workload, _, setup):
            return workload.transfer(setup())

    def step_parts(self, case: Case, facts: DeviceFacts) -> StepAnswer:
        """Once of cases that send the same."""
        alike = replace(case, params=workloads.get(case.workload).sent_by(case))
        if alike not in self._parts:
            self._parts[alike] = self._step_parts(case, facts)
        return self._parts[alike]

    def _step_parts(self, case: Case, facts: DeviceFacts) -> StepAnswer:
        with self._apart(case, facts) as (workload, device, setup):
            parts = workload.step_parts(setup())
            if parts is None or isinstance(parts, str):
                return parts
            beginning = RankMeeting(partial(device.synchronise, facts.index), self._meet)
            return parts.sent, step_rounds(parts, beginning, self._settings.seed)
