"""Detokenizing: convert token ids to text one at a time, without ever emitting part of a character.

A token represents *bytes*, not text: an emoji may arrive in four tokens of one byte each. In the two kinds of
tokenizer that language models use, every token represents fixed bytes, so the text is the UTF-8 decoding of their
concatenation. Streaming works like any incremental UTF-8 decoder: it holds back the bytes of an unfinished character.
Both are exact, and the thousandth token costs as much as the first.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import tokenizers

MAX_HELD_TOKENS = 8  # emit the held tokens after this many, even if the text still ends in U+FFFD
BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class StreamingDecoder(Protocol):
    """Converts tokens to text as they arrive. All pieces joined equal `Tokenizer.decode` of all ids."""

    def push(self, token_id: int) -> str:
        """Return the text that this token completes, `""` if a character is still incomplete."""

    def finish(self) -> str:
        """Return the text held back, with U+FFFD for an incomplete character, and reset the decoder."""


@dataclass(frozen=True)
class TokenBytes:
    """The mapping from a tokenizer's tokens to bytes.

    Attributes
    ----------
    to_bytes : converts a token in its vocabulary form to bytes
    leading_spaces : the maximum number of spaces that decoding removes from the start of a text
    """

    to_bytes: Callable[[str], bytes]
    leading_spaces: int = 0

    def stream(self, token_of: Callable[[int], str | None]) -> ByteStream:
        """Return a decoder. `token_of` maps an id to the token's vocabulary form, or to None to omit it."""
        return ByteStream(self, token_of)


class ByteStream:
    """A decoder for tokens that represent fixed bytes; an incremental UTF-8 decoder holds back partial characters."""

    def __init__(self, token_bytes: TokenBytes, token_of: Callable[[int], str | None]):
        self._token_bytes, self._token_of = token_bytes, token_of
        self._reset()

    def _reset(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._spaces = self._token_bytes.leading_spaces

    def push(self, token_id: int) -> str:
        """See `StreamingDecoder`."""
        token = self._token_of(token_id)
        return "" if token is None else self._strip(self._utf8.decode(self._token_bytes.to_bytes(token)))

    def finish(self) -> str:
        """See `StreamingDecoder`."""
        text = self._strip(self._utf8.decode(b"", final=True))
        self._reset()
        return text

    def _strip(self, text: str) -> str:
        while self._spaces and text:
            if text[0] != " ":
                self._spaces = 0
            else:
                text, self._spaces = text[1:], self._spaces - 1
        return text


class WindowStream:
    """A decoder for tokenizers in which a token's text depends on the tokens next to it (WordPiece, Metaspace, ...).

    A token is decoded together with the tokens emitted just before it, and the text of those is removed from the
    front. This is exact if a token affects only the decoding of its neighbours.

    `decode` converts ids to text; `is_kept` returns whether an id is part of the text.
    """

    def __init__(self, decode: Callable[[list[int]], str], is_kept: Callable[[int], bool]):
        self._decode, self._is_kept = decode, is_kept
        self._emitted: list[int] = []  # the tokens emitted last: the context of the held tokens
        self._held: list[int] = []  # tokens not emitted yet

    def push(self, token_id: int) -> str:
        """See `StreamingDecoder`."""
        if not self._is_kept(token_id):
            return ""
        self._held.append(token_id)
        text = self._held_text()
        if not text or (text.endswith("\N{REPLACEMENT CHARACTER}") and len(self._held) < MAX_HELD_TOKENS):
            return ""
        self._emitted, self._held = self._held, []
        return text

    def finish(self) -> str:
        """See `StreamingDecoder`."""
        text = self._held_text()
        self._emitted, self._held = [], []
        return text

    def _held_text(self) -> str:
        return self._decode(self._emitted + self._held)[len(self._decode(self._emitted)) :]


def token_bytes(decoder: tokenizers.decoders.Decoder | None) -> TokenBytes | None:
    """Return the mapping from tokens to bytes for a decoder of the `tokenizers` library, or None if there is none.

    This supports GPT-2's byte-level alphabet (Radford et al. 2019) and SentencePiece with byte fallback (Kudo and
    Richardson 2018, arXiv:1808.06226) as the library describes it: replacements, ByteFallback, Fuse, and optionally a
    Strip of leading spaces.
    """
    if decoder is None:
        return None
    description = json.loads(decoder.__getstate__())
    if description["type"] == "ByteLevel":
        return TokenBytes(_byte_level)
    steps = description.get("decoders", [])
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
    """Return GPT-2's alphabet: a printable character for each of the 256 bytes, so that tokens are printable.

    Bytes that are printable in Latin-1 keep their character. The others become U+0100, U+0101, ... in order. A space
    is U+0120, hence the many 'Ġ' in vocabularies.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    """Return the bytes of a byte-level token. A token outside the alphabet (an added token) is plain text."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


def _sentencepiece(replacements: list[tuple[str, str]]) -> Callable[[str], bytes]:
    def to_bytes(token: str) -> bytes:
        if byte := BYTE_TOKEN.fullmatch(token):
            return bytes([int(byte[1], 16)])
        for old, new in replacements:
            token = token.replace(old, new)
        return token.encode()

    return to_bytes


def visible(raw: bytes) -> str:
    """Return bytes as readable text. Bytes that do not form a whole character are written as `<0xE2>`."""
    text = raw.decode("utf-8", errors="surrogateescape")
    return re.sub("[\udc80-\udcff]", lambda match: f"<0x{ord(match[0]) - 0xDC00:02X}>", text)
