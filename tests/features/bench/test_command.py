"""`fp8bench bench` from words to the answer, the stored run, and the commands that read it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from fp8bench.analysis.findings import findings
from fp8bench.model import Verdict
from fp8bench.store.runs.run_file import load_run
from fp8bench.user_code import user_module
from tests.commands import Say, unfolded
from tests.counts import for_each
from tests.features.bench.callables import SOURCE


@pytest.fixture(autouse=True)
def _mine(store: Path) -> None:
    """Copies the file of callables into the working directory."""
    Path("mine.py").write_text(SOURCE)


@pytest.fixture(scope="module", autouse=True)
def _short(short_slots: None) -> None:
    """Shortens slots, as times do not matter here."""


def test_a_comparison_is_a_run_like_any_other(fp8bench: Say, store: Path) -> None:
    names = ("mine.py:low", "mine.py:clean", "mine.py:wide")
    code, out, err = fp8bench(
        "bench", *names, "--against", "torch:matmul", "--shape", "64x32,32x64", "--quick", "--no-report"
    )
    shown = " ".join(out.split())
    assert code == 0, err
    assert user_module("mine.py") not in sys.modules, "imported in the parent"
    assert "bench (shape 64x32,32x64, against torch:matmul) on " in shown
    assert "Is it faster, and as exact? (compared with torch:matmul; identical code differed by up to " in shown
    far = r"differs from torch:matmul by 2\.\de-03; less exact: off float64 by 2\.\de-03, "
    assert re.search(rf"{far}torch:matmul by \d\.\de-07; memory ", shown)
    assert re.search(r"equal to torch:matmul; as exact: both off float64 by \d\.\de-07; memory ", shown)
    assert re.search(r"; more exact: off float64 by \d\.\de-08, torch:matmul by \d\.\de-07", shown)
    assert "a NaN in the input does not reach the result of mine.py:clean, but does reach" in shown
    assert "advise" not in out and "history" not in err and "asv" not in err

    run_id = re.findall(r"fp8bench show (\w+)", out)[0]
    assert fp8bench("show", run_id)[1] == out
    whole = fp8bench("show", run_id, "--all")[1]
    assert "difference error: mine.py:low 2." in " ".join(whole.split()), whole
    assert fp8bench("history", "list", "--runs")[1].count(" bench ") == 2  # as the command and as the suite
    assert fp8bench("report", run_id, "--html", "page.html")[0] == 0
    page = Path("page.html").read_text()
    assert "mine.py:low" in page and "more exact: off" in page and "Which precision to use" not in page
    assert "output error of each function" in page
    code, _, err = fp8bench("advise", run_id)
    assert code == 2 and "compares callables, but advice is about precisions" in unfolded(err)


def test_an_answer_without_float64_mentions_it(fp8bench: Say, store: Path) -> None:
    words = ("--against", "mine.py:refuses_fp64", "--shape", "64x32,32x64", "--quick", "--no-report")
    code, out, err = fp8bench("bench", "mine.py:product", *words)
    assert code == 0, err
    equal = "equal to mine.py:refuses_fp64; its error is unknown: mine.py:refuses_fp64 does not compute in float64"
    assert equal in " ".join(out.split()), out


@for_each(
    ("size", "words"),
    [
        (100.0, "times the size of the result, which rounding does not explain"),
        (2.0, "a column differs from torch:matmul by more"),
    ],
)
def test_a_wrong_result_is_called_wrong(size: float, words: str, fp8bench: Say, store: Path) -> None:
    Path("mine.py").write_text(
        f"SIZE = {size}\n{SOURCE}\n\ndef wrong(a, b):\n    c = a @ b\n    c[:, -1] *= SIZE\n    return c\n"
    )
    options = ("--against", "torch:matmul", "--shape", "64x32,32x64", "--quick", "--no-report")
    code, out, err = fp8bench("bench", "mine.py:low", "mine.py:wrong", *options)
    shown = " ".join(out.split())
    assert code == 1, err
    assert "mine.py:wrong WRONG, " in shown and words in shown
    assert "mine.py:wrong is wrong in column 63 of 64 (from 0, the last)" in shown
    assert shown.count("WRONG") == 1
    assert fp8bench("bench", "mine.py:low", "mine.py:drops", *options)[0] == 0, "random numbers are not wrong"


def test_a_result_that_rounding_explains_is_not_called_wrong(fp8bench: Say, store: Path) -> None:
    """The difference of two large numbers has no correct digit in bfloat16."""
    cancels = "def cancels(a):\n    return (a + 300 * a.flip(0)) - 300 * a.flip(0)\n"
    Path("mine.py").write_text(
        f"{SOURCE}\n\n{cancels}\n\ndef low_cancels(a):\n    return cancels(a.bfloat16()).float()\n"
    )
    options = ("--against", "mine.py:cancels", "--shape", "64x64", "--quick", "--no-report")
    code, out, err = fp8bench("bench", "mine.py:low_cancels", *options)
    assert code == 0 and "WRONG" not in out, err
    # It explains no difference of another result.
    both = "def both(a):\n    return cancels(a), a\n\ndef wrong(a):\n    return low_cancels(a), 2 * a\n"
    Path("two.py").write_text(f"{Path('mine.py').read_text()}\n\n{both}")
    options = ("--against", "two.py:both", *options[2:])
    code, out, err = fp8bench("bench", "two.py:wrong", *options)
    assert code == 1 and "WRONG" in out, err


def test_several_shapes_make_a_table(fp8bench: Say, store: Path) -> None:
    words = ("--against", "torch:matmul", "--shape", "64x32,32x64", "--shape", "32x8,8x32", "--dtype", "bf16")
    code, out, err = fp8bench("bench", "mine.py:twin", *words, "--quick", "--no-report")
    shown = " ".join(out.split())
    assert code == 0, err
    assert "bench (dtype bf16, against torch:matmul; 2 settings) on " in shown
    assert re.search(r"shape 64x32,32x64 .* shape 32x8,8x32 ", shown)


# Words after the callable and the expected message.
WRONG = [
    (["mine.py:prodct", "--shape", "8x8,8x8"], "mine.py has no 'prodct'. Did you mean 'product'?"),
    (["mine.py:product", "--shape", "8x8,4x4"], "torch:matmul cannot be measured with 8x8 float32, 4x4 float32"),
    (["mine.py:product", "--shape", "8y8"], "'8y8' is not a shape; expected sizes with x between"),
    (["mine.py:product", "--inputs", "mine.py:no_inputs"], "mine.py:no_inputs returns int without tensors"),
    (["torch:mm"], "the inputs of torch:mm are unknown. Give a shape for each argument"),
    (["absent.py:f", "--shape", "8x8"], "absent.py:f: the file 'absent.py' does not exist"),
    (["mine.py:talks", "--shape", "8x8,8x8"], "mine.py:talks cannot be measured: a step printed 'hello"),
    (["mine.py:crashes", "--shape", "8x8,8x8"], "the worker crashed during 'examine'"),
]


def test_a_missing_reference_is_added_to_the_typed_command(fp8bench: Say, store: Path) -> None:
    code, _, err = fp8bench("bench", "mine.py:product", "--shape", "8x8,8x8")
    assert code == 2 and err.endswith("\n  fp8bench bench mine.py:product --shape 8x8,8x8 --against ...\n"), err


@pytest.mark.parametrize(("words", "sentence"), WRONG, ids=[" ".join(words) for words, _ in WRONG])
def test_callables_that_cannot_be_compared_give_a_message(
    words: list[str], sentence: str, fp8bench: Say, store: Path
) -> None:
    code, out, err = fp8bench("bench", *words, "--against", "torch:matmul", "--quick")
    assert code == (3 if "crashed" in sentence else 2) and sentence in unfolded(err), err
    assert not out and not [*store.rglob("*.jsonl")], "something was kept"


@pytest.mark.slow
def test_a_planted_cost_is_decided_and_a_twin_is_no_faster(fp8bench: Say, store: Path) -> None:
    words = ("--shape", "512x512,512x512", "--against", "torch:matmul", "--no-report", "--budget", "20")
    code, out, err = fp8bench("bench", "mine.py:slowed", "mine.py:twin", *words)
    assert code == 0, err
    by_name = {finding.case.precision: finding for finding in findings(load_run(next(store.rglob("*.jsonl")))).values()}
    slowed = by_name["mine.py:slowed"]
    twin = by_name["mine.py:twin"]
    assert slowed.verdict is Verdict.SLOWER and slowed.ratio is not None and slowed.ratio.low > 1, out
    assert twin.verdict in (Verdict.SAME, Verdict.UNSURE), out
    assert "equal to torch:matmul; as exact: both " in " ".join(out.split())


@pytest.mark.slow
def test_a_gate_measures_a_kernel_again_that_became_slower(fp8bench: Say, store: Path) -> None:
    words = ("mine.py:product", "--against", "torch:matmul", "--shape", "256x256,256x256", "--no-report")
    assert fp8bench("bench", *words, "--budget", "6")[0] == 0
    (before,) = store.rglob("*.jsonl")
    Path("mine.py").write_text(SOURCE.replace("return a @ b", "return [a @ b for _ in range(3)][0]", 1))
    assert fp8bench("bench", *words, "--budget", "6")[0] == 0
    code, out, err = fp8bench("gate", before.stem, "last")
    # If other programs use the CPU, the gate is unsure, with a message.
    assert code == 1 or (code == 4 and "suspected" in out and "other programs took the CPU" in out), out + err
    assert "mine.py:product" in out and "worse" in out
