"""A tokenizer rebuilt from the metadata of a GGUF file, every field checked before it is believed.

The fields, as llama.cpp's converter writes them:

    tokenizer.ggml.model             the algorithm: "gpt2" is byte-level BPE, "llama" SentencePiece's BPE
    tokenizer.ggml.tokens            [V] strings, index = token id
    tokenizer.ggml.token_type        [V] integers, see `TokenType`
    tokenizer.ggml.pre               of "gpt2": how text is cut before BPE merges anything, by name
    tokenizer.ggml.merges            of "gpt2": "left right" strings, the earlier the more urgent
    tokenizer.ggml.scores            of "llama": [V] floats, the higher the more urgent
    tokenizer.ggml.add_space_prefix  of "llama": whether a text begins with a space of its own
    tokenizer.ggml.*_token_id        the roles some tokens play
    tokenizer.ggml.add_bos_token     whether every text begins with the beginning-of-sequence token; add_eos_token: ends
    tokenizer.chat_template          a Jinja program

The parts: `fields.py` reads and checks; `byte_level.py` and `sentencepiece.py` are the two algorithms, and
`pre_tokenizers.py` the ways to cut.
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
    """The tokenizer of the `tokenizers` library that the metadata describes.

    Raises `TokenizerError` for fields that are missing or contradict each other, `UnsupportedError` for
    algorithms that are not implemented.
    """
    name = fields.get("tokenizer.ggml.model", str)
    if name not in ALGORITHMS:
        found = "missing" if name is None else repr(name)
        known = f" ({NOT_IMPLEMENTED[name]})" if name in NOT_IMPLEMENTED else ""
        raise UnsupportedError(
            f"{fields.where}: metadata 'tokenizer.ggml.model' is {found}{known}; supported: gpt2 (byte-level BPE), "
            "llama (SentencePiece's BPE)"
        )
    for field in ("precompiled_charsmap", "remove_extra_whitespaces", "add_sep_token"):
        if fields.metadata.get(f"tokenizer.ggml.{field}"):
            raise UnsupportedError(f"{fields.where}: metadata 'tokenizer.ggml.{field}' is set: not implemented")
    backend, begins_with_bos = ALGORITHMS[name](fields)
    special = fields.tokens_of(TokenType.CONTROL, TokenType.UNKNOWN)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    _frame(backend, fields, begins_with_bos)
    return backend


def _frame(backend: tokenizers.Tokenizer, fields: GGUFTokenizerFields, begins_with_bos: bool) -> None:
    """Put a beginning-of-sequence token before each text, or an end after it, if the file or its kind says so."""
    ids = {"bos": _frame_id(fields, "bos", begins_with_bos), "eos": _frame_id(fields, "eos", False)}
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
        said = "is true" if flag in fields.metadata else "is true for this kind of tokenizer unless it says otherwise"
        raise fields.wrong(flag, f"{said}, but 'tokenizer.ggml.{role}_token_id' is missing")
    return token_id
