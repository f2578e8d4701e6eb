"""`minillm trace`: a recorded run as a page, or two side by side."""

from __future__ import annotations

import gc
import os
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from minillm.trace import Trace
from minillm.trace.roofline import Roofline
from minillm.view.browser import MOST_TRACES, write_page


def run(
    runs: Sequence[str],
    *,
    output: str | None = None,
    perfetto: str | None = None,
    roofline: Roofline | None = None,
    open_page: bool = False,
) -> None:
    """Write the page, and print where it is.

    Parameters
    ----------
    runs : files that `Trace.write` wrote, one or two.
    output : the page's file; None for one beside the first run.
    perfetto : a file for ui.perfetto.dev, too; of one run only.
    roofline : what the machine can do; None for the best that the run itself reached.
    open_page : whether to show it in the browser.

    Raises
    ------
    TraceError
        A file holds no run.
    ValueError
        More runs than a page or Perfetto shows, or a file would be written over another.
    """
    if len(runs) > MOST_TRACES:
        raise ValueError(f"{len(runs)} runs; a page shows one, or two side by side")
    if perfetto and len(runs) > 1:
        raise ValueError(f"--perfetto writes one run, and {len(runs)} are given")
    page = Path(output or os.path.splitext(runs[0])[0] + ".html")
    written = [page, *([Path(perfetto)] if perfetto else [])]
    _check_writes_over_none(written, runs)
    names = [Path(path).stem for path in runs]
    if len(set(names)) < len(names):  # a/run.jsonl and b/run.jsonl
        names = runs
    with _no_garbage():
        traces = [Trace.read(path) for path in runs]
        write_page(traces, page, names=names, roofline=roofline)
    if perfetto:
        from minillm.view.perfetto import write_perfetto

        write_perfetto(traces[0], perfetto)
    print(*written, sep="\n")
    if open_page:
        webbrowser.open(page.resolve().as_uri())


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Where records come by the million and none goes, looking for garbage among them takes a third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _check_writes_over_none(written: Sequence[Path], runs: Sequence[str]) -> None:
    for output in written:
        for run in runs:
            if output.exists() and Path(run).exists() and output.samefile(run):
                raise ValueError(f"{output} is the run itself, which would be lost; name another file with -o")
    if len({output.resolve() for output in written}) < len(written):
        raise ValueError(f"{output} was named for the page and for Perfetto; name two files")
