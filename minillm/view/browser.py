"""The browser view: one or two traces as a single HTML file. It needs neither a network nor a server.

The page contains all of its scripts and styles. Its content security policy allows no others, and forbids every network
request. The content of the traces is data: one block of JSON, drawn on canvases or inserted into the page as text.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from minillm.trace import Trace
from minillm.trace.roofline import Roofline
from minillm.view.page.data import page_data, palette

MAX_TRACES = 2
SCRIPTS = (  # in this order: each file uses only the ones before it
    "replay", "run", "clock", "axis", "draw", "timeline", "charts", "pool", "batch", "wording", "tables", "panel",
    "main",
)  # fmt: skip


def write_page(
    traces: Sequence[Trace],
    path: str | os.PathLike[str],
    *,
    names: Sequence[str] | None = None,
    roofline: Roofline | None = None,
) -> None:
    """Write the page of one trace, or of two side by side, to `path`. For the other parameters see `page`.

    Raises
    ------
    OSError
        The file cannot be written.
    """
    Path(path).write_text(page(traces, names=names, roofline=roofline), encoding="utf-8")


def page(traces: Sequence[Trace], *, names: Sequence[str] | None = None, roofline: Roofline | None = None) -> str:
    """Return the HTML page of one trace, or of two side by side on a common clock.

    Parameters
    ----------
    traces : one or two traces.
    names : the title of each trace; None for its policy.
    roofline : the roofline of the machine that ran them, which gives the shortest possible time of each step; None for
        the best rates that any step of the trace reached.

    Raises
    ------
    ValueError
        There are no traces, or more than two; or the number of names differs from the number of traces.
    """
    if not 1 <= len(traces) <= MAX_TRACES:
        raise ValueError(f"expected one trace, or two to show side by side, got {len(traces)}")
    names = [trace.facts.policy for trace in traces] if names is None else names
    runs = [page_data(trace, name, roofline) for trace, name in zip(traces, names, strict=True)]
    style = _asset("style.css")
    script = '(() => {\n"use strict";\n' + "\n".join(_asset(f"js/{name}.js") for name in SCRIPTS) + "})();\n"
    values = {
        "policy": f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; "
        "form-action 'none'",
        "style": style,
        "script": script,
        "data": _script_json({"palette": palette(), "runs": runs}),
    }
    first, *rest = _asset("page.html").split("{{")
    return first + "".join(values[name] + text for name, _, text in (piece.partition("}}") for piece in rest))


def _asset(name: str) -> str:
    """Read one of the page's HTML, CSS and JavaScript files."""
    return files("minillm.view.page").joinpath(name).read_text(encoding="utf-8")


def _script_json(value: object) -> str:
    """Return JSON for a script element. Without "<" it cannot contain `</script`, which would end the element."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _hash(text: str) -> str:
    """Return the hash that identifies an inline style or script in a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
