"""Plans for any device on any machine: what runs how, what is skipped and why, and what cannot be meant."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, cast

import numpy as np
import pytest

from fp8bench.errors import UnknownName, UsageError
from fp8bench.model import DeviceFacts, Group, Level, Params, Plan, PlannedCase, Request, Scalar, Support, Work
from fp8bench.model.codec import decode, encode
from fp8bench.plan import checked_workload
from fp8bench.plan.make import check_request, has_added_reference, make_plan
from fp8bench.protocols import Layer, Precision
from fp8bench.protocols.axes import Axis, whole_number
from fp8bench.registry import precisions, workloads
from tests.counts import for_each
from tests.facts import A100, B200, CPU, H200, MI300X, V100, gpu
from tests.plans import cases_of
from tests.worker.scripted import Stub

NATIVE, EMULATED, REFUSED = Level.NATIVE, Level.EMULATED, Level.REFUSED
ALL = ("fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4", "mxfp4")


def plan(
    facts: DeviceFacts, suite: str = "gemm", corpus: str | None = None, compares: bool = False, **request: object
) -> Plan:
    """Plans only what was named, unless precisions are to be compared."""
    return make_plan(Request(suite, **request), (facts,), corpus, compares)  # type: ignore[arg-type]


def one_group(facts: DeviceFacts, *dtypes: str, shape: str = "64", **request: object) -> Group:
    axes = (("shape", (shape,)),)
    return plan(facts, dtypes=dtypes, axes=axes, **request).groups[0]


def by_mode(group: Group) -> dict[str, PlannedCase]:
    return {planned.case.mode: planned for planned in group.cases}


def reference(group: Group) -> str:
    return group.cases[group.reference].case.mode


def test_a_gpu_that_torch_has_no_kernels_for_is_refused_with_the_reason() -> None:
    old = replace(H200, unusable="this torch has no kernels for sm_90")
    made = make_plan(Request("gemm", ("fp32", "fp8"), axes=(("shape", ("64",)),)), (CPU, old))
    cases = cases_of(made)
    assert {planned.case.device for planned in cases} == {"cuda:0"}
    assert {(planned.support.level, planned.skip) for planned in cases} == {(Level.REFUSED, old.unusable)}


@pytest.mark.parametrize("facts", [CPU, V100, A100, H200, B200, MI300X], ids=lambda facts: facts.name)
def test_every_precision_is_a_case_on_every_device(facts: DeviceFacts) -> None:
    """A refused case has a row with the reason.

    The rest runs. tests/precisions checks each precision on each device.
    """
    group = one_group(facts, *ALL)
    cases = by_mode(group)
    supports = {name: replace(cases[name].support, backend="") for name in ALL}
    assert supports == {name: precisions.get(name).support(facts) for name in ALL}
    for case in group.cases:
        assert case.runs == (case.support.level is not REFUSED)
        assert case.skip == ("" if case.runs else case.support.reason)
        assert case.support.reason


@pytest.mark.parametrize(
    ("facts", "size", "batch", "sequence"), [(CPU, "nano", 2, 96), (H200, "gpt2-124m", 8, 1024)], ids=["cpu", "gpu"]
)
def test_a_gpu_gets_the_real_size(facts: DeviceFacts, size: str, batch: int, sequence: int) -> None:
    """On a CPU the same suite must end within seconds."""
    (group,) = plan(facts, "transformer", dtypes=("fp32", "bf16"))
    case = group.cases[0].case
    assert dict(case.params) == {
        "size": size,
        "batch": batch,
        "sequence": sequence,
        "micro_batches": 2,
        "checkpointing": "no",
        "compile": "no",
        "attention": "auto",
        "weights": "cached",
    }
    assert group.cases[0].work.tokens == batch * sequence * 2


@for_each(
    ("known", "asked", "chosen"),
    [
        ((CPU,), (), ["cpu"]),
        ((CPU, A100, H200), (), ["cuda:0"]),
        ((CPU, H200, gpu("H200", (9, 0), 1)), ("cuda:1",), ["cuda:1"]),
        ((CPU, H200), ("cpu", "cuda:0", "cuda"), ["cpu", "cuda:0"]),
    ],
)
def test_the_first_gpu_is_the_default_device(
    known: tuple[DeviceFacts, ...], asked: tuple[str, ...], chosen: list[str]
) -> None:
    made = make_plan(Request("gemm", devices=asked, axes=(("shape", ("64",)),)), known)
    assert list(dict.fromkeys(planned.case.device for planned in cases_of(made))) == chosen
    assert len(made.groups) == len(chosen)


def test_precisions_by_default_are_fp32_bf16_and_fp8() -> None:
    assert [case.case.mode for case in one_group(H200).cases] == ["fp32", "bf16", "fp8"]
    assert [case.case.mode for case in one_group(H200, "fp4", "fp32", "nvfp4", "fp32").cases] == ["fp32", "nvfp4"]


@pytest.mark.parametrize(
    ("facts", "dtypes", "asked", "instead"),
    [
        (V100, ("tf32", "bf16", "fp16", "fp8"), None, "fp16"),
        (V100, ("tf32", "fp8", "mxfp8"), None, "fp8"),
        (V100, ("mxfp4", "fp16", "fp32"), "bf16", "fp32"),
        (MI300X, ("fp8", "bf16", "fp16"), "tf32", "fp16"),
        (V100, ("tf32", "bf16"), None, "tf32"),
    ],
)
def test_a_refused_reference_is_replaced_by_the_highest_native_precision(
    facts: DeviceFacts, dtypes: tuple[str, ...], asked: str | None, instead: str
) -> None:
    group = one_group(facts, *dtypes, reference=asked)
    assert reference(group) == instead
    assert group.cases[0].skip


def test_axes_multiply_in_the_order_given() -> None:
    axes = (("operands", ("ready", "cast")), ("shape", ("32", "64x32x16", "32x32x32")))
    made = plan(CPU, axes=axes, dtypes=("fp32",))
    settings = [(group.cases[0].case.param("m"), group.cases[0].case.param("operands")) for group in made]
    assert settings == [(32, "ready"), (32, "cast"), (64, "ready"), (64, "cast")]
    assert made.groups[0].setting == "gemm[m=32,n=32,k=32,product=forward,operands=ready]@cpu"


def test_a_precision_map_goes_into_every_case_but_the_reference() -> None:
    (group,) = plan(H200, "transformer", dtypes=("bf16", "fp8", "fp32"), precision_map=(("mlp", "mxfp8"),))
    cases = by_mode(group)
    assert list(cases) == ["fp32", "bf16{mlp=mxfp8}", "fp8{mlp=mxfp8}"]
    assert [case.support.level for case in cases.values()] == [NATIVE, EMULATED, EMULATED]
    assert "MXFP8" in cases["fp8{mlp=mxfp8}"].support.reason
    assert reference(group) == "fp32"


def test_a_layer_that_one_size_lacks_is_a_reason_there() -> None:
    given = {"dtypes": ("bf16", "fp8"), "axes": (("size", ("nano", "gpt2-124m")),)}
    nano, large = plan(CPU, "transformer", precision_map=(("blocks.7", "bf16"),), **given).groups
    kinds = "attn and mlp and head and embed and residual and logits and norm"
    assert nano.cases[1].skip.startswith(f"no layer is called blocks.7 in this case, only {kinds}:")
    assert large.cases[1].runs and nano.cases[0].runs
    with pytest.raises(UnknownName, match=r"layer of suite transformer 'blocks\.12'"):
        plan(CPU, "transformer", precision_map=(("blocks.12", "bf16"),), **given)


def test_a_map_is_held_against_the_layers_of_the_device_at_hand() -> None:
    """A GPU's default model has more blocks; before the device is known, either model's layers are accepted."""
    asked = Request("transformer", ("bf16", "fp8"), precision_map=(("blocks.7", "bf16"),))
    check_request(asked)
    assert all(one.runs for one in make_plan(asked, (H200,)).groups[0].cases)
    with pytest.raises(UnknownName):
        make_plan(asked, (CPU,))


def test_each_suite_of_a_run_takes_the_keys_that_name_its_layers() -> None:
    given = (("mlp", "bf16"), ("up", "bf16"))
    groups = plan(CPU, "mlp,transformer", dtypes=("fp32", "fp8"), precision_map=given).groups
    maps = {group.cases[1].case.workload: group.cases[1].case.precision_map for group in groups}
    assert maps == {"mlp": (("up", "bf16"),), "transformer": (("mlp", "bf16"),)}


def test_a_precision_map_without_effect_is_refused() -> None:
    """The reference is never mapped, so nothing would change."""
    for request in ({"dtypes": ("bf16",)}, {"dtypes": ("fp8",), "reference": "fp8"}):
        with pytest.raises(UsageError, match=r"have no effect: \w+ is the reference"):
            plan(CPU, "transformer", precision_map=(("mlp", "fp16"),), **request)


@for_each(
    ("request_", "nearest"),
    [
        (Request("gem"), "gemm"),
        (Request("gemm", dtypes=("fp8", "bf61")), "bf16"),
        (Request("gemm", reference="FP23"), "fp32"),
        (Request("gemm", axes=(("shapes", ("64",)),)), "shape"),
        (Request("gemm", devices=("cpi",)), "cpu"),
        (Request("transformer", precision_map=(("mpl", "bf16"),)), "mlp"),
        (Request("transformer", precision_map=(("mlp", "fb8"),)), "fp8"),
        (Request("transformer", precision_map=(("blocks.1.mpl.up", "bf16"),)), "blocks.1.mlp.up"),
        (Request("transformer", precision_map=(("blocks.2", "bf16"),)), "blocks.1"),
        (Request("gemm", precision_map=(("mlp", "bf16"),)), None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unknown_names_raise_with_the_nearest(request_: Request, nearest: str | None) -> None:
    with pytest.raises(UnknownName) as raised:
        make_plan(request_, (CPU,))
    assert raised.value.nearest == nearest
    assert f"Did you mean {nearest!r}?" in str(raised.value) or nearest is None
    listed = [name for name in raised.value.known if "." not in name and name not in ("blocks", "embedding")]
    assert all(name in str(raised.value) for name in listed)


@for_each(
    ("request_", "sentence"),
    [
        (Request("gemm", dtypes=("bf61",)), "Did you mean 'bf16'"),
        (Request("gemm", devices=("cpuu",)), "Did you mean 'cpu'"),
        (Request("transformer", axes=(("size", ("nanno",)),)), "nearest is 'nano'"),
        (Request("transformer", precision_map=(("mpl", "bf16"),)), "Did you mean 'mlp'"),
    ],
)
def test_names_are_checked_before_any_device_is_known(request_: Request, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        check_request(request_)
    check_request(Request("transformer", dtypes=("fp32", "fp4"), precision_map=(("mlp", "bf16"),)))


def test_too_many_combinations_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With their number; expanding them would exhaust memory."""
    sides = (("shape", ("16", "32", "48")),)
    monkeypatch.setattr(checked_workload, "MAX_CASES", 3)
    assert len(plan(CPU, axes=sides, dtypes=("fp32",)).groups) == 3
    monkeypatch.setattr(checked_workload, "MAX_CASES", 2)
    with pytest.raises(UsageError, match="3 combinations; the most is 2"):
        plan(CPU, axes=sides, dtypes=("fp32",))


