"""Byte-level BPE from GGUF files: pieces and ids equal those of the tokenizers that the models' authors published."""

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tokenizer_builders import ANY_TEXT
from tokenizers import models, pre_tokenizers

from minillm.errors import TokenizerError
from minillm.tokenizer import Tokenizer
from minillm.tokenizer.gguf import TokenType
from minillm.tokenizer.gguf.pre_tokenizers import CASED_WORDS, PRE_TOKENIZERS


def split(expression):
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


def byte_level(use_regex):
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def digits(individual):
    return {"type": "Digits", "individual_digits": individual}


# The steps of the tokenizer.json files that the models' authors published.
GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
GPT4O_WORDS = [
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
]
GPT4O_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K = "|".join([f"{word}(?i:'s|'t|'re|'ve|'m|'ll|'d)?" for word in GPT4O_WORDS] + [r"\p{N}{1,3}", GPT4O_REST])
DEEPSEEK_3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Letters with upper and lower case, as listed by DeepSeek's first tokenizer. Composed Greek is written as code points.
DEEPSEEK_LETTERS = (
    r"A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿ\x{386}\x{388}-\x{38A}\x{38C}\x{38E}-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚ"
    r"Ḁ-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}"
    r"\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}"
    r"\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}ℂℇℊ-ℓℕℙ-ℝℤ\x{2126}ℨ\x{212A}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄ"
    r"Ⰰ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}"
    r"\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}"
)
EAST_ASIAN = r"[一-龥ࠀ-一가-\x{D7FF}]+"
GPT2 = [byte_level(True)]
STARCODER = [digits(True), byte_level(True)]
PUBLISHED = {
    "gpt-2": GPT2,
    "phi-2": GPT2,
    "mpt": GPT2,
    "olmo": GPT2,
    "smollm": STARCODER,
    "starcoder": STARCODER,
    "refact": STARCODER,
    "command-r": STARCODER,
    "falcon": [
        {"type": "Punctuation", "behavior": "Contiguous"},
        byte_level(True),
        digits(False),
        split("[0-9][0-9][0-9]"),
    ],
    "llama-bpe": [split(GPT4), byte_level(False)],
    "llama3": [split(GPT4), byte_level(False)],
    "llama-v3": [split(GPT4), byte_level(False)],
    "dbrx": [split(GPT4), byte_level(False)],
    "qwen2": [split(GPT4.replace("{1,3}", "")), byte_level(False)],
    "deepseek-r1-qwen": [split(GPT4.replace("{1,3}", "")), byte_level(False)],
    "qwen35": [
        split(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
            r"|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        byte_level(False),
    ],
    "gpt-4o": [split(O200K), byte_level(False)],
    "llama4": [split(O200K), byte_level(False)],
    "tekken": [split("|".join([*GPT4O_WORDS, r"\p{N}", GPT4O_REST])), byte_level(False)],
    "deepseek-llm": [
        split(r"[\r\n]"),
        split(rf"\s?[{DEEPSEEK_LETTERS}]+"),
        split(r"\s?[!-/:-~！-／：-～‘-‟\x{3000}-。]+"),
        split(r"\s+$"),
        split(EAST_ASIAN),
        digits(True),
        byte_level(False),
    ],
    "deepseek-coder": [
        split(r"[\r\n]"),
        split(r"\s?\p{L}+"),
        split(r"\s?\p{P}+"),
        split(EAST_ASIAN),
        digits(True),
        byte_level(False),
    ],
    "deepseek-v3": [split(r"\p{N}{1,3}"), split(r"[一-龥\x{3040}-ゟ゠-ヿ]+"), split(DEEPSEEK_3), byte_level(False)],
    # The expressions of llama.cpp, because no model has this name.
    "default": [
        split(r"[\p{P}\$\+<=>\^~\|]+"),
        split(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"),
        split(r"\p{N}+"),
        split("[0-9][0-9][0-9]"),
        byte_level(False),
    ],
}
COMPOSING = {"mpt", "olmo", "command-r", "qwen2", "deepseek-r1-qwen", "qwen35"}  # their files contain NFC
IGNORING_MERGES = {"llama-bpe", "llama3", "llama-v3", "tekken"}  # their files contain "ignore_merges"

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
PAIRS = [("Ġ", "a"), ("Ġ", "Ġ"), ("1", "2"), ("12", "3"), ("Ċ", "Ċ"), ("a", "b"), ("Ġ", "Â"), (".", "a"), ("'", "s")]
PAIRS += [("a", "'"), ("Ã", "©"), ("Ì", "ģ"), ("e", "Ìģ"), ("Ġ", "("), (")", "Ċ"), ("Ġ", "1"), ("ä", "¸")]
TOKENS = [*LETTERS, *("".join(pair) for pair in PAIRS), "<eos>", "rem"]


def bpe_metadata(pre, **changes):
    fields = {
        "model": "gpt2",
        "pre": pre,
        "tokens": TOKENS,
        "token_type": [TokenType.CONTROL.value if token == "<eos>" else 1 for token in TOKENS],
        "merges": [" ".join(pair) for pair in PAIRS],
        "bos_token_id": TOKENS.index("<eos>"),
        "add_bos_token": False,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in (fields | changes).items() if value is not None}


def published(pre):
    """Return a tokenizer with the published steps and the small vocabulary."""
    vocabulary = {token: index for index, token in enumerate(TOKENS)}
    model = models.BPE(vocabulary, PAIRS, ignore_merges=pre in IGNORING_MERGES)
    fields = json.loads(tokenizers.Tokenizer(model).to_str())
    fields["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": PUBLISHED[pre]}
    fields["normalizer"] = {"type": "NFC"} if pre in COMPOSING else None
    fields["added_tokens"] = [
        {"id": TOKENS.index("<eos>"), "content": "<eos>", "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    ]
    return tokenizers.Tokenizer.from_str(json.dumps(fields))


@pytest.fixture(scope="module")
def tokenizers_by_name():
    """Our tokenizer and the published one, for every pre-tokenizer."""
    assert PUBLISHED.keys() == PRE_TOKENIZERS.keys()
    return {pre: (Tokenizer.from_gguf(bpe_metadata(pre), "x.gguf"), published(pre)) for pre in PUBLISHED}


@settings(max_examples=200)
@given(text=ANY_TEXT)
def test_pieces_and_ids_equal_those_of_the_published_tokenizers(tokenizers_by_name, text):
    for pre, (ours, theirs) in tokenizers_by_name.items():
        pieces, expected = (
            [
                piece
                for piece, _ in backend.pre_tokenizer.pre_tokenize_str(
                    backend.normalizer.normalize_str(text) if backend.normalizer else text
                )
            ]
            for backend in (ours._backend, theirs)
        )
        assert pieces == expected, pre
        assert ours.encode(text) == theirs.encode(text).ids, pre


def test_cased_letters_equal_the_published_list_in_all_of_unicode():
    """CASED_WORDS is a short rule equivalent to DeepSeek's long list."""
    text = "".join(map(chr, (*range(0xD800), *range(0xE000, 0x110000))))
    ours, theirs = (
        pre_tokenizers.Split(tokenizers.Regex(expression), "isolated").pre_tokenize_str(text)
        for expression in (CASED_WORDS, rf"\s?[{DEEPSEEK_LETTERS}]+")
    )
    assert [span for _, span in ours] == [span for _, span in theirs]


def test_a_piece_that_is_a_token_needs_no_merges_if_the_model_ignores_them(tokenizers_by_name):
    rem = TOKENS.index("rem")  # no merges produce this token
    for pre, (ours, _) in tokenizers_by_name.items():
        assert (ours.encode("rem") == [rem]) == (pre in IGNORING_MERGES)
        assert ours.decode(ours.encode("rem a 123")) == "rem a 123"


def test_default_of_add_bos_token():
    bos = TOKENS.index("<eos>")
    for pre in PUBLISHED:
        ids = Tokenizer.from_gguf(bpe_metadata(pre, add_bos_token=None), "x.gguf").encode("a")
        assert (ids[0] == bos) == (pre in IGNORING_MERGES)
    with pytest.raises(TokenizerError, match=r"add_bos_token' defaults to true .* 'tokenizer.ggml.bos_token_id'"):
        Tokenizer.from_gguf(bpe_metadata("llama-bpe", add_bos_token=None, bos_token_id=None), "x.gguf")


@pytest.mark.parametrize("pre", ["smollm", "gpt-2"])
@given(text=st.text("ab1 \n\t½²'é", max_size=20))
def test_splits_equal_those_of_one_regular_expression(pre, text):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("Ġ", "a"), ("Ġ", "1"), ("Ġ", "Ġ"), ("1", "1"), ("Ċ", "Ċ"), ("a", "b"), ("Ġ", "Â")]
    tokens = letters + [left + right for left, right in pairs]
    merges = [" ".join(pair) for pair in pairs]
    metadata = bpe_metadata(pre, tokens=tokens, token_type=[1] * len(tokens), merges=merges, bos_token_id=None)
    digits = r"\p{N}|" if pre == "smollm" else ""  # llama.cpp uses one regular expression
    words = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    splits = [pre_tokenizers.Split(tokenizers.Regex(rule), "isolated") for rule in (digits[:-1], words) if rule]
    expected = tokenizers.Tokenizer(models.BPE({token: n for n, token in enumerate(tokens)}, pairs))
    expected.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(False, use_regex=False)])
    assert Tokenizer.from_gguf(metadata, "x.gguf").encode(text) == expected.encode(text).ids
