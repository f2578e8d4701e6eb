"""Walk through one engine step of two requests: a decode and a chunk of a prompt, in one forward pass.

    python examples/debug_decode.py                     # print the result of each stage
    python examples/debug_decode.py --stop              # stop in the debugger after each stage
    python examples/debug_decode.py --backend numpy     # compute with operations that can be stepped into

`walk` below is `Engine.step` written out with the library's own pieces: schedule, batch, forward, sample, commit, and
then the record. A line marked STOP follows each stage. The results are local variables of `walk`: plan, batch, logits,
seen (every intermediate result by name), tokens, record.

pdb       Use `--stop`, or run `python -m pdb examples/debug_decode.py` and enter `b LINE` and `c`.
VS Code   Choose "debug_decode.py" in Run and Debug. `.vscode/launch.json` has it for both backends.
PyCharm   Open this file, click beside the lines marked STOP, then choose Debug. Options go into the run configuration.
          `--stop` works in both editors, too: `breakpoint()` then stops in the editor's debugger.

Row 0 of every array belongs to the token that decodes. `logits[0]` is computed from `seen["final_norm"][0]`, which is
computed from the last layer's output `seen["layers.29"][0]`, and so on down to `seen["embedding"][0]`. The array
`seen["layers.3.attention.weights"][0]` holds its attention weights in layer 3, per head.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from minillm import LLM, EngineConfig, RequestError, SamplingParams, cli
from minillm.engine.detokenizing import IncrementalDetokenizer
from minillm.engine.recording import StepRecorder
from minillm.engine.sampling import sample
from minillm.engine.scheduler import Scheduler
from minillm.engine.sequence import Sequence
from minillm.engine.step_plan import StepPlan
from minillm.model.batch import Batch
from minillm.model.kv_cache import KVCache
from minillm.tokenizer import Tokenizer
from minillm.trace import StepRecord
from minillm.view.printable import printable

# A step has a budget of 16 tokens. The first prompt fits into one step. The second prompt arrives a step later and is
# longer than the budget that the first request's decode leaves, so it is computed in chunks.
NUM_BLOCKS = 32
CONFIG = EngineConfig(policy="chunked", block_size=8, num_blocks=NUM_BLOCKS, max_batch_tokens=16, prefix_caching=False)
PROMPTS = {
    "short": "The capital of France is",
    "long": "One, two, three, four, five, six, seven, eight, nine, ten, eleven,",
}
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, logprobs=True)
SEED = 0

Show = Callable[..., None]


@dataclass
class EngineParts:
    """The parts that an `Engine` connects, and the records of its steps."""

    llm: LLM
    tokenizer: Tokenizer
    kv_cache: KVCache
    scheduler: Scheduler
    recorder: StepRecorder
    detokenizers: dict[str, IncrementalDetokenizer] = field(default_factory=dict)
    records: list[StepRecord] = field(default_factory=list)

    @classmethod
    def for_model(cls, llm: LLM) -> EngineParts:
        """Return parts with an empty cache and no requests."""
        if llm.tokenizer is None:
            raise RequestError("this model has no tokenizer; choose one that has one")
        kv_cache = KVCache(llm.config, NUM_BLOCKS, CONFIG.block_size)
        return cls(llm, llm.tokenizer, kv_cache, CONFIG.scheduler(kv_cache), StepRecorder(no_clock))

    def add_request(self, request_id: str) -> Sequence:
        """Put one of PROMPTS into the waiting queue."""
        sequence = Sequence.from_prompt(request_id, self.llm.encode(PROMPTS[request_id]), PARAMS.max_tokens)
        self.scheduler.add(sequence)
        self.detokenizers[request_id] = IncrementalDetokenizer(self.tokenizer, PARAMS)
        return sequence


def no_clock() -> float:
    """Return 0: times mean nothing when each stage waits for the reader."""
    return 0.0


def show_nothing(title: str, *results: object) -> None:
    """Ignore the results of a stage."""


def walk(parts: EngineParts, stop: bool = False, show: Show = show_nothing) -> StepRecord:
    """Do what `Engine.step` does. With `stop`, stop after each stage; `show` receives the stage's results."""
    llm, kv_cache, scheduler, recorder = parts.llm, parts.kv_cache, parts.scheduler, parts.recorder

    # Decide which sequences advance, and by how many tokens. Sequences get the blocks they need here.
    recorder.begin()
    plan = scheduler.schedule()
    recorder.scheduled(plan, scheduler)
    record = recorder.record
    show("1. schedule", plan, *plan.chunks, *map(scheduler.sequence, plan.chunks), scheduler.blocks)
    if stop:  # STOP 1, schedule: plan, plan.chunks, scheduler, scheduler.running
        breakpoint()

    # Lay the tokens of all chunks end to end, and compute the slot of each in the cache.
    for copy in plan.copies:
        kv_cache.copy_block(copy.source, copy.target)
    batch = Batch.from_plan(plan, kv_cache.block_size, kv_cache.num_groups)
    show("2. batch", batch, *batch_rows(parts.tokenizer, batch))
    if stop:  # STOP 2, batch: batch, batch.token_ids, batch.slots, batch.block_tables
        breakpoint()

    # Pass through all layers. The probe receives every intermediate result; an engine without a probe passes none.
    seen: dict[str, np.ndarray] = {}
    logits = llm.transformer.forward(batch, kv_cache, probe=seen.__setitem__)
    show("3. forward", llm.transformer, *intermediate_rows(seen, llm.config.num_layers), kv_cache)
    if stop:  # STOP 3, forward: seen, logits, kv_cache.keys, kv_cache.values
        breakpoint()

    # Sample after each chunk that reaches the end of its sequence: the decode, but not the prompt's first chunk.
    tokens = []
    for row, chunk in zip(logits, plan.chunks, strict=True):
        sequence = scheduler.sequence(chunk)
        index, context = sequence.num_generated, sequence.token_ids
        tokens.append([sample(row, PARAMS, SEED, index, context) for _ in range(chunk.num_samples)])
    show("4. sample", *best_token_rows(parts.tokenizer, plan, logits), *tokens)
    if stop:  # STOP 4, sample: tokens, logits
        breakpoint()

    # Detokenize, and let the scheduler append the tokens, finish sequences and free their blocks.
    for chunk, sampled in zip(plan.chunks, tokens, strict=True):
        for token in sampled:
            token.text, token.finish_reason = parts.detokenizers[chunk.request_id].push(token.token_id)
            token.token_text = parts.tokenizer.token_text(token.token_id)
        chunk.sampled = sampled
    advanced = [scheduler.sequence(chunk) for chunk in plan.chunks]
    scheduler.commit(plan, tokens)
    show("5. commit", *advanced, scheduler)
    if stop:  # STOP 5, commit: tokens, scheduler, parts.detokenizers
        breakpoint()

    # Everything that happened, as plain data for views, metrics and traces.
    recorder.complete(plan.finished)
    recorder.next_step()
    parts.records.append(record)
    show("6. record", record, *record.chunks, *(token for chunk in record.chunks for token in chunk.sampled))
    if stop:  # STOP 6, record: record, record.chunks, record.pool
        breakpoint()
    return record


