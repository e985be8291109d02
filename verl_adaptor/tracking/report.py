"""The run report: one HTML page that needs nothing but itself."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Mapping
from importlib import resources
from itertools import zip_longest
from pathlib import Path
from typing import Any

from verl_adaptor.errors import BackendNotInstalled, ConfigError
from verl_adaptor.tracking import charts
from verl_adaptor.tracking.records import read_json, read_rows, write_atomically

RECIPES = ("config.yaml", "config.json")
SHOWN_APART = {
    "reward_before", "reward_after", "reward_gain_interval", "eval_prompts", "steps", "train_seconds",
    "tokens_per_second", "seed", "versions", "machine",
}  # fmt: skip
"""Keys of the summary that have a place of their own; the others are listed as facts."""


def require_report() -> None:
    """Raise `BackendNotInstalled` where the packages of the extra ``report`` are missing: call it before any work."""
    missing = [name for name in ("jinja2", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        raise BackendNotInstalled(
            f"the run report needs {' and '.join(missing)}, not installed here: pip install 'verl-adaptor[report]', "
            "or set tracking.report=false."
        )


def write_report(folder: Path | str) -> Path:
    """Write ``report.html`` from the run's files in `folder` and return its path.

    Reads ``metrics.jsonl``, ``summary.json``, ``samples.json`` and the recipe (``config.yaml`` or ``config.json``);
    what is absent is left out. The page makes no request of any kind. Raises `ConfigError` where there is no run.
    """
    require_report()
    folder = Path(folder)
    if not (folder / "metrics.jsonl").exists():
        raise ConfigError(f"{folder} holds no run (there is no metrics.jsonl); name the --output folder of one.")
    path = folder / "report.html"
    write_atomically(path, _render(_page(folder)).encode())
    return path


def _render(page: dict[str, Any]) -> str:
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(number=number, duration=duration)
    source = resources.files("verl_adaptor.tracking").joinpath("templates/report.html.j2").read_text("utf-8")
    return environment.from_string(source).render(page)


def _page(folder: Path) -> dict[str, Any]:
    """All that the template shows."""
    rows = read_rows(folder / "metrics.jsonl")
    summary = read_json(folder / "summary.json") or {}
    recipe = next((folder / name for name in RECIPES if (folder / name).exists()), None)
    return {
        "name": folder.resolve().name,
        "rows": len(rows),
        "smoothed": len(rows) > charts.SMOOTH_FROM,
        "headline": _headline(rows, summary),
        "facts": _key_facts(rows, summary),
        "warnings": list(_warnings(rows, summary)),
        "groups": _groups(_from_the_start(rows, summary)),
        "times": _times(rows),
        "samples": _pairs(read_json(folder / "samples.json") or {}),
        "recipe": recipe and recipe.read_text("utf-8"),
        "recipe_name": recipe and recipe.name,
        "details": [
            (title, list(_flat(values)))
            for title, values in (
                ("Model and run", {key: value for key, value in summary.items() if key not in SHOWN_APART}),
                ("Versions", summary.get("versions", {})),
                ("Machine", summary.get("machine", {})),
            )
            if values
        ],
    }


def _headline(rows: charts.Rows, summary: Mapping[str, Any]) -> dict[str, Any] | None:
    """Reward before and after: of held-out prompts where they were measured, else of the first and last rollouts."""
    before, after = _finite(summary.get("reward_before")), _finite(summary.get("reward_after"))
    if before is not None and after is not None:
        low, high = (_finite(end) for end in summary.get("reward_gain_interval") or (None, None))
        verdict = None
        if low is not None and high is not None:
            verdict = "better" if low > 0 else "worse" if high < 0 else "unclear"
        return {"before": before, "after": after, "low": low, "high": high, "verdict": verdict,
                "of": "held-out reward", "prompts": summary.get("eval_prompts")}  # fmt: skip
    rewards = [value for value in charts.values(rows, "reward/mean")[1] if not math.isnan(value)]
    if not rewards:
        return None
    return {"before": rewards[0], "after": rewards[-1], "low": None, "high": None, "verdict": None,
            "of": "rollout reward, first to last step", "prompts": None}  # fmt: skip


def _key_facts(rows: charts.Rows, summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    steps = summary.get("steps", rows[-1]["step"] if rows else None)
    seconds = summary.get("train_seconds", math.fsum(charts.values(rows, "time/step")[1]) or None)
    tokens = math.fsum(value for value in charts.values(rows, "tokens")[1] if not math.isnan(value))
    facts = [
        ("steps", number(steps)),
        ("training time", duration(seconds)),
        ("tokens per second", number(summary.get("tokens_per_second"))),
        ("tokens trained on", number(tokens or None)),
        ("held-out prompts", number(summary.get("eval_prompts"))),
        ("seed", str(summary.get("seed", "–"))),
    ]
    return [(label, value) for label, value in facts if value != "–"]


def _warnings(rows: charts.Rows, summary: Mapping[str, Any]) -> Iterator[str]:
    """What a reader must know before believing the curves."""
    if rows and not summary:
        yield "The run has not finished: there is no summary yet."
    skipped = math.fsum(value for value in charts.values(rows, "actor/skipped")[1] if not math.isnan(value))
    if skipped:
        yield f"{skipped:g} updates were skipped because a gradient was not finite."
    broken = sorted({key for row in rows for key, value in row.items() if not math.isfinite(value)})
    if broken:
        yield f"Not finite at some steps, and left out of the charts there: {', '.join(broken)}."


def _from_the_start(rows: charts.Rows, summary: Mapping[str, Any]) -> charts.Rows:
    """The rows, with the evaluation before training as step 0 where no row holds it."""
    before = _finite(summary.get("reward_before"))
    if before is None or not rows or rows[0]["step"] <= 0:
        return rows
    return [{"step": 0, "eval/reward": before}, *rows]


def _groups(rows: charts.Rows) -> list[tuple[str, list[dict[str, Any]]]]:
    groups = []
    for title, members in charts.GROUPS:
        drawn = [_chart(chart, rows) for chart in members if charts.shown(chart, rows)]
        if drawn:
            groups.append((title, drawn))
    return groups


def _chart(chart: charts.Chart, rows: charts.Rows) -> dict[str, Any]:
    present = charts.shown(chart, rows)
    legend = [(index, series) for index, series in enumerate(chart.series, start=1) if series in present]
    last = [value for value in charts.values(rows, present[0].key)[1] if not math.isnan(value)][-1]
    return {"title": chart.title, "note": chart.note, "svg": charts.draw(chart, rows), "last": last, "large": chart.large,
            "legend": legend if len(chart.series) > 1 else []}  # fmt: skip


def _times(rows: charts.Rows) -> dict[str, Any] | None:
    """The stacked chart and its table: mean seconds of each phase, largest first, and what no phase accounts for."""
    timed = [
        {
            key: value
            for key, value in row.items()
            if key == "step" or (key.startswith("time/") and math.isfinite(value))
        }
        for row in rows
        if any(key.startswith("time/") for key in row)
    ]
    for row in timed:
        if "time/step" in row:
            counted = math.fsum(value for key, value in row.items() if key not in ("step", "time/step"))
            row["time/other"] = max(row.pop("time/step") - counted, 0.0)
    totals: dict[str, float] = {}
    for row in timed:
        for key, value in row.items():
            if key != "step":
                totals[key] = totals.get(key, 0.0) + value
    whole = math.fsum(totals.values())
    if not whole:
        return None
    phases = sorted((key for key in totals if totals[key] > 0), key=lambda key: -totals[key])
    table = [
        {"colour": min(index, 9), "phase": key.removeprefix("time/").replace("_", " "),
         "seconds": totals[key] / len(timed), "share": totals[key] / whole}
        for index, key in enumerate(phases, start=1)
    ]  # fmt: skip
    return {"svg": charts.draw_times(phases, timed), "table": table, "seconds": whole / len(timed)}


def _pairs(samples: Mapping[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Samples of one prompt side by side, in the order in which the prompts first appear."""
    by_prompt: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for when in ("before", "after"):
        for sample in samples.get(when, []):
            by_prompt.setdefault(str(sample.get("prompt", "")), {}).setdefault(when, []).append(_sample(sample))
    return [
        {"prompt": prompt, "before": before, "after": after}
        for prompt, sides in by_prompt.items()
        for before, after in zip_longest(sides.get("before", []), sides.get("after", []))
    ]


