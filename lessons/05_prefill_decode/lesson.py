# %% [markdown]
# # 5. Prefill and decode
#
# **Why are prefill and decode limited by different things? Where is the roofline of *this* machine?**
#
# Computing a prompt and generating an answer are the same forward pass, over many tokens or over one. Yet one processes
# several times as many tokens per second as the other, on the same machine with the same weights. We count the
# operations that a pass computes and the bytes that it reads from memory, measure how much of each your machine can do,
# and draw both into one figure. Most of the later lessons are about moving to the right in that figure.

# %%
from time import perf_counter

import numpy as np

from minillm import LLM, SamplingParams
from minillm.model.batch import Batch, Chunk
from minillm.model.kv_cache import KVCache

llm = LLM()
config, kv_bytes = llm.config, llm.kv_cache.bytes_per_token

# %% tags=["hidden"]
try:
    import matplotlib.pyplot as plt
except ImportError:
    plt = None
    print("Matplotlib is not installed, so there are no figures")

# %% [markdown]
# ## Two speeds
#
# A user notices two times: the time to the first token (*TTFT*), which is the prefill, and the time per output token
# (*TPOT*), which is the decode.

# %% tags=["timing"]
text = llm.encode("All happy families are alike; every unhappy family is unhappy in its own way. ") * 32
params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
measured = {}
print("prompt      TTFT      TPOT   tokens per second: prefill  decode")
for length in (16, 128, 512):
    llm.reset_prefix_cache()
    metrics = measured[length] = llm.generate(text[:length], params)[0].metrics
    ttft, tpot = metrics.time_to_first_token, 1 / metrics.decode_tokens_per_second
    prefill, decode = metrics.prefill_tokens_per_second, metrics.decode_tokens_per_second
    print(f"{length:6} {1000 * ttft:6.0f} ms {1000 * tpot:6.1f} ms {prefill:27.0f} {decode:7.0f}")

# %% [markdown]
# Lesson 4 counted operations: a token costs nearly the same number in a prompt and in an answer. But here, the longer
# prompts are processed at several times as many tokens per second. So in decode, operations cannot be what keeps the
# machine busy. What does it wait for?
#
# ## Operations per byte
#
# Take one matrix of `O x I` weights, and `T` tokens to multiply by it. Each token uses each weight once, for a
# multiplication and an addition. But each weight has to be read from memory only *once* for all tokens. The tokens
# themselves are small, and stay in the processor's caches. So the work is `2 T O I` operations, the traffic is `O I`
# weights, and their ratio, the *arithmetic intensity*, does not depend on the size of the matrix:


# %%
def intensity(tokens, bytes_per_weight):
    return 2 * tokens / bytes_per_weight


from minillm.checkpoints import open_checkpoint

tensors = open_checkpoint(llm.path).tensors.values()
weights = sum(int(np.prod(shape)) for shape in config.tensor_shapes().values())
file_bytes = sum(tensor.data.nbytes for tensor in tensors)
formats = {"float32": 4, "16 bits": 2, "8 bits": 1, "our file": file_bytes / weights}
print(f"our file: {file_bytes:,} bytes for {weights:,} weights, {8 * file_bytes / weights:.2f} bits each")
print("tokens   ", *(f"{name:>9}" for name in formats), "  operations per byte")
for T in (1, 2, 4, 16, 64, 512):
    print(f"{T:6}   ", *(f"{intensity(T, size):9.1f}" for size in formats.values()))

# %% [markdown]
# Decode is the first line and prefill the last. They differ by a factor of 512 in the operations per byte read. Fewer
# bits per weight raise every line, but at most eightfold.
#
# ## What can this machine do?
#
# Two numbers describe it. The first is the number of bytes per second that it can read. Let every core read a stretch
# of memory that is too long for any cache, and do almost nothing with it:
#
# {{ source: minillm.bench.engines.machine.read_all }}
#
# The second is the number of operations per second: as many as tuned code reaches with large matrices, here NumPy's
# BLAS. Each number is measured in its own process, because the threads of one would disturb the other:

# %% tags=["timing"]
from minillm.bench.machine import describe_machine, measure_machine, usable_cores

