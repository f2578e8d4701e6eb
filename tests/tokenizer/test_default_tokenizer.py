"""The default model's tokenizer returns the same ids and texts as transformers and the `tokenizers` library."""

import warnings

import pytest
import tokenizers
import transformers
from gguf import GGUFReader
from hypothesis import assume, given
from hypothesis import strategies as st
from support.tokenizer_builders import streamed
from tokenizers import pre_tokenizers

from minillm.errors import LostTextWarning, TokenizerError
from minillm.tokenizer import Tokenizer

PROMPTS = {
    "english": "The quick brown fox doesn't jump over the lazy dog.  Twice, it's said.",
    "code": "def f(x):\n    return [x ** 2 for x in range(10)]  # squares\n\n\tprint(f(3))",
    "korean": "안녕하세요, 오늘 날씨가 어때요? 서울은 비가 옵니다.",
    "emoji": "👩‍👩‍👧‍👦 says 🎉🎉 and 🇰🇷, naïvely",
    "digits": "In 1984, 3.14159 and 1,000,000 were 12 apples at 5%",
    "chat": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
}
TEXT = st.text(max_size=60) | st.text("ab 1٣½²\n\t'.,<|im_end|>é한🎉\u200d", max_size=40)


@pytest.fixture(scope="module")
def default_metadata(default_gguf):
    fields = GGUFReader(default_gguf).fields.values()
    return {field.name: field.contents() for field in fields if field.name.startswith("tokenizer.")}


@pytest.fixture(scope="module")
def default_tokenizer(default_metadata):
    return Tokenizer.from_gguf(default_metadata, "default.gguf")


@pytest.fixture(scope="module")
def hf_tokenizer(default_gguf):
    return transformers.AutoTokenizer.from_pretrained(default_gguf.parent, gguf_file=default_gguf.name)


@pytest.fixture(scope="module")
def original_backend(hf_tokenizer):
    """SmolLM2's original tokenizer: the one that transformers reads from GGUF, plus a split around every digit."""
    backend = tokenizers.Tokenizer.from_str(hf_tokenizer.backend_tokenizer.to_str())
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    return backend


@pytest.mark.parametrize("text", PROMPTS.values(), ids=PROMPTS)
def test_ids_equal_those_of_transformers(default_tokenizer, hf_tokenizer, original_backend, text):
    ids = default_tokenizer.encode(text)
    assert ids == hf_tokenizer(text).input_ids == original_backend.encode(text).ids
    assert default_tokenizer.decode(ids, skip_special_tokens=False) == text


def test_whitespace_before_digits_is_not_split_as_by_transformers(default_tokenizer, hf_tokenizer, original_backend):
    # When it reads GGUF, transformers ignores `tokenizer.ggml.pre` and splits text like GPT-2. The results differ only
    # where several white-space characters precede a number, and for numeric characters outside ASCII.
    for text in ("Steps:\n\n1. Go", "a  5", " ½"):
        assert default_tokenizer.encode(text) == original_backend.encode(text).ids != hf_tokenizer(text).input_ids


@given(text=TEXT)
def test_ids_of_any_text_equal_those_of_the_original_tokenizer(default_tokenizer, original_backend, text):
    assert default_tokenizer.encode(text) == original_backend.encode(text).ids


@given(text=TEXT)
def test_decode_inverts_encode(default_tokenizer, default_metadata, text):
    vocabulary = set(default_metadata["tokenizer.ggml.tokens"])
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    assume(all(letter in vocabulary for piece, _ in pieces for letter in piece))  # 21 bytes have no token
    assert default_tokenizer.decode(default_tokenizer.encode(text), skip_special_tokens=False) == text


@given(text=TEXT)
def test_without_parse_special_text_never_becomes_a_special_token(default_tokenizer, text):
    text += "<|im_start|>"
    ids = default_tokenizer.encode(text, parse_special=False)
    assert min(ids) > 16  # ids 0 to 16 are the control tokens
    assert 1 in default_tokenizer.encode(text)


