"""Reads claims files (TOML), and refuses rows that no run and no arithmetic can decide."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fp8bench.errors import UnknownName, UsageError
from fp8bench.features.claim.expressions import evaluate_expression
from fp8bench.features.claim.values import SPEEDUPS, Claim, ClaimKind, Source
from fp8bench.files import read_file
from fp8bench.model.codec import MalformedValueError, decode
from fp8bench.model.specs import METRICS, MetricSpec, find_metric_spec

_BOUNDS_BY_RELATION = {"=": 1, "<": 1, "<=": 1, ">": 1, ">=": 1, "between": 2}
_REQUIRED_KEYS = {
    ClaimKind.ARITHMETIC: ("figure", "relation", "bound"),
    ClaimKind.MEASURED_FIGURE: ("run", "figure", "relation", "bound", "device"),
    ClaimKind.ALL_OF: ("parts",),
}
# Figures of a training arm. `gap` and `held_out_gap` are relative to the loss of the reference.
TRAINING_FIGURES = (
    "loss",
    "held_out",
    "gap",
    "held_out_gap",
    "tokens_per_second",
    "bytes_per_parameter",
    "peak_memory",
    "device_peak_memory",
    "wire_bytes",
    "joules_per_step",
)
_SPEED_WORD_PATTERN = r"fast\w*|slow\w*|quick\w*|speed\w*|throughput|latency|performance"
# Words for times. A claim about a time needs a measurement. A peak speed is a figure of a datasheet, not a time.
_TIME_WORD_PATTERN = rf"(?<!peak )(?:{_SPEED_WORD_PATTERN}|time|duration|seconds)"
# Each rule has a pattern of words in a sentence, a pattern of the figures that measure what these words promise, and a
# remedy if the figure of the claim is a different one.
_CLAIM_WORDING_RULES = (
    (r"accura\w*|qualit\w*", r"accuracy|score", "a run or training has no figure of task accuracy"),
    (r"converge\w*|loss(?:es)?", r"loss|gap|held_out", "measure `gap` of a training"),
    (r"energy|joules|power (?:draw|consumption)", r"energy|joules|power", "measure `energy ratio`"),
    (r"memory|footprint", r"memory|bytes|batch", "measure `device_peak_memory ratio`"),
    (_SPEED_WORD_PATTERN, r"time|speedup|per_second|ceiling_rate", "measure `speedup`"),
)
# Units of metrics whose sum over cases has a meaning.
_ADDITIVE_UNITS = ("s", "J", "B", "FLOP", "count")
# The runs that train a model. A sentence about training is only accepted with one of these.
_TRAINING_COMMAND_PATTERN = re.compile(r"train\b|suite (transformer|learning|vision|diffusion|moe|parallel)\b")


@dataclass(frozen=True)
class ClaimsFile:
    """The claims of a file by id, and the text of the file."""

    name: str
    text: str
    claims: Mapping[str, Claim]


_MAX_CLAIMS_FILE_BYTES = 4 << 20


def load_bundled_claims() -> ClaimsFile:
    """Returns the claims that come with fp8bench."""
    return parse_claims("the catalogue", read_file(Path(__file__).with_name("catalogue.toml")).decode())


def load_claims_file(path: Path) -> ClaimsFile:
    try:
        return parse_claims(str(path), read_file(path, _MAX_CLAIMS_FILE_BYTES).decode())
    except OSError as error:
        raise UsageError(f"the claims file {path} cannot be read ({error.strerror}). Give a .toml file.") from None
    except UnicodeDecodeError:
        raise UsageError(f"the claims file {path} is not UTF-8 text. Save it as such.") from None


def parse_claims(name: str, text: str) -> ClaimsFile:
    try:
        # 1. Parse the file. Deeply nested TOML raises RecursionError.
        content = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{name} is not TOML: {error}.") from None
    rows = content.get("claim")
    sources = content.get("source", {})
    # 2. Check that it has [[claim]] rows, and nothing else but tables of sources.
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise UsageError(f"{name} has no claims. Begin each with a line [[claim]]; docs/claims.md shows a row.")
    if (unknown_keys := {*content} - {"claim", "source"}) or not isinstance(sources, dict):
        misplaced_key = min(unknown_keys, default="source")
        raise UsageError(
            f"{name}: {misplaced_key!r:.40} is misplaced. A claims file has [[claim]] rows and [source.KEY] tables."
        )
    claims = {}
    # 3. Convert each row. A message names the claim, or its number if it has no id.
    for row_number, row in enumerate(rows, 1):
        try:
            claim = parse_row(row, sources)
        except UsageError as error:
            raise UsageError(f"{name}, {row.get('id') or f'claim {row_number}'!s:.80}: {error}") from None
        if claim.id in claims:
            raise UsageError(f"{name} has two claims with the id {claim.id}. Rename one.")
        claims[claim.id] = claim
    return ClaimsFile(name, text, claims)


def parse_row(row: Mapping[str, Any], sources: Mapping[str, Any]) -> Claim:
    """Converts a row of a claims file to a claim. Its source may be a key of `sources`. Raises UsageError if nothing
    can decide the claim."""
    # 1. Check the names of the keys in the row, and the types of their values.
    names = [field.name for field in fields(Claim)]
    for key in row:
        if key not in names:
            raise UnknownName("key of a claim", key, names)
    for key in ("id", "sentence", "source", "kind"):
        if not row.get(key):
            raise UsageError(f"`{key}` is missing. Every claim has an id, a sentence, a source and a kind.")
    source = _find_claim_source(row["source"], sources)
    if row["kind"] not in [*ClaimKind]:
        raise UsageError(f"kind {row['kind']!r:.40} is not one of {', '.join(ClaimKind)}. Give one of these.")
    try:
        claim = decode(Claim, {**_normalize_claim_row(row), "source": source})
    except (MalformedValueError, OverflowError) as error:
        raise UsageError(f"{error}. docs/claims.md lists the values of each key.") from None
    # 2. Check that the claim can be decided.
    _check_required_keys(claim)
    if claim.kind is not ClaimKind.ALL_OF:
        _check_claimed_bound(claim)
    if claim.kind is ClaimKind.ARITHMETIC:
        _check_arithmetic(claim)
    elif claim.kind is ClaimKind.MEASURED_FIGURE:
        _check_claim_wording(claim)
        _check_claim_resolution(claim, _find_spec_of_claim(claim))
    return claim


def _find_claim_source(source: object, sources: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the source of a claim. The row either contains it, or names a table of the file that does."""
    if isinstance(source, str):
        if source not in sources:
            raise UnknownName("source", source, sources, "the keys of the file's [source.KEY] tables")
        source = sources[source] | {"key": source} if isinstance(sources[source], dict) else None
    if not isinstance(source, dict) or {*source, "key"} != {field.name for field in fields(Source)}:
        raise UsageError(
            "`source` must be a table with title, publisher, year and address, or the key of such a table."
        )
    return source


