"""Tokenizers from GGUF files: BPE's cuts against what the models' makers published, SentencePiece against itself."""

import contextlib
import io
import json
import struct

import numpy as np
import pytest
import sentencepiece
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from minillm.errors import TokenizerError, UnsupportedError
from minillm.tokenizer import Tokenizer
from minillm.tokenizer.gguf import TokenType
from minillm.tokenizer.gguf.pre_tokenizers import CASED_WORDS, PRE_TOKENIZERS
from minillm.tokenizer.gguf.sentencepiece import derive_merges

# Whatever there is in Unicode; and what the ways of cutting differ in, close together.
TELLING = (
    "ab'SsdllLVErem Tt\n\r\t\u00a0\u3000 12345²½٣Ⅷ.,!?;:/()[]{}<>=+$^~|`_#\"\\-éÉe\u0301ñßΩאبखक्ष中文かなカナ한글ա՛ა𝒜"
)
TELLING += "🎉\u200d👩\ufe0f"
TEXT = st.text(max_size=40) | st.text(TELLING, max_size=60) | st.text(" \n\t\r a1'", max_size=30)


# ---- byte-level BPE: the cuts


def split(expression):
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


def byte_level(use_regex):
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def digits(individual):
    return {"type": "Digits", "individual_digits": individual}


