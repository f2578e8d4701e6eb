"""SentencePiece's BPE from GGUF files: ids and texts equal those of the `sentencepiece` library."""

import contextlib
import io
import struct

import numpy as np
import pytest
import sentencepiece
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.tokenizer_builders import ANY_TEXT, spm_metadata

from minillm.errors import TokenizerError, UnsupportedError
from minillm.tokenizer import Tokenizer
from minillm.tokenizer.gguf import TokenType
from minillm.tokenizer.gguf.sentencepiece import derive_merges

SPECIAL = [("<unk>", TokenType.UNKNOWN), ("<s>", TokenType.CONTROL), ("</s>", TokenType.CONTROL)]
BYTES = [(f"<0x{byte:02X}>", TokenType.BYTE) for byte in range(256)]
SENTENCES = [
    "the cat sat on the mat in 1984",
    "a dog, a cat and the hat",
    "안녕 세상, 안녕",
    "def f(x): return x + 1",
] * 5


def message(number, value):
    """Encode a field of a Protocol Buffers message: an integer, a float, or bytes."""
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(number):
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)


def sentencepiece_model(pieces, adds_space, byte_fallback):
    """Return a model of the `sentencepiece` library. The field numbers come from sentencepiece_model.proto."""
    encoded = [
        message(1, text.encode()) + message(2, score) + message(3, int(token_type))
        for text, score, token_type in pieces
    ]
    trainer = message(3, 2) + message(35, int(byte_fallback)) + message(40, 0) + message(41, 1) + message(42, 2)
    normalizer = message(1, b"identity") + message(3, int(adds_space)) + message(4, 0) + message(5, 1)
    model = b"".join(message(1, piece) for piece in encoded) + message(2, trainer) + message(3, normalizer)
    return sentencepiece.SentencePieceProcessor(model_proto=model)


@st.composite
def vocabularies(draw):
    """Draw a vocabulary: texts in any order of scores, all of their characters, and byte tokens or not."""
    texts = draw(st.lists(st.text("ab▁", min_size=2, max_size=6), max_size=14, unique=True))
    characters = sorted({"a", "▁", *"".join(texts)})
    adds_space, byte_fallback = draw(st.booleans()), draw(st.booleans())
    user_defined = []
    if not adds_space:
        candidates = st.lists(st.sampled_from(["▁▁", "▁▁▁", "b▁", "<x>", "\n"]), max_size=3, unique=True)
        user_defined = draw(candidates)
    normal = [text for text in [*texts, *characters] if text not in user_defined]
    pieces = [(text, 0.0, token_type) for text, token_type in SPECIAL + BYTES * byte_fallback]
    pieces += [(text, 0.0, TokenType.USER_DEFINED) for text in user_defined]
    pieces += [(text, -float(rank), TokenType.NORMAL) for rank, text in enumerate(normal)]
    return pieces, adds_space, byte_fallback


@settings(max_examples=150)
@given(vocabulary=vocabularies(), texts=st.lists(st.text("aab  \n▁cé한<x>", max_size=25), min_size=5, max_size=10))
def test_any_vocabulary_encodes_and_decodes_as_sentencepiece(vocabulary, texts):
    pieces, adds_space, _ = vocabulary
    ours, theirs = Tokenizer.from_gguf(spm_metadata(pieces, adds_space), "x.gguf"), sentencepiece_model(*vocabulary)
    for text in texts:
        ids = theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == ids
        assert ours.encode(text) == [1, *ids]  # a bos token is added by default
        if 0 not in ids:
            assert ours.decode(ids) == theirs.decode(ids) == text.replace("▁", " ")
        stream = ours.stream()
        assert "".join([*map(stream.push, ids), stream.finish()]) == ours.decode(ids)


