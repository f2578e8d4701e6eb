"""Compare the GPU backend with the CPU, operation by operation and for a whole model, and measure its speed.

    pip install -e ".[gpu]"
    python examples/gpu_check.py                # the default model
    python examples/gpu_check.py --random       # random weights in the default model's sizes, for use offline

Three things are checked: every operation differs from the reference by at most 2e-5 of its largest number; the model's
logits are close to the CPU backends' logits and its greedy completions are the same; and a completion has the same bits
alone and in a batch. The check should take less than five minutes, most of it spent compiling. The exit status is 0 if
all checks pass, 1 if one fails, and 2 if there is no GPU to check on.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from minillm import LLM, EngineConfig, SamplingParams
from minillm.errors import BackendError
from minillm.ops import backend, reference
from minillm.quantization import QuantizedMatrix, quantize

TOLERANCE = 2e-5  # relative to the largest number of an operation's result
LOGITS_TOLERANCE = 2e-3  # absolute difference of logits
CASES = 5  # random cases per operation
NEW_TOKENS = 24

Case = tuple[str, np.ndarray, np.ndarray]  # an operation, the GPU's result, the reference's result


# --- operations ---------------------------------------------------------------------------------------------------


def cases(ops: ModuleType, rng: np.random.Generator) -> Iterator[Case]:
    """Yield one random case of every operation, with a kernel of its own or from the reference."""
    xp = ops.array_library()
    rows, size, outputs = (int(n) for n in rng.integers(1, 700, 3))

    def randoms(*shapes: tuple[int, ...]) -> list[np.ndarray]:
        return [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]

    def both(name: str, *arguments: Any) -> Case:
        """Run an operation on the GPU and in the reference."""
        on_gpu = [xp.asarray(a) if isinstance(a, np.ndarray) and a.dtype.kind == "f" else a for a in arguments]
        return (
            name,
            ops.to_numpy(getattr(ops, name)(*on_gpu)),
            getattr(reference, name)(*arguments),
        )

    x, weight, bias, up = randoms((rows, size), (size,), (size,), (rows, size))
    yield both("rms_norm", x, weight, 1e-5)
    yield both("layer_norm", x, weight, bias, 1e-5)
    yield both("swiglu", x, up)
    yield both("geglu", x, up)
    yield both("apply_soft_cap", x, 2.0)
    (matrix,) = randoms((outputs, size))
    formats: dict[str, np.ndarray | QuantizedMatrix] = {
        "float32": matrix,
        "bfloat16": (matrix.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32),
        "8 bits": quantize(matrix, 8),
        "4 bits": quantize(matrix, 4),
    }
    ids = rng.integers(0, outputs, rows).astype(np.int32)
    for format_name, weights in formats.items():
        plain = weights.dequantize() if isinstance(weights, QuantizedMatrix) else weights
        packed = ops.as_matrix(weights)
        product = ops.to_numpy(ops.linear(xp.asarray(x), packed))
        yield f"linear, {format_name}", product, x.astype(np.float64) @ plain.T.astype(np.float64)
        yield f"embed, {format_name}", ops.to_numpy(ops.embed(ids, packed)), plain[ids]
        alone = ops.to_numpy(ops.linear(xp.asarray(x[-1:]), packed))
        yield f"linear, {format_name}: the bits of a row alone", same(alone[0], product[-1]), np.ones(1)
    yield from attention_cases(ops, rng)


def attention_cases(ops: ModuleType, rng: np.random.Generator) -> Iterator[Case]:
    """Yield cases that write keys and values to the cache, and attention of several sequences over it."""
    xp, dtype = ops.array_library(), str(rng.choice(["float32", "float16"]))
    kv_heads, queries_per_kv, head_dim, block_size = (
        int(rng.choice(n)) for n in ([1, 3], [1, 4], [64, 96, 256], [1, 16, 128])
    )
    lengths = rng.integers(1, 900, 4)
    chunks = np.minimum(lengths, [1, 1, 7, 40])
    num_blocks = -(-lengths // block_size)
    tables = np.full((4, num_blocks.max()), -1, np.int32)
    pool = rng.permutation(num_blocks.sum()).astype(np.int32)
    for row, count in enumerate(num_blocks):
        tables[row, :count] = pool[num_blocks[:row].sum() :][:count]
    keys = rng.standard_normal((len(pool), 2, kv_heads, head_dim, block_size), dtype=np.float32).astype(dtype)
    values = rng.standard_normal((len(pool), 2, kv_heads, block_size, head_dim), dtype=np.float32).astype(dtype)
    positions = np.concatenate([np.arange(n - c, n) for n, c in zip(lengths, chunks, strict=True)]).astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(chunks)]).astype(np.int32)
    queries = rng.standard_normal((len(positions), kv_heads * queries_per_kv, head_dim), dtype=np.float32)
    new = rng.standard_normal((2, 2, kv_heads, head_dim), dtype=np.float32)
    slots = rng.choice(len(pool) * block_size, 2, replace=len(pool) * block_size < 2)
    cache = [xp.asarray(keys), xp.asarray(values)]
    ops.write_kv(*map(xp.asarray, new), *cache, 1, slots)
    reference.write_kv(new[0], new[1], keys, values, 1, slots)
    for name, found, expected in ("keys", cache[0], keys), ("values", cache[1], values):
        yield f"write_kv, {name}", same(ops.to_numpy(found), expected), np.ones(1)
    scorings: dict[str, tuple[float | None, int | None, float | None]] = {
        "": (None, None, None),
        ", window and soft cap": (0.2, 100, 5.0),
    }
    for name, scoring in scorings.items():
        found = ops.attention(xp.asarray(queries), *cache, 1, positions, starts, tables, *scoring)
        yield (
            f"attention{name}",
            ops.to_numpy(found),
            reference.attention(queries, keys, values, 1, positions, starts, tables, *scoring),
        )


def same(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return [1] if all bits are equal, else [0], for results that must be exact."""
    return np.array([float(found.tobytes() == expected.tobytes())])