# The steps of the models' own tokenizer.json, as published; None where there is no such file, see below.
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
# Letters with capital forms, as DeepSeek's first tokenizer lists them; composed Greek as code points.
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
    # llama.cpp's expressions, for there is no model of this name.
    "default": [
        split(r"[\p{P}\$\+<=>\^~\|]+"),
        split(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"),
        split(r"\p{N}+"),
        split("[0-9][0-9][0-9]"),
        byte_level(False),
    ],
}
COMPOSING = {"mpt", "olmo", "command-r", "qwen2", "deepseek-r1-qwen", "qwen35"}  # their files have NFC
WHOLE_PIECES = {"llama-bpe", "llama3", "llama-v3", "tekken"}  # theirs have "ignore_merges"

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
    """The tokenizer.json that the model's makers might have written for this small vocabulary."""
    model = models.BPE({token: index for index, token in enumerate(TOKENS)}, PAIRS, ignore_merges=pre in WHOLE_PIECES)
    described = json.loads(tokenizers.Tokenizer(model).to_str())
    described["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": PUBLISHED[pre]}
    described["normalizer"] = {"type": "NFC"} if pre in COMPOSING else None
    described["added_tokens"] = [
        {"id": TOKENS.index("<eos>"), "content": "<eos>", "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    ]
    return tokenizers.Tokenizer.from_str(json.dumps(described))


@pytest.fixture(scope="module")
def pairs():
    """Ours and the published, for every pre-tokenizer that there is."""
    assert PUBLISHED.keys() == PRE_TOKENIZERS.keys()
    return {pre: (Tokenizer.from_gguf(bpe_metadata(pre), "x.gguf"), published(pre)) for pre in PUBLISHED}


@settings(max_examples=200)
@given(text=TEXT)
def test_cuts_and_ids_are_those_of_the_published_tokenizers(pairs, text):
    for pre, (ours, theirs) in pairs.items():
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


def test_letters_with_capitals_are_the_listed_ones_in_all_of_unicode():
    """DeepSeek's long list, said as a rule."""
    text = "".join(map(chr, (*range(0xD800), *range(0xE000, 0x110000))))
    ours, theirs = (
        pre_tokenizers.Split(tokenizers.Regex(expression), "isolated").pre_tokenize_str(text)
        for expression in (CASED_WORDS, rf"\s?[{DEEPSEEK_LETTERS}]+")
    )
    assert [where for _, where in ours] == [where for _, where in theirs]


def test_a_piece_that_is_a_token_needs_no_merges_where_the_model_says_so(pairs):
    rem = TOKENS.index("rem")  # which no merges make
    for pre, (ours, _) in pairs.items():
        assert (ours.encode("rem") == [rem]) == (pre in WHOLE_PIECES)
        assert ours.decode(ours.encode("rem a 123")) == "rem a 123"


def test_what_a_text_begins_with_unless_the_file_says_otherwise():
    bos = TOKENS.index("<eos>")
    for pre in PUBLISHED:
        ids = Tokenizer.from_gguf(bpe_metadata(pre, add_bos_token=None), "x.gguf").encode("a")
        assert (ids[0] == bos) == (pre in WHOLE_PIECES)
    message = r"add_bos_token' is true by default for this kind .* 'tokenizer.ggml.bos_token_id'"
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_gguf(bpe_metadata("llama-bpe", add_bos_token=None, bos_token_id=None), "x.gguf")


# ---- SentencePiece

SPECIAL = [("<unk>", TokenType.UNKNOWN), ("<s>", TokenType.CONTROL), ("</s>", TokenType.CONTROL)]
BYTES = [(f"<0x{byte:02X}>", TokenType.BYTE) for byte in range(256)]
SENTENCES = [
    "the cat sat on the mat in 1984",
    "a dog, a cat and the hat",
    "안녕 세상, 안녕",
    "def f(x): return x + 1",
] * 5


def spm_metadata(pieces, prefix):
    """What a converter makes of a SentencePiece model: `pieces` are (text, score, type)."""
    texts = [text.replace("▁", " ") if kind == TokenType.USER_DEFINED else text for text, _, kind in pieces]
    _, scores, types = zip(*pieces, strict=True)
    fields = {"model": "llama", "pre": "default", "tokens": texts, "scores": list(scores)}
    fields |= {"token_type": [int(kind) for kind in types], "add_space_prefix": prefix}
    fields |= {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()}


def message(number, value):
    """A field of a Protocol Buffers message: an integer, a float, or bytes."""
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(number):
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)


def sentencepiece_model(pieces, prefix, byte_fallback):
    """A model of these pieces for the `sentencepiece` library; the numbers are those of sentencepiece_model.proto."""
    encoded = [message(1, t.encode()) + message(2, score) + message(3, int(kind)) for t, score, kind in pieces]
    trainer = message(3, 2) + message(35, int(byte_fallback)) + message(40, 0) + message(41, 1) + message(42, 2)
    normalizer = message(1, b"identity") + message(3, int(prefix)) + message(4, 0) + message(5, 1)
    model = b"".join(message(1, piece) for piece in encoded) + message(2, trainer) + message(3, normalizer)
    return sentencepiece.SentencePieceProcessor(model_proto=model)


@st.composite
def vocabularies(draw):
    """Pieces of any texts in any order of scores, every character of theirs among them; not always of bytes."""
    texts = draw(st.lists(st.text("ab▁", min_size=2, max_size=6), max_size=14, unique=True))
    characters = sorted({"a", "▁", *"".join(texts)})
    prefix, byte_fallback = draw(st.booleans()), draw(st.booleans())
    own = [] if prefix else draw(st.lists(st.sampled_from(["▁▁", "▁▁▁", "b▁", "<x>", "\n"]), max_size=3, unique=True))
    normal = [text for text in [*texts, *characters] if text not in own]
    pieces = [(text, 0.0, kind) for text, kind in SPECIAL + BYTES * byte_fallback]
    pieces += [(text, 0.0, TokenType.USER_DEFINED) for text in own]
    pieces += [(text, -float(rank), TokenType.NORMAL) for rank, text in enumerate(normal)]
    return pieces, prefix, byte_fallback


@settings(max_examples=150)
@given(vocabulary=vocabularies(), texts=st.lists(st.text("aab  \n▁cé한<x>", max_size=25), min_size=5, max_size=10))
def test_any_vocabulary_encodes_and_decodes_as_in_sentencepiece(vocabulary, texts):
    pieces, prefix, _ = vocabulary
    ours, theirs = Tokenizer.from_gguf(spm_metadata(pieces, prefix), "x.gguf"), sentencepiece_model(*vocabulary)
    for text in texts:
        ids = theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == ids
        assert ours.encode(text) == [1, *ids]  # the kind's default
        if 0 not in ids:
            assert ours.decode(ids) == theirs.decode(ids) == text.replace("▁", " ")
        stream = ours.stream()
        assert "".join([*map(stream.push, ids), stream.finish()]) == ours.decode(ids)


def trained(prefix, own=()):
    """A small model as `sentencepiece` trains it, and its pieces."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_writer=model,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        add_dummy_prefix=prefix,
        user_defined_symbols=list(own),
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
    )
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    pieces = []
    for index in range(theirs.get_piece_size()):
        text, kind = theirs.id_to_piece(index), TokenType.NORMAL
        for is_kind, found in (
            (theirs.is_unknown(index), TokenType.UNKNOWN),
            (theirs.is_control(index), TokenType.CONTROL),
            (theirs.is_byte(index), TokenType.BYTE),
            (text in own, TokenType.USER_DEFINED),
        ):
            kind = found if is_kind else kind
        pieces.append((text, theirs.get_score(index), kind))
    return theirs, pieces


@pytest.fixture(scope="module", params=[(True, ()), (False, ("<tool>", "▁▁▁▁", "\n\n"))], ids=["llama", "gemma"])
def model(request):
    prefix, own = request.param
    theirs, pieces = trained(prefix, own)
    return theirs, Tokenizer.from_gguf(spm_metadata(pieces, prefix), "x.gguf"), prefix


@settings(max_examples=200)
@given(text=TEXT | st.text("the cadog 19(x):+,안녕 세상\n<tol>", max_size=60))
def test_a_trained_model_encodes_and_decodes_as_in_sentencepiece(model, text):
    assume(not any(f"<{name}>" in text for name in ("unk", "s", "/s")))
    assume("\0" not in text)  # where sentencepiece's C++ strings end
    theirs, ours, _ = model
    ids = theirs.encode(text)
    assert ours.encode(text, add_special_tokens=False) == ids
    assert ours.decode(ids) == theirs.decode(ids)
    stream = ours.stream()
    assert "".join([*map(stream.push, ids), stream.finish()]) == ours.decode(ids)


def test_special_tokens_in_text(model):
    """They are found before anything else; what follows one begins as a text does, as in Llama 2's own tokenizer."""
    theirs, ours, prefix = model
    cat = theirs.encode("cat")
    assert ours.encode("cat</s>cat<unk>") == [1, *cat, 2, *cat, 0]
    assert ours.decode([1, *cat, 2]) == "cat"
    assert ours.decode([1, *cat, 2], skip_special_tokens=False) == ("<s> cat</s>" if prefix else "<s>cat</s>")
    plain = ours.encode("cat</s>", add_special_tokens=False, parse_special=False)
    assert 2 not in plain
    assert plain == theirs.encode("cat</s>")
    assert (ours.bos_token_id, ours.eos_token_ids, ours.special_tokens["unk_token"]) == (1, (2,), "<unk>")
    assert ours.kind == "SentencePiece BPE"


def test_bytes_of_a_character_are_held_back_until_it_is_whole(model):
    _, ours, _ = model
    letters = ours.encode("a", add_special_tokens=False)
    ids = ours.encode("a🎉", add_special_tokens=False)[len(letters) :]
    assert [ours.token_text(token_id) for token_id in ids] == ["<0xF0>", "<0x9F>", "<0x8E>", "<0x89>"]
    stream = ours.stream()
    assert [stream.push(token_id) for token_id in [*letters, *ids]][-4:] == ["", "", "", "🎉"]
    comma = ours.encode(",")[-1]
    assert [stream.push(token_id) for token_id in [*ids[:2], comma]] == ["", "", "\ufffd,"]
    assert stream.finish() == ""


def test_merges_are_ordered_by_what_they_make():
    scores = {"a": -9.0, "b": -9.0, "ab": -1.0, "ba": -0.5, "aba": -0.7, "x": -9.0}
    assert derive_merges(scores) == [("b", "a"), ("a", "ba"), ("ab", "a"), ("a", "b")]
    assert derive_merges({"a": 0.0, "aa": 1.0, "aaa": 1.0}) == [("a", "a"), ("a", "aa"), ("aa", "a")]


# ---- what is refused


SMALL = [(text, 0.0, kind) for text, kind in SPECIAL + BYTES] + [("▁", -2.0, TokenType.NORMAL), ("a", -3.0, 1)]
NO_BYTES = [("<b>", 0.0, TokenType.BYTE)]


def small(**changes):
    return spm_metadata(SMALL, True) | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model": "bert"}, r"'bert' \(WordPiece\); supported: gpt2 \(byte-level BPE\), llama"),
        ({"model": "t5"}, r"'t5' \(SentencePiece's unigram model\); supported"),
        ({"model": "plamo2"}, r"'plamo2'; supported"),
        ({"precompiled_charsmap": [1, 2]}, "'tokenizer.ggml.precompiled_charsmap' is set: not implemented"),
        ({"remove_extra_whitespaces": True}, "'tokenizer.ggml.remove_extra_whitespaces' is set: not implemented"),
        ({"add_sep_token": True}, "'tokenizer.ggml.add_sep_token' is set: not implemented"),
    ],
)
def test_tokenizers_that_are_not_implemented(fields, words):
    with pytest.raises(UnsupportedError, match=rf"x\.gguf.*{words}"):
        Tokenizer.from_gguf(small(**fields), "x.gguf")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"scores": None}, "'tokenizer.ggml.scores' is missing"),
        ({"scores": [0.0] * 5}, "has 5 entries, expected one for each of 261 tokens"),
        ({"scores": [0.0] * 260 + [float("nan")]}, "is nan for token 260, expected a finite number"),
        ({"tokens": [*(t for t, _, _ in SMALL[:-1]), "a" * 1001]}, "1,001 characters, expected at most 1,000"),
        ({"scores": [0] * 261}, "holds 0 at index 0, expected float"),
        ({"add_space_prefix": 1}, r"is 1 \(int\), expected bool"),
        ({"bos_token_id": None}, "add_bos_token' is true by default for this kind of tokenizer, but"),
        ({"token_type": [2, 3, 3] + [6] * 255 + [1] * 3}, "marks 255 byte tokens, .*: '<0xFF>' is missing"),
        ({"token_type": [2, 3, 3] + [6] * 256 + [6, 1]}, "marks 257 byte tokens, .*: '▁' is not a byte token"),
    ],
)
def test_damaged_sentencepiece_fields(fields, words):
    with pytest.raises(TokenizerError, match=rf"x\.gguf.*{words}"):
        Tokenizer.from_gguf(small(**fields), "x.gguf")


def test_the_small_model_without_the_fault():
    metadata = small(scores=np.array(small()["tokenizer.ggml.scores"], np.float32))
    tokenizer = Tokenizer.from_gguf(metadata, "x.gguf")
    assert tokenizer.encode("a b") == [1, 259, 260, 259, 3 + ord("b")]
    assert tokenizer.decode([1, 259, 260, 259, 3 + ord("b")]) == "a b"


JUNK = st.sampled_from([None, True, -1, 2**63, 1.5, float("inf"), "", "x", "<0x00>", [], {}, [1], ["▁"]])


@settings(max_examples=100)
@given(data=st.data())
def test_fuzzed_sentencepiece_metadata(data):
    metadata = small()
    name = data.draw(st.sampled_from(sorted(metadata)))
    if isinstance(metadata[name], list) and data.draw(st.booleans()):
        metadata[name] = list(metadata[name])
        metadata[name][data.draw(st.integers(0, 260))] = data.draw(JUNK)
    else:
        metadata[name] = data.draw(JUNK)
    with contextlib.suppress(TokenizerError, UnsupportedError):
        tokenizer = Tokenizer.from_gguf(metadata, "x.gguf")
        tokenizer.decode(tokenizer.encode("ab 1</s>🎉"))
