"""The suite data: the input pipeline of a training, which decodes, batches, casts, pins and copies."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fp8bench.formats.hardware import refused
from fp8bench.model import DeviceFacts, MemoryRole, Params, Scalars, Support, Work
from fp8bench.protocols import Arithmetic, Grid, Operand, Phases, Precision, Role, Setup, Workload
from fp8bench.protocols.axes import Axis, read_integers
from fp8bench.registry import workloads

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from fp8bench.nn.batches import ByteArray, DeviceBuffers, IndexArray, StoredRecords

# The default batch size in records, by kind.
DEFAULT_BATCHES = {"reading": 16, "transfer": 128}
RECORD_COUNT = 256
# With kind=transfer, steps use this many batches in turn, so that the next batch is not in the cache.
PREPARED_BATCH_COUNT = 4
# How many bytes zlib compresses in a second on a slow machine.
_COMPRESSED_BYTES_PER_SECOND = 5e6
_BUFFERS_AXIS = Axis.choice(
    "buffers",
    "memory of decoded batches: fresh in every step, or kept and used again",
    "fresh",
    "kept",
    quiet=True,
)


@dataclass
class DataLoadState:
    """The source of batches, the arithmetic that casts them, and the buffers on the device to which they are copied.
    `last_cast_batch` is the last batch that the device has cast.
    """

    batches: Iterator[Tensor]
    arithmetic: Arithmetic
    destination: DeviceBuffers
    decodes: bool = False
    casts_on_device: bool = False
    last_cast_batch: Operand | None = None

    def memory_roles(self) -> dict[MemoryRole, object]:
        return {MemoryRole.DATA: (self.batches, self.destination, self.last_cast_batch)}


@workloads.register("data")
class Data(Workload):
    """Times the input side of training: bringing a batch to the device in a precision.

    kind=reading decodes compressed records from a file, and decoding takes most of the time. kind=transfer copies
    large fp32 batches that are already in memory. A batch that is cast on the host has fewer bytes to copy. But hosts
    cast more slowly than GPUs, so by default a GPU casts.

    Decoding includes allocating memory for the values. buffers=kept decodes into the same memory in every step, and
    the difference is the cost of fresh memory with its page faults. If the device is the CPU, the transfer is a copy
    in host memory, and nothing is pinned.
    """

    name = "data"
    version = "2"  # since version 2 of this suite, decoding has its own phase
    summary = "decode, batch, cast, pin and copy: dominated by reading, and dominated by the transfer"
    uses_corpus = True
    not_on_device = "batches are copied as values, but codes would have fewer bytes"
    history = Grid(
        cpu={"kind": ("reading", "transfer"), "record": ("16384",)},
        gpu={"kind": ("reading", "transfer"), "record": ("150528",)},
        phases=("data_load", "decode", "cast"),
        errors=("batch_error",),
        per="bytes",
    )

    def axes(self, facts: DeviceFacts) -> tuple[Axis, ...]:
        # An image of 224 x 224 pixels with three colours has 150528 values.
        record = "150528" if facts.accelerated else "16384"
        default_batches_text = ", ".join(f"{batch} for {data_kind}" for data_kind, batch in DEFAULT_BATCHES.items())
        return (
            Axis.each(
                "kind", "reading: compressed records from a file; transfer: whole batches in memory", *DEFAULT_BATCHES
            ),
            Axis.count("batch", f"records in a batch; auto is {default_batches_text}", "auto", high=1 << 16),
            Axis.count("record", "values in a record", record, high=1 << 22),
            Axis.choice(
                "cast_on",
                "host: cast before the copy, which then has fewer bytes; device: cast after the copy",
                "host",
                "device",
                default="device" if facts.accelerated else "host",
            ),
            _BUFFERS_AXIS,
        )

    def expand(self, params: Scalars) -> tuple[Params, ...]:
        default_batch = DEFAULT_BATCHES[str(params["kind"])]
        case_params = {name: default_batch if value == "auto" else value for name, value in params.items()}
        # Leave cast_on=host out, so that cases from before this parameter existed keep their ids.
        if case_params.get("cast_on") == "host":
            del case_params["cast_on"]
        return (tuple(case_params.items()),)

    def work(self, params: Scalars) -> Work:
        """Counts the bytes of a batch before the step: one byte for each value of records to decode, four bytes for
        each fp32 value.
        """
        batch, record = read_integers(params, "batch", "record")
        is_reading_compressed = params["kind"] == "reading"
        return Work(
            bytes=float(batch * record * (1 if is_reading_compressed else 4)),
            least_memory=batch * record / 2,  # any precision takes at least four bits for each value
            setup_seconds=RECORD_COUNT * record / _COMPRESSED_BYTES_PER_SECOND if is_reading_compressed else 0.0,
        )

    def support(self, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        if precision.float32_products != "highest":
            return refused(
                f"{precision.name} only changes how products read float32, and a batch travels as float32: measure fp32"
            )
        if params["kind"] != "reading" and _BUFFERS_AXIS.of(params) == "kept":
            return refused("no step of kind=transfer allocates a batch: choose kind=reading for buffers=kept")
        return precision.support(facts)

    def prepare(self, setup: Setup) -> DataLoadState:
        from fp8bench.nn.batches import DeviceBuffers

        text, random_generator = _load_record_bytes(setup)
        batches = _iterate_batches(setup, _make_stored_records(setup, text), random_generator)
        casts_on_device = _casts_batches_on_device(setup)
        first_batch = next(batches)
        first_operand = Operand(first_batch) if casts_on_device else setup.arithmetic.cast(first_batch, Role.INPUT)
        decodes_records = setup.params["kind"] == "reading"
        return DataLoadState(
            batches, setup.arithmetic, DeviceBuffers(first_operand, setup.facts.key), decodes_records, casts_on_device
        )

    def step(self, state: DataLoadState, phase: Phases) -> None:
        with phase.decode if state.decodes else phase.data_load:
            values = next(state.batches)
        batch = Operand(values)
        if state.arithmetic.casts and not state.casts_on_device:
            with phase.cast:
                batch = state.arithmetic.cast(values, Role.INPUT)
        with phase.data_load:
            state.destination.copy_operand(batch)
            del values, batch  # the phase includes the time of freeing these tensors
        if state.casts_on_device:
            with phase.cast:
                state.last_cast_batch = state.arithmetic.cast(state.destination.buffers[0], Role.INPUT)

    def error(self, setup: Setup) -> dict[str, float]:
        """Compares a batch in the case's precision with the same records normalised in fp64."""
        import torch

        from fp8bench.nn.batches import FLOAT64_DTYPE, normalise_bytes
        from fp8bench.numerics.norms import relative_frobenius

        text, random_generator = _load_record_bytes(setup)
        indices = _draw_indices(random_generator, int(setup.params["batch"]))
        device = setup.facts.key if _casts_batches_on_device(setup) else "cpu"
        values = _make_stored_records(setup, text).read_batch(indices).to(device)
        # Delayed scales fit the values only after a first cast.
        if setup.arithmetic.settles:
            setup.arithmetic.cast(values, Role.INPUT)
        batch = setup.arithmetic.cast(values, Role.INPUT)
        exact = torch.from_numpy(normalise_bytes(text[indices], FLOAT64_DTYPE))
        return {"batch_error": relative_frobenius(setup.arithmetic.restore(batch, torch.float32).cpu(), exact)}