machine = describe_machine(threads=usable_cores())
measure_machine(machine)
roofline = machine.roofline
ridge = roofline.peak / roofline.bandwidth
print(f"reads  {roofline.bandwidth / 1e9:6.1f} GB/s")
print(f"does   {roofline.peak / 1e9:6.1f} GFLOP/s, so {ridge:.1f} operations in the time of reading a byte")
for name, size in formats.items():
    print(f"with {name:8} weights, arithmetic is the limit above {ridge * size / 2:6.1f} tokens")

# %% [markdown]
# Work with fewer operations per byte than this ratio waits for memory; work with more waits for arithmetic. Reading and
# computing happen at the same time, so the slower of the two decides ([Williams, Waterman and Patterson
# 2009](https://doi.org/10.1145/1498765.1498785)):
#
# {{ source: minillm.trace.roofline.Roofline.attainable }}
#
# Plotted over intensity, this is a slope and a flat roof. The corner between them, the *ridge point*, is at the ratio
# above. The line is a measurement and not a law of nature. A point can be above it if other programs were using the
# machine when the line was measured, or if the BLAS has no code for the processor's widest vectors. (On the machine of
# this page it had none; lesson 6 shows what that costs.) How close do we get? First a single product, of 134 MB of
# float32:


# %% tags=["timing"]
def best_seconds(action, *arguments, repeats=3):
    """Return the shortest time of a few runs, because disturbances only make a run longer."""
    times = []
    for _ in range(repeats):
        begin = perf_counter()
        action(*arguments)
        times.append(perf_counter() - begin)
    return min(times)


random = np.random.default_rng(0)
matrix = llm.ops.as_matrix(random.standard_normal((8192, 4096), np.float32))
product_points = []
print("tokens  ops/byte  GFLOP/s  of the roof")
for T in (1, 2, 4, 8, 16, 32, 64, 128, 512):
    x = random.standard_normal((T, 4096), np.float32)
    rate = 2 * T * 8192 * 4096 / best_seconds(llm.ops.linear, x, matrix, repeats=3 if T < 128 else 1)
    product_points.append((intensity(T, 4), rate))
    print(f"{T:6} {intensity(T, 4):9.1f} {rate / 1e9:8.1f} {rate / roofline.attainable(intensity(T, 4)):12.0%}")

# %% [markdown]
# Now the whole model. Its work is the same sum over all matrices, plus attention, which reads the cache of lesson 4
# instead of weights. Here is the work of a prompt of `T` tokens, and of one step that adds a token to each of several
# sequences:
#
# {{ source: minillm.trace.roofline.prefill_work }}
#
# {{ source: minillm.trace.roofline.decode_work }}

# %% tags=["timing"]
from minillm.trace.roofline import decode_work, prefill_work

weight_bytes = llm.transformer.weight_bytes  # bytes in memory


def run(chunks, cache):
    llm.transformer.forward(Batch.from_chunks(chunks, cache.block_size), cache)


def prefill_seconds(T):
    cache = KVCache.contiguous(config, length=T)
    return best_seconds(run, [Chunk(text[:T], 0, [[0]])], cache, repeats=3 if T < 128 else 1)


def decode_seconds(sequences, context):
    """Return the time of one step after `context` tokens per sequence. The values of keys and values do not matter."""
    cache = KVCache.contiguous(config, length=context + 1, num_sequences=sequences)
    cache.keys[:], cache.values[:] = 0.1, 0.1
    return best_seconds(run, [Chunk([0], context, [[block]]) for block in range(sequences)], cache)


prefill_points, decode_points = [], []
print("            ops/byte  GFLOP/s  tokens/s")
for T in (2, 4, 8, 16, 32, 64, 128, 512):
    work, seconds = prefill_work(config, weight_bytes, kv_bytes, T), prefill_seconds(T)
    prefill_points.append((work.intensity, work.flops / seconds))
    print(f"prefill {T:3} {work.intensity:9.1f} {work.flops / seconds / 1e9:8.1f} {T / seconds:9.0f}")
for S in (1, 2, 4, 8, 16):
    work, seconds = decode_work(config, weight_bytes, kv_bytes, [64] * S), decode_seconds(S, 64)
    decode_points.append((work.intensity, work.flops / seconds))
    print(f"decode  {S:3} {work.intensity:9.1f} {work.flops / seconds / 1e9:8.1f} {S / seconds:9.0f}")