def _sample(sample: Mapping[str, Any]) -> dict[str, Any]:
    apart = ("prompt", "response", "reward")
    return {"response": str(sample.get("response", "")), "reward": _finite(sample.get("reward")),
            "rest": list(_flat({key: value for key, value in sample.items() if key not in apart}))}  # fmt: skip


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested mappings as rows of a table: ``model.layers`` -> ``2``."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            yield f"{prefix}{key}", ", ".join(map(str, value)) or "–"
        else:
            yield f"{prefix}{key}", _text(value)


def _text(value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return number(value)
    return "–" if value is None else str(value)


def _finite(value: Any) -> float | None:
    """The value as a finite float, or None; a summary holds ``"NaN"`` where nothing could be measured."""
    if value is None or not math.isfinite(float(value)):
        return None
    return float(value)


def number(value: Any) -> str:
    """A number for reading: thousands apart, three or four figures; a dash where there is none."""
    finite = _finite(value)
    if finite is None:
        return "–"
    size = abs(finite)
    if size >= 1000 or size == int(size):
        text = f"{size:,.0f}".replace(",", "\u202f")  # a thin space that does not break
    else:
        text = f"{size:.1f}" if size >= 10 else f"{size:.3f}" if size >= 0.01 else f"{size:.2g}"
    return f"−{text}" if finite < 0 else text


def duration(seconds: Any) -> str:
    """Seconds for reading: ``48.2 s``, ``3 min 05 s``, ``2 h 07 min``."""
    finite = _finite(seconds)
    if finite is None:
        return "–"
    if finite < 60:
        return f"{finite:.1f} s"
    minutes, rest = divmod(round(finite), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
