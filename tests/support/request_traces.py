"""Requests of two production services: their published traces where present, and synthetic stand-ins everywhere.

The published traces are not part of the repository. They are read from the folder in the environment variable
MINILLM_DATA, by default `../shared/data` beside the repository:

- `azure_llm_2023_conversation.csv`: 19,366 requests of a chat service with arrival times and lengths in tokens.
  Azure Public Dataset, AzureLLMInferenceTrace 2023 (conversation), CC-BY 4.0. Patel et al., Splitwise, ISCA 2024.
- `mooncake_conversation.jsonl`: 12,031 requests with the ids of their prompts' blocks of 512 tokens. Equal ids are
  equal prefixes. Qin et al., Mooncake, FAST 2025, Apache 2.0.

The constants below were measured on these files. A synthetic number is drawn from its measured distribution by linear
interpolation between the quantiles in QUANTILES.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np

DATA = Path(os.environ.get("MINILLM_DATA") or Path(__file__).parents[3] / "shared" / "data")
AZURE, MOONCAKE = DATA / "azure_llm_2023_conversation.csv", DATA / "mooncake_conversation.jsonl"

QUANTILES = [0.0, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0]

# Azure. The gaps have a coefficient of variation of 1.09 and an autocorrelation of 0.06: nearly a Poisson process. The
# logarithms of the two lengths have a correlation of 0.09, so they are drawn independently.
MEAN_GAP = 0.1808  # seconds
PROMPT_TOKENS = [2, 181, 207, 396, 1020, 1189, 2734, 4083, 4142, 14050]
ANSWER_TOKENS = [7, 41, 54, 85, 129, 395, 424, 451, 601, 1000]

# Mooncake. All prompts begin with the same block. The other constants count blocks, and requests since the prefix was
# last used.
FRACTION_CONTINUED = 0.387  # of requests: ones that share more than the first block with an earlier one
NEW_BLOCKS = [1, 1, 1, 2, 10, 25, 49, 75, 175, 246]  # of a request that continues no other
ADDED_BLOCKS = [0, 1, 1, 2, 2, 7, 20, 29, 53, 186]  # of a request that continues another
REUSE_DISTANCE = [5, 100, 141, 229, 422, 901, 1661, 2129, 5105, 10514]


class TimedRequest(NamedTuple):
    """A request's arrival in seconds since the first one, and its lengths in tokens."""

    time: float
    num_prompt_tokens: int
    num_answer_tokens: int


def azure_requests() -> list[TimedRequest]:
    """Read the published requests of the chat service, in order of arrival."""
    with AZURE.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in rows]
    return [
        TimedRequest((time - times[0]).total_seconds(), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        for time, row in zip(times, rows, strict=True)
    ]


def mooncake_prompts() -> list[list[int]]:
    """Read the published prompts, each as the ids of its blocks, in order of arrival."""
    return [json.loads(line)["hash_ids"] for line in MOONCAKE.read_text(encoding="utf-8").splitlines()]


def synthetic_requests(number: int, seed: int = 0) -> list[TimedRequest]:
    """Draw requests with the arrival process and the lengths of Azure's chat service."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(MEAN_GAP, number)) - MEAN_GAP
    prompts, answers = drawn(rng, PROMPT_TOKENS, number), drawn(rng, ANSWER_TOKENS, number)
    return [TimedRequest(max(0.0, float(t)), int(p), int(a)) for t, p, a in zip(times, prompts, answers, strict=True)]


def synthetic_prompts(number: int, seed: int = 0) -> list[list[int]]:
    """Draw prompts with the shared prefixes of Mooncake's conversations, each as the ids of its blocks.

    A request begins a new conversation, or continues the request at a drawn distance before it: the last block of that
    prompt, which was not full, is replaced by a drawn number of new blocks.
    """
    rng = np.random.default_rng(seed)
    continued = rng.random(number) < FRACTION_CONTINUED
    distances = drawn(rng, REUSE_DISTANCE, number)
    num_new = np.where(continued, drawn(rng, ADDED_BLOCKS, number), drawn(rng, NEW_BLOCKS, number))
    prompts: list[list[int]] = []
    next_id = 1
    for index in range(number):
        shared = [0]
        if continued[index] and distances[index] <= index:
            parent = prompts[index - distances[index]]
            shared = parent[: max(2, len(parent) - 1)]
        prompts.append([*shared, *range(next_id, next_id + num_new[index])])
        next_id += num_new[index]
    return prompts


def drawn(rng: np.random.Generator, values: Sequence[float], number: int) -> np.ndarray:
    """Draw integers from the distribution with these values at QUANTILES."""
    return np.interp(rng.random(number), QUANTILES, values).round().astype(int)


def reused_blocks(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Count, for each prompt, the blocks at its beginning that an earlier prompt had."""
    seen: set[int] = set()
    counts = []
    for blocks in prompts:
        counts.append(next((n for n, block in enumerate(blocks) if block not in seen), len(blocks)))
        seen.update(blocks)
    return counts
