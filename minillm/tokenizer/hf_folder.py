"""Read a tokenizer from a folder in Hugging Face layout."""

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

MAX_TOKENIZER_FILE = 60_000_000  # bytes of tokenizer.json; the largest vocabularies need half of this
MAX_FILE = 10_000_000  # bytes of any other file
SPECIAL_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True)
class FolderTokenizer:
    """The contents of a folder that make up a tokenizer. The fields are those of `Tokenizer`."""

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    eos_token_ids: list[int]
    chat_template: str | None
    source: str


def read_folder(path: Path) -> FolderTokenizer:
    """Read the tokenizer's files in a folder; `Tokenizer.from_folder` lists them. Raises `TokenizerError`."""
    path = Path(path)
    tokenizer_path, config_path = path / "tokenizer.json", path / "tokenizer_config.json"
    text = _read_text(tokenizer_path, MAX_TOKENIZER_FILE)
    if text is None:
        raise TokenizerError(f"{tokenizer_path}: no such file; a model folder needs its tokenizer in this format")
    check_expansion(_json_object(text, str(tokenizer_path)), str(tokenizer_path))
    config = _read_json(config_path)
    tokens_by_role = _read_json(path / "special_tokens_map.json") | config
    with backend_errors(str(tokenizer_path)):
        backend = tokenizers.Tokenizer.from_str(text)
        _add_missing_tokens(backend, config.get("added_tokens_decoder"), str(config_path))
    return FolderTokenizer(
        backend,
        special_tokens=_special_tokens(tokens_by_role, str(config_path)),
        eos_token_ids=_eos_token_ids(path),
        chat_template=_read_text(path / "chat_template.jinja") or _config_template(config, str(config_path)),
        source=str(tokenizer_path),
    )


def _read_text(path: Path, max_bytes: int = MAX_FILE) -> str | None:
    """Return a file's text, or None if it does not exist. Pipes and devices are rejected: they may never end."""
    try:
        if not path.exists():
            return None
        if not path.is_file():
            raise TokenizerError(f"{path}: is not a regular file")
        if (size := path.stat().st_size) > max_bytes:
            raise TokenizerError(f"{path}: {size:,} bytes, expected at most {max_bytes:,}")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise TokenizerError(f"{path}: cannot be read as UTF-8 text: {problem}") from problem


def _read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or an empty one if the file does not exist."""
    text = _read_text(path)
    return {} if text is None else _json_object(text, str(path))


def _json_object(text: str, source: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise TokenizerError(f"{source}: is not valid JSON: {problem}") from problem
    if not isinstance(value, dict):
        raise TokenizerError(f"{source}: holds a JSON {type(value).__name__}, expected an object")
    return value


def _special_tokens(tokens_by_role: dict[str, Any], source: str) -> dict[str, str]:
    """Return the token for each role. In the file, a token is text or an object with a `content`."""
    tokens = {}
    for role in SPECIAL_ROLES:
        value = tokens_by_role.get(role)
        content = value.get("content") if isinstance(value, dict) else value
        if value is not None and not isinstance(content, str):
            raise TokenizerError(f"{source}: {role!r} is {value!r:.60}, expected the text of a token")
        if content is not None:
            tokens[role] = content
    return tokens


def _add_missing_tokens(backend: tokenizers.Tokenizer, added: Any, source: str) -> None:
    """Add the tokens that `tokenizer_config.json` lists (id -> token) but `tokenizer.json` does not have."""
    present = {token.content for token in backend.get_added_tokens_decoder().values()}
    for key, token in sorted(_added_tokens(added, source).items()):
        if token.content in present:
            continue
        backend.add_tokens([token])
        if backend.token_to_id(token.content) != key:
            raise TokenizerError(
                f"{source}: 'added_tokens_decoder' gives {token.content!r:.60} the id {key}, but with tokenizer.json "
                f"its id is {backend.token_to_id(token.content)}"
            )


def _added_tokens(added: Any, source: str) -> dict[int, AddedToken]:
    flags = ("lstrip", "normalized", "rstrip", "single_word", "special")
    try:
        return {
            int(key): AddedToken(token["content"], **{flag: token[flag] for flag in flags if flag in token})
            for key, token in (added or {}).items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as problem:
        raise TokenizerError(f"{source}: 'added_tokens_decoder' is not a table of tokens: {problem!r}") from problem


def _eos_token_ids(path: Path) -> list[int]:
    """Return the ids that end a turn, from `generation_config.json` or else from `config.json`."""
    for file in (path / "generation_config.json", path / "config.json"):
        value = _read_json(file).get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
            raise TokenizerError(f"{file}: 'eos_token_id' is {value!r:.60}, expected a token id or a list of token ids")
        return ids
    return []


def _config_template(config: dict[str, Any], source: str) -> str | None:
    """Return the chat template in `tokenizer_config.json`: its text, or the one named "default" in a list."""
    value = config.get("chat_template")
    if isinstance(value, list):
        named = [entry for entry in value if isinstance(entry, dict) and entry.get("name") == "default"]
        value = named[-1].get("template") if named else None
    if value is not None and not isinstance(value, str):
        raise TokenizerError(f"{source}: 'chat_template' is {value!r:.60}, expected text")
    return value
