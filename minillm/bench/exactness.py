"""Difference of an engine's logits from the oracle's: transformers in float32, with the same weights."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from minillm.bench.client import Worker
from minillm.errors import BenchmarkError
from minillm.tokenizer import Tokenizer

CHAT = [{"role": "user", "content": "Name three primary colours."}]
PROMPTS: dict[str, str | list[dict[str, str]]] = {
    "english": "The quick brown fox jumps over the lazy dog, and then",
    "code": "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "korean": "안녕하세요, 오늘 날씨가 정말",
    "emoji": "I love pizza 🍕 and ice cream 🍦 because",
    "digits": "1 2 3 4 5 6 7 8 9 10 11 12 13 14",
    "chat": CHAT,
}


def encode_prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Return the token ids of each of PROMPTS, without the chat if the model has no chat template."""
    encoded = [tokenizer.encode(prompt) for prompt in PROMPTS.values() if isinstance(prompt, str)]
    if tokenizer.chat_template is not None:
        text = tokenizer.apply_chat_template(CHAT)
        encoded.append(tokenizer.encode(text, add_special_tokens=False))
    return encoded


def max_difference(engine: Worker, oracle: Worker, prompts: list[list[int]]) -> float:
    """Return max |engine - oracle| over all prompts, tokens and scores.

    Raises
    ------
    BenchmarkError
        An engine failed, or the shapes of the scores differ.
    """
    return max(_difference(_logits(engine, tokens), _logits(oracle, tokens)) for tokens in prompts)


def _difference(found: np.ndarray, expected: np.ndarray) -> float:
    if found.shape != expected.shape:
        raise BenchmarkError(
            f"logits have shape {list(found.shape)}; expected {list(expected.shape)} (tokens, vocabulary)"
        )
    return float(np.abs(found - expected).max())


def _logits(worker: Worker, tokens: list[int]) -> np.ndarray:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "logits.npy"
        worker.call("logits", tokens=tokens, path=str(path))
        return np.load(path)