def batch_rows(tokenizer: Tokenizer, batch: Batch) -> list[str]:
    """Return one line per token of the batch: its id, its position, and the slots of its key and value."""
    lines = [f"{'token':>7} {'position':>9} {'slot':>5}  text"]
    for sequence, (start, stop) in enumerate(zip(batch.query_starts, batch.query_starts[1:], strict=False)):
        tables = (" ".join(str(block) for block in group[sequence] if block >= 0) for group in batch.block_tables)
        lines.append(f"sequence {sequence}, blocks {' and '.join(tables)}")
        for t in range(start, stop):
            text = printable(tokenizer.token_text(int(batch.token_ids[t])))
            slots = " ".join(f"{slot:5}" for slot in batch.slots[:, t])
            lines.append(f"{batch.token_ids[t]:7} {batch.positions[t]:9} {slots}  {text!r}")
    return lines


def intermediate_rows(seen: dict[str, np.ndarray], num_layers: int) -> list[str]:
    """Return one line per intermediate result of the first layer and outside the layers: name, shape, maximum."""
    lines = [f"{len(seen)} intermediate results; of the {num_layers} layers, only the first is shown:"]
    for name, value in seen.items():
        if not name.startswith("layers.") or name.split(".")[1] == "0":
            maximum = np.abs(value[np.isfinite(value)]).max()
            lines.append(f"{name:28} {' x '.join(map(str, value.shape)):>12}  maximum {maximum:.3g}")
    return lines


def best_token_rows(tokenizer: Tokenizer, plan: StepPlan, logits: np.ndarray) -> list[str]:
    """Return one line per chunk: the three best next tokens and their logits."""
    lines = []
    for chunk, row in zip(plan.chunks, logits, strict=True):
        best = ", ".join(
            f"{printable(tokenizer.token_text(int(token_id)))!r} {row[token_id]:.2f}"
            for token_id in row.argsort()[:-4:-1]
        )
        outcome = "one token is sampled" if chunk.num_samples else "nothing is sampled: more of the prompt follows"
        lines.append(f"{chunk.name}: {best}, ... ({outcome})")
    return lines


def print_stage(title: str, *results: object) -> None:
    """Print the title of a stage and its results, one per line."""
    print(f"\n--- {title} ---")
    for result in results:
        print(result if isinstance(result, str) else repr(result))


def serve(llm: LLM, stop: bool = False, show: Show = show_nothing) -> EngineParts:
    """Serve both requests to their end. `stop` and `show` apply to the first step that advances both."""
    parts = EngineParts.for_model(llm)
    first = parts.add_request("short")
    while not first.num_generated:  # one step, unless the tokenizer makes many tokens of the prompt
        walk(parts)
    parts.add_request("long")
    walk(parts, stop, show)
    while parts.scheduler.has_unfinished:
        walk(parts)
    return parts


def main() -> None:
    """Read the options, load the model, serve both requests and print their answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stop", action="store_true", help="stop in the debugger after each stage")
    parser.add_argument("--quiet", action="store_true", help="do not print the results of each stage")
    cli.add_model_options(parser)
    options = parser.parse_args()

    parts = serve(cli.load_model(options), options.stop, show_nothing if options.quiet else print_stage)
    print("\n--- the answers ---")
    chunks = [chunk for record in parts.records for chunk in record.chunks]
    for request_id, prompt in PROMPTS.items():
        answer = "".join(token.text for chunk in chunks if chunk.request_id == request_id for token in chunk.sampled)
        print(f"{request_id}: {printable(prompt + answer)}")


if __name__ == "__main__":
    sys.exit(cli.run_safely(main))
