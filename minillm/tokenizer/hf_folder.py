"""Reads the tokenizer files of a model folder in Hugging Face layout, and checks them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from minillm.errors import TokenizerError
from minillm.tokenizer.backend_errors import backend_errors
from minillm.tokenizer.sandbox import check_expansion

MAX_TOKENIZER_BYTES = 60_000_000  # size of tokenizer.json; the largest vocabularies take half of it
MAX_FILE_BYTES = 10_000_000  # size of any other file
ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True)
class HFTokenizerFiles:
    """The contents of a folder's tokenizer files.

    Attributes
    ----------
    source : path of `tokenizer.json`, for error messages
    backend : the tokenizer of the `tokenizers` library
    special_tokens : the token in each role, such as `{"eos_token": "<|im_end|>"}`
    eos_token_ids : ids that end a turn
    chat_template : the Jinja program, or None if there is none
    """

    source: str
    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    eos_token_ids: list[int]
    chat_template: str | None


def read_folder(path: Path) -> HFTokenizerFiles:
    """Read the tokenizer of a folder. `Tokenizer.from_folder` lists the files.

    Raises
    ------
    TokenizerError
        `tokenizer.json` is missing, or a file is damaged or too large.
    """
    tokenizer_path, config_path = path / "tokenizer.json", path / "tokenizer_config.json"
    source = str(tokenizer_path)
    text = _read_text(tokenizer_path, MAX_TOKENIZER_BYTES)
    if text is None:
        raise TokenizerError(f"{source}: no such file; a model folder must contain its tokenizer in this format")
    check_expansion(_parse_object(text, source), source)
    config = _read_object(config_path)
    roles = _read_object(path / "special_tokens_map.json") | config
    with backend_errors(source):
        backend = tokenizers.Tokenizer.from_str(text)
        _add_missing_tokens(backend, config.get("added_tokens_decoder"), str(config_path))
    chat_template = _read_text(path / "chat_template.jinja") or _config_template(config, str(config_path))
    return HFTokenizerFiles(
        source, backend, _special_tokens(roles, str(config_path)), _eos_token_ids(path), chat_template
    )


def _read_text(path: Path, max_bytes: int = MAX_FILE_BYTES) -> str | None:
    """Return a file's text, or None if the file does not exist. Reject pipes and devices, which may never end."""
    try:
        if not path.exists():
            return None
        if not path.is_file():
            raise TokenizerError(f"{path}: is not a regular file")
        if (size := path.stat().st_size) > max_bytes:
            raise TokenizerError(f"{path}: {size:,} bytes, expected at most {max_bytes:,}")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path}: cannot be read as UTF-8 text: {error}") from error


def _read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or an empty one if the file does not exist."""
    text = _read_text(path)
    return {} if text is None else _parse_object(text, str(path))


def _parse_object(text: str, source: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{source}: is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{source}: holds a JSON {type(value).__name__}, expected an object")
    return value


def _special_tokens(roles: dict[str, Any], source: str) -> dict[str, str]:
    """Return the token in each of `ROLES`. A file stores a token as text or as an object with a `content`."""
    tokens = {}
    for role in ROLES:
        value = roles.get(role)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str) and is_valid_text(content):
            tokens[role] = content
        elif value is not None:
            raise TokenizerError(f"{source}: {role!r} is {value!r:.60}, expected the text of a token")
    return tokens


def is_valid_text(text: str) -> bool:
    """Return whether a string has a UTF-8 form. JSON can also spell half of a UTF-16 pair, which has none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _add_missing_tokens(backend: tokenizers.Tokenizer, added: Any, source: str) -> None:
    """Add the tokens that `tokenizer_config.json` lists (id -> token) and `tokenizer.json` lacks."""
    existing = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token_id, token in sorted(_added_tokens(added, source).items()):
        if token.content in existing:
            continue
        backend.add_tokens([token])
        if (assigned_id := backend.token_to_id(token.content)) != token_id:
            raise TokenizerError(
                f"{source}: 'added_tokens_decoder' gives {token.content!r:.60} the id {token_id}; expected "
                f"{assigned_id}, its id after the tokens of tokenizer.json"
            )


def _added_tokens(added: Any, source: str) -> dict[int, AddedToken]:
    flags = ("lstrip", "normalized", "rstrip", "single_word", "special")
    try:
        return {
            int(key): AddedToken(token["content"], **{flag: token[flag] for flag in flags if flag in token})
            for key, token in (added or {}).items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TokenizerError(
            f"{source}: 'added_tokens_decoder' is damaged, expected an object of tokens by id: {error!r}"
        ) from error


def _eos_token_ids(folder: Path) -> list[int]:
    """Return the ids that end a turn, from `generation_config.json` or else `config.json`."""
    for path in (folder / "generation_config.json", folder / "config.json"):
        value = _read_object(path).get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
            raise TokenizerError(f"{path}: 'eos_token_id' is {value!r:.60}, expected a token id or a list of token ids")
        return ids
    return []


def _config_template(config: dict[str, Any], source: str) -> str | None:
    """Return the chat template in `tokenizer_config.json`: the text, or the last one named "default" in a list."""
    value = config.get("chat_template")
    if isinstance(value, list):
        defaults = [entry for entry in value if isinstance(entry, dict) and entry.get("name") == "default"]
        value = defaults[-1].get("template") if defaults else None
    if value is not None and not isinstance(value, str):
        raise TokenizerError(f"{source}: 'chat_template' is {value!r:.60}, expected text")
    return value
