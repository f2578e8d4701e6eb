"""The reprs of the objects in a step, as a debugger shows them: one short line for objects of any size."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm import LLM, EngineConfig, SamplingParams
from minillm.checkpoints import open_checkpoint
from minillm.engine.block_table import FREED, BlockTable
from minillm.engine.sampling import sample
from minillm.engine.sequence import Sequence
from minillm.model.batch import Batch
from minillm.model.weights import Linear
from minillm.ops import jit
from minillm.quantization import quantize
from minillm.reprs import MAX_SHOWN, abbreviated, format_block_table
from minillm.trace import ScheduledChunk

MAX_LENGTH = 300  # characters


@pytest.fixture(scope="module")
def busy_engine(tiny_gguf):
    """An LLM with a hundred running requests, the record of its first step, and the plan and batch of the next."""
    config = EngineConfig(block_size=2, num_blocks=900, max_sequences=100, max_batch_tokens=1600)
    llm = LLM(tiny_gguf, backend="numpy", engine=config)
    for n in range(100):
        llm.engine.add_request([n] * 16, SamplingParams(max_tokens=5, ignore_eos=True), request_id=f"request-{n}")
    record = llm.engine.step()
    plan = llm.engine.scheduler.schedule()
    return llm, record, plan, Batch.from_plan(plan, llm.kv_cache.block_size)


def test_every_object_in_a_step_has_a_repr_of_one_short_line(busy_engine):
    llm, record, plan, batch = busy_engine
    choice = sample(np.zeros(10_000, np.float32), SamplingParams(), 0, 0)
    transformer, scheduler = llm.transformer, llm.engine.scheduler
    objects = [
        llm, llm.engine, llm.config, llm.tokenizer, llm.kv_cache, scheduler.blocks, open_checkpoint(llm.path),
        transformer, transformer.layers[0], transformer.layers[0].q, scheduler, scheduler.waiting, scheduler.running[0],
        scheduler.running[0].block_tables[0],
        plan, plan.chunks[0], batch, record, record.chunks[0], record.chunks[0].sampled[0], choice, SamplingParams(),
        quantize(np.ones((500, 640), np.float32), 4), llm.engine._requests["request-0"].detokenizers[0],
    ]  # fmt: skip
    for value in objects:
        assert "\n" not in repr(value)
        assert len(repr(value)) <= MAX_LENGTH, repr(value)
        assert repr(value).startswith(f"{type(value).__name__}(")


def test_reprs_show_the_state(busy_engine):
    llm, record, plan, batch = busy_engine
    chunk = plan.chunks[3]
    sequence = llm.engine.scheduler.sequence(chunk)
    assert repr(sequence) == "Sequence(request-3: 16 prompt + 1 generated tokens, 16 computed, 9 blocks)"
    assert repr(plan) == f"StepPlan(100 tokens: decode {' '.join(f'request-{n}' for n in range(8))} and 92 more)"
    table = " ".join(map(str, chunk.block_tables[0][:8]))
    assert repr(chunk) == f"ScheduledChunk(request-3[16:17], decode, blocks {table} and 1 more, 1 to sample)"
    assert repr(batch) == "Batch(100 tokens of 100 sequences, positions 16, 16, 16, 16, 16, 16, 16, 16, and 92 more)"
    assert repr(record.chunks[3]).startswith("ScheduledChunk(request-3[0:16], prefill, blocks ")
    assert repr(record.chunks[3]).endswith(f", sampled {sequence.token_ids[-1]})")
    assert repr(llm.kv_cache) == "KVCache(2 layers, 2 kv heads of 16, float32; 900 blocks of 2, 0.9 MB)"
    blocks = llm.engine.scheduler.blocks
    assert repr(blocks).startswith(f"BlockAllocator({blocks.num_held} of 900 blocks of 2 held")
    mlp = "MLP(gate 64 -> 96, up 64 -> 96, down 96 -> 64)"
    assert repr(llm.transformer.layers[0].mlp) == mlp
    assert repr(llm.transformer.layers[0].mlp.down) == "Linear(96 -> 64)"
    assert repr(llm.transformer.layers[0]) == f"Layer(q 64 -> 64, k 64 -> 32, v 64 -> 32, output 64 -> 64, {mlp})"
    matrix = quantize(np.ones((500, 640), np.float32), 4)
    assert repr(matrix) == "QuantizedMatrix(500 x 640, 4 bits, one scale and minimum per 32 inputs, 0.4 MB)"


def test_the_repr_of_a_compiled_matrix_names_its_storage_type():
    weights = np.random.default_rng(0).standard_normal((96, 64), np.float32)
    rounded = (weights.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    by_type = {"float32": weights, "bfloat16": rounded, "8 bits": quantize(weights, 8), "4 bits": quantize(weights, 4)}
    for storage, stored in by_type.items():
        matrix = jit.as_matrix(stored)
        assert matrix.shape == (96, 64)
        assert repr(matrix) == f"TiledMatrix(96 x 64, {storage}, {jit.num_bytes(matrix) / 1e6:.1f} MB)"
        assert repr(Linear(matrix, np.zeros(96, np.float32))) == "Linear(64 -> 96, with bias)"


def test_freed_blocks_are_counted():
    table = [FREED] * 300 + list(range(20, 29))
    sequence = Sequence([1] * 600, 600, "a", num_computed=599, block_tables=[BlockTable(2, 18, table)])
    assert repr(sequence) == "Sequence(a: 600 prompt + 0 generated tokens, 599 computed, 9 blocks)"
    listed = "300 freed; 20 21 22 23 24 25 26 27 and 1 more"
    assert repr(sequence.block_tables[0]) == f"BlockTable({listed}; 2 positions each, window 18)"
    chunk = ScheduledChunk("a", 0, "decode", 599, [1], [table, table], num_samples=1)
    assert repr(chunk) == f"ScheduledChunk(a[599:600], decode, blocks {listed} | {listed}, 1 to sample)"
    assert repr(ScheduledChunk("a", 0, "decode", 599, [1], [table])).endswith(", nothing sampled)")
    assert format_block_table([FREED]) == "1 freed"


@given(st.lists(st.integers(0, 99), max_size=30))
def test_the_first_items_are_listed_and_the_rest_counted(items):
    text = abbreviated(items)
    listed = text.split(" and ")[0].split()
    assert listed == [str(item) for item in items[:MAX_SHOWN]]
    more = re.search(r"and (\d+) more$", text)
    assert (int(more[1]) if more else 0) + len(listed) == len(items)
