"""Asks and measures: quality in a worker of its own, then decode over contexts and a prompt by the ordinary pipeline.

Arms without a kernel of their own are not timed: what emulates them takes a time that nobody would have. They have
bytes and quality.
"""

from __future__ import annotations

import sys
import sysconfig
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from fp8bench.analysis.energy import energy_figures
from fp8bench.analysis.findings import findings
from fp8bench.analysis.samples import step_samples
from fp8bench.errors import StoreError, UsageError, WorkerFault, as_usage
from fp8bench.features.infer.fits import LineDraws, crossing_of, fastest, line_of, swept
from fp8bench.features.infer.values import (
    ArmQuality,
    ArmTimes,
    Quality,
    QualityTask,
    ServedModel,
    ServingAnswer,
    ServingQuestion,
    check_arm,
    dtype_of,
    is_of,
    kept_answers,
    low_layer,
)
from fp8bench.features.train.kind import load_head, newest_checkpoint, training_named
from fp8bench.features.train.lab.models import config_of
from fp8bench.features.train.values import TokenSpan
from fp8bench.jobs.observer import JobObserver
from fp8bench.measure.handle import ProcessWorker, Worker, claimed
from fp8bench.model import DeviceFacts, Level, Record, Request, Run
from fp8bench.model.raw import Settings
from fp8bench.nn.served import (
    OWN,
    OWN_SHAPES,
    ServedArm,
    ServedShape,
    served_memory,
    served_shape,
    served_support,
    step_bytes,
)
from fp8bench.nn.sizes import SERVED_SIZES
from fp8bench.pipeline import execute
from fp8bench.plan.make import device_named
from fp8bench.registry import precisions
from fp8bench.units import size

RankedArms = tuple[tuple[ServedArm, ArmQuality], ...]
_MODULE = "fp8bench.features.infer.quality"
SHIPPED, WEIGHTS = "nano-python", Path(__file__).with_name("nano-python.bin")
# Left out of the shipped model's training; its positions.
HELD_OUT, WINDOW = ("argparse.py", "statistics.py", "textwrap.py"), 128
_LIMIT = 1800.0
# By whether it is quick.
_CONTEXTS = {False: (256, 1024, 2048, 4096), True: (128, 512, 1024, 2048)}


def answered(
    question: ServingQuestion, store: Path, command: str, observer: JobObserver, trained: ServedModel | None = None
) -> ServingAnswer:
    """Quality is that of `trained`, where there is one, of a maker's model, or of the one that is shipped. An interrupt
    ends it early: what was found until then is the answer. A whole one is kept beside its runs."""
    settings = Settings(question.threads, question.seed)
    with claimed(True), ProcessWorker(settings, module=_MODULE) as worker:
        facts = device_named(question.device, worker.probe())
        model = trained or shipped(question.tokens)
        if question.is_own:
            OWN_SHAPES[question.size] = ServedShape(*_asked(worker, "shape", question.size, facts, question.seed))
            question, model = checked(question), ServedModel(question.size)
        _check_memory(question, facts)
        quality, layers, spared = _qualities(question, model, facts, worker, observer)
    answer = ServingAnswer(question, facts.key, (), question.contexts[0], quality, layers, spared=spared)
    try:
        answer = _timed(answer, facts, store, command, observer)
    except KeyboardInterrupt:
        return replace(answer, finished=False)
    try:
        kept_answers(store).append([answer])
    except StoreError as error:
        observer.note(str(error))
    return answer


def _asked(worker: Worker, name: str, *arguments: Any) -> Any:
    try:
        return getattr(cast(Any, worker.within(_LIMIT)), name)(*arguments)
    except WorkerFault as fault:
        raise as_usage(fault) from None