def _casts_batches_on_device(setup: Setup) -> bool:
    """Returns whether the device casts batches. A batch in the precision's own dtype needs no cast there."""
    return setup.arithmetic.casts and setup.params.get("cast_on") == "device"


def _load_record_bytes(setup: Setup) -> tuple[ByteArray, np.random.Generator]:
    """Returns the bytes of all records, and the random generator that chooses batches. Both are derived from the
    seed.
    """
    import numpy as np

    from fp8bench.nn.batches import draw_text_records

    if setup.corpus is None:
        raise ValueError("loading data needs a token file, but there is none")
    random_generator = np.random.default_rng(setup.seed)
    return draw_text_records(
        setup.corpus, RECORD_COUNT, int(setup.params["record"]), random_generator
    ), random_generator


def _make_stored_records(setup: Setup, text: ByteArray) -> StoredRecords:
    from fp8bench.nn import batches

    return batches.CompressedDataRecords(text) if setup.params["kind"] == "reading" else batches.DecodedRecords(text)


def _iterate_batches(setup: Setup, records: StoredRecords, random: np.random.Generator) -> Iterator[Tensor]:
    """Yields batches endlessly. Compressed records are read when a batch is needed. Decoded records are gathered
    before timing into a few batches, which are used in turn.
    """
    import numpy as np

    from fp8bench.nn.batches import CompressedDataRecords

    batch = int(setup.params["batch"])
    if isinstance(records, CompressedDataRecords):
        keeps_buffers = _BUFFERS_AXIS.of(setup.params) == "kept"
        reused_batch = records.read_batch(np.zeros(batch, np.int64)) if keeps_buffers else None
        return (records.read_batch(_draw_indices(random, batch), reused_batch) for _ in itertools.count())
    # Steps use several batches in turn, so that the next batch is in no cache. A batch that is larger than RECORD_COUNT
    # fits into no cache, so one such batch is enough.
    prepared_batch_count = PREPARED_BATCH_COUNT if batch <= RECORD_COUNT else 1
    return itertools.cycle([records.read_batch(_draw_indices(random, batch)) for _ in range(prepared_batch_count)])


def _draw_indices(random: np.random.Generator, batch: int) -> IndexArray:
    return random.integers(0, RECORD_COUNT, batch)
