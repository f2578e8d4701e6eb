"""`minillm trace`: show one recorded run, or two side by side, as an HTML page."""

from __future__ import annotations

import gc
import os
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from minillm.trace import Trace
from minillm.trace.roofline import Roofline
from minillm.view.browser import MAX_TRACES, write_page


def run(
    runs: Sequence[str],
    *,
    output: str | None = None,
    perfetto: str | None = None,
    roofline: Roofline | None = None,
    open_page: bool = False,
) -> None:
    """Write the page and print its path.

    Parameters
    ----------
    runs : one or two files written by `Trace.write`.
    output : the page's file; None for a file beside the first run.
    perfetto : a file for ui.perfetto.dev, in addition to the page; for a single run only.
    roofline : the machine's roofline; None for the best rates that the run itself reached.
    open_page : whether to open the page in the browser.

    Raises
    ------
    TraceError
        A file holds no run.
    ValueError
        There are more runs than a page or Perfetto can show, or an output would overwrite a run or another output.
    """
    if len(runs) > MAX_TRACES:
        raise ValueError(f"expected one run, or two to show side by side, got {len(runs)}")
    if perfetto and len(runs) > 1:
        raise ValueError(f"--perfetto writes a single run, got {len(runs)}")
    page = Path(output or os.path.splitext(runs[0])[0] + ".html")
    outputs = [page, *([Path(perfetto)] if perfetto else [])]
    _check_overwrites_nothing(outputs, runs)
    names = [Path(path).stem for path in runs]
    if len(set(names)) < len(names):  # a/run.jsonl and b/run.jsonl
        names = list(runs)
    with _without_garbage_collection():
        traces = [Trace.read(path) for path in runs]
        write_page(traces, page, names=names, roofline=roofline)
    if perfetto:
        from minillm.view.perfetto import write_perfetto

        write_perfetto(traces[0], perfetto)
    print(*outputs, sep="\n")
    if open_page:
        webbrowser.open(page.resolve().as_uri())


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable the cyclic garbage collector, which otherwise takes a third of the time to read millions of records."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _check_overwrites_nothing(outputs: Sequence[Path], runs: Sequence[str]) -> None:
    for output in outputs:
        for run in runs:
            if output.exists() and Path(run).exists() and output.samefile(run):
                raise ValueError(f"the page or the events would overwrite the run {output}; name another file")
    if len({output.resolve() for output in outputs}) < len(outputs):
        raise ValueError(f"the page and the Perfetto events would both be written to {outputs[0]}; name two files")
