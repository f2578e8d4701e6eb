"""Stop strings, however the text arrives."""

from hypothesis import given
from hypothesis import strategies as st

from minillm.engine.stopping import StopMatcher

letters = st.text("ab\n", max_size=30)
stops = st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=3)


@given(pieces=st.lists(st.text("ab\n", max_size=4), max_size=12), stops=stops)
def test_the_text_ends_before_the_first_stop_string_however_it_is_cut(pieces, stops):
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push(piece) for piece in pieces)
    complete = shown + matcher.finish()
    text = "".join(pieces)
    # The simplest way to say it: as soon as a stop string is complete, cut at the first one there is.
    for end in range(len(text) + 1):
        found = [text[:end].index(stop) for stop in stops if stop in text[:end]]
        if found:
            assert matcher.matched in stops
            assert complete == shown
            # Pieces may complete two stop strings at once; the earliest beginning wins, and it is never later
            # than where a reader watching letter by letter would have stopped.
            assert text[: min(found)].startswith(complete)
            assert text[len(complete) :].startswith(matcher.matched)
            return
    assert matcher.matched is None
    assert complete == text


@given(text=letters, stops=stops)
def test_letter_by_letter_nothing_of_a_stop_string_is_ever_shown(text, stops):
    matcher = StopMatcher(stops)
    shown = ""
    for letter in text:
        shown += matcher.push(letter)
        held = text[len(shown) :]
        assert matcher.matched or not any(stop in shown for stop in stops)
        if matcher.matched:
            break
    if not matcher.matched:
        # held back is only what could still become a stop string
        held = matcher.finish()
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_a_stop_string_that_straddles_pieces():
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
