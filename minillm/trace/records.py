"""What one step leaves behind: plain data, enough for any view or measurement, and never a reference to the engine.

Every record is made of numbers, strings and lists of them, so that it can be written as JSON and read back equal.
Times are in seconds since the engine was made; stages are in milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from minillm.reprs import few, few_blocks
from minillm.trace.roofline import ModelCosts

PREFILL, DECODE = "prefill", "decode"
STAGES = ("schedule", "batch", "forward", "sample", "commit")


@dataclass
class RunFacts:
    """What a whole run has in common: the header of a trace.

    Attributes
    ----------
    model : the model's name, for people.
    policy, admission : the scheduler's, such as "chunked" and "fcfs".
    block_size, num_blocks : of the KV cache, in positions and in blocks.
    max_batch_tokens, max_sequences : the budgets of a step.
    watermark : share of the blocks that admission leaves free.
    prefix_caching : whether computed blocks are looked up for new requests.
    costs : what the model costs to run, from which follows how long a step takes at best; None if nobody knows.
    windows : for each group of the model's layers how many positions a query sees, its own the last, or None for all.
        Block tables have a block of each group for the same positions, side by side.
    """

    model: str
    policy: str
    admission: str
    block_size: int
    num_blocks: int
    max_batch_tokens: int
    max_sequences: int
    watermark: float
    prefix_caching: bool
    costs: ModelCosts | None = None
    windows: list[int | None] = field(default_factory=lambda: [None])

    @property
    def num_groups(self) -> int:
        """Groups of layers, and so blocks in a row of a block table."""
        return len(self.windows)


@dataclass
class Arrival:
    """A request that has come since the step before.

    Attributes
    ----------
    request_id : the name by which all records call it.
    time : when it was added, in seconds.
    num_prompt_tokens : tokens of its prompt.
    prompt : its text, or None if it came as token ids and nobody asked for the text.
    params : the sampling parameters that are not the default ones, by name.
    n : how many completions it asked for; they are numbered from 0.
    max_tokens : how long each of them may get.
    priority : smaller goes first, where the admission order looks at it.
    token_texts : each prompt token as people read it, such as " fox" or "<0xE2>"; None if there is no tokenizer.
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


@dataclass
class SampledToken:
    """A token that a step chose.

    Attributes
    ----------
    completion : which of the request's completions it belongs to.
    token_id : the token.
    text : what can be shown now that it has come: often its own text, but empty while a character or a possible stop
        string is incomplete, and longer when what was held back comes free.
    logprob : its log-probability under the model, if the request asked for it.
    token_text : the token by itself as people read it, such as " fox" or "<0xE2>"; None if there is no tokenizer.
    """

    completion: int
    token_id: int
    text: str
    logprob: float | None
    token_text: str | None = None


