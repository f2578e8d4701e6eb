"""Builds a tokenizer from the metadata of a GGUF file. Every field is checked before it is used.

The fields, as llama.cpp's converter writes them:

    tokenizer.ggml.model             algorithm: "gpt2" is byte-level BPE, "llama" is SentencePiece's BPE
    tokenizer.ggml.tokens            [V] strings; the index is the token id
    tokenizer.ggml.token_type        [V] integers, see `TokenType`
    tokenizer.ggml.pre               "gpt2" only: name of the pre-tokenizer, which splits text before BPE merges
    tokenizer.ggml.merges            "gpt2" only: "left right" strings; earlier merges have priority
    tokenizer.ggml.scores            "llama" only: [V] floats; higher scores have priority
    tokenizer.ggml.add_space_prefix  "llama" only: whether a space is added in front of every text
    tokenizer.ggml.*_token_id        ids of the special tokens in each role
    tokenizer.ggml.add_bos_token     whether every text begins with the beginning-of-sequence token
    tokenizer.ggml.add_eos_token     whether every text ends with the end-of-sequence token
    tokenizer.chat_template          a Jinja program

`fields.py` reads and checks the fields. `byte_level.py` and `sentencepiece.py` implement the two algorithms, and
`pre_tokenizers.py` the pre-tokenizers.
"""

from __future__ import annotations

from collections.abc import Callable

import tokenizers
from tokenizers import AddedToken, processors

from minillm.errors import UnsupportedError
from minillm.tokenizer.gguf import byte_level, sentencepiece
from minillm.tokenizer.gguf.fields import GGUFTokenizerFields, TokenType

__all__ = ["GGUFTokenizerFields", "TokenType", "build"]

ALGORITHMS = {"gpt2": byte_level.build, "llama": sentencepiece.build}
NOT_IMPLEMENTED = {"bert": "WordPiece", "t5": "SentencePiece's unigram model", "rwkv": "RWKV's tokenizer"}


def build(fields: GGUFTokenizerFields) -> tokenizers.Tokenizer:
    """Return the tokenizer that the metadata describes, as an object of the `tokenizers` library.

    Raises
    ------
    TokenizerError
        A field is missing, damaged, or contradicts another.
    UnsupportedError
        The algorithm, the pre-tokenizer or an option is not implemented.
    """
    name = fields.get("tokenizer.ggml.model", str)
    if name not in ALGORITHMS:
        found = "missing" if name is None else repr(name)
        description = f" ({NOT_IMPLEMENTED[name]})" if name in NOT_IMPLEMENTED else ""
        raise UnsupportedError(
            f"{fields.source}: metadata 'tokenizer.ggml.model' is {found}{description}; supported: "
            "gpt2 (byte-level BPE), llama (SentencePiece's BPE)"
        )
    for field in ("precompiled_charsmap", "remove_extra_whitespaces", "add_sep_token"):
        if fields.metadata.get(f"tokenizer.ggml.{field}"):
            raise UnsupportedError(
                f"{fields.source}: metadata 'tokenizer.ggml.{field}' is set, which is not implemented"
            )
    backend, adds_bos = ALGORITHMS[name](fields)
    strips = _strips_after(fields)
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False, rstrip=strips(token)) for token in fields.special()]
    )
    _add_bos_and_eos(backend, fields, adds_bos)
    return backend


def _strips_after(fields: GGUFTokenizerFields) -> Callable[[str], bool]:
    """Return a function that says whether white space after a special token belongs to the token.

    That is so in Phi-3, whose files do not say it. llama.cpp recognizes the model by its name.
    """
    name = (fields.get("general.name", str) or "").lower()
    if "phi-3" not in name and "phi3" not in name:
        return lambda token: False
    return lambda token: token not in ("<unk>", "<s>", "<|endoftext|>")


def _add_bos_and_eos(backend: tokenizers.Tokenizer, fields: GGUFTokenizerFields, adds_bos: bool) -> None:
    """Add a bos token before each text, or an eos token after it, if the metadata or the default requires it."""
    bos_id, eos_id = _added_id(fields, "bos", adds_bos), _added_id(fields, "eos", False)
    before, after = ["<bos>"] * (bos_id is not None), ["<eos>"] * (eos_id is not None)
    special_tokens = [
        {"id": name, "ids": [token_id], "tokens": [name]}
        for name, token_id in (("<bos>", bos_id), ("<eos>", eos_id))
        if token_id is not None
    ]
    if special_tokens:
        backend.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after], special_tokens=special_tokens
        )


def _added_id(fields: GGUFTokenizerFields, role: str, default: bool) -> int | None:
    """Return the id of the token that is added to each text in a role such as `"bos"`, or None if none is added."""
    flag = f"tokenizer.ggml.add_{role}_token"
    if not fields.get(flag, bool, default):
        return None
    token_id = fields.token_id(role)
    if token_id is None:
        value = "is true" if flag in fields.metadata else "defaults to true for this kind of tokenizer"
        raise fields.error(flag, f"{value}, but 'tokenizer.ggml.{role}_token_id' is missing")
    return token_id
