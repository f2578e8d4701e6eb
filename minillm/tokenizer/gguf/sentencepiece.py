"""SentencePiece's BPE (Kudo and Richardson 2018, arXiv:1808.06226), used by Llama 2, Mistral and Gemma.

Text is not split into pieces first. A space is written '▁' and treated like any other character. A character that the
vocabulary lacks is written as byte tokens such as `<0xE2>`. There is no list of merges: of all adjacent pairs whose
concatenation is a token, the pair that produces the token with the highest score is merged first.

The library needs a list of merges, so this module derives it. Every pair of tokens whose concatenation is a token is a
merge, and merges are ordered by the score of the token that they produce. If two tokens have equal scores, which does
not occur in trained vocabularies, the lower id comes first.
"""

from __future__ import annotations

import math

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from minillm.tokenizer.gguf.fields import GGUFTokenizerFields, TokenType

SPACE = "▁"
MAX_TOKEN_LENGTH = 1_000  # characters, ten times more than in real vocabularies; limits the work of `derive_merges`
BYTE_TOKENS = {f"<0x{byte:02X}>" for byte in range(256)}


def build(fields: GGUFTokenizerFields) -> tuple[tokenizers.Tokenizer, bool]:
    """Return the tokenizer without its special tokens, and whether it adds a bos token to each text by default."""
    unknown = fields.special_tokens().get("unk_token")
    backend = tokenizers.Tokenizer(
        models.BPE(
            fields.vocabulary,
            derive_merges(_scores(fields)),
            unk_token=unknown,
            fuse_unk=True,  # consecutive unknown characters become one unknown token
            byte_fallback=_has_byte_tokens(fields),
        )
    )
    adds_space = fields.get("tokenizer.ggml.add_space_prefix", bool, True)
    spaces = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if adds_space else spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if adds_space else steps)
    # User-defined tokens may be runs of spaces, so they are matched after normalization, when spaces are '▁'. If a
    # space is added to each text, the library would add one to these tokens as well, so they are matched before.
    added = fields.tokens_of(TokenType.USER_DEFINED)
    backend.add_tokens([AddedToken(token, special=False, normalized=not adds_space) for token in added])
    return backend, True


def derive_merges(scores: dict[str, float]) -> list[tuple[str, str]]:
    """Return every pair of tokens whose concatenation is a token, in descending order of the score of that token.

    `scores` holds the tokens that BPE can produce, in order of ids.
    """
    merges = []
    for token in sorted(scores, key=scores.__getitem__, reverse=True):  # stable, so equal scores stay in order of ids
        for split in range(1, len(token)):
            left, right = token[:split], token[split:]
            if left in scores and right in scores:
                merges.append((left, right))
    return merges


def _scores(fields: GGUFTokenizerFields) -> dict[str, float]:
    """Return the scores of normal tokens, the only ones that BPE produces."""
    field = "tokenizer.ggml.scores"
    scores = fields.array(field, float, len(fields.vocabulary))
    if not all(map(math.isfinite, scores)):
        token_id = next(token_id for token_id, score in enumerate(scores) if not math.isfinite(score))
        raise fields.error(field, f"is {scores[token_id]} for token {token_id:,}, expected a finite number")
    longest_token = max(fields.vocabulary, key=len)
    if len(longest_token) > MAX_TOKEN_LENGTH:
        token_id = fields.vocabulary[longest_token]
        raise fields.error(
            "tokenizer.ggml.tokens",
            f"has {len(longest_token):,} characters in token {token_id:,}, expected at most {MAX_TOKEN_LENGTH:,}",
        )
    tokens = zip(fields.vocabulary, scores, fields.token_types, strict=True)
    return {token: score for token, score, token_type in tokens if token_type == TokenType.NORMAL}


def _has_byte_tokens(fields: GGUFTokenizerFields) -> bool:
    """Return whether the vocabulary has byte tokens. It must have a token for each byte, or none at all."""
    found = set(fields.tokens_of(TokenType.BYTE))
    if found and found != BYTE_TOKENS:
        token = min(found ^ BYTE_TOKENS)
        problem = "is not a byte" if token in found else "is missing"
        raise fields.error(
            "tokenizer.ggml.token_type",
            f"marks {len(found)} byte tokens, expected <0x00> to <0xFF>: {token!r:.60} {problem}",
        )
    return bool(found)
