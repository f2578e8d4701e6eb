"""Tokenizer: text to token ids and back.

The `tokenizers` library splits and merges the text. This module adds what serving a model needs: reading a tokenizer
from a model's files, streaming detokenization, the chat template, and errors that name the damaged data.
"""

from __future__ import annotations

import functools
import operator
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from minillm.errors import ChatTemplateError, LostTextWarning, TokenizerError
from minillm.tokenizer import gguf
from minillm.tokenizer.backend_errors import backend_errors
from minillm.tokenizer.chat_template import ChatTemplate
from minillm.tokenizer.detokenizer import ByteStream, StreamingDecoder, WindowStream, byte_decoder, visible
from minillm.tokenizer.end_tokens import end_names
from minillm.tokenizer.hf_folder import read_folder


class Tokenizer:
    """Converts text to token ids and back, for one model.

    A model can generate ids that have no token, because its matrices may have more rows than the vocabulary (padding to
    a round size) and because ids may have gaps. Such an id decodes to no text.

    Parameters
    ----------
    backend : the tokenizer of the `tokenizers` library; this object takes ownership and changes its settings
    special_tokens : the token in each role, such as `{"eos_token": "<|im_end|>"}`
    eos_token_ids : ids that end a turn; the id of `special_tokens["eos_token"]` is added
    chat_template : the model's Jinja template, or None if it has none
    source : the tokenizer's name in error messages, usually its file

    Attributes
    ----------
    vocab_size : V, the largest token id plus one
    bos_token_id : id of the beginning-of-sequence token, or None
    eos_token_ids : all ids that end a turn
    special_tokens, chat_template, source : see above
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Iterable[int] = (),
        chat_template: str | None = None,
        source: str = "tokenizer",
    ):
        # A file can request that every text is padded or truncated to a length. A padding length of 10^12 would be an
        # attack.
        backend.no_padding()
        backend.no_truncation()
        if getattr(backend.model, "dropout", None):  # a training option that omits merges at random
            backend.model.dropout = None
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        self.vocab_size = _vocab_size(backend, source)
        self.bos_token_id = self._role_id("bos_token", backend)
        eos_token_id = self._role_id("eos_token", backend)
        self.eos_token_ids = tuple(dict.fromkeys([*([] if eos_token_id is None else [eos_token_id]), *eos_token_ids]))
        self._backend = backend
        self._byte_decoder = byte_decoder(backend.decoder)
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    @classmethod
    def from_folder(cls, path: Path) -> Tokenizer:
        """Read the tokenizer of a folder in Hugging Face layout.

        `tokenizer.json` is required. These files are optional: `tokenizer_config.json` (special tokens, chat template),
        `special_tokens_map.json`, `chat_template.jinja` (takes precedence over `tokenizer_config.json`), and
        `generation_config.json` or else `config.json` (for `eos_token_id`).

        Raises
        ------
        TokenizerError
            `tokenizer.json` is missing, or a file is damaged or too large.
        """
        files = read_folder(Path(path))
        return cls(
            files.backend,
            special_tokens=files.special_tokens,
            eos_token_ids=files.eos_token_ids,
            chat_template=files.chat_template,
            source=files.source,
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object], source: str) -> Tokenizer:
        """Build the tokenizer that the metadata of a GGUF file describes.

        Parameters
        ----------
        metadata : the file's metadata by key; arrays may be lists or NumPy arrays
        source : the file's name, for error messages

        Raises
        ------
        TokenizerError
            A field is missing or damaged.
        UnsupportedError
            `minillm.tokenizer.gguf` does not implement this kind of tokenizer.
        """
        fields = gguf.GGUFTokenizerFields(metadata, source)
        with backend_errors(source):
            backend = gguf.build(fields)
        special_tokens = fields.special_tokens()
        template = fields.get("tokenizer.chat_template", str)
        ends = end_names(fields.special(), template, special_tokens)
        if "eot_token" in special_tokens:
            ends.append(special_tokens.pop("eot_token"))
        return cls(
            backend,
            special_tokens=special_tokens,
            eos_token_ids=sorted(fields.vocabulary[token] for token in ends),
            chat_template=template,
            source=source,
        )

    @property
    def algorithm(self) -> str:
        """The algorithm's name for display: "byte-level BPE", "SentencePiece BPE", "Unigram", ..."""
        name = type(self._backend.model).__name__
        decoder = str(self._backend.decoder)
        if "ByteLevel" in decoder:
            return f"byte-level {name}"
        return f"SentencePiece {name}" if "ByteFallback" in decoder else name

    def __repr__(self) -> str:
        template = "with" if self.chat_template else "without"
        return (
            f"Tokenizer({self.algorithm}, {self.vocab_size:,} tokens, bos {self.bos_token_id}, "
            f"eos {self.eos_token_ids}, {template} chat template, from {self.source!r})"
        )

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Return the token ids of a text.

        A character with a byte that has no token in the vocabulary is lost, as in every implementation of BPE without
        an unknown token. SmolLM2's vocabulary lacks 21 bytes: six control characters, and lead bytes of nearly empty
        Unicode planes.

        Parameters
        ----------
        add_special_tokens : add the special tokens that the model expects around a text, such as the
            beginning-of-sequence token
        parse_special : convert `<|im_start|>` and the like to the special tokens that they name. Rendered chat
            templates need this. But the author of any part of the prompt can then write "<|im_end|>" and end the turn.
            Pass False for untrusted text, to encode special tokens in it as ordinary characters.

        Raises
        ------
        TokenizerError
            `text` is not a str, or contains a lone surrogate.

        Warns
        -----
        LostTextWarning
            The text contains a character that the vocabulary cannot represent.
        """
        if not isinstance(text, str):
            raise TokenizerError(f"encode: expected a str, got {type(text).__name__}")
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            surrogate = f"U+{ord(text[error.start]):04X}"
            raise TokenizerError(
                f"encode: character {error.start:,} is the lone surrogate {surrogate}, which is half of a UTF-16 pair "
                "and not valid text; decode the input correctly, or replace the character"
            ) from error
        backend = self._backend if parse_special else self._plain_text_backend
        with backend_errors(self.source):
            ids = backend.encode(text, add_special_tokens=add_special_tokens).ids
        if self._bytes_without_token and len(data.translate(None, self._bytes_without_token)) < len(data):
            self._warn_about_lost(text, ids)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. Invalid UTF-8 becomes U+FFFD, and an id without a token adds no text.

        Raises
        ------
        TokenizerError
            `ids` is not a sequence of ids, or an id is negative or not an integer.
        """
        if not isinstance(ids, Iterable) or isinstance(ids, str | bytes):
            raise TokenizerError(f"decode: expected a list of token ids, got {ids!r:.60}")
        decoder = self.stream(skip_special_tokens=skip_special_tokens)
        if isinstance(decoder, WindowStream):  # streaming is exact only if a token affects no more than its neighbours
            kept = [token_id for token_id in ids if self._kept_token(token_id, skip_special_tokens) is not None]
            return self._decode_with_backend(kept)
        return "".join([*map(decoder.push, ids), decoder.finish()])

    def stream(self, *, skip_special_tokens: bool = True) -> StreamingDecoder:
        """Return a decoder that converts token ids one at a time, for use during generation.

        It accepts the same ids as `decode`.
        """
        kept_token = functools.partial(self._kept_token, skip_special_tokens=skip_special_tokens)
        if self._byte_decoder is not None:
            return ByteStream(self._byte_decoder, kept_token)
        return WindowStream(self._decode_with_backend, lambda token_id: kept_token(token_id) is not None)

    def token_text(self, token_id: int) -> str:
        """Return a token in readable form, such as `" hello"`, or `"<0xE2>"` for one byte of a longer character.

        For an id without a token, the text is like `"<no token 270>"`.

        Raises
        ------
        TokenizerError
            The id is negative or not an integer.
        """
        token = self._token(token_id)
        if token is None:
            return f"<no token {token_id}>"
        return token.replace("▁", " ") if self._byte_decoder is None else visible(self._byte_decoder.to_bytes(token))

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Return a conversation in the text format that the model was trained on.

        The text already contains the special tokens, so encode it with `add_special_tokens=False`. Message contents are
        inserted unchanged, including any special tokens in them.

        Parameters
        ----------
        messages : dicts with `role` and `content`; see `ChatTemplate.render`
        add_generation_prompt : append the start of the assistant's turn, so that the model generates a reply
        variables : other variables of the template; they override the special tokens

        Raises
        ------
        RequestError
            `messages` is empty or malformed.
        ChatTemplateError
            The model has no chat template, or the template fails or rejects the conversation.
        """
        return self._template.render(
            messages, add_generation_prompt=add_generation_prompt, **{**self.special_tokens, **variables}
        )

    def special_token_id(self, text: str) -> int | None:
        """Return the id of the special token with exactly this text, or None if there is none."""
        token_id = self._backend.token_to_id(text)
        return token_id if token_id in self._special_ids else None

    def contains_special_token(self, text: str) -> bool:
        """Return whether a part of the text spells a special token."""
        return any(token in text for token in self._special_texts)

    @functools.cached_property
    def _special_texts(self) -> list[str]:
        return [token for token in map(self._backend.id_to_token, self._special_ids) if token]

    @functools.cached_property
    def _bytes_without_token(self) -> bytes:
        """The bytes that a byte-level vocabulary cannot represent."""
        if self._byte_decoder is None or not self.algorithm.startswith("byte-level"):
            return b""
        known = {self._byte_decoder.to_bytes(token) for token in self._backend.get_vocab(with_added_tokens=False)}
        return bytes(byte for byte in range(256) if bytes([byte]) not in known)

    def _warn_about_lost(self, text: str, ids: list[int]) -> None:
        """Warn if the ids lack characters of the text that have a byte without a token."""
        missing = set(self._bytes_without_token)
        kept = set(self.decode(ids, skip_special_tokens=False))  # inside special tokens, every character is kept
        lost = [character for character in text if set(character.encode()) & missing and character not in kept]
        if lost:
            names = ", ".join(f"U+{ord(character):04X}" for character in dict.fromkeys(lost))
            warnings.warn(
                f"{self.source}: the vocabulary has no tokens for the bytes of {names:.80}, so the model does not see "
                f"{len(lost)} of the text's {len(text):,} characters: remove or replace them",
                LostTextWarning,
                stacklevel=3,
            )

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        if self.chat_template is None:
            raise ChatTemplateError(f"{self.source}: the model has no chat template; give it plain text instead")
        return ChatTemplate(self.chat_template)

    @functools.cached_property
    def _plain_text_backend(self) -> tokenizers.Tokenizer:
        """A second backend with the same vocabulary that encodes special tokens in text as ordinary characters.

        The library's option for this belongs to the backend object, so setting it would affect calls of other threads.
        """
        backend = tokenizers.Tokenizer(self._backend.model)
        for component in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
            if getattr(self._backend, component) is not None:
                setattr(backend, component, getattr(self._backend, component))
        for _, token in sorted(self._backend.get_added_tokens_decoder().items()):
            backend.add_tokens([token])
        backend.encode_special_tokens = True
        return backend

    def _role_id(self, role: str, backend: tokenizers.Tokenizer) -> int | None:
        token = self.special_tokens.get(role)
        return None if token is None else backend.token_to_id(token)

    def _token(self, token_id: int) -> str | None:
        """Return a token as the vocabulary writes it, or None if the id has no token."""
        if not hasattr(token_id, "__index__") or (index := operator.index(token_id)) < 0:
            raise TokenizerError(
                f"{self.source}: {token_id!r:.60} is not a token id, expected an integer of at least 0"
            )
        return self._backend.id_to_token(index) if index < self.vocab_size else None

    def _kept_token(self, token_id: int, skip_special_tokens: bool) -> str | None:
        """Return a token as the vocabulary writes it, or None if it is not part of the decoded text."""
        token = self._token(token_id)
        return None if skip_special_tokens and token_id in self._special_ids else token

    def _decode_with_backend(self, ids: list[int]) -> str:
        with backend_errors(self.source):
            return self._backend.decode(ids, skip_special_tokens=False)


def _vocab_size(backend: tokenizers.Tokenizer, source: str) -> int:
    """Return V, the largest id plus one. Raise `TokenizerError` if two tokens share an id."""
    vocabulary = backend.get_vocab(with_added_tokens=True)
    if len(set(vocabulary.values())) < len(vocabulary):
        (token_id, count), *_ = Counter(vocabulary.values()).most_common(1)
        raise TokenizerError(f"{source}: {count} tokens of the vocabulary have the id {token_id}, expected one")
    return 1 + max(vocabulary.values(), default=-1)
