"""The report's charts: which there are, and how one becomes inline SVG.

Colours are written as placeholders and exchanged for CSS variables, so that one drawing serves the light and the dark
page. Figures are made without pyplot, which would leave global state behind.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Rows = Sequence[dict[str, float]]

COLOURS = {
    "#000001": "var(--ink-soft)",
    "#000002": "var(--grid)",
    **{f"#0001{index:02x}": f"var(--c{index})" for index in range(1, 10)},
}
"""Placeholder -> CSS. Matplotlib wants a colour of its own kind."""
SOFT, GRID = "#000001", "#000002"
SIZE, LARGE = (4.4, 2.2), (6.8, 4.1)  # inches; the page scales them to their columns
SMOOTH_FROM = 60  # points from which a running mean is drawn over the raw curve
BARS = 120  # most bars in the chart of times; longer runs are averaged into that many

STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text: small, selectable, in the page's font
    "font.size": 8,
    "axes.edgecolor": GRID,
    "axes.facecolor": "none",
    "axes.labelcolor": SOFT,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.xmargin": 0.02,
    "axes.formatter.limits": (-3, 4),
    "figure.facecolor": "none",
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.color": SOFT,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
}


def colour(index: int) -> str:
    """The placeholder of the palette's colour 1 to 9."""
    return f"#0001{index:02x}"


@dataclass(frozen=True)
class Series:
    """One metric in a chart."""

    key: str
    label: str
    points: bool = False
    """Dots instead of a line: for what is measured now and then."""
    spread: str | None = None
    """Metric whose value is drawn as a band of ± around the line."""


@dataclass(frozen=True)
class Chart:
    """One chart: shown if at least one of its metrics has a finite value."""

    title: str
    note: str
    series: tuple[Series, ...]
    hide_constant: bool = False
    """Leave it out where nothing changes: a flat line says less than the recipe."""
    smooth: bool = True
    """Draw a running mean over a long curve; not over a schedule, which has no noise."""
    large: bool = False
    """Twice as wide and high: for the one chart that everybody looks at."""


def _one(title: str, key: str, note: str, **options: Any) -> Chart:
    return Chart(title, note, (Series(key, title.lower()),), **options)


GROUPS: tuple[tuple[str, tuple[Chart, ...]], ...] = (
    (
        "Learning",
        (
            Chart(
                "Reward",
                "Mean of each step's rollouts (band: ± one standard deviation). Dots are held-out prompts.",
                (
                    Series("reward/mean", "rollouts", spread="reward/std"),
                    Series("eval/reward", "held-out", points=True),
                ),
                large=True,
            ),
            _one("KL to reference", "kl/reference", "Mean per token, in nats: how far the policy has moved."),
            _one("KL coefficient", "kl/coef", "Weight of the KL penalty.", hide_constant=True, smooth=False),
            _one("Entropy", "actor/entropy", "Per token, in nats. A fall to zero means exploration has ended."),
            _one("Response length", "response/length_mean", "Mean tokens of a response."),
            _one(
                "Truncated responses",
                "response/truncated_fraction",
                "Share that reached the length limit without an EOS.",
            ),
        ),
    ),
    (
        "Trainer and engine",
        (
            _one(
                "Log-prob mismatch",
                "mismatch/log_prob",
                "Mean |log p(trainer) − log p(engine)| of the sampled tokens. Growth means stale or wrong weights.",
            ),
            _one("Mismatch KL", "mismatch/kl", "KL of the engine's distribution from the trainer's, per token."),
            _one("Tokens per second", "tokens_per_second", "Over the whole step, all phases included."),
        ),
    ),
    (
        "Optimisation",
        (
            _one("Policy loss", "actor/loss", "Surrogate objective; its level means little, a jump means a lot."),
            Chart(
                "Gradient norm",
                "Before clipping.",
                (Series("actor/grad_norm", "actor"), Series("critic/grad_norm", "critic")),
            ),
            _one("Clip fraction", "actor/clip_fraction", "Share of tokens whose ratio left the clip range."),
            _one("KL of the update", "actor/ppo_kl", "From the policy that sampled to the one just trained."),
            _one(
                "Learning rate", "actor/learning_rate", "At the step's last update.", hide_constant=True, smooth=False
            ),
            _one("Value loss", "critic/loss", "Error of the critic's predictions."),
            _one("Explained variance", "critic/explained_variance", "Of the returns by the critic; 1 is perfect."),
        ),
    ),
)


