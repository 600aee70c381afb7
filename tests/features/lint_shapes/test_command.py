"""lint-shapes from words to text, rows and exit codes."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fp8bench.features.lint_shapes.command import page_of
from fp8bench.features.lint_shapes.job import LinearShape, examine, modes_of, shapes_of_model
from fp8bench.formats.hardware import CLASSES
from fp8bench.nn.sizes import PRODUCTS
from fp8bench.report.terminal.layout import render
from tests.commands import Say, unfolding
from tests.counts import for_each

REFUSED = """\
gpt2 with 8192 tokens: 15 products of 5 layers, as torch's scaled_mm takes them

products that fit as they are; -: there is no such product
  device       fp8  fp8-rowwise     mxfp8
  l40s    13 of 15     13 of 15         -
  b200    13 of 15     13 of 15  13 of 15

refused unless they are padded, and what that costs more
  product                       M x N x K           padded to   FLOPs   bytes
  head forward         8192 x 50257 x 768  8192 x 50272 x 768  +0.03%  +0.03%
      N=50257 is no multiple of 16 (torch): fp8, fp8-rowwise on l40s, b200; mxfp8 on b200
  head input-gradient  8192 x 768 x 50257  8192 x 768 x 50272  +0.03%  +0.03%
      K=50257 is no multiple of 16 (torch): fp8, fp8-rowwise on l40s, b200
      K=50257 is no multiple of 32 (hardware): mxfp8 on b200

why there is no such product
  NVIDIA's units for MX blocks begin at compute capability 10.0 (hardware): mxfp8 on l40s

Transformer Engine, where it says more than torch
  M=50257 is no multiple of 8: head weight-gradient, fp8 on l40s, b200
  M=50257 is no multiple of 32: head weight-gradient, mxfp8 on b200

what these products need besides their shape
  fp8-rowwise on l40s, b200: an output in bf16 or fp16
  mxfp8 on b200: CUDA 12.8, scales swizzled in tiles of 128 x 4
  everywhere: both operands with their contraction innermost, the second one column by column

Not taken as they are by any of these devices, in fp8, fp8-rowwise, mxfp8: head forward, head
  input-gradient.
