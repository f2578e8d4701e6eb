"""The roofline model: operations and bytes of prefill, decode and mixed steps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.bench_engines import CONFIG
from support.builders import random_llama, write_gguf

from minillm.checkpoints import open_checkpoint
from minillm.model.transformer import Transformer
from minillm.ops import backend
from minillm.trace.roofline import ModelCosts, Roofline, Work, decode_work, prefill_work, step_work

counts = st.integers(1, 200)


@given(num_tokens=counts)
def test_a_prefill_computes_what_decode_steps_would_but_the_head_only_once(num_tokens):
    whole = prefill_work(CONFIG, 1000, 10, num_tokens)
    steps = [decode_work(CONFIG, 1000, 10, [context]) for context in range(num_tokens)]
    head = 2 * CONFIG.vocab_size * CONFIG.hidden_size
    assert whole.flops == sum(step.flops for step in steps) - (num_tokens - 1) * head
    assert whole.num_bytes == steps[-1].num_bytes


@given(contexts=st.lists(st.integers(0, 5000), min_size=1, max_size=40))
def test_a_batch_shares_only_the_weights(contexts):
    batch = decode_work(CONFIG, 1000, 10, contexts)
    single = [decode_work(CONFIG, 1000, 10, [context]) for context in contexts]
    assert batch.flops == sum(work.flops for work in single)
    assert batch.num_bytes == sum(work.num_bytes for work in single) - 1000 * (len(contexts) - 1)


@given(num_tokens=counts, contexts=st.lists(st.integers(0, 5000), min_size=1, max_size=40))
def test_a_step_costs_as_much_as_the_prefill_or_decode_in_it(num_tokens, contexts):
    costs = ModelCosts.of(CONFIG, 1000, 10)
    assert step_work(costs, [(0, num_tokens)]) == prefill_work(CONFIG, 1000, 10, num_tokens)
    assert step_work(costs, [(context, 1) for context in contexts]) == decode_work(CONFIG, 1000, 10, contexts)


@given(chunks=st.lists(st.integers(1, 500), min_size=1, max_size=9))
def test_the_chunks_of_a_prompt_attend_to_as_much_as_the_whole(chunks):
    costs = ModelCosts.of(CONFIG, 0, 10)
    starts = [sum(chunks[:n]) for n in range(len(chunks))]
    steps = [step_work(costs, [chunk]) for chunk in zip(starts, chunks, strict=True)]
    whole = prefill_work(CONFIG, 0, 10, sum(chunks))
    assert sum(step.flops for step in steps) == whole.flops + (len(chunks) - 1) * costs.head_flops
    assert steps[-1].num_bytes == whole.num_bytes


def test_operations_counted_by_hand():
    # One token takes 2 operations per weight of the 2 layers and the head. Attention takes 4 operations per number in
    # 4 heads of 16, per layer and per position of the 6 that the token attends to.
    layer = 64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 64 * 96
    assert decode_work(CONFIG, 1000, 10, [5]) == Work(1000 + 6 * 10, 2 * (2 * layer + 288 * 64) + 4 * 2 * 4 * 16 * 6)


@given(work=st.builds(Work, counts, counts), bandwidth=st.floats(1, 1e12), peak=st.floats(1, 1e12))
def test_the_roof_is_the_lower_of_bandwidth_and_peak(work, bandwidth, peak):
    roof = Roofline(bandwidth, peak)
    assert roof.seconds(work) == max(work.num_bytes / bandwidth, work.flops / peak)
    assert work.flops / roof.seconds(work) == pytest.approx(roof.attainable(work.intensity))
    assert (roof.bound(work) == "memory") == (work.num_bytes / bandwidth >= work.flops / peak)


@pytest.mark.parametrize("tied", [False, True])
def test_weight_bytes_are_the_bytes_that_a_step_reads(tmp_path, tied):
    checkpoint = open_checkpoint(write_gguf(tmp_path / "f32.gguf", random_llama(tie_word_embeddings=tied)))
    transformer = Transformer(checkpoint.config, lambda name: checkpoint.tensors[name].read(), backend("numpy"))
    sizes = {name: 4 * int(np.prod(shape)) for name, shape in checkpoint.config.tensor_shapes().items()}
    assert transformer.weight_bytes == sum(sizes.values()) - (0 if tied else sizes["embedding.weight"])
