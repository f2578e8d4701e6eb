"""Pre-tokenizers, which split text into pieces before BPE merges the tokens of each piece. A file names the one to use.

A token never spans two pieces, so the pre-tokenizer determines the possible tokens: a word with the space before it,
one digit or three, a run of punctuation. Text that is split differently than in training looks misspelled to the model.
Each pre-tokenizer here is a pipeline from the `tokenizer.json` that the model's authors published. Most steps are
regular expressions whose matches become separate pieces. Each step splits the pieces of the previous step.

In the expressions, `\\p{L}` is a letter, `\\p{N}` a numeric character, `\\p{P}` punctuation, and `\\s` white space.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import tokenizers
from tokenizers import pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Punctuation, Sequence, Split

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORD_START = r"[^\r\n\p{L}\p{N}]?"  # a space, a bracket, a quotation mark, ...
LINES, SPACES = r"\s*[\r\n]+", r"\s+(?!\S)|\s+"  # the last of several spaces belongs to the next word
ONE_DIGIT, UP_TO_THREE_DIGITS = r"\p{N}", r"\p{N}{1,3}"


@dataclass(frozen=True)
class PreTokenizer:
    """A pre-tokenizer and the settings of the models that use it.

    Attributes
    ----------
    build : returns the pipeline; its last step writes the pieces in GPT-2's byte alphabet
    composes : whether a letter and its accent are first combined into one character (Unicode NFC)
    ignores_merges : whether a piece that is a token becomes that token, whatever the merges would produce
    adds_bos : whether a beginning-of-sequence token is added to each text by default
    """

    build: Callable[[], pre_tokenizers.PreTokenizer]
    composes: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False


def _split(*expressions: str, single_digits: bool = False) -> Callable[[], pre_tokenizers.PreTokenizer]:
    """Return a function that builds a pipeline: regular expressions, then optionally a split around every digit."""

    def build() -> pre_tokenizers.PreTokenizer:
        steps = [Split(tokenizers.Regex(expression), "isolated") for expression in expressions]
        digits = [Digits(individual_digits=True)] if single_digits else []
        return Sequence([*steps, *digits, ByteLevel(add_prefix_space=False, use_regex=False)])

    return build


def _gpt2() -> pre_tokenizers.PreTokenizer:
    """Return GPT-2's pre-tokenizer (Radford et al. 2019).

    It splits text into words with the space before them, runs of digits, and runs of other characters.
    """
    return ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    """Return a pipeline that splits around every digit and then like GPT-2: "\\n\\n12" becomes "\\n\\n", "1", "2"."""
    return Sequence([Digits(individual_digits=True), _gpt2()])


def _falcon() -> pre_tokenizers.PreTokenizer:
    """Return Falcon's pipeline: runs of punctuation, then GPT-2's pieces, then digits in groups of three.

    The digits are found after the text is written in the byte alphabet.
    """
    threes = Split(tokenizers.Regex("[0-9][0-9][0-9]"), "isolated")
    return Sequence([Punctuation("contiguous"), _gpt2(), Digits(individual_digits=False), threes])


def _gpt4(digits: str, letter: str = r"\p{L}", punctuation: str = r"[^\s\p{L}\p{N}]") -> str:
    """Return GPT-4's expression, from which most later ones are derived.

    A word may start with a punctuation character. Line breaks belong to the punctuation before them.
    """
    return f"{CONTRACTIONS}|{WORD_START}{letter}+|{digits}| ?{punctuation}+[\\r\\n]*|{LINES}|{SPACES}"


def _gpt4o(digits: str, contractions: str) -> str:
    """Return GPT-4o's expression.

    A word ends before a capital letter, as in "camelCase". A contraction belongs to the word before it.
    """
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    word = f"{WORD_START}{upper}*{lower}+{contractions}|{WORD_START}{upper}+{lower}*{contractions}"
    return rf"{word}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{LINES}|{SPACES}"


# DeepSeek's first models separate letters with upper and lower case from other letters. Their list lacks these blocks:
# Armenian small letters, Georgian, recent additions to Latin, and mathematical alphabets.
_UNLISTED = (
    r"\x{560}-\x{588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C8A}\x{2D00}-\x{2D2D}\x{A790}-\x{A7FA}\x{AB30}-\x{AB68}"
    r"\x{10570}-\x{105BC}\x{10D50}-\x{10D85}\x{16E40}-\x{16E7F}\x{1D400}-\x{1D7CB}\x{1DF00}-\x{1DF2A}"
)
CASED_WORDS = rf"\s?[\p{{Lu}}\p{{Ll}}\p{{Lt}}&&[^{_UNLISTED}]]+"
_PUNCTUATION = (
    r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+"  # ASCII, full-width, CJK
)
_EAST_ASIAN = r"[\x{800}-\x{9FA5}\x{AC00}-\x{D7FF}]+"  # starts at the Samaritan block, as published
_KANA_AND_HAN = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}]+"
# A punctuation character directly before ASCII letters belongs to them, as in ".py". Accents are part of words.
_DEEPSEEK_3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    rf" ?[\p{{P}}\p{{S}}]+[\r\n]*|{LINES}|{SPACES}"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

GPT_2 = PreTokenizer(_gpt2)
GPT_NEOX = PreTokenizer(_gpt2, composes=True)
STARCODER = PreTokenizer(_single_digits)
LLAMA_3 = PreTokenizer(_split(_gpt4(UP_TO_THREE_DIGITS)), ignores_merges=True, adds_bos=True)
QWEN_2 = PreTokenizer(_split(_gpt4(ONE_DIGIT)), composes=True)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "gpt-2": GPT_2,
    "phi-2": GPT_2,
    "mpt": GPT_NEOX,
    "olmo": GPT_NEOX,
    "smollm": STARCODER,
    "starcoder": STARCODER,
    "refact": STARCODER,
    "command-r": PreTokenizer(_single_digits, composes=True),
    "falcon": PreTokenizer(_falcon),
    "llama-bpe": LLAMA_3,
    "llama3": LLAMA_3,
    "llama-v3": LLAMA_3,
    "dbrx": PreTokenizer(_split(_gpt4(UP_TO_THREE_DIGITS))),
    "qwen2": QWEN_2,
    "deepseek-r1-qwen": QWEN_2,
    "qwen35": PreTokenizer(_split(_gpt4(ONE_DIGIT, r"[\p{L}\p{M}]", r"[^\s\p{L}\p{M}\p{N}]")), composes=True),
    "gpt-4o": PreTokenizer(_split(_gpt4o(UP_TO_THREE_DIGITS, f"{CONTRACTIONS}?"))),
    "llama4": PreTokenizer(_split(_gpt4o(UP_TO_THREE_DIGITS, f"{CONTRACTIONS}?"))),
    "tekken": PreTokenizer(_split(_gpt4o(ONE_DIGIT, "")), ignores_merges=True, adds_bos=True),
    "deepseek-llm": PreTokenizer(
        _split(r"[\r\n]", CASED_WORDS, _PUNCTUATION, r"\s+$", _EAST_ASIAN, single_digits=True)
    ),
    "deepseek-coder": PreTokenizer(_split(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, single_digits=True)),
    "deepseek-v3": PreTokenizer(_split(UP_TO_THREE_DIGITS, _KANA_AND_HAN, _DEEPSEEK_3)),
    # The default of llama.cpp, for files whose converter did not recognize the pre-tokenizer.
    "default": PreTokenizer(_split(r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}
