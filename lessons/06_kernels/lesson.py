# %% [markdown]
# # 6. Kernels
#
# **How does a Python loop get near the memory's speed, with 8- and 4-bit weights, and keep its bits?**
#
# Nearly all of a model's work is one operation: a weight matrix times a vector. Lesson 5 showed that in decode the
# memory limits its speed. Lesson 4 relied on a promise: the result is the same to the last bit, no matter how many
# tokens are computed together. Here we write this operation in the obvious way and improve it step by step until it is
# the kernel that minillm runs. After each step we measure the speed and count the outputs whose bits have changed.

# %%
from time import perf_counter

import numba
import numpy as np
from numba import njit, prange

from minillm import LLM
from minillm.bench.engines.machine import read_all
from minillm.checkpoints import open_checkpoint
from minillm.ops.jit.compiling import OPTIONS
from minillm.ops.jit.microkernel import aligned, multiply_add
from minillm.ops.jit.tiles import tile_rows
from minillm.quantization import quantize

llm = LLM()
linear, as_matrix = llm.ops.linear, llm.ops.as_matrix
random = np.random.default_rng(0)
W = random.standard_normal((8192, 4096), np.float32)  # outputs, inputs
x = random.standard_normal(4096, np.float32)
outputs, inputs = W.shape

# %% tags=["hidden"]
try:
    import matplotlib.pyplot as plt
except ImportError:
    plt = None
    print("Matplotlib is not installed, so there are no figures")

# %% [markdown]
# ## The target
#
# How fast can memory be read? As in lesson 5, all cores read 268 MB. They read it again before every measurement below:
# in decode, all other matrices are read between two uses of one matrix, so none of it is left in a cache.

