"""Quoted figures against datasheets: right, wrong and what they are instead, and what is no quote."""

from __future__ import annotations

import pytest

from fp8bench.cli.main import main
from fp8bench.errors import UsageError
from fp8bench.jobs.quoted_peaks import quote_of, told, wrong
from tests.counts import for_each


@for_each(
    ("text", "right", "words"),
    [
        (
            "H200 tf32 312",
            False,
            ("WRONG: 312 TFLOP/s is not tf32 of", "494.5 TFLOP/s, dense", "sparse tf32 of A100"),
        ),
        ("H200 fp8 3958", False, ("operands with 2:4 structure", "1979 TFLOP/s, dense")),
        ("H200 tf32 989.5", False, ("that is bf16 and fp16 of H200 SXM",)),
        ("H100 SXM bandwidth 4800", False, ("that is bandwidth of H200 SXM", "3350 GB/s")),
        ("NVIDIA H200 bf16 989", True, ("right of H200 SXM", "https://www.nvidia.com/en-us/data-center/h200/")),
        ("H200 NVL bf16 835.5", True, ("datasheet, unverified",)),
        ("H200 SXM e4m3 1979", True, ()),
        ("H200 SXM memory 141", True, ("141 GB",)),
        ("H200 SXM link 900", False, ("450 GB/s",)),
        ("A100 SXM 80 GB watts 400", True, ("400 W",)),
        ("TPU v5p bf16 459", True, ("published alone", "https://docs.cloud.google.com/tpu/docs/v5p-training")),
        ("Gaudi3 bf16", True, ("1835 TFLOP/s", "unverified", "fp8bench runs on no such device")),
    ],
)
def test_a_quote(text: str, right: bool, words: tuple[str, ...]) -> None:
    quote = quote_of(text)
    said = "\n".join(told([quote]))
    assert wrong(quote) is not right and all(word in said for word in words), said
    assert right or "right" not in said


@for_each(
    ("text", "why"),
    [
        ("", "cannot be read"), ("H200", "cannot be read"), ("H200 312", "cannot be read"),
        ("H200 tf32 -3", "cannot be read"), ("H200 tf32 nan", "cannot be read"), ("H200 tf32 inf", "cannot be read"),
        ("H200 speed 3", "'speed' is no figure"), ("H900 tf32 3", "no datasheet of 'H900'"),
        ("NVIDIA tf32 3", "no datasheet"), ("H200 fp4 3", "nothing is published of fp4"),
        ("L4 memory 24", "nothing is published of memory"),
    ],
)  # fmt: skip
def test_what_is_no_quote(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        quote_of(text)


def test_the_exit_code_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    """1 where any of several is wrong, with all of them told; a question is never wrong."""
    assert main(["doctor", "--peak", "H200 bf16 989", "--peak", "H200 tf32 312"]) == 1
    assert "right of H200 SXM" in (said := capsys.readouterr().out) and "WRONG" in said
    assert main(["doctor", "--peak", "H200 bf16"]) == 0
    assert main(["doctor", "--peak", "H200 bf16", "--ceilings"]) == 2
