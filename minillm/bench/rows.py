"""The rows of the table: what can be measured, and how one turn of it goes."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minillm.bench.client import Worker
from minillm.config import ModelConfig
from minillm.errors import RequestError
from minillm.roofline import Work, decode_work, prefill_work

BATCH_CONTEXT = 64  # tokens that each sequence of a batch has before the one that is timed
START_TOKENS = 32  # length of the prompt in the rows about starting
STEPS = 8  # decode steps in a turn

# Groups of rows, and the sizes measured unless others are asked for.
SIZES = {
    "load": (),
    "start": (),
    "memory": (),
    "prefill": (32, 128, 512, 2048),
    "decode": (64, 1024, 4096),
    "batch": (1, 2, 4, 8, 16, 32),
    "exactness": (),
}
QUICK = ("load", "start", "memory", "prefill-32", "decode-64", "batch-4", "exactness")
FRESH = ("load", "start", "memory")  # measured in a process of their own each time


@dataclass(frozen=True)
class Row:
    """One thing to measure.

    Attributes
    ----------
    group : "load", "start", "memory": a fresh process reads the model; has computed a short prompt; how much memory
        it held. "prefill": a prompt of `size` tokens. "decode": one token after `size` others. "batch": one token for
        each of `size` sequences. "exactness": how far logits are from the oracle's.
    size : tokens or sequences; 0 where there is nothing to choose
    """

    group: str
    size: int = 0

    @property
    def name(self) -> str:
        """As the user writes it: "prefill-512"."""
        return f"{self.group}-{self.size}" if self.size else self.group

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
            "exactness": "largest logit difference from float32",
        }[self.group]

    @property
    def tokens(self) -> int:
        """Tokens computed by what is timed; 0 where that is not the point."""
        return {"prefill": self.size, "decode": 1, "batch": self.size}.get(self.group, 0)

    @property
    def positions(self) -> int:
        """Positions that the longest sequence takes."""
        return {"prefill": self.size, "decode": self.size + 1, "batch": BATCH_CONTEXT + 1}.get(self.group, 0)

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

    Raises
    ------
    RequestError
        A name is none of them.
    """
    rows = []
    for name in wanted:
        match = re.fullmatch(r"([a-z]+)(?:-([1-9]\d{0,6}))?", name)
        group, size = match.groups() if match else ("", None)
        if group not in SIZES or (size and not SIZES[group]):
            raise RequestError(
                f"row {name!r} is unknown; there are {', '.join(SIZES)}, and those with sizes may be asked for one, "
                "as in prefill-100, decode-500 or batch-3"
            )
        rows += [Row(group, int(size))] if size else [Row(group, each) for each in SIZES[group] or (0,)]
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
