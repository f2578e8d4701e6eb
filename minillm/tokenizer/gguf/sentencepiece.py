"""SentencePiece's BPE (Kudo and Richardson 2018, arXiv:1808.06226), as Llama 2, Mistral and Gemma have it.

Text is not cut. A space is written '▁', and is a character like any other; a character that the vocabulary lacks is
spelled in byte tokens, `<0xE2>`. There is no list of merges: of all neighbours that make a token together, those are
merged first whose token has the highest score.

Here the list is derived. A token of score s can be put together from any two tokens whose texts it consists of, so
every such pair is a merge, and the merges are ordered by the score of what they make. Where two tokens have one
score, which no trained vocabulary has, the one with the lower id goes first.
"""

from __future__ import annotations

import math

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from minillm.tokenizer.gguf.fields import GGUFTokenizerFields, TokenType

SPACE = "▁"
LONGEST_TOKEN = 1_000  # characters; those of real vocabularies have a tenth. Every place to cut one is tried
BYTE_TOKENS = {f"<0x{byte:02X}>" for byte in range(256)}


def build(fields: GGUFTokenizerFields) -> tuple[tokenizers.Tokenizer, bool]:
    """The tokenizer, still without its special tokens, and whether a text begins with the bos token by default."""
    unknown = fields.special_tokens().get("unk_token")
    backend = tokenizers.Tokenizer(
        models.BPE(
            fields.vocabulary,
            derive_merges(_scores(fields)),
            unk_token=unknown,
            fuse_unk=True,  # several unknown characters in a row are one unknown token
            byte_fallback=_has_bytes(fields),
        )
    )
    prefix = fields.get("tokenizer.ggml.add_space_prefix", bool, True)
    spaces = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    # User-defined tokens may be runs of spaces, to be found among the '▁' that spaces become. Where texts get a space
    # of their own, the library would give these tokens one as well, so there they are looked for before.
    added = fields.tokens_of(TokenType.USER_DEFINED)
    backend.add_tokens([AddedToken(token, special=False, normalized=not prefix) for token in added])
    return backend, True


def derive_merges(scores: dict[str, float]) -> list[tuple[str, str]]:
    """Every pair of tokens whose texts together are a token, the pair that makes the highest-scored one first.

    `scores` are those of the tokens that BPE may find, in the order of their ids.
    """
    merges = []
    for whole in sorted(scores, key=scores.__getitem__, reverse=True):  # a stable sort: ids decide between equals
        for cut in range(1, len(whole)):
            left, right = whole[:cut], whole[cut:]
            if left in scores and right in scores:
                merges.append((left, right))
    return merges


def _scores(fields: GGUFTokenizerFields) -> dict[str, float]:
    """The scores of normal tokens: the others are not for BPE to find."""
    field = "tokenizer.ggml.scores"
    scores = fields.array(field, float, len(fields.vocabulary))
    if not all(map(math.isfinite, scores)):
        index = next(index for index, score in enumerate(scores) if not math.isfinite(score))
        raise fields.wrong(field, f"is {scores[index]} for token {index:,}, wanted a finite number")
    longest = max(fields.vocabulary, key=len)
    if len(longest) > LONGEST_TOKEN:
        where = f"token {fields.vocabulary[longest]:,} has {len(longest):,} characters"
        raise fields.wrong("tokenizer.ggml.tokens", f"{where}, wanted {LONGEST_TOKEN:,} or fewer")
    tokens = zip(fields.vocabulary, scores, fields.token_types, strict=True)
    return {token: score for token, score, kind in tokens if kind == TokenType.NORMAL}


def _has_bytes(fields: GGUFTokenizerFields) -> bool:
    """Whether there is a token for every byte; there are all of them or none."""
    found = set(fields.tokens_of(TokenType.BYTE))
    if found and found != BYTE_TOKENS:
        odd, field = min(found ^ BYTE_TOKENS), "tokenizer.ggml.token_type"
        problem = "is no byte" if odd in found else "is missing"
        raise fields.wrong(field, f"marks {len(found)} byte tokens, wanted <0x00> to <0xFF>: {odd!r:.60} {problem}")
    return bool(found)
