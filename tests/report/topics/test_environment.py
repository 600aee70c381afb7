"""The environment: what is known, what it means, and what is lost."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.model import DeviceFacts, Environment, Resumption, Scalar, Verdict
from fp8bench.report.elements import Code, Facts, Items, Table, Text, Tone
from tests.counts import for_each
from tests.materials import Made, nothing, of_kind, part, recased
from tests.runs import gemm, judged, measured, transformer


def facts(*made: Made) -> dict[str, str]:
    """The names and what they are."""
    (found,) = of_kind(part("environment", *made), Facts)
    return dict(found.pairs)


def remarks(*made: Made) -> list[Text]:
    return [text for items in of_kind(part("environment", *made), Items) for text in items.items]


def test_what_is_known_has_a_line_and_nothing_else() -> None:
    run, findings = gemm()
    known = Environment(
        {
            "torch": "2.13.0", "torch_git": "0123456789", "python": "3.11.7", "python_implementation": "CPython",
            "cpu_count": 64, "cpu_affinity": 2, "cpu_governor": "performance", "threads": 1, "load_1min": 1.5,
            "commit": "0a1b2c3d4e", "dirty": True, "machine": "box", "system": "Linux", "smt": None,
            "fp8bench": "0.1.0", "numpy": "2.3.1", "imports_sha256": "abc", "env_OMP_NUM_THREADS": "2", "env_A": "1",
            "switch niceness": 5, "switch oneDNN": False, "switches_set": "oneDNN at False (usually True)",
        }
    )  # fmt: skip
    always = {"seed": "0", "samples": "this run was not stored", "format of the file": "schema 1"}
    assert facts((replace(run, environment=known), findings)) == {
        "device cpu": "AMD EPYC 7B13, 8.00 GiB",
        "torch": "2.13.0 (git 01234567)",
        "Python": "3.11.7 (CPython)",
        "machine": "box",
        "system": "Linux",
        "processors": "2 of 64, governor performance",
        "threads": "1",
        "switches": "oneDNN at False (usually True)",
        "load at start": "1.5 (mean of 1 minute)",
        "commit": "0a1b2c3d4e with uncommitted changes",
        "started": "2026-01-05 12:00 UTC",
        "cases": "8 measured, 3 skipped, 1 failed",
        "noise floor (A/A)": "gemm +-0.4%",
        "fp8bench": "0.1.0",
        "numpy": "2.3.1",
        "code of --import": "sha256 abc",
        "A": "1",
        "OMP_NUM_THREADS": "2",
        **always,
    }
    least = {"device cpu", "started", "cases", "noise floor (A/A)", "threads", *always}
    assert set(facts((run, findings))) == least


def test_a_gpu_says_what_it_can_do() -> None:
    run, findings = recased(judged((Verdict.FASTER, 0.5)), lambda case: replace(case, device="cuda:0"))
    gpu = DeviceFacts("cuda", 0, "NVIDIA H200", 139 << 30, "2.13.0", (9, 0), cuda="13.0", cache_bytes=60 << 20)
    told = Environment({"cudnn": 91200, "cublaslt": 130100, **run.environment.facts})
    found = facts((replace(run, devices=(*run.devices, gpu), environment=told), findings))
    assert (found["cuDNN"], found["cuBLASLt"]) == ("91200", "130100")
    assert (
        found["device cuda:0"] == "NVIDIA H200, 139 GiB, compute capability 9.0, last cache 60.0 MiB"
        and found["CUDA"] == "13.0"
    )
    assert "device cpu" not in found  # nothing was measured there


def test_a_gpu_says_what_its_driver_had_set() -> None:
    """Under its key; what the driver does not say has no line, and a source of energy that is none neither."""
    run, findings = judged((Verdict.FASTER, 0.5))
    said: dict[str, Scalar | None] = {
        "cpu driver": "580.65", "cpu cuda_driver": "13.0", "cpu power_cap": 650.0, "cpu power_cap_default": 700.0,
        "cpu ecc": "on", "cpu mig": None, "cpu persistence": "off", "cpu energy_source": "counter",
        "cpu energy_period": 0.1,
    }  # fmt: skip
    found = facts((replace(run, environment=Environment(said)), findings))
    assert found["driver cpu"] == "580.65, CUDA up to 13.0" and found["power cap cpu"] == "650 W of 700 W"
    assert found["modes cpu"] == "ECC on, persistence mode off"
    assert found["energy cpu"] == "counter, changes every 100 ms"
    less = facts((replace(run, environment=Environment({"cpu driver": "580", "cpu energy_source": "none"})), findings))
    assert less["driver cpu"] == "580"
    assert not {"power cap cpu", "modes cpu", "energy cpu"} & set(less)


def test_time_inside_slots_counts_every_entry() -> None:
    """12 slots of 7 s, and one of the reference's second entry."""
    run, findings = measured()
    first = run.records[0]
    timing = first.timing
    assert timing is not None
    slots = tuple(replace(slot, wall_seconds=7.0) for slot in timing.slots)
    record = replace(first, timing=replace(timing, slots=slots), control=replace(timing, slots=slots[:1]))
    assert facts((replace(run, records=(record,)), findings))["timed"] == "1 min 31 s inside timed slots"


