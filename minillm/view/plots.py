"""Pictures of what was measured or worked out: each function draws into an Axes what it is given, and measures nothing.

Made with Matplotlib (the extra `plot`), which nothing here imports before it draws. Colours are those of Okabe and Ito
(2008, "Color Universal Design"), told apart by colour-blind people; whatever differs in colour differs in its marker or
its line as well, and so does on paper.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING

from minillm.trace import RunMetrics
from minillm.trace.roofline import Roofline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "D", "^", "v", "P")
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))
GREY = "#555555"
SMALL = 8  # points, of what stands beside a mark
LINE_HEIGHT = 0.055  # of the Axes: how far apart labels beside it must be, at least

LATENCIES = {"tpot": "time per output token", "ttft": "time to first token"}


def latency_against_throughput(axes: Axes, runs: Mapping[str, Mapping[int, RunMetrics]], latency: str = "tpot") -> None:
    """What more tokens a second cost each user: a line a policy, a point a load.

    Parameters
    ----------
    axes : where to draw.
    runs : by policy, and by its load: how many clients were served at once.
    latency : "tpot" or "ttft". The median is drawn with filled marks, the 95th percentile with hollow ones.
    """
    marks, labels = [], []
    for (policy, by_load), (colour, marker, _) in zip(runs.items(), _styles(), strict=False):
        median, slow = (_latencies(by_load, f"{which}_{latency}") for which in ("median", "p95"))
        style = {"marker": marker, "color": colour, "linewidth": 1.5}
        axes.plot(*_columns(median.values()), "-", **style)
        axes.plot(*_columns(slow.values()), "--", markerfacecolor="white", **style)
        marks += [*median.values(), *slow.values()]
        for load, point in median.items():
            labels.append((f"{load}, {policy}" if load == max(median) else str(load), point, colour))
    keys = [
        axes.plot([], [], line, marker="o", color=GREY, markerfacecolor=fill, label=label)[0]
        for label, line, fill in (("median", "-", GREY), ("95th percentile", "--", "white"))
    ]
    axes.set(xlabel="tokens a second, all clients together", ylabel=f"{LATENCIES[latency]}, ms")
    axes.set_yscale("log")
    axes.set_xlim(left=0)
    _plain_numbers(axes.yaxis)
    axes.legend(handles=keys, frameon=False, fontsize=SMALL, title="numbers: clients at once", title_fontsize=SMALL)
    _name_points(axes, labels, marks)
    _finish(axes, f"{LATENCIES[latency].capitalize()} against throughput")


def decode_rate(axes: Axes, rates: Mapping[str, Mapping[int, float]], limit: Mapping[int, float]) -> None:
    """How many tokens a second decode makes for a batch: a line an engine, and what the machine allows at best.

    Parameters
    ----------
    axes : where to draw.
    rates : by engine, and by the number of sequences in the batch: tokens a second of all together.
    limit : by the number of sequences: tokens a second at best.
    """
    ends = []
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
    axes.set(xlabel="sequences in the batch", ylabel="tokens a second, all together")
    if len(sizes) > 1:
        axes.set_xlim(sizes[0], sizes[-1])
    _plain_numbers(axes.yaxis)
    _label_ends(axes, ends)
    _finish(axes, "Decode rate against batch size")


def kv_bytes(
    axes: Axes,
    bytes_per_token: Mapping[str, float],
    levels: Mapping[str, float],
    tokens: tuple[int, int] = (100, 1_000_000),
) -> None:
    """What the KV cache takes as its tokens become more.

    Parameters
    ----------
    axes : where to draw.
    bytes_per_token : by whose cache it is (a model, or what its numbers are stored as).
    levels : bytes to compare with, by what they are: the weights, a memory. Each is a level line.
    tokens : fewest and most that are drawn.
    """
    from matplotlib.ticker import EngFormatter

    ends = []
    for (name, size), (colour, _, line) in zip(bytes_per_token.items(), _styles(), strict=False):
        axes.plot(tokens, [count * size for count in tokens], linestyle=line, color=colour, linewidth=2)
        ends.append((tokens[1], tokens[1] * size, name, colour))
    axes.set(xscale="log", yscale="log", xlim=tokens, xlabel="tokens held, of all sequences together")
    axes.set_ylabel("KV cache")
    axes.yaxis.set_major_formatter(EngFormatter(unit="B"))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    for name, size in levels.items():
        axes.axhline(size, color=GREY, linewidth=1)
        # Its name stands at the end where the other lines are further away.
        start, end = (
            min(abs(math.log(size / (count * each))) for each in bytes_per_token.values()) for count in tokens
        )
        x, side, shift = (tokens[0], "left", 4) if start >= end else (tokens[1], "right", -4)
        style = {"textcoords": "offset points", "fontsize": SMALL + 1, "color": GREY, "ha": side}
        axes.annotate(name, (x, size), xytext=(shift, 3), **style)
    _label_ends(axes, ends)
    _finish(axes, "What the KV cache takes")


def roofline(axes: Axes, limit: Roofline, points: Mapping[str, Mapping[str, tuple[float, float]]]) -> None:
    """The machine's limit, and what was measured below it. The first engine's points are named.

    Parameters
    ----------
    axes : where to draw.
    limit : what the machine can do at best.
    points : by engine, and by what was measured: operations for every byte, and operations a second.
    """
    ridge = limit.peak / limit.bandwidth
    intensities = [intensity for by_name in points.values() for intensity, _ in by_name.values()] + [ridge]
    low, high = min(intensities) / 4, max(intensities) * 4
    reach = sorted([ridge, *(low * (high / low) ** (n / 100) for n in range(101))])
    roof = [(x, limit.attainable(x) / 1e9) for x in reach]
    axes.plot(*_columns(roof), color=GREY, linewidth=2, label="the machine's limit")
    drawn = {
        engine: {name: (intensity, rate / 1e9) for name, (intensity, rate) in by_name.items()}
        for engine, by_name in points.items()
    }
    for (engine, by_name), (colour, marker, _) in zip(drawn.items(), _styles(), strict=False):
        columns = _columns(by_name.values())
        axes.plot(*columns, marker, color=colour, markerfacecolor="none", markeredgewidth=1.5, label=engine)
    axes.set(xscale="log", yscale="log", xlabel="operations for every byte read", ylabel="GFLOP/s")
    _plain_numbers(axes.xaxis)
    _plain_numbers(axes.yaxis)
    axes.legend(frameon=False, fontsize=SMALL, loc="lower right")
    if drawn:
        others = [point for by_name in drawn.values() for point in by_name.values()]
        names = [(name, point, COLOURS[0]) for name, point in next(iter(drawn.values())).items()]
        _name_points(axes, names, [*others, *roof])
    _finish(axes, "The roofline of this machine, and what reaches it")


def _latencies(by_load: Mapping[int, RunMetrics], name: str) -> dict[int, tuple[float, float]]:
    """By load: tokens a second, and the milliseconds that the run's metric of that name tells, if it does."""
    times = {load: getattr(run, name) for load, run in by_load.items()}
    return {load: (by_load[load].throughput, 1000 * time) for load, time in times.items() if time is not None}


