"""Are the exercises of lesson 1 right?"""

import pytest


@pytest.mark.parametrize("text", ["", "plain", "é!", "한국어", "🚀", "a\\xe2b", "<0xE2>", "line\nbreak"])
def test_visible_leaves_whole_characters_as_they_are(exercises, text):
    assert exercises.visible(text.encode()) == text


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        (b"\xe2", "<0xE2>"),
        (b"\xe2\x82 5", "<0xE2><0x82> 5"),
        (b"\x80\xff", "<0x80><0xFF>"),
        ("한".encode()[:2] + "국".encode(), "<0xED><0x95>국"),
        ("é".encode() + "🚀".encode()[:3], "é<0xF0><0x9F><0x9A>"),
        (b"\\\x9c\\", "\\<0x9C>\\"),
    ],
)
def test_visible_writes_out_bytes_that_are_no_character(exercises, raw, shown):
    assert exercises.visible(raw) == shown


@pytest.mark.parametrize(
    ("text", "stop", "length"),
    [
        ("Seoul.\nUse", "\nUser:", 4),
        ("Seoul.", "\nUser:", 0),
        ("", "stop", 0),
        ("sto", "stop", 3),
        ("to", "stop", 0),  # inside the stop string, but not its beginning
        ("stop now", "stop", 0),  # a beginning, but not at the end of the text
        ("aab", "aabaab!", 3),
        ("aabaab", "aabaac", 3),  # the longest that fits, though a longer one nearly does
        ("abab", "ababab", 4),  # longest, not first: "ab" fits as well
        ("xaa", "aaa", 2),
        ("<", "<", 0),  # all of it would not be waiting, it would be a match
        ("aaa", "aaa", 2),
    ],
)
def test_overlap_is_what_may_still_become_the_stop_string(exercises, text, stop, length):
    assert exercises.overlap(text, stop) == length


def test_overlap_agrees_with_its_definition_on_every_short_text(exercises):
    texts = [""]
    for _ in range(6):
        texts += [text + letter for text in texts[-(2 ** len(texts[-1])) :] for letter in "ab"]
    for text in texts:
        for stop in ("ab", "aab", "abab", "bbabb"):
            fitting = [n for n in range(len(stop)) if n == 0 or text.endswith(stop[:n])]
            assert exercises.overlap(text, stop) == max(fitting), (text, stop)
