"""Damaged and unsupported tokenizer fields in the metadata of a GGUF file."""

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tokenizer_builders import JUNK, paths_in

from minillm.errors import FallbackWarning, TokenizerError, UnsupportedError
from minillm.tokenizer import Tokenizer


def small_metadata():
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": ["<e>", "a", "b", "ab", "Ġ", "1", "<tool>", "[PAD]"],
        "tokenizer.ggml.token_type": [3, 1, 1, 1, 1, 1, 4, 5],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.eot_token_id": 6,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True,
    }


def test_small_metadata_of_numpy_arrays():
    metadata = small_metadata()
    metadata["tokenizer.ggml.tokens"] = np.array(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.token_type"] = np.array(metadata["tokenizer.ggml.token_type"], np.int32)
    tokenizer = Tokenizer.from_gguf(metadata, "small.gguf")
    assert tokenizer.encode("ab 11<tool><e>") == [0, 3, 4, 5, 5, 6, 0, 0]
    assert tokenizer.encode("ab", add_special_tokens=False) == [3]
    assert tokenizer.decode([0, 3, 4, 5, 6, 0]) == "ab 1<tool>"
    assert tokenizer.eos_token_ids == (0, 6)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model", "llama-2", "'llama-2'; supported: gpt2"),
        ("model", None, "missing; supported: gpt2"),
        ("pre", "qwen1", "'qwen1'; supported: command-r, "),
        ("add_space_prefix", True, "byte-level"),
    ],
)
def test_unsupported_tokenizers(field, value, message):
    with pytest.raises(UnsupportedError, match=rf"x\.gguf.*{message}"):
        Tokenizer.from_gguf(small_metadata() | {f"tokenizer.ggml.{field}": value}, "x.gguf")


def test_a_missing_pre_tokenizer_is_replaced_by_the_default_of_llama_cpp():
    named, unnamed = (small_metadata() | {"tokenizer.ggml.pre": name} for name in ("default", None))
    with pytest.warns(FallbackWarning, match=r"x\.gguf: metadata 'tokenizer\.ggml\.pre' is missing"):
        tokenizer = Tokenizer.from_gguf(unnamed, "x.gguf")
    assert tokenizer.encode("ab 11") == Tokenizer.from_gguf(named, "x.gguf").encode("ab 11")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model", 3, "is 3"),
        ("tokens", None, "missing"),
        ("tokens", [], "empty"),
        ("tokens", "abc", "array"),
        ("tokens", ["<e>", "a", "b", "ab", "Ġ", "1", "<tool>", 7], "index 7"),
        ("tokens", ["<e>", "a", "b", "ab", "Ġ", "a", "<tool>", "x"], "'a' twice, as ids 1 and 5"),
        ("tokens", ["<e>", "a", "b", "ab", "", "1", "<tool>", "x"], "id 4"),
        ("tokens", ["<e>", "a", "b", "ba", "Ġ", "1", "<tool>", "x"], "'ab'"),
        ("token_type", [1, 2], "has 2 entries, expected 8"),
        ("token_type", [3, 1, 1, 1, 1, 1, 1, 9], "is 9 for token 7"),
        ("token_type", [3, 1, 1, 1, 1, 1, 1, True], "index 7"),
        ("token_type", None, "missing"),
        ("merges", ["a  b"], "index 0"),
        ("merges", ["ab"], "index 0"),
        ("merges", ["a b", "a "], "index 1"),
        ("merges", ["a z"], "'z'"),
        ("merges", ["a b", "a b"], "twice"),
        ("bos_token_id", 8, "below the vocabulary size 8"),
        ("eos_token_id", -1, "is -1"),
        ("eos_token_id", 1.0, "float"),
        ("add_bos_token", 1, "expected bool"),
        ("bos_token_id", None, "missing"),
    ],
)
def test_damaged_fields(field, value, message):
    with pytest.raises(TokenizerError, match=rf"x\.gguf.*{message}"):
        Tokenizer.from_gguf(small_metadata() | {f"tokenizer.ggml.{field}": value}, "x.gguf")


@given(data=st.data())
def test_fuzzed_metadata_works_or_raises_a_documented_error(data):
    metadata = small_metadata()
    path = data.draw(st.sampled_from([path for path in paths_in(metadata) if path]))
    parent = metadata
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = data.draw(JUNK | st.text(max_size=3))
    with contextlib.suppress(TokenizerError, UnsupportedError):
        Tokenizer.from_gguf(metadata, "x.gguf").encode("ab 1<e>")
