"""Whether torch is called at all."""

from __future__ import annotations

from collections.abc import Callable

from fp8bench.profiler import quiet


def calls_operators(work: Callable[[], None]) -> bool | None:
    """Whether some work calls operators of torch, as its profiler hears; None if that hears nothing.

    It listens on the host: nothing is attached to a GPU.
    """
    from torch.autograd.profiler import profile

    one = profile(use_kineto=True)
    with quiet():
        one.__enter__()  # type: ignore[no-untyped-call]
    try:
        work()
    finally:
        one.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    return None if one.kineto_results is None else bool(one.kineto_results.experimental_event_tree())
