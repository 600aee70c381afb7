"""Acknowledgements in the changes of a store."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import cast

from fp8bench.analysis.steps.changes import ChangeSearchResult, find_trend_changes, make_acknowledgement
from fp8bench.jobs.history import load_matching_acks
from fp8bench.jobs.observer import JobObserver
from fp8bench.model import OperatorCount, PhaseCount, Record, Tape
from fp8bench.store.acks import append_acks, get_acks_path
from tests.analysis.steps.test_changes import levels
from tests.commands import Say
from tests.histories import history, keep, records, run_at

NOBODY = cast("JobObserver", None)


def test_one_interpreter_by_two_names(tmp_path: Path) -> None:
    """bin/python and bin/python3 are the same: an acknowledgement applies to both."""
    (tmp_path / "python3").touch()
    (tmp_path / "python").symlink_to("python3")
    (tmp_path / "other").touch()
    stepped = levels((20, 1.0), (5, 1.1))
    seen = [replace(stepped, python=str(tmp_path / name)) for name in ("python3", "python", "other")]
    changes = [find_trend_changes([trend]).changes[0] for trend in seen]
    append_acks(tmp_path, [make_acknowledgement(changes[0], "2026-01-05T12:00:00+00:00", "")])
    for change, name in zip(changes, ("python3", "python", "python3"), strict=True):
        (kept,) = load_matching_acks(tmp_path, ChangeSearchResult((change,), 1, Counter()), NOBODY)
        assert kept.python == str(tmp_path / name)


WHOLE = OperatorCount("cast", "fp8bench::tensor", calls=2, bytes=400)
PRODUCT = OperatorCount("gemm", "aten::mm", calls=3, flops=2000, bytes=300, path="bf16")
# The parts of a formerly fused operator: more launches, and more bytes.
PARTS = tuple(replace(WHOLE, operator=name) for name in ("aten::abs", "aten::amax", "aten::div"))


def tape_of(*operators: OperatorCount) -> Tape:
    phases = []
    for phase in ("cast", "gemm"):
        of_phase = [operator for operator in operators if operator.phase == phase]
        flops, size = (
            sum(operator_count.calls * (getattr(operator_count, name) or 0) for operator_count in of_phase)
            for name in ("flops", "bytes")
        )
        phases.append(
            PhaseCount(
                phase, flops, size, sum(operator_count.calls * operator_count.launches for operator_count in of_phase)
            )
        )
    return Tape(operators, tuple(phases))


FUSED, APART = tape_of(WHOLE, PRODUCT), tape_of(*PARTS, PRODUCT)


def taped(tape: Tape) -> tuple[Record, ...]:
    """A run's records with that tape for bf16."""
    return tuple(record if record.is_reference else replace(record, tape=tape) for record in records())


def counted(store: Path, *tapes: Tape) -> None:
    """Stores a run for each commit."""
    for number, tape in enumerate(tapes):
        keep(store, run_at(number, records=taped(tape)))


def test_a_fused_kernel_that_fell_apart(store: Path, fp8bench: Say) -> None:
    """Launches show it between two commits at once, until acknowledged."""
    counted(store, FUSED, FUSED, APART)
    code, out, _ = fp8bench("history", "regressions", "--explain")
    said = " ".join(out.split())
    assert code == 1 and "2 regressions" in said and "after 00000001 and up to 00000002" in said
    assert "gemm.Gemm.track_launches(bf16, 512) 5 9 +80.0%" in said and "track_moved_bytes" in said
    assert "track_flops" not in said and "fewer than 11 commits" in said
    assert "fp8bench gate 00000001 00000002 --no-rerun" in said and "any change raises an alarm" in said
    assert fp8bench("history", "ack", "gemm.Gemm.track_*", "--because", "known")[0] == 0
    assert get_acks_path(store).exists() and fp8bench("history", "regressions")[0] == 0


def test_a_history_too_young_for_times_fails_by_its_counts(store: Path, fp8bench: Say) -> None:
    """Counts are not measured again, as the result would be the same."""
    counted(store, FUSED, FUSED)
    assert fp8bench("gate", "--history")[0] == 4
    keep(store, run_at(2, records=taped(APART)))
    code, out, err = fp8bench("gate", "--history")
    assert code == 1 and "bf16 launches" in out
    assert "measured again" not in err


def test_fewer_fail_no_gate(store: Path, fp8bench: Say) -> None:
    history(store, *[1.0, 1.003, 0.998, 1.001, 0.997, 1.002, 1.0, 0.999, 1.004, 0.998, 1.001, 1.0])
    for number, tape in ((12, APART), (13, FUSED)):
        keep(store, run_at(number, records=taped(tape)))
    assert fp8bench("gate", "--history")[0] == 0
    code, out, _ = fp8bench("history", "regressions")
    assert code == 1 and "2 counts that went down" in out and "0 regressions" in out