def test_the_text_s_identity_is_part_of_the_case() -> None:
    made = plan(CPU, "transformer", corpus="tiny-1234", data="x.txt")
    assert made.groups[0].cases[0].case.param("data") == "tiny-1234" and made.notes == ()
    other = plan(CPU, "gemm", corpus="tiny-1234", data="x.txt")
    assert all(name != "data" for name, _ in other.groups[0].cases[0].case.params)
    assert other.notes == ("--data has no effect: suite gemm reads no text",)


def test_a_backend_that_no_precision_takes_is_told() -> None:
    notes = [make_plan(Request("gemm", dtypes=dtypes, backend="te"), (CPU,)).notes for dtypes in (("bf16",), ("fp8",))]
    assert notes[0] == ("--backend te has no effect: only low precisions have a backend, and this run has bf16",)
    assert not any("--backend" in note for note in notes[1])


@for_each(("dtypes", "layers"), [(("fp32", "bf16"), "tf32"), (("bf16", "tf32"), "fp32")])
def test_a_map_cannot_mix_the_switch_of_tf32(dtypes: tuple[str, ...], layers: str) -> None:
    """tf32 is a process-wide switch: a mapped layer would run with the case's setting under a wrong name."""
    asked = Request("transformer", dtypes, reference=dtypes[0], precision_map=(("mlp", layers),))
    with pytest.raises(UsageError, match="TF32 is one switch"):
        check_request(asked)