def trained(adds_space, user_defined=()):
    """Train a small model with `sentencepiece`; return it and its pieces."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_writer=model,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        add_dummy_prefix=adds_space,
        user_defined_symbols=list(user_defined),
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
        text, token_type = theirs.id_to_piece(index), TokenType.NORMAL
        for matches, found in (
            (theirs.is_unknown(index), TokenType.UNKNOWN),
            (theirs.is_control(index), TokenType.CONTROL),
            (theirs.is_byte(index), TokenType.BYTE),
            (text in user_defined, TokenType.USER_DEFINED),
        ):
            token_type = found if matches else token_type
        pieces.append((text, theirs.get_score(index), token_type))
    return theirs, pieces


@pytest.fixture(scope="module", params=[(True, ()), (False, ("<tool>", "▁▁▁▁", "\n\n"))], ids=["llama", "gemma"])
def model(request):
    adds_space, user_defined = request.param
    theirs, pieces = trained(adds_space, user_defined)
    return theirs, Tokenizer.from_gguf(spm_metadata(pieces, adds_space), "x.gguf"), adds_space


@settings(max_examples=200)
@given(text=ANY_TEXT | st.text("the cadog 19(x):+,안녕 세상\n<tol>", max_size=60))
def test_a_trained_model_encodes_and_decodes_as_sentencepiece(model, text):
    assume(not any(f"<{name}>" in text for name in ("unk", "s", "/s")))
    assume("\0" not in text)  # sentencepiece ends its C++ strings here
    theirs, ours, _ = model
    ids = theirs.encode(text)
    assert ours.encode(text, add_special_tokens=False) == ids
    assert ours.decode(ids) == theirs.decode(ids)
    stream = ours.stream()
    assert "".join([*map(stream.push, ids), stream.finish()]) == ours.decode(ids)


def test_special_tokens_in_text(model):
    """Special tokens are matched first. Text after one gets its own leading space, as in Llama 2's own tokenizer."""
    theirs, ours, adds_space = model
    cat = theirs.encode("cat")
    assert ours.encode("cat</s>cat<unk>") == [1, *cat, 2, *cat, 0]
    assert ours.decode([1, *cat, 2]) == "cat"
    assert ours.decode([1, *cat, 2], skip_special_tokens=False) == ("<s> cat</s>" if adds_space else "<s>cat</s>")
    plain = ours.encode("cat</s>", add_special_tokens=False, parse_special=False)
    assert 2 not in plain
    assert plain == theirs.encode("cat</s>")
    assert (ours.bos_token_id, ours.eos_token_ids, ours.special_tokens["unk_token"]) == (1, (2,), "<unk>")
    assert ours.algorithm == "SentencePiece BPE"


def test_bytes_are_held_back_until_the_character_is_complete(model):
    _, ours, _ = model
    letters = ours.encode("a", add_special_tokens=False)
    ids = ours.encode("a🎉", add_special_tokens=False)[len(letters) :]
    assert [ours.token_text(token_id) for token_id in ids] == ["<0xF0>", "<0x9F>", "<0x8E>", "<0x89>"]
    stream = ours.stream()
    assert [stream.push(token_id) for token_id in [*letters, *ids]][-4:] == ["", "", "", "🎉"]
    comma = ours.encode(",")[-1]
    assert [stream.push(token_id) for token_id in [*ids[:2], comma]] == ["", "", "\ufffd\ufffd,"]
    assert stream.finish() == ""


def test_merges_are_ordered_by_the_score_of_their_result():
    scores = {"a": -9.0, "b": -9.0, "ab": -1.0, "ba": -0.5, "aba": -0.7, "x": -9.0}
    assert derive_merges(scores) == [("b", "a"), ("a", "ba"), ("ab", "a"), ("a", "b")]
    assert derive_merges({"a": 0.0, "aa": 1.0, "aaa": 1.0}) == [("a", "a"), ("a", "aa"), ("aa", "a")]


SMALL = [(text, 0.0, token_type) for text, token_type in SPECIAL + BYTES]
SMALL += [("▁", -2.0, TokenType.NORMAL), ("a", -3.0, TokenType.NORMAL)]


