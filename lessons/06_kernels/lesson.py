# %% [markdown]
# # 6. Kernels
#
# **How does a Python loop get near the memory's speed, with 8- and 4-bit weights, and keep its bits?**
#
# Nearly all of a model's work is one operation: a matrix of weights times a vector. Lesson 5 showed that in decode it
# can be no faster than the memory; lesson 4 relied on a promise, that its results are the same to the last bit however
# many tokens are computed together. Here we write that operation in the obvious way, and change it until it is what
# minillm runs. After each step we measure its speed, and count what it has changed in the bits.

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
    print("no Matplotlib here, so no figures")

# %% [markdown]
# ## The mark to reach
#
# How fast can memory be read? We let all cores read 268 MB, as in lesson 5, and again before every measurement below:
# in decode, all other matrices are read between two uses of one, and nothing of it is left in a cache.

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
    """Print and keep what a product reaches: GB/s of weights read, and billions of weights a second."""
    seconds = best_seconds(action)
    rate = steps[step] = num_bytes / seconds / 1e9, W.size / seconds / 1e9
    print(f"{step:26} {num_bytes / 1e6:4.0f} MB  {1000 * seconds:5.1f} ms  {rate[0]:5.1f} GB/s", end="")
    print(f"  ({1e9 * rate[0] / bandwidth:4.0%} of what can be read)  {rate[1]:5.1f} G weights/s")


print(f"memory can be read at {bandwidth / 1e9:.1f} GB/s")
measure("NumPy: W @ x", W.nbytes, lambda: W @ x)

# %% [markdown]
# NumPy hands the product to a BLAS, tuned by experts for decades, which leaves little to gain. But it takes no 8-bit
# weights. For a quarter of the bytes, we must write the loop ourselves.
#
# ## The loop
#
# [Numba](https://numba.pydata.org) compiles Python functions, through LLVM, when they are first called. Ours has the
# options of minillm's own kernels; `prange` shares the outputs among the cores.

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
# Compiled, but nowhere near. The loop is a chain: each addition needs the total from the one before. A fused
# multiply-add takes some four cycles until its result can be used, and a core could start two of them, each on 8 or 16
# numbers, in *every* cycle. Several totals at once would keep it busy, but the compiler may not make them: addition
# rounds, so `(a + b) + c` need not be `a + (b + c)`, and it must keep the order that we wrote.
#
# ## Permission to reorder
#
# One word, `reassoc`, gives it leave (`fastmath=True` would, too):

# %% tags=["timing"]
reordered = njit(**in_order | {"fastmath": OPTIONS["fastmath"] | {"reassoc"}})(dot_products)
measure("the loop, reordered", W.nbytes, lambda: reordered(W, x, y_reordered))
print(f"outputs with other bits: {np.count_nonzero(y_plain != y_reordered):,} of {outputs:,}")

largest = [np.abs(result - W.astype(np.float64) @ x).max() for result in (y_plain, y_reordered)]
print(f"largest error: in order {largest[0]:.1e}, reordered {largest[1]:.1e}")

# %% [markdown]
# Should we take it? The results are not *worse*: many short chains gather less rounding error than a long one. But the
# order is now the compiler's choice, made anew for every processor and for every loop around the sum. The best loop for
# one row of inputs is not the best for many, so a BLAS has several. Give NumPy the same row alone, and among others:

# %% tags=["timing"]
X = np.random.default_rng(1).standard_normal((64, inputs), np.float32)


def changed(product, T):  # of the first row, when T rows are computed together instead of one
    return np.count_nonzero(product(X[:T])[0] != product(X[:1])[0])


print(f"outputs changed by BLAS, of {outputs:,}, with 2, 4, 16 and 64 rows together:")
print(*(changed(lambda rows: rows @ W.T, T) for T in (2, 4, 16, 64)))

# %% [markdown]
# What the first row gets depends on who is beside it: in a server, on the other users. The differences are tiny, but
# once two tokens are nearly equal in score, a tiny difference picks another word, and from there on another text.
# minillm's product changes none, as we check at the end, and at full speed. What does it do differently?
#
# ## Lanes are outputs
#
# SIMD instructions treat 8 or 16 neighbouring numbers at once, one in each *lane*. The reordered loop spread the terms
# of *one* sum over the lanes. But we have 8,192 sums to compute. Let each lane have one of its own:
#
#     reordered:  lane 0 sums k = 0, 16, 32, ...    lane 1 sums k = 1, 17, 33, ...    ...    of output o
#     here:       lane 0 sums all k, in order,      lane 1 sums all k, in order,      ...    of outputs o, o + 1, ...
#
# SIMD loads neighbours. So we lay the matrix out anew, once, when it is loaded, with the same input's weights for 64
# outputs side by side:
#
# {{ source: minillm.ops.jit.tiles.tile_rows }}

