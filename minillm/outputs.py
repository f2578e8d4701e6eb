"""What a request gives back: deltas while it runs, an output at its end, and what it took.

The engine knows steps; whoever asked wants answers. `Answers` listens to the engine's records, and sorts what they
hold by request.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from minillm.engine.sampling import SamplingParams
from minillm.trace import PREFILL, ChunkRecord, Finish, StepRecord, num_held


@dataclass
class Metrics:
    """What one completion took. Times are in seconds, and of steps only: what the caller did between is left out."""

    num_prompt_tokens: int
    num_cached_tokens: int = 0  # prompt tokens whose keys and values were still in the cache
    num_generated_tokens: int = 0
    time_to_first_token: float = 0.0  # all steps from when it was added, queueing among them
    prefill_seconds: float = 0.0  # those that computed its prompt, without sampling
    decode_seconds: float = 0.0  # all steps after the first token
    kv_bytes: int = 0  # of the KV cache's blocks that its block table named last

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens computed (not those found in the cache) a second."""
        return (self.num_prompt_tokens - self.num_cached_tokens) / self.prefill_seconds

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens a second after the first, which is the prefill's; 0 if there was only that one."""
        return (self.num_generated_tokens - 1) / self.decode_seconds if self.decode_seconds else 0.0


@dataclass
class Delta:
    """One step of an answer. Its text is empty while a character or a possible stop string is incomplete."""

    text: str
    token_id: int
    logprob: float | None
    finish_reason: str | None  # "stop" or "length" on the completion's last one
    metrics: Metrics  # up to now
    completion: int = 0  # which of the request's completions goes on


@dataclass
class CompletionOutput:
    """A finished completion of a prompt."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None  # one a token, if asked for
    finish_reason: str | None = None  # "stop": an end token or stop string; "length": max_tokens; "abort"
    metrics: Metrics | None = None


@dataclass
class RequestOutput:
    """A finished answer: `n` completions, of which the first is at hand as the output's own text, tokens and so on."""

    prompt_token_ids: list[int]
    completions: list[CompletionOutput]

    @property
    def text(self) -> str:
        """Of the first completion."""
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        """Of the first completion."""
        return self.completions[0].token_ids

    @property
    def logprobs(self) -> list[float] | None:
        """Of the first completion, one a token, if asked for."""
        return self.completions[0].logprobs

    @property
    def finish_reason(self) -> str | None:
        """Of the first completion."""
        return self.completions[0].finish_reason

    @property
    def metrics(self) -> Metrics | None:
        """Of the first completion."""
        return self.completions[0].metrics


class Followed:
    """A request under way, as seen from outside the engine.

    Attributes
    ----------
    request_id, prompt_token_ids, params : the request.
    deltas : what has come and was not taken yet.
    error : what ended the request, if it failed.
    """

    def __init__(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams, busy_seconds: float):
        self.request_id, self.prompt_token_ids, self.params = request_id, prompt_token_ids, params
        self.deltas: deque[Delta] = deque()
        self.error: BaseException | None = None
        self._since = busy_seconds
        self._metrics = [Metrics(len(prompt_token_ids)) for _ in range(params.n)]
        self._first_token_at = [busy_seconds] * params.n
        self._reasons: list[str | None] = [None] * params.n

    @property
    def is_finished(self) -> bool:
        """Whether no more deltas will come."""
        return None not in self._reasons

    def output(self) -> RequestOutput:
        """All that has come, put together."""
        completions = [
            CompletionOutput(logprobs=[] if self.params.logprobs else None, finish_reason=reason, metrics=metrics)
            for reason, metrics in zip(self._reasons, self._metrics, strict=True)
        ]
        for delta in self.deltas:
            completion = completions[delta.completion]
            completion.text += delta.text
            completion.token_ids.append(delta.token_id)
            if completion.logprobs is not None:
                completion.logprobs.append(delta.logprob)
        return RequestOutput(self.prompt_token_ids, completions)

    def found(self, num_cached_tokens: int) -> None:
        """So much of the prompt was found in the cache."""
        for metrics in self._metrics:
            metrics.num_cached_tokens = num_cached_tokens

    def advanced(self, chunk: ChunkRecord, seconds: float, busy_seconds: float, block_bytes: int) -> None:
        """A step computed `chunk`, in so many `seconds` before sampling; all steps so far took `busy_seconds`."""
        for metrics in self._metrics:
            if chunk.phase == PREFILL and not metrics.num_generated_tokens:
                metrics.prefill_seconds += seconds
        for token in chunk.sampled:
            metrics = self._metrics[token.completion]
            if metrics.num_generated_tokens == 0:
                metrics.time_to_first_token = busy_seconds - self._since
                self._first_token_at[token.completion] = busy_seconds
            metrics.num_generated_tokens += 1
            metrics.decode_seconds = busy_seconds - self._first_token_at[token.completion]
            metrics.kv_bytes = num_held(chunk.block_table) * block_bytes
            self.deltas.append(
                Delta(token.text, token.token_id, token.logprob, None, replace(metrics), token.completion)
            )

    def finished(self, finish: Finish) -> None:
        """A completion has ended; if with a token, that is the last one that came for it."""
        self._reasons[finish.completion] = finish.reason
        self.error = finish.exception or self.error
        if finish.reason in ("stop", "length"):
            last = next(delta for delta in reversed(self.deltas) if delta.completion == finish.completion)
            last.finish_reason = finish.reason


class Answers:
    """Follows requests through the records of an engine's steps.

    Parameters
    ----------
    block_bytes : bytes of a block of the KV cache.
    """

    def __init__(self, block_bytes: int):
        self._block_bytes = block_bytes
        self._followed: dict[str, Followed] = {}
        self._busy_seconds = 0.0  # of all steps so far

    def follow(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> Followed:
        """Watch a request that was added just now."""
        followed = self._followed[request_id] = Followed(request_id, prompt_token_ids, params, self._busy_seconds)
        return followed

    def drop(self, followed: Followed) -> None:
        """Watch it no longer."""
        self._followed.pop(followed.request_id, None)

    def push(self, record: StepRecord) -> None:
        """Take in what a step has brought."""
        self._busy_seconds += record.end - record.time
        computing = sum(record.milliseconds[stage] for stage in ("schedule", "batch", "forward")) / 1000
        for admission in record.admitted:
            if admission.request_id in self._followed and not admission.after_preemption:
                self._followed[admission.request_id].found(admission.num_cached_tokens)
        for chunk in record.chunks:
            if chunk.request_id in self._followed:
                followed = self._followed[chunk.request_id]
                followed.advanced(chunk, computing, self._busy_seconds, self._block_bytes)
        for finish in record.finished:
            if finish.request_id in self._followed:
                self._followed[finish.request_id].finished(finish)
