"""Lesson 1's exercises. `pytest lessons/01_tokens` tells you whether they are right."""

ANSWERS = {
    "visible": "minillm.tokenizer.detokenizer.visible",
    "overlap": "minillm.engine.stopping.overlap",
}


def visible(raw: bytes) -> str:
    """Bytes as text for people: bytes that are no whole character are written like `<0xE2>`.

    `visible("é!".encode())` is "é!", and `visible(b"\\xe2\\x82 5")`, the first two bytes of a euro sign before " 5", is
    "<0xE2><0x82> 5".

    Hint: `bytes.decode` takes an `errors` argument. Which of its values keeps apart what was bad from what was good?
    """
    raise NotImplementedError("your turn")


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, but not all of it.

    So many characters must wait: what comes next may complete the stop string.
    `overlap("Seoul.\\nUse", "\\nUser:")` is 4, and `overlap("Seoul.", "\\nUser:")` is 0.
    """
    raise NotImplementedError("your turn")
