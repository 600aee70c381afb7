"""Loading data: decode, batch, cast, pin and copy, with the reading or the transfer dominating."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fp8bench.formats.hardware import refused
from fp8bench.model import DeviceFacts, MemoryRole, Params, Scalars, Support, Work
from fp8bench.protocols import Arithmetic, Grid, Operand, Phases, Precision, Role, Setup, Workload
from fp8bench.protocols.axes import Axis
from fp8bench.registry import workloads

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from fp8bench.nn.batches import Bytes, Destination, Indices, Records

# Default batch size in records, by kind.
BATCHES = {"reading": 16, "transfer": 128}
RECORDS = 256
# kind=transfer alternates between this many batches, so that a cache does not keep them.
READY = 4
# Bytes per second that zlib compresses on a slow machine.
_COMPRESSING = 5e6
_BUFFERS = Axis.choice(
    "buffers",
    "of decoded batches: fresh memory in every step, or the same, kept",
    "fresh",
    "kept",
    quiet=True,
)


@dataclass
class LoadState:
    """The source of batches, their cast and their target; `after` is the last one that was cast on the device."""

    batches: Iterator[Tensor]
    arithmetic: Arithmetic
    destination: Destination
    decodes: bool = False
    casts_there: bool = False
    after: Operand | None = None

    def memory_roles(self) -> dict[MemoryRole, object]:
        return {MemoryRole.DATA: (self.batches, self.destination, self.after)}


@workloads.register("data")
class Data(Workload):
    """The input side of training: the time to bring a batch to the device in a precision.

    reading: records are compressed in a file, and decoding dominates. transfer: a few large batches are in memory as
    fp32, and steps copy them in turn. A batch that is cast on the host has fewer bytes to move, but a host casts more
    slowly than a GPU, so by default the GPU casts. Decoding includes allocating memory for the values: buffers=kept
    decodes into the same memory in every step, and the difference is the cost of fresh memory with its page faults. If
    the device is the CPU itself, the transfer is a copy within its memory, and nothing is pinned.
    """

    name = "data"
    version = "2"  # decoding is a separate phase
    summary = "decode, batch, cast, pin and copy: dominated by reading, and dominated by the transfer"
    uses_corpus = True
    not_on_device = "batches are copied as values, and codes would be fewer bytes all the way"
    history = Grid(
        cpu={"kind": ("reading", "transfer"), "record": ("16384",)},
        gpu={"kind": ("reading", "transfer"), "record": ("150528",)},
        phases=("data_load", "decode", "cast"),
        errors=("batch_error",),
        per="bytes",
    )

    def axes(self, facts: DeviceFacts) -> tuple[Axis, ...]:
        # 150528 is an image of 224 x 224 in three colours.
        record = "150528" if facts.accelerated else "16384"
        usual = ", ".join(f"{batch} for {kind}" for kind, batch in BATCHES.items())
        return (
            Axis.each("kind", "reading: compressed records from a file; transfer: whole batches in memory", *BATCHES),
            Axis.count("batch", f"records in a batch; auto is {usual}", "auto", high=1 << 16),
            Axis.count("record", "values in a record", record, high=1 << 22),
            Axis.choice(
                "cast_on",
                "host: before a batch is moved, which are fewer bytes; device: after it",
                "host",
                "device",
                default="device" if facts.accelerated else "host",
            ),
            _BUFFERS,
        )

    def expand(self, params: Scalars) -> tuple[Params, ...]:
        usual_batch = BATCHES[str(params["kind"])]
        chosen = {name: usual_batch if value == "auto" else value for name, value in params.items()}
        if chosen.get("cast_on") == "host":  # keeps the old ids of cases from before this choice existed
            del chosen["cast_on"]
        return (tuple(chosen.items()),)

    def work(self, params: Scalars) -> Work:
        """Counts bytes of a batch as it arrives: one per value to be decoded, four as fp32."""
        batch = int(params["batch"])
        record = int(params["record"])
        reading = params["kind"] == "reading"
        return Work(
            bytes=float(batch * record * (1 if reading else 4)),
            least_memory=batch * record / 2,  # four bits per value, the least of any precision
            setup_seconds=RECORDS * record / _COMPRESSING if reading else 0.0,
        )

    def support(self, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        if precision.float32_products != "highest":
            return refused(
                f"{precision.name} only changes how products read float32, and a batch travels as float32: measure fp32"
            )
        if params["kind"] != "reading" and _BUFFERS.of(params) == "kept":
            return refused("no step of kind=transfer allocates a batch: choose kind=reading for buffers=kept")
        return precision.support(facts)

    def prepare(self, setup: Setup) -> LoadState:
        from fp8bench.nn.batches import Destination

        text, random = _text(setup)
        batches = _batches(setup, _records(setup, text), random)
        on_device = _casts_there(setup)
        first = next(batches)
        like = Operand(first) if on_device else setup.arithmetic.cast(first, Role.INPUT)
        decodes = setup.case.param("kind") == "reading"
        return LoadState(batches, setup.arithmetic, Destination(like, setup.facts.key), decodes, on_device)

    def step(self, state: LoadState, phase: Phases) -> None:
        with phase.decode if state.decodes else phase.data_load:
            values = next(state.batches)
        batch = Operand(values)
        if state.arithmetic.casts and not state.casts_there:
            with phase.cast:
                batch = state.arithmetic.cast(values, Role.INPUT)
        with phase.data_load:
            state.destination.take(batch)
            del values, batch  # freeing memory takes time that must count for a phase
        if state.casts_there:
            with phase.cast:
                state.after = state.arithmetic.cast(state.destination.buffers[0], Role.INPUT)

    def error(self, setup: Setup) -> dict[str, float]:
        """Compares a batch in the case's precision with the same bytes normalised in fp64."""
        import torch

        from fp8bench.nn.batches import DOUBLE, normalise_bytes
        from fp8bench.numerics.norms import relative_frobenius

        text, random = _text(setup)
        drawn = _draw_indices(random, int(setup.case.param("batch")))
        values = _records(setup, text).batch(drawn).to(setup.facts.key if _casts_there(setup) else "cpu")
        if setup.arithmetic.settles:
            setup.arithmetic.cast(values, Role.INPUT)
        batch = setup.arithmetic.cast(values, Role.INPUT)
        exact = torch.from_numpy(normalise_bytes(text[drawn], DOUBLE))
        return {"batch_error": relative_frobenius(setup.arithmetic.restore(batch, torch.float32).cpu(), exact)}