def test_an_emulated_precision_is_a_reference_on_request_only() -> None:
    """On a CPU tf32 ranks above bf16 but has no speed to compare with."""
    assert reference(one_group(CPU, "tf32", "bf16", "fp8")) == "bf16"
    assert reference(one_group(CPU, "tf32", "bf16", reference="tf32")) == "tf32"
    assert reference(one_group(CPU, "tf32", "fp8")) == "tf32"
    assert reference(one_group(H200, "tf32", "bf16")) == "tf32"


SOUND = {"params": (("n", 1),), "work": Work(1.0, 2), "support": Support(Level.NATIVE, "a test")}


class Answering(Stub):
    """A user's suite that returns scripted answers."""

    name = "answering"
    answers: ClassVar[dict[str, Any]] = SOUND

    def axes(self, facts: DeviceFacts) -> tuple[Axis, ...]:
        return (Axis("n", "a number", ("1",), whole_number()),)

    def expand(self, params: Mapping[str, Scalar]) -> tuple[Params, ...]:
        return (self.answers["params"],)

    def work(self, params: Mapping[str, Scalar]) -> Work:
        return cast(Work, self.answers["work"])

    def support(self, params: Mapping[str, Scalar], precision: Precision, facts: DeviceFacts) -> Support:
        return cast(Support, self.answers["support"])

    def layers(self, params: Mapping[str, Scalar]) -> tuple[Layer, ...]:
        return cast(tuple[Layer, ...], self.answers["layers"]) if "layers" in self.answers else super().layers(params)


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> type[Answering]:
    """The suite, registered for one test."""
    workloads.names()
    monkeypatch.setattr(workloads, "_leaves", dict(workloads._leaves))
    monkeypatch.setattr(Answering, "answers", SOUND)
    workloads.register("answering")(Answering)
    return Answering


