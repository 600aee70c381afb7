"""What torch's allocators tell torch's profiler: every allocation and release of one device, to the byte."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fp8bench.profiler import quiet
from fp8bench.profiler.allocations import Change, Event, Turn, Word

if TYPE_CHECKING:
    import torch

# The profiler's names for an allocation or a release and for a node of a backward pass, and ours for what we say.
_CHANGE = "[memory]"
_NODE = "autograd::engine::evaluate_function"
_NOTE = "fp8bench: note "


class AllocationStream:
    """Events of one device ('cpu', 'cuda:1'), with what is said of them in between.

    The profiler hears the thread that started it and those on which autograd and torch's own operations work for it,
    not threads of Python's. It only listens on the host: nothing is attached to a GPU.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._notes: list[Turn | Word] = []
        self._profile: torch.autograd.profiler.profile | None = None

    def start(self) -> None:
        """Listen from here on."""
        # Not torch.profiler's, which imports torch's compiler first: 1.4 s.
        from torch.autograd.profiler import profile

        self._notes = []
        one = profile(use_kineto=True, profile_memory=True)
        with quiet():
            one.__enter__()  # type: ignore[no-untyped-call]
        self._profile = one

    def note(self, note: Turn | Word) -> None:
        """Said now: it has its place among the events. Nothing where nobody listens."""
        from torch.autograd.profiler import record_function

        if self._profile is None:
            return
        self._notes.append(note)
        with record_function(f"{_NOTE}{len(self._notes) - 1}"):
            pass

    def stop(self) -> list[Event] | None:
        """Listen no more: what was heard, in the order of time; None if nothing can be said. Safe after exceptions."""
        one, self._profile = self._profile, None
        if one is None:
            return None
        one.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if one.kineto_results is None:
            return None
        told = [
            (event, node)
            for event, node in _flat(one.kineto_results.experimental_event_tree())
            if event.name == _CHANGE or event.name.startswith(_NOTE)
        ]
        # Stable: what happened within one tick of the clock stays in the order in which it was told.
        told.sort(key=lambda pair: pair[0].start_time_ns)
        return list(self._events(told))

    def _events(self, told: Sequence[tuple[Any, int]]) -> Iterator[Event]:
        for event, node in told:
            if event.name != _CHANGE:
                yield self._notes[int(event.name.removeprefix(_NOTE))]
            elif str(event.extra_fields.device) == self._device:
                yield Change(event.extra_fields.ptr, event.extra_fields.alloc_size, node)


def _flat(tree: Sequence[Any]) -> Iterator[tuple[Any, int]]:
    """The profiler's events, those within others after these, and the node of a backward pass that each lies in."""
    waiting = [(event, 0) for event in reversed(tree)]
    nodes = 0
    while waiting:
        event, node = waiting.pop()
        if event.name.startswith(_NODE):
            nodes += 1
            node = nodes
        elif node and _recomputing(event):
            node = 0
        yield event, node
        waiting.extend((child, node) for child in reversed(event.children))


def _recomputing(event: Any) -> bool:
    """Whether an operation within a backward pass belongs to a forward one, of a block that is computed again.

    Such are numbered for a backward pass of their own; the function of the node itself has the number of its forward.
    """
    fields = event.extra_fields
    scope = getattr(fields, "scope", None)
    return getattr(fields, "sequence_number", -1) >= 0 and getattr(scope, "name", "") == "FUNCTION"