@dataclass
class ChunkRecord:
    """The part of one sequence that the step computed.

    Attributes
    ----------
    request_id, completion : whose it is. Completions share their prompt, which completion 0 computes.
    phase : "prefill" while tokens are computed that stood there before the step (a prompt, or after a preemption also
        the answer so far), "decode" for the one token that the step before chose.
    start : position of the chunk's first token.
    token_ids : the tokens in.
    block_table : the sequence's blocks during the step, in order; GIVEN_BACK for those that no query reaches any more.
    sampled : the tokens out: none while a prompt is not at its end, one for every completion when it is.
    """

    request_id: str
    completion: int
    phase: str
    start: int
    token_ids: list[int]
    block_table: list[int]
    sampled: list[SampledToken] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens the chunk advances its sequence by."""
        return len(self.token_ids)

    @property
    def span(self) -> str:
        """The sequence and the positions of the chunk, for people: `b[0:15]`."""
        return f"{sequence_name(self.request_id, self.completion)}[{self.start}:{self.start + self.num_tokens}]"

    def __repr__(self):
        chosen = few(token.token_id for token in self.sampled)
        return (
            f"ChunkRecord({self.span}, {self.phase}, blocks {few_blocks(self.block_table)}, "
            f"{f'sampled {chosen}' if chosen else 'nothing sampled'})"
        )


@dataclass
class Admission:
    """A sequence that left the queue in this step.

    Attributes
    ----------
    request_id, completion : who.
    num_tokens : tokens known: its prompt and, after a preemption, its answer so far.
    num_cached_tokens : how many of them the prefix index found, so that they need not be computed.
    after_preemption : whether it had been running before.
    """

    request_id: str
    completion: int
    num_tokens: int
    num_cached_tokens: int
    after_preemption: bool


@dataclass
class Preemption:
    """A sequence that had to give its blocks back, because the pool was empty.

    Attributes
    ----------
    request_id, completion : who.
    num_computed : how many of its tokens were computed; what of that the prefix index has lost when it comes back will
        be computed again.
    """

    request_id: str
    completion: int
    num_computed: int


@dataclass
class Finish:
    """A completion that ended.

    Attributes
    ----------
    request_id, completion : which.
    reason : "stop" (an end token or a stop string), "length" (`max_tokens`), "error", or "abort".
    error : what went wrong, as a message, if the reason is "error".
    exception : the same as an exception, for whoever holds the record; a file keeps only the message.
    """

    request_id: str
    completion: int
    reason: str
    error: str | None = None
    exception: BaseException | None = field(default=None, compare=False, repr=False, metadata={"in_file": False})


@dataclass
class RunningSequence:
    """A sequence that holds blocks during the step, whether or not the step advances it.

    Attributes
    ----------
    request_id, completion : who.
    num_tokens : tokens known before the step, prompt and answer.
    num_computed : how many of them had been computed before the step.
    block_table : its blocks, in order; those of the tokens this step computes are among them. GIVEN_BACK stands for
        those at its beginning that no query reaches any more, in layers that see only a window.
    """

    request_id: str
    completion: int
    num_tokens: int
    num_computed: int
    block_table: list[int]


@dataclass
class BlockCopy:
    """A block that was shared and had to be written: the writer got a copy (copy-on-write)."""

    source: int
    target: int


@dataclass
class PoolState:
    """The KV cache's blocks during the step. Each is free, cached or held.

    Attributes
    ----------
    references : [N], how many block tables name each block. Over 0: it is held.
    cached : blocks that no table names, but whose content a new prompt could still find; the next to be evicted first.
    evicted : blocks whose cached content the step gave up, to hand them out again.
    copies : blocks the step copied before it wrote.
    """

    references: list[int]
    cached: list[int] = field(default_factory=list)
    evicted: list[int] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)

    @property
    def num_blocks(self) -> int:
        """`N`."""
        return len(self.references)

    @property
    def num_held(self) -> int:
        """Blocks that at least one block table names."""
        return self.num_blocks - self.references.count(0)

    @property
    def num_cached(self) -> int:
        """Blocks that are kept only because somebody may ask for their content again."""
        return len(self.cached)

    @property
    def num_free(self) -> int:
        """Blocks with nothing in them."""
        return self.references.count(0) - len(self.cached)

    def states(self) -> list[str]:
        """For each block "free", "cached" or "held"."""
        states = ["held" if count else "free" for count in self.references]
        for block in self.cached:
            states[block] = "cached"
        return states


@dataclass
class StepRecord:
    """One step of the engine, from the requests that came before it to the tokens that came out.

    Attributes
    ----------
    step : 0, 1, 2, ...
    time : when it began, in seconds.
    milliseconds : how long each of STAGES took, by name.
    arrived : requests added since the step before, in their order.
    aborted : ids of requests aborted since the step before.
    admitted, preempted, finished : what happened to whom in this step. An aborted request's completions are among the
        finished, with the reason "abort".
    chunks : what was computed, in the batch's order. Empty only if there was nothing to do.
    running : who held blocks during the step, those admitted first in front; whoever finished in it is still there.
    waiting : names of the first sequences in the queue after scheduling, next first; at most as many as the engine
        records.
    num_waiting : how many wait in all, sequences that were preempted among them.
    pool : the blocks, as they were during the forward pass.
    """

    step: int
    time: float
    milliseconds: dict[str, float]
    arrived: list[Arrival]
    aborted: list[str]
    admitted: list[Admission]
    preempted: list[Preemption]
    finished: list[Finish]
    chunks: list[ChunkRecord]
    running: list[RunningSequence]
    waiting: list[str]
    num_waiting: int
    pool: PoolState

    @property
    def end(self) -> float:
        """When the step was over, in seconds: the time of the tokens it chose."""
        return self.time + sum(self.milliseconds.values()) / 1000

    @property
    def num_tokens(self) -> int:
        """`T`: tokens the step computed, of all sequences."""
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def prefix_hits(self) -> dict[str, int]:
        """Tokens that the prefix index found, for each request admitted in this step that it found any for."""
        hits: dict[str, int] = {}
        for admission in self.admitted:
            if admission.num_cached_tokens:
                hits[admission.request_id] = hits.get(admission.request_id, 0) + admission.num_cached_tokens
        return hits

    def __repr__(self):
        def names(parts: list[Any]) -> str:
            return few(sequence_name(part.request_id, part.completion) for part in parts)

        prefills = [chunk for chunk in self.chunks if chunk.phase == PREFILL]
        decodes = [chunk for chunk in self.chunks if chunk.phase == DECODE]
        said = [
            prefills and f"prefill {few(chunk.span for chunk in prefills)}",
            decodes and f"decode {names(decodes)}",
            *(
                parts and f"{word} {names(parts)}"
                for word, parts in (
                    ("admitted", self.admitted),
                    ("preempted", self.preempted),
                    ("finished", self.finished),
                )
            ),
            f"{self.num_waiting} waiting",
            f"{self.pool.num_held} of {self.pool.num_blocks} blocks held",
        ]
        return f"StepRecord({self.step}: {'; '.join(filter(None, said))})"


def sequence_name(request_id: str, completion: int) -> str:
    """How people are shown a sequence: its request's id, and the completion's number unless it is the first."""
    return f"{request_id}.{completion}" if completion else request_id
