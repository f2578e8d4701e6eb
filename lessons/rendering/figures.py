"""Save Matplotlib's open figures as SVG files. Each file includes a summary of the plotted data.

Two machines rarely write the same SVG, because Matplotlib versions and fonts differ. So `--check` compares figures by
their summaries, which are stored in the description field of the SVG.
"""

import html
import io
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("agg")  # draws into files without opening a window

DESCRIPTION = re.compile(r"<dc:description>(.*?)</dc:description>", re.DOTALL)
# Write text as text instead of outlines, and use the same ids in every run.
STYLE: dict[Any, str] = {"svg.fonttype": "none", "svg.hashsalt": "minillm"}


@dataclass(frozen=True)
class Figure:
    """A saved figure.

    Attributes
    ----------
    name : file name without the suffix.
    title : one line, also used as the image's alternative text.
    svg : the content of the file.
    """

    name: str
    title: str
    svg: str


def take_figures(timing: bool) -> Iterator[Figure]:
    """Save and close every open figure.

    Parameters
    ----------
    timing : whether the data depend on the machine's speed. If so, the summary omits the data.

    Raises
    ------
    ValueError
        A figure has no title, or its `num` is not a lower-case name, as in ``plt.subplots(num="kv-bytes")``.
    """
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is None:
        return
    for number in pyplot.get_fignums():
        figure = pyplot.figure(number)
        name, title = figure.get_label(), _title(figure)
        if not re.fullmatch(r"[a-z0-9-]+", name):
            raise ValueError(f'figure {number} is named {name!r}: expected plt.subplots(num="lower-case-words")')
        if not title:
            raise ValueError(f"figure {name!r} has no title: call axes.set_title or figure.suptitle")
        yield Figure(name, title, _svg(figure, title, "\n".join(_describe(figure, timing))))
        pyplot.close(figure)


def description(svg: str) -> str:
    """Return the summary that `take_figures` stored in an SVG; '' if the SVG has none."""
    found = DESCRIPTION.search(svg)
    return html.unescape(found[1]) if found else ""


def _title(figure: Any) -> str:
    titles = [figure.get_suptitle(), *(axes.get_title() for axes in figure.axes)]
    return " ".join(next(filter(None, titles), "").split())


def _svg(figure: Any, title: str, summary: str) -> str:
    metadata = {"Title": title, "Description": summary, "Date": None, "Creator": None}
    with matplotlib.rc_context(STYLE), io.StringIO() as file:
        figure.savefig(file, format="svg", metadata=metadata)
        return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def _describe(figure: Any, timing: bool) -> Iterator[str]:
    yield _title(figure)
    for axes in figure.axes:
        yield f"axes: {axes.get_title()!r}, x: {axes.get_xlabel()!r}, y: {axes.get_ylabel()!r}"
        if timing:
            yield "    (measured: the data differ from machine to machine)"
            continue
        for artist in [*axes.lines, *axes.patches, *axes.collections, *axes.images]:
            label = artist.get_label()
            label = "" if label.startswith("_") else f" {label!r}"  # Matplotlib's default labels start with _
            yield f"    {type(artist).__name__}{label}: " + "; ".join(map(_summary, _drawn_data(artist)))
        for text in axes.texts:
            yield f"    {text.get_text()!r}"


def _drawn_data(artist: Any) -> list[np.ndarray]:
    """Return the data that an artist draws: points [n, 2] in data coordinates, and values shown as colours."""
    if hasattr(artist, "get_xydata"):  # a line
        points = [artist.get_xydata()]
    elif hasattr(artist, "get_patch_transform"):  # a bar
        points = [artist.get_patch_transform().transform(artist.get_path().vertices)]
    elif hasattr(artist, "get_offsets"):  # a scatter plot or a filled area
        points = [artist.get_offsets(), *(path.vertices for path in artist.get_paths())]
    else:
        points = []
    values = getattr(artist, "get_array", lambda: None)()  # a heat map or a coloured scatter plot
    return points if values is None else [*points, values]


def _summary(data: np.ndarray) -> str:
    """Summarize an array by its shape and the range and mean of each column.

    Three digits are enough to notice any change that a reader could see.
    """
    data = np.ma.filled(np.ma.asarray(data, dtype=float), np.nan)
    columns = data.T if data.ndim == 2 and data.shape[1] == 2 else [data.ravel()]
    finite = [column[np.isfinite(column)] for column in columns]
    return f"{'x'.join(map(str, data.shape))}: " + ", ".join(_range(column) for column in finite if column.size)


def _range(values: np.ndarray) -> str:
    noise = 1e-6 * np.abs(values).max()  # a sum that cancels leaves rounding errors, which differ between machines
    low, high, mean = (0.0 if abs(x) <= noise else x for x in (values.min(), values.max(), values.mean()))
    return f"{low:.3g} .. {high:.3g} (mean {mean:.3g})"
