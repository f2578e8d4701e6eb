# %% [markdown]
# # 6. Kernels
#
# **How does a Python loop get near the memory's speed, with 8- and 4-bit weights, and keep its bits?**
#
# Nearly all of a model's work is one operation: a matrix of weights times a vector. Lesson 5 showed that in decode it
# can be no faster than the memory; lesson 4 relied on a promise, that its results are the same to the last bit however
# many tokens are computed together. Here we write that operation, first in the obvious way, and change it until it is
# what minillm runs. After each step we measure how fast it has become, and count the bits that it has changed.

# %%
from time import perf_counter

import numba
import numpy as np
from numba import njit, prange

from minillm import LLM

llm = LLM()
linear, as_matrix = llm.ops.linear, llm.ops.as_matrix
O, I = 8192, 4096  # outputs, inputs
random = np.random.default_rng(0)
W = random.standard_normal((O, I), np.float32)
x = random.standard_normal(I, np.float32)

# %% tags=["hidden"]
try:
    import matplotlib.pyplot as plt
except ImportError:
    plt = None
    print("no Matplotlib here, so no figures")

# %% [markdown]
# ## The mark to reach
#
# How fast can memory be read? We let all cores read 268 MB, as in lesson 5. The same reading goes before every
# measurement below, so that nothing of a matrix is left in a cache: decode finds its weights in memory, too, because
# between two uses of a matrix all others were read.

# %% tags=["timing"]
from minillm.bench.engines.machine import read_all

