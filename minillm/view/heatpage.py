"""A HeatMap as one self-contained HTML page: a table, which a screen reader can read and a keyboard scroll.

Nothing on it is fetched and nothing runs: no script, and a policy that would allow none. Every text is escaped, and
kept apart from its neighbours' reading direction.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from minillm.view.heatmap import HeatMap
from minillm.view.shown import shown

NAMED = 0.095  # shares that round to 0.1 or more are written into their cells
STRONG = 0.55  # from this share on a cell has so strong a colour that its number has to change its own

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
td.at { background: color-mix(in oklab, var(--hot) var(--share), var(--paper));
  box-shadow: inset 0 0 0 1px var(--line); }
td.strong { color: var(--on-hot); }
td.most { outline: 2px solid var(--mark); outline-offset: -2px; }
tbody tr:hover th { color: var(--mark); }
td.said { padding: 0 .5rem; text-align: left; white-space: pre; color: var(--quiet); }
""".strip()


def heat_page(heat: HeatMap, note: str = "") -> str:
    """The page. `note` is a paragraph under the title, such as how the head was chosen."""
    title = escape(shown(heat.title), quote=True)
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
            f"<p>{escape(note)} A row is a token, a column one that it may look at: itself or an earlier one. A cell "
            "is the share of its look, in percent where that is 10 or more; the largest of each row is framed.</p>",
            f'<div class="map" tabindex="0" role="region" aria-label="{title}">',
            "<table>",
            "<thead><tr><th>token \\ looks at</th>",
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
    """A token, the cells of those it may look at, and whom it looks at most."""
    strongest, later = heat.strongest(position), len(heat.texts) - position - 1
    cells = "".join(_cells(heat, position, strongest))
    unseen = f'<td colspan="{later}" aria-hidden="true"></td>' if later else ""
    most = f'<td class="said">{_token(heat, strongest)} {heat.weights[position][strongest]:.0%}</td>'
    return f'<tr><th scope="row">{_token(heat, position)}</th>{cells}{unseen}{most}</tr>'


def _cells(heat: HeatMap, position: int, strongest: int) -> Iterator[str]:
    for n in range(position + 1):
        share = float(heat.weights[position][n])
        kinds = ["at", *["strong"] * (share >= STRONG), *["most"] * (n == strongest)]
        number = f"{100 * share:.0f}" if share >= NAMED else ""
        yield f'<td class="{" ".join(kinds)}" style="--share:{share:.1%}">{number}</td>'


def _token(heat: HeatMap, position: int) -> str:
    """A token's text, escaped and apart, with its number, for texts come more than once."""
    return f"<bdi>{escape(heat.label(position))}</bdi> <small>{position}</small>"
