"""The kernels on a generic processor: no AVX and no fused multiply-add, only the architecture's baseline.

The test runs this file as a script in a new process, which compiles for `generic` into a cache of its own and prints
its results as JSON. One model covers three storage formats, since most of the time goes into compiling.
"""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np

from minillm.model.batch import Batch, Chunk
from minillm.model.config import ModelConfig
from minillm.model.kv_cache import KVCache
from minillm.model.transformer import Transformer
from minillm.quantization import quantize

CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=70,
    hidden_size=72,  # not a multiple of a block or of a tile
    intermediate_size=100,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    context_length=64,
)
PROMPTS = [[5, 8, 1], [7], list(range(40)), [69] * 10]
FORMATS = {
    "bfloat16": lambda matrix: (matrix.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32),
    "8 bits": lambda matrix: quantize(matrix, 8),
    "4 bits": lambda matrix: quantize(matrix, 4),
}
FORMAT_OF = {
    "attention.q": "8 bits",
    "attention.k": "8 bits",
    "attention.v": "8 bits",
    "attention.output": "8 bits",
    "mlp.gate": "8 bits",
    "mlp.up": "8 bits",
    "mlp.down": "4 bits",
    "embedding": "bfloat16",
    "head": "8 bits",
}


def random_weights(name):
    """Return a random tensor of CONFIG's model, seeded by its name, in the format from FORMAT_OF."""
    shape = CONFIG.tensor_shapes()[name]
    noise = np.random.default_rng(list(name.encode())).standard_normal(shape, np.float32)
    if len(shape) == 1:
        return 1 + np.float32(0.2) * noise
    part = name.removesuffix(".weight").split(".", 2)[-1]
    return FORMATS[FORMAT_OF[part]](noise / np.float32(np.sqrt(shape[1])))


def forward(transformer, cache, chunks):
    return transformer.forward(Batch.from_chunks(chunks, cache.block_size), cache)


def prefill_and_decode(transformer):
    """Return logits [S, V] after the prompts and after one more token, for one batch and for each prompt alone."""
    cache = KVCache(CONFIG, num_blocks=16)
    tables = [[4 * row + block for block in range(4)] for row in range(len(PROMPTS))]
    steps = [(prompt, 0) for prompt in PROMPTS], [([3], len(prompt)) for prompt in PROMPTS]
    batched = [
        forward(transformer, cache, [Chunk(*chunk, [table]) for chunk, table in zip(step, tables, strict=True)])
        for step in steps
    ]
    alone = [[], []]
    for row in range(len(PROMPTS)):
        cache = KVCache.contiguous(CONFIG, CONFIG.context_length)
        for step, rows in zip(steps, alone, strict=True):
            rows.append(forward(transformer, cache, [Chunk(*step[row], [[0]])])[0])
    return np.array(batched), np.array(alone)


def measure():
    """Compare the kernels with the reference and batched with alone, and count instructions in the compiled code."""
    from minillm.ops import jit, reference

    compiled = Transformer(CONFIG, random_weights, jit)
    batched, alone = prefill_and_decode(compiled)
    expected, _ = prefill_and_decode(Transformer(CONFIG, random_weights, reference))
    code = machine_code()
    return {
        "fused": compiled.fused_layers is not None,
        "error": float(np.abs(batched - expected).max() / np.abs(expected).max()),
        "same bits": bool((batched == alone).all()),
        "instructions": {name: code.count(name) for name in ("mulps", "vfmadd", "ymm", "zmm")},
    }


def machine_code():
    """Return the assembly of the pass through all layers, which contains every kernel that it calls."""
    from minillm.ops.jit.layers import _layers

    return "\n".join(_layers.inspect_asm().values())


def test_kernels_compiled_for_a_generic_processor(tmp_path):
    environment = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(tmp_path)}
    process = subprocess.run(
        [sys.executable, __file__],
        capture_output=True,
        text=True,
        env=os.environ | environment | {"PYTHONPATH": str(Path(__file__).parents[2])},
        timeout=600,
    )
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout)
    assert found["fused"]
    assert found["error"] <= 2e-5
    assert found["same bits"]
    if platform.machine() in ("x86_64", "AMD64"):
        assert found["instructions"].pop("mulps") > 0
        assert not any(found["instructions"].values())


if __name__ == "__main__":
    print(json.dumps(measure()))
