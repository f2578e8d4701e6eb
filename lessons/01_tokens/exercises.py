"""The exercises of lesson 1. Run `pytest lessons/01_tokens` to test your solutions."""

ANSWERS = {
    "visible": "minillm.tokenizer.detokenizer.visible",
    "overlap": "minillm.engine.stopping.overlap",
}


def visible(raw: bytes) -> str:
    """Return bytes as readable text. Each byte that is not part of a complete character is written like `<0xE2>`.

    `visible("é!".encode())` is "é!". `visible(b"\\xe2\\x82 5")`, the first two bytes of a euro sign before " 5", is
    "<0xE2><0x82> 5".

    Hint: `bytes.decode` has a parameter `errors`. Which of its values keeps invalid bytes distinguishable from text?
    """
    raise NotImplementedError("your turn")


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`.

    That many characters must be held back, because the next text may complete the stop string.
    `overlap("Seoul.\\nUse", "\\nUser:")` is 4, and `overlap("Seoul.", "\\nUser:")` is 0.
    """
    raise NotImplementedError("your turn")
