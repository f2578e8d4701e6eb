"""The whole forward pass on an array library that raises for everything outside the array API standard."""

from functools import partial
from types import SimpleNamespace

import array_api_strict
import numpy as np
import pytest
from support.tiny_models import CONFIGS, in_groups, random_weights

from minillm.model.batch import Batch, Chunk
from minillm.model.kv_cache import KVCache, kv_groups
from minillm.model.transformer import Transformer
from minillm.ops import reference

# The unchanged reference, on another library's arrays.
strict = SimpleNamespace(**vars(reference))
strict.array_library = lambda: array_api_strict
for maker in ("as_vector", "as_matrix", "as_matrices"):
    setattr(strict, maker, partial(getattr(reference, maker), xp=array_api_strict))

CHUNKS = [Chunk([5, 8, 1, 60, 3, 3, 9, 69, 0, 2, 31], 0, [[3, 0, 5]]), Chunk([7], 0, [[2]])]
DECODED = [Chunk([11], 11, [[3, 0, 5]]), Chunk([12, 13], 1, [[2]])]


def logits(config, ops):
    transformer, groups = Transformer(config, random_weights(config), ops), len(kv_groups(config))
    cache = KVCache(config, num_blocks=6 * groups, block_size=4, xp=ops.array_library())
    first = transformer.forward(Batch.from_chunks(in_groups(CHUNKS, groups), 4, groups), cache)
    for group in range(groups):
        cache.copy_block(2 * groups + group, 4 * groups + group)  # copy-on-write of a shared block
    last = [DECODED[0], Chunk(DECODED[1].token_ids, 1, [[4]])]
    batch, seen = Batch.from_chunks(in_groups(last, groups), 4, groups), {}
    second = transformer.forward(batch, cache, every_token=True, probe=seen.__setitem__)
    values = [value for name, value in seen.items() if not name.endswith((".chosen", "logits"))]
    assert {type(value) for value in values} == {type(ops.array_library().asarray(0.0))}
    return first, second


@pytest.mark.parametrize("name", CONFIGS)
def test_every_architecture_runs_on_any_array_library(name, monkeypatch):
    # The probe receives the arrays themselves, not NumPy copies.
    monkeypatch.setattr("minillm.model.transformer.with_copies", lambda probe, to_numpy: probe)
    for ours, expected in zip(logits(CONFIGS[name], strict), logits(CONFIGS[name], reference), strict=True):
        assert type(ours) is np.ndarray
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)
