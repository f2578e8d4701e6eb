"""The rows of the table: what can be measured, and how one turn of it goes."""

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

BATCH_CONTEXT = 64  # tokens that each sequence of a batch has before the one that is timed
START_TOKENS = 32  # length of the prompt in the rows about starting
SERVED = 24  # requests in a turn of a row about serving
PROMPT_LENGTHS = (8, 128)  # of theirs, shortest and longest
ANSWER_LENGTHS = (8, 128)
SERVE_OPTIONS = {"max_sequences": 16, "max_batch_tokens": 128}  # of their engine, the same for every policy
STEPS = 8  # decode steps in a turn

# Groups of rows, and the sizes measured unless others are asked for.
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
FRESH = ("load", "start", "memory")  # measured in a process of their own each time


@dataclass(frozen=True)
class Row:
    """One thing to measure.

    Attributes
    ----------
    group : "load", "start", "memory": a fresh process reads the model; has computed a short prompt; how much memory
        it held. "prefill": a prompt of `size` tokens. "decode": one token after `size` others. "batch": one token for
        each of `size` sequences. "serve": requests of `size` clients, each of which sends its next one when it has its
        answer. "exactness": how far logits are from the oracle's.
    size : tokens, sequences or clients; 0 where there is nothing to choose
    policy : of the scheduler that serves; empty where none does
    """

    group: str
    size: int = 0
    policy: str = ""

    @property
    def name(self) -> str:
        """As the user writes it: "prefill-512"."""
        return "-".join(str(part) for part in (self.group, self.size, self.policy) if part)

    @property
    def title(self) -> str:
        """As the table shows it."""
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
        """Tokens computed by what is timed (when serving, those of the answers); 0 where that is not the point."""
        answered = sum(spread_lengths(*ANSWER_LENGTHS))
        return {"prefill": self.size, "decode": 1, "batch": self.size, "serve": answered}.get(self.group, 0)

    @property
    def positions(self) -> int:
        """Positions that the longest sequence takes."""
        served = PROMPT_LENGTHS[1] + ANSWER_LENGTHS[1]
        longest = {"prefill": self.size, "decode": self.size + 1, "batch": BATCH_CONTEXT + 1, "serve": served}
        return longest.get(self.group, 0)

    def work(self, config: ModelConfig, weight_bytes: int, kv_bytes_per_token: int) -> Work | None:
        """What must be moved and computed; None for the rows that are not about computing."""
        if self.group == "prefill":
            return prefill_work(config, weight_bytes, kv_bytes_per_token, self.size)
        if self.group == "decode":
            return decode_work(config, weight_bytes, kv_bytes_per_token, [self.size])
        if self.group == "batch":
            return decode_work(config, weight_bytes, kv_bytes_per_token, [BATCH_CONTEXT] * self.size)
        return None


def choose_rows(wanted: Sequence[str]) -> list[Row]:
    """The rows of these names, each once: a group ("prefill") for its usual sizes, or one with a size ("prefill-100").

    Those that serve come for every policy, unless one is named ("serve-4-chunked").

    Raises
    ------
    RequestError
        A name is none of them.
    """
    rows = []
    for name in wanted:
        match = ROW_NAME.fullmatch(name)
        group, size, policy = match.groups() if match else ("", None, None)
        if group not in SIZES or (size and not SIZES[group]) or (policy and group != "serve"):
            raise RequestError(
                f"row {name!r} is unknown; there are {', '.join(SIZES)}, and those with sizes may be asked for one, "
                "as in prefill-100, decode-500, batch-3 or serve-16; serve-16-chunked is for one policy"
            )
        policies = ((policy,) if policy else POLICIES) if group == "serve" else ("",)
        sizes = (int(size),) if size else SIZES[group] or (0,)
        rows += [Row(group, each, one) for each in sizes for one in policies]
    return list(dict.fromkeys(rows))


class Computing:
    """A "prefill", "decode" or "batch" row, measured on engines that have the model loaded.

    All engines get the same random tokens: what they are makes no difference to the work, but prompts that are alike
    could be shared.
    """

    def __init__(self, row: Row, vocab_size: int):
        self.row = row
        draw = np.random.default_rng(row.size).integers
        sequences = row.size if row.group == "batch" else 1
        context = BATCH_CONTEXT if row.group == "batch" else row.size
        self.prompts = draw(vocab_size, size=(sequences, context)).tolist()
        self.next_tokens = draw(vocab_size, size=sequences).tolist()

    def prepare(self, worker: Worker) -> None:
        """Fill the cache of a row that continues something; and do once, untimed, what will be timed."""
        if self.row.group != "prefill":
            worker.call("fill", prompts=self.prompts)
        self.seconds(worker)

    def seconds(self, worker: Worker) -> float:
        """One turn: the median of a few, but for the first: the engine has been asleep, and others used the caches."""
        if self.row.group == "prefill":
            repeats = 1 if self.row.size > 256 else 4
            seconds = worker.call("prefill", tokens=self.prompts[0], repeats=repeats)
        else:
            seconds = worker.call("decode", tokens=self.next_tokens, repeats=STEPS + 1)
        return statistics.median(seconds[1:] or seconds)


class Serving:
    """A "serve" row, measured on minillm, whose policies it compares: a run of its engine on the requests of all rows.

    Lengths are those that people send: many short and few long ones, in no order.
    """

    def __init__(self, row: Row, vocab_size: int):
        self.row = row
        random = np.random.default_rng(SERVED)
        lengths = random.permutation(spread_lengths(*PROMPT_LENGTHS))
        self.prompts = [random.integers(vocab_size, size=length).tolist() for length in lengths]
        self.answer_lengths = random.permutation(spread_lengths(*ANSWER_LENGTHS)).tolist()

    def run(self, worker: Worker) -> RunMetrics:
        """One turn."""
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
    """A length for each request that is served: as many between 10 and 20 as between 100 and 200."""
    return np.geomspace(shortest, longest, SERVED).round().astype(int).tolist()
