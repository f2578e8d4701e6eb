"""Byte-level BPE, as introduced by GPT-2 (Radford et al. 2019).

Text is split into pieces, the pieces are written as bytes, and adjacent tokens are merged. The file lists the merges in
order of decreasing priority; every token that a merge makes is in the vocabulary.
"""

from __future__ import annotations

from collections import Counter

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from minillm.errors import UnsupportedError
from minillm.tokenizer.gguf.fields import GGUFTokenizerFields, TokenType
from minillm.tokenizer.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer


def build(fields: GGUFTokenizerFields) -> tuple[tokenizers.Tokenizer, bool]:
    """Build the tokenizer without its special tokens. Return it and whether it adds the bos token by default."""
    pre_tokenizer = _pre_tokenizer(fields)
    vocabulary = fields.vocabulary
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary, _merges(fields, vocabulary), ignore_merges=pre_tokenizer.ignore_merges)
    )
    if pre_tokenizer.normalizes_nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizer.make()
    backend.decoder = decoders.ByteLevel()
    added = fields.tokens_of_type(TokenType.USER_DEFINED)
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
    return backend, pre_tokenizer.adds_bos


def _pre_tokenizer(fields: GGUFTokenizerFields) -> PreTokenizer:
    field = "tokenizer.ggml.pre"
    name = fields.get(field, str)
    if name not in PRE_TOKENIZERS:
        found = "missing" if name is None else repr(name)
        supported = ", ".join(sorted(PRE_TOKENIZERS))
        raise UnsupportedError(f"{fields.source}: metadata {field!r} is {found}; supported: {supported}")
    if fields.get("tokenizer.ggml.add_space_prefix", bool, False):
        raise UnsupportedError(
            f"{fields.source}: 'tokenizer.ggml.add_space_prefix' is not implemented for byte-level BPE"
        )
    return PRE_TOKENIZERS[name]


def _merges(fields: GGUFTokenizerFields, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    field = "tokenizer.ggml.merges"
    lines = fields.array(field, str)
    merges = [tuple(line.split(" ")) for line in lines]
    for index, merge in enumerate(merges):
        if len(merge) != 2 or not all(merge):
            raise fields.error(
                field, f"holds {lines[index]!r:.60} at index {index:,}, expected two tokens separated by a space"
            )
        left, right = merge
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            missing = next(token for token in (left, right, left + right) if token not in vocabulary)
            raise fields.error(field, f"at index {index:,} needs {missing!r:.60}, which is not in the vocabulary")
    if len(set(merges)) < len(merges):
        duplicate = Counter(lines).most_common(1)[0][0]
        raise fields.error(field, f"holds {duplicate!r:.60} twice")
    return merges