def test_attributes_and_repr(default_tokenizer):
    assert default_tokenizer.vocab_size == 49152
    assert default_tokenizer.bos_token_id == 1
    assert default_tokenizer.eos_token_ids == (2, 0)
    assert "im_start" in default_tokenizer.chat_template
    assert repr(default_tokenizer).startswith(
        "Tokenizer(byte-level BPE, 49,152 tokens, bos 1, eos (2, 0), with chat template"
    )
    texts = [default_tokenizer.token_text(token_id) for token_id in default_tokenizer.encode("a cat\n\n1안<|im_end|>")]
    assert texts == ["a", " cat", "\n\n", "1", "<0xEC>", "<0x95>", "<0x88>", "<|im_end|>"]


@pytest.mark.parametrize("text", ["\ud800", "ok \udc80 no", None, b"bytes", ["a"]])
def test_encode_rejects_invalid_text(default_tokenizer, text):
    with pytest.raises(TokenizerError, match="encode: "):
        default_tokenizer.encode(text)


@pytest.mark.parametrize("token_id", [-1, -(2**70), 1.0, "5", None, [5]])
def test_invalid_token_ids_are_rejected(default_tokenizer, token_id):
    for use in (
        lambda: default_tokenizer.decode([5, token_id]),
        lambda: default_tokenizer.stream().push(token_id),
        lambda: default_tokenizer.token_text(token_id),
    ):
        with pytest.raises(TokenizerError, match="is not a token id"):
            use()


@pytest.mark.parametrize("token_id", [49152, 2**31, 2**64])
def test_an_id_without_a_token_adds_no_text(default_tokenizer, token_id):
    ids = default_tokenizer.encode("안녕 a cat")
    for position in range(len(ids) + 1):  # including positions inside a character
        mixed = [*ids[:position], token_id, *ids[position:]]
        assert default_tokenizer.decode(mixed) == "안녕 a cat" == "".join(streamed(default_tokenizer, mixed))
    assert default_tokenizer.token_text(token_id) == f"<no token {token_id}>"


def ids_of(tokenizer):
    """Return a strategy for lists of ids: mostly single bytes and special tokens, which are the difficult cases."""
    short = [token_id for token_id in range(tokenizer.vocab_size) if len(tokenizer._token(token_id) or "") == 1]
    return st.lists(st.sampled_from(short) | st.integers(0, 16) | st.integers(0, tokenizer.vocab_size - 1), max_size=30)


@given(data=st.data(), skip_special=st.booleans())
def test_streaming_any_ids_equals_decode(default_tokenizer, original_backend, data, skip_special):
    ids = data.draw(ids_of(default_tokenizer))
    whole = default_tokenizer.decode(ids, skip_special_tokens=skip_special)
    assert whole == original_backend.decode(ids, skip_special_tokens=skip_special)
    assert "".join(streamed(default_tokenizer, ids, skip_special_tokens=skip_special)) == whole


def test_an_incomplete_character_is_held_back_and_an_invalid_byte_is_not(default_tokenizer):
    byte = {default_tokenizer.token_text(token_id): token_id for token_id in range(17, 300)}
    flag = default_tokenizer.encode("🎉")
    assert [delta for delta in streamed(default_tokenizer, flag) if delta] == ["🎉"]
    start, letter = default_tokenizer.encode("안")[0], byte["A"]
    assert streamed(default_tokenizer, [start, letter, letter]) == ["", "\ufffdA", "A", ""]
    assert streamed(default_tokenizer, [start]) == ["", "\ufffd"]
    assert streamed(default_tokenizer, [start, start, start]) == ["", "\ufffd", "\ufffd", "\ufffd"]


def test_a_stream_can_be_reused_after_finish(default_tokenizer):
    decoder = default_tokenizer.stream()
    for _ in range(2):
        assert decoder.push(default_tokenizer.encode("안")[0]) == ""
        assert decoder.finish() == "\ufffd"


@given(text=st.text(max_size=30))
def test_text_is_represented_or_the_warning_names_the_lost_characters(default_tokenizer, text):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        decoded = default_tokenizer.decode(default_tokenizer.encode(text), skip_special_tokens=False)
    messages = [str(warning.message) for warning in caught if warning.category is LostTextWarning]
    lost = [f"U+{ord(character):04X}" for character in text if character not in decoded]
    assert bool(messages) == bool(lost)
    assert all(name in messages[0] for name in lost[:3])


@pytest.mark.parametrize("ids", [3, None, "12", b"12", 2.5])
def test_decode_rejects_what_is_no_list_of_ids(default_tokenizer, ids):
    with pytest.raises(TokenizerError, match="decode: expected a list of token ids"):
        default_tokenizer.decode(ids)
