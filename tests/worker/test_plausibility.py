"""Suites of a few lines that measure nothing, or spoil what they measure, through a real worker: each is noticed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fp8bench import pipeline
from fp8bench.model import Record, Request, Run, Status
from fp8bench.protocols import SilentObserver
from fp8bench.user_code import import_user_modules
from tests.own_suites import forgotten

SUITE = """
import torch

from fp8bench.suites import Axis, Work, Workload, workloads


@workloads.register("planted_lies")
class PlantedLies(Workload):
    name = "planted_lies"
    summary = "steps that are not what they seem"

    def axes(self, facts):
        return (Axis("how", "what is wrong", ("honest",), str),)

    def work(self, params):
        return Work(1.0)

    def prepare(self, setup):
        return torch.ones(8, 8)

    def step(self, state, phase):
        with phase.gemm:
            state @ state

    def error(self, setup):
        name = {"misnamed": "time"}.get(setup.case.param("how"), "some_error")
        return {name: 0.5}
"""
HOWS = ("honest", "misnamed")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """All of them, two rounds each."""
    folder = tmp_path_factory.mktemp("planted")
    file = folder / "planted_lies.py"
    file.write_text(SUITE)
    with forgotten(folder):
        import_user_modules([str(file)])
        request = Request("planted_lies", ("fp32",), ("cpu",), axes=(("how", HOWS),), rounds=2, imports=(str(file),))
        yield pipeline.execute(request, folder / "store", SilentObserver(), "a test")


def record_of(run: Run, how: str) -> Record:
    return next(one for one in run.records if one.case.param("how") == how)


def test_what_is_honest_is_measured_and_has_no_remark(run: Run) -> None:
    record = record_of(run, "honest")
    assert record.status is Status.OK and not record.detail and record.measurement("some_error") is not None


def test_a_number_with_the_name_of_a_figure_fails_its_case(run: Run) -> None:
    """It would overwrite that figure in every table that is sorted by names."""
    record = record_of(run, "misnamed")
    assert record.status is Status.FAILED
    assert "no numerical error: ValueError: error() gives a number whose name is not free: 'time' is" in record.reason
