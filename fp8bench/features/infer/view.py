"""Shows the answer of `infer`: at which context lengths each arm is faster, and tables of times, bytes and quality."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from fp8bench import units
from fp8bench.features.infer.values import (
    ArmQuality,
    ArmTimes,
    RolloutGap,
    ServingAnswer,
    format_arm,
)
from fp8bench.model import Interval, Label
from fp8bench.model.codec import SCHEMA, encode
from fp8bench.nn.served import ServedArm
from fp8bench.report.columns import Col, table
from fp8bench.report.data.plain import PlainRows
from fp8bench.report.elements import Element, Page, Table, Tone
from fp8bench.report.terminal.short_answer import PrecisionAnswer, short_answer
from fp8bench.report.words.legend import WORDS_BY_LABEL

_LEGEND = (
    "prompt: time to first token (TTFT), without queue, tokeniser and sampler; tokens/s in: its tokens over TTFT",
    "a token: time of a decode step (TPOT), vLLM's (latency - TTFT) / (tokens - 1); tokens/s out: batch / TPOT",
    "TPOT = a + b x context: a is weights and overhead, b the cache's traffic; 95% of this run, by resampled rounds",
    "W, kv: bytes of weights and cache that a step reads at the longest context, counted, not measured",
    "of copy: a step's bytes per second over the measured copy rate; cached: faster than copies, so from a cache",
    "bits: stored bits per parameter, with embedding and head, of the model that quality is measured on",
    "KL: KL(reference || arm) of the predicted distributions, mean and 99.9% quantile over tokens",
    "top: share of tokens at which arm and reference predict the same next token",
    "1e3 ln ppl: 1000 ln of the perplexities' ratio, 95% over texts; floor: reference, other kernel",
    "J a token: joules of a step over all tokens of its batch, of the prompt (in) and of decoding (out)",
    "rollout: tokens that an arm samples; gap: their log-probability by the reference minus that by the arm",
    "ratio: mean of exp(gap), 1 if weights are equal; clipped: outside 0.8 to 1.2; k3: KL by Schulman's k3",
    "effective: effective sample size as a share, by token, and by text with the product of its ratios",
)  # fmt: skip

# The verdict and its tone (color), by whether an arm is faster at a context.
_SPEED_VERDICTS: dict[bool | None, tuple[str, Tone]] = {
    True: ("faster", Tone.GOOD),
    False: ("slower", Tone.BAD),
    None: ("unclear", Tone.DOUBT),
}


def render_page(answer: ServingAnswer, everything: bool = False) -> Page:
    """Returns the short answer as a page. With `everything`, the page also has the bytes and the quality of
    each arm.
    """
    question = answer.question
    contexts = f"contexts of {question.contexts[0]} to {question.contexts[-1]} tokens"
    # 1. Collect the tables. After an early interrupt, the answer has no times.
    table_elements: list[Element] = []
    if any(time.tpot for time in answer.times):
        table_elements.append(_times_table(answer, everything))
    if answer.quality is not None and answer.quality.rollouts:
        table_elements.append(_rollouts_table(answer, answer.quality.rollouts))
    if everything:
        table_elements.append(_costs_table(answer))
    further_details_text = "--all has the bytes and the quality of each arm"
    if answer.runs:
        further_details_text += f"; stored as runs {', '.join(answer.runs)}"
    # 2. Put them below the short answer.
    answer_part = short_answer(
        f"inference of {question.size} on {answer.device}, batch {question.batch}, {contexts} (eager, static cache)",
        f"Does low precision pay when generating? (compared with {format_arm(question.arms[0])})",
        _make_arm_answers(answer),
        doubts=[answer.quality.caution] if answer.quality is not None and answer.quality.caution else (),
        tables=table_elements,
        closing_facts=(("More", further_details_text),),
    )
    return Page("", "", (answer_part,), _LEGEND)


def _make_arm_answers(answer: ServingAnswer) -> list[PrecisionAnswer]:
    reference = answer.question.arms[0]
    reference_tpot = answer.tpot(answer.arm_times(reference))
    arm_answers = []
    for arm in answer.question.arms[1:]:
        time, quality = answer.arm_times(arm), answer.arm_quality(arm)
        verdict, tone, reason = _judge_arm_times(time)
        # The bytes that a decode step reads bound its speed: with half the bytes, it is at most twice as fast.
        bytes_read_ratio = answer.bytes_read(arm).total / answer.bytes_read(reference).total
        tpot, figure = answer.tpot(time), ""
        if tpot is not None and reference_tpot is not None:
            figure = f"{units.seconds(tpot)} a token ({units.speed_up(reference_tpot / tpot)})"
        elif time.why and not time.kernel:
            figure = f"at most {1 / bytes_read_ratio:.1f}x by its bytes"
        same_token_text = "" if quality is None else f"same next token {units.percent(quality.same_top)}"
        cost_texts = (same_token_text, f"bytes read {units.change(bytes_read_ratio)}")
        arm_answers.append(PrecisionAnswer(format_arm(arm), verdict, tone, figure, cost_texts, reason))
    return arm_answers


def _judge_arm_times(time: ArmTimes) -> tuple[str, Tone, str]:
    """Returns at which contexts an arm is faster, the tone (color) of this text, and objections to it. An arm whose
    runs have serious labels gets no verdict.
    """
    crossing = time.crossing
    # 1. Without a fitted line, an arm has no verdict on its speed. Such an arm was emulated, refused or interrupted.
    if crossing is None:
        if time.why and not time.kernel:
            return "speed unknown", Tone.DOUBT, ""
        return "not timed", Tone.DOUBT, time.why
    # 2. Collect remarks on the verdict. Only the labels (`doubts`) prevent a verdict.
    notes = [WORDS_BY_LABEL[Label(doubt)].meaning for doubt in time.doubts]
    if crossing.contrary:
        direction = "slower" if crossing.faster[1] == (crossing.contrary[-1] > (crossing.at or 0)) else "faster"
        notes.append(f"measured {direction} at {', '.join(map(str, crossing.contrary))}, unlike its line")
    if time.line is not None and time.line.off > 0.1:
        notes.append(f"measured times are up to {units.percent(time.line.off, 0)} off the line through them")
    # 3. If the lines cross, the arm is faster either at longer contexts or at shorter ones.
    if crossing.at is not None:
        context_range = f"a context of {crossing.at:.0f} ({crossing.low:.0f} to {crossing.high:.0f})"
        if time.doubts:
            return "cannot tell", Tone.DOUBT, "; ".join([f"times cross at {context_range}", *notes])
        return f"{'pays from' if crossing.faster[1] else 'pays up to'} {context_range}", Tone.GOOD, "; ".join(notes)
    # 4. If the lines do not cross, the same arm is faster at all contexts where the result is certain. `low` and
    # `high` are then the shortest and the longest measured context.
    results = []
    for context, is_faster in zip((crossing.low, crossing.high), crossing.faster, strict=True):
        verdict, tone = _SPEED_VERDICTS[is_faster]
        results.append((f"{verdict} at {context:.0f} tokens", tone))
    certain_results = [result for result in results if result[1] is not Tone.DOUBT]
    if time.doubts or not certain_results:
        return "cannot tell", Tone.DOUBT, "; ".join([", ".join(text for text, _ in results), *notes])
    if len(certain_results) == 1:
        unclear_result_text = next(text for text, tone in results if tone is Tone.DOUBT)
        return *certain_results[0], "; ".join([unclear_result_text, *notes])
    return *_SPEED_VERDICTS[crossing.faster[0]], "; ".join(notes)


def _times_table(answer: ServingAnswer, everything: bool) -> Table:
    batch = answer.question.batch

    def divide_by_seconds(count: int, seconds: float | None) -> float | None:
        return count / seconds if seconds else None

    def show_line(coefficient: str, factor: int) -> Callable[[ArmTimes], str | None]:
        return lambda times: _format_seconds(getattr(times.line, coefficient), factor) if times.line else None

    cols: list[Col[ArmTimes]] = [
        Col("arm", lambda times: format_arm(times.arm)),
        Col(f"prompt of {answer.prompt}", "ttft", unit="s"),
        Col("tokens/s in", lambda times: divide_by_seconds(batch * answer.prompt, times.ttft), show=units.count),
        Col(f"a token at {answer.question.contexts[-1]}", answer.tpot, unit="s"),
        Col("tokens/s out", lambda times: divide_by_seconds(batch, answer.tpot(times)), show=units.count),
        Col("a", show_line("a", 1), number=True, when=everything),
        Col("b a 1k tokens", show_line("b", 1000), number=True, when=everything),
        Col("multiplied by", "kernel", below=True, when=everything),
        Col(
            "J a token in, out",
            lambda times: f"{_format_joules(times.joules[0])}, {_format_joules(times.joules[1])}",
            when=any(time.joules != (None, None) for time in answer.times),
        ),
    ]
    # Arms without a native kernel have no times.
    return table("times", "", cols, [time for time in answer.times if time.tpot], main=True)


def _costs_table(answer: ServingAnswer) -> Table:
    step_bytes = {arm: answer.bytes_read(arm) for arm in answer.question.arms}

    def bandwidth_share(arm: ServedArm) -> str | None:
        seconds = answer.tpot(answer.arm_times(arm))
        if seconds is None or not answer.bandwidth:
            return None
        # A step that reads faster than a copy must read from a cache.
        used_bandwidth_share = step_bytes[arm].total / seconds / answer.bandwidth
        return "cached" if used_bandwidth_share > 1 else units.percent(used_bandwidth_share, 0)

    def quality_column(heading: str, show: Callable[[ArmQuality], str]) -> Col[ServedArm]:
        def show_quality(arm: ServedArm) -> str | None:
            quality = answer.arm_quality(arm)
            return show(quality) if quality else None

        return Col(heading, show_quality, number=True)

    def mebibytes(count: int) -> str:
        return f"{count / 2**20:.3g}"

    cols: list[Col[ServedArm]] = [
        Col("arm", lambda arm: _arm_label(answer, arm)),
        Col("W MiB", lambda arm: mebibytes(step_bytes[arm].weights), number=True),
        Col("kv", lambda arm: mebibytes(step_bytes[arm].kv), number=True),
        Col("of copy", bandwidth_share, number=True, when=answer.bandwidth is not None),
        quality_column("bits", lambda quality: f"{quality.bits:.1f}"),
        quality_column("KL", lambda quality: _format_scientific(quality.kl, 1)),
        quality_column("99.9%", lambda quality: _format_scientific(quality.kl_tail, 0)),
        quality_column("top", lambda quality: units.percent(quality.same_top)),
        quality_column("1e3 ln ppl", lambda quality: _format_interval(quality.log_perplexity, "{:+.1f}", 1e3)),
    ]
    title = f"quality on {answer.quality.model}" if answer.quality is not None else ""
    return table("costs", title, cols, answer.question.arms)


def _arm_label(answer: ServingAnswer, arm: ServedArm) -> str:
    return format_arm(arm) + (" (floor)" if arm == answer.question.arms[0] else "")


def _rollouts_table(answer: ServingAnswer, gaps: Sequence[RolloutGap]) -> Table:
    cols: list[Col[tuple[ServedArm, RolloutGap]]] = [
        Col("rollout by", lambda pair: _arm_label(answer, pair[0])),
        Col("mean gap", lambda pair: _format_scientific(pair[1].mean, 1), number=True),
        Col("largest", lambda pair: _format_scientific(pair[1].largest, 1), number=True),
        Col("k3", lambda pair: _format_scientific(pair[1].kl, 1), number=True),
        Col("ratio", lambda pair: _format_interval(pair[1].ratio, "{:.4f}"), number=True),
        Col("least, most", lambda pair: f"{pair[1].least:.2f}, {pair[1].most:.2f}", number=True),
        Col("clipped", lambda pair: units.percent(pair[1].clipped), number=True),
        Col("effective", lambda pair: ", ".join(units.percent(share) for share in pair[1].effective), number=True),
    ]
    return table(
        "rollouts",
        f"{gaps[0].tokens} tokens of each, scored by {format_arm(answer.question.arms[0])}",
        cols,
        [*zip(answer.question.arms, gaps, strict=True)],
    )


def _format_scientific(value: float, digits: int) -> str:
    """Formats a number like 2.7e-3."""
    if not math.isfinite(value):
        return str(value)
    mantissa, _, exponent = f"{value:.{digits}e}".partition("e")
    return f"{mantissa}e{int(exponent)}" if value else "0"


def _compute_half_width(value: Interval) -> float:
    """Returns the distance from the point estimate of an interval to its farther bound."""
    return max(value.high - value.point, value.point - value.low)


def _format_interval(value: Interval, template: str, factor: float = 1.0) -> str:
    half_width = template.replace("+", "").format(factor * _compute_half_width(value))
    return f"{template.format(factor * value.point)} +-{half_width}"


def _format_joules(joules: float | None) -> str:
    return units.NONE if joules is None else f"{joules:.2g} J"


def _format_seconds(value: Interval, factor: int) -> str:
    return f"{units.seconds(value.point * factor)} +-{units.seconds(_compute_half_width(value) * factor, 2)}"


def encode_answer(answer: ServingAnswer) -> dict[str, Any]:
    """Returns the whole answer as JSON values, with the bytes of a step for each arm."""
    step_bytes = tuple(answer.bytes_read(arm) for arm in answer.question.arms)
    return {"schema": SCHEMA, **encode(answer), "bytes": encode(step_bytes)}


def table_rows(answer: ServingAnswer) -> PlainRows:
    rows = []
    for arm in answer.question.arms:
        time, quality, step_bytes = answer.arm_times(arm), answer.arm_quality(arm), answer.bytes_read(arm)
        # Labels (`doubts`) prevent a verdict, so the row has no crossing either.
        line, crossing = time.line, None if time.doubts else time.crossing
        rows.append(
            {
                "arm": format_arm(arm),
                "ttft": time.ttft,
                **{f"tpot_{context}": seconds for context, seconds in time.tpot},
                "a": line and line.a.point,
                "a_low": line and line.a.low,
                "a_high": line and line.a.high,
                "b": line and line.b.point,
                "b_low": line and line.b.low,
                "b_high": line and line.b.high,
                "break_even": crossing and crossing.at,
                "weight_bytes": step_bytes.weights,
                "kv_bytes": step_bytes.kv,
                "kl": quality and quality.kl,
                "kl_tail": quality and quality.kl_tail,
                "why": time.why,
                "kernel": time.kernel,
                "doubts": " ".join(time.doubts),
                "log_perplexity_ratio": quality and quality.log_perplexity.point,
            }
        )
    # Arms may have different contexts, so the columns are the union of the columns of all rows.
    columns = tuple(dict.fromkeys(chain.from_iterable(rows)))
    return columns, rows
