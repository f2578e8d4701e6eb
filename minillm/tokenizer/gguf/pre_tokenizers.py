"""Pre-tokenizers: split text into pieces before BPE merges anything. A GGUF file names its pre-tokenizer.

No token extends across a split, so the splits determine what a token can be: a word with the space before it, one
digit or three, a run of symbols. Text that is split differently than in training looks misspelled to the model. Each
pre-tokenizer is a pipeline, as published in the `tokenizer.json` of the model: regular expressions are applied in
order, and each match within a piece from the previous step becomes a piece of its own.

In the expressions `\\p{L}` is a letter, `\\p{N}` a numeric character, `\\p{P}` punctuation, `\\s` white space.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import tokenizers
from tokenizers import pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Punctuation, Sequence, Split

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORD_START = r"[^\r\n\p{L}\p{N}]?"  # a space, a bracket or a quotation mark, for example
LINES, SPACES = r"\s*[\r\n]+", r"\s+(?!\S)|\s+"  # of several spaces, the last one belongs to the next word
ONE, THREE = r"\p{N}", r"\p{N}{1,3}"  # maximum number of digits in a piece


@dataclass(frozen=True)
class PreTokenizer:
    """A pre-tokenizer and the settings that belong to it.

    Attributes
    ----------
    make : creates the pipeline, whose last step writes the pieces in GPT-2's byte alphabet
    normalizes_nfc : whether a letter and its accent are first combined into one character where Unicode has one (NFC)
    ignore_merges : whether a piece that is itself in the vocabulary becomes that token without applying merges
    adds_bos : whether the beginning-of-sequence token is added by default
    """

    make: Callable[[], pre_tokenizers.PreTokenizer]
    normalizes_nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False


def _split(*expressions: str, single_digits: bool = False) -> Callable[[], pre_tokenizers.PreTokenizer]:
    """Return a function that creates a pipeline of regular expressions, optionally splitting all digits at the end."""

    def make() -> pre_tokenizers.PreTokenizer:
        steps = [Split(tokenizers.Regex(expression), "isolated") for expression in expressions]
        digits = [Digits(individual_digits=True)] if single_digits else []
        return Sequence([*steps, *digits, ByteLevel(add_prefix_space=False, use_regex=False)])

    return make


def _gpt2() -> pre_tokenizers.PreTokenizer:
    """Split into words with the space before them, runs of digits, and runs of other symbols (Radford et al. 2019)."""
    return ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    """Split off every digit, then split as GPT-2: "\\n\\n12" is "\\n\\n", "1", "2"."""
    return Sequence([Digits(individual_digits=True), _gpt2()])


def _falcon() -> pre_tokenizers.PreTokenizer:
    """Split off runs of punctuation, then split as GPT-2, then split runs of digits into threes.

    The digits are matched after the text was written as bytes.
    """
    threes = Split(tokenizers.Regex("[0-9][0-9][0-9]"), "isolated")
    return Sequence([Punctuation("contiguous"), _gpt2(), Digits(individual_digits=False), threes])


def _gpt4(digits: str, letter: str = r"\p{L}", sign: str = r"[^\s\p{L}\p{N}]") -> str:
    """Return GPT-4's expression, the base of most later ones.

    A word may begin with a symbol, and line breaks belong to the symbols before them.
    """
    return f"{CONTRACTIONS}|{WORD_START}{letter}+|{digits}| ?{sign}+[\\r\\n]*|{LINES}|{SPACES}"


def _gpt4o(digits: str, contractions: str) -> str:
    """Return GPT-4o's expression. It splits "camelCase" at the capital and keeps a contraction with its word."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    word = f"{WORD_START}{upper}*{lower}+{contractions}|{WORD_START}{upper}+{lower}*{contractions}"
    return rf"{word}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{LINES}|{SPACES}"


# DeepSeek's first models split letters with upper and lower case from all other letters. Their list omits these blocks
# of such letters (Armenian small letters, Georgian, late additions to Latin, mathematical alphabets).
_UNLISTED = (
    r"\x{560}-\x{588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C8A}\x{2D00}-\x{2D2D}\x{A790}-\x{A7FA}\x{AB30}-\x{AB68}"
    r"\x{10570}-\x{105BC}\x{10D50}-\x{10D85}\x{16E40}-\x{16E7F}\x{1D400}-\x{1D7CB}\x{1DF00}-\x{1DF2A}"
)
CASED_WORDS = rf"\s?[\p{{Lu}}\p{{Ll}}\p{{Lt}}&&[^{_UNLISTED}]]+"
_SIGNS = (
    r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+"  # ASCII's, full-width, CJK's
)
_EAST_ASIAN = r"[\x{800}-\x{9FA5}\x{AC00}-\x{D7FF}]+"  # starts at the Samaritan block, as published
_KANA_AND_HAN = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}]+"
# A symbol directly before ASCII letters belongs to them, as in ".py"; accents are part of words.
_DEEPSEEK_3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    rf" ?[\p{{P}}\p{{S}}]+[\r\n]*|{LINES}|{SPACES}"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

GPT_2 = PreTokenizer(_gpt2)
GPT_NEOX = PreTokenizer(_gpt2, normalizes_nfc=True)
STARCODER = PreTokenizer(_single_digits)
LLAMA_3 = PreTokenizer(_split(_gpt4(THREE)), ignore_merges=True, adds_bos=True)
QWEN_2 = PreTokenizer(_split(_gpt4(ONE)), normalizes_nfc=True)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "gpt-2": GPT_2,
    "phi-2": GPT_2,
    "mpt": GPT_NEOX,
    "olmo": GPT_NEOX,
    "smollm": STARCODER,
    "starcoder": STARCODER,
    "refact": STARCODER,
    "command-r": PreTokenizer(_single_digits, normalizes_nfc=True),
    "falcon": PreTokenizer(_falcon),
    "llama-bpe": LLAMA_3,
    "llama3": LLAMA_3,
    "llama-v3": LLAMA_3,
    "dbrx": PreTokenizer(_split(_gpt4(THREE))),
    "qwen2": QWEN_2,
    "deepseek-r1-qwen": QWEN_2,
    "qwen35": PreTokenizer(_split(_gpt4(ONE, r"[\p{L}\p{M}]", r"[^\s\p{L}\p{M}\p{N}]")), normalizes_nfc=True),
    "gpt-4o": PreTokenizer(_split(_gpt4o(THREE, f"{CONTRACTIONS}?"))),
    "llama4": PreTokenizer(_split(_gpt4o(THREE, f"{CONTRACTIONS}?"))),
    "tekken": PreTokenizer(_split(_gpt4o(ONE, "")), ignore_merges=True, adds_bos=True),
    "deepseek-llm": PreTokenizer(_split(r"[\r\n]", CASED_WORDS, _SIGNS, r"\s+$", _EAST_ASIAN, single_digits=True)),
    "deepseek-coder": PreTokenizer(_split(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, single_digits=True)),
    "deepseek-v3": PreTokenizer(_split(THREE, _KANA_AND_HAN, _DEEPSEEK_3)),
    # The pre-tokenizer that llama.cpp uses if a converter did not recognize the model.
    "default": PreTokenizer(_split(r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}