def small_metadata(**changes):
    return spm_metadata(SMALL, True) | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}


@pytest.mark.parametrize(
    ("fields", "message_pattern"),
    [
        ({"model": "bert"}, r"'bert' \(WordPiece\); supported: gpt2 \(byte-level BPE\), llama"),
        ({"model": "t5"}, r"'t5' \(SentencePiece's unigram model\); supported"),
        ({"model": "plamo2"}, r"'plamo2'; supported"),
        ({"precompiled_charsmap": [1, 2]}, "'tokenizer.ggml.precompiled_charsmap' is set, which is not implemented"),
        (
            {"remove_extra_whitespaces": True},
            "'tokenizer.ggml.remove_extra_whitespaces' is set, which is not implemented",
        ),
        ({"add_sep_token": True}, "'tokenizer.ggml.add_sep_token' is set, which is not implemented"),
    ],
)
def test_unsupported_tokenizers_and_options(fields, message_pattern):
    with pytest.raises(UnsupportedError, match=rf"x\.gguf.*{message_pattern}"):
        Tokenizer.from_gguf(small_metadata(**fields), "x.gguf")


@pytest.mark.parametrize(
    ("fields", "message_pattern"),
    [
        ({"scores": None}, "'tokenizer.ggml.scores' is missing"),
        ({"scores": [0.0] * 5}, "has 5 entries, expected 261"),
        ({"scores": [0.0] * 260 + [float("nan")]}, "is nan for token 260, expected a finite number"),
        (
            {"tokens": [*(t for t, _, _ in SMALL[:-1]), "a" * 1001]},
            "has 1,001 characters in token 260, expected at most 1,000",
        ),
        ({"scores": [0] * 261}, "holds 0 at index 0, expected float"),
        ({"add_space_prefix": 1}, r"is 1 \(int\), expected bool"),
        ({"bos_token_id": None}, "add_bos_token' defaults to true for this kind of tokenizer, but"),
        ({"token_type": [2, 3, 3] + [6] * 255 + [1] * 3}, "marks 255 byte tokens, .*: '<0xFF>' is missing"),
        ({"token_type": [2, 3, 3] + [6] * 256 + [6, 1]}, "marks 257 byte tokens, .*: '▁' is not a byte"),
    ],
)
def test_damaged_sentencepiece_fields(fields, message_pattern):
    with pytest.raises(TokenizerError, match=rf"x\.gguf.*{message_pattern}"):
        Tokenizer.from_gguf(small_metadata(**fields), "x.gguf")


def test_the_small_model_is_valid():
    metadata = small_metadata(scores=np.array(small_metadata()["tokenizer.ggml.scores"], np.float32))
    tokenizer = Tokenizer.from_gguf(metadata, "x.gguf")
    assert tokenizer.encode("a b") == [1, 259, 260, 259, 3 + ord("b")]
    assert tokenizer.decode([1, 259, 260, 259, 3 + ord("b")]) == "a b"


JUNK = st.sampled_from([None, True, -1, 2**63, 1.5, float("inf"), "", "x", "<0x00>", [], {}, [1], ["▁"]])


@settings(max_examples=100)
@given(data=st.data())
def test_fuzzed_metadata_works_or_raises_a_documented_error(data):
    metadata = small_metadata()
    name = data.draw(st.sampled_from(sorted(metadata)))
    if isinstance(metadata[name], list) and data.draw(st.booleans()):
        metadata[name] = list(metadata[name])
        metadata[name][data.draw(st.integers(0, 260))] = data.draw(JUNK)
    else:
        metadata[name] = data.draw(JUNK)
    with contextlib.suppress(TokenizerError, UnsupportedError):
        tokenizer = Tokenizer.from_gguf(metadata, "x.gguf")
        tokenizer.decode(tokenizer.encode("ab 1</s>🎉"))
