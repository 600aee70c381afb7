"""A dispatch mode that takes the time of each operator and notes for whom it ran; the shares of a step, found later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from statistics import median
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from fp8bench.model.step import Share, ShareKind, Shares, SharesFrom
from fp8bench.tape.formulas import CONVERTING, Where, kind_of
from fp8bench.tape.module_paths import ModulePaths
from fp8bench.tape.recorder import PhasedWatch, operator_name

_task = torch._C._current_graph_task_id
# The name of a range around an operator, with its number, in a trace.
RANGE = "fp8bench.operator."


class TimedCall(NamedTuple):
    """One operator, where it ran, and its nanoseconds on the host, operators of its own included."""

    operator: Any
    module: str
    backward: bool
    phase: str
    node: str
    optimizing: bool
    dtypes: tuple[torch.dtype, torch.dtype] | None
    nanoseconds: int

    @property
    def where(self) -> Where:
        return Where(self.phase, self.module, self.node, self.optimizing, self.dtypes)


class OperatorTimes(PhasedWatch):  # type: ignore[no-untyped-call]
    """Times every operator of its body, by `clock`. Backward passes run in the thread that starts them.

    With `ranged` each operator lies in a range of torch's profiler that has its number.
    """

    views = True

    def __init__(
        self, roots: Iterable[nn.Module] = (), clock: Callable[[], int] = perf_counter_ns, ranged: bool = False
    ) -> None:
        super().__init__()
        self.calls: list[TimedCall] = []
        self._paths = ModulePaths(roots)
        # The task in which an optimizer's step goes on: a backward pass that such a step begins has another.
        self._optimizing: int | None = None
        self._clock = clock
        self._range: Callable[[str], Any] = _range if ranged else lambda name: _EMPTY

    @contextmanager
    def watching(self) -> Iterator[list[TimedCall]]:
        """The operators of the body; with the hooks that tell modules and optimizers, which leave nothing behind."""
        self.calls = []
        with ExitStack() as stack:
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(self._paths.watched())
            begins = register_optimizer_step_pre_hook(lambda *given: setattr(self, "_optimizing", _task()))
            ends = register_optimizer_step_post_hook(lambda *given: setattr(self, "_optimizing", None))
            for hook in (begins, ends):
                stack.callback(hook.remove)
            stack.enter_context(self)
            try:
                yield self.calls
            finally:
                self._optimizing = None

    def called(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        module, node, backward = self._paths.now()
        optimizing = self._optimizing is not None and self._optimizing == _task() and not (module and not backward)
        source = args[1] if len(args) > 1 and func is not _TO else args[0] if args else None
        dtypes = _dtype(source) if operator_name(func) in CONVERTING else None
        with self._range(f"{RANGE}{len(self.calls)}"):
            begun = self._clock()
            result = func(*args, **named)
            ended = self._clock()
        self.calls.append(
            TimedCall(
                func, module, backward, self._phase, "" if node is None else node.name(), optimizing,
                None if dtypes is None else (dtypes, _dtype(result) or dtypes), ended - begun,
            )
        )  # fmt: skip
        return result


_TO = torch.ops.aten._to_copy.default
_EMPTY = nullcontext()


def _dtype(value: Any) -> torch.dtype | None:
    return next((leaf.dtype for leaf in tree_leaves(value) if isinstance(leaf, Tensor)), None)


def _range(name: str) -> Any:
    from torch.autograd.profiler import record_function

    return record_function(name)


# What two parts have in common that are one.
Alike = tuple[ShareKind, str, bool, str]


def shares_of(steps: Sequence[Sequence[TimedCall]], plain: Sequence[float]) -> Shares:
    """Of some steps that were looked at, and the seconds of others that were not.

    What the shortest of all operators takes is what it takes to call one past whoever looks: it is nobody's.
    """
    calls, nanoseconds = _typical(steps)
    calling = min(nanoseconds, default=0.0)
    return Shares(put_together(calls, [(nanosecond - calling) * 1e-9 for nanosecond in nanoseconds]), median(plain))


def shares_of_kernels(
    calls: Sequence[TimedCall], inside: Mapping[int, float], outside: Mapping[str, float], plain: float
) -> Shares:
    """Of one step: a device's seconds for the kernels of its operators, by their number, and for others by name."""
    known = put_together(calls, [inside.get(number, 0.0) for number in range(len(calls))])
    others = [Share(ShareKind.UNKNOWN, "", False, seconds, 1, name) for name, seconds in outside.items()]
    return Shares((*known, *others), plain, SharesFrom.KERNELS)


def put_together(calls: Iterable[TimedCall], seconds: Iterable[float]) -> tuple[Share, ...]:
    """Parts of one kind, in one module and direction, as one; the longest first."""
    found: dict[Alike, tuple[float, int]] = {}
    for call, taken in zip(calls, seconds, strict=True):
        kind, what = kind_of(call.operator, call.where)
        alike = kind, call.module, call.backward, what
        before = found.get(alike, (0.0, 0))
        found[alike] = before[0] + taken, before[1] + 1
    parts = (
        Share(kind, module, backward, taken, number, what)
        for (kind, module, backward, what), (taken, number) in found.items()
    )
    return tuple(sorted(parts, key=lambda part: -part.seconds))


def _typical(steps: Sequence[Sequence[TimedCall]]) -> tuple[Sequence[TimedCall], list[float]]:
    """The operators of a step, and the median time of each; of steps that differ those of the one in the middle."""
    first = [call.operator for call in steps[0]]
    if all([call.operator for call in step] == first for step in steps):
        times = [[call.nanoseconds for call in step] for step in steps]
        return steps[0], [median(some) for some in zip(*times, strict=True)]
    by_time = sorted(steps, key=lambda step: sum(call.nanoseconds for call in step))
    typical = by_time[len(by_time) // 2]
    return typical, [float(call.nanoseconds) for call in typical]
