"""Pages made by hand: every element, names that are a nuisance, and as many rows as one asks for."""

from __future__ import annotations

import math

from fp8bench.report.elements import (
    AnyChart,
    Bars,
    ChartAxis,
    ChartMark,
    ChartPoint,
    Code,
    Column,
    Field,
    Lines,
    NameValuePairs,
    Page,
    Part,
    Scatter,
    Stacks,
    Table,
    Text,
    TextList,
    Tone,
)

SCRIPT = "<script>alert(1)</script>"
SPEED, TIME = ChartAxis("times faster than bf16", "x"), ChartAxis("time of a step", "s")
LONG = "gemm_" + "x" * 295
NUISANCES = (
    SCRIPT,
    LONG,
    "\u05de\u05d8\u05e8\u05d9\u05e6\u05d4 abc",
    "\U0001f680 & 'quoted' \"twice\" `code` a|b",
    "*a* _b_ [c](d)\n# e",
)
_DTYPES = ("bf16", "fp8", "mxfp8", "nvfp4")
_SUITES = ("transformer", "gemm", "attention")
_VERDICTS = (("reference", Tone.PLAIN), ("faster", Tone.GOOD), ("slower", Tone.BAD), ("unsure", Tone.DOUBT))


def cases(num_rows: int, name: str = "cases") -> Table:
    """A main table of fourteen columns; every seventh row was not measured."""
    columns = (
        Column("suite"),
        Column("case"),
        Column("dtype"),
        Column("how", hint="native, or emulated in software"),
        Column("best", number=True, hint="the step undisturbed", unit="s"),
        Column("median", number=True, unit="s"),
        Column("spread", number=True),
        Column("verdict", hint="outside the noise, or not"),
        Column("time vs bf16", number=True, unit="x"),
        Column("throughput", number=True, unit="tok/s"),
        Column("error", number=True),
        Column("memory", number=True, unit="B"),
        Column("rounds", number=True),
        Column("labels"),
    )
    return Table(
        name, "Every case that was planned", columns, tuple(_case(index) for index in range(num_rows)), main=True
    )


