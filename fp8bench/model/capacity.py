"""The largest batch that fits into a memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Capacity:
    """The largest batch of which a state and two steps fit: by runs of it, and of the next one, which does not.

    `axis` is the parameter that was varied, in steps of `grain`. `batch` is None where no search came to an answer, and
    0 where not even the smallest fits; `why` says why, or why `beyond`, the next batch, does not fit. `beyond` is None
    where the axis ends before the memory does. `tokens` are those of a step with `batch`, 0 where the notion does not
    apply; `peak` are the bytes of its tensors at the highest point of preparing and two steps, `limit` those that were
    allowed: None for as many as the device gives. `attempts` counts what was run.
    """

    axis: str
    limit: int | None = None
    batch: int | None = None
    grain: int = 1
    tokens: int = 0
    peak: int | None = None
    beyond: int | None = None
    why: str = ""
    attempts: int = 0
