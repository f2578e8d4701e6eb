"""A tokenizer rebuilt from the metadata of a GGUF file, with every field checked before use.

The fields, as llama.cpp's converter writes them:

    tokenizer.ggml.model             the algorithm: "gpt2" is byte-level BPE, "llama" is SentencePiece's BPE
    tokenizer.ggml.tokens            [V] strings, index = token id
    tokenizer.ggml.token_type        [V] integers, see `TokenType`
    tokenizer.ggml.pre               for "gpt2": the name of the pre-tokenizer, which splits text before BPE
    tokenizer.ggml.merges            for "gpt2": "left right" strings, in order of decreasing priority
    tokenizer.ggml.scores            for "llama": [V] floats; a higher score is a higher priority
    tokenizer.ggml.add_space_prefix  for "llama": whether a space is added before each text
    tokenizer.ggml.*_token_id        the tokens with special roles
    tokenizer.ggml.add_bos_token     whether a beginning-of-sequence token is put before each text
    tokenizer.ggml.add_eos_token     whether an end-of-sequence token is put after each text
    tokenizer.chat_template          a Jinja program

`fields.py` reads and checks the fields, `byte_level.py` and `sentencepiece.py` build the two algorithms, and
`pre_tokenizers.py` holds the pre-tokenizers by name.
"""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, processors

from minillm.errors import UnsupportedError
from minillm.tokenizer.gguf import byte_level, sentencepiece
from minillm.tokenizer.gguf.fields import GGUFTokenizerFields, TokenType

__all__ = ["GGUFTokenizerFields", "TokenType", "build"]

ALGORITHMS = {"gpt2": byte_level.build, "llama": sentencepiece.build}
NOT_IMPLEMENTED = {"bert": "WordPiece", "t5": "SentencePiece's unigram model", "rwkv": "RWKV's"}


def build(fields: GGUFTokenizerFields) -> tokenizers.Tokenizer:
    """Build the tokenizer of the `tokenizers` library that the metadata describes.

    Raises `TokenizerError` for fields that are missing or contradict each other, and `UnsupportedError` for
    algorithms that are not implemented.
    """
    name = fields.get("tokenizer.ggml.model", str)
    if name not in ALGORITHMS:
        found = "missing" if name is None else repr(name)
        algorithm = f" ({NOT_IMPLEMENTED[name]})" if name in NOT_IMPLEMENTED else ""
        raise UnsupportedError(
            f"{fields.source}: 'tokenizer.ggml.model' is {found}{algorithm}; supported: gpt2 (byte-level BPE), "
            "llama (SentencePiece's BPE)"
        )
    for field in ("precompiled_charsmap", "remove_extra_whitespaces", "add_sep_token"):
        if fields.metadata.get(f"tokenizer.ggml.{field}"):
            raise UnsupportedError(f"{fields.source}: 'tokenizer.ggml.{field}' is set: not implemented")
    backend, adds_bos = ALGORITHMS[name](fields)
    special = fields.tokens_of_type(TokenType.CONTROL, TokenType.UNKNOWN)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    _add_framing(backend, fields, adds_bos)
    return backend


def _add_framing(backend: tokenizers.Tokenizer, fields: GGUFTokenizerFields, adds_bos: bool) -> None:
    """Add a beginning-of-sequence token before or an end-of-sequence token after each text, if the metadata or the
    default of the algorithm requires it."""
    ids = {"bos": _frame_id(fields, "bos", adds_bos), "eos": _frame_id(fields, "eos", False)}
    special = [
        {"id": f"<{role}>", "ids": [token_id], "tokens": [f"<{role}>"]}
        for role, token_id in ids.items()
        if token_id is not None
    ]
    if special:
        template = [
            *(["<bos>"] if ids["bos"] is not None else []),
            "$A",
            *(["<eos>"] if ids["eos"] is not None else []),
        ]
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)


def _frame_id(fields: GGUFTokenizerFields, role: str, default: bool) -> int | None:
    flag = f"tokenizer.ggml.add_{role}_token"
    if not fields.get(flag, bool, default):
        return None
    token_id = fields.token_id(role)
    if token_id is None:
        origin = "is true" if flag in fields.metadata else "is true by default for this kind of tokenizer"
        raise fields.error(flag, f"{origin}, but 'tokenizer.ggml.{role}_token_id' is missing")
    return token_id