cores = numba.get_num_threads()
elsewhere = np.ones((cores, 2**25 // cores), np.int64)
sums = np.empty(cores, np.int64)


def best_seconds(action, repeats=9):
    """The quickest of a few runs, each on cold caches."""
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
# NumPy hands the product to a BLAS, a library that experts have tuned for decades, and it has nothing left to gain:
# with float32 weights, that is. Other weights it does not take. To get a quarter of the bytes through we must
# write the loop ourselves.
#
# ## The loop
#
# [Numba](https://numba.pydata.org) compiles Python functions, through LLVM, when they are first called. We use the
# options of minillm's own kernels. `prange` shares the outputs among the cores; which core computes an output makes no
# difference to it.

# %%
from minillm.ops.jit.compiling import OPTIONS

print({name: sorted(value) if name == "fastmath" else value for name, value in OPTIONS.items()})
in_order = OPTIONS | {"cache": False, "parallel": True}


def dot_products(W, x, y):
    for o in prange(len(W)):
        total = np.float32(0)
        for k in range(len(x)):
            total += W[o, k] * x[k]
        y[o] = total


plain = njit(**in_order)(dot_products)
y_plain = np.empty(O, np.float32)

# %% tags=["timing"]
measure("a loop", W.nbytes, lambda: plain(W, x, y_plain))

# %% [markdown]
# Compiled, but nowhere near. The loop is a chain: each addition needs the total from the one before. A fused
# multiply-add takes some four cycles until its result can be used, and a core could start two of them, each on 8 or 16
# numbers, in *every* cycle. So almost the whole machine waits for one adder. Several totals at once would
# keep it busy, to be summed up at the end. Why does the compiler not do that? Because it is not allowed to: floating-point
# addition rounds, so `(a + b) + c` need not be `a + (b + c)`, and the compiler must keep the order that we wrote.
#
# ## Permission to reorder
#
# One word, `reassoc`, gives it leave (`fastmath=True` would, too):

# %% tags=["timing"]
in_any_order = in_order | {"fastmath": OPTIONS["fastmath"] | {"reassoc"}}
reordered = njit(**in_any_order)(dot_products)
y_reordered = np.empty(O, np.float32)
measure("the loop, reordered", W.nbytes, lambda: reordered(W, x, y_reordered))
print(f"outputs with other bits: {np.count_nonzero(y_plain != y_reordered):,} of {O:,}")

exact = W.astype(np.float64) @ x.astype(np.float64)
for name, y in (("in order", y_plain), ("reordered", y_reordered)):
    print(f"{name:9} largest error {np.abs(y - exact).max():.1e}")

# %% [markdown]
# So speed is a word away. Should we take it? The results are not *worse*: many short chains gather less rounding error
# than a long one. But which order it is has become the compiler's choice, and it chooses anew for every processor and
# for every loop around the sum. The loop that is best for one row of inputs is not the one that is best for many, and
# so a BLAS has several. Give NumPy the same row alone, and among others:

# %% tags=["timing"]
X = random.standard_normal((64, I), np.float32)


def changed(product, T):
    """Of the first row's outputs: how many differ when T rows are computed together instead of one?"""
    return np.count_nonzero(product(X[:T])[0] != product(X[:1])[0])


print("rows together  BLAS: outputs changed, of", f"{O:,}")
for T in (2, 4, 16, 64):
    print(f"{T:13} {changed(lambda rows: rows @ W.T, T):22,}")

# %% [markdown]
# The rows have nothing to do with each other. Still, what the first one gets depends on who is beside it. In a server,
# that is the other users: the scores for your prompt depend on how many others are asking at the moment. The
# differences are tiny, but a text is a sequence of choices, and once two tokens are nearly equal in score, a tiny
# difference picks another word, and from there on another text. It also makes a cache, a
# preemption, or a prompt cut into chunks impossible to test for equality. minillm's product, for the same matrix:

# %%
tiled = as_matrix(W)
X = np.random.default_rng(1).standard_normal((64, I), np.float32)
alone = linear(X[:1], tiled)
print("rows together  threads  outputs changed, of", f"{O:,}")
for threads in sorted({1, numba.get_num_threads()})[:1] + [None]:
    llm.ops.set_num_threads(threads)
    for T in (1, 2, 5, 64):
        print(f"{T:13}  {threads or 'all':>7} {np.count_nonzero(linear(X[:T], tiled)[0] != alone[0]):16}")

# %% [markdown]
# None. And it is no slower, as we shall see. What does it do differently?
#
# ## Lanes are outputs
#
# A processor's SIMD instructions treat 8 or 16 neighbouring numbers at once, one in each *lane*. The reordered loop
# spread the terms of *one* sum over the lanes, and had to combine them at the end. But we have 8,192 sums to compute,
# which do not depend on each other. Let each lane have a sum of its own:
#
#     reordered:  lane 0 sums k = 0, 16, 32, ...    lane 1 sums k = 1, 17, 33, ...    ...    of output o
#     here:       lane 0 sums all k, in order,      lane 1 sums all k, in order,      ...    of outputs o, o + 1, ...
#
# SIMD loads what lies side by side. So 64 outputs' weights for the same input must be neighbours: a matter of laying
# the matrix out anew, once, when it is loaded.
#
# {{ source: minillm.ops.jit.tiles.tile_rows }}

# %%
from minillm.ops.jit.tiles import tile_rows

tiles = tile_rows(W, I)[:, 0]  # one block for all inputs: [O/64, I, 64]
print(tiles.shape, "input 7 of outputs 0 to 63 lies side by side:", np.array_equal(tiles[0, 7], W[:64, 7]))


@njit(**in_order)
def lanes(tiles, x, y):
    for tile in prange(len(tiles)):
        totals = np.zeros(64, np.float32)
        for k in range(len(x)):
            for lane in range(64):
                totals[lane] += x[k] * tiles[tile, k, lane]
        y[64 * tile : 64 * tile + 64] = totals


y = np.empty(O, np.float32)
lanes(tiles, x, y)
print("outputs with other bits than the plain loop's:", np.count_nonzero(y != y_plain))

# %% tags=["timing"]
measure("lanes are outputs", tiles.nbytes, lambda: lanes(tiles, x, y))

# %% [markdown]
# The memory's speed, and not one bit changed: each output is still the chain that the first loop computed. There are
# now 64 such chains under way, in four registers of 16 numbers or eight of 8, and while one waits for its adder the
# others proceed. The compiler needs no permission for that.
#
# ## Keep the totals where they are
#
# Look at the inner loop with the eyes of the processor. For each `k` it loads 64 weights and 64 totals,
# multiplies, adds, and *stores the totals*, only to load them again for the next `k`. If it takes eight inputs at a time, the
# totals stay in registers for eight additions:


# %%
@njit(**in_order)
def unrolled(tiles, x, y):
    for tile in prange(len(tiles)):
        totals = np.zeros(64, np.float32)
        for k in range(0, len(x), 8):
            x0, x1, x2, x3, x4, x5, x6, x7 = x[k], x[k + 1], x[k + 2], x[k + 3], x[k + 4], x[k + 5], x[k + 6], x[k + 7]
            for lane in range(64):
                total = totals[lane]
                total += x0 * tiles[tile, k, lane]
                total += x1 * tiles[tile, k + 1, lane]
                total += x2 * tiles[tile, k + 2, lane]
                total += x3 * tiles[tile, k + 3, lane]
                total += x4 * tiles[tile, k + 4, lane]
                total += x5 * tiles[tile, k + 5, lane]
                total += x6 * tiles[tile, k + 6, lane]
                total += x7 * tiles[tile, k + 7, lane]
                totals[lane] = total
        y[64 * tile : 64 * tile + 64] = totals


for name, inputs in (("one input a turn", 1), ("eight", 8)):
    print(f"{name:16}: for each product {(inputs + 2) / inputs:.2f} loads and stores")
unrolled(tiles, x, y)
print("outputs with other bits than the plain loop's:", np.count_nonzero(y != y_plain))

# %% tags=["timing"]
measure("eight inputs a turn", tiles.nbytes, lambda: unrolled(tiles, x, y))

# %% [markdown]
# Not a gain you could see, if you measure as we did: a loop that waits for memory does not mind doing more than it
# must. (How much the detour costs otherwise depends on the processor.) It is room that we shall need: from now on
# there will be fewer bytes to wait for, and more to do with each.
#
# ## A quarter of the bytes
#
# Store integers of 8 bits, and with each block of 32 neighbours one float32 to scale them by. That is
# [GGUF's](https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) type `Q8_0`, except that its scales have 16 bits.
# Rounding to it is simple, and the library has a class for the result:


# %%
from minillm.quantization import QuantizedMatrix


def quantize(matrix, bits, block_size=32):
    """Round each block to integers from -m to m, with m = 127 for 8 bits and 7 for 4."""
    blocks = matrix.reshape(len(matrix), -1, block_size)
    scales = np.abs(blocks).max(axis=2) / np.float32(2 ** (bits - 1) - 1)
    return QuantizedMatrix(np.rint(blocks / scales[:, :, None]).astype(np.int8), scales, bits=bits)


eight, four = quantize(W, 8), quantize(W, 4)
print(eight)
codes, scales = tile_rows(eight.codes.reshape(O, I), 32), tile_rows(eight.scales, 1)[:, :, 0]


@njit(**in_order)
def eight_bits(codes, scales, x, y):
    for tile in prange(len(codes)):
        totals = np.zeros(64, np.float32)
        partial = np.empty(64, np.float32)
        for block in range(codes.shape[1]):
            partial[:] = 0
            for k in range(32):
                for lane in range(64):
                    partial[lane] += x[32 * block + k] * np.float32(codes[tile, block, k, lane])
            for lane in range(64):
                totals[lane] += partial[lane] * scales[tile, block, lane]
        y[64 * tile : 64 * tile + 64] = totals


# %% tags=["timing"]
measure("8 bits", codes.nbytes + scales.nbytes, lambda: eight_bits(codes, scales, x, y))

# %% [markdown]
# The scale costs one multiplication for a block's 32 inputs. But each code has to become a float before it can be
# multiplied. Processors have an instruction for that, but on many it is slower than the multiplication it
# serves. There is an older way, that needs only a bitwise "or" and a subtraction. Put the integer into the lowest bits of the float
# 2²³, take 2²³ off again:

# %%
integers = np.arange(256, dtype=np.uint32)
floats = (np.uint32(0x4B000000) | integers).view(np.float32)
print("0x4B000000 is", np.uint32(0x4B000000).view(np.float32), "= 2**23; the next floats are", np.spacing(floats[0]), "apart")
print([(int(i), float(floats[i])) for i in (0, 1, 200)])
print("exact for all 256:", np.array_equal(floats - np.float32(2**23), integers))

# %% [markdown]
# Why is it exact? A float32 has 23 bits after the leading one. From 2²³ on they are worth 2²², ..., 2, 1: the lowest counts
# ones, and there is no fraction left. So the or *is* the addition 2²³ + i, and the difference, a small
# integer, needs no rounding. Signed codes are stored with 128 added, and 2²³ + 128 is taken off in place of 2²³.
# Four bits work the same way, after a shift and a mask:
#
# {{ source: minillm.ops.jit.tiles._eight_bits }}
#
# {{ source: minillm.ops.jit.tiles._four_bits }}
#
# The second takes eight codes out of one 32-bit word, and that is a choice of form. Files pack two codes into a byte;
# then every lane must first be widened from 8 bits to 32. If the code arrives in a word of
# 32 bits, the lane is as wide as its float from the start. This is the kernel that all four forms of weights go through:
#
# {{ source: minillm.ops.jit.products._multiply_one_row }}

# %%
forms = {"float32": as_matrix(W), "8 bits": as_matrix(eight), "4 bits": as_matrix(four)}
for name, matrix in forms.items():
    shape, dtype = matrix.codes.shape, matrix.codes.dtype
    print(f"{name:8} {dtype!s:8} {shape!s:20} {8 * llm.ops.num_bytes(matrix) / W.size:5.1f} bits a weight")

# %% tags=["timing"]
for name, matrix in forms.items():
    measure(f"minillm, {name}", llm.ops.num_bytes(matrix), lambda matrix=matrix: linear(x[None], matrix))

# %% tags=["timing"]
if plt:
    figure, panels = plt.subplots(1, 2, figsize=(9, 4.2), sharey=True, num="steps", layout="constrained")
    colours = ["#999999"] + ["#D55E00"] * 2 + ["#0072B2"] * 3 + ["#009E73"] * 3
    for axes, column, label in zip(panels, (0, 1), ("GB/s of weights", "billion weights a second"), strict=True):
        bars = axes.barh(list(steps), [rates[column] for rates in steps.values()], color=colours)
        axes.bar_label(bars, fmt="%.0f", padding=3, fontsize=9)
        axes.set_xlabel(label)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].invert_yaxis()
    panels[0].axvline(bandwidth / 1e9, color="#555555", linewidth=1, linestyle=":")
    panels[0].set_title("the dotted line is what can be read", fontsize=9)
    figure.suptitle("What each step of the kernel reaches")

# %% [markdown]
# Read the left half first: from the lanes on, the bars are about as long as memory allows (some a little longer, where others
# were using the machine while the line was measured). Then the right half, which is what a user
# feels. The bytes per second stay the same, and the weights in them become more. For 4 bits the bar may stop short of
# the line: each byte now brings two weights, and unpacking and multiplying them is work enough for a few cores. Where
# memory is slower for each core, as with many cores, it would not.
#
# ## Many rows
#
# A prompt has many rows, and should use each weight for all of them. The order of each sum stays fixed; what may be
# changed is everything *around* it. So: widen a block's weights to float32 once, keep them in a cache, and take the rows
# through it four at a time, because four rows of 64 totals just fit the registers.
#
# {{ source: minillm.ops.jit.products._multiply_rows }}

# %% tags=["timing"]
flops = 2 * W.size
print("GFLOP/s with 8 bits:  rows one by one   together")
for T in (1, 4, 16, 64, 256):
    rows = random.standard_normal((T, I), np.float32)
    together = best_seconds(lambda rows=rows: linear(rows, forms["8 bits"]), repeats=2)
    one = steps["minillm, 8 bits"][1] * 2
    print(f"{T:16} {one:21.0f} {T * flops / together / 1e9:10.0f}")
print(f"BLAS, float32, the last: {T * flops / best_seconds(lambda: rows @ W.T, repeats=2) / 1e9:.0f}")

# %% [markdown]
# And the bits? The one-row kernel and this one were written differently, compiled differently, and share nothing but
# the order of their sums. Row 0 of 1 to 64, in each form:

# %%
print("outputs changed, of", f"{O:,}", "  with", *(f"{T:4}" for T in (2, 5, 64)), "rows together")
for name, matrix in forms.items():
    alone = linear(X[:1], matrix)
    counts = [np.count_nonzero(linear(X[:T], matrix)[0] != alone[0]) for T in (2, 5, 64)]
    print(f"{name:>23}     ", *(f"{count:4}" for count in counts))

# %% [markdown]
# ## What do fewer bits cost?
#
# Two things can be lost: when weights are rounded, and when they are used. The first happens once, to whoever makes the
# file. We measure it on our random matrix, against float64. Then the second: minillm multiplies the codes with float32
# inputs. llama.cpp rounds the *inputs*, too, to 8 bits in blocks of 32, so that it can multiply integers with integers,
# for which processors have instructions. What does each add?

# %%
few = slice(0, 512)
reference = W[few].astype(np.float64) @ x
x8 = quantize(x[None], 8).dequantize()[0]


def error(y, right):
    """Relative, root mean square."""
    return np.sqrt(np.mean((y - right) ** 2) / np.mean(right**2))


print("         weights rounded   inputs float32   inputs of 8 bits")
for name, rounded in (("8 bits", eight), ("4 bits", four)):
    weights = rounded.dequantize()[few].astype(np.float64)
    engine = error(linear(x[None], forms[name])[0, few], weights @ x)
    print(f"{name:8} {error(weights @ x, reference):14.2%} {engine:16.0e} {error(weights @ x8, weights @ x):17.2%}")

# %% [markdown]
# The first column is the model's affair: 4 bits cost 18 times as much as 8, and a good file
# chooses its rounding with more care than we did. The others are the engine's. Inputs of 8 bits cost as much again as weights of 8
# bits, in each product of each layer, and with real inputs, in which some numbers are much larger than the rest of their block, it can be more.
# On our model, float32 inputs give the scores of exact arithmetic to three decimals, and 8-bit inputs miss the best
# ones by a few tenths; `minillm bench --peers` measures both. In decode they would not even be faster: the inputs are small,
# and the weights are what is waited for.
#
# From a file, then, nothing is lost on the way into the tiles:

# %%
from minillm.checkpoints import open_checkpoint

stored = open_checkpoint(llm.path).tensors["layers.0.mlp.down.weight"]
print(stored)
print(from_file := stored.read())
print("same bits after tiling:", np.array_equal(llm.ops.dequantize(as_matrix(from_file)), from_file.dequantize()))

# %% [markdown]
# ## What production systems do differently
#
# - **Pack on the fly.** A BLAS takes matrices as they come and copies tiles of them into the order its kernel reads, for
#   each call; [Goto and van de Geijn 2008](https://doi.org/10.1145/1356052.1356053) is the classic account of what goes
#   into which cache. Weights never change, so an engine can do it once.
# - **Integer dot products.** llama.cpp [rounds activations to 8 bits](https://github.com/ggml-org/llama.cpp) and uses
#   the processor's integer instructions, written by hand for each of many types and instruction sets. It gains most where
#   arithmetic is the limit.
# - **Tensor cores.** A GPU multiplies small *matrices* in one instruction, with inputs of 16 bits or fewer and sums of
#   32. [Marlin](https://arxiv.org/abs/2408.11743) keeps weights in 4 bits, widens them in registers, with tricks like ours, and stays
#   close to four times the speed of 16-bit weights up to 16 to 32 rows.
# - **Splitting k.** With few rows a GPU has too few tiles for its hundred and more cores, so libraries cut the sums, too:
#   split-k, or [stream-k](https://arxiv.org/abs/2301.03598), which shares out the multiplications evenly. How a sum
#   is cut then depends on the shape, and so on the batch.
# - **Batch invariance, for a price.** [He et al.
#   2025](https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/) trace the answers that differ at
#   temperature 0 to just that, fix one order for every shape, and pay with speed. vLLM has such a
#   [mode](https://docs.vllm.ai/en/latest/features/batch_invariance/), which is off by default. On a CPU, with lanes across outputs, it
#   costs next to nothing, because there are always more outputs than lanes.
#
# ## Exercises
#
# In [exercises.py](exercises.py); `pytest lessons/06_kernels` tells you whether they are right.
#
# 1. `tile_rows`: lay a matrix out for the kernels. It is quoted above, but can you do it from the shapes alone?
# 2. `unpack_nibbles`: two codes from each byte, in the order that GGUF packed them.
# 3. `widen_bfloat16`: 16 bits become 32, with nothing but a shift.
