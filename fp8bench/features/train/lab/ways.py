"""Chooses how ranks train together; and the two ways that send FP8: whole weights with owners (zero), and a stream
divided by tokens (sp)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8bench.errors import UsageError
from fp8bench.features.train.lab.low_precision import Gradients, gradient_of
from fp8bench.features.train.lab.together import Alone, DataParallel, FullySharded, T, TensorParallel
from fp8bench.features.train.request import TrainerSettings
from fp8bench.model import DeviceFacts
from fp8bench.nn.gpt import GPT, LanguageModel
from fp8bench.nn.parallel.exchanges import FP8Group, OwnedTensors, RankGroup, exchanged, gathered, scattered
from fp8bench.nn.parallel.tensor_parallel import share_blocks
from fp8bench.nn.parallel.ways import cut_of
from fp8bench.nn.sizes import GPTConfig
from fp8bench.protocols import Phases, SilentPhases


def together_of(settings: TrainerSettings, config: GPTConfig, facts: DeviceFacts) -> Alone:
    if facts.ranks == 1:
        return Alone()
    assert dist.group.WORLD is not None
    group = RankGroup(dist.group.WORLD)
    match settings.parallel:
        case "tp":
            return TensorParallel(group, config)
        case "sp":
            return SequenceParallel(group, config, settings.wire)
        case "zero":
            return ZeroTensors(group, settings.wire)
        case "fsdp":
            return FullySharded(group)
    return DataParallel(group)


class ZeroTensors(FullySharded):
    """Every rank reads an equal part of every micro-batch, and keeps and updates some whole weights, divided as in
    FP8-LM. Gradients go to owners and weights come from them in the format `wire`: all ranks, the owner too, compute
    with the weights as sent."""

    def __init__(self, group: RankGroup, wire: str) -> None:
        super().__init__(group)
        self._wire = wire

    def own(self, parameters: Mapping[str, nn.Parameter]) -> Mapping[str, nn.Parameter]:
        self._wholes = list(parameters.values())
        if len(self._wholes) < self.shares:
            raise UsageError(
                f"--parallel zero: {len(self._wholes)} weights are too few for {self.shares} ranks. Give fewer --ranks."
            )
        self._bytes = [whole.untyped_storage().nbytes() for whole in self._wholes]
        self._owned = OwnedTensors(self._group, [whole.numel() for whole in self._wholes], self._wire)
        self._own = [nn.Parameter(whole.detach().clone()) for whole in self.mine(self._wholes)]
        self._release()
        return dict(zip(self.mine(list(parameters)), self._own, strict=True))

    def mine(self, values: Sequence[T]) -> list[T]:
        return self._owned.own(values)

    def updated(self, phase: Phases) -> None:
        self._owned.put(
            [parameter.detach() for parameter in self._own], [whole.detach() for whole in self._wholes], phase
        )

    def average(self, gradients: Gradients, phase: Phases) -> None:
        means = self._owned.means([gradient_of(whole) for whole in self._wholes], phase)
        for whole in self._wholes:
            whole.grad = None
        for parameter, mean in zip(self._own, means, strict=True):
            parameter.grad = mean
        gradients.given()

    def norms(self, own: Sequence[Tensor]) -> list[Tensor]:
        """Each norm is its owner's; `own` may be several figures of all parameters, one after the other."""
        squares = torch.stack(list(own)).to(torch.float64).square().view(-1, len(self._own))
        placed = squares.new_zeros(len(squares), len(self._wholes))
        placed[:, self.mine(range(len(self._wholes)))] = squares
        return list(self._group.added(placed).sqrt().to(torch.float32).flatten())


class BF16Group(RankGroup):
    """Sends at most 16 bits a number, and returns the dtype it was given."""

    def all_parts(self, x: Tensor) -> Tensor:
        return super().all_parts(_narrow(x)).to(x.dtype)

    def own_part(self, parts: Tensor) -> Tensor:
        return super().own_part(_narrow(parts)).to(parts.dtype)


def _narrow(x: Tensor) -> Tensor:
    return x if x.dtype.itemsize == torch.bfloat16.itemsize else x.to(torch.bfloat16)


STREAMS: dict[str, type[RankGroup]] = {"fp32": RankGroup, "bf16": BF16Group, "fp8": FP8Group}


class SequenceParallel(TensorParallel):
    """Tensor parallelism where each rank has only its own tokens between the parts of blocks: the stream is cut before
    the first block and gathered after the last."""

    def __init__(self, group: RankGroup, config: GPTConfig, wire: str) -> None:
        super().__init__(group, config)
        self.stream = STREAMS[wire](group.handle)

    def take(self, model: LanguageModel) -> None:
        assert isinstance(model, GPT)
        stream = self.stream

        def own(x: Tensor) -> Tensor:
            return stream.own(x).contiguous()

        share_blocks(model, self._config, stream, gathered, scattered)
        model.blocks[0].register_forward_pre_hook(
            lambda _, given: (exchanged(given[0], own, stream.gathered), *given[1:])
        )
        model.norm.register_forward_pre_hook(lambda _, given: (exchanged(given[0], stream.gathered, own),))

    def own(self, parameters: Mapping[str, nn.Parameter]) -> Mapping[str, nn.Parameter]:
        """Norms inside blocks see this rank's tokens only: their gradients are summed over ranks."""
        within = {name: parameter for name, parameter in parameters.items() if name.startswith("blocks.")}
        self._summed = [parameter for name, parameter in within.items() if cut_of(name, self._config) is None]
        return super().own(parameters)

    @contextmanager
    def present(self, phase: Phases) -> Iterator[None]:
        self.stream.phase = phase
        try:
            with super().present(phase):
                yield
        finally:
            self.stream.phase = SilentPhases()

    def average(self, gradients: Gradients, phase: Phases) -> None:
        gradients.filled()
        self._group.added_together([parameter.grad for parameter in self._summed if parameter.grad is not None])
