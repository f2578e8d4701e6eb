"""StopMatcher: text that arrives in pieces ends before the first stop string."""

from hypothesis import given
from hypothesis import strategies as st

from minillm.engine.stopping import StopMatcher

letters = st.text("ab\n", max_size=30)
stops = st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=3)


@given(pieces=st.lists(st.text("ab\n", max_size=4), max_size=12), stops=stops)
def test_the_text_ends_before_the_first_stop_string_for_any_pieces(pieces, stops):
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push(piece) for piece in pieces)
    complete = shown + matcher.finish()
    text = "".join(pieces)
    # The simplest implementation: as soon as the text contains a stop string, cut it before the first one.
    for end in range(len(text) + 1):
        found = [text[:end].index(stop) for stop in stops if stop in text[:end]]
        if found:
            assert matcher.matched in stops
            assert complete == shown
            # A piece may complete two stop strings at once. The one that begins first counts, and it never begins later
            # than the one that would be found letter by letter.
            assert text[: min(found)].startswith(complete)
            assert text[len(complete) :].startswith(matcher.matched)
            return
    assert matcher.matched is None
    assert complete == text


@given(text=letters, stops=stops)
def test_no_stop_string_is_shown_letter_by_letter(text, stops):
    matcher = StopMatcher(stops)
    shown = ""
    for letter in text:
        shown += matcher.push(letter)
        assert matcher.matched or not any(stop in shown for stop in stops)
        if matcher.matched:
            break
    if not matcher.matched:
        # Only text that may still become a stop string is held back.
        held = matcher.finish()
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_a_stop_string_in_several_pieces():
    matcher = StopMatcher(["\nUser:"])
    assert [matcher.push(piece) for piece in ("Fine.\nUs", "ual", "ly\nUser", ": hi", " more")] == [
        "Fine.",
        "\nUsual",
        "ly",
        "",
        "",
    ]
    assert matcher.matched == "\nUser:"
    assert matcher.finish() == ""