def test_how_wide_vectors_of_compiled_quantisers_were_is_told() -> None:
    run, findings = measured()
    timing = run.records[0].timing
    assert timing is not None
    wide, both = replace(timing, vector_bits=(512,)), replace(timing, vector_bits=(256, 512))
    records = (replace(run.records[0], timing=wide, control=both), *run.records[1:])
    assert facts((replace(run, records=records), findings))["compiled quantisers"] == "vectors of 256, 512 bits"
    assert "compiled quantisers" not in facts((run, findings))


def test_what_was_not_simply_measured_is_explained() -> None:
    assert remarks(gemm()) == [
        Text(
            "emulated: fp8 (2 cases): right in numbers, but no speed: its time and memory are the cost of emulation; "
            "no hardware for FP8: values rounded, products in fp32",
            Tone.DOUBT,
        ),
    ]


def test_more_notes_than_one_reads_are_counted() -> None:
    run, findings = transformer()
    said = remarks((replace(run, notes=tuple(f"note {number}" for number in range(50))), findings))
    assert said[-1].text == "and 31 more notes and troubles in the run's file"


def test_a_run_cut_off_says_so() -> None:
    run, findings = transformer()
    assert remarks((replace(run, records=run.records[:1], finished=False), findings))[0] == Text(
        f"stopped early: 2 of 3 cases have no record; --resume {run.id} measures them", Tone.BAD
    )


def test_runs_side_by_side_have_a_column_each() -> None:
    found = part("environment", gemm(), transformer())
    (table,) = of_kind(found, Table)
    assert [column.title for column in table.columns] == ["fact", "gemm", "transformer"]
    floors = ["noise floor (A/A)", "gemm +-0.4%", "transformer +-0.6% to +-0.9%"]
    assert floors in [[field.text for field in row] for row in table.rows]
    headings = [text.text for text in of_kind(found, Text) if text.tone is Tone.STRONG]
    assert headings == ["gemm", "transformer", "How to measure it again", "gemm", "transformer"]
    assert len(of_kind(found, Items)) == 2


def test_a_run_without_cases_says_so() -> None:
    assert facts(nothing())["cases"] == "none"


def kept(path: str = ".fp8bench/runs/box/run.jsonl") -> Made:
    run, findings = gemm()
    return replace(run, path=path, environment=Environment({"fp8bench": "0.1.0", "threads": 2})), findings


def codes(*made: Made) -> list[str]:
    return [code.text for code in of_kind(part("environment", *made), Code)]


def test_the_commands_and_where_the_samples_are() -> None:
    assert facts(kept())["samples"] == ".fp8bench/runs/box/run.jsonl"
    assert codes(kept()) == ["fp8bench suite x", "fp8bench report 20260105-120000"]


@for_each(
    ("path", "more"),
    [
        (".fp8bench/runs/box/run.jsonl", ""),
        ("my store/runs/box/run.jsonl", " --store 'my store'"),
        ("run.jsonl", ""),
    ],
)
def test_a_store_elsewhere_is_named(path: str, more: str) -> None:
    assert codes(kept(path))[-1] == f"fp8bench report 20260105-120000{more}"


def test_a_run_that_was_not_kept_cannot_be_rendered_again() -> None:
    assert codes(gemm()) == ["fp8bench suite x"] and facts(gemm())["samples"] == "this run was not stored"


def test_a_run_gone_on_with_has_every_command() -> None:
    run, findings = kept()
    again = Resumption("2026-01-06", "fp8bench suite --resume 1", Environment({}))
    assert codes((replace(run, resumptions=(again,)), findings))[0] == "fp8bench suite x\nfp8bench suite --resume 1"


def test_a_lost_header_is_said_and_nothing_made_up() -> None:
    run, findings = kept()
    lost = replace(run, command="", started="", environment=Environment({}), devices=())
    found = part("environment", (lost, findings))
    words = "the header of its file is lost: what was asked, planned and run on is not known"
    assert Text(words, Tone.BAD) in remarks((lost, findings))
    assert Text("The command is lost with the header of the file.", Tone.DOUBT) in found.elements
    assert not {"seed", "threads", "fp8bench"} & set(facts((lost, findings)))