def _case(index: int) -> tuple[Field, ...]:
    dtype, suite = _DTYPES[index % 4], _SUITES[index // 4 % 3]
    size = 256 << index // 12 % 6
    name = (Field(suite), Field(f"m={size} n={size} k={64 * (index // 12 + 1)}"), Field(dtype))
    if index % 7 == 6:
        skipped = Field("skipped", tone=Tone.DOUBT)
        return (*name, Field("refused"), *[Field("-")] * 3, skipped, *[Field("-")] * 6)
    best = 0.0012 * (1 + index * 37 % 23) / (1 + index % 4)
    verdict, tone = _VERDICTS[index % 4]
    ratio = 1.2 - 0.21 * (index % 4) + 0.001 * index
    error = 1 + index % 9
    return (
        *name,
        Field("emulated" if dtype == "nvfp4" else "native"),
        Field(f"{1e3 * best:.3g} ms", best),
        Field(f"{1e3 * best * 1.03:.3g} ms", best * 1.03),
        Field(f"{2 + index % 5}.1%", 0.021 + index % 5 / 100),
        Field(verdict, tone=tone),
        Field(f"{ratio:.3f}x", ratio),
        Field(f"{40 + index % 9}.0 ktok/s", 40e3 + 1e3 * (index % 9)),
        Field(f"{error}.0e-03", error / 1e3),
        Field(f"{300 + index} MiB", float(300 + index << 20)),
        Field(f"{24 + index % 40}", float(24 + index % 40)),
        Field("contended, few-samples" if index % 11 == 3 else ""),
    )


def bars() -> Bars:
    """Two groups, one case in doubt."""
    groups = []
    for width in (256, 1024):
        marks = tuple(_bar(dtype, width, place) for place, dtype in enumerate(_DTYPES[1:]))
        groups.append((f"transformer width={width}", marks))
    return Bars(
        "speed-up",
        "Speed-up over bf16",
        "fp8 is the fastest everywhere, by 1.9x at width 1024.",
        ChartAxis("speed-up over bf16", "x"),
        tuple(groups),
    )


def _bar(dtype: str, width: int, place: int) -> ChartMark:
    value = 1.9 - 0.45 * place + (0.1 if width == 1024 else 0)
    tone = Tone.GOOD if place == 0 else Tone.BAD if place == 1 else Tone.DOUBT
    hint = f"{dtype}: {value:.2f}x, 99% interval [{value - 0.05:.2f}, {value + 0.05:.2f}]"
    return ChartMark(dtype, value, value - 0.05, value + 0.05, tone, hint)


def charts() -> tuple[AnyChart, ...]:
    """One of each kind."""
    then, now = ChartMark("fp8", 0.012, 0.011, 0.013), ChartMark("bf16", 0.024)
    history = (("fp8", (then, None)), ("bf16", (None, now)))
    points = (
        ChartPoint("fp8", "fp8 small", 1.6, 3e-2, Tone.GOOD, x_low=1.5, x_high=1.7),
        ChartPoint("fp8", "fp8 large", 1.4, 2e-2),
        ChartPoint("bf16", "bf16", 1.0, 4e-3),
        ChartPoint("mxfp4", "mxfp4", None, 0.16, Tone.DOUBT, "emulated"),
    )
    stacks = (("bf16", (0.005, 0.012, 0.0004)), ("fp8", (0.004, 0.0001, 0.002)))
    return (
        bars(),
        Scatter(
            "pareto",
            "Speed against error",
            "A point a case.",
            ChartAxis("times faster", "x"),
            ChartAxis("relative error", ""),
            points,
            "emulated: no speed",
        ),
        Stacks("phases", "Where the time goes", "Phases of a step.", TIME, ("forward", "backward", "other"), stacks),
        Lines("history", "History", "Nothing has changed.", ("a1b2c3d4", "b2c3d4e5"), TIME, history),
    )


def whole_page(num_rows: int = 60) -> Page:
    """Every element as a report uses it."""
    columns = (Column("case"), Column("gemm", number=True), Column("cast", number=True))
    dominated = Field("60.0%", 0.6, Tone.STRONG)
    shares = ((Field("bf16"), Field("50.0%", 0.5), Field("-")), (Field("fp8"), Field("20.0%", 0.2), dominated))
    verdicts = (
        Text("fp8 pays: 1.9 times as fast as bf16 at the width of 1024.", Tone.GOOD),
        Text("mxfp8 does not: 0.8 times.", Tone.BAD),
        Text("nvfp4 is emulated here, so its time says nothing about speed.", Tone.DOUBT),
        Text("Two things to know", Tone.STRONG),
        TextList((Text("The noise floor is 0.6%."), Text("One case was skipped.", Tone.DOUBT))),
    )
    environment = (
        NameValuePairs(
            (("device", "NVIDIA H200, 139 GiB"), ("torch", "2.13.0, CUDA 13"), ("commit", "a1b2c3d4, clean"))
        ),
        Code("fp8bench suite transformer --dtypes bf16,fp8,mxfp8,nvfp4"),
    )
    return Page(
        "Does low precision pay here?",
        "transformer, gemm and attention on an H200, against bf16",
        (
            Part("verdict", "Verdict", verdicts, "What this run says, in short."),
            Part("cases", "All cases", (cases(num_rows, "table"),), "The table is the truth; charts show parts of it."),
            Part("charts", "Charts", charts()),
            Part("time", "Where the time goes", (Table("steps", "Shares of the best case", columns, shares),)),
            Part("environment", "What it ran on", environment),
        ),
        ("Stored in .fp8bench/runs/box/20260105T120000Z-0a1b2c3d-7f.jsonl.", "Made by fp8bench 0.1."),
        (("device", "NVIDIA H200"), ("torch", "2.13.0"), ("cases", f"{num_rows}, 8 skipped"), ("noise floor", "0.6%")),
    )


def hostile_page() -> Page:
    """Names that are markup, 300 characters long, right to left or full of punctuation, wherever a name can be."""
    return Page(SCRIPT + LONG, LONG, tuple(_hostile_part(name) for name in NUISANCES), (SCRIPT,), ((LONG, SCRIPT),))


def _hostile_part(name: str) -> Part:
    columns = (Column(name, hint=name), Column(name, number=True, hint=name, unit=name))
    rows = ((Field(name), Field(name, math.inf)), (Field(name), Field("nan", math.nan)))
    chart = Bars(name, name, name, ChartAxis(name), ((name, (ChartMark(name, 1.0, hint=name),)),))
    texts = (Text(name, Tone.STRONG), TextList((Text(name),)), NameValuePairs(((name, name),)), Code(name))
    return Part(name, name, (*texts, Table(name, name, columns, rows, main=True), chart), name)