def check_operations(ops: ModuleType, console: Console) -> bool:
    """Check every operation on random shapes: its largest difference relative to its largest number."""
    worst: dict[str, float] = {}
    for seed in range(CASES):
        for name, found, expected in cases(ops, np.random.default_rng(seed)):
            difference = float(np.abs(found - expected).max() / np.abs(expected).max())
            worst[name] = max(worst.get(name, 0.0), difference) if np.isfinite(difference) else np.inf
    table = Table("operation", "largest difference / largest value", "", title=f"{CASES} random cases of each")
    for name, difference in worst.items():
        table.add_row(name, f"{difference:.1e}", "" if difference <= TOLERANCE else "TOO FAR")
    console.print(table)
    return all(difference <= TOLERANCE for difference in worst.values())


# --- a whole model ------------------------------------------------------------------------------------------------


def load(model: str | Path | None, name: str) -> LLM:
    """Load the model on a backend. Float weights are rounded to 4 bits, so that all backends use the same weights."""
    engine = EngineConfig(num_blocks=16 * 40, max_batch_tokens=512, prefix_caching=False)
    return LLM(model, backend=name, weights="int4", context_length=1024, engine=engine)


def check_model(on_gpu: LLM, others: dict[str, LLM], console: Console) -> bool:
    """Compare logits and greedy completions with the CPU's, and check that completions do not depend on the batch."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, on_gpu.config.vocab_size, n).tolist() for n in rng.integers(1, 60, 16)]
    if on_gpu.tokenizer is not None:
        texts = ("The quick brown fox jumps over the lazy dog, and then", "def fibonacci(n):", "The sky is")
        prompts[:3] = [on_gpu.encode(text) for text in texts]
    greedy = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=True)
    passed = True
    ours, answers = on_gpu.logits(prompts[0]), on_gpu.generate(prompts, greedy)
    for name, llm in others.items():
        difference = float(np.abs(ours - llm.logits(prompts[0])).max())
        console.print(
            f"logits, largest difference from {name}: {difference:.1e} (at most {LOGITS_TOLERANCE} is allowed)"
        )
        passed &= difference <= LOGITS_TOLERANCE  # False for NaN
    for output, expected in zip(answers[:3], others["numba"].generate(prompts[:3], greedy), strict=True):
        agrees = output.token_ids == expected.token_ids
        console.print(
            f"greedy completion of {NEW_TOKENS} tokens: {'same as numba' if agrees else 'DIFFERENT from numba'}"
        )
        passed &= agrees
    alone = [on_gpu.generate([prompt], greedy)[0] for prompt in prompts]
    equal = sum(a.token_ids == b.token_ids and a.logprobs == b.logprobs for a, b in zip(answers, alone, strict=True))
    console.print(f"completions and log-probabilities, alone and in a batch of 16: {equal} of 16 have the same bits")
    return passed and equal == len(prompts)


def measure(llm: LLM) -> list[float]:
    """Return tokens per second: prefill of 512 tokens, decode of one request, and decode of 16 requests."""
    rng = np.random.default_rng(1)

    def rate(num_prompts: int, length: int, new: int, counted: int) -> float:
        prompts = rng.integers(0, llm.config.vocab_size, (num_prompts, length)).tolist()
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        llm.generate(prompts, params)  # compiles the kernels for these shapes
        start = perf_counter()
        llm.generate(prompts, params)
        return counted / (perf_counter() - start)

    return [rate(1, 512, 1, 512), rate(1, 8, 64, 64), rate(16, 8, 64, 16 * 64)]


def benchmark(models: dict[str, LLM], console: Console) -> None:
    """Print a table of the backends' speeds."""
    table = Table("tokens per second", "prefill of 512", "decode, 1 request", "decode, 16 requests")
    for name, llm in models.items():
        table.add_row(name, *(f"{rate:,.0f}" for rate in measure(llm)))
    console.print(table)


