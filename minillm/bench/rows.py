"""The rows of the table: what can be measured, and how one turn is measured."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minillm.bench.client import Worker
from minillm.engine.scheduler import POLICIES
from minillm.errors import RequestError
from minillm.model.config import ModelConfig
from minillm.trace import RunMetrics
from minillm.trace.roofline import Work, decode_work, prefill_work

BATCH_CONTEXT = 64  # tokens of each sequence of a batch before the timed one
START_TOKENS = 32  # prompt length in the rows about starting
NUM_REQUESTS = 24  # per turn of a row about serving
PROMPT_LENGTHS = (8, 128)  # shortest and longest prompt of these requests
ANSWER_LENGTHS = (8, 128)
SERVE_OPTIONS = {"max_sequences": 16, "max_batch_tokens": 128}  # of the engine, for every policy
STEPS = 8  # decode steps per turn

# Groups of rows, and their default sizes.
SIZES = {
    "load": (),
    "start": (),
    "memory": (),
    "prefill": (32, 128, 512, 2048),
    "decode": (64, 1024, 4096),
    "batch": (1, 2, 4, 8, 16, 32),
    "serve": (1, 4, 16),
    "exactness": (),
}
QUICK = ("load", "start", "memory", "prefill-32", "decode-64", "batch-4", "exactness")
ROW_NAME = re.compile(rf"([a-z]+)(?:-([1-9]\d{{0,6}}))?(?:-({'|'.join(POLICIES)}))?")
FRESH = ("load", "start", "memory")  # measured in a new process each time


@dataclass(frozen=True)
class Row:
    """One thing to measure.

    Attributes
    ----------
    group : "load": a new process reads the model. "start": it computes a short prompt. "memory": its peak memory.
        "prefill": a prompt of `size` tokens. "decode": one token after `size` others. "batch": one token for each of
        `size` sequences. "serve": requests of `size` clients, each of which sends the next one when it has its answer.
        "exactness": difference of the logits from the oracle's.
    size : tokens, sequences or clients; 0 for groups without sizes
    policy : the scheduler's policy for "serve"; otherwise empty
    """

    group: str
    size: int = 0
    policy: str = ""

    @property
    def name(self) -> str:
        """The row's name on the command line, such as "prefill-512"."""
        return "-".join(str(part) for part in (self.group, self.size, self.policy) if part)

    @property
    def title(self) -> str:
        """The row's name in the table."""
        return {
            "load": "load the model",
            "start": f"process start to first token ({START_TOKENS}-token prompt)",
            "memory": "peak memory",
            "prefill": f"prefill, {self.size} tokens",
            "decode": f"decode at {self.size} tokens of context",
            "batch": f"decode at {BATCH_CONTEXT} tokens, batch of {self.size}",
            "serve": f"{self.size} client{'s' * (self.size > 1)}, {self.policy}",
            "exactness": "largest logit difference from float32",
        }[self.group]

    @property
    def tokens(self) -> int:
        """Tokens computed in the timed part (for "serve", tokens of the answers); 0 if no rate is shown."""
        answered = sum(spread_lengths(*ANSWER_LENGTHS))
        return {"prefill": self.size, "decode": 1, "batch": self.size, "serve": answered}.get(self.group, 0)

    @property
    def positions(self) -> int:
        """Positions of the longest sequence."""
        served = PROMPT_LENGTHS[1] + ANSWER_LENGTHS[1]
        longest = {"prefill": self.size, "decode": self.size + 1, "batch": BATCH_CONTEXT + 1, "serve": served}
        return longest.get(self.group, 0)

    def work(self, config: ModelConfig, weight_bytes: int, kv_bytes_per_token: int) -> Work | None:
        """Return the bytes to read and the operations to compute; None for rows that are not about computing."""
        if self.group == "prefill":
            return prefill_work(config, weight_bytes, kv_bytes_per_token, self.size)
        if self.group == "decode":
            return decode_work(config, weight_bytes, kv_bytes_per_token, [self.size])
        if self.group == "batch":
            return decode_work(config, weight_bytes, kv_bytes_per_token, [BATCH_CONTEXT] * self.size)
        return None


def choose_rows(wanted: Sequence[str]) -> list[Row]:
    """Return the rows of these names, without duplicates.

    A name is a group with its default sizes ("prefill") or with one size ("prefill-100"). Rows about serving are
    returned for every policy, unless the name has one ("serve-4-chunked").

    Raises
    ------
    RequestError
        A name is unknown.
    """
    rows = []
    for name in wanted:
        match = ROW_NAME.fullmatch(name)
        group, size, policy = match.groups() if match else ("", None, None)
        if group not in SIZES or (size and not SIZES[group]) or (policy and group != "serve"):
            raise RequestError(
                f"row {name!r} is unknown; it can be {', '.join(SIZES)}, or one of them with a size, such as "
                "prefill-100, decode-500, batch-3 or serve-16; serve-16-chunked selects a policy"
            )
        policies = ((policy,) if policy else POLICIES) if group == "serve" else ("",)
        sizes = (int(size),) if size else SIZES[group] or (0,)
        rows += [Row(group, each, one) for each in sizes for one in policies]
    return list(dict.fromkeys(rows))


class Computing:
    """A "prefill", "decode" or "batch" row, measured on engines that have loaded the model.

    All engines get the same random tokens. The work does not depend on them, but equal prompts could share cache
    blocks.
    """

    def __init__(self, row: Row, vocab_size: int):
        self.row = row
        draw = np.random.default_rng(row.size).integers
        sequences = row.size if row.group == "batch" else 1
        context = BATCH_CONTEXT if row.group == "batch" else row.size
        self.prompts = draw(vocab_size, size=(sequences, context)).tolist()
        self.next_tokens = draw(vocab_size, size=sequences).tolist()

    def prepare(self, worker: Worker) -> None:
        """Fill the cache for "decode" and "batch", then run once, untimed."""
        if self.row.group != "prefill":
            worker.call("fill", prompts=self.prompts)
        self.seconds(worker)

    def seconds(self, worker: Worker) -> float:
        """Run one turn; return the median of a few repeats without the first, when the processor's caches are cold."""
        if self.row.group == "prefill":
            repeats = 1 if self.row.size > 256 else 4
            seconds = worker.call("prefill", tokens=self.prompts[0], repeats=repeats)
        else:
            seconds = worker.call("decode", tokens=self.next_tokens, repeats=STEPS + 1)
        return statistics.median(seconds[1:] or seconds)


class Serving:
    """A "serve" row, which compares minillm's own policies on the same requests.

    The lengths are distributed as in real traffic, many short and few long ones, in random order.
    """

    def __init__(self, row: Row, vocab_size: int):
        self.row = row
        random = np.random.default_rng(NUM_REQUESTS)
        lengths = random.permutation(spread_lengths(*PROMPT_LENGTHS))
        self.prompts = [random.integers(vocab_size, size=length).tolist() for length in lengths]
        self.answer_lengths = random.permutation(spread_lengths(*ANSWER_LENGTHS)).tolist()

    def run(self, worker: Worker) -> RunMetrics:
        """Run one turn."""
        return RunMetrics(
            **worker.call(
                "serve",
                prompts=self.prompts,
                answer_lengths=self.answer_lengths,
                clients=self.row.size,
                policy=self.row.policy,
                **SERVE_OPTIONS,
            )
        )


def spread_lengths(shortest: int, longest: int) -> list[int]:
    """Return a length per request, spaced geometrically: as many between 10 and 20 as between 100 and 200."""
    return np.geomspace(shortest, longest, NUM_REQUESTS).round().astype(int).tolist()
