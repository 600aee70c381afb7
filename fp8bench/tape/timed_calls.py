"""The time of each operator and the module it ran for: in forward the running module, in backward the node's.

The backward of a module has no identifiable begin and end, because nodes of different modules interleave. So each node
is identified separately: by a label that is left on it when the module that made it ends, or by its number, since
numbers grow while modules begin and end. Nothing is inserted into the program.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from statistics import median
from time import perf_counter_ns
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from fp8bench.model.step import Share, ShareKind, Shares, SharesFrom
from fp8bench.tape.formulas import CONVERTING, Where, kind_of
from fp8bench.tape.recorder import PhasedWatch, operator_name

_task = torch._C._current_graph_task_id
_next_number = torch._C._autograd._get_sequence_nr
_node = torch._C._current_autograd_node
_FORWARD = -1  # the number of the task outside of any backward pass
_LABEL = "fp8bench.module"
# The number of nodes that keep a parameter's gradient, which no module makes.
_OF_NO_MODULE = 2**64 - 1
OUTSIDE = ""
# The type of a module's label.
L = TypeVar("L")


class _Made(Generic[L]):
    """Ranges of numbers of the nodes that one task has made, each with the label of the module that ran."""

    def __init__(self, first: int, outside: L) -> None:
        self.first = first
        self._outside = outside
        self._ends: list[int] = []
        self._makers: list[L] = []

    def until(self, number: int, maker: L) -> None:
        if number > (self._ends[-1] if self._ends else self.first):
            self._ends.append(number)
            self._makers.append(maker)

    def maker_of(self, number: int) -> L:
        place = bisect_right(self._ends, number)
        return self._makers[place] if place < len(self._ends) else self._outside


@dataclasses.dataclass(slots=True, frozen=True)
class _Running(Generic[L]):
    """A module whose forward runs, its task, and the number of the first node that it may make."""

    label: L
    task: int
    first: int


class RunningModules(Generic[L]):
    """Knows which module a step is in while `watch` is open; modules without a label are ignored."""

    def __init__(self, label_of: Callable[[nn.Module], L | None], outside: L) -> None:
        self._label_of = label_of
        self._outside = outside
        self._running: list[_Running[L]] = []
        self._made: dict[int, _Made[L]] = {}
        # The task that began each task's backward pass: a recomputed block makes nodes within one.
        self._begun_in = {_FORWARD: _FORWARD}
        self._last_task = _FORWARD

    @contextmanager
    def watch(self) -> Iterator[None]:
        with ExitStack() as hooks:
            hooks.callback(register_module_forward_pre_hook(self._enter).remove)
            hooks.callback(register_module_forward_hook(self._leave, always_call=True).remove)
            try:
                yield
            finally:
                self._running.clear()

    def now(self) -> tuple[L, Any, bool]:
        """Returns the label of the module, the node of backward, and whether a backward pass runs. The node is None in
        forward, and in a module that is recomputed within backward."""
        task = self._seen_task()
        if self._running and self._running[-1].task == task:
            return self._running[-1].label, None, task != _FORWARD
        node: Any = None if task == _FORWARD else _node()
        return self._outside if node is None else self._maker_of(node, task), node, task != _FORWARD

    def go_in(self, label: L) -> None:
        task, number = self._hand_over()
        self._running.append(_Running(label, task, number))

    def go_out(self) -> _Running[L]:
        self._hand_over()
        return self._running.pop()

    def _seen_task(self) -> int:
        task = _task()
        if task not in self._begun_in:
            self._begun_in[task] = self._last_task
        self._last_task = task
        return task

    def _maker_of(self, node: Any, task: int) -> L:
        if _LABEL in node.metadata:
            return node.metadata[_LABEL]
        number = node._sequence_nr()
        for maker in (self._begun_in[task], _FORWARD):
            record = self._made.get(maker)
            if record is not None and number >= record.first:
                return record.maker_of(number)
        return self._outside

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        label = self._label_of(module)
        if label is not None:
            self.go_in(label)

    def _leave(self, module: nn.Module, inputs: Any, result: Any) -> None:
        if self._running and self._label_of(module) is not None:  # else it began before `watch`
            self._label(result, self.go_out())

    def _hand_over(self) -> tuple[int, int]:
        """Assigns the nodes made until now to the module that ran; returns the task, and the number of the next
        node."""
        task = self._seen_task()
        number = _next_number()
        record = self._made.get(task)
        if record is None:
            record = self._made[task] = _Made(number, self._outside)
        running = self._running[-1] if self._running else None
        record.until(number, running.label if running is not None and running.task == task else self._outside)
        return task, number

    def _label(self, result: Any, ended: _Running[L]) -> None:
        """Leaves labels on the nodes that were made since a module began, as far as its result leads to them."""
        waiting: list[Any] = [tensor.grad_fn for tensor in _tensors(result)]
        record = self._made[ended.task]
        visited = set()
        # From the result backwards; nodes older than the module belong to somebody else.
        while waiting:
            node = waiting.pop()
            if node is None or node in visited or node._sequence_nr() < ended.first:
                continue
            visited.add(node)
            number = node._sequence_nr()
            node.metadata.setdefault(_LABEL, ended.label if number == _OF_NO_MODULE else record.maker_of(number))
            waiting += [further for further, _ in node.next_functions]


class ModulePaths(RunningModules[str]):
    """Labels modules by the path that `named_modules` gives, or a root by the name of its class. Models in `roots` are
    named at once, others when they first run."""

    def __init__(self, roots: Iterable[nn.Module] = ()) -> None:
        self._names: dict[nn.Module, str] = {}
        for root in roots:
            self._name(root)
        super().__init__(self._path_of, OUTSIDE)

    def _path_of(self, module: nn.Module) -> str:
        if module not in self._names:
            self._name(module)
        return self._names[module]

    def _name(self, root: nn.Module) -> None:
        for name, module in root.named_modules():
            self._names.setdefault(module, name or type(module).__name__)


def _tensors(result: Any) -> Iterator[Tensor]:
    """Yields a module's tensors in collections and dataclasses; does not look into other objects."""
    for leaf in tree_leaves(result):
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _tensors([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])


