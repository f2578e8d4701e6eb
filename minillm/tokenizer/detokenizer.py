"""Streaming detokenization: token ids to text, one at a time, without showing part of a character.

A token is a sequence of bytes, not of characters: an emoji may arrive in four tokens of one byte each. In the two kinds
of tokenizer that most language models use, a token always has the same bytes. The text is then the UTF-8 decoding of
the concatenated bytes. Streaming uses an incremental UTF-8 decoder, which holds back the bytes of an incomplete
character. The result is exact, and the cost per token does not grow with the length of the text.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import tokenizers

MAX_HELD_TOKENS = 8  # after this many tokens, a text that ends in U+FFFD is no longer held back
BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


def _replace_bytes(error: UnicodeError) -> tuple[str, int]:
    """Decode each byte of an invalid sequence to U+FFFD, as the library does for byte tokens."""
    assert isinstance(error, UnicodeDecodeError)
    return "\N{REPLACEMENT CHARACTER}" * (error.end - error.start), error.end


codecs.register_error("replace_bytes", _replace_bytes)


class StreamingDecoder(Protocol):
    """Converts token ids to text as they arrive.

    The concatenated results of all `push` calls and of `finish` equal `Tokenizer.decode` of all ids.
    """

    def push(self, token_id: int) -> str:
        """Return the text that this token completes, or `""` if its last character is incomplete."""

    def finish(self) -> str:
        """Return the text held back, with U+FFFD for an incomplete character, and reset the decoder."""


@dataclass(frozen=True)
class ByteDecoder:
    """Converts tokens to bytes, for tokenizers in which a token always has the same bytes.

    Attributes
    ----------
    to_bytes : returns the bytes of a token, given as the vocabulary writes it
    num_stripped_spaces : the maximum number of spaces that decoding removes from the start of a text
    errors : the name of the handler of invalid UTF-8: "replace" gives one U+FFFD per incomplete character, and
        "replace_bytes" one per byte
    """

    to_bytes: Callable[[str], bytes]
    num_stripped_spaces: int = 0
    errors: str = "replace"


class ByteStream:
    """A streaming decoder for tokenizers in which a token always has the same bytes.

    Parameters
    ----------
    byte_decoder : converts tokens to bytes
    kept_token : returns the token of an id as the vocabulary writes it, or None if it is not part of the text
    """

    def __init__(self, byte_decoder: ByteDecoder, kept_token: Callable[[int], str | None]):
        self._byte_decoder, self._kept_token = byte_decoder, kept_token
        self._reset()

    def _reset(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors=self._byte_decoder.errors)
        self._spaces_to_strip = self._byte_decoder.num_stripped_spaces

    def push(self, token_id: int) -> str:
        """Return the text that this token completes."""
        token = self._kept_token(token_id)
        return "" if token is None else self._strip(self._utf8.decode(self._byte_decoder.to_bytes(token)))

    def finish(self) -> str:
        """Return the text held back, and reset the decoder."""
        text = self._strip(self._utf8.decode(b"", final=True))
        self._reset()
        return text

    def _strip(self, text: str) -> str:
        """Remove spaces from the start of the whole text."""
        while self._spaces_to_strip and text:
            if text[0] != " ":
                self._spaces_to_strip = 0
            else:
                text, self._spaces_to_strip = text[1:], self._spaces_to_strip - 1
        return text


class WindowStream:
    """A streaming decoder for tokenizers in which a token's text depends on its neighbours (WordPiece, Metaspace, ...).

    Each token is decoded together with the tokens before it, and the text already returned is removed from the front.
    This is exact if a token affects only the text of its neighbours.

    Parameters
    ----------
    decode : converts ids to text
    is_kept : returns whether an id is part of the text
    """

    def __init__(self, decode: Callable[[list[int]], str], is_kept: Callable[[int], bool]):
        self._decode, self._is_kept = decode, is_kept
        self._shown: list[int] = []  # the last tokens whose text was returned: the context of the next ones
        self._held: list[int] = []  # tokens whose text was not returned yet

    def push(self, token_id: int) -> str:
        """Return the text that this token completes."""
        if not self._is_kept(token_id):
            return ""
        self._held.append(token_id)
        text = self._held_text()
        if not text or (text.endswith("\N{REPLACEMENT CHARACTER}") and len(self._held) < MAX_HELD_TOKENS):
            return ""
        self._shown, self._held = self._held, []
        return text

    def finish(self) -> str:
        """Return the text held back, and reset the decoder."""
        text = self._held_text()
        self._shown, self._held = [], []
        return text

    def _held_text(self) -> str:
        return self._decode(self._shown + self._held)[len(self._decode(self._shown)) :]


def byte_decoder(decoder: tokenizers.decoders.Decoder | None) -> ByteDecoder | None:
    """Return the `ByteDecoder` for a decoder of the `tokenizers` library, or None if tokens have no fixed bytes.

    Two kinds have fixed bytes: GPT-2's byte-level alphabet (Radford et al. 2019), and SentencePiece with byte fallback
    (Kudo and Richardson 2018, arXiv:1808.06226). The library writes the latter as replacements, ByteFallback, Fuse, and
    optionally a Strip of leading spaces.
    """
    if decoder is None:
        return None
    state = json.loads(decoder.__getstate__())
    if state["type"] == "ByteLevel":
        return ByteDecoder(_byte_level_bytes)
    steps = state.get("decoders", [])
    replacements = []
    while steps and steps[0]["type"] == "Replace" and "String" in steps[0]["pattern"]:
        step, *steps = steps
        replacements.append((step["pattern"]["String"], step["content"]))
    if [step["type"] for step in steps[:2]] != ["ByteFallback", "Fuse"]:
        return None
    match steps[2:]:
        case []:
            return ByteDecoder(_sentencepiece_bytes(replacements), errors="replace_bytes")
        case [{"type": "Strip", "content": " ", "start": int(spaces), "stop": 0}]:
            return ByteDecoder(_sentencepiece_bytes(replacements), spaces, errors="replace_bytes")
        case _:
            return None


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character in GPT-2's alphabet, which writes any byte as a printable character.

    A byte that is printable in Latin-1 is written as that character. The other bytes are written, in order, as U+0100,
    U+0101, ... A space is therefore U+0120, the 'Ġ' that is frequent in vocabularies.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    """Return the bytes of a byte-level token. A token with other characters is an added token: plain text."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


def _sentencepiece_bytes(replacements: list[tuple[str, str]]) -> Callable[[str], bytes]:
    def to_bytes(token: str) -> bytes:
        if byte := BYTE_TOKEN.fullmatch(token):
            return bytes([int(byte[1], 16)])
        for old, new in replacements:
            token = token.replace(old, new)
        return token.encode()

    return to_bytes


def visible(raw: bytes) -> str:
    """Return bytes as readable text: a byte that is not part of a valid UTF-8 character is written like `<0xE2>`."""
    text = raw.decode("utf-8", errors="surrogateescape")
    return re.sub("[\udc80-\udcff]", lambda match: f"<0x{ord(match[0]) - 0xDC00:02X}>", text)
