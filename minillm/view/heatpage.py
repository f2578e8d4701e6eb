"""A HeatMap as one self-contained HTML page. It is a table, so that screen readers and keyboards can use it.

The page fetches nothing and runs no script; its content security policy forbids both. Every text is escaped, and
isolated so that its writing direction does not affect its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from minillm.view.heatmap import HeatMap
from minillm.view.printable import printable

MIN_NUMBERED = 0.095  # weights that round to 10% or more are written into their cells
MIN_STRONG = 0.55  # from this weight on, the cell's colour is so dark that its number needs a light one

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --text: #1a1a1a; --quiet: #595959; --line: #d0d0d0;
  --hot: #00457a; --on-hot: #ffffff; --mark: #b34700; }
@media (prefers-color-scheme: dark) { :root { --paper: #16181c; --text: #e8e8e8; --quiet: #a8a8a8; --line: #3a3d44;
  --hot: #8fd0ff; --on-hot: #08131c; --mark: #ffb454; } }
body { margin: 0 auto; padding: 1rem; max-width: 78rem; background: var(--paper); color: var(--text);
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.25rem; margin: 0 0 .5rem; }
p { margin: 0 0 1rem; color: var(--quiet); max-width: 46rem; }
.map { width: fit-content; max-width: 100%; box-sizing: border-box; overflow: auto; max-height: 85vh;
  border: 1px solid var(--line); border-radius: 4px; }
.map:focus-visible { outline: 3px solid var(--mark); outline-offset: 2px; }
table { border-collapse: separate; border-spacing: 1px; font: .75rem/1 ui-monospace, monospace; }
th { font-weight: normal; color: var(--text); background: var(--paper); white-space: pre; }
thead th { position: sticky; top: 0; z-index: 1; vertical-align: bottom; padding: 4px 0; height: 5rem; }
thead th span { writing-mode: vertical-rl; max-height: 9rem; overflow: hidden; }
tbody th { position: sticky; left: 0; text-align: right; padding: 0 .5rem; max-width: 7.5rem; overflow: hidden;
  text-overflow: ellipsis; }
thead th:first-child { left: 0; z-index: 2; padding: 4px .5rem; color: var(--quiet); white-space: normal; }
small { color: var(--quiet); font-size: inherit; }
td { min-width: 1.7rem; height: 1.7rem; padding: 0; text-align: center; }
td.weight { background: color-mix(in oklab, var(--hot) var(--weight), var(--paper));
  box-shadow: inset 0 0 0 1px var(--line); }
td.strong { color: var(--on-hot); }
td.most { outline: 2px solid var(--mark); outline-offset: -2px; }
tbody tr:hover th { color: var(--mark); }
td.summary { padding: 0 .5rem; text-align: left; white-space: pre; color: var(--quiet); }
""".strip()


def heat_page(heat: HeatMap, note: str = "") -> str:
    """Return the page. `note` is a paragraph under the title, such as the reason for the choice of the head."""
    title = escape(printable(heat.title), quote=True)
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title>",
            f"<style>\n{STYLE}\n</style>",
            "</head>",
            "<body>",
            f"<h1>{title}</h1>",
            f"<p>{escape(note)} Each row is a token. Its columns are the tokens up to and including itself. A cell is "
            "an attention weight, in percent if it is 10 or more. The largest weight of each row is framed.</p>",
            f'<div class="map" tabindex="0" role="region" aria-label="{title}">',
            "<table>",
            "<thead><tr><th>token \\ attends to</th>",
            *(f'<th scope="col"><span>{_token(heat, n)}</span></th>' for n in range(len(heat.texts))),
            '<th scope="col">most</th></tr></thead>',
            "<tbody>",
            *(_row(heat, position) for position in range(len(heat.texts))),
            "</tbody>",
            "</table>",
            "</div>",
            "</body>",
            "</html>",
            "",
        ]
    )


def _row(heat: HeatMap, position: int) -> str:
    """Return a table row: the token, its weights, and the token that it attends to most."""
    strongest, later = heat.strongest(position), len(heat.texts) - position - 1
    cells = "".join(_cells(heat, position, strongest))
    unseen = f'<td colspan="{later}" aria-hidden="true"></td>' if later else ""
    summary = f'<td class="summary">{_token(heat, strongest)} {heat.weights[position][strongest]:.0%}</td>'
    return f'<tr><th scope="row">{_token(heat, position)}</th>{cells}{unseen}{summary}</tr>'


def _cells(heat: HeatMap, position: int, strongest: int) -> Iterator[str]:
    for n in range(position + 1):
        weight = float(heat.weights[position][n])
        classes = ["weight", *["strong"] * (weight >= MIN_STRONG), *["most"] * (n == strongest)]
        number = f"{100 * weight:.0f}" if weight >= MIN_NUMBERED else ""
        yield f'<td class="{" ".join(classes)}" style="--weight:{weight:.1%}">{number}</td>'


def _token(heat: HeatMap, position: int) -> str:
    """Return a token's text, escaped and isolated, with its position, because texts can repeat."""
    return f"<bdi>{escape(heat.label(position))}</bdi> <small>{position}</small>"
