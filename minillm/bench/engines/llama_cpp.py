"""llama.cpp, through llama-cpp-python's low-level functions: the C library itself, with little Python in between."""

import ctypes
import os
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import llama_cpp as lib
import numpy as np

MAX_BATCH = 2048  # tokens per call of llama_decode; its own default, which it divides further

# Constants of llama_model_quantize, by GGUF's names of the types.
FILE_TYPES = {
    "F32": lib.LLAMA_FTYPE_ALL_F32,
    "F16": lib.LLAMA_FTYPE_MOSTLY_F16,
    "BF16": lib.LLAMA_FTYPE_MOSTLY_BF16,
    "Q8_0": lib.LLAMA_FTYPE_MOSTLY_Q8_0,
    "Q4_0": lib.LLAMA_FTYPE_MOSTLY_Q4_0,
    "Q4_1": lib.LLAMA_FTYPE_MOSTLY_Q4_1,
}


class LlamaCpp:
    """See `minillm.bench.engines`. Each task gets a context of just the sequences and positions that it needs."""

    def __init__(self) -> None:
        self._silence = lib.llama_log_callback(lambda level, text, data: None)  # kept, because C keeps calling it
        lib.llama_log_set(self._silence, ctypes.c_void_p(0))
        lib.llama_backend_init()
        self.context: Any = None
        self.memory: Any = None

    def load(self, path: str, threads: int) -> dict[str, Any]:
        """Load the weights. Contexts are created later."""
        self.threads = threads
        self.model = lib.llama_model_load_from_file(os.fsencode(path), lib.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self.vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        return {"version": f"llama-cpp-python {lib.__version__}"}

    def prefill(self, tokens: list[int], repeats: int) -> list[float]:
        """Time the prompt, with an empty cache each time."""
        self._make_context(1, len(tokens))
        return [self._timed_prefill(tokens) for _ in range(repeats)]

    def fill(self, prompts: list[list[int]]) -> None:
        """Compute every prompt, each in a sequence of the context."""
        self.length = len(prompts[0])
        self._make_context(len(prompts), self.length + 1)
        for sequence, tokens in enumerate(prompts):
            self._run(self._prompt_batches(tokens, sequence))

    def decode(self, tokens: list[int], repeats: int) -> list[float]:
        """Time steps. The token of the previous step is removed first."""
        return [self._timed_step(tokens) for _ in range(repeats)]

    def logits(self, tokens: list[int], path: str) -> None:
        """Compute one batch in which every token is scored."""
        self._make_context(1, len(tokens))
        self._run([make_batch(tokens, range(len(tokens)), [0] * len(tokens), [True] * len(tokens))])
        rows = [lib.llama_get_logits_ith(self.context, row) for row in range(len(tokens))]
        np.save(path, np.stack([np.ctypeslib.as_array(row, (self.vocab_size,)) for row in rows]))

    def requantize(self, source: str, target: str, storage: str, threads: int) -> None:
        """Write the GGUF file `source` to `target` with every matrix stored as `storage`, a key of FILE_TYPES."""
        params = lib.llama_model_quantize_default_params()
        params.ftype = FILE_TYPES[storage]
        params.nthread = threads
        params.allow_requantize = True
        params.pure = True  # otherwise llama.cpp chooses other types for some matrices
        if lib.llama_model_quantize(os.fsencode(source), os.fsencode(target), ctypes.byref(params)):
            raise RuntimeError(f"llama.cpp cannot write {source} as {storage}")

    def _make_context(self, num_sequences: int, length: int) -> None:
        if self.context:
            lib.llama_free(self.context)
        params = lib.llama_context_default_params()
        params.n_seq_max = num_sequences
        params.n_ctx = num_sequences * -(-length // 256) * 256  # llama.cpp rounds each sequence's share up to 256
        params.n_batch = MAX_BATCH
        params.n_threads = params.n_threads_batch = self.threads
        self.context = lib.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp cannot create a context for {num_sequences} sequences of {length} tokens")
        self.memory = lib.llama_get_memory(self.context)

    def _timed_prefill(self, tokens: list[int]) -> float:
        lib.llama_memory_clear(self.memory, True)
        return self._run(self._prompt_batches(tokens, 0))

    def _timed_step(self, tokens: list[int]) -> float:
        sequences = range(len(tokens))
        for sequence in sequences:
            lib.llama_memory_seq_rm(self.memory, sequence, self.length, -1)
        return self._run([make_batch(tokens, [self.length] * len(tokens), sequences, [True] * len(tokens))])

    def _prompt_batches(self, tokens: list[int], sequence: int) -> list[lib.llama_batch]:
        """Divide a prompt into as few batches as possible; only its last token is scored."""
        batches = []
        for start in range(0, len(tokens), MAX_BATCH):
            piece = tokens[start : start + MAX_BATCH]
            positions = range(start, start + len(piece))
            scored = [position == len(tokens) - 1 for position in positions]
            batches.append(make_batch(piece, positions, [sequence] * len(piece), scored))
        return batches

    def _run(self, batches: list[lib.llama_batch]) -> float:
        """Compute the batches, free their memory, and return the seconds of computing."""
        started = perf_counter()
        statuses = [lib.llama_decode(self.context, batch) for batch in batches]
        lib.llama_synchronize(self.context)
        seconds = perf_counter() - started
        for batch in batches:
            lib.llama_batch_free(batch)
        if any(statuses):
            raise RuntimeError(f"llama_decode gave status {statuses}")
        return seconds


def make_batch(
    tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int], scored: Sequence[bool]
) -> lib.llama_batch:
    """Return a batch with one entry per token: its position, its sequence, and whether it is scored."""
    batch = lib.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for row, (token, position, sequence, is_scored) in enumerate(
        zip(tokens, positions, sequences, scored, strict=True)
    ):
        batch.token[row] = token
        batch.pos[row] = position
        batch.n_seq_id[row] = 1
        batch.seq_id[row][0] = sequence
        batch.logits[row] = is_scored
    return batch


ENGINE = LlamaCpp
