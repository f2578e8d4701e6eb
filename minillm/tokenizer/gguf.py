"""A tokenizer rebuilt from the metadata of a GGUF file, every field checked before it is believed.

The fields, as llama.cpp's converter writes them:

    tokenizer.ggml.model        the algorithm: "gpt2" is byte-level BPE
    tokenizer.ggml.pre          the name of the pre-tokenizer: how text is cut before BPE merges anything
    tokenizer.ggml.tokens       [V] strings, index = token id
    tokenizer.ggml.token_type   [V] integers, see `TokenType`
    tokenizer.ggml.merges       "left right" strings, the earlier the more urgent
    tokenizer.ggml.*_token_id   the roles some tokens play
    tokenizer.chat_template     a Jinja program
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from minillm.errors import TokenizerError, UnsupportedError

ROLES = {"bos": "bos_token", "eos": "eos_token", "eot": "eot_token", "unknown": "unk_token", "padding": "pad_token"}


class TokenType(IntEnum):
    """What a token is for. Control and user-defined tokens are found in text before BPE sees it."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def _gpt2() -> pre_tokenizers.PreTokenizer:
    """Words with the space before them, runs of digits, runs of other signs (Radford et al. 2019)."""
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    """Every digit alone, then as GPT-2: "\\n\\n12" is "\\n\\n", "1", "2"."""
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {"gpt-2": _gpt2, "smollm": _smollm}


class GGUFTokenizerFields:
    """The tokenizer part of a GGUF file's metadata. `where` names the file in errors."""

    def __init__(self, metadata: Mapping[str, Any], where: str):
        self.metadata, self.where = metadata, where

    def wrong(self, field: str, what: str) -> TokenizerError:
        """The error to raise for a field."""
        return TokenizerError(f"{self.where}: metadata {field!r} {what}")

    def get(self, field: str, kind: type, default: Any = None) -> Any:
        """A field of type `kind` (not a bool where an int is wanted); `default` when it is absent."""
        value = self.metadata.get(field, default)
        if value is not default and type(value) is not kind:
            raise self.wrong(field, f"is {value!r:.60} ({type(value).__name__}), wanted {kind.__name__}")
        return value

    def array(self, field: str, kind: type) -> list[Any]:
        """A field that is a list, or a numpy array, of `kind`, as a list."""
        value = self.metadata.get(field)
        if value is None:
            raise self.wrong(field, "is missing")
        values = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(values, list | tuple):
            raise self.wrong(field, f"is {value!r:.60} ({type(value).__name__}), wanted an array of {kind.__name__}")
        if not set(map(type, values)) <= {kind}:  # one pass in C: the arrays are long
            index = next(index for index, item in enumerate(values) if type(item) is not kind)
            raise self.wrong(field, f"holds {values[index]!r:.60} at index {index:,}, wanted {kind.__name__}")
        return list(values)

    def token_id(self, role: str, vocab_size: int) -> int | None:
        """The id of the token in a role such as `"bos"`, or None."""
        field = f"tokenizer.ggml.{role}_token_id"
        token_id = self.get(field, int)
        if token_id is not None and not 0 <= token_id < vocab_size:
            raise self.wrong(field, f"is {token_id}, wanted an id below the vocabulary's size {vocab_size:,}")
        return token_id

    def special_tokens(self) -> dict[str, str]:
        """Which token plays which role: `{"bos_token": "<|im_start|>", ...}`."""
        tokens = self.array("tokenizer.ggml.tokens", str)
        ids = {name: self.token_id(role, len(tokens)) for role, name in ROLES.items()}
        return {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}


def build(fields: GGUFTokenizerFields) -> tokenizers.Tokenizer:
    """The tokenizer of the `tokenizers` library that the metadata describes.

    Raises `TokenizerError` for fields that are missing or contradict each other, `UnsupportedError` for
    algorithms that are not implemented.
    """
    pre_tokenizer = _pre_tokenizer(fields)
    vocabulary = _vocabulary(fields)
    merges = _merges(fields, vocabulary)
    types = _token_types(fields, vocabulary)
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    added = [token for token, kind in zip(vocabulary, types, strict=True) if kind == TokenType.USER_DEFINED]
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
    control = [token for token, kind in zip(vocabulary, types, strict=True) if kind == TokenType.CONTROL]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    _frame(backend, fields, len(vocabulary))
    return backend


def _pre_tokenizer(fields: GGUFTokenizerFields) -> pre_tokenizers.PreTokenizer:
    for field, known in (("tokenizer.ggml.model", ["gpt2"]), ("tokenizer.ggml.pre", sorted(PRE_TOKENIZERS))):
        name = fields.get(field, str)
        if name not in known:
            found = "missing" if name is None else repr(name)
            raise UnsupportedError(f"{fields.where}: metadata {field!r} is {found}; supported: {', '.join(known)}")
    if fields.get("tokenizer.ggml.add_space_prefix", bool, False):
        raise UnsupportedError(f"{fields.where}: 'tokenizer.ggml.add_space_prefix' with byte-level BPE")
    return PRE_TOKENIZERS[fields.metadata["tokenizer.ggml.pre"]]()


def _vocabulary(fields: GGUFTokenizerFields) -> dict[str, int]:
    tokens = fields.array("tokenizer.ggml.tokens", str)
    vocabulary = dict(zip(tokens, range(len(tokens)), strict=True))
    if not tokens or "" in vocabulary:
        raise fields.wrong(
            "tokenizer.ggml.tokens", f"has an empty token at id {tokens.index('')}" if tokens else "is empty"
        )
    if len(vocabulary) < len(tokens):
        first = next(index for index, token in enumerate(tokens) if vocabulary[token] != index)
        text = tokens[first]
        raise fields.wrong("tokenizer.ggml.tokens", f"has {text!r:.60} twice, as ids {first} and {vocabulary[text]}")
    return vocabulary


def _token_types(fields: GGUFTokenizerFields, vocabulary: dict[str, int]) -> list[int]:
    field = "tokenizer.ggml.token_type"
    types = fields.array(field, int)
    if len(types) != len(vocabulary):
        raise fields.wrong(field, f"has {len(types):,} entries for {len(vocabulary):,} tokens")
    if unknown := set(types) - set(TokenType):
        raise fields.wrong(
            field, f"is {min(unknown)} for token {types.index(min(unknown)):,}, wanted 1 to {max(TokenType)}"
        )
    return types


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


def _frame(backend: tokenizers.Tokenizer, fields: GGUFTokenizerFields, vocab_size: int) -> None:
    """Put a beginning-of-sequence token before each text, or an end after it, if the file says so."""
    ids = {role: _frame_id(fields, role, vocab_size) for role in ("bos", "eos")}
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


def _frame_id(fields: GGUFTokenizerFields, role: str, vocab_size: int) -> int | None:
    flag = f"tokenizer.ggml.add_{role}_token"
    if not fields.get(flag, bool, False):
        return None
    token_id = fields.token_id(role, vocab_size)
    if token_id is None:
        raise fields.wrong(flag, f"is true, but 'tokenizer.ggml.{role}_token_id' is missing")
    return token_id
