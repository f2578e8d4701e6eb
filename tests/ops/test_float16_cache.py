"""A float16 KV cache: a key beyond its range makes every query that reads it fail, and changes no other."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import cuda_on_cpu
from support.ops_cases import seeds

from minillm.ops import jit, reference

BLOCK = 4


@pytest.fixture(params=["reference", "jit", "gpu"])
def ops(request, monkeypatch):
    """Each backend; the kernels of the last run on the CPU."""
    if request.param == "gpu":
        return cuda_on_cpu.backend(monkeypatch)
    return {"reference": reference, "jit": jit}[request.param]


def attended(ops, keys, values, queries):
    """Write a sequence's keys and values [T, G, K] to a float16 cache; return the attention of its queries."""
    tokens, kv_heads, head_dim = keys.shape
    blocks = -(-tokens // BLOCK)
    key_blocks = np.zeros((blocks, 1, kv_heads, head_dim, BLOCK), np.float16)
    value_blocks = np.zeros((blocks, 1, kv_heads, BLOCK, head_dim), np.float16)
    positions, starts = np.arange(tokens, dtype=np.int32), np.array([0, tokens], np.int32)
    with np.errstate(over="ignore", invalid="ignore"):
        ops.write_kv(keys, values, key_blocks, value_blocks, 0, np.arange(tokens))
        return ops.attention(
            queries, key_blocks, value_blocks, 0, positions, starts, np.arange(blocks, dtype=np.int32)[None]
        )


@settings(max_examples=60)
@given(
    seed=seeds,
    tokens=st.integers(1, 40),
    number=st.sampled_from([65504.0, 65519.9, 65520.0, -65520.0, 1e5, -3e38]),
    data=st.data(),
)
def test_only_queries_that_read_a_key_out_of_range_fail(ops, seed, tokens, number, data):
    rng = np.random.default_rng(seed)
    keys, values, queries = (rng.standard_normal((tokens, 2, 16), np.float32) for _ in range(3))
    expected = attended(ops, keys, values, queries)
    token, head = data.draw(st.integers(0, tokens - 1)), data.draw(st.integers(0, 1))
    keys[token, head, data.draw(st.integers(0, 15))] = number
    found = attended(ops, keys, values, queries)
    np.testing.assert_array_equal(found[:token], expected[:token])
    np.testing.assert_array_equal(found[:, 1 - head], expected[:, 1 - head])
    if abs(number) >= 65520:
        assert np.isnan(found[token:, head]).all()
    else:
        assert np.isfinite(found[token:, head]).all()
