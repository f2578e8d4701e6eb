"""What a debugger shows of the objects one meets in a step: one line, short, and true, however large they are."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.builders import random_llama, write_gguf

from minillm import LLM, EngineConfig, SamplingParams
from minillm.checkpoints import open_checkpoint
from minillm.engine.block_allocator import GIVEN_BACK
from minillm.engine.sampling import sample
from minillm.engine.sequence import Sequence
from minillm.engine.step_plan import ScheduledChunk
from minillm.model.batch import Batch
from minillm.model.weights import Linear
from minillm.ops import jit
from minillm.quantization import quantize
from minillm.reprs import MOST, few, few_blocks
from minillm.trace import ChunkRecord

LONGEST = 300  # characters


@pytest.fixture(scope="module")
def crowd(tmp_path_factory):
    """An engine at work on a hundred requests, and the plan and batch of its next step."""
    path = write_gguf(tmp_path_factory.mktemp("reprs") / "model.gguf", random_llama(), "Q8_0", with_tokenizer=True)
    config = EngineConfig(block_size=2, num_blocks=900, max_sequences=100, max_batch_tokens=1600)
    llm = LLM(path, backend="numpy", engine=config)
    for n in range(100):
        llm.engine.add_request([n] * 16, SamplingParams(max_tokens=5, ignore_eos=True), request_id=f"request-{n}")
    record = llm.engine.step()
    plan = llm.engine.scheduler.schedule()
    return llm, record, plan, Batch.from_plan(plan, llm.kv_cache.block_size)


def test_everything_met_in_a_step_is_one_short_line(crowd):
    llm, record, plan, batch = crowd
    choice = sample(np.zeros(10_000, np.float32), SamplingParams(), 0, 0)
    transformer, scheduler = llm.transformer, llm.engine.scheduler
    met = [
        llm, llm.engine, llm.config, llm.tokenizer, llm.kv_cache, llm.kv_cache.blocks, open_checkpoint(llm.path),
        transformer, transformer.layers[0], transformer.layers[0].q, scheduler, scheduler.waiting, scheduler.running[0],
        plan, plan.chunks[0], batch, record, record.chunks[0], record.chunks[0].sampled[0], choice, SamplingParams(),
        quantize(np.ones((500, 640), np.float32), 4), llm.engine._requests["request-0"].answers[0],
    ]  # fmt: skip
    for thing in met:
        assert "\n" not in repr(thing)
        assert len(repr(thing)) <= LONGEST, repr(thing)
        assert repr(thing).startswith(f"{type(thing).__name__}(")


def test_they_say_what_is_so(crowd):
    llm, record, plan, batch = crowd
    chunk, sequence = plan.chunks[3], plan.chunks[3].sequence
    assert repr(sequence) == "Sequence(request-3: 16 prompt + 1 generated tokens, 16 computed, 9 blocks)"
    assert repr(plan) == f"StepPlan(100 tokens: decode {' '.join(f'request-{n}' for n in range(8))} and 92 more)"
    table = " ".join(map(str, chunk.block_table[:8]))
    assert repr(chunk) == f"ScheduledChunk(request-3[16:17], decode, 1 to sample, blocks {table} and 1 more)"
    assert repr(batch) == "Batch(100 tokens of 100 sequences, positions 16, 16, 16, 16, 16, 16, 16, 16, and 92 more)"
    assert repr(record.chunks[3]).startswith("ChunkRecord(request-3[0:16], prefill, blocks ")
    assert repr(record.chunks[3]).endswith(f", sampled {sequence.token_ids[-1]})")
    held = llm.kv_cache.blocks.num_held
    assert f"{held} of 900 blocks of 2 held, {held * 2 * 512 / 1e6:.1f} of 0.9 MB" in repr(llm.kv_cache)
    assert repr(llm.transformer.layers[0].down) == "Linear(96 -> 64)"
    layer = "Layer(q 64 -> 64, k 64 -> 32, v 64 -> 32, output 64 -> 64, gate 64 -> 96, up 64 -> 96, down 96 -> 64)"
    assert repr(llm.transformer.layers[0]) == layer
    matrix = quantize(np.ones((500, 640), np.float32), 4)
    assert repr(matrix) == "QuantizedMatrix(500 x 640, 4 bits, a scale and minimum per 32 inputs, 0.4 MB)"


def test_a_compiled_backends_matrix_says_how_it_is_kept():
    weights = np.random.default_rng(0).standard_normal((96, 64), np.float32)
    rounded = (weights.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    forms = {"float32": weights, "bfloat16": rounded, "8 bits": quantize(weights, 8), "4 bits": quantize(weights, 4)}
    for kept, form in forms.items():
        matrix = jit.as_matrix(form)
        assert matrix.shape == (96, 64)
        assert repr(matrix) == f"TiledMatrix(96 x 64, {kept}, {jit.num_bytes(matrix) / 1e6:.1f} MB)"
        assert repr(Linear(matrix, np.zeros(96, np.float32))) == "Linear(64 -> 96, with bias)"


def test_tables_behind_a_window_say_what_is_gone():
    table = [GIVEN_BACK] * 300 + list(range(20, 29))
    sequence = Sequence([1] * 600, 600, "a", num_computed=599, block_table=table)
    assert repr(sequence) == "Sequence(a: 600 prompt + 0 generated tokens, 599 computed, 9 blocks)"
    said = "blocks 300 given back; 20 21 22 23 24 25 26 27 and 1 more"
    assert f", decode, 1 to sample, {said})" in repr(ScheduledChunk(sequence, 599, [1], table, False, 1))
    assert f", decode, {said}, nothing" in repr(ChunkRecord("a", 0, "decode", 599, [1], table))
    assert few_blocks([GIVEN_BACK]) == "1 given back"


@given(st.lists(st.integers(0, 99), max_size=30))
def test_few_names_the_first_and_counts_the_rest(items):
    said = few(items)
    named = said.split(" and ")[0].split()
    assert named == [str(item) for item in items[:MOST]]
    more = re.search(r"and (\d+) more$", said)
    assert (int(more[1]) if more else 0) + len(named) == len(items)
