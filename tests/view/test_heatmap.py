"""Heat maps of attention: in a terminal and as a page, every cell agrees with its weight, whatever the texts are."""

import io
import re
import runpy
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from minillm import MinillmError
from minillm.view import HeatMap, heat_page
from minillm.view.heatmap import BOUNDS, LABEL, shade

EXAMPLE = Path(__file__).parents[2] / "examples" / "inspect_attention.py"
HOSTILE = [
    "<script>alert(1)</script>", "</td></table>", "&lt;", '"', "'", "\x1b[31m", "\n", "\r", "\x00", "\u202e", "\u2066",
    "\ud83d", "한국", "🍕", "\u0301", "[bold]", "[/]", "\\", "`", " ", "", "a\tb", "x" * 99, "--weight:50%",
]  # fmt: skip


@st.composite
def heats(draw):
    texts = draw(st.lists(st.sampled_from(HOSTILE) | st.text(max_size=12), min_size=1, max_size=40))
    random = np.random.default_rng(draw(st.integers(0, 999)))
    weights = np.tril(random.random((len(texts), len(texts))) ** draw(st.sampled_from([1, 9])))
    return HeatMap(texts, (weights / weights.sum(axis=1, keepdims=True)).tolist(), draw(st.sampled_from(HOSTILE[:12])))


def printed(heat, width, **options):
    console = Console(file=io.StringIO(), width=width, highlight=False, **options)
    console.print(heat)
    return console.file.getvalue()


def cut(line, start, stop):
    """The text in the terminal cells from `start` to `stop`. Wide characters take two cells."""
    cells = [character for character in line for _ in range(cell_len(character))]
    return "".join(cells[start:stop])


