"""The browser view: one or two traces as one page that needs nothing else, neither a network nor a server.

All scripts and styles stand in the page, and its content security policy lets run no others and lets nothing load or
leave. What the traces say is data to it: a block of JSON, drawn on canvases or put into the page as text.
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
from minillm.view.page.data import data, look

MOST_TRACES = 2
SCRIPTS = (  # in this order; each is one idea, and uses those before it
    "replay", "run", "clock", "axis", "draw", "timeline", "charts", "pool", "batch", "words", "tables", "panel", "main",
)  # fmt: skip


def write_page(
    traces: Sequence[Trace],
    path: str | os.PathLike,
    *,
    names: Sequence[str] | None = None,
    roofline: Roofline | None = None,
) -> None:
    """Write the page of one trace, or of two side by side, to `path`. Parameters and errors are those of `page`.

    Raises
    ------
    OSError
        It cannot be written.
    """
    Path(path).write_text(page(traces, names=names, roofline=roofline), encoding="utf-8")


def page(traces: Sequence[Trace], *, names: Sequence[str] | None = None, roofline: Roofline | None = None) -> str:
    """One trace, or two side by side on one clock, as the HTML of one page.

    Parameters
    ----------
    traces : one or two.
    names : what each is to be called; None for its policy.
    roofline : of the machine that ran them, for the estimate of each step; None for the best a step of each reached.

    Raises
    ------
    ValueError
        There are none, or more than two; or not as many names as traces.
    """
    if not 1 <= len(traces) <= MOST_TRACES:
        raise ValueError(f"a page shows one trace or two side by side, not {len(traces)}")
    names = [trace.facts.policy for trace in traces] if names is None else names
    runs = [data(trace, name, roofline) for trace, name in zip(traces, names, strict=True)]
    style = _part("style.css")
    script = '(() => {\n"use strict";\n' + "\n".join(_part(f"js/{name}.js") for name in SCRIPTS) + "})();\n"
    parts = {
        "policy": f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; "
        "form-action 'none'",
        "style": style,
        "script": script,
        "data": _json({"look": look(), "runs": runs}),
    }
    pieces = _part("page.html").split("{{")
    return pieces[0] + "".join(parts[name] + rest for name, _, rest in (piece.partition("}}") for piece in pieces[1:]))


def _part(name: str) -> str:
    """A file of the page."""
    return files("minillm.view.page").joinpath(name).read_text(encoding="utf-8")


def _json(value: object) -> str:
    """As JSON that no text in it can end: a script element is over at the next `</script`, wherever that stands."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _hash(text: str) -> str:
    """By which the policy knows an inline style or script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
