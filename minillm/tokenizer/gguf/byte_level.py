"""Byte-level BPE of GPT-2 (Radford et al. 2019): text is split into pieces, written as bytes, and merged.

The file lists the merges in order of priority. The vocabulary contains the tokens that the merges produce.
"""

from __future__ import annotations

import warnings
from collections import Counter

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from minillm.errors import FallbackWarning, UnsupportedError
from minillm.tokenizer.gguf.fields import GGUFTokenizerFields, TokenType
from minillm.tokenizer.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer


def build(fields: GGUFTokenizerFields) -> tuple[tokenizers.Tokenizer, bool]:
    """Return the tokenizer without its special tokens, and whether it adds a bos token to each text by default."""
    pre_tokenizer = _pre_tokenizer(fields)
    vocabulary = fields.vocabulary
    bpe = models.BPE(vocabulary, _merges(fields, vocabulary), ignore_merges=pre_tokenizer.ignores_merges)
    backend = tokenizers.Tokenizer(bpe)
    if pre_tokenizer.composes:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizer.build()
    backend.decoder = decoders.ByteLevel()
    added = fields.tokens_of(TokenType.USER_DEFINED)
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
    return backend, pre_tokenizer.adds_bos


def _pre_tokenizer(fields: GGUFTokenizerFields) -> PreTokenizer:
    field = "tokenizer.ggml.pre"
    name = fields.get(field, str)
    if name is None:
        warnings.warn(
            f"{fields.source}: metadata {field!r} is missing, so text is split as llama.cpp does by default; if the "
            "model was trained with another pre-tokenizer, its answers will be worse",
            FallbackWarning,
            stacklevel=2,
        )
        name = "default"
    if name not in PRE_TOKENIZERS:
        supported = ", ".join(sorted(PRE_TOKENIZERS))
        raise UnsupportedError(f"{fields.source}: metadata {field!r} is {name!r}; supported: {supported}")
    if fields.get("tokenizer.ggml.add_space_prefix", bool, False):
        raise UnsupportedError(
            f"{fields.source}: metadata 'tokenizer.ggml.add_space_prefix' is true, which is not supported for "
            "byte-level BPE"
        )
    return PRE_TOKENIZERS[name]


def _merges(fields: GGUFTokenizerFields, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Return the pairs of tokens to merge, in order of priority."""
    field = "tokenizer.ggml.merges"
    lines = fields.array(field, str)
    merges = []
    for index, line in enumerate(lines):
        left, *others = line.split(" ")
        if len(others) != 1 or not left or not others[0]:
            raise fields.error(field, f"holds {line!r:.60} at index {index:,}, expected two tokens and a space")
        right = others[0]
        for token in (left, right, left + right):
            if token not in vocabulary:
                raise fields.error(field, f"needs {token!r:.60} at index {index:,}, which is not in the vocabulary")
        merges.append((left, right))
    if len(set(merges)) < len(merges):
        duplicate = Counter(lines).most_common(1)[0][0]
        raise fields.error(field, f"holds {duplicate!r:.60} twice")
    return merges