def values(rows: Rows, key: str) -> tuple[list[float], list[float]]:
    """Steps and values of one metric; non-finite values are NaN, which a line skips."""
    points = [(row["step"], row[key]) for row in rows if key in row]
    return [step for step, _ in points], [value if math.isfinite(value) else math.nan for _, value in points]


def shown(chart: Chart, rows: Rows) -> list[Series]:
    """The series of a chart that have something to show."""
    present = []
    for series in chart.series:
        finite = [value for value in values(rows, series.key)[1] if not math.isnan(value)]
        if finite and not (chart.hide_constant and len(set(finite)) == 1):
            present.append(series)
    return present


def draw(chart: Chart, rows: Rows) -> str:
    """The chart as an ``<svg>`` element."""

    def paint(axes: Any) -> None:
        for index, series in enumerate(chart.series, start=1):
            _paint_series(axes, series, rows, colour(index), smooth=chart.smooth)

    return _svg(chart.title, paint, LARGE if chart.large else SIZE)


def _paint_series(axes: Any, series: Series, rows: Rows, tint: str, *, smooth: bool) -> None:
    steps, curve = values(rows, series.key)
    if series.points:
        axes.plot(steps, curve, "o", color=tint, markersize=4.5 if len(curve) <= 40 else 2, zorder=3)
        return
    if series.spread:
        band = [row.get(series.spread, math.nan) for row in rows if series.key in row]
        low, high = zip(*((v - s, v + s) for v, s in zip(curve, band, strict=True)), strict=True) if curve else ((), ())
        axes.fill_between(steps, low, high, color=tint, alpha=0.13, linewidth=0)
    many = smooth and len(curve) >= SMOOTH_FROM
    axes.plot(steps, curve, color=tint, alpha=0.35 if many else 1, linewidth=0.8 if many else 1.6,
              marker="o" if len(curve) <= 3 else None, markersize=3)  # fmt: skip
    if many:
        axes.plot(steps, running_mean(curve), color=tint)


def running_mean(curve: Sequence[float]) -> list[float]:
    """Centred mean over about a twentieth of the curve, so that it does not lag behind; NaN is passed over."""
    reach = max(2, len(curve) // 40)
    sums, counts = [0.0], [0]
    for value in curve:
        known = not math.isnan(value)
        sums.append(sums[-1] + (value if known else 0.0))
        counts.append(counts[-1] + known)
    spans = [(max(at - reach, 0), min(at + reach + 1, len(curve))) for at in range(len(curve))]
    return [(sums[hi] - sums[lo]) / (counts[hi] - counts[lo]) if counts[hi] > counts[lo] else math.nan
            for lo, hi in spans]  # fmt: skip


def draw_times(phases: Sequence[str], rows: Rows) -> str:
    """Seconds of each phase, stacked, as an ``<svg>`` element; phases in the palette's order."""
    size = math.ceil(len(rows) / BARS)
    bins = [rows[start : start + size] for start in range(0, len(rows), size)]

    def paint(axes: Any) -> None:
        steps = [some[0]["step"] + (some[-1]["step"] - some[0]["step"]) / 2 for some in bins]
        width = min((after - at for at, after in pairwise(steps)), default=1) * 0.92
        base = [0.0] * len(bins)
        for index, phase in enumerate(phases, start=1):
            height = [math.fsum(row.get(phase, 0.0) for row in some) / len(some) for some in bins]
            axes.bar(steps, height, width, bottom=base, color=colour(min(index, 9)), linewidth=0)
            base = [low + more for low, more in zip(base, height, strict=True)]
        axes.set_ylabel("seconds")

    return _svg("times", paint, (SIZE[0] * 1.35, SIZE[1] * 1.25))


def _svg(name: str, paint: Any, size: tuple[float, float]) -> str:
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    style: Any = {**STYLE, "svg.hashsalt": name}  # ids repeat from run to run and differ from chart to chart
    with rc_context(style):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.add_subplot()
        paint(axes)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return _inline(file.getvalue(), name)


def _inline(document: str, name: str) -> str:
    """The bare element: no prolog, no namespaces (HTML needs none), no fixed size, no ids that nothing refers to."""
    svg = document[document.index("<svg") :]
    head, _, body = svg.partition(">")
    view = re.search(r'viewBox="[^"]*"', head)
    used = set(re.findall(r"#([\w-]+)", body))
    body = re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in used else "", body)
    for placeholder, css in COLOURS.items():
        body = body.replace(placeholder, css)
    return f'<svg {view[0] if view else ""} role="img" aria-label="{name}">{body}'
