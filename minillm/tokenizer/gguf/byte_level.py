"""Byte-level BPE, as GPT-2 brought it (Radford et al. 2019): text is cut, spelled in bytes, and neighbours are merged.

The file lists the merges, the most urgent first; which tokens they make is in the vocabulary.
"""

from __future__ import annotations

from collections import Counter

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from minillm.errors import UnsupportedError
from minillm.tokenizer.gguf.fields import GGUFTokenizerFields, TokenType
from minillm.tokenizer.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer


def build(fields: GGUFTokenizerFields) -> tuple[tokenizers.Tokenizer, bool]:
    """The tokenizer, still without its special tokens, and whether a text begins with the bos token by default."""
    kind = _pre_tokenizer(fields)
    vocabulary = fields.vocabulary
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, _merges(fields, vocabulary), ignore_merges=kind.whole_pieces))
    if kind.composes:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = kind.cuts()
    backend.decoder = decoders.ByteLevel()
    added = fields.tokens_of(TokenType.USER_DEFINED)
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
    return backend, kind.begins_with_bos


def _pre_tokenizer(fields: GGUFTokenizerFields) -> PreTokenizer:
    field = "tokenizer.ggml.pre"
    name = fields.get(field, str)
    if name not in PRE_TOKENIZERS:
        found = "missing" if name is None else repr(name)
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise UnsupportedError(f"{fields.where}: metadata {field!r} is {found}; supported: {known}")
    if fields.get("tokenizer.ggml.add_space_prefix", bool, False):
        raise UnsupportedError(f"{fields.where}: 'tokenizer.ggml.add_space_prefix' with byte-level BPE")
    return PRE_TOKENIZERS[name]


def _merges(fields: GGUFTokenizerFields, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    field = "tokenizer.ggml.merges"
    lines = fields.array(field, str)
    merges = [tuple(line.split(" ")) for line in lines]
    for index, merge in enumerate(merges):
        if len(merge) != 2 or not all(merge):
            raise fields.wrong(field, f"holds {lines[index]!r:.60} at index {index:,}, wanted two tokens and a space")
        left, right = merge
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            missing = next(token for token in (left, right, left + right) if token not in vocabulary)
            raise fields.wrong(field, f"at index {index:,} needs {missing!r:.60}, which is not in the vocabulary")
    if len(set(merges)) < len(merges):
        twice = Counter(lines).most_common(1)[0][0]
        raise fields.wrong(field, f"holds {twice!r:.60} twice")
    return merges