# %% tags=["timing"]
cores = numba.get_num_threads()
elsewhere = np.ones((cores, 2**25 // cores), np.int64)
sums = np.empty(cores, np.int64)


def best_seconds(action, repeats=15):  # each run on cold caches
    action()
    times = []
    for _ in range(repeats):
        read_all(elsewhere, sums)
        begin = perf_counter()
        action()
        times.append(perf_counter() - begin)
    return min(times)


bandwidth = elsewhere.nbytes / best_seconds(lambda: read_all(elsewhere, sums))
steps = {}


def measure(step, num_bytes, action):
    """Measure a product; print and store its GB/s of weights read and its billions of weights per second."""
    seconds = best_seconds(action)
    rate = steps[step] = num_bytes / seconds / 1e9, W.size / seconds / 1e9
    print(f"{step:26} {num_bytes / 1e6:4.0f} MB  {1000 * seconds:5.1f} ms  {rate[0]:5.1f} GB/s", end="")
    print(f"  ({1e9 * rate[0] / bandwidth:4.0%} of the memory)  {rate[1]:5.1f} G weights/s")


print(f"memory read speed: {bandwidth / 1e9:.1f} GB/s")
measure("NumPy: W @ x", W.nbytes, lambda: W @ x)

# %% [markdown]
# NumPy passes the product to a BLAS library that experts have tuned for decades, so there is little to gain. But BLAS
# has no 8-bit weights. To read a quarter of the bytes, we must write the loop ourselves.
#
# ## The loop
#
# [Numba](https://numba.pydata.org) compiles a Python function with LLVM when it is first called. We use the compiler
# options of minillm's own kernels; `prange` divides the outputs among the cores.

# %% tags=["timing"]
in_order = OPTIONS | {"cache": False, "parallel": True}


def dot_products(W, x, y):
    for o in prange(len(W)):
        total = np.float32(0)
        for k in range(len(x)):
            total += W[o, k] * x[k]
        y[o] = total


plain = njit(**in_order)(dot_products)
y_plain, y_reordered, y = np.empty((3, outputs), np.float32)
measure("a loop", W.nbytes, lambda: plain(W, x, y_plain))

# %% [markdown]
# The loop is compiled, but far from the target. It is a chain: each addition needs the result of the previous one. The
# result of a fused multiply-add is available after about four cycles, yet a core could start two of them, each on 8 or
# 16 numbers, in *every* cycle. Several totals at once would keep the core busy, but the compiler must not introduce
# them. Addition rounds, so `(a + b) + c` can differ from `a + (b + c)`, and the compiler must keep the order we wrote.
#
# ## Permission to reorder
#
# The flag `reassoc` permits reordering (and so does `fastmath=True`):

# %% tags=["timing"]
reordered = njit(**in_order | {"fastmath": OPTIONS["fastmath"] | {"reassoc"}})(dot_products)
measure("the loop, reordered", W.nbytes, lambda: reordered(W, x, y_reordered))
print(f"outputs whose bits differ: {np.count_nonzero(y_plain != y_reordered):,} of {outputs:,}")

largest = [np.abs(result - W.astype(np.float64) @ x).max() for result in (y_plain, y_reordered)]
print(f"largest error: in order {largest[0]:.1e}, reordered {largest[1]:.1e}")

# %% [markdown]
# Should we accept this? The results are not *worse*: many short chains accumulate less rounding error than a long one.
# But now the compiler chooses the order, for every processor and every surrounding loop. The best loop for one row of
# inputs is not the best for many, so a BLAS has several. We give NumPy the same row alone, and then among others:

# %% tags=["timing"]
X = np.random.default_rng(1).standard_normal((64, inputs), np.float32)


def changed(product, T):  # outputs of the first row that change when T rows are computed together
    return np.count_nonzero(product(X[:T])[0] != product(X[:1])[0])


print(f"outputs changed by BLAS, of {outputs:,}, with 2, 4, 16 and 64 rows together:")
print(*(changed(lambda rows: rows @ W.T, T) for T in (2, 4, 16, 64)))

# %% [markdown]
# The result for the first row depends on the rows computed with it. In a server, those are other users' requests. The
# differences are tiny, but when two tokens have nearly equal scores, a tiny difference can select the other, and the
# texts diverge. minillm's product changes no output, as we check below, and runs at full speed. What does it do
# differently?
#
# ## Lanes are outputs
#
# SIMD instructions process 8 or 16 neighbouring numbers at once, one in each *lane*. The reordered loop spread the
# terms of *one* sum over the lanes. But we have 8,192 sums to compute, so each lane can compute a separate sum:
#
#     reordered:  lane 0 sums k = 0, 16, 32, ...    lane 1 sums k = 1, 17, 33, ...    ...    of output o
#     here:       lane 0 sums all k, in order,      lane 1 sums all k, in order,      ...    of outputs o, o + 1, ...
#
# A SIMD load reads adjacent numbers. So when the matrix is loaded, minillm stores it in this order, 64 outputs wide:
#
# {{ source: minillm.ops.jit.tiles.tile_rows }}

# %%
tiles = tile_rows(W, inputs)[:, 0]  # one block for all inputs: [O/64, I, 64]
print(tiles.shape, "weights of input 7 for outputs 0 to 63 are adjacent:", np.array_equal(tiles[0, 7], W[:64, 7]))


@njit(**in_order)
def lanes(tiles, x, y):
    for tile in prange(len(tiles)):
        totals = np.zeros(64, np.float32)
        for k in range(len(x)):
            for lane in range(64):
                totals[lane] += x[k] * tiles[tile, k, lane]
        y[64 * tile : 64 * tile + 64] = totals


lanes(tiles, x, y)
print("outputs that differ from the plain loop's:", np.count_nonzero(y != y_plain))

# %% tags=["timing"]
measure("lanes are outputs", tiles.nbytes, lambda: lanes(tiles, x, y))

# %% [markdown]
# This is close to the memory's speed, and no bit has changed: each output is still the chain of the first loop. But now
# 64 chains are in progress, in four registers of 16 numbers or eight of 8: while one waits, others proceed.
#
# ## Keep the totals in registers
#
# For each `k`, the loop loads 64 weights and 64 totals, multiplies, adds, and *stores the totals*, only to load them
# again for the next `k`. If an iteration handles four inputs, the totals stay in registers for four additions (minillm
# handles eight). We compile this loop twice. The two versions differ only in the type of their indices:


# %% tags=["timing"]
def four_inputs(integer):
    one, two, three = integer(1), integer(2), integer(3)

    @njit(**in_order)
    def product(tiles, x, y):
        for tile in prange(len(tiles)):
            totals = np.zeros(64, np.float32)
            for first in range(0, len(x), 4):
                k = integer(first)
                for lane in range(64):
                    total = totals[lane]
                    total += x[k] * tiles[tile, k, lane]
                    total += x[k + one] * tiles[tile, k + one, lane]
                    total += x[k + two] * tiles[tile, k + two, lane]
                    total += x[k + three] * tiles[tile, k + three, lane]
                    totals[lane] = total
            y[64 * tile : 64 * tile + 64] = totals

    return product


for name, integer in (("four inputs per iteration", np.int64), ("unsigned indices", np.uint64)):
    product = four_inputs(integer)
    measure(name, tiles.nbytes, lambda product=product: product(tiles, x, y))
    print("outputs that differ from the plain loop's:", np.count_nonzero(y != y_plain))

# %% [markdown]
# The first version gains nothing. In Python, and therefore in Numba, `x[-1]` is the last element, so the compiled code
# tests every index that could be negative. It also tests whether the totals overlap the arrays they are computed from.
# These tests are expensive compared with an iteration of only a few vectors. Unsigned indices remove the first kind of
# test and shorten the second. The gain matters more when there are fewer bytes to read.
#
# ## A quarter of the bytes
#
# Store 8-bit integers, and one float32 scale per block of 32 consecutive weights. This is
# [GGUF's](https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) type `Q8_0`, except for its 16-bit scales.
# Rounding takes a few lines:
#
# {{ source: minillm.quantization.round_blocks }}

# %%
eight, four = quantize(W, 8), quantize(W, 4)
print(eight, four, sep="\n")

# %% [markdown]
# A kernel need not multiply each weight by its scale: it can first sum the block's 32 products and then apply the scale
# once. Converting a code to a float takes only a bitwise "or" and a subtraction, which are faster than the processor's
# conversion instruction. Place the integer in the lowest bits of 2²³, then subtract 2²³:

# %%
integers = np.arange(256, dtype=np.uint32)
for bit in (0, 8):
    power = np.float32(2.0 ** (23 - bit))
    floats = (power.view(np.uint32) | integers << np.uint32(bit)).view(np.float32)
    print(f"2**{23 - bit} is {power:.0f}, or 0x{power.view(np.uint32):X}; 200 at bit {bit} makes it", end=" ")
    print(f"{floats[200]:.0f}; exact for all 256: {np.array_equal(floats - power, integers)}")

# %% [markdown]
# Why is this exact? A float32 has 23 bits after the leading one. From 2²³ on, the lowest bit has the value 1, and no
# fraction is left. So the "or" *is* the addition 2²³ + i, and the difference is a small integer that needs no rounding.
# Signed codes are stored with 128 added, and 2²³ + 128 is subtracted instead of 2²³.
#
# The second line is for packed codes. With AVX-512, widening a byte to a 32-bit lane is the slowest operation. So
# minillm packs the codes of four neighbouring *inputs* into one 32-bit word (eight 4-bit codes). A lane is then as wide
# as its float, and a loaded word is used four or eight times. A code in higher bits of the word is masked but need not
# be shifted: for 2¹⁵, bit 8 has the value 1. Only a code beyond the fraction's 23 bits has to be shifted down:
#
# {{ source: minillm.ops.jit.weight_formats._eight_bits }}
#
# The next kernel handles all weight formats; 5- and 6-bit codes are first expanded to four bytes of a word. It
# prefetches weights 4 KB ahead, because the processor's own prefetching stops at the end of a memory page:
#
# {{ source: minillm.ops.jit.products._multiply_few_rows }}

# %% tags=["timing"]
matrices = {"float32": as_matrix(W), "8 bits": as_matrix(eight), "4 bits": as_matrix(four)}
for name, matrix in matrices.items():
    measure(f"minillm, {name}", llm.ops.num_bytes(matrix), lambda matrix=matrix: linear(x[None], matrix))

# %% tags=["timing"]
if plt:
    figure, panels = plt.subplots(1, 2, figsize=(9, 4.2), sharey=True, num="steps", layout="constrained")
    for axes, column, label in zip(panels, (0, 1), ("GB/s of weights", "billion weights per second"), strict=True):
        bars = axes.barh(list(steps), [rates[column] for rates in steps.values()], color="#0072B2")
        axes.bar_label(bars, fmt="%.0f", padding=3, fontsize=9)
        axes.set_xlabel(label)
    panels[0].invert_yaxis()
    panels[0].axvline(bandwidth / 1e9, color="#555555", linewidth=1, linestyle=":")
    figure.suptitle("The speed of each step (dotted: the memory's read speed)")

# %% [markdown]
# On the left, the bars are about as long as memory allows. The right side shows what a user notices: at the same GB/s,
# fewer bits mean more weights. Where a bar ends before the dotted line, unpacking and multiplying keep the cores busy.
#
# ## Many rows
#
# A prompt has many rows and should use each weight for all of them. The order of each sum is fixed, but the loops
# *around* it are not. So the kernel widens a block's weights once, into a *scratch* array in the cache, and then
# multiplies all rows with it. Now the cache is the limit: per cycle, a core can multiply and add two vectors but read
# only two and write one. So each value must be used several times: a weight for four rows, a total for four inputs.
#
# {{ source: minillm.ops.jit.microkernel.multiply_add }}
#
# How the scratch array is laid out matters as well. Memory and caches deliver *lines* of 64 bytes. We run the innermost
# loop alone, on scratch arrays 64 and 192 lanes wide, once aligned to a line and once 16 bytes off:


# %% tags=["timing"]
@njit(**OPTIONS | {"cache": False})
def innermost(scratch, x, iterations):
    for _ in range(iterations):
        multiply_add(scratch, x, 0, 0, scratch, 4, 0, 32, scratch.shape[1])


for width, shift in ((64, 4), (64, 0), (192, 4), (192, 0)):
    scratch = aligned(37, width).reshape(-1)[shift : shift + 36 * width].reshape(36, width)
    scratch[:] = 0
    seconds = best_seconds(lambda scratch=scratch: innermost(scratch, X, 10_000), repeats=3)
    print(f"{width:3} lanes, {4 * shift:2} bytes off: {10_000 * 2 * 4 * 32 * width / seconds / 1e9:4.0f} GFLOP/s")

# %% [markdown]
# A vector that straddles two lines is read twice. (This affects vectors that are as long as a line, as in AVX-512;
# shorter ones are affected less.) Three tiles side by side are also faster than one, because the other work of an
# iteration, preparing 16 numbers of `x`, then serves all three. Around this loop:
#
# {{ source: minillm.ops.jit.products._multiply_rows }}

# %% tags=["timing"]
print("            rows            one by one   together   (GFLOP/s with 8 bits)")
for T in (1, 4, 16, 64, 256):
    rows = random.standard_normal((T, inputs), np.float32)
    together = best_seconds(lambda rows=rows: linear(rows, matrices["8 bits"]), repeats=2)
    print(f"{T:16} {2 * steps['minillm, 8 bits'][1]:21.0f} {2 * W.size * T / together / 1e9:10.0f}")
print(f"BLAS, float32, {T} rows: {2 * W.size * T / best_seconds(lambda: rows @ W.T, repeats=2) / 1e9:.0f}")

# %% [markdown]
# (NumPy's BLAS did not recognize the processor of the machine that ran this page, and chose code for vectors of 8. With
# `OPENBLAS_CORETYPE=SkylakeX` in the environment, which selects vectors of 16, it reached 460.)
#
# What about the bits? The kernel for few rows and the kernel for many share only the order of their sums.

# %%
print(f"outputs changed, of {outputs:,}, when 1, 2, 5 and 64 rows are computed together")
for name, matrix in matrices.items():
    alone = linear(X[:1], matrix)[0]
    for threads in (1, None):
        llm.ops.set_num_threads(threads)
        counts = [np.count_nonzero(linear(X[:T], matrix)[0] != alone) for T in (1, 2, 5, 64)]
        print(f"{name:8} {threads or 'all':>3} threads:", *counts)

# %% [markdown]
# ## What do fewer bits cost?
#
# Rounding weights loses precision. Computing with them can lose more: to multiply integers, llama.cpp also rounds the
# *inputs*, in blocks of 32, to 8 bits. minillm keeps them in float32. How much error does each rounding add?

# %%
reference = W[:512].astype(np.float64) @ x
x8 = quantize(x[None], 8).dequantize()[0]


def error(y, expected):  # root mean square, relative to the expected values
    return np.sqrt(np.mean((y - expected) ** 2) / np.mean(expected**2))


print("         rounded weights   float32 inputs       8-bit inputs")
for name, rounded in (("8 bits", eight), ("4 bits", four)):
    weights = rounded.dequantize()[:512].astype(np.float64)
    engine = error(linear(x[None], matrices[name])[0, :512], weights @ x)
    rounding = f"{error(weights @ x, reference):14.2%} {'< 1e-6' if engine < 1e-6 else engine:>16}"
    print(f"{name:8} {rounding} {error(weights @ x8, weights @ x):17.2%}")

# %% [markdown]
# The first column depends on the model file: 4 bits cost about 16 times as much as 8. The other two depend on the
# engine. In each product of each layer, 8-bit inputs add as much error as 8-bit weights, and more where some inputs are
# much larger than their neighbours. `minillm bench --peers` measures the effect on our model's scores. In decode, 8-bit
# inputs would gain little, because the weights limit the speed. Loading a file into tiles loses nothing:

# %%
stored = open_checkpoint(llm.path).tensors["layers.0.mlp.down.weight"]
from_file = stored.read()
in_tiles = as_matrix(from_file)
print("same numbers, to the bit:", np.array_equal(llm.ops.dequantize(in_tiles), from_file.dequantize()))
in_file, in_memory = (8 * size / from_file.codes.size for size in (stored.data.nbytes, llm.ops.num_bytes(in_tiles)))
print(f"bits per weight: {in_file} in the file, {in_memory} in memory")

# %% [markdown]
# Weights take as many bits in memory as in the file. Scales and minimums stay float16 and are widened at each use; in
# float32 they would add a fifth to the reads. The scales of `quantize` are float32: float16 would lose precision.
#
# ## What production systems do differently
#
# - **Packing at each call.** A BLAS copies tiles of its matrices, at each call, into the order its kernel reads ([Goto
#   and van de Geijn 2008](https://doi.org/10.1145/1356052.1356053)).
# - **Integer dot products.** llama.cpp [rounds activations to 8 bits](https://github.com/ggml-org/llama.cpp/pull/951)
#   and multiplies with integer instructions, in code written by hand for each weight type and instruction set.
# - **Tensor cores.** A GPU multiplies small *matrices* in one instruction, with inputs of 16 bits or fewer and 32-bit
#   sums. [Marlin](https://arxiv.org/abs/2408.11743) widens 4-bit weights in registers and stays close to four times the
#   speed of 16-bit weights for up to 16 to 32 rows.
# - **Splitting k.** With few rows there are too few tiles for a whole GPU, so libraries also split the sums: split-k,
#   or [stream-k](https://arxiv.org/abs/2301.03598). How a sum is split then depends on the shape, and so on the batch.
# - **Batch invariance, at a price.** [He et al.
#   2025](https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/) trace answers that differ at
#   temperature 0 to exactly this, and fix one order for all shapes, at some cost in speed. vLLM has a
#   [mode](https://docs.vllm.ai/en/latest/features/batch_invariance/) for it. With fewer lanes than outputs it is cheap.
#
# ## Exercises
#
# Write the functions in [exercises.py](exercises.py), and test them with `pytest lessons/06_kernels`.
#
# 1. `tile_rows`: arrange a matrix for the kernels. It is quoted above, but can you write it from the shapes alone?
# 2. `unpack_nibbles`: extract two codes from each byte, in the order in which GGUF packs them.
# 3. `widen_bfloat16`: turn 16 bits into 32 with only a shift.