# %%
tiles = tile_rows(W, inputs)[:, 0]  # one block for all inputs: [O/64, I, 64]
print(tiles.shape, "input 7 of outputs 0 to 63 lies side by side:", np.array_equal(tiles[0, 7], W[:64, 7]))


@njit(**in_order)
def lanes(tiles, x, y):
    for tile in prange(len(tiles)):
        totals = np.zeros(64, np.float32)
        for k in range(len(x)):
            for lane in range(64):
                totals[lane] += x[k] * tiles[tile, k, lane]
        y[64 * tile : 64 * tile + 64] = totals


lanes(tiles, x, y)
print("outputs with other bits than the plain loop's:", np.count_nonzero(y != y_plain))

# %% tags=["timing"]
measure("lanes are outputs", tiles.nbytes, lambda: lanes(tiles, x, y))

# %% [markdown]
# Near the memory's speed, and not one bit changed: each output is still the chain that the first loop computed. Now 64
# chains are under way, in four registers of 16 numbers or eight of 8: while one waits for its adder, others proceed.
#
# ## Keep the totals where they are
#
# For each `k` the loop loads 64 weights and 64 totals, multiplies, adds, and *stores the totals*, only to load them
# again for the next `k`. If it takes four inputs at a time, the totals stay in registers for four additions (minillm
# takes eight). We compile that twice; the two differ in nothing but the type of their indices:


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


for name, integer in (("four inputs a turn", np.int64), ("unsigned indices", np.uint64)):
    product = four_inputs(integer)
    measure(name, tiles.nbytes, lambda product=product: product(tiles, x, y))
    print("outputs with other bits than the plain loop's:", np.count_nonzero(y != y_plain))

# %% [markdown]
# The first gains nothing. In Python, and so in Numba, `x[-1]` is the last element: an index that could be negative is
# tested, and more tests ask whether the totals overlap what they are computed from, all for a turn of a few vectors.
# An unsigned index spares the first kind and shortens the second. The gain will count for more with fewer bytes.
#
# ## A quarter of the bytes
#
# Store integers of 8 bits, and with each block of 32 neighbours one float32 to scale them by. That is
# [GGUF's](https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) type `Q8_0`, except that its scales have 16 bits.
# Rounding is a few lines:
#
# {{ source: minillm.quantization.round_blocks }}

# %%
eight, four = quantize(W, 8), quantize(W, 4)
print(eight, four, sep="\n")

# %% [markdown]
# A kernel that reads them need not multiply each weight by its scale: the scale waits until the block's 32 inputs are
# summed up. And to make a code a float, a bitwise "or" and a subtraction will do, in place of the processor's slower
# instruction. Put the integer into the lowest bits of 2²³, take 2²³ off again:

# %%
integers = np.arange(256, dtype=np.uint32)
for place in (0, 8):
    power = np.float32(2.0 ** (23 - place))
    floats = (power.view(np.uint32) | integers << np.uint32(place)).view(np.float32)
    print(f"2**{23 - place} is {power:.0f}, or 0x{power.view(np.uint32):X}; 200 at bit {place} makes it", end=" ")
    print(f"{floats[200]:.0f}; exact for all 256: {np.array_equal(floats - power, integers)}")

# %% [markdown]
# Why is it exact? A float32 has 23 bits after the leading one. From 2²³ on the lowest counts ones: no fraction is left.
# So the or *is* the addition 2²³ + i, and the difference, a small integer, needs no rounding. Signed codes are stored
# with 128 added, and 2²³ + 128 is taken off in place of 2²³.
#
# The second line is for packed codes. To widen a byte to a lane of 32 bits is what a processor with AVX-512 is slowest
# at. So minillm puts the codes of four neighbouring *inputs* into a word of 32 bits (4-bit codes: of eight). A lane is
# then as wide as its float from the start, and a word, once loaded, serves four times, or eight. A code further up in
# its word is masked, but need not be moved: of 2¹⁵, it is bit 8 that counts one. Only what lies beyond the fraction's
# 23 bits is shifted into their reach:
#
# {{ source: minillm.ops.jit.weight_formats._eight_bits }}
#
# All forms of weights go through this kernel; codes of 5 and 6 bits are first made four bytes of a word. It asks for
# weights 4 KB ahead, because the processor's own guesses at what comes next end where a page of memory does:
#
# {{ source: minillm.ops.jit.products._multiply_few_rows }}

