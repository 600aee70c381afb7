"""The environment: what is known, what it means, and what is lost."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.model import DeviceFacts, Environment, Overheads, Resumption, Scalar, Verdict
from fp8bench.report.elements import Code, NameValuePairs, TextList
from tests.materials import Made, of_kind, part, recased
from tests.runs import gemm, judged, transformer
from tests.told_before import Told, as_before

KNOWN: dict[str, Scalar | None] = {
    "torch": "2.13.0", "torch_git": "0123456789", "python": "3.11.7", "python_implementation": "CPython",
    "cpu_count": 64, "cpu_affinity": 2, "cpu_governor": "performance", "threads": 1, "load_1min": 1.5,
    "commit": "0a1b2c3d4e", "dirty": True, "machine": "box", "system": "Linux", "smt": None,
    "fp8bench": "0.1.0", "numpy": "2.3.1", "imports_sha256": "abc", "env_OMP_NUM_THREADS": "2", "env_A": "1",
    "switch niceness": 5, "switch oneDNN": False, "switches_set": "oneDNN at False (usually True)",
}  # fmt: skip
DRIVER: dict[str, Scalar | None] = {
    "cpu driver": "580.65",
    "cpu cuda_driver": "13.0",
    "cpu power_cap": 650.0,
    "cpu power_cap_default": 700.0,
    "cpu ecc": "on",
    "cpu mig": None,
    "cpu persistence": "off",
    "cpu energy_source": "counter",
    "cpu energy_period": 0.1,
}


def facts(*made: Made) -> NameValuePairs:
    (shown,) = of_kind(part("environment", *made), NameValuePairs)
    return shown


def under(made: Made, known: dict[str, Scalar | None]) -> Made:
    return replace(made[0], environment=Environment(known)), made[1]


def kept() -> Made:
    run, findings = under(gemm(), {"fp8bench": "0.1.0", "threads": 2})
    return replace(run, path=".fp8bench/runs/box/run.jsonl"), findings


@as_before
def test_environment() -> Told:
    yield "what is known has a line", part("environment", under(gemm(), KNOWN))
    yield "and nothing else has; what was not simply measured is explained", part("environment", gemm())
    run, findings = recased(judged((Verdict.FASTER, 0.5)), lambda case: replace(case, device="cuda:0"))
    gpu = DeviceFacts("cuda", 0, "NVIDIA H200", 139 << 30, "2.13.0", (9, 0), cuda="13.0", cache_bytes=60 << 20)
    libraries = under((replace(run, devices=(*run.devices, gpu)), findings), {"cudnn": 91200, "cublaslt": 130100})
    yield "a GPU says what it can do; of a device where nothing was measured nothing is said", facts(libraries)
    told_by_driver = under(judged((Verdict.FASTER, 0.5)), DRIVER)
    yield "a GPU says what its driver had set", facts(told_by_driver)
    run, findings = transformer()
    noted = replace(run, notes=tuple(f"note {number}" for number in range(50))), findings
    yield "more notes than one reads are counted", of_kind(part("environment", noted), TextList)
    cut = replace(run, records=run.records[:1], finished=False), findings
    yield "a run cut off says so", of_kind(part("environment", cut), TextList)
    yield "runs side by side have a column each", part("environment", gemm(), transformer())
    yield "the commands, and where the samples are", part("environment", kept())
    again = Resumption("2026-01-06", "fp8bench suite --resume 1", Environment({}))
    resumed = replace(kept()[0], resumptions=(again,)), kept()[1]
    yield "a run gone on with has every command", of_kind(part("environment", resumed), Code)
    lost = replace(kept()[0], command="", started="", environment=Environment({}), devices=()), kept()[1]
    yield "a lost header is said, and nothing made up", part("environment", lost)


def test_a_gpu_that_idles_before_its_slots_is_a_remark() -> None:
    """Its clock may rise meanwhile, which the figures do not show."""
    run, findings = gemm()
    overheads = (("cuda:0", Overheads(0.0, 0.0, 0.5e-6, 1e-6, "torch captured no graph")),)
    remarks = str(part("environment", (replace(run, overheads=overheads), findings)))
    assert (
        "note: cuda:0 idles before each slot" in remarks and "could not be captured: torch captured no graph" in remarks
    )
    assert "idles" not in str(part("environment", (run, findings)))
