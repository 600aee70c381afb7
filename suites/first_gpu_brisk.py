"""Nine minutes on a borrowed GPU: steps in the order of the open questions, and predictions of their seconds.

A step is started only if enough seconds are left for it. The prediction comes from the step's cases and from
`GroupClock`, whose figures were measured on an H200. Tests compare them with groups on a simulated clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fp8bench.cli.main import build_parser
from fp8bench.cli.options import make_request
from fp8bench.model import DeviceFacts, Group, PlannedCase, Request
from fp8bench.model.codec import decode
from fp8bench.model.stopping import BRISK_SECONDS, QUICK_ROUNDS
from fp8bench.plan.make import make_plan
from suites.first_gpu_cards import MAMF, TE_FORWARD, TE_LAYER, TE_TWELVE, TORCHAO_CASTS, card_of, vllm_ratio
from suites.first_gpu_steps import (
    LATER_STEPS,
    PROBE,
    FirstStep,
    Line,
    bandwidth_share,
    cases,
    conforms,
    fastest,
    ratio,
    sustained,
)

# The fewest bytes that a cast moves per element, and the share of a copy's bandwidth to reach, in percent.
_CASTS = (("fp8", 5, 75), ("fp8-rowwise", 3, 80), ("fp8-block", 3, 80), ("fp8-delayed", 3, 80))
_FORWARD = "15872x4096x4096,15872x16384x4096,15872x4096x16384"
_FOUR = f"15872x12288x4096,{_FORWARD}"
_ROWS = (1, 16, 64, 128, 256)
_SIDES = ",".join(f"{rows}x6144x4096" for rows in _ROWS)
_MODEL = "fp8bench suite transformer --brisk --set size=gpt-350m --dtypes"
_LIBRARIES = "native:bf16,fp8,fp8-rowwise,fp8:backend=torchao"


def _model_lines(how: str) -> tuple[Line, ...]:
    names = {"fp8": "fp8", "fp8-rowwise": "fp8-rowwise", "fp8:backend=torchao": "torchao's fp8"}
    lines = [
        Line(f"gpt-350m, {how}: {name} over bf16", ratio("time", "bf16", mode), speed=True, published=TE_LAYER)
        for mode, name in names.items()
    ]
    return *lines, Line(f"gpt-350m, {how}: joules of fp8, bf16 = 1", ratio("energy", "fp8", "bf16"), speed=True)


def _crossing_lines() -> tuple[Line, ...]:
    return tuple(
        Line(
            f"m = {rows}, {operands}: fp8 over bf16",
            ratio("time", "bf16", "fp8", f"m={rows} ", f"operands={operands}"),
            speed=True, published=vllm_ratio(rows, operands == "ready"),
        )
        for operands in ("cast", "ready")
        for rows in _ROWS
    )  # fmt: skip


BRISK_STEPS = (
    PROBE,
    FirstStep("conform", "fp8bench conform --json --dtypes native:fp8,fp8-rowwise,fp8-block,fp8-delayed,mxfp8", 60, (
        Line("native casts and products that nothing explains", conforms, high=0),
    ), ("`fp8bench conform`",)),
    FirstStep(
        "casts", "fp8bench suite cast --brisk --no-energy --set shape=15872x16384 --set source=bf16 --set direction=to "
        "--set scaling=on --dtypes native:bf16,fp8,fp8-rowwise,fp8-block,fp8-delayed", 90, tuple(
            Line(f"{name}: share of a copy's bandwidth at {size} bytes an element, %", bandwidth_share(name, size),
                 low=low, published=TORCHAO_CASTS)
            for name, size, low in _CASTS
        )),
    FirstStep(
        "forward", f"fp8bench suite gemm --brisk --set shape={_FORWARD} --dtypes "
        "native:bf16,fp8,fp8-rowwise,fp8-delayed,mxfp8,nvfp4", 100, (
            Line("3 forward products, sustained: fp8 with casts over bf16", sustained("bf16", "fp8"),
                 target=lambda card: card.sustained, speed=True, published=TE_FORWARD),
            *(Line(f"the same of {name}", sustained("bf16", name), speed=True, published=TE_FORWARD)
              for name in ("fp8-rowwise", "fp8-delayed", "mxfp8", "nvfp4")),
            *(Line(f"joules of {name}, bf16 = 1", ratio("energy", name, "bf16"), speed=True)
              for name in ("fp8", "fp8-rowwise", "fp8-delayed")),
            Line("in slots: fp8 with casts over bf16", ratio("time", "bf16", "fp8"), speed=True,
                 target=lambda card: card.in_slots, published=TE_FORWARD),
        )),
    FirstStep("model", f"{_MODEL} {_LIBRARIES}", 120, _model_lines("eager"), ("backend `torchao`",)),
    FirstStep("model-compiled", f"{_MODEL} {_LIBRARIES} --set compile=blocks", 180, _model_lines("compiled"),
              ("`compile=blocks`",)),
    FirstStep(
        "serving", "fp8bench suite prefill,decode --brisk --no-energy --set size=llama-1b --set context=4096 --dtypes "
        "native:bf16,fp8-rowwise", 80, (
            Line("prefill and decode of llama-1b: fp8-rowwise over bf16", ratio("time", "bf16", "fp8-rowwise"),
                 speed=True),
        ), ("`suite prefill`, `suite decode`, `infer`: caches and weights in their own formats, experts",)),
    FirstStep(
        "crossing", f"fp8bench suite gemm --brisk --no-energy --set shape={_SIDES} --set operands=cast,ready --dtypes "
        "native:bf16,fp8", 90, _crossing_lines()),
    FirstStep(
        "twelve", f"fp8bench suite gemm --brisk --no-energy --set shape={_FOUR} --set "
        "product=forward,input-gradient,weight-gradient --dtypes native:bf16,fp8,fp8-delayed,fp8-block", 130, tuple(
            Line(f"12 products in slots: {name} with casts over bf16", ratio("time", "bf16", name), speed=True,
                 published=published)
            for name, published in TE_TWELVE.items()
        )),
    FirstStep(
        "best-products", "fp8bench suite gemm --brisk --set shape=8192 --set operands=ready --dtypes native:bf16,fp8",
        40, (
            Line("best product in bf16, TFLOP/s", fastest("bf16"), published=MAMF["bf16"],
                 target=lambda card: card.bf16 and 0.97e-12 * card.bf16),
            Line("best product in fp8, TFLOP/s", fastest("fp8"), speed=True, published=MAMF["fp8"],
                 target=lambda card: card.fp8 and 0.97e-12 * card.fp8),
        )),
    FirstStep("gpt2-124m", "fp8bench suite transformer --brisk --set size=gpt2-124m --dtypes native:bf16,fp8", 70, (
        Line("gpt2-124m step, fp8 over bf16", ratio("time", "bf16", "fp8"), speed=True),
    )),
    FirstStep(
        "attention", "fp8bench suite attention --brisk --no-energy --set sequence=2048 --dtypes native:bf16,fp8", 50,
        (Line("attention: cases measured", cases),)),
    *(step for step in LATER_STEPS if step.name in ("test-faults", "test-triton-casts")),
)  # fmt: skip
STEPS = (*BRISK_STEPS, *(step for step in LATER_STEPS if step not in BRISK_STEPS))


@dataclass(frozen=True)
class GroupClock:
    """Predicts the seconds of a brisk group on a card that multiplies `flops` per second and copies `copy` bytes per
    second.

    Steps are assumed to reach a third of the rate of products, and half of the rate of copies, because of short
    kernels and casts.
    """

    flops: float
    copy: float
    # The seconds to start a process with a CUDA context. A suite starts two of them, and the command.
    start: float = 7.5
    command: float = 3.0
    prepare: float = 0.4
    compile: float = 45.0
    compile_again: float = 12.0
    # The share of these seconds if all blocks have one graph.
    one_block: float = 1 / 3
    warm_up: float = 1.5
    # A window takes 0.2 s before it, 10 ticks of 0.104 s, one tick to start at, and the last chunk. One case in five
    # has a third window.
    window: float = 1.45
    windows: float = 2.2
    idle: float = 1.5
    # Fixed seconds of a case for errors, memory, effect, statistics and tape, and the number of steps for them and
    # for preparing.
    passes: float = 2.3
    pass_steps: int = 20
    replay: float = 0.3

    def step(self, case: PlannedCase) -> float:
        return 20e-6 + 3 * case.work.flops / self.flops + 2 * case.work.bytes / self.copy

    def group(self, group: Group, energy: bool) -> float:
        """Predicts the seconds of one group, without the start of processes."""
        running = [case for case in group.cases if case.runs]
        if not running:
            return 0.0
        steps = [self.step(case) for case in running]
        # Slots have at least three calls, and one or two discarded calls. The reference has two slots in each round.
        in_round = sum(4.5 * max(step, 2e-3) for step in (steps[group.reference % len(steps)], *steps))
        seconds = self.warm_up + max(BRISK_SECONDS, QUICK_ROUNDS * in_round) + self.prepare * (len(steps) + 1)
        seconds += sum(self.passes + self.pass_steps * step for step in steps) + self.replay * len(steps)
        seconds += QUICK_ROUNDS * in_round / 2
        if energy:
            seconds += self.windows * sum(self.window + 4 * step for step in steps)
        if any(case.work.setup_seconds for case in running):
            shares_graph = any(("compile", "blocks") in case.case.params for case in running)
            compiling = self.compile * len(steps) + self.compile_again * (2 * len(steps) + 1)
            seconds += compiling * (self.one_block if shares_graph else 1)
        return seconds


# An unknown card is assumed to be slow.
_SLOW_FLOPS, _SLOW_COPY = 100e12, 0.3e12


def clock_of(facts: DeviceFacts) -> GroupClock:
    card = card_of(facts.name)
    return GroupClock(card.bf16 or _SLOW_FLOPS * (6 if card.copy and card.copy > 1e12 else 1), card.copy or _SLOW_COPY)


def request_of_words(words: list[str]) -> Request:
    """Returns what the words of a `fp8bench suite` command ask for."""
    return make_request(build_parser(("suite",)).parse_args(words))


def expected_seconds(step: FirstStep, words: list[str], probe: Mapping[str, Any]) -> float:
    """Returns the seconds that a step takes on the probed device: computed from a suite's plan, else the step's usual
    seconds."""
    if not probe.get("device") or words[:2] != ["fp8bench", "suite"]:
        return step.seconds
    facts = decode(DeviceFacts, probe["device"])
    request = request_of_words(words[1:])
    return seconds_of_plan(request, facts, clock_of(facts))


def seconds_of_plan(request: Request, facts: DeviceFacts, clock: GroupClock) -> float:
    plan = make_plan(request, (facts,), "text")
    seconds = sum(clock.group(group, request.energy) for group in plan)
    return clock.command + 2 * clock.start + clock.idle * request.energy + seconds
