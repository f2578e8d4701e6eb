"""Detokenizing: token ids back to text, one at a time, never showing half a character.

A token is a piece of *bytes*, not of text: an emoji may arrive in four tokens of one byte each. In the two
kinds of tokenizer that language models use, every token stands for fixed bytes, so the text is the UTF-8
decoding of their concatenation, and streaming is what any incremental UTF-8 decoder does: hold back the
bytes of an unfinished character. Both are exact, and cost the same for the thousandth token as for the first.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import tokenizers

MAX_HELD_TOKENS = 8  # a window whose end never becomes readable is shown as it is after this many tokens
BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class StreamingDecoder(Protocol):
    """Text from tokens as they come: all pushes and the finish together are `Tokenizer.decode` of all ids."""

    def push(self, token_id: int) -> str:
        """The text this token completes; `""` when only part of a character has arrived."""

    def finish(self) -> str:
        """What was held back, as U+FFFD where it is half a character. The decoder then starts afresh."""


@dataclass(frozen=True)
class TokenBytes:
    """How a tokenizer's tokens stand for bytes, and how many spaces its texts lose at their beginning."""

    of: Callable[[str], bytes]
    leading_spaces: int = 0

    def stream(self, token_of: Callable[[int], str | None]) -> ByteStream:
        """A decoder for ids, given what reads an id: the token's vocabulary form, or None to leave it out."""
        return ByteStream(self, token_of)


class ByteStream:
    """A decoder for tokens that stand for fixed bytes: an incremental UTF-8 decoder does the waiting."""

    def __init__(self, token_bytes: TokenBytes, token_of: Callable[[int], str | None]):
        self._bytes, self._token_of = token_bytes, token_of
        self._start()

    def _start(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._spaces = self._bytes.leading_spaces

    def push(self, token_id: int) -> str:
        """See `StreamingDecoder`."""
        token = self._token_of(token_id)
        return "" if token is None else self._stripped(self._utf8.decode(self._bytes.of(token)))

    def finish(self) -> str:
        """See `StreamingDecoder`."""
        text = self._stripped(self._utf8.decode(b"", final=True))
        self._start()
        return text

    def _stripped(self, text: str) -> str:
        while self._spaces and text:
            if text[0] != " ":
                self._spaces = 0
            else:
                text, self._spaces = text[1:], self._spaces - 1
        return text


class WindowStream:
    """A decoder for tokenizers whose tokens read differently next to each other (WordPiece, Metaspace, ...).

    A token is decoded together with the tokens pushed just before it, and what was shown of those is taken
    off the front. That is exact as long as a token changes the reading of its neighbours only.

    `decode` turns ids to text; `keeps` says whether an id is part of the text at all.
    """

    def __init__(self, decode: Callable[[list[int]], str], keeps: Callable[[int], bool]):
        self._decode, self._keeps = decode, keeps
        self._shown: list[int] = []  # the last tokens shown: the context of those after them
        self._held: list[int] = []  # tokens not shown yet

    def push(self, token_id: int) -> str:
        """See `StreamingDecoder`."""
        if not self._keeps(token_id):
            return ""
        self._held.append(token_id)
        text = self._unshown()
        if not text or (text.endswith("\N{REPLACEMENT CHARACTER}") and len(self._held) < MAX_HELD_TOKENS):
            return ""
        self._shown, self._held = self._held, []
        return text

    def finish(self) -> str:
        """See `StreamingDecoder`."""
        text = self._unshown()
        self._shown, self._held = [], []
        return text

    def _unshown(self) -> str:
        return self._decode(self._shown + self._held)[len(self._decode(self._shown)) :]


def token_bytes(decoder: tokenizers.decoders.Decoder | None) -> TokenBytes | None:
    """How tokens stand for bytes under a decoder of the `tokenizers` library; None if they do not.

    Known are GPT-2's byte-level alphabet (Radford et al. 2019) and SentencePiece with byte fallback (Kudo and
    Richardson 2018, arXiv:1808.06226) as the library writes it: replacements, ByteFallback, Fuse, and perhaps
    a Strip of leading spaces.
    """
    if decoder is None:
        return None
    described = json.loads(decoder.__getstate__())
    if described["type"] == "ByteLevel":
        return TokenBytes(_byte_level)
    steps = described.get("decoders", [])
    replacements = []
    while steps and steps[0]["type"] == "Replace" and "String" in steps[0]["pattern"]:
        step, *steps = steps
        replacements.append((step["pattern"]["String"], step["content"]))
    if [step["type"] for step in steps[:2]] != ["ByteFallback", "Fuse"]:
        return None
    match steps[2:]:
        case []:
            return TokenBytes(_sentencepiece(replacements))
        case [{"type": "Strip", "content": " ", "start": int(spaces), "stop": 0}]:
            return TokenBytes(_sentencepiece(replacements), spaces)
        case _:
            return None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: a printable character for each of the 256 bytes, so that tokens can be written down.

    Bytes that Latin-1 prints stand for themselves; the others, in order, are U+0100, U+0101, ... (a space is
    U+0120, which explains all the 'Ġ' in vocabularies).
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    """The bytes a byte-level token spells; a token outside the alphabet (an added one) is plain text."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


def _sentencepiece(replacements: list[tuple[str, str]]) -> Callable[[str], bytes]:
    def of(token: str) -> bytes:
        if byte := BYTE_TOKEN.fullmatch(token):
            return bytes([int(byte[1], 16)])
        for old, new in replacements:
            token = token.replace(old, new)
        return token.encode()

    return of


def visible(raw: bytes) -> str:
    """Bytes as text for people: bytes that are no whole character are written like `<0xE2>`."""
    text = raw.decode("utf-8", errors="surrogateescape")
    return re.sub("[\udc80-\udcff]", lambda match: f"<0x{ord(match[0]) - 0xDC00:02X}>", text)
