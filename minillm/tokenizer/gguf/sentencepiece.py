"""SentencePiece's BPE (Kudo and Richardson 2018, arXiv:1808.06226), as used by Llama 2, Mistral and Gemma.

Text is not split. A space is written '▁' and treated like any other character. A character that is not in the
vocabulary is written in byte tokens such as `<0xE2>`. There is no list of merges: among all adjacent pairs that form a
token, the pair whose token has the highest score is merged first.

This module derives the list of merges. Every pair of tokens whose texts join to another token is a merge, and the
merges are ordered by the score of the token they form. If two tokens have the same score, which happens in no trained
vocabulary, the one with the lower id comes first.
"""

from __future__ import annotations

import math

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from minillm.tokenizer.gguf.fields import GGUFTokenizerFields, TokenType

SPACE = "▁"
MAX_TOKEN_LENGTH = 1_000  # characters; ten times the length in real vocabularies. Every split of a token is tried
BYTE_TOKENS = {f"<0x{byte:02X}>" for byte in range(256)}


def build(fields: GGUFTokenizerFields) -> tuple[tokenizers.Tokenizer, bool]:
    """Build the tokenizer without its special tokens. Return it and True: it adds the bos token by default."""
    unknown = fields.special_tokens().get("unk_token")
    backend = tokenizers.Tokenizer(
        models.BPE(
            fields.vocabulary,
            derive_merges(_scores(fields)),
            unk_token=unknown,
            fuse_unk=True,  # consecutive unknown characters become one unknown token
            byte_fallback=_has_bytes(fields),
        )
    )
    prefix = fields.get("tokenizer.ggml.add_space_prefix", bool, True)
    spaces = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    # User-defined tokens may be runs of spaces, so they are matched after normalization has replaced spaces by '▁'.
    # If a space is added before each text, the library would also add one to these tokens, so they are then matched
    # before normalization.
    added = fields.tokens_of_type(TokenType.USER_DEFINED)
    backend.add_tokens([AddedToken(token, special=False, normalized=not prefix) for token in added])
    return backend, True


def derive_merges(scores: dict[str, float]) -> list[tuple[str, str]]:
    """Return every pair of tokens whose texts join to a token, in order of decreasing score of that token.

    `scores` holds the scores of the tokens that BPE may produce, in order of their ids.
    """
    merges = []
    for whole in sorted(scores, key=scores.__getitem__, reverse=True):  # the sort is stable, so ties are ordered by id
        for cut in range(1, len(whole)):
            left, right = whole[:cut], whole[cut:]
            if left in scores and right in scores:
                merges.append((left, right))
    return merges


def _scores(fields: GGUFTokenizerFields) -> dict[str, float]:
    """Return the scores of the normal tokens, the only ones that BPE may produce."""
    field = "tokenizer.ggml.scores"
    scores = fields.array(field, float, len(fields.vocabulary))
    if not all(map(math.isfinite, scores)):
        index = next(index for index, score in enumerate(scores) if not math.isfinite(score))
        raise fields.error(field, f"is {scores[index]} for token {index:,}, expected a finite number")
    longest = max(fields.vocabulary, key=len)
    if len(longest) > MAX_TOKEN_LENGTH:
        description = f"token {fields.vocabulary[longest]:,} has {len(longest):,} characters"
        raise fields.error("tokenizer.ggml.tokens", f"{description}, expected at most {MAX_TOKEN_LENGTH:,}")
    tokens = zip(fields.vocabulary, scores, fields.token_types, strict=True)
    return {token: score for token, score, kind in tokens if kind == TokenType.NORMAL}


def _has_bytes(fields: GGUFTokenizerFields) -> bool:
    """Return whether the vocabulary has the 256 byte tokens. Raise `TokenizerError` if it has only some of them."""
    found = set(fields.tokens_of_type(TokenType.BYTE))
    if found and found != BYTE_TOKENS:
        mismatch, field = min(found ^ BYTE_TOKENS), "tokenizer.ggml.token_type"
        problem = "is not a byte token" if mismatch in found else "is missing"
        raise fields.error(
            field, f"marks {len(found)} byte tokens, expected <0x00> to <0xFF>: {mismatch!r:.60} {problem}"
        )
    return bool(found)