@settings(max_examples=60)
@given(heats(), st.integers(60, 200))
def test_in_a_terminal_every_cell_has_the_shade_of_its_weight(heat, width):
    count, digits = len(heat.texts), len(str(len(heat.texts) - 1))
    left = digits + 1 + LABEL + 1
    room = max(8, width - left - len("  ") - digits - 1 - LABEL - len(" 0.00"))
    step = 2 if 2 * count <= room else 1
    panels = [range(first, min(first + room // step, count)) for first in range(0, count, room // step)]
    lines = printed(heat, width).split("\n")
    assert max(map(cell_len, lines)) <= width
    rows = [line for line in lines if cut(line, 0, digits).strip().isdigit() and cut(line, digits, digits + 1) == " "]
    expected = [(t, columns) for columns in panels for t in range(columns.start, count)]
    assert [int(cut(line, 0, digits)) for line in rows] == [t for t, _ in expected]
    for line, (t, columns) in zip(rows, expected, strict=True):
        cells = [shade(heat.weights[t][n], "·░▒▓█") * step if n <= t else " " * step for n in columns]
        strongest = max(range(t + 1), key=lambda n: heat.weights[t][n])
        assert cut(line, left, left + step * len(columns)) == "".join(cells)
        end = left + step * len(columns) + 2
        assert int(cut(line, end, end + digits)) == strongest
        assert line.endswith(f" {heat.weights[t][strongest]:.2f}")


@settings(max_examples=60)
@given(heats(), st.integers(20, 200), st.booleans())
def test_no_text_can_control_the_terminal(heat, width, coloured):
    text = printed(heat, width, force_terminal=coloured, color_system="truecolor" if coloured else None)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text) if coloured else text  # rich's own colours
    assert all(character.isprintable() or character == "\n" for character in plain)
    if not coloured:
        assert "\x1b" not in text


def test_a_terminal_without_unicode_gets_ascii():
    heat = HeatMap([" a", "b" * 20, "c"], [[1.0, 0, 0], [0.5, 0.5, 0], [0.1, 0.15, 0.75]])
    console = Console(file=io.TextIOWrapper(io.BytesIO(), encoding="ascii"), width=80)
    console.print(heat)
    console.file.flush()
    text = console.file.buffer.getvalue().decode("ascii")
    assert "2 c          ::::##  2 c          0.75" in text
    assert "1 bbbbbbbbb~ %%%%    0 _a         0.50" in text


class Page(HTMLParser):
    """The rows of the page's table, and the names of all elements."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.rows, self.cell = [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append((tag, dict(attributes), []))
            self.cell = self.rows[-1][-1][2]

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self.cell = None

    def handle_data(self, data):
        if self.cell is not None:
            self.cell.append(data)


@settings(max_examples=60)
@given(heats())
def test_the_page_is_one_table_of_weights_without_scripts(heat):
    html, count = heat_page(heat, note='<img src="x">'), len(heat.texts)
    page = Page(html)
    expected = {"html", "head", "meta", "title", "style", "body", "h1", "p", "div", "table", "thead", "tbody"}
    assert set(page.tags) == expected | {"tr", "th", "td", "span", "bdi", "small"}
    assert page.tags.count("table") == 1
    assert "default-src 'none'" in html
    assert not re.search(r"https?:|url\(|@import|<script|<img|<link", html)
    header, *rows = page.rows
    assert len(rows) == count
    assert ["".join(text) for _, _, text in header[1:-1]] == [f"{heat.label(n)} {n}" for n in range(count)]
    for t, row in enumerate(rows):
        (_, scope, name), *cells = row
        assert scope == {"scope": "row"}
        assert "".join(name) == f"{heat.label(t)} {t}"
        for n, (_, attributes, text) in enumerate(cells[: t + 1]):
            weight = heat.weights[t][n]
            assert attributes["style"] == f"--weight:{weight:.1%}"
            assert "".join(text) == (f"{100 * weight:.0f}" if weight >= 0.095 else "")
            assert ("most" in attributes["class"].split()) == (n == heat.strongest(t))
        assert (
            "".join(cells[-1][2]) == f"{heat.label(heat.strongest(t))} {heat.strongest(t)} {max(heat.weights[t]):.0%}"
        )
        spans = [int(attributes.get("colspan", 1)) for _, attributes, _ in cells]
        assert sum(spans) == count + 1
    html.encode("utf-8")


def test_shades_change_at_the_bounds():
    assert [shade(bound, "01234") for bound in (0.0, *BOUNDS)] == list("01234")
    assert [shade(np.nextafter(bound, 0), "01234") for bound in BOUNDS] == list("0123")


def test_weights_of_another_shape_are_rejected():
    with pytest.raises(ValueError, match=r"expected weights of shape \[2, 2\] for 2 tokens, got 2 rows of 3"):
        HeatMap(["a", "b"], [[1.0, 0, 0], [1.0, 0, 0]])


# --- the example --------------------------------------------------------------------------------------------------


def run(monkeypatch, capsys, *options):
    """The output of the example."""
    monkeypatch.setattr(sys, "argv", ["inspect_attention.py", *map(str, options)])
    monkeypatch.setenv("COLUMNS", "80")
    runpy.run_path(str(EXAMPLE))["main"]()
    return capsys.readouterr().out


def test_the_default_prompt_shows_an_induction_head(default_gguf, tmp_path, monkeypatch, capsys):
    page = tmp_path / "attention.html"
    out = run(monkeypatch, capsys, "--model", default_gguf, "--html", page)
    heads = re.search(r"^Layer (\d+), head (\d+) of .*gguf$", out, flags=re.MULTILINE)
    share = int(re.search(r"(\d+)% of its weight is on the token after an earlier occurrence", out)[1])
    assert share > 80
    assert re.search(r"^12 ␣w .* 2 izard +0\.9\d$", out, flags=re.MULTILINE)  # the second "w|izard"
    assert max(map(cell_len, out.replace(str(page), "").splitlines())) <= 80
    assert f"<h1>Layer {heads[1]}, head {heads[2]} of " in page.read_text(encoding="utf-8")


def test_heads_are_chosen_by_option_or_by_pattern(tiny_gguf, monkeypatch, capsys):
    model = ("--model", tiny_gguf, "--backend", "numpy")
    for options, expected in (
        (("--layer", 1, "--head", 2), r"^Layer 1, head 2 of"),
        (("--layer", 0), r"^Layer 0, head \d of"),
        (("--head", 3, "--prompt", "abc"), r"^Layer \d, head 3 of"),
        (("--prompt", "abc"), r"of its weight is on the previous token"),
        (("--prompt", "abcxab"), r"of its weight is on the token after an earlier occurrence"),
        (("--prompt", "a"), r"A single token can only attend to itself"),
    ):
        out = run(monkeypatch, capsys, *model, *options)
        assert re.search(expected, out, flags=re.MULTILINE), out
    for options, message in (
        (("--layer", 2), "there is no layer 2; this model has 0 to 1"),
        (("--head", -1), "there is no head -1; this model has 0 to 3"),
        (("--prompt", ""), "the prompt is empty"),
        (("--prompt", "x" * 300), "300 tokens"),
        (("--html", "/nowhere/at/all.html"), "/nowhere/at/all.html"),
    ):
        with pytest.raises((MinillmError, ValueError, OSError), match=message):  # `run_safely` prints them
            run(monkeypatch, capsys, *model, *options)


def test_the_head_with_the_clearest_pattern_is_chosen():
    """One of the random heads gets each pattern."""
    example = runpy.run_path(str(EXAMPLE))
    ids, random = [1, 2, 3, 1, 2, 3, 1], np.random.default_rng(0)
    weights = np.tril(random.random((3, 4, 7, 7))) * 0.1
    weights[2, 1] = np.eye(7)[[0, 0, 1, 2, 3, 4, 5]]  # the previous token
    weights[1, 3] = np.eye(7)[[0, 1, 2, 1, 2, 3, 4]]  # the token after an earlier occurrence
    assert example["choose_head"](weights, ids)[:2] == (1, 3)
    assert example["choose_head"](weights, [1, 2, 3, 4, 5, 6, 7])[:2] == (2, 1)
    assert example["choose_head"](weights, [1, 2, 3, 4, 5, 6, 7], layer=2)[:2] == (2, 1)
    assert example["choose_head"](weights, ids, head=3)[:2] == (1, 3)
    assert example["choose_head"](weights, ids, layer=0, head=2)[:2] == (0, 2)
