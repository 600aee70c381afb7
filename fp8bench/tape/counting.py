"""From the calls of a step to what is kept of them: FLOPs, bytes and launches, by phase and by dtype."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from fp8bench.model import CELL_PHASES
from fp8bench.model.tape import OperatorCount, PhaseCount, Tape
from fp8bench.tape.formulas import flops_of
from fp8bench.tape.moved_bytes import Traffic
from fp8bench.tape.recorder import Call, TensorSeen, arguments_of, name_of, tensors_in

_WORDS = {
    "float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2", "float8_e4m3fnuz": "e4m3fnuz", "float8_e5m2fnuz": "e5m2fnuz", "float8_e8m0fnu": "e8m0",
    "float4_e2m1fn_x2": "e2m1x2",
}  # fmt: skip
TF32 = "tf32"


def word_of(dtype: Any) -> str:
    """A dtype of torch's as tables have it: 'bf16', 'e4m3', 'int64'."""
    name = str(dtype).removeprefix("torch.")
    return _WORDS.get(name, name)


def counted(calls: Iterable[Call], tf32: bool = False) -> Tape:
    """The tape of a step. With `tf32` a GPU multiplies float32 tensors in that."""
    found: Counter[OperatorCount] = Counter()
    sums: dict[str, PhaseCount] = {}
    room = _Room()
    for call in calls:
        traffic = Traffic(call)
        room.see(traffic)
        by_dtype = {word_of(dtype): size for dtype, size in traffic.by_dtype().items() if size}
        flops, argument = flops_of(call)
        if flops == 0 and not traffic.moves:
            continue  # a view, or room for what comes
        operator = OperatorCount(
            call.phase, name_of(call), call.backward,
            tuple(_words((call.given, tuple(call.named.values())))), tuple(_words(call.result)), 1,
            flops, sum(by_dtype.values()), _path(call, argument, tf32) if flops else "", int(traffic.moves),
        )  # fmt: skip
        found[operator] += 1
        sums[call.phase] = _added(sums.get(call.phase, PhaseCount(call.phase)), operator, by_dtype)
    operators = tuple(replace(one, calls=count) for one, count in found.items())
    return Tape(operators, tuple(sums[phase] for phase in CELL_PHASES if phase in sums), room.unwritten)


class _Room:
    """Memory that was made with nothing in it, and that no operator has written to."""

    def __init__(self) -> None:
        self._empty: set[int] = set()
        self._strange = 0

    @property
    def unwritten(self) -> int:
        """How often such memory was read, or is left behind."""
        return self._strange + len(self._empty)

    def see(self, traffic: Traffic) -> None:
        made = {one.storage for one in traffic.made if 0 not in one.shape}
        if traffic.makes_room:
            self._empty |= made
            return
        written = {one.storage for one in traffic.written}
        read = ({one.storage for one in traffic.read} - written) & self._empty
        self._strange += len(read)
        self._empty -= read | made | written


def _added(phase: PhaseCount, operator: OperatorCount, by_dtype: dict[str, int]) -> PhaseCount:
    flops = operator.flops or 0
    paths = Counter(dict(phase.by_path)) + Counter({operator.path: flops} if flops else {})
    return PhaseCount(
        phase.phase,
        phase.flops + flops,
        phase.bytes + operator.bytes,
        phase.launches + operator.launches,
        phase.unknown + (operator.flops is None),
        tuple(sorted(paths.items())),
        tuple(sorted((Counter(dict(phase.by_dtype)) + Counter(by_dtype)).items())),
    )


def _words(value: Any) -> Iterator[str]:
    for tensor in tensors_in(value):
        yield f"{word_of(tensor.dtype)}[{','.join(map(str, tensor.shape))}]"


def _path(call: Call, argument: str, tf32: bool) -> str:
    """The dtype that it multiplies in; of more than one tensor under that name the first one's."""
    tensor = next(tensors_in(arguments_of(call).get(argument)), None) or next(tensors_in(call.given), None)
    if not isinstance(tensor, TensorSeen):
        return ""
    return TF32 if tf32 and tensor.accelerated and tensor.dtype is torch.float32 else word_of(tensor.dtype)