def checked(question: ServingQuestion) -> ServingQuestion:
    """With the usual contexts where it names none. Raises UsageError for what its model has not."""
    shape, usual = served_shape(question.size), _CONTEXTS[question.quick]
    few = tuple(sorted({shape.sequence * part // 8 for part in (1, 2, 4, 8)}))
    contexts = question.contexts or (few if usual[-1] > shape.sequence else usual)
    if contexts[0] < 1 or contexts[-1] > shape.sequence:
        raise UsageError(
            f"--contexts goes from {contexts[0]} to {contexts[-1]}: {question.size} has positions for 1 to "
            f"{shape.sequence}."
        )
    for arm in question.arms:
        check_arm(arm, shape)
    return replace(question, contexts=contexts)


def _check_memory(question: ServingQuestion, facts: DeviceFacts) -> None:
    shape, lead, longest = served_shape(question.size), question.arms[0], max(question.contexts)
    whole = step_bytes(shape, lead, question.batch, longest, shape.experts).total  # the reference's, of all experts
    least = max(served_memory(shape, question.batch, longest), whole)
    if facts.memory_bytes and least > facts.memory_bytes:
        raise UsageError(
            f"{question.size} with --batch {question.batch} at a context of {max(question.contexts)} takes "
            f"{size(least)} or more, and {facts.key} has {size(facts.memory_bytes)}. Choose a smaller batch, "
            "context or model."
        )


def shipped(tokens: int) -> ServedModel:
    return ServedModel(SHIPPED, SERVED_SIZES[SHIPPED], str(WEIGHTS), text=held_out_text(tokens))


def held_out_text(tokens: int) -> tuple[tuple[int, ...], ...]:
    """Windows of this Python's own sources that the shipped model was not trained on, as ASCII."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = "".join((folder / name).read_text(encoding="utf-8", errors="replace") for name in HELD_OUT)
    return _windows(text.encode("ascii", errors="replace"), WINDOW, tokens)


def _windows(ids: Sequence[int], length: int, tokens: int) -> tuple[tuple[int, ...], ...]:
    """Spread over all of a text: one module's beginning is all imports."""
    count = min(max(2, tokens // length), (len(ids) - 1) // length)
    starts = [place * ((len(ids) - length - 1) // count) for place in range(count)]
    return tuple(tuple(ids[start : start + length + 1]) for start in starts)


def _qualities(
    question: ServingQuestion, model: ServedModel, facts: DeviceFacts, worker: Worker, observer: JobObserver
) -> tuple[Quality, RankedArms, RankedArms]:
    """Of all arms; of layers low alone, the worst first; and of all layers low, and of those but the worst."""
    lead, *others = question.arms
    arms = [_within(arm, model.layers) for arm in question.arms]
    if any(arm != asked for arm, asked in zip(arms, question.arms, strict=True)):
        whose = f"{model.name}, of {model.layers} layers"
        observer.note(f"quality is read on {whose}: exceptions of later ones are not in it")
    alone = layer_arms(question.check_layers, lead, others, model.layers)
    rolls_out = len(arms) if question.rollout else 0
    task = QualityTask(model, question.tokens, (*arms, *alone), facts, question.seed, rolls_out)
    with observer.counting() as tell:
        tell(0, 1, "models", "quality on the same tokens")
        quality: Quality = _asked(worker, "quality", task)
        ranked = sorted(zip(alone, quality.arms[len(others) :], strict=True), key=lambda pair: -pair[1].kl)
        both = spared_arms(question.check_layers, [arm for arm, _ in ranked])
        again: tuple[ArmQuality, ...] = ()
        if both:
            again = _asked(worker, "quality", replace(task, arms=(lead, *both), rolls_out=0)).arms
    return replace(quality, arms=quality.arms[: len(others)]), tuple(ranked), tuple(zip(both, again, strict=True))


def _within(arm: ServedArm, layers: int) -> ServedArm:
    """Exceptions of layers that the model of quality has not are left out: its quality is that of the usual format."""

    def kept(word: str) -> str:
        usual, *exceptions = word.split("@")
        few = [exception for exception in exceptions if int(exception.partition("=")[0].split("-")[-1]) < layers]
        return "@".join([usual, *few])

    return replace(arm, kv=kept(arm.kv), weights=kept(arm.weights))


def layer_arms(what: str, lead: ServedArm, others: Sequence[ServedArm], layers: int) -> list[ServedArm]:
    """For each layer an arm in which it alone is low, in the format of the first arm that has one."""
    if not what:
        return []
    low = next((word for arm in others if (word := getattr(arm, what))), "")
    if not low:
        raise UsageError(f"--check-layers {what}: no arm has {what} in a format. Give --arms {what}=fp8, say.")
    usual = low.split("@")[0]
    return [
        replace(lead, kv=word) if what == "kv" else replace(lead, weights=word)
        for word in (f"{lead.carrier}@{layer}={usual}" for layer in range(layers))
    ]


def spared_arms(what: str, ranked: Sequence[ServedArm]) -> list[ServedArm]:
    """Of arms with one layer low, the worst first: that with all of them low, and that with the worst quarter high."""
    if not ranked:
        return []
    pairs = [low_layer(arm, what) for arm in ranked]
    high = [layer for layer, _ in pairs[: max(1, len(pairs) // 4)]]
    words = (pairs[0][1], pairs[0][1] + "".join(f"@{layer}={ranked[0].carrier}" for layer in sorted(high)))
    return [replace(ranked[0], kv=word) if what == "kv" else replace(ranked[0], weights=word) for word in words]


def _timed(
    answer: ServingAnswer, facts: DeviceFacts, store: Path, command: str, observer: JobObserver
) -> ServingAnswer:
    question = answer.question
    params = {"size": question.size, "kv": OWN, "weights": OWN}
    supports = {arm: served_support(params, precisions.get(dtype_of(arm)), facts) for arm in question.arms}
    lead = supports[question.arms[0]]
    if lead.level is not Level.NATIVE:
        raise UsageError(f"the reference has no speed on {facts.key}: {lead.reason}. Give --reference fp32 or bf16.")
    native = tuple(arm for arm in question.arms if supports[arm].level is Level.NATIVE)

    def measured(suite: str, arms: Sequence[ServedArm], **axes: Sequence[object]) -> Run:
        request = Request(
            suite, tuple(map(dtype_of, arms)), (facts.key,), dtype_of(arms[0]),
            tuple((name, tuple(map(str, values))) for name, values in axes.items()), quick=question.quick,
            seed=question.seed, threads=question.threads,
        )  # fmt: skip
        with observer.measuring() as watch:
            run = execute(request, store, watch, command, origin="infer")
        if not run.finished:
            raise KeyboardInterrupt
        return run

    if question.batches:
        _, outputs, inputs = max(served_shape(question.size).kept, key=lambda one: one[1] * one[2])
        arms = [arm for arm in native if not arm.kv]
        run = measured("gemm", arms, shape=[f"{batch}x{outputs}x{inputs}" for batch in question.batches])
        return replace(answer, sweep=swept(run, arms, (outputs, inputs), question.batches), runs=(run.id,))
    own: dict[str, Sequence[object]] = {"size": [question.size], "batch": [question.batch]}
    decode = measured("decode", native, **own, context=question.contexts)
    prefill = measured("prefill", native, **own, context=[answer.prompt])
    times = list(times_of(question, native, decode, prefill))
    kernels = {arm: supports[arm].reason for arm in question.arms}
    times = [replace(time, kernel=kernels[time.arm]) for time in times]
    times += [ArmTimes(arm, why=kernels[arm]) for arm in question.arms if arm not in native]
    ceiling = next((record.ceiling.bytes for record in decode.records if record.ceiling is not None), None)
    experts = experts_read(decode, question)
    return replace(answer, times=tuple(times), bandwidth=ceiling, runs=(decode.id, prefill.id), experts=experts)


def experts_read(decode: Run, question: ServingQuestion) -> float | None:
    """Of a layer, in the mean, by the reference's step at the longest context."""
    for record in decode.records:
        counted = record.measurement("distinct_experts")
        if record.is_reference and _context(record) == question.contexts[-1] and counted and counted.samples:
            return counted.samples[0] / served_shape(question.size).layers
    return None


def _context(record: Record) -> int:
    return int(record.case.param("context"))


def times_of(question: ServingQuestion, native: Sequence[ServedArm], decode: Run, prefill: Run) -> Iterator[ArmTimes]:
    best = findings(decode)
    reference: LineDraws | None = None
    for arm in native:
        records = sorted((_context(record), record) for record in decode.records if is_of(record, arm))
        why = next((record.reason for _, record in records if record.timing is None), "")
        rounds = {context: step_samples(record.timing) for context, record in records if record.timing is not None}
        line = None if why else line_of(rounds)
        crossing = None
        if arm is native[0]:
            reference = line
        elif line is not None and reference is not None:
            crossing = crossing_of(line, reference, question.contexts)
        prompt = next((record for record in prefill.records if is_of(record, arm)), None)
        yield ArmTimes(
            arm, tuple((context, fastest(samples)) for context, samples in rounds.items()),
            None if line is None else line.line, crossing,
            None if prompt is None or prompt.timing is None else fastest(step_samples(prompt.timing)), why,
            (_joules(prompt), _joules(records[-1][1] if records else None)),
            doubts=tuple(dict.fromkeys(label.value for _, record in records for label in best[record.case.id].hard)),
        )  # fmt: skip


def _joules(record: Record | None) -> float | None:
    """Of a token that goes in or comes out: the step's, over all tokens of the batch."""
    figures = None if record is None else energy_figures(record)
    return None if record is None or figures is None else figures.gross.middle / record.work.tokens


# Models that are trained under one name and served under another.
_SERVED_AS = {"gpt2-124m": "gpt2"}
_WITH_EXPERTS = "nano-moe"


def trained_model(word: str, store: Path, tokens: int) -> tuple[ServedModel, str]:
    """What 'ID' or 'ID:ARM' means, the reference without an arm, and the size that is timed for it. Raises UsageError
    for what has no cache of keys and values, or no checkpoint."""
    named, _, asked = word.partition(":")
    path = training_named(named, store)
    training = load_head(path)
    arm = asked or training.arms[0].name
    called = f"the training {training.id}"
    own = next((each for each in training.arms if each.name == arm), None)
    if own is None:
        raise UsageError(f"{called} has no arm {arm!r:.80}. It has {', '.join(each.name for each in training.arms)}.")
    settings = own.taken(training.request.settings)
    refusals = (
        (settings.arch not in ("gpt", "moe"),
         f"is of --arch {settings.arch}, of which no cache is served: gpt and moe are"),
        (settings.parallel not in ("", "ddp"), f"is cut by --parallel {settings.parallel}: a rank has a part of it"),
        (settings.lora > 0, "keeps adapters of --lora alone in its checkpoint"),
        (settings.master != "fp32", f"keeps weights as --master {settings.master}: fp32 ones are read"),
    )  # fmt: skip
    for wrong, why in refusals:
        if wrong:
            raise UsageError(f"{called} {why}. Choose another training.")
    kept = newest_checkpoint(path)
    if kept is None:
        steps, every = training.request.steps, training.request.keep
        raise UsageError(
            f"{called} has no checkpoint: it was trained {steps} steps, with --keep {every}. Train it again with "
            f"--keep {max(1, steps // 2)}, say."
        )
    folder, place = kept
    words = f"{arm} of training {training.id}, step {place.step} of {training.request.steps}"
    config = config_of(settings, training.text.vocabulary)
    folder = folder / "rank-0" if training.request.ranks else folder
    text = _windows(_tokens(training.text.held_out), config.sequence, tokens)
    size = _WITH_EXPERTS if config.experts else _SERVED_AS.get(settings.model, settings.model)
    return ServedModel(words, config, str(folder), arm, text), size


def _tokens(span: TokenSpan) -> array[int]:
    ids = array("H")
    try:
        with Path(span.path).open("rb") as file:
            file.seek(span.start * ids.itemsize)
            ids.frombytes(file.read((span.stop - span.start) * ids.itemsize))
    except (OSError, ValueError) as error:
        raise UsageError(f"the training's text {span.path} cannot be read ({error}). Put it back there.") from None
    if sys.byteorder == "big":
        ids.byteswap()
    return ids
