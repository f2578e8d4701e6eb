"""Events: what happens to requests in and between steps. Plain data, in integers, strings and lists.

The scheduler puts events into its plan, and the same objects are kept in the step's record. None of them refers to a
sequence or to the engine, so they do not change when a sequence advances, and they can be written to a file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from minillm.reprs import abbreviated, format_block_tables, sequence_name

PREFILL, DECODE = "prefill", "decode"

# Fields that a trace file leaves out: they matter only while the step runs.
NOT_IN_FILE = {"in_file": False}


@dataclass(slots=True)
class Arrival:
    """A request was added since the last step.

    Attributes
    ----------
    request_id : its name in all records.
    time : when it was added, in seconds since the engine was created.
    num_prompt_tokens : tokens of its prompt.
    prompt : its text, or None if the caller gave only token ids.
    params : the sampling parameters that differ from their defaults, by name.
    n : number of completions requested; they are numbered from 0.
    max_tokens : maximum length of each completion, in tokens.
    priority : smaller is admitted first, under the "priority" admission order.
    token_texts : text of each prompt token, such as " fox" or "<0xE2>"; None if there is no tokenizer.
    """

    request_id: str
    time: float
    num_prompt_tokens: int
    prompt: str | None
    params: dict[str, Any]
    n: int
    max_tokens: int
    priority: int
    token_texts: list[str] | None = None


@dataclass(slots=True)
class Admission:
    """A sequence left the waiting queue and received its blocks.

    Attributes
    ----------
    request_id, completion : the sequence.
    num_tokens : its known tokens: the prompt and, after a preemption, the answer so far.
    num_cached_tokens : how many of them the prefix cache held, so that they need not be computed.
    after_preemption : whether it had been running before.
    """

    request_id: str
    completion: int
    num_tokens: int
    num_cached_tokens: int
    after_preemption: bool

    @property
    def name(self) -> str:
        """The sequence's name."""
        return sequence_name(self.request_id, self.completion)


@dataclass(slots=True)
class Preemption:
    """A sequence lost its blocks because the pool was exhausted, and returned to the waiting queue.

    Attributes
    ----------
    request_id, completion : the sequence.
    num_computed : tokens that had been computed. After re-admission they are computed again, except for the ones that
        the prefix cache still holds.
    """

    request_id: str
    completion: int
    num_computed: int

    @property
    def name(self) -> str:
        """The sequence's name."""
        return sequence_name(self.request_id, self.completion)


@dataclass(slots=True)
class SampledToken:
    """A token was chosen.

    Attributes
    ----------
    token_id : the token.
    logprob : its log-probability under the model, if the request asked for it.
    completion : the completion that it extends.
    text : text that can be shown now. It is empty while a character or a possible stop string is incomplete, and longer
        than the token's own text when held-back text is released.
    token_text : the token's own text, such as " fox" or "<0xE2>"; None if there is no tokenizer.
    finish_reason : "stop" or "length" if the completion ends with this token.
    """

    token_id: int
    logprob: float | None = None
    completion: int = 0
    text: str = ""
    token_text: str | None = None
    finish_reason: str | None = field(default=None, compare=False, metadata=NOT_IN_FILE)


@dataclass(slots=True)
class ScheduledChunk:
    """The part of one sequence that a step computes. This is a snapshot: it does not change when the sequence advances.

    Attributes
    ----------
    request_id, completion : the sequence. Completions share their prompt, which completion 0 computes.
    phase : PREFILL if the tokens were known when the sequence was admitted (the prompt and, after a preemption, also
        the answer so far); DECODE for the one token that the previous step sampled.
    start : position of the first token.
    token_ids : the tokens to compute.
    block_tables : the sequence's blocks in each KV-cache group, in the order of positions, up to the last of these
        tokens; -1 where a block has been freed because no later query can read it.
    sampled : the sampled tokens, once the step is complete.
    num_samples : tokens to sample after the chunk: 0 while known tokens remain, otherwise one per completion.
    """

    request_id: str
    completion: int
    phase: str
    start: int
    token_ids: list[int]
    block_tables: list[list[int]]
    sampled: list[SampledToken] = field(default_factory=list)
    num_samples: int = field(default=0, compare=False, metadata=NOT_IN_FILE)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the chunk."""
        return len(self.token_ids)

    @property
    def stop(self) -> int:
        """The position after the last token."""
        return self.start + len(self.token_ids)

    @property
    def is_prefill(self) -> bool:
        """Whether the tokens were known when the sequence was admitted."""
        return self.phase == PREFILL

    @property
    def name(self) -> str:
        """The sequence's name."""
        return sequence_name(self.request_id, self.completion)

    @property
    def span(self) -> str:
        """The sequence's name and the positions of the chunk, such as `b[0:15]`."""
        return f"{self.name}[{self.start}:{self.stop}]"

    def __repr__(self) -> str:
        if self.sampled:
            outcome = f"sampled {abbreviated(token.token_id for token in self.sampled)}"
        else:
            outcome = f"{self.num_samples} to sample" if self.num_samples else "nothing sampled"
        tables = format_block_tables(self.block_tables)
        return f"ScheduledChunk({self.span}, {self.phase}, blocks {tables}, {outcome})"


@dataclass(slots=True)
class BlockCopy:
    """A shared block was copied because a sequence is about to write to it (copy-on-write).

    Attributes
    ----------
    source, target : block numbers in the KV cache.
    """

    source: int
    target: int


@dataclass(slots=True)
class Finish:
    """A completion ended.

    Attributes
    ----------
    request_id, completion : the sequence.
    reason : "stop" (an end token or a stop string), "length" (`max_tokens` reached), "error", or "abort".
    error : the error message, if the reason is "error".
    exception : the exception itself. A trace file keeps only the message.
    """

    request_id: str
    completion: int
    reason: str
    error: str | None = None
    exception: BaseException | None = field(default=None, compare=False, repr=False, metadata=NOT_IN_FILE)

    @property
    def name(self) -> str:
        """The sequence's name."""
        return sequence_name(self.request_id, self.completion)