# %% tags=["timing"]
if plt:
    from matplotlib.ticker import LogFormatter

    figure, axes = plt.subplots(figsize=(6.8, 4.4), num="roofline", layout="constrained")
    reach = np.geomspace(0.25, 1000, 200)
    axes.loglog(reach, [roofline.attainable(x) / 1e9 for x in reach], color="#555555", linewidth=2)
    for points, label, marker, colour in (
        (product_points, "one product, 1 to 512 tokens", "s", "#009E73"),
        (prefill_points, "prefill, 2 to 512 tokens", "o", "#0072B2"),
        (decode_points, "decode, 1 to 16 sequences", "D", "#D55E00"),
    ):
        x, y = np.array(points).T
        axes.loglog(x, y / 1e9, marker, color=colour, label=label, markerfacecolor="none", markeredgewidth=1.5)
    axes.axvline(ridge, color="#555555", linewidth=1, linestyle=":")
    axes.text(ridge * 1.1, axes.get_ylim()[0] * 1.2, "ridge point", fontsize=9, color="#555555")
    axes.set(xlabel="arithmetic intensity: operations per byte read", ylabel="GFLOP/s")
    axes.yaxis.set_major_formatter(LogFormatter())
    axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    axes.set_title("The roofline of this machine, and measured rates")

# %% [markdown]
# This answers the first question. A single decode is far to the left, where the line rises: only *bytes* count there,
# and most arithmetic units are idle. A long prompt is under the flat roof, where only *operations* count. Near the
# corner, every real program falls short of the line, because it would have to keep both busy at once. Different limits
# have different remedies: fewer bits per weight make decode faster and do nothing for prefill, and more arithmetic does
# the opposite.
#
# The position of the corner differs a great deal between machines. A CPU has little arithmetic for its memory
# bandwidth, so a handful of tokens keep it busy. Accelerators are the opposite. These figures are from their makers'
# data sheets, for 16-bit weights and 16-bit arithmetic:

# %%
accelerators = {"A100 80 GB": (312e12, 2.039e12), "H100 SXM": (989e12, 3.35e12), "H200": (989e12, 4.8e12)}
for name, (peak, bandwidth) in accelerators.items():
    share = intensity(1, 2) * bandwidth / peak
    print(
        f"{name:10} ridge at {peak / bandwidth:3.0f} operations per byte; one sequence in decode uses {share:.1%} of it"
    )

# %% [markdown]
# ([A100](https://www.nvidia.com/en-us/data-center/a100/), [H100](https://www.nvidia.com/en-us/data-center/h100/),
# [H200](https://www.nvidia.com/en-us/data-center/h200/); operations without sparsity.) A chip that serves one user at a
# time leaves more than 99 % of its arithmetic unused.
#
# ## A prediction
#
# If decode waits for bytes, its speed can be predicted without running it: divide the bandwidth by the bytes to read.
# The bytes are the weights, and the keys and values of all tokens so far. minillm lays the weights out differently in
# memory than in the file, in about as many bytes; lesson 6 shows this.

# %% tags=["timing"]
print(f"weights in memory: {weight_bytes / 1e6:.0f} MB")
print("context  MB to read  at best, tokens/s  measured")
for context in (64, 1024, 4096):
    work = decode_work(config, weight_bytes, kv_bytes, [context])
    limit, seconds = 1 / roofline.seconds(work), decode_seconds(1, context)
    print(f"{context:7} {work.num_bytes / 1e6:11.0f} {limit:18.0f} {1 / seconds:9.0f} ({1 / seconds / limit:.0%})")

# %% [markdown]
# The limit falls as the text grows, although the model stays the same: keys and values must be read as well, for every
# token. How close the last column comes is a question of kernels, and of everything between them. Calling one compiled
# function per layer, with all its arrays, once took a tenth of a step, so now a single call [runs all
# layers](../../minillm/ops/jit/layers.py). Lesson 6 explains how a program of plain Python loops gets this close to the
# limit.
#
# ## Moving to the right
#
# A decode step wastes arithmetic, because a weight that has been read from memory is used for only one token. If
# several users are waiting, it can be used for a token of each: one read of the weights serves all `S` sequences of a
# step. (In the figure, these are the five points of decode.) With the bytes of our file, intensity grows like this:

# %%
from minillm.trace.roofline import Work, attention_flops, decode_work