"""


@pytest.fixture
def say(store: Path, fp8bench: Say) -> Say:
    """Run `lint-shapes`."""
    return unfolding(fp8bench, "lint-shapes")


def test_a_head_that_is_refused_is_told_with_reasons_and_padding(say: Say) -> None:
    """The whole text of one lint, word by word; it ends with 3."""
    words = ("--model", "gpt2", "--devices", "ada,b200,l4", "--dtypes", "fp8,fp8-rowwise,mxfp8")
    assert say(*words) == (3, REFUSED, "")


@for_each("width", [40, 60, 100, 200])
def test_no_line_is_wider_than_asked(width: int) -> None:
    """With all there is to say; colour takes no room."""
    shapes = [*shapes_of_model("gpt2", 1), LinearShape("a_layer_with_quite_a_name", 1, 2, 3, "fp32", True)]
    findings = examine(shapes, tuple(PRODUCTS), modes_of(["fp8", "fp8-e5m2", "fp8-rowwise", "mxfp8"], CLASSES), CLASSES)
    text = render(page_of("what was looked at", findings), width=width)

    assert max(map(len, text.splitlines())) <= width
    colored = render(page_of("what was looked at", findings), width=width, color=True)
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == text != colored


def test_what_fits_is_told_in_few_lines(say: Say) -> None:
    """And ends with 0, though another device takes less."""
    code, out, _ = say("--model", "llama3-8b", "--devices", "h100,a100", "--dtypes", "fp8")
    assert code == 0 and "  h100    all\n  a100      -\n" in out and "refused" not in out
    assert out.endswith("Every product fits as it is on some of these devices, in every mode.\n")


def test_a_processor_has_no_such_products(say: Say) -> None:
    """Whatever the shape: emulated, and said so."""
    code, out, _ = say("--model", "nano", "--devices", "cpu")
    assert code == 3 and "no CPU has units for it: emulated, in any shape" in out


def test_what_padding_does_not_mend_stands_apart(say: Say) -> None:
    """Types and layouts, with the products that they concern."""
    file = Path("shapes.csv")
    file.write_text("m,n,k,name,layout\n64,64,64,straight,\n64,64,64,turned,row\n")
    words = ("--shapes", str(file), "--devices", "h100", "--products", "forward")
    code, out, _ = say(*words, "--dtypes", "fp8,fp8-e5m2")
    out = " ".join(out.split())
    assert code == 3
    assert "two E5M2 operands are not multiplied on NVIDIA's GPUs (torch): straight forward" in out
    assert "its contraction must be innermost (torch): turned forward, fp8 on h100" in out


def test_json_says_all_of_it(say: Say) -> None:
    """One finding for each product, mode and device, with what each library says."""
    code, out, _ = say("--model", "gpt2", "--devices", "h100,cpu", "--dtypes", "fp8", "--json")
    found = json.loads(out)

    assert code == 3 and found["source"] == "gpt2" and found["fits"] is False
    assert len(found["findings"]) == 15 * 2
    head = next(one for one in found["findings"] if (one["layer"], one["product"]) == ("head", "forward"))
    assert head["torch"]["outcome"] == "pad" and head["torch"]["padded"] == [8192, 50272, 768]
    assert head["torch"]["objections"] == [{"by": "torch", "why": "N=50257 is no multiple of 16"}]
    assert head["transformer_engine"]["outcome"] == "pad"
    cpu = next(one for one in found["findings"] if one["device"] == "cpu")
    assert cpu["torch"]["outcome"] == "missing" and cpu["transformer_engine"] is None


def test_csv_has_a_row_for_what_each_library_says(say: Say) -> None:
    """On stdout instead of the text, or in a file beside it."""
    words = ("--model", "gpt2", "--devices", "h100", "--dtypes", "fp8,fp8-rowwise")
    _, printed, _ = say(*words, "--csv", "-")
    file = Path("rows.csv")
    code, text, _ = say(*words, "--csv", str(file))
    rows = list(csv.DictReader(io.StringIO(printed)))

    assert file.read_text() == printed and code == 3 and "refused" in text
    assert [row["by"] for row in rows].count("torch") == 30
    assert [row["by"] for row in rows].count("Transformer Engine") == 15
    padded = [row for row in rows if row["outcome"] == "pad" and row["by"] == "torch"]
    assert {row["padded_n"] for row in padded if row["product"] == "forward"} == {"50272"}
    assert all(float(row["more_flops"]) > 0 for row in padded)


@for_each(
    ("words", "said"),
    [
        ((), "neither --model nor --shapes"),
        (("--model", "gpt2", "--shapes", "a.txt"), "both --model and --shapes"),
        (("--model", "gpt3"), "Did you mean 'gpt2'"),
        (("--shapes", "absent.txt"), "cannot be read"),
        (("--shapes", "absent.txt", "--tokens", "4"), "--tokens goes with --model"),
        (("--model", "gpt2", "--tokens", "0"), "expected a whole number from 1"),
        (("--model", "gpt2", "--products", "backward"), "unknown product 'backward'"),
        (("--model", "gpt2", "--dtypes", "fp9"), "unknown dtype 'fp9'"),
        (("--model", "gpt2", "--dtypes", "fp8:history=3"), "unknown option of dtype fp8"),
        (("--model", "gpt2", "--dtypes", "fp32"), "fp32 scales nothing"),
        (("--model", "gpt2", "--devices", "h1000"), "Did you mean 'h100'"),
        (("--model", "gpt2", "--json", "--csv", "-"), "both print on stdout"),
        (("--model", "gpt2", "--csv", "nowhere/rows.csv"), "there is no directory nowhere"),
        (("--model", "gpt2", "--dtypes", "fp8:weight-gradient=bf16", "--products", "weight-gradient"), "stay in bf16"),
    ],
)
def test_bad_usage_is_one_sentence(say: Say, words: tuple[str, ...], said: str) -> None:
    """Exit 2, nothing on stdout."""
    code, out, err = say(*words)
    assert (code, out) == (2, "") and said in err and err.count("\n") == 1


def test_no_torch_is_needed() -> None:
    """The rules are values: a machine with neither GPU nor torch can be asked."""
    script = (
        "import sys; sys.modules['torch'] = None; from fp8bench.cli.main import main; "
        "sys.exit(main(['lint-shapes', '--model', 'llama3-8b', '--dtypes', 'fp8,nvfp4']))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
