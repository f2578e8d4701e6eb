"""Figures of measurements and estimates. Each function draws the given numbers into an Axes and measures nothing.

They use Matplotlib (the extra `plot`), which is imported only when a function draws. Okabe and Ito (2008, "Color
Universal Design") chose the colours, which remain distinguishable with colour blindness. Series also differ in their
markers or line styles, so that black-and-white prints are readable.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from minillm.trace import RunMetrics
from minillm.trace.roofline import Roofline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

Point = tuple[float, float]

COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "D", "^", "v", "P")
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))
GREY = "#555555"
SMALL = 8  # font size of labels, in points
LINE_HEIGHT = 0.055  # smallest distance between labels beside the Axes, as a share of its height

LATENCIES = {"tpot": "time per output token", "ttft": "time to first token"}


def latency_against_throughput(axes: Axes, runs: Mapping[str, Mapping[int, RunMetrics]], latency: str = "tpot") -> None:
    """Draw the latency of a user against the total throughput: one line per policy, one point per load.

    Parameters
    ----------
    axes : where to draw.
    runs : metrics by policy and by load, which is the number of clients served at once.
    latency : "tpot" or "ttft". Filled markers show the median, hollow ones the 95th percentile.
    """
    marks: list[Point] = []
    labels: list[tuple[str, Point, str]] = []
    for (policy, by_load), (colour, marker, _) in zip(runs.items(), _styles(), strict=False):
        median, p95 = (_latencies(by_load, f"{quantile}_{latency}") for quantile in ("median", "p95"))
        style: dict[str, Any] = {"marker": marker, "color": colour, "linewidth": 1.5}
        axes.plot(*_columns(median.values()), "-", **style)
        axes.plot(*_columns(p95.values()), "--", markerfacecolor="white", **style)
        marks += [*median.values(), *p95.values()]
        for load, point in median.items():
            labels.append((f"{load}, {policy}" if load == max(median) else str(load), point, colour))
    keys = [
        axes.plot([], [], line, marker="o", color=GREY, markerfacecolor=fill, label=label)[0]
        for label, line, fill in (("median", "-", GREY), ("95th percentile", "--", "white"))
    ]
    axes.set(xlabel="tokens per second, all clients", ylabel=f"{LATENCIES[latency]}, ms")
    axes.set_yscale("log")
    axes.set_xlim(left=0)
    _use_plain_numbers(axes.yaxis)
    axes.legend(handles=keys, frameon=False, fontsize=SMALL, title="numbers: clients at once", title_fontsize=SMALL)
    _label_points(axes, labels, marks)
    _finish(axes, f"{LATENCIES[latency].capitalize()} against throughput")


def decode_rate(axes: Axes, rates: Mapping[str, Mapping[int, float]], limit: Mapping[int, float]) -> None:
    """Draw the decode rate against the batch size: one line per engine, and the machine's limit.

    Parameters
    ----------
    axes : where to draw.
    rates : total tokens per second by engine and by the number of sequences in the batch.
    limit : the highest possible tokens per second by the number of sequences.
    """
    ends: list[tuple[float, float, str, str]] = []
    if limit:
        axes.plot(*_columns(limit.items()), color=GREY, linewidth=2)
        ends.append((max(limit), limit[max(limit)], "at best", GREY))
    for (engine, by_size), (colour, marker, line) in zip(rates.items(), _styles(), strict=False):
        axes.plot(*_columns(by_size.items()), linestyle=line, marker=marker, color=colour, linewidth=1.5, clip_on=False)
        ends.append((max(by_size), by_size[max(by_size)], engine, colour))
    sizes = sorted({size for by_size in rates.values() for size in by_size} | {*limit})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([2**n for n in range(10) if sizes[0] <= 2**n <= sizes[-1]])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set(xlabel="sequences in the batch", ylabel="tokens per second, all sequences")
    if len(sizes) > 1:
        axes.set_xlim(sizes[0], sizes[-1])
    _use_plain_numbers(axes.yaxis)
    _label_ends(axes, ends)
    _finish(axes, "Decode rate against batch size")


def kv_bytes(
    axes: Axes,
    bytes_per_token: Mapping[str, float],
    levels: Mapping[str, float],
    tokens: tuple[int, int] = (100, 1_000_000),
) -> None:
    """Draw the size of the KV cache against the number of tokens in it.

    Parameters
    ----------
    axes : where to draw.
    bytes_per_token : size of a token's keys and values, by model or by storage type.
    levels : sizes in bytes to compare with, such as the weights or a memory. Each is a horizontal line.
    tokens : the lowest and highest number of tokens.
    """
    from matplotlib.ticker import EngFormatter

    ends: list[tuple[float, float, str, str]] = []
    for (name, size), (colour, _, line) in zip(bytes_per_token.items(), _styles(), strict=False):
        axes.plot(tokens, [count * size for count in tokens], linestyle=line, color=colour, linewidth=2)
        ends.append((tokens[1], tokens[1] * size, name, colour))
    axes.set(xscale="log", yscale="log", xlim=tokens, xlabel="tokens in the cache, all sequences")
    axes.set_ylabel("KV cache")
    axes.yaxis.set_major_formatter(EngFormatter(unit="B"))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    for name, size in levels.items():
        axes.axhline(size, color=GREY, linewidth=1)
        # The label goes to the end of the line that is farther from the other lines.
        start, end = (
            min(abs(math.log(size / (count * each))) for each in bytes_per_token.values()) for count in tokens
        )
        x, alignment, shift = (tokens[0], "left", 4) if start >= end else (tokens[1], "right", -4)
        style: dict[str, Any] = {"fontsize": SMALL + 1, "color": GREY, "ha": alignment}
        axes.annotate(name, (x, size), xytext=(shift, 3), textcoords="offset points", **style)
    _label_ends(axes, ends)
    _finish(axes, "Size of the KV cache")


def roofline(axes: Axes, limit: Roofline, points: Mapping[str, Mapping[str, Point]]) -> None:
    """Draw the machine's roofline and the measurements below it. The points of the first engine are labelled.

    Parameters
    ----------
    axes : where to draw.
    limit : the roofline of the machine.
    points : operations per byte and operations per second, by engine and by measurement.
    """
    ridge = limit.peak / limit.bandwidth
    intensities = [intensity for by_name in points.values() for intensity, _ in by_name.values()] + [ridge]
    low, high = min(intensities) / 4, max(intensities) * 4
    xs = sorted([ridge, *(low * (high / low) ** (n / 100) for n in range(101))])
    roof = [(x, limit.attainable(x) / 1e9) for x in xs]
    axes.plot(*_columns(roof), color=GREY, linewidth=2, label="the machine's limit")
    measured = {
        engine: {name: (intensity, rate / 1e9) for name, (intensity, rate) in by_name.items()}
        for engine, by_name in points.items()
    }
    for (engine, by_name), (colour, marker, _) in zip(measured.items(), _styles(), strict=False):
        columns = _columns(by_name.values())
        axes.plot(*columns, marker, color=colour, markerfacecolor="none", markeredgewidth=1.5, label=engine)
    axes.set(xscale="log", yscale="log", xlabel="operations per byte read", ylabel="GFLOP/s")
    _use_plain_numbers(axes.xaxis)
    _use_plain_numbers(axes.yaxis)
    axes.legend(frameon=False, fontsize=SMALL, loc="lower right")
    if measured:
        marks = [point for by_name in measured.values() for point in by_name.values()]
        labels = [(name, point, COLOURS[0]) for name, point in next(iter(measured.values())).items()]
        _label_points(axes, labels, [*marks, *roof])
    _finish(axes, "Roofline of this machine, and measured rates")


def _latencies(by_load: Mapping[int, RunMetrics], metric: str) -> dict[int, Point]:
    """Return tokens per second and a latency in milliseconds, by load. Loads without that latency are left out."""
    times = {load: getattr(run, metric) for load, run in by_load.items()}
    return {load: (by_load[load].throughput, 1000 * time) for load, time in times.items() if time is not None}


def _styles() -> Iterator[tuple[str, str, Any]]:
    """Return an endless sequence of colour, marker and line style."""
    return cycle(zip(COLOURS, MARKERS, LINES, strict=True))


def _columns(points: Iterable[Point]) -> tuple[Sequence[float], Sequence[float]]:
    xs, ys = zip(*points, strict=True) if (points := list(points)) else ((), ())
    return xs, ys


def _label_points(axes: Axes, labels: Iterable[tuple[str, Point, str]], marks: Iterable[Point]) -> None:
    """Write each text beside its point, at the first position where it covers no mark and no other text."""
    axes.autoscale_view()
    scale = 72 / axes.figure.dpi  # pixels to points, approximate until the figure has its final layout
    taken = [(x - 3, y - 3, x + 3, y + 3) for x, y in (axes.transData.transform(mark) * scale for mark in marks)]
    for name, point, colour in sorted(labels, key=lambda label: label[1]):
        x, y = axes.transData.transform(point) * scale
        width, height = 0.55 * SMALL * len(name), SMALL + 1
        right, left = 6, -6 - width
        offsets = [(dx, dy) for dy in (-3, 5, -11, 13, -19, 21, -27) for dx in (right, left)]
        boxes = {(dx, dy): (x + dx, y + dy, x + dx + width, y + dy + height) for dx, dy in offsets}
        free = [offset for offset, box in boxes.items() if not any(_overlap(box, other) for other in taken)]
        offset = free[0] if free else offsets[0]
        taken.append(boxes[offset])
        axes.annotate(name, point, xytext=offset, textcoords="offset points", fontsize=SMALL, color=colour)


def _overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """Return whether two boxes (left, bottom, right, top) overlap."""
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _label_ends(axes: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Label lines beside the Axes, at the heights of their ends (x, y), shifted so that no two labels overlap."""
    axes.autoscale_view()
    to_axes = axes.transData + axes.transAxes.inverted()
    heights = [(to_axes.transform((x, y))[1], text, colour) for x, y, text, colour in ends]
    lowest = -1.0
    for height, text, colour in sorted(heights):
        lowest = max(height, lowest + LINE_HEIGHT)
        axes.text(1.02, lowest, text, transform=axes.transAxes, va="center", fontsize=SMALL + 1, color=colour)


def _use_plain_numbers(axis: Axis) -> None:
    """Write 2, 5, 10 instead of powers of ten where a logarithmic axis is short enough."""
    from matplotlib.ticker import LogFormatter

    axis.set_major_formatter(LogFormatter())
    axis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))


def _finish(axes: Axes, title: str) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, fontsize=11)
