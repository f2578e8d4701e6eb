# %% [markdown]
# # 6. Kernels
#
# **How can a Python loop run at nearly memory speed, with 8- and 4-bit weights, and always return the same bits?**
#
# Nearly all of a model's work is one operation: multiplying a weight matrix by a vector. In decode, memory limits the
# speed of this operation (lesson 5). Lesson 4 relied on a promise: the result is the same to the last bit, no matter
# how many tokens are computed together. Here we write the operation in the obvious way and improve it step by step
# until it is minillm's kernel. After each step, we measure the speed and count the outputs whose bits have changed.

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
# How fast can memory be read? As in lesson 5, we time all cores reading 268 MB. The same read before every measurement
# below removes the weights from the caches, as in decode, which reads all other matrices between two uses of one.

# %% tags=["timing"]
cores = numba.get_num_threads()
elsewhere = np.ones((cores, 2**25 // cores), np.int64)
sums = np.empty(cores, np.int64)


def best_seconds(action, repeats=15):  # each run starts with cold caches
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
    """Time a product. Print and store how many GB/s of weights it reads and how many billion weights per second."""
    seconds = best_seconds(action)
    rate = steps[step] = num_bytes / seconds / 1e9, W.size / seconds / 1e9
    print(f"{step:26} {num_bytes / 1e6:4.0f} MB  {1000 * seconds:5.1f} ms  {rate[0]:5.1f} GB/s", end="")
    print(f"  ({1e9 * rate[0] / bandwidth:4.0%} of the memory)  {rate[1]:5.1f} G weights/s")


print(f"memory read speed: {bandwidth / 1e9:.1f} GB/s")
measure("NumPy: W @ x", W.nbytes, lambda: W @ x)

# %% [markdown]
# NumPy passes the product to a BLAS library that experts have tuned for decades, so there is little to gain. But BLAS
# does not support 8-bit weights, which take a quarter of the bytes. To use them, we must write the loop ourselves.
#
# ## The loop
#
# [Numba](https://numba.pydata.org) compiles a Python function with LLVM when the function is first called. We use the
# compiler options of minillm's own kernels; `prange` divides the outputs among the cores.

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
# The compiled loop is far from the target. Its additions form a chain: each needs the previous result. The result of a
# fused multiply-add is available after about four cycles, but a core could start two of them, each on 8 or 16 numbers,
# in *every* cycle. Several totals at once would keep the core busy, but the compiler must not introduce them. Addition
# rounds, so `(a + b) + c` can differ from `a + (b + c)`, and the compiler must keep the order we wrote.
#
# ## Permission to reorder
#
# The flag `reassoc`, which `fastmath=True` includes, permits reordering:

# %% tags=["timing"]
reordered = njit(**in_order | {"fastmath": OPTIONS["fastmath"] | {"reassoc"}})(dot_products)
measure("the loop, reordered", W.nbytes, lambda: reordered(W, x, y_reordered))
print(f"outputs whose bits differ: {np.count_nonzero(y_plain != y_reordered):,} of {outputs:,}")

largest = [np.abs(result - W.astype(np.float64) @ x).max() for result in (y_plain, y_reordered)]
print(f"largest error: in order {largest[0]:.1e}, reordered {largest[1]:.1e}")

# %% [markdown]
# Should we accept different bits? The results are not *worse*: many short chains accumulate less rounding error than a
# long one. But the compiler now chooses the order for each processor and each loop. A BLAS has several loops, because
# the best loop for one row of inputs is not the best for many. We give NumPy one row alone, and then among others:

# %% tags=["timing"]
X = np.random.default_rng(1).standard_normal((64, inputs), np.float32)


def changed(product, T):  # outputs of the first row that change when T rows are computed together
    return np.count_nonzero(product(X[:T])[0] != product(X[:1])[0])


print(f"outputs changed by BLAS, of {outputs:,}, with 2, 4, 16 and 64 rows together:")
print(*(changed(lambda rows: rows @ W.T, T) for T in (2, 4, 16, 64)))

# %% [markdown]
# The result for the first row depends on the rows computed with it. In a server, those rows are other users' requests.
# The differences are tiny. But when two tokens have nearly equal logits, a tiny difference can change the choice
# between them, and the texts diverge. minillm's product runs at full speed and changes no output, as we check below.
#
# ## Lanes are outputs
#
# SIMD instructions process 8 or 16 neighbouring numbers at once, one in each *lane*. The reordered loop spread the
# terms of *one* sum over the lanes. But we have 8,192 sums to compute, so each lane can compute a separate sum:
#
#     reordered:  lane 0 sums k = 0, 16, 32, ...    lane 1 sums k = 1, 17, 33, ...    ...    of output o
#     here:       lane 0 sums all k, in order,      lane 1 sums all k, in order,      ...    of outputs o, o + 1, ...
#
# A SIMD load reads adjacent numbers. So when the matrix is loaded, minillm puts the weights of 64 outputs side by side:
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
# This is close to memory speed, and no bit has changed: each output is summed in the order of the first loop. But now
# 64 sums are in progress, in four registers of 16 numbers or eight of 8. While one register waits, others proceed.
#
# ## Keep the totals in registers
#
# For each `k`, the loop loads 64 weights and 64 totals, multiplies, adds, and *stores the totals*. For the next `k`, it
# loads the totals again. If an iteration handles four inputs, the totals stay in registers for four additions.
# (minillm's kernel handles eight inputs.) We compile this loop twice, with two types of indices:


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
# The version with signed indices gains nothing. In Python, and therefore in Numba, `x[-1]` is the last element, so the
# compiled code tests every index that could be negative. It also tests whether the totals overlap the arrays they are
# computed from. These tests are expensive compared with an iteration of only a few vectors. Unsigned indices remove the
# first kind of test and shorten the second. The gain matters more when there are fewer bytes to read.
#
# ## A quarter of the bytes
#
# We now round weights to 8-bit integers (*codes*), with one float32 scale per block of 32 consecutive weights, as in
# [GGUF's](https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) type `Q8_0`, which has 16-bit scales:
#
# {{ source: minillm.quantization.round_blocks }}

# %%
eight, four = quantize(W, 8), quantize(W, 4)
print(eight, four, sep="\n")

# %% [markdown]
# A kernel need not multiply each code by its scale: it can first sum the block's 32 products and then apply the scale
# once. Converting a code to a float takes only a bitwise "or" and a subtraction, which are faster than the processor's
# conversion instruction. To convert a code, place it in the lowest bits of the float 2²³, then subtract 2²³:

# %%
integers = np.arange(256, dtype=np.uint32)
for bit in (0, 8):
    power = np.float32(2.0 ** (23 - bit))
    floats = (power.view(np.uint32) | integers << np.uint32(bit)).view(np.float32)
    print(f"2**{23 - bit} is {power:.0f}, or 0x{power.view(np.uint32):X}; 200 at bit {bit} makes it", end=" ")
    print(f"{floats[200]:.0f}; exact for all 256: {np.array_equal(floats - power, integers)}")

# %% [markdown]
# Why is this exact? The fraction of a float32 has 23 bits. In a float between 2²³ and 2²⁴, the lowest of these bits has
# the value 1. The bitwise "or" therefore computes 2²³ + i, and subtracting 2²³ leaves a small integer that needs no
# rounding. Signed codes are stored with 128 added, and 2²³ + 128 is subtracted instead of 2²³.
#
# The second line of output is for packed codes. With AVX-512, widening a byte to a 32-bit lane is the slowest
# operation. minillm avoids it by packing the codes of neighbouring *inputs* into 32-bit words: four 8-bit or eight
# 4-bit codes. Each lane loads a word once and uses it four or eight times. A code at bit 8 of the word is masked but
# need not be shifted, because bit 8 of 2¹⁵ has the value 1. Only a code beyond the fraction's 23 bits is shifted down:
#
# {{ source: minillm.ops.jit.weight_formats._eight_bits }}
#
# The next kernel handles all weight formats. 5- and 6-bit codes are first expanded to bytes, four in each word. The
# kernel prefetches weights 4 KB ahead, because the processor's own prefetching stops at the end of a memory page:
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
# In the left panel, the bars of minillm's kernels are about as long as memory allows. Where a bar ends before the
# dotted line, computing takes longer than reading. The right panel shows what a user notices: at the same GB/s, fewer
# bits per weight mean more weights per second.
#
# ## Many rows
#
# A prompt has many rows and should use each weight for all of them. The order of each sum is fixed, but the loops
# *around* the sum can change. So the kernel widens a block's weights once, into a *scratch* array in the cache, and
# multiplies all rows by them. Now the cache is the limit: per cycle, a core can multiply and add two vectors, but read
# only two and write one. So each value must be used several times: a weight for four rows, a total for four inputs.
#
# {{ source: minillm.ops.jit.microkernel.multiply_add }}
#
# The layout of the scratch array matters as well. Memory and caches deliver *lines* of 64 bytes. We time the innermost
# loop alone, on scratch arrays 64 and 192 lanes wide, which start at a line or 16 bytes after the start of a line:


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
# A vector that straddles two lines takes two reads. (This happens most often with AVX-512, where a vector is as long as
# a line.) Three tiles side by side (192 lanes) are also faster than one: each iteration prepares 16 numbers of `x`,
# which then serve all three tiles. This function calls `multiply_add` for all blocks, rows and tiles:
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
# (NumPy's BLAS did not recognize the processor of the machine that rendered this page, and chose code for vectors of 8
# numbers. With `OPENBLAS_CORETYPE=SkylakeX` in the environment, which selects vectors of 16, it reached 460 GFLOP/s.)
#
# Are the bits still the same? The kernels for few rows and for many rows share only the order of their sums.

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
# Rounding the weights loses precision. The product can lose more: llama.cpp multiplies integers, so it also rounds the
# *inputs* to 8 bits, in blocks of 32. minillm keeps inputs in float32. How much error does each rounding add?

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
# The first column depends on the model file: 4-bit weights have about 16 times the error of 8-bit weights. The other
# columns depend on the engine. In each product of each layer, 8-bit inputs add as much error as 8-bit weights, and more
# where some inputs are much larger than their neighbours. `minillm bench --peers` measures the effect on the logits. In
# decode, 8-bit inputs would save little time, because weights limit the speed. Loading a file into tiles loses nothing:

# %%
stored = open_checkpoint(llm.path).tensors["layers.0.mlp.down.weight"]
from_file = stored.read()
in_tiles = as_matrix(from_file)
print("same numbers, to the bit:", np.array_equal(llm.ops.dequantize(in_tiles), from_file.dequantize()))
in_file, in_memory = (8 * size / from_file.codes.size for size in (stored.data.nbytes, llm.ops.num_bytes(in_tiles)))
print(f"bits per weight: {in_file} in the file, {in_memory} in memory")

# %% [markdown]
# Weights take as many bits in memory as in the file. Scales and minimums stay float16 and are widened at each use; in
# float32, they would add a fifth to the reads. `quantize` uses float32 scales, because float16 would lose precision.
#
# ## What production systems do differently
#
# - **Packing at each call.** At each call, a BLAS copies tiles of its matrices into the order in which its kernel reads
#   them ([Goto and van de Geijn 2008](https://doi.org/10.1145/1356052.1356053)).
# - **Integer dot products.** llama.cpp [rounds activations to 8 bits](https://github.com/ggml-org/llama.cpp/pull/951)
#   and multiplies with integer instructions, in code written by hand for each weight type and instruction set.
# - **Tensor cores.** A GPU multiplies small *matrices* in one instruction, with inputs of 16 bits or fewer and 32-bit
#   sums. [Marlin](https://arxiv.org/abs/2408.11743) widens 4-bit weights in registers. For up to 16 to 32 rows, it is
#   nearly four times as fast as a kernel for 16-bit weights.
# - **Splitting k.** With few rows, there are too few tiles for a whole GPU, so libraries also split each sum (split-k,
#   [stream-k](https://arxiv.org/abs/2301.03598)). How they split it depends on the shape, and therefore on the batch.
# - **Batch invariance, at a price.** [He et al.
#   2025](https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/) trace answers that differ at
#   temperature 0 to batch-dependent sums. They use one order for all shapes, which costs some speed. vLLM has such a
#   [mode](https://docs.vllm.ai/en/latest/features/batch_invariance/). On a CPU, batch
#   invariance costs little, because a matrix has more outputs than the CPU has lanes.
#
# ## Exercises
#
# Write the functions in [exercises.py](exercises.py), and test them with `pytest lessons/06_kernels`.
#
# 1. `tile_rows`: arrange a matrix for the kernels. The function is quoted above; write it from the shapes alone.
# 2. `unpack_nibbles`: extract two codes from each byte, in the order in which GGUF packs them.
# 3. `widen_bfloat16`: turn 16-bit numbers into 32-bit numbers with only a shift.