GARBAGE = {
    "a float of tokens": ({"work": Work(tokens=1024.0)}, "tokens = 1024.0, and it must be a whole number"),  # type: ignore[arg-type]
    "NaN of flops": ({"work": Work(flops=math.nan)}, "flops = nan, which is not a count"),
    "negative memory": ({"work": Work(least_memory=-1.0)}, "least_memory = -1.0, which is not a count"),
    "flops in words": ({"work": Work(flops="many")}, "flops = 'many', and it must be a number"),  # type: ignore[arg-type]
    "numpy's flops": ({"work": Work(flops=np.float64(3))}, r"flops = .*, and it must be a number \(float\)"),
    "too many flops": ({"work": Work(flops=10**400)}, "OverflowError"),
    "no work": ({"work": None}, r"work\(\) returned None, and must return a Work"),
    "a tuple": ({"params": (("n", (1, 2)),)}, r"parameter 'n' is \(1, 2\) \(tuple\), and must be an int"),
    "NaN": ({"params": (("n", math.nan),)}, "parameter 'n' is nan, and must be finite"),
    "two lines": ({"params": (("n", "a\nb"),)}, r"parameter 'n' is 'a\\nb', and must be finite, or text on one line"),
    "half a pair": ({"params": (("n", "a\ud800"),)}, "text on one line"),
    "a name that is none": ({"params": ((3, 3),)}, "a parameter is called 3"),
    "a mapping": ({"params": {"n": 3}}, "must be a tuple of pairs"),
    "a level of support": ({"support": Level.NATIVE}, r"support\(\) returned .*, and must return a Support"),
    "support without a text": ({"support": Support(Level.NATIVE, None)}, "must return a Support"),  # type: ignore[arg-type]
}