print("sequences   operations per byte at a context of")
print("                  64     1024     8192")
for S in (1, 4, 16, 64, 256):
    row = (decode_work(config, file_bytes, kv_bytes, [context] * S).intensity for context in (64, 1024, 8192))
    print(f"{S:9} ", *(f"{x:8.1f}" for x in row))
attention = Work(num_bytes=kv_bytes, flops=attention_flops(config))
print(f"attention alone: {attention.intensity} operations per byte, for any number of sequences")

# %% [markdown]
# Look at the columns. With short texts, intensity grows with the number of sequences, as it does for prefill. With long
# texts it hardly changes. Weights are shared, but *every sequence has its own keys and values*: a key that was read is
# used by the queries of one token, and batching brings no other query that could reuse it. Attention in decode always
# waits for memory. Only query heads that share keys (three, here) and fewer bits help; `kv_dtype="float16"` doubles the
# last line. So batching makes decode cheap until the cache, and not the weights, is most of what is read.

# %%
for context in (64, 1024, 8192):
    sequences = file_bytes / (kv_bytes * context)
    print(f"at a context of {context:4}, {sequences:5.1f} sequences read as much cache as weights")

# %% [markdown]
# ## What a user feels
#
# For one request, TTFT is at least the prompt's operations divided by the machine's operations per second, and TPOT is
# at least the bytes of a step divided by the bandwidth. Here are the runs from the beginning of this page with these
# limits:

# %% tags=["timing"]
print("prompt       TTFT, at best         TPOT, at best")
for length, metrics in measured.items():
    first = roofline.seconds(prefill_work(config, weight_bytes, kv_bytes, length))
    later = roofline.seconds(decode_work(config, weight_bytes, kv_bytes, [length + 8]))
    ttft, tpot = metrics.time_to_first_token, 1 / metrics.decode_tokens_per_second
    print(f"{length:6} {1000 * ttft:7.0f} ms {1000 * first:6.0f} ms {1000 * tpot:9.1f} ms {1000 * later:6.1f} ms")

# %% [markdown]
# Now you can predict the effect of a change. A prompt of twice the length doubles the TTFT and hardly changes the TPOT.
# Halving the bytes of the weights improves the TPOT and not the TTFT. More users in a step do not change the TPOT of
# each user as long as the step is left of the ridge, so the total tokens per second rise; right of it, everyone waits
# longer. A long prompt that is computed between two decode steps delays every other user's next token by its TTFT. That
# problem is the subject of lesson 9.
#
# ## What production systems do differently
#
# - **Batches of hundreds.** To reach the ridge of an H100, about 300 sequences have to decode together. That depends on
#   memory for their caches, and so [vLLM](https://arxiv.org/abs/2309.06180) started with memory rather than arithmetic
#   (lessons 7 and 8).
# - **Filling the gap with prefill.** [Sarathi-Serve](https://arxiv.org/abs/2403.02310) cuts prompts into chunks and
#   adds one to each decode step. The step waits for memory anyway, so part of the prompt's arithmetic is free.
# - **Two kinds of machines.** [Splitwise](https://arxiv.org/abs/2311.18677) and
#   [DistServe](https://arxiv.org/abs/2401.09670) compute prompts on some machines and answers on others, and send the
#   KV cache between them. Each kind of machine can then be bought and tuned for its own limit. vLLM calls this
#   [disaggregated prefilling](https://docs.vllm.ai/en/latest/features/disagg_prefill/).
# - **Several tokens per step, for one user.** In [speculative decoding](https://arxiv.org/abs/2211.17192), a small
#   model guesses the next few tokens and the large one checks them in one pass. The check is a prefill of a few tokens
#   that reads the weights once.
# - **Fewer bits where bytes are the limit.** [AWQ](https://arxiv.org/abs/2306.00978) stores weights in 4 bits and
#   computes in 16. Decode is limited by reading the weights, so it gains from the 4 bits.
#
# ## Exercises
#
# Write the functions in [exercises.py](exercises.py), and test them with `pytest lessons/05_prefill_decode`. The
# answers to the last two are quoted above.
#
# 1. `layer_flops`: the operations of a token in all layers, from the model's shapes.
# 2. `prefill_work`: the operations and bytes of a prompt. How many tokens does its 10th token read?
# 3. `decode_work`: the operations and bytes of one step for several sequences. What do the sequences share?