def _styles() -> Iterator[tuple[str, str, object]]:
    """Colour, marker and line for one thing after another."""
    return cycle(zip(COLOURS, MARKERS, LINES, strict=True))


def _columns(points: Iterable[tuple[float, float]]) -> tuple[Sequence[float], Sequence[float]]:
    xs, ys = zip(*points, strict=True) if (points := list(points)) else ((), ())
    return xs, ys


def _name_points(
    axes: Axes, labels: Iterable[tuple[str, tuple[float, float], str]], marks: Iterable[tuple[float, float]]
) -> None:
    """Write each text beside its point, at the first place where it hides no mark and no other text."""
    axes.autoscale_view()
    scale = 72 / axes.figure.dpi  # to points, as near as can be known before the layout is
    taken = [(x - 3, y - 3, x + 3, y + 3) for x, y in (axes.transData.transform(mark) * scale for mark in marks)]
    for name, point, colour in sorted(labels, key=lambda label: label[1]):
        x, y = axes.transData.transform(point) * scale
        width, height = 0.55 * SMALL * len(name), SMALL + 1
        right, left = 6, -6 - width
        places = [(dx, dy) for dy in (-3, 5, -11, 13, -19, 21, -27) for dx in (right, left)]
        boxes = {(dx, dy): (x + dx, y + dy, x + dx + width, y + dy + height) for dx, dy in places}
        free = [place for place, box in boxes.items() if not any(_overlap(box, other) for other in taken)]
        place = free[0] if free else places[0]
        taken.append(boxes[place])
        axes.annotate(name, point, xytext=place, textcoords="offset points", fontsize=SMALL, color=colour)


def _overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """Whether two boxes (left, bottom, right, top) have a point in common."""
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _label_ends(axes: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Name lines beside the Axes, each as high as its end (x, y) or a little off, so that no two labels overlap."""
    axes.autoscale_view()
    to_axes = axes.transData + axes.transAxes.inverted()
    heights = [(to_axes.transform((x, y))[1], text, colour) for x, y, text, colour in ends]
    lowest = -1.0
    for height, text, colour in sorted(heights):
        lowest = max(height, lowest + LINE_HEIGHT)
        axes.text(1.02, lowest, text, transform=axes.transAxes, va="center", fontsize=SMALL + 1, color=colour)


def _plain_numbers(axis: Axis) -> None:
    """2, 5, 10 in place of powers, where a logarithmic axis is short enough to name them."""
    from matplotlib.ticker import LogFormatter

    axis.set_major_formatter(LogFormatter())
    axis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))


def _finish(axes: Axes, title: str) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, fontsize=11)