# %% tags=["timing"]
forms = {"float32": as_matrix(W), "8 bits": as_matrix(eight), "4 bits": as_matrix(four)}
for name, matrix in forms.items():
    measure(f"minillm, {name}", llm.ops.num_bytes(matrix), lambda matrix=matrix: linear(x[None], matrix))

# %% tags=["timing"]
if plt:
    figure, panels = plt.subplots(1, 2, figsize=(9, 4.2), sharey=True, num="steps", layout="constrained")
    for axes, column, label in zip(panels, (0, 1), ("GB/s of weights", "billion weights a second"), strict=True):
        bars = axes.barh(list(steps), [rates[column] for rates in steps.values()], color="#0072B2")
        axes.bar_label(bars, fmt="%.0f", padding=3, fontsize=9)
        axes.set_xlabel(label)
    panels[0].invert_yaxis()
    panels[0].axvline(bandwidth / 1e9, color="#555555", linewidth=1, linestyle=":")
    figure.suptitle("What each step of the kernel reaches (dotted: what can be read)")

# %% [markdown]
# On the left, the bars get about as long as memory allows. On the right is what a user feels: as many bytes a second
# hold more and more weights. Where they stop short of the line, unpacking and multiplying is work enough for the cores.
#
# ## Many rows
#
# A prompt has many rows, and should use each weight for all of them. The order of each sum is fixed, but not what
# happens *around* it: widen a block's weights once, onto a *bench* in the cache, and take the rows through it. Now the
# cache is the limit: in a cycle, a core can multiply and add two vectors, but read only two and write one. So what was
# read must serve several times: a weight four rows, a total four inputs.
#
# {{ source: minillm.ops.jit.microkernel.multiply_add }}
#
# Here it is on one core, on a bench that starts where a cache line of 64 bytes does, or 16 bytes later, as arrays will
# if nobody takes care:


# %% tags=["timing"]
@njit(**OPTIONS | {"cache": False})
def innermost(bench, x, turns):
    for _ in range(turns):
        multiply_add(bench, x, 0, 0, bench, 4, 0, 32, bench.shape[1])


for width, shift in ((64, 4), (64, 0), (192, 4), (192, 0)):
    bench = aligned(37, width).reshape(-1)[shift : shift + 36 * width].reshape(36, width)
    bench[:] = 0
    seconds = best_seconds(lambda bench=bench: innermost(bench, X, 10_000), repeats=3)
    print(f"{width:3} lanes, {4 * shift:2} bytes off: {10_000 * 2 * 4 * 32 * width / seconds / 1e9:4.0f} GFLOP/s")

# %% [markdown]
# A vector that straddles two lines is read twice. (That takes vectors as long as a line, as AVX-512 has; shorter ones
# feel it less.) And three tiles side by side are better than one: what a turn does besides, getting 16 numbers of `x`
# ready, serves them all. Around this loop:
#
# {{ source: minillm.ops.jit.products._multiply_rows }}

# %% tags=["timing"]
print("GFLOP/s with 8 bits:  rows one by one   together")
for T in (1, 4, 16, 64, 256):
    rows = random.standard_normal((T, inputs), np.float32)
    together = best_seconds(lambda rows=rows: linear(rows, forms["8 bits"]), repeats=2)
    print(f"{T:16} {2 * steps['minillm, 8 bits'][1]:21.0f} {2 * W.size * T / together / 1e9:10.0f}")
print(f"BLAS, float32, the last: {2 * W.size * T / best_seconds(lambda: rows @ W.T, repeats=2) / 1e9:.0f}")

# %% [markdown]
# (NumPy's BLAS did not know this page's processor, and took code for vectors of 8. With `OPENBLAS_CORETYPE=SkylakeX` in
# the environment, which means vectors of 16, it did 460.)
#
# And the bits? The kernel for few rows and this one share nothing but the order of their sums.