def _normalize_claim_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row of a claims file in uniform types: single values become lists, and `case` becomes a list of
    pairs of strings."""
    normalized_row = dict(row)
    for key in ("bound", "device", "parts", "also"):
        if key in normalized_row and not isinstance(normalized_row[key], list):
            normalized_row[key] = [normalized_row[key]]
    if isinstance(case := normalized_row.get("case"), dict):
        normalized_row["case"] = [[name, str(value)] for name, value in case.items()]
    return normalized_row


def _check_required_keys(claim: Claim) -> None:
    for key in _REQUIRED_KEYS[claim.kind]:
        if getattr(claim, key) in ("", ()):
            hint = ' Add device = "any" if emulation decides, else "cpu", "cuda" or GPU names.' * (key == "device")
            raise UsageError(f"`{key}` is missing, but a claim of the kind {claim.kind} needs it.{hint}")
    if claim.kind is ClaimKind.MEASURED_FIGURE:
        key = "arm" if claim.run.startswith("train") else "mode"
        if key not in dict(claim.case):
            raise UsageError(f'`case` has no {key}, so the precision is unknown. Add case = {{ {key} = "fp8" }}.')
    for key in ("card", "power", "library"):
        if getattr(claim, key) and not (claim.published and claim.kind is ClaimKind.MEASURED_FIGURE):
            raise UsageError(f"`{key}` is a condition of a published measurement. Set published = true, or remove it.")
    if not (claim.power is None or 0 < claim.power < math.inf) or not 0 <= claim.seconds < math.inf:
        raise UsageError("`power` takes watts, and `seconds` the length of the run, both above 0. Correct them.")


def _check_claimed_bound(claim: Claim) -> None:
    if claim.relation not in _BOUNDS_BY_RELATION:
        raise UsageError(
            f"relation {claim.relation!r:.20} is not one of {' '.join(_BOUNDS_BY_RELATION)}. Give one of these."
        )
    count = _BOUNDS_BY_RELATION[claim.relation]
    if len(claim.bound) != count or not all(map(math.isfinite, claim.bound)) or claim.bound[0] > claim.bound[-1]:
        expected_bound_form = "two numbers, the lower one first" if count == 2 else "one number"
        raise UsageError(f"the relation {claim.relation} takes {expected_bound_form} as its bound. Correct `bound`.")
    if not 0 <= claim.tolerance < 1 or (claim.tolerance and claim.relation not in ("=", "between")):
        raise UsageError(
            "a tolerance is a share such as 0.01, and only = and between take one. For other relations, move the bound."
        )


def _check_arithmetic(claim: Claim) -> None:
    if time_word := _find_first_match(_TIME_WORD_PATTERN, claim.sentence):
        raise UsageError(
            f"{time_word!r} is about times, but arithmetic cannot bound a ratio of two times. Measure it, or reword "
            "the sentence to be about peaks, as in 'peak speed'."
        )
    evaluate_expression(claim.figure)


def _find_first_match(word_pattern: str, sentence: str) -> str:
    """Returns the first match of `word_pattern`, a regular expression of whole words, in a sentence; '' without a
    match."""
    match = re.search(rf"\b(?:{word_pattern})\b", sentence, re.IGNORECASE)
    return match[0] if match else ""


def _check_claim_wording(claim: Claim) -> None:
    """Raises UsageError if a sentence promises more than its figure measures."""
    for word_pattern, figures, remedy in _CLAIM_WORDING_RULES:
        overpromising_word = _find_first_match(word_pattern, claim.sentence)
        if overpromising_word and not re.search(figures, claim.figure):
            raise UsageError(
                f"{overpromising_word!r} promises more than {claim.figure} measures: {remedy}. Reword the sentence, or "
                "change the figure."
            )
    training = _find_first_match(r"train\w*", claim.sentence)
    if training and not _TRAINING_COMMAND_PATTERN.match(claim.run):
        raise UsageError(
            f"{training!r} promises more than `{claim.run}` measures, which does not train. Reword the sentence, or "
            "run `train` or the suite transformer."
        )
    if claim.figure in SPEEDUPS and "any" in claim.device:
        raise UsageError("a speed depends on the device, but device = \"any\" names none. Name cards, or 'cuda'.")


def _check_claim_resolution(claim: Claim, spec: MetricSpec | None) -> None:
    """Raises UsageError if the figure is not precise enough for the claim's bound, if `sum` adds a figure that cannot
    be added, or if `limit` does not suit the figure or the device.
    """
    figure_resolution = find_resolution(claim, spec)
    message_start = f"{claim.figure} has a resolution of {100 * figure_resolution:g}%, which cannot"
    if claim.relation == "=" and claim.tolerance < figure_resolution:
        raise UsageError(f"{message_start} decide a tolerance of {100 * claim.tolerance:g}%. Widen the tolerance.")
    if claim.is_ratio and any(0 < abs(bound - 1) < figure_resolution for bound in claim.bound):
        raise UsageError(f"{message_start} distinguish {claim.bound[0]:g} from 1. Choose a bound further from 1.")
    if claim.sum and (spec is None or spec.unit not in _ADDITIVE_UNITS):
        raise UsageError(f"a sum of {claim.metric} over cases has no meaning. Remove `sum`, and name one case.")
    if claim.limit:
        _check_claim_limit(claim, spec)


def _check_claim_limit(claim: Claim, spec: MetricSpec | None) -> None:
    if claim.is_ratio:
        raise UsageError(
            f"two lower bounds on time bound no ratio of times, so {claim.figure} has no limit. Remove `limit`."
        )
    if spec is None or spec.unit not in ("s", "FLOP/s", "B/s", "tok/s"):
        raise UsageError(f"only a time or a rate has a limit, and {claim.figure} is neither. Remove `limit`.")
    devices = {device.lower() for device in evaluate_expression(claim.limit).citations.values()}
    if devices != {device.lower() for device in claim.device} or len(devices) != 1:
        raise UsageError(
            "`limit` comes from one datasheet and refutes nothing on another card, so `device` must name that card in "
            'full. Write limit = "h200_sxm.bf16" and device = "H200 SXM".'
        )


def _find_spec_of_claim(claim: Claim) -> MetricSpec | None:
    """Returns the specification of the metric from which the figure is computed. Returns None for a figure of a
    training.
    """
    name = claim.metric
    if claim.run.startswith("train"):
        if name not in TRAINING_FIGURES:
            raise UnknownName("figure of a training", name, TRAINING_FIGURES)
        if claim.is_ratio and name in ("gap", "held_out_gap"):
            raise UsageError(
                f"{name} is already relative to the loss of the reference, so it has no ratio. Remove ` ratio`."
            )
        return None
    # A suite may define metrics that METRICS lacks. `find_metric_spec` describes those whose names end in known words.
    spec = find_metric_spec(name)
    if name not in METRICS and not spec.description:
        names = [metric for metric in METRICS if "*" not in metric]
        raise UnknownName("figure of a run", name, names, "speedup, sustained_speedup, the metrics of show --csv -")
    return spec


_RESOLUTION_BY_TRAINING_FIGURE = {"loss": 0.001, "held_out": 0.001, "tokens_per_second": 0.01, "joules_per_step": 0.01}


def find_resolution(claim: Claim, spec: MetricSpec | None) -> float:
    """Returns the relative resolution of the claim's figure: smaller differences mean nothing. Returns 0 for an exact
    figure.
    """
    if claim.figure in SPEEDUPS:
        return 0.01
    if spec is None:
        return _RESOLUTION_BY_TRAINING_FIGURE.get(claim.metric, 0.0)
    return 0.0 if spec.counted or spec.unit in ("B", "count") else spec.least_change
