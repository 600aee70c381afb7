"""Thresholds in YAML: what fits, what it means, and nonsense refused with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8bench.errors import UsageError
from fp8bench.features.gate.command import read_threshold_rules
from fp8bench.features.gate.thresholds import ThresholdRule, check_rules, find_threshold
from fp8bench.model import Comparison, Direction, Evidence
from tests.counts import for_each


def figure(case: str = "gemm[m=64,n=64]@cpu/bf16", metric: str = "time", unit: str = "s") -> Comparison:
    return Comparison(case, case.partition("[")[0], metric, unit, Direction.SAME, Evidence.PAIRED)


def rules_of(folder: Path, text: str) -> tuple[ThresholdRule, ...]:
    file = folder / "my.yaml"
    file.write_text(text)
    return read_threshold_rules(file)


def test_the_first_matching_rule_applies(tmp_path: Path) -> None:
    rules = rules_of(
        tmp_path,
        "# nightly\n"
        '"gemm[m=64,*]@cpu/*":\n  time: {relative: 3%, smallest: 20 us}\n'
        'gemm:\n  time: {relative: 0.1}\n  "*_error": ignore\n'
        '"*":\n  peak_memory: {smallest: 4MiB}\n',
    )
    for found, relative, smallest in (
        (figure(), 0.03, 20e-6),
        (figure("gemm[m=128,n=64]@cpu/bf16"), 0.1, 5e-6),
        (figure("mlp[m=1]@cpu/bf16", "peak_memory", "B"), 0.02, 4 << 20),
    ):
        threshold = find_threshold(found, rules)
        assert (threshold.relative, threshold.smallest) == (relative, pytest.approx(smallest))
    assert find_threshold(figure(metric="product_error"), rules).ignored
    assert not find_threshold(figure("mlp[m=1]@cpu/bf16", "product_error"), rules).ignored
    assert rules[0].matches(figure()) and not rules[0].matches(figure("gemm=@cpu/bf16"))


@for_each(
    ("text", "expected"),
    [
        ("", "is not a mapping. Give a YAML file of thresholds"),
        ("- time: 5%", "is not a mapping"),
        ("gemm: 5%", "my.yaml: gemm: expected thresholds, in lines like"),
        ("gemm: {}", "gemm: expected thresholds, in lines like"),
        ("gemm:\n  time: 5%", "my.yaml: gemm: time: expected thresholds"),
        ("gemm:\n  time: {ratio: 5%}", "my.yaml: gemm: time: unknown key 'ratio'"),
        ("gemm:\n  time: {relative: 5}", "5 without a sign would be 500%"),
        ("gemm:\n  time: {relative: -5%}", "expected a share, like 5% or 0.05, got '-5%'"),
        ("gemm:\n  time: {relative: much}", "expected a share, like 5% or 0.05, got 'much'"),
        ("gemm:\n  time: {relative: 1e9%}", "expected a non-negative share"),
        *((f"gemm:\n  time: {{smallest: {number}}}", "expected a number") for number in ("1e999", "1.2.3")),
        ("gemm:\n  time: {smallest: 5 parsec}", "unknown unit 'parsec'"),
        ("gemm:\n  time: {smallest: [1, 2]}", "expected a number"),
        ("gemm:\n  time: ignore\ngemm:\n  time: ignore", "the key 'gemm' occurs twice"),
        *((text, "an empty pattern fits nothing") for text in ('"":\n  time: ignore', 'gemm:\n  "": ignore')),
        *((text, "cannot be read (") for text in ("gemm: [", "\x00")),
    ],
)
def test_a_malformed_file_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        rules_of(tmp_path, text)
    assert expected in str(caught.value) and "my.yaml" in str(caught.value)


def test_a_file_that_fits_nothing_is_refused(tmp_path: Path) -> None:
    idle = rules_of(tmp_path, "gem:\n  time: {relative: 1%}\n")
    with pytest.raises(UsageError, match=r"no rule in it matches any of the 1 figures.*its suite gemm"):
        check_rules(idle, (figure(),), "my.yaml")
    both = rules_of(tmp_path, "gem:\n  time: {relative: 1%}\ngemm:\n  time: {relative: 1%}\n")
    assert check_rules(both, (figure(),), "my.yaml") == [f"{both[0].place}: 'gem' 'time' matches no figure"]
    bytes_ = rules_of(tmp_path, 'gemm:\n  "*": {smallest: 4 MiB}\n')
    assert find_threshold(figure(metric="peak_memory", unit="B"), bytes_).smallest == 4 << 20
    with pytest.raises(UsageError, match=r"my.yaml: smallest is in B, and time of gemm.* is in s"):
        find_threshold(figure(), bytes_)