@for_each("name", GARBAGE)
def test_what_no_file_can_keep_is_refused_while_it_is_planned(name: str, answering: type[Answering]) -> None:
    wrong, sentence = GARBAGE[name]
    answering.answers = {**SOUND, **wrong}
    asked = Request("answering", ("fp32",))
    with pytest.raises(UsageError, match=sentence) as caught:
        make_plan(asked, (CPU,))
    assert str(caught.value).startswith("suite 'answering' cannot be planned: ") and "\n" not in str(caught.value)
    if "support" not in wrong:
        with pytest.raises(UsageError, match=sentence):
            check_request(asked)


def test_what_a_file_can_keep_is_planned_and_read_back(answering: type[Answering]) -> None:
    answering.answers = {
        **SOUND,
        "params": (("a", 1), ("b", 0.5), ("c", "µ b"), ("d", True)),
        "work": Work(3, 4),
    }
    made = make_plan(Request("answering", ("fp32",)), (CPU,))
    assert decode(Plan, json.loads(json.dumps(encode(made)))) == made


ADDED = "fp32 was added as the reference: on cpu bf16 would have had nothing native to compare with (--reference bf16 "


@for_each(
    ("request_", "modes"),
    [
        (Request("gemm", ("fp8", "bf16")), ["fp32", "bf16", "fp8"]),
        (Request("gemm", ("fp8", "bf16"), reference="bf16"), ["bf16", "fp8"]),
        (Request("gemm", ("bf16",)), ["bf16"]),
        (Request("gemm", ("fp8", "mxfp8")), ["fp8", "mxfp8"]),
        (Request("gemm", ("bf16", "fp16")), ["fp16", "bf16"]),
        (Request("gemm", ("fp8", "bf16"), grid=True), ["bf16", "fp8"]),
        (Request("numerics", ("fp8", "bf16"), quick=True), ["bf16", "fp8"]),
    ],
    ids=["one native", "a named reference", "one precision", "none native", "two native", "the grid", "numbers only"],
)
def test_fp32_is_added_where_nothing_would_compare(request_: Request, modes: list[str]) -> None:
    plan = make_plan(request_, (CPU,))
    for group in plan:
        assert [planned.case.precision for planned in group.cases] == list(modes)
    added = modes[0] == "fp32"
    assert [note.startswith(ADDED) for note in plan.notes] == [True] * added
    assert all(group.reference == 0 for group in plan) or not added
    alone = make_plan(request_, (CPU,), compares=False)
    assert "fp32" not in [planned.case.precision for planned in cases_of(alone)]
    for made in (plan, alone):  # a run from before this feature continues with its stored plan
        assert make_plan(request_, (CPU,), compares=has_added_reference(made)) == made


def test_a_gpu_that_this_torch_cannot_see_says_so() -> None:
    plain = replace(CPU, torch="2.13.0+cpu")
    with pytest.raises(UnknownName, match=r"'cuda'.*Known: cpu \(torch 2\.13\.0\+cpu is built for CPUs only\)"):
        make_plan(Request("gemm", devices=("cuda",)), (plain,))
    with pytest.raises(UnknownName, match=r"'cuda:7'.*Known: cpu, cuda:0\.$"):
        make_plan(Request("gemm", devices=("cuda:7",)), (CPU, H200))
