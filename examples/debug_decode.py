"""One step of two requests with every stage in the open: a prompt's chunk and a decode, in one forward pass.

    python examples/debug_decode.py                     # say what each stage made
    python examples/debug_decode.py --stop              # stop after each stage, with everything in reach
    python examples/debug_decode.py --backend numpy     # the operations, too, can be stepped into: attention itself

`walk` below is `Engine.step` spelled out, from the library's own pieces: schedule, batch, forward, sample, commit,
and then the record. After each of them stands a line marked STOP. What to look at there are the locals of that
function: plan, batch, logits, seen (every intermediate by name), tokens, record.

pdb       `--stop` brings you there; or `python -m pdb examples/debug_decode.py`, then `b LINE` and `c`.
VS Code   choose "debug_decode.py" in Run and Debug: `.vscode/launch.json` has it, for both backends.
PyCharm   open this file, click beside the lines marked STOP, then Debug; options go into the run configuration.
          `--stop` works under both of these, too: `breakpoint()` then stops in the editor's debugger.

Row 0 of every array is the token that decodes: `logits[0]` comes of `seen["final_norm"][0]`, that of the last layer's
`seen["layers.29"][0]`, and so on down to `seen["embedding"][0]`; `seen["layers.3.attention.weights"][0]` says whom it
looked at, head by head.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from minillm import LLM, EngineConfig, SamplingParams, cli
from minillm.engine.detokenizing import IncrementalDetokenizer
from minillm.engine.recording import StepRecorder
from minillm.engine.sampling import sample
from minillm.engine.scheduler import Scheduler
from minillm.engine.sequence import Sequence
from minillm.engine.step_plan import StepPlan
from minillm.model.batch import Batch
from minillm.model.kv_cache import KVCache
from minillm.trace import StepRecord
from minillm.view.shown import shown

# A step has room for 16 tokens. The first prompt is read at once; the second, which comes a step later, is longer than
# what the first one's decode leaves of that room, so it is read in chunks.
CONFIG = EngineConfig(policy="chunked", block_size=8, num_blocks=32, max_batch_tokens=16, prefix_caching=False)
PROMPTS = {
    "decoding": "The capital of France is",
    "reading": "One, two, three, four, five, six, seven, eight, nine, ten, eleven,",
}
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, logprobs=True)
SEED = 0


@dataclass
class Served:
    """What an `Engine` has: a model, a cache, a scheduler, a recorder, and a detokenizer for each request."""

    llm: LLM
    kv_cache: KVCache
    scheduler: Scheduler
    recorder: StepRecorder = field(default_factory=lambda: StepRecorder(lambda: 0.0))  # no clock: stopping takes time
    detokenizers: dict[str, IncrementalDetokenizer] = field(default_factory=dict)
    records: list[StepRecord] = field(default_factory=list)

    @classmethod
    def by(cls, llm: LLM) -> Served:
        """Nobody yet, and an empty cache."""
        kv_cache = KVCache(llm.config, CONFIG.num_blocks, CONFIG.block_size)
        return cls(llm, kv_cache, CONFIG.scheduler(kv_cache))

    def add(self, request_id: str, prompt: str) -> Sequence:
        """Let a request wait its turn."""
        sequence = Sequence.from_prompt(request_id, self.llm.encode(prompt), PARAMS.max_tokens)
        self.scheduler.add(sequence)
        self.detokenizers[request_id] = IncrementalDetokenizer(self.llm.tokenizer, PARAMS)
        return sequence


def quiet(title: str, *things: object) -> None:
    """What is told of a stage that nobody looks at."""


def walk(served: Served, stop: bool = False, say: Callable[..., None] = quiet) -> StepRecord:
    """`Engine.step`, in the open. With `stop` it stops after each stage; `say` is told what each has made."""
    llm, kv_cache, scheduler, recorder = served.llm, served.kv_cache, served.scheduler, served.recorder
    recorder.begin()

    # Who advances by how many tokens? Integers only; whoever is admitted or grows has its blocks now.
    plan = scheduler.schedule()
    recorder.scheduled(plan, scheduler)
    sequences = [scheduler.sequence(chunk) for chunk in plan.chunks]
    say("1. schedule", plan, *plan.chunks, *sequences, scheduler.blocks)
    if stop:  # STOP 1, schedule: plan, plan.chunks, scheduler, scheduler.running
        breakpoint()

    # The chunks' tokens end to end, and for each its place in the cache. From here on nobody knows whose they are.
    for copy in plan.copies:
        kv_cache.copy_block(copy.source, copy.target)
    batch = Batch.from_plan(plan, kv_cache.block_size, kv_cache.num_groups)
    say("2. batch", batch, *rows(llm, batch))
    if stop:  # STOP 2, batch: batch, batch.token_ids, batch.slots, batch.block_tables
        breakpoint()

    # The pass through all layers. A probe is shown every intermediate; without one, this line is all there is.
    seen: dict[str, np.ndarray] = {}
    logits = llm.transformer.forward(batch, kv_cache, probe=seen.__setitem__)
    say("3. forward", llm.transformer, *shapes(seen, llm), kv_cache)
    if stop:  # STOP 3, forward: seen, logits, kv_cache.keys, kv_cache.values
        breakpoint()

    # A token for each chunk that has no known token after it: the decode yes, the chunk of a prompt not yet.
    tokens = []
    for scores, chunk, sequence in zip(logits, plan.chunks, sequences, strict=True):
        index, context = sequence.num_generated, sequence.token_ids
        tokens.append([sample(scores, PARAMS, SEED, index, context) for _ in range(chunk.num_samples)])
    say("4. sample", *best(llm, plan, logits), *tokens)
    if stop:  # STOP 4, sample: tokens, logits
        breakpoint()

    # Text of the tokens, who is through; and the scheduler appends, lets go, and is ready for the next step.
    for chunk, row in zip(plan.chunks, tokens, strict=True):
        for token in row:
            token.text, token.finish_reason = served.detokenizers[chunk.request_id].push(token.token_id)
            token.token_text = llm.tokenizer.token_text(token.token_id)
        chunk.sampled = row
    scheduler.commit(plan, tokens)
    say("5. commit", *sequences, scheduler)
    if stop:  # STOP 5, commit: tokens, scheduler, served.detokenizers
        breakpoint()

    # All of that as plain data, for views, metrics and traces.
    record = recorder.complete(plan.finished)
    served.records.append(record)
    say("6. record", record, *record.chunks, *(token for chunk in record.chunks for token in chunk.sampled))
    if stop:  # STOP 6, record: record, record.chunks, record.pool
        breakpoint()
    return record


def rows(llm: LLM, batch: Batch) -> list[str]:
    """The flattened token row: what stands where, and the slot of the cache that its key and value go to."""
    lines = [f"{'token':>7} {'position':>9} {'slot':>5}  text"]
    for row, (start, stop) in enumerate(zip(batch.query_starts, batch.query_starts[1:], strict=False)):
        tables = (" ".join(str(block) for block in group[row] if block >= 0) for group in batch.block_tables)
        lines.append(f"sequence {row}, blocks {' and '.join(tables)}")
        for t in range(start, stop):
            text = shown(llm.tokenizer.token_text(int(batch.token_ids[t])))
            slots = " ".join(f"{slot:5}" for slot in batch.slots[:, t])
            lines.append(f"{batch.token_ids[t]:7} {batch.positions[t]:9} {slots}  {text!r}")
    return lines


def shapes(seen: dict[str, np.ndarray], llm: LLM) -> list[str]:
    """A line for each intermediate of the first layer and outside the layers: its name, shape and largest number."""
    lines = [f"{len(seen)} intermediates; of {llm.config.num_layers} layers, here is the first:"]
    for name, value in seen.items():
        if not name.startswith("layers.") or name.split(".")[1] == "0":
            largest = np.abs(value[np.isfinite(value)]).max()
            lines.append(f"{name:28} {' x '.join(map(str, value.shape)):>12}  largest {largest:.3g}")
    return lines


def best(llm: LLM, plan: StepPlan, logits: np.ndarray) -> list[str]:
    """For each chunk the three best next tokens and their scores."""
    lines = []
    for chunk, scores in zip(plan.chunks, logits, strict=True):
        top = scores.argsort()[:-4:-1]
        listed = ", ".join(f"{shown(llm.tokenizer.token_text(int(i)))!r} {scores[i]:.2f}" for i in top)
        wanted = "chosen among all" if chunk.num_samples else "not asked for: more of the prompt is to come"
        lines.append(f"{chunk.name}: {listed}, ... ({wanted})")
    return lines


def tell(title: str, *things: object) -> None:
    """Print a stage's name and what it made, a line each."""
    print(f"\n--- {title} ---")
    for thing in things:
        print(thing if isinstance(thing, str) else repr(thing))


def serve(llm: LLM, stop: bool = False, say: Callable[..., None] = quiet) -> Served:
    """Bring two requests to where one decodes and the other is being read; walk through that step; then finish."""
    served = Served.by(llm)
    first = served.add("decoding", PROMPTS["decoding"])
    while not first.num_generated:  # one step, unless this model makes many tokens of the prompt
        walk(served)
    served.add("reading", PROMPTS["reading"])
    walk(served, stop, say)
    while served.scheduler.has_unfinished:
        walk(served)
    return served


def main() -> None:
    """Read the options, load the model, serve, and print what was answered."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stop", action="store_true", help="stop in the debugger after each stage")
    parser.add_argument("--quiet", action="store_true", help="do not print what each stage has made")
    cli.add_model_options(parser)
    options = parser.parse_args()

    served = serve(cli.load_model(options), options.stop, quiet if options.quiet else tell)
    print("\n--- and so on, to the end ---")
    chunks = [chunk for record in served.records for chunk in record.chunks]
    for name, prompt in PROMPTS.items():
        answer = "".join(token.text for chunk in chunks if chunk.request_id == name for token in chunk.sampled)
        print(f"{name}: {shown(prompt + answer)}")


if __name__ == "__main__":
    sys.exit(cli.run_safely(main))