@dataclass(frozen=True)
class Sizes:
    """The sizes of a random model; by default, the default model's."""

    vocabulary: int = 49152
    hidden: int = 576
    intermediate: int = 1536
    layers: int = 30
    heads: int = 9
    kv_heads: int = 3


def write_random_model(folder: Path, sizes: Sizes) -> Path:
    """Write a Llama with random bfloat16 weights to a folder."""
    D, F, kv = sizes.hidden, sizes.intermediate, sizes.hidden // sizes.heads * sizes.kv_heads
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": sizes.vocabulary,
        "hidden_size": D,
        "intermediate_size": F,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (sizes.vocabulary, D), "model.norm": (D,)}
    for layer in (f"model.layers.{index}" for index in range(sizes.layers)):
        shapes |= {f"{layer}.self_attn.{name}_proj": (size, D) for name, size in {"q": D, "k": kv, "v": kv}.items()}
        shapes |= {f"{layer}.self_attn.o_proj": (D, D), f"{layer}.mlp.down_proj": (D, F)}
        shapes |= {f"{layer}.mlp.{name}_proj": (F, D) for name in ("gate", "up")}
        shapes |= {f"{layer}.{name}_layernorm": (D,) for name in ("input", "post_attention")}
    header, data, end, rng = {}, [], 0, np.random.default_rng(0)
    for name, shape in shapes.items():
        numbers: np.ndarray = rng.standard_normal(shape, dtype=np.float32)
        numbers = 1 + numbers / 20 if "norm" in name else numbers / np.float32(shape[-1] ** 0.5)
        data.append((numbers.view(np.uint32) >> 16).astype("<u2").tobytes())
        start, end = end, end + len(data[-1])
        header[f"{name}.weight"] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data))
    return folder


def main() -> int:
    """Run all checks and measurements; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", help="model name or path, as for LLM (default: the default model)")
    source.add_argument("--random", action="store_true", help="use a model with random weights")
    options = parser.parse_args()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    try:
        ops = backend("cupy")
    except BackendError as error:
        console.print(f"No GPU found; nothing was checked: {error}", markup=False)
        return 2
    device = ops.array_library().cuda.runtime.getDeviceProperties(0)["name"].decode()
    console.print(f"On {device}.")
    passed = check_operations(ops, console)
    with tempfile.TemporaryDirectory() as folder:
        model = write_random_model(Path(folder), Sizes()) if options.random else options.model
        models = {name: load(model, name) for name in ("cupy", "numba", "numpy")}
    passed &= check_model(models["cupy"], {name: models[name] for name in ("numba", "numpy")}, console)
    benchmark({name: models[name] for name in ("cupy", "numba")}, console)
    console.print("All checks passed." if passed else "Some checks FAILED: see above.")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
