"""Thresholds in YAML: what fits, what it means, and nonsense refused with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8bench.errors import UsageError
from fp8bench.features.gate.command import read_rules
from fp8bench.features.gate.thresholds import ThresholdRule, check_rules, threshold_of
from fp8bench.model import Comparison, Direction, Evidence
from tests.counts import for_each


def figure(case: str = "gemm[m=64,n=64]@cpu/bf16", metric: str = "time", unit: str = "s") -> Comparison:
    return Comparison(case, case.partition("[")[0], metric, unit, Direction.SAME, Evidence.PAIRED)


@pytest.fixture
def rules(tmp_path: Path) -> object:
    """The rules of a text."""

    def read(text: str) -> tuple[ThresholdRule, ...]:
        file = tmp_path / "my.yaml"
        file.write_text(text)
        return read_rules(file)

    return read


def test_defaults() -> None:
    """Times by 5% and 5 us, memory by 2% and 1 MiB, anything else by 5%."""
    assert threshold_of(figure()).relative == 0.05 and threshold_of(figure()).smallest == 5e-6
    memory = threshold_of(figure(metric="peak_memory", unit="B"))
    assert (memory.relative, memory.smallest) == (0.02, 1 << 20)
    assert threshold_of(figure(metric="product_error", unit="ratio")).smallest == 0
    assert threshold_of(figure(metric="whatever")).relative == 0.05


def test_the_first_rule_that_fits(rules) -> None:  # type: ignore[no-untyped-def]
    """Cases before suites, if they stand first; what a rule leaves open is the default."""
    found = rules(
        "# nightly\n"
        '"gemm[m=64,*]@cpu/*":\n  time: {relative: 3%, smallest: 20 us}\n'
        'gemm:\n  time: {relative: 0.1}\n  "*_error": ignore\n'
        '"*":\n  peak_memory: {smallest: 4MiB}\n'
    )
    assert threshold_of(figure(), found).relative == 0.03
    assert threshold_of(figure(), found).smallest == pytest.approx(20e-6)
    other = threshold_of(figure("gemm[m=128,n=64]@cpu/bf16"), found)
    assert (other.relative, other.smallest) == (0.1, 5e-6)
    assert threshold_of(figure(metric="product_error"), found).ignored
    assert threshold_of(figure("mlp[m=1]@cpu/bf16", "peak_memory", "B"), found).smallest == 4 << 20
    assert not threshold_of(figure("mlp[m=1]@cpu/bf16", "product_error"), found).ignored


def test_brackets_stand_for_themselves(rules) -> None:  # type: ignore[no-untyped-def]
    """In fnmatch they are a class of letters."""
    found = rules('"gemm[m=64,n=64]@cpu/bf16":\n  time: {relative: 1%}\n')
    assert found[0].fits(figure()) and not found[0].fits(figure("gemm=@cpu/bf16"))


NONSENSE = {
    "nothing": ("", "the file holds no thresholds"),
    "a list": ("- time: 5%", "my.yaml:1: expected a mapping of thresholds, got a list"),
    "no figures": ("gemm: 5%", "my.yaml:1: gemm: expected a mapping of figures, got '5%'"),
    "empty figures": ("gemm: {}", "gemm: expected a mapping of figures, got none"),
    "no shape": ("gemm:\n  time: 5%", "my.yaml:2: time: expected relative and smallest, or ignore, got '5%'"),
    "an unknown key": ("gemm:\n  time: {ratio: 5%}", "my.yaml:2: unknown key 'ratio'. Known: relative, smallest"),
    "a bare five": ("gemm:\n  time: {relative: 5}", "5 without a sign would be 500%; write 5%"),
    "a negative": ("gemm:\n  time: {relative: -5%}", "expected a share, like 5% or 0.05, got '-5%'"),
    "a word": ("gemm:\n  time: {relative: much}", "expected a share, like 5% or 0.05, got 'much'"),
    "a huge share": ("gemm:\n  time: {relative: 1e9%}", "expected a share from 0"),
    "not finite": ("gemm:\n  time: {smallest: 1e999}", "expected a number"),
    "two points": ("gemm:\n  time: {smallest: 1.2.3}", "expected a number"),
    "an unknown unit": ("gemm:\n  time: {smallest: 5 parsec}", "unknown unit 'parsec'. Known: s, ms"),
    "a list of numbers": ("gemm:\n  time: {smallest: [1, 2]}", "got a list"),
    "twice": ("gemm:\n  time: ignore\ngemm:\n  time: ignore", "'gemm' stands in line 1 already"),
    "an empty pattern": ('"":\n  time: ignore', "an empty pattern fits nothing"),
    "an empty figure": ('gemm:\n  "": ignore', "an empty pattern fits nothing"),
    "an alias": ("gemm: &a\n  time: ignore\nmlp: *a", "aliases"),
    "broken": ("gemm: [", "broken YAML"),
    "no text": ("\x00", "broken YAML"),
}


@for_each(("text", "expected"), NONSENSE.values(), ids=NONSENSE)
def test_nonsense(rules, text: str, expected: str) -> None:  # type: ignore[no-untyped-def]
    """One sentence with the file and the line."""
    with pytest.raises(UsageError) as caught:
        rules(text)
    assert expected in str(caught.value) and "my.yaml" in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    """Named with its option."""
    with pytest.raises(UsageError, match=r"--thresholds .* cannot be read"):
        read_rules(tmp_path / "none.yaml")


def test_a_file_that_fits_nothing_is_refused(rules) -> None:  # type: ignore[no-untyped-def]
    """One idle rule among others is named only."""
    found = rules("gem:\n  time: {relative: 1%}\n")
    with pytest.raises(UsageError, match=r"none of its rules fits any of the 1 figures.*its suite gemm"):
        check_rules(found, (figure(),), "my.yaml")
    both = rules("gem:\n  time: {relative: 1%}\ngemm:\n  time: {relative: 1%}\n")
    assert check_rules(both, (figure(),), "my.yaml") == [f"{both[0].place}: 'gem' 'time' fits no figure"]


def test_a_unit_that_is_not_the_figures(rules) -> None:  # type: ignore[no-untyped-def]
    """Bytes of a time."""
    found = rules('gemm:\n  "*": {smallest: 4 MiB}\n')
    assert threshold_of(figure(metric="peak_memory", unit="B"), found).smallest == 4 << 20
    with pytest.raises(UsageError, match=r"my.yaml:2: smallest is in B, and time of gemm.* is in s"):
        threshold_of(figure(), found)
