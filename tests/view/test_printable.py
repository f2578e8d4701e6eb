"""Untrusted text: it cannot control a terminal, and it can be cut to any width."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from support.traces import hostile_texts

from minillm.view.printable import head, printable, tail, wrap


@given(text=hostile_texts, width=st.integers(1, 40))
def test_printable_text_can_be_cut_to_any_width(text, width):
    safe = printable(text)
    assert safe.isprintable()
    assert printable(safe) == safe
    assert len(safe) <= len(text)
    lines = [safe[line] for line in wrap(safe, width)]
    assert "".join(lines) == safe
    assert all(len(line) == 1 or sum(map(cell_len, line)) <= width for line in lines)
    assert all(len(lines) == 1 or line for line in lines)
    prefix, suffix = head(safe, width), safe[tail(safe, width)]
    for part, one_longer in ((prefix, safe[: len(prefix) + 1]), (suffix, safe[-len(suffix) - 1 :])):
        assert sum(map(cell_len, part)) <= width
        assert part == safe or sum(map(cell_len, one_longer)) > width


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("plain, 한국어, عربي, 👩", "plain, 한국어, عربي, 👩"),
        ("a\nb\tc\r\x1b[2J\x07\x7f", "a⏎b⇥c␍␛[2J␇␡"),
        ("\u202eevil\u2066", "\ufffdevil\ufffd"),
        ("\ud83d \x9b", "\ufffd \ufffd"),
        ("👩\u200d🚀❤\ufe0f\u00a0.", "👩🚀❤ ."),
    ],
)
def test_substitutes(text, safe):
    assert printable(text) == safe