# Prefix of the range around an operator in a trace; its number follows.
RANGE = "fp8bench.operator."
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


class TimedCall(NamedTuple):
    """An operator, where it ran, and its nanoseconds on the host, including nested operators."""

    operator: Any
    where: Where
    backward: bool
    nanoseconds: int


class OperatorTimes(PhasedWatch):  # type: ignore[no-untyped-call]
    """Times every operator of its body by `clock`. Backward passes run in the thread that starts them. With `ranged`
    each operator runs inside a range of torch's profiler that has its number."""

    views = True

    def __init__(
        self, roots: Iterable[nn.Module] = (), clock: Callable[[], int] = perf_counter_ns, ranged: bool = False
    ) -> None:
        super().__init__()
        self.calls: list[TimedCall] = []
        self._paths = ModulePaths(roots)
        # The task in which an optimizer steps. A backward pass that it begins is a separate task.
        self._optimizing: int | None = None
        self._clock = clock
        self._range: Callable[[str], Any] = _range if ranged else lambda name: _EMPTY

    @contextmanager
    def watching(self) -> Iterator[list[TimedCall]]:
        """Yields the list of the body's operators; the hooks that track modules and optimizers are removed
        afterwards."""
        self.calls = []
        with ExitStack() as stack:
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(self._paths.watch())
            begins = register_optimizer_step_pre_hook(lambda *ignored: setattr(self, "_optimizing", _task()))
            stack.callback(begins.remove)
            ends = register_optimizer_step_post_hook(lambda *ignored: setattr(self, "_optimizing", None))
            stack.callback(ends.remove)
            stack.enter_context(self)
            try:
                yield self.calls
            finally:
                self._optimizing = None

    def run_call(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        module, node, backward = self._paths.now()
        optimizing = self._optimizing is not None and self._optimizing == _task() and not (module and not backward)
        source = args[1] if len(args) > 1 and func is not _TO else args[0] if args else None
        dtypes = _dtype(source) if operator_name(func) in CONVERTING else None
        with self._range(f"{RANGE}{len(self.calls)}"):
            begun = self._clock()
            result = func(*args, **named)
            ended = self._clock()
        converted = None if dtypes is None else (dtypes, _dtype(result) or dtypes)
        where = Where(self._phase, module, "" if node is None else node.name(), optimizing, converted)
        self.calls.append(TimedCall(func, where, backward, ended - begun))
        return result


_TO = torch.ops.aten._to_copy.default
_EMPTY = nullcontext()


def _dtype(value: Any) -> torch.dtype | None:
    return next((leaf.dtype for leaf in tree_leaves(value) if isinstance(leaf, Tensor)), None)


def _range(name: str) -> Any:
    from torch.autograd.profiler import record_function

    return record_function(name)


def shares_of(steps: Sequence[Sequence[TimedCall]], plain: Sequence[float]) -> Shares:
    """Returns the shares of watched steps, and the seconds of unwatched ones. The time of the shortest operator is the
    cost of watching a call, and is deducted from all."""
    calls, nanoseconds = _typical(steps)
    calling = min(nanoseconds, default=0.0)
    return Shares(put_together(calls, [(nanosecond - calling) * 1e-9 for nanosecond in nanoseconds]), median(plain))


def shares_of_kernels(
    calls: Sequence[TimedCall], inside: Mapping[int, float], outside: Mapping[str, float], plain: float
) -> Shares:
    """Returns the shares of one step by a device's seconds: `inside` by the operator's number, `outside` by name."""
    of_operators = put_together(calls, [inside.get(number, 0.0) for number in range(len(calls))])
    of_others = [Share(ShareKind.UNKNOWN, "", False, seconds, 1, name) for name, seconds in outside.items()]
    return Shares((*of_operators, *of_others), plain, SharesFrom.KERNELS)


def seconds_by_operator(events: Sequence[Mapping[str, Any]]) -> tuple[dict[int, float], dict[str, float]]:
    """Returns seconds of a device's kernels in a Chrome trace, by the number of the operator in whose range each was
    launched, and those of other kernels by name."""
    operators = _operators_of_launches(events)
    inside: dict[int, float] = defaultdict(float)
    outside: dict[str, float] = defaultdict(float)
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in _ON_DEVICE:
            operator = operators.get(_correlation(event))
            seconds = float(event["dur"]) * 1e-6
            if operator is None:
                outside[str(event.get("name"))] += seconds
            else:
                inside[operator] += seconds
    return dict(inside), dict(outside)


def _operators_of_launches(events: Iterable[Mapping[str, Any]]) -> dict[object, int]:
    """Returns the number of the innermost operator around each launch, by the launch's correlation id."""
    threads: dict[object, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and (event.get("cat") in _LAUNCHES or str(event.get("name")).startswith(RANGE)):
            threads[event.get("tid")].append(event)
    operators: dict[object, int] = {}
    for thread in threads.values():
        around: list[tuple[float, int]] = []  # the end and the number of each open range
        for event in sorted(thread, key=lambda event: (event["ts"], -event["dur"])):
            while around and around[-1][0] <= event["ts"]:
                around.pop()
            name = str(event.get("name"))
            if name.startswith(RANGE):
                around.append((event["ts"] + event["dur"], int(name.removeprefix(RANGE))))
            elif around:
                operators[_correlation(event)] = around[-1][1]
    return operators


def _correlation(event: Mapping[str, Any]) -> object:
    return (event.get("args") or {}).get("correlation")


def put_together(calls: Iterable[TimedCall], seconds: Iterable[float]) -> tuple[Share, ...]:
    """Joins parts of one kind, module and direction; returns the longest first."""
    sums: dict[tuple[ShareKind, str, bool, str], Share] = {}
    for call, taken in zip(calls, seconds, strict=True):
        kind, detail = kind_of(call.operator, call.where)
        key = kind, call.where.module, call.backward, detail
        part = sums.get(key, Share(*key[:3], 0.0, 0, detail))
        sums[key] = dataclasses.replace(part, seconds=part.seconds + taken, calls=part.calls + 1)
    return tuple(sorted(sums.values(), key=lambda part: -part.seconds))


def _typical(steps: Sequence[Sequence[TimedCall]]) -> tuple[Sequence[TimedCall], list[float]]:
    """Returns a step's operators with the median time of each; if steps differ, those of the median step."""
    operators = []
    nanoseconds = []
    for step in steps:
        operators.append([call.operator for call in step])
        nanoseconds.append([call.nanoseconds for call in step])
    if all(of_step == operators[0] for of_step in operators):
        return steps[0], [median(of_call) for of_call in zip(*nanoseconds, strict=True)]
    by_time = sorted(range(len(steps)), key=lambda number: sum(nanoseconds[number]))
    typical = by_time[len(by_time) // 2]
    return steps[typical], [float(time) for time in nanoseconds[typical]]
