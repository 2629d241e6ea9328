"""Plots as plain data, and their drawing. Only drawing needs matplotlib.

Every drawn file carries a digest of its data, so that a test can tell a stale plot without drawing.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "docs" / "plots"
_MARK = "data sha256:"
_COLOURS = 10
"""Of matplotlib's cycle."""
_LEGEND_INSIDE = 6
"""Longer legends would hide the lines."""


@dataclass(frozen=True)
class Series:
    label: str
    x: tuple[float | str, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    """Lower ends of error bars; empty: none are drawn."""
    high: tuple[float, ...] = ()


@dataclass(frozen=True)
class Plot:
    name: str
    """The file's name in docs/plots/, without its suffix."""
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    bars: bool = False
    """Bars side by side instead of lines."""
    limit: float | None = None
    """A dashed line across."""
    limit_label: str = ""
    log_y: bool = False
    """A logarithmic axis, for values that differ by factors."""

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    @property
    def file_name(self) -> str:
        return f"{self.name}.svg"


def is_fresh(plot: Plot, folder: Path = FOLDER) -> bool:
    path = folder / plot.file_name
    return path.exists() and f"{_MARK}{plot.digest()}" in path.read_text()


def draw(plot: Plot, folder: Path = FOLDER) -> None:
    import matplotlib

    matplotlib.use("svg")
    # Equal data, equal file: no random ids, no date, text as text.
    matplotlib.rcParams.update({"svg.hashsalt": plot.name, "svg.fonttype": "none"})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for at, series in enumerate(plot.series):
        (_bars if plot.bars else _line)(axes, plot, at, series)
    if plot.limit is not None:
        axes.axhline(plot.limit, color="black", linestyle="--", label=plot.limit_label)
    axes.set_title(plot.title)
    axes.set_xlabel(plot.x_label)
    axes.set_ylabel(plot.y_label)
    if plot.log_y:
        _log_scale(axes)
    else:
        axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
    if len(plot.series) > _LEGEND_INSIDE:
        figure.legend(loc="outside right upper", fontsize="small")
    elif len(plot.series) > 1 or plot.limit is not None:
        axes.legend()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / plot.file_name
    figure.savefig(path, metadata={"Date": None, "Description": f"{_MARK}{plot.digest()}"})
    pyplot.close(figure)
    # matplotlib leaves blanks at the ends of lines, which editors and linters take away.
    path.write_text("".join(f"{line.rstrip()}\n" for line in path.read_text().splitlines()))


def _bars(axes: Any, plot: Plot, at: int, series: Series) -> None:
    width = 0.8 / len(plot.series)
    places = [place + (at - (len(plot.series) - 1) / 2) * width for place in range(len(series.x))]
    axes.bar(places, series.y, width, label=series.label, yerr=_errors(series), capsize=3)
    axes.set_xticks(range(len(series.x)), series.x, rotation=20, ha="right")


def _line(axes: Any, plot: Plot, at: int, series: Series) -> None:
    # Colours come again after so many lines.
    dashes = "-" if at < _COLOURS else "--"
    errors = _errors(series)
    axes.errorbar(series.x, series.y, errors, label=series.label, marker="o", linestyle=dashes)


def _log_scale(axes: Any) -> None:
    from matplotlib.ticker import LogLocator

    axes.set_yscale("log")
    # Numbers instead of powers of ten, of which a narrow range has one or two.
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()


def _errors(series: Series) -> list[list[float]] | None:
    if not series.low:
        return None
    below = [y - low for y, low in zip(series.y, series.low, strict=True)]
    above = [high - y for y, high in zip(series.y, series.high, strict=True)]
    return [below, above]
