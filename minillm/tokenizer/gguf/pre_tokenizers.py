"""How text is cut before BPE merges anything: a file names the way, and this is what the names mean.

No token reaches over a cut, so the cuts decide what a token can be: a word with the space before it, one digit or
three, a run of signs. A model trained with one way of cutting reads another as a misprint on every line. Each way is a
pipeline, as the model's makers published it in their `tokenizer.json`: regular expressions whose matches become
pieces of their own, one after another, each seeing the pieces that those before it made.

In the expressions `\\p{L}` is a letter, `\\p{N}` a number sign, `\\p{P}` punctuation, `\\s` white space.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import tokenizers
from tokenizers import pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Punctuation, Sequence, Split

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORD_START = r"[^\r\n\p{L}\p{N}]?"  # a space, but a bracket or a quotation mark as well
LINES, SPACES = r"\s*[\r\n]+", r"\s+(?!\S)|\s+"  # of several spaces, the last goes with the word that follows
ONE, THREE = r"\p{N}", r"\p{N}{1,3}"  # digits in a piece, at most


@dataclass(frozen=True)
class PreTokenizer:
    """One way of cutting, and what goes with it.

    Attributes
    ----------
    cuts : makes the pipeline, whose last step spells the pieces in GPT-2's alphabet of bytes
    composes : whether an accent is joined with its letter first, where Unicode has the two as one (NFC)
    whole_pieces : whether a piece that is a token as it stands becomes that token, whatever the merges would make
    begins_with_bos : whether a text begins with the beginning-of-sequence token unless the file says otherwise
    """

    cuts: Callable[[], pre_tokenizers.PreTokenizer]
    composes: bool = False
    whole_pieces: bool = False
    begins_with_bos: bool = False


def _split(*expressions: str, single_digits: bool = False) -> Callable[[], pre_tokenizers.PreTokenizer]:
    """A pipeline of regular expressions, and perhaps, after them, every digit alone."""

    def cuts() -> pre_tokenizers.PreTokenizer:
        steps = [Split(tokenizers.Regex(expression), "isolated") for expression in expressions]
        digits = [Digits(individual_digits=True)] if single_digits else []
        return Sequence([*steps, *digits, ByteLevel(add_prefix_space=False, use_regex=False)])

    return cuts


def _gpt2() -> pre_tokenizers.PreTokenizer:
    """Words with the space before them, runs of digits, runs of other signs (Radford et al. 2019)."""
    return ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    """Every digit alone, then as GPT-2: "\\n\\n12" is "\\n\\n", "1", "2"."""
    return Sequence([Digits(individual_digits=True), _gpt2()])


def _falcon() -> pre_tokenizers.PreTokenizer:
    """Runs of punctuation, then as GPT-2; digits are looked for in the spelled bytes, and cut off in threes."""
    threes = Split(tokenizers.Regex("[0-9][0-9][0-9]"), "isolated")
    return Sequence([Punctuation("contiguous"), _gpt2(), Digits(individual_digits=False), threes])


def _gpt4(digits: str, letter: str = r"\p{L}", sign: str = r"[^\s\p{L}\p{N}]") -> str:
    """GPT-4's expression, from which most later ones descend: a sign may begin a word, lines end with their signs."""
    return f"{CONTRACTIONS}|{WORD_START}{letter}+|{digits}| ?{sign}+[\\r\\n]*|{LINES}|{SPACES}"


def _gpt4o(digits: str, contractions: str) -> str:
    """GPT-4o's: a word ends where capitals begin anew, as in "camelCase"; a contraction stays with its word."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    word = f"{WORD_START}{upper}*{lower}+{contractions}|{WORD_START}{upper}+{lower}*{contractions}"
    return rf"{word}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{LINES}|{SPACES}"


# DeepSeek's first models cut letters that have a capital form from all others; these blocks of them their list lacks
# (Armenian small letters, Georgian, late additions to Latin, mathematical alphabets).
_UNLISTED = (
    r"\x{560}-\x{588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C8A}\x{2D00}-\x{2D2D}\x{A790}-\x{A7FA}\x{AB30}-\x{AB68}"
    r"\x{10570}-\x{105BC}\x{10D50}-\x{10D85}\x{16E40}-\x{16E7F}\x{1D400}-\x{1D7CB}\x{1DF00}-\x{1DF2A}"
)
CASED_WORDS = rf"\s?[\p{{Lu}}\p{{Ll}}\p{{Lt}}&&[^{_UNLISTED}]]+"
_SIGNS = (
    r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+"  # ASCII's, full-width, CJK's
)
_EAST_ASIAN = r"[\x{800}-\x{9FA5}\x{AC00}-\x{D7FF}]+"  # from the Samaritan block on, in fact
_KANA_AND_HAN = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}]+"
# A sign right before ASCII letters goes with them, as in ".py"; accents are part of words.
_DEEPSEEK_3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    rf" ?[\p{{P}}\p{{S}}]+[\r\n]*|{LINES}|{SPACES}"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

GPT_2 = PreTokenizer(_gpt2)
GPT_NEOX = PreTokenizer(_gpt2, composes=True)
STARCODER = PreTokenizer(_single_digits)
LLAMA_3 = PreTokenizer(_split(_gpt4(THREE)), whole_pieces=True, begins_with_bos=True)
QWEN_2 = PreTokenizer(_split(_gpt4(ONE)), composes=True)

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
    "dbrx": PreTokenizer(_split(_gpt4(THREE))),
    "qwen2": QWEN_2,
    "deepseek-r1-qwen": QWEN_2,
    "qwen35": PreTokenizer(_split(_gpt4(ONE, r"[\p{L}\p{M}]", r"[^\s\p{L}\p{M}\p{N}]")), composes=True),
    "gpt-4o": PreTokenizer(_split(_gpt4o(THREE, f"{CONTRACTIONS}?"))),
    "llama4": PreTokenizer(_split(_gpt4o(THREE, f"{CONTRACTIONS}?"))),
    "tekken": PreTokenizer(_split(_gpt4o(ONE, "")), whole_pieces=True, begins_with_bos=True),
    "deepseek-llm": PreTokenizer(_split(r"[\r\n]", CASED_WORDS, _SIGNS, r"\s+$", _EAST_ASIAN, single_digits=True)),
    "deepseek-coder": PreTokenizer(_split(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, single_digits=True)),
    "deepseek-v3": PreTokenizer(_split(THREE, _KANA_AND_HAN, _DEEPSEEK_3)),
    # What llama.cpp takes where a converter knew no better.
    "default": PreTokenizer(_split(r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}