# %%
print(f"outputs changed, of {outputs:,}, with 1, 2, 5 and 64 rows together")
for name, matrix in forms.items():
    alone = linear(X[:1], matrix)[0]
    for threads in (1, None):
        llm.ops.set_num_threads(threads)
        counts = [np.count_nonzero(linear(X[:T], matrix)[0] != alone) for T in (1, 2, 5, 64)]
        print(f"{name:8} {threads or 'all':>3} threads:", *counts)

# %% [markdown]
# ## What do fewer bits cost?
#
# Rounding weights loses something, whoever does it. Using them can lose more: llama.cpp rounds the *inputs*, too, to 8
# bits in blocks of 32, to multiply integers; minillm keeps them in float32. What does each add, against float64?

# %%
reference = W[:512].astype(np.float64) @ x
x8 = quantize(x[None], 8).dequantize()[0]


def error(y, right):  # relative, root mean square
    return np.sqrt(np.mean((y - right) ** 2) / np.mean(right**2))


print("         weights rounded   inputs float32   inputs of 8 bits")
for name, rounded in (("8 bits", eight), ("4 bits", four)):
    weights = rounded.dequantize()[:512].astype(np.float64)
    engine = error(linear(x[None], forms[name])[0, :512], weights @ x)
    rounding = f"{error(weights @ x, reference):14.2%} {'< 1e-6' if engine < 1e-6 else engine:>16}"
    print(f"{name:8} {rounding} {error(weights @ x8, weights @ x):17.2%}")

# %% [markdown]
# The first column is the model's affair: 4 bits cost some 16 times as much as 8. The others are the engine's. Inputs
# of 8 bits cost as much again as weights of 8 bits, in each product of each layer, and more where some inputs are much
# larger than their neighbours. `minillm bench --peers` measures what becomes of it in our model's scores. In decode
# they would gain little: the weights are what is waited for. From a file nothing is lost on the way into the tiles:

# %%
stored = open_checkpoint(llm.path).tensors["layers.0.mlp.down.weight"]
from_file = stored.read()
in_tiles = as_matrix(from_file)
print("same numbers, to the bit:", np.array_equal(llm.ops.dequantize(in_tiles), from_file.dequantize()))
in_file, in_memory = (8 * size / from_file.codes.size for size in (stored.data.nbytes, llm.ops.num_bytes(in_tiles)))
print(f"bits a weight: {in_file} in the file, {in_memory} in memory")

# %% [markdown]
# Memory holds what the file does. Scales and minimums stay float16, and are widened at each use: as float32 they would
# be a fifth more to read. Only where that would lose something, as with the scales of `quantize`, are they float32.
#
# ## What production systems do differently
#
# - **Pack on the fly.** A BLAS copies tiles of its matrices, at each call, into the order its kernel reads ([Goto and
#   van de Geijn 2008](https://doi.org/10.1145/1356052.1356053)).
# - **Integer dot products.** llama.cpp [rounds activations to 8 bits](https://github.com/ggml-org/llama.cpp/pull/951)
#   and multiplies with integer instructions, in code written by hand for each type and instruction set.
# - **Tensor cores.** A GPU multiplies small *matrices* in one instruction, with inputs of 16 bits or fewer and sums of
#   32. [Marlin](https://arxiv.org/abs/2408.11743) widens 4-bit weights in registers and stays close to four times the
#   speed of 16-bit ones up to 16 to 32 rows.
# - **Splitting k.** With few rows there are too few tiles for all of a GPU, so libraries cut the sums, too: split-k, or
#   [stream-k](https://arxiv.org/abs/2301.03598). How a sum is cut then depends on the shape, and so on the batch.
# - **Batch invariance, for a price.** [He et al.
#   2025](https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/) trace answers that differ at
#   temperature 0 to just that, and fix one order for every shape, at some cost in speed. vLLM has a
#   [mode](https://docs.vllm.ai/en/latest/features/batch_invariance/) for it. With fewer lanes than outputs it is cheap.
#
# ## Exercises
#
# In [exercises.py](exercises.py); `pytest lessons/06_kernels` tells you whether they are right.
#
# 1. `tile_rows`: lay a matrix out for the kernels. It is quoted above, but can you do it from the shapes alone?
# 2. `unpack_nibbles`: two codes from each byte, in the order that GGUF packed them.
# 3. `widen_bfloat16`: 16 bits become 32, with nothing but a shift.