def _casts_there(setup: Setup) -> bool:
    """Whether a batch is cast on its device; one that is sent in its precision is not cast at all."""
    return setup.arithmetic.casts and setup.params.get("cast_on") == "device"


def _text(setup: Setup) -> tuple[Bytes, np.random.Generator]:
    """Returns the bytes of all records, and the generator that draws batches; both from the seed."""
    import numpy as np

    from fp8bench.nn.batches import text_records

    if setup.corpus is None:
        raise ValueError("loading data needs a token file, but there is none")
    random = np.random.default_rng(setup.seed)
    return text_records(setup.corpus, RECORDS, int(setup.case.param("record")), random), random


def _records(setup: Setup, text: Bytes) -> Records:
    from fp8bench.nn import batches

    return batches.CompressedRecords(text) if setup.case.param("kind") == "reading" else batches.DecodedRecords(text)


def _batches(setup: Setup, records: Records, random: np.random.Generator) -> Iterator[Tensor]:
    """Yields batches endlessly: each gathered on demand, or a few prepared ones in turn."""
    import numpy as np

    from fp8bench.nn.batches import CompressedRecords

    batch = int(setup.case.param("batch"))
    if isinstance(records, CompressedRecords):
        reuses = _BUFFERS.of(setup.params) == "kept"
        into = records.batch(np.zeros(batch, np.int64)) if reuses else None
        return (records.batch(_draw_indices(random, batch), into) for _ in itertools.count())
    # A batch of more records than exist is larger than any cache, so one is enough.
    ready = READY if batch <= RECORDS else 1
    return itertools.cycle([records.batch(_draw_indices(random, batch)) for _ in range(ready)])


def _draw_indices(random: np.random.Generator, batch: int) -> Indices:
    return random.integers(0, RECORDS, batch)
