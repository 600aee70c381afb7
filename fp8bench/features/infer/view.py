"""Shows the answer of `infer`: a line for each arm with where it pays, and tables of times, bytes and quality."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from fp8bench import units
from fp8bench.features.infer.values import (
    ArmQuality,
    ArmTimes,
    RolloutGap,
    ServingAnswer,
    word_of,
)
from fp8bench.model import Interval, Label
from fp8bench.model.codec import SCHEMA, encode
from fp8bench.nn.served import ServedArm
from fp8bench.report.columns import Col, table
from fp8bench.report.data.plain import Rows
from fp8bench.report.elements import Element, Page, Table, Tone
from fp8bench.report.terminal.short_answer import Answer, short_answer
from fp8bench.report.words.legend import LABELS

_LEGEND = (
    "prompt: all at once (TTFT), no queue, tokeniser and sampler; tokens/s in: its tokens over that (SGLang's)",
    "a token: a decode step at a context (TPOT), vLLM's (latency - TTFT) / (tokens - 1); tokens/s out: batch / TPOT",
    "TPOT = a + b x context: a is weights and overhead, b the cache's traffic; 95% of this run, by resampled rounds",
    "W, kv: bytes that a step reads at the longest context, by count; of the embedding only its tokens' rows",
    "of copy: these bytes over TPOT, of the copy that was measured here; cached: above that, so a cache had them",
    "bits: of a parameter, counted from storage, embedding and head included, of the model that quality is read on",
    "KL: of the reference's predictions from the arm's, mean and 99.9% of tokens",
    "top: tokens with the same likeliest successor",
    "1e3 ln ppl: of the ratio of perplexities, paired by token, 95% over texts; floor: another kernel",
    "J a token: of a step, over all tokens of its batch; of a prompt and of decoding apart",
    "rollout: tokens that an arm samples step by step; gap: their log-probability in the reference, less the arm's",
    "ratio: exp of the gap, 1 in the mean of the same weights; clipped: outside 0.8 to 1.2; k3: KL by Schulman's k3",
    "effective: the share of samples that these ratios leave, by token, and by text with their product",
)  # fmt: skip

_SURE: dict[tuple[bool | None, bool | None], tuple[str, Tone]] = {
    (True, True): ("faster", Tone.GOOD),
    (False, False): ("slower", Tone.BAD),
}


def page_of(answer: ServingAnswer, everything: bool = False) -> Page:
    """Returns the short answer; with `everything`, also the bytes and the quality of each arm."""
    question = answer.question
    contexts = f"contexts of {question.contexts[0]} to {question.contexts[-1]} tokens"
    tables: list[Element] = [_times(answer, everything)] if any(time.tpot for time in answer.times) else []
    if answer.quality is not None and answer.quality.rollouts:
        tables.append(_rollouts(answer, answer.quality.rollouts))
    if everything:
        tables.append(_costs(answer))
    stored = [f"stored as runs {', '.join(answer.runs)}"] if answer.runs else []
    part = short_answer(
        f"inference of {question.size} on {answer.device}, batch {question.batch}, {contexts} (eager, static cache)",
        f"Does low precision pay when generating? (compared with {word_of(question.arms[0])})",
        _answers(answer),
        doubts=[answer.quality.caution] if answer.quality is not None and answer.quality.caution else (),
        tables=tables,
        more=(("More", "; ".join(["--all has the bytes and the quality of each arm", *stored])),),
    )
    return Page("", "", (part,), _LEGEND)


def _answers(answer: ServingAnswer) -> list[Answer]:
    reference = answer.question.arms[0]
    times = {time.arm: time for time in answer.times}
    slowest = answer.tpot(times.get(reference, ArmTimes(reference)))
    answers = []
    for arm in answer.question.arms[1:]:
        time, quality = times.get(arm, ArmTimes(arm)), answer.quality_of(arm)
        verdict, tone, reason = _verdict(time)
        tpot, gain = answer.tpot(time), f"{_gain_by_bytes(answer, arm)} by its bytes"
        if tpot is None or slowest is None:
            figure = f"at most {gain}" if not time.kernel and time.why else ""
        else:
            figure = f"{units.seconds(tpot)} a token ({units.speed_up(slowest / tpot)})"
        moved = units.change(answer.bytes_read(arm).total / answer.bytes_read(reference).total)
        same = "" if quality is None else f"same next token {units.percent(quality.same_top)}"
        answers.append(Answer(word_of(arm), verdict, tone, figure, (same, f"bytes read {moved}"), reason))
    return answers


def _verdict(time: ArmTimes) -> tuple[str, Tone, str]:
    """Returns where an arm pays in words, their tone, and objections; labels withdraw a verdict."""
    crossing = time.crossing
    # 1. No line, no verdict: emulated, refused or interrupted.
    if crossing is None:
        if time.why and not time.kernel:
            return "no speed here", Tone.DOUBT, ""
        return "not timed", Tone.DOUBT, time.why
    # 2. Collect objections, even if there is a verdict.
    notes = [LABELS[Label(doubt)].meaning for doubt in time.doubts]
    if crossing.contrary:
        direction = "slower" if crossing.faster[1] == (crossing.contrary[-1] > (crossing.at or 0)) else "faster"
        notes.append(f"measured {direction} at {', '.join(map(str, crossing.contrary))}")
    if time.line is not None and time.line.off > 0.1:
        notes.append(f"measured times are up to {units.percent(time.line.off, 0)} off the line through them")
    # 3. It pays from some context on, or up to one.
    if crossing.at is not None:
        place = f"a context of {crossing.at:.0f} ({crossing.low:.0f} to {crossing.high:.0f})"
        if time.doubts:
            return "cannot tell", Tone.DOUBT, "; ".join([f"times cross at {place}", *notes])
        return f"{'pays from' if crossing.faster[1] else 'pays up to'} {place}", Tone.GOOD, "; ".join(notes)
    # 4. It pays at all contexts or none, if both ends are certain.
    if time.doubts or crossing.faster not in _SURE:
        return "cannot tell", Tone.DOUBT, "; ".join([_ends(crossing.faster), *notes])
    return *_SURE[crossing.faster], "; ".join(notes)


def _times(answer: ServingAnswer, everything: bool) -> Table:
    batch = answer.question.batch

    def rate(count: int, seconds: float | None) -> float | None:
        return count / seconds if seconds else None

    cols: list[Col[ArmTimes]] = [
        Col("arm", lambda times: word_of(times.arm)),
        Col(f"prompt of {answer.prompt}", lambda times: times.ttft, unit="s"),
        Col("tokens/s in", lambda times: rate(batch * answer.prompt, times.ttft), show=units.count),
        Col(f"a token at {answer.question.contexts[-1]}", answer.tpot, unit="s"),
        Col("tokens/s out", lambda times: rate(batch, answer.tpot(times)), show=units.count),
        Col("a", lambda times: _seconds(times.line.a if times.line else None), number=True, when=everything),
        Col(
            "b a 1k tokens",
            lambda times: _seconds(times.line.b if times.line else None, 1000),
            number=True,
            when=everything,
        ),
        Col("multiplied by", lambda times: times.kernel, below=True, when=everything),
        Col(
            "J a token in, out",
            lambda times: f"{_joules(times.joules[0])}, {_joules(times.joules[1])}",
            when=any(time.joules != (None, None) for time in answer.times),
        ),
    ]
    return table("times", "", cols, [time for time in answer.times if time.tpot], main=True)


def _costs(answer: ServingAnswer) -> Table:
    times_of = {time.arm: time for time in answer.times}
    moved = {arm: answer.bytes_read(arm) for arm in answer.question.arms}

    def share(arm: ServedArm) -> str | None:
        seconds = answer.tpot(times_of[arm]) if arm in times_of else None
        if seconds is None or not answer.bandwidth:
            return None
        part = moved[arm].total / seconds / answer.bandwidth
        return "cached" if part > 1 else units.percent(part, 0)

    def by_quality(heading: str, show: Callable[[ArmQuality], str]) -> Col[ServedArm]:
        def cell(arm: ServedArm) -> str | None:
            quality = answer.quality_of(arm)
            return None if quality is None else show(quality)

        return Col(heading, cell, number=True)

    def mebibytes(count: int) -> str:
        return f"{count / 2**20:.3g}"

    cols: list[Col[ServedArm]] = [
        Col("arm", lambda arm: _floor(answer, arm)),
        Col("W MiB", lambda arm: mebibytes(moved[arm].weights), number=True),
        Col("kv", lambda arm: mebibytes(moved[arm].kv), number=True),
        Col("of copy", share, number=True, when=answer.bandwidth is not None),
        by_quality("bits", lambda quality: f"{quality.bits:.1f}"),
        by_quality("KL", lambda quality: _short(quality.kl, 1)),
        by_quality("99.9%", lambda quality: _short(quality.kl_tail, 0)),
        by_quality("top", lambda quality: units.percent(quality.same_top)),
        by_quality("1e3 ln ppl", _ratio),
    ]
    title = f"quality on {answer.quality.model}" if answer.quality is not None else ""
    return table("costs", title, cols, answer.question.arms)


def _floor(answer: ServingAnswer, arm: ServedArm) -> str:
    return word_of(arm) + (" (floor)" if arm == answer.question.arms[0] else "")


def _rollouts(answer: ServingAnswer, gaps: Sequence[RolloutGap]) -> Table:
    cols: list[Col[tuple[ServedArm, RolloutGap]]] = [
        Col("rollout by", lambda pair: _floor(answer, pair[0])),
        Col("mean gap", lambda pair: _short(pair[1].mean, 1), number=True),
        Col("largest", lambda pair: _short(pair[1].largest, 1), number=True),
        Col("k3", lambda pair: _short(pair[1].kl, 1), number=True),
        Col("ratio", lambda pair: _interval(pair[1].ratio, "{:.4f}"), number=True),
        Col("least, most", lambda pair: f"{pair[1].least:.2f}, {pair[1].most:.2f}", number=True),
        Col("clipped", lambda pair: units.percent(pair[1].clipped), number=True),
        Col("effective", lambda pair: ", ".join(units.percent(share) for share in pair[1].effective), number=True),
    ]
    return table(
        "rollouts",
        f"{gaps[0].tokens} tokens of each, scored by {word_of(answer.question.arms[0])}",
        cols,
        [*zip(answer.question.arms, gaps, strict=True)],
    )


def _short(value: float, digits: int) -> str:
    """Formats a number like 2.7e-3."""
    if not math.isfinite(value):
        return str(value)
    mantissa, _, exponent = f"{value:.{digits}e}".partition("e")
    return f"{mantissa}e{int(exponent)}" if value else "0"


def _ratio(arm: ArmQuality) -> str:
    return _interval(arm.log_perplexity, "{:+.1f}", 1e3)


def _interval(value: Interval, shown: str, times: float = 1.0) -> str:
    """Formats the point, and the longer half of its interval."""
    reach = times * max(value.high - value.point, value.point - value.low)
    return f"{shown.format(times * value.point)} +-{shown.replace('+', '').format(reach)}"


def _joules(joules: float | None) -> str:
    return units.NONE if joules is None else f"{joules:.2g} J"


def _seconds(interval: Interval | None, times: int = 1) -> str:
    if interval is None:
        return units.NONE
    reach = max(interval.high - interval.point, interval.point - interval.low) * times
    return f"{units.seconds(interval.point * times)} +-{units.seconds(reach, 2)}"


def _ends(faster: tuple[bool | None, bool | None]) -> str:
    first, last = ({True: "faster", False: "slower", None: "unclear"}[end] for end in faster)
    return f"{first} at both ends" if first == last else f"{first}, then {last}"


def _gain_by_bytes(answer: ServingAnswer, arm: ServedArm) -> str:
    """Returns the gain that bytes alone predict, at the longest context, where it is largest."""
    return f"{answer.bytes_read(answer.question.arms[0]).total / answer.bytes_read(arm).total:.1f}x"


def value_of(answer: ServingAnswer) -> dict[str, Any]:
    """Returns the whole answer for JSON, with the bytes of a step."""
    moved = tuple(answer.bytes_read(arm) for arm in answer.question.arms)
    return {"schema": SCHEMA, **encode(answer), "bytes": encode(moved)}


def rows_of(answer: ServingAnswer) -> Rows:
    rows, times = [], {time.arm: time for time in answer.times}
    for arm in answer.question.arms:
        quality, moved = answer.quality_of(arm), answer.bytes_read(arm)
        time = times.get(arm, ArmTimes(arm))
        # Doubts hide a crossing in tables as in sentences.
        line, crossing = time.line, None if time.doubts else time.crossing
        rows.append(
            {
                "arm": word_of(arm),
                "ttft": time.ttft,
                **{f"tpot_{context}": seconds for context, seconds in time.tpot},
                "a": line and line.a.point,
                "a_low": line and line.a.low,
                "a_high": line and line.a.high,
                "b": line and line.b.point,
                "b_low": line and line.b.low,
                "b_high": line and line.b.high,
                "break_even": crossing and crossing.at,
                "weight_bytes": moved.weights,
                "kv_bytes": moved.kv,
                "kl": quality and quality.kl,
                "kl_tail": quality and quality.kl_tail,
                "why": time.why,
                "kernel": time.kernel,
                "doubts": " ".join(time.doubts),
                "log_perplexity_ratio": quality and quality.log_perplexity.point,
            }
        )
    # Some arms may have fewer contexts: the columns are those of all rows.
    columns: dict[str, None] = {}
    for row in rows:
        columns |= dict.fromkeys(row)
    blank = dict.fromkeys(columns)
    return tuple(columns), [blank | row for row in rows]
