"""Tests of the exercises of lesson 1."""

import pytest


@pytest.mark.parametrize("text", ["", "plain", "é!", "한국어", "🚀", "a\\xe2b", "<0xE2>", "line\nbreak"])
def test_visible_keeps_complete_characters(exercises, text):
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
def test_visible_writes_incomplete_characters_as_hexadecimal(exercises, raw, shown):
    assert exercises.visible(raw) == shown


@pytest.mark.parametrize(
    ("text", "stop", "length"),
    [
        ("Seoul.\nUse", "\nUser:", 4),
        ("Seoul.", "\nUser:", 0),
        ("", "stop", 0),
        ("sto", "stop", 3),
        ("to", "stop", 0),  # inside the stop string, but not at its start
        ("stop now", "stop", 0),  # a prefix of the stop string, but not at the end of the text
        ("aab", "aabaab!", 3),
        ("aabaab", "aabaac", 3),  # a longer suffix differs only in its last character
        ("abab", "ababab", 4),  # the longest: "ab" matches as well
        ("xaa", "aaa", 2),
        ("<", "<", 0),  # the whole stop string is a match, not a proper prefix
        ("aaa", "aaa", 2),
    ],
)
def test_overlap_is_the_length_that_may_become_the_stop_string(exercises, text, stop, length):
    assert exercises.overlap(text, stop) == length


def test_overlap_agrees_with_its_definition_on_every_short_text(exercises):
    texts = [""]
    for _ in range(6):
        texts += [text + letter for text in texts[-(2 ** len(texts[-1])) :] for letter in "ab"]
    for text in texts:
        for stop in ("ab", "aab", "abab", "bbabb"):
            matching = [n for n in range(len(stop)) if n == 0 or text.endswith(stop[:n])]
            assert exercises.overlap(text, stop) == max(matching), (text, stop)
