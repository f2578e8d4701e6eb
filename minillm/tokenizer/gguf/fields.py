"""The tokenizer's fields in a GGUF file's metadata, read with suspicion."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from functools import cached_property
from typing import Any

from minillm.errors import TokenizerError

ROLES = {"bos": "bos_token", "eos": "eos_token", "eot": "eot_token", "unknown": "unk_token", "padding": "pad_token"}


class TokenType(IntEnum):
    """What a token is for. Control and user-defined tokens are found in text before BPE sees it."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


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

    def array(self, field: str, kind: type, length: int | None = None) -> list[Any]:
        """A field that is a list, or a numpy array, of `kind`, as a list; of one entry a token, if `length` says so."""
        value = self.metadata.get(field)
        if value is None:
            raise self.wrong(field, "is missing")
        values = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(values, list | tuple):
            raise self.wrong(field, f"is {value!r:.60} ({type(value).__name__}), wanted an array of {kind.__name__}")
        if not set(map(type, values)) <= {kind}:  # one pass in C: the arrays are long
            index = next(index for index, item in enumerate(values) if type(item) is not kind)
            raise self.wrong(field, f"holds {values[index]!r:.60} at index {index:,}, wanted {kind.__name__}")
        if length is not None and len(values) != length:
            raise self.wrong(field, f"has {len(values):,} entries for {length:,} tokens")
        return list(values)

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """Every token's id, in the order of the ids; no token is empty, none is there twice."""
        field = "tokenizer.ggml.tokens"
        tokens = self.array(field, str)
        vocabulary = dict(zip(tokens, range(len(tokens)), strict=True))
        if not tokens or "" in vocabulary:
            raise self.wrong(field, f"has an empty token at id {tokens.index('')}" if tokens else "is empty")
        if len(vocabulary) < len(tokens):
            first = next(index for index, token in enumerate(tokens) if vocabulary[token] != index)
            text = tokens[first]
            raise self.wrong(field, f"has {text!r:.60} twice, as ids {first} and {vocabulary[text]}")
        return vocabulary

    @cached_property
    def token_types(self) -> list[int]:
        """Every token's `TokenType`."""
        field = "tokenizer.ggml.token_type"
        types = self.array(field, int, len(self.vocabulary))
        if unknown := set(types) - set(TokenType):
            where = types.index(min(unknown))
            raise self.wrong(field, f"is {min(unknown)} for token {where:,}, wanted 1 to {max(TokenType)}")
        return types

    def tokens_of(self, *kinds: TokenType) -> list[str]:
        """The tokens of some types, in the order of their ids."""
        return [token for token, kind in zip(self.vocabulary, self.token_types, strict=True) if kind in kinds]

    def token_id(self, role: str) -> int | None:
        """The id of the token in a role such as `"bos"`, or None."""
        field, size = f"tokenizer.ggml.{role}_token_id", len(self.vocabulary)
        token_id = self.get(field, int)
        if token_id is not None and not 0 <= token_id < size:
            raise self.wrong(field, f"is {token_id}, wanted an id below the vocabulary's size {size:,}")
        return token_id

    def special_tokens(self) -> dict[str, str]:
        """Which token plays which role: `{"bos_token": "<|im_start|>", ...}`."""
        tokens = list(self.vocabulary)
        ids = {name: self.token_id(role) for role, name in ROLES.items()}
        return {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}
