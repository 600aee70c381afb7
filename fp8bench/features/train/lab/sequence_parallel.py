"""Tensor parallelism whose stream is divided by tokens between the parts of blocks, where it is gathered and scattered
as the arm computes it, in bf16, or as FP8 codes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fp8bench.features.train.lab.optimizer import Gradients
from fp8bench.features.train.lab.samples import alike, as_sent, mean_as_sent, sampled, wrong_means
from fp8bench.features.train.lab.together import TensorParallel
from fp8bench.nn.gpt import GPT
from fp8bench.nn.parallel.exchanges import FP8Group, RankGroup, gathered, handed, scattered
from fp8bench.nn.parallel.tensor_parallel import share_blocks
from fp8bench.nn.parallel.ways import cut_of
from fp8bench.nn.sizes import GPTConfig
from fp8bench.protocols import Phases, SilentPhases

# Exchanges that nobody has asked about, the last ones.
_MOST_NOTED = 1024


class _Note(NamedTuple):
    """Of an exchange some numbers of what this rank has brought, behind the largest magnitude, and of what it was
    given: (numbers) and (ranks, numbers) where tokens were gathered, the other way round where they were scattered."""

    brought: Tensor
    got: Tensor
    dtype: torch.dtype


class NotedGroup(RankGroup):
    """Notes some numbers of every exchange of tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.noted, self._turn = deque[_Note](maxlen=_MOST_NOTED), 0

    def all_parts(self, x: Tensor) -> Tensor:
        found = super().all_parts(x)
        self._note(sampled(x, self._turn), self._rows(found)[:, 1:], x.dtype)
        return found

    def own_part(self, parts: Tensor) -> Tensor:
        brought = self._rows(parts)
        found = super().own_part(parts)
        self._note(brought, sampled(found, self._turn)[1:], parts.dtype)
        return found

    def _rows(self, parts: Tensor) -> Tensor:
        return torch.stack([sampled(part, self._turn) for part in parts])

    def _note(self, brought: Tensor, got: Tensor, dtype: torch.dtype) -> None:
        self.noted.append(_Note(brought, got, dtype))
        self._turn += 1


class BF16Group(RankGroup):
    """Sends at most 16 bits, and hands back what it was given in."""

    def all_parts(self, x: Tensor) -> Tensor:
        return super().all_parts(_narrow(x)).to(x.dtype)

    def own_part(self, parts: Tensor) -> Tensor:
        return super().own_part(_narrow(parts)).to(parts.dtype)


def _narrow(x: Tensor) -> Tensor:
    return x if _is_narrow(x.dtype) else x.to(torch.bfloat16)


def _is_narrow(dtype: torch.dtype) -> bool:
    return dtype.itemsize == torch.bfloat16.itemsize


class _NotedBF16(NotedGroup, BF16Group): ...


class _NotedFP8(NotedGroup, FP8Group): ...


STREAMS: dict[str, type[NotedGroup]] = {"fp32": NotedGroup, "bf16": _NotedBF16, "fp8": _NotedFP8}


class SequenceParallel(TensorParallel):
    """And of what lies between the parts of blocks a rank has its tokens only. Embedding, last norm, head and loss are
    of all tokens, on all ranks alike: the stream is cut before the first block and gathered behind the last one.

    After a slice some numbers of every exchange are held against what all ranks have brought: what all of them gather
    alike does not show that one has got another sum.
    """

    def __init__(self, group: RankGroup, config: GPTConfig, own_amax: bool, wire: str) -> None:
        super().__init__(group, config, own_amax)
        self._wire, self.stream = wire, STREAMS[wire](group.handle)

    def _share(self, model: GPT) -> None:
        stream = self.stream

        def own(x: Tensor) -> Tensor:
            return stream.own(x).contiguous()

        share_blocks(model, self._config, stream, gathered, scattered)
        model.blocks[0].register_forward_pre_hook(lambda _, given: (handed(given[0], own, stream.gathered), *given[1:]))
        model.norm.register_forward_pre_hook(lambda _, given: (handed(given[0], stream.gathered, own),))

    def own(self, parameters: Mapping[str, nn.Parameter]) -> Mapping[str, nn.Parameter]:
        """Norms of blocks have gradients of this rank's tokens."""
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

    def faults(self) -> tuple[str, ...]:
        notes = list(self.stream.noted)
        self.stream.noted.clear()
        wrong = bool(notes) and self._arrived_otherwise(notes)
        words = "was given tokens of the stream that are not what all ranks have brought"
        return (*super().faults(), *([words] if wrong else []))

    def _arrived_otherwise(self, notes: Sequence[_Note]) -> bool:
        sizes = [note.brought.numel() for note in notes]
        flat = self._group.everybodys(torch.cat([note.brought.flatten() for note in notes]))
        by_note = zip(notes, *(torch.split(tensor, sizes) for tensor in flat), strict=True)
        return any(self._is_wrong(note, torch.stack(brought)) for note, *brought in by_note)

    def _is_wrong(self, note: _Note, brought: Tensor) -> bool:
        """`brought` is everybody's, by rank."""
        narrow, in_fp8 = _is_narrow(note.dtype), self._wire == "fp8"
        every = brought.view(len(brought), *note.brought.shape)
        if note.got.ndim > 1:
            sent = as_sent(every[:, 1:], every[:, :1], "fp32" if narrow and not in_fp8 else self._wire)
        else:
            numbers, amax = every[:, self.rank, 1:], every[..., 0].amax()
            if not in_fp8:  # a sum of any order
                wire = "bf16" if narrow else self._wire
                return bool(wrong_means(note.got / len(every), numbers, amax, wire).any())
            sent = mean_as_sent(numbers, amax, self._wire) * len(every)
        return not bool(alike(note.got, sent.to(note.dtype).to(torch.float32)).all())
