# %% [markdown]
# # 5. Prefill and decode
#
# **Why are prefill and decode limited by different things? Where is the roofline of *this* machine?**
#
# Reading a prompt and writing an answer are the same forward pass, over many tokens or over one. Yet one of them runs
# several times as fast as the other, on the same machine, with the same weights. We count what a pass must compute and
# what it must fetch from memory, measure what your machine can do of each, and draw both into one picture. Most of what
# the later lessons do is an attempt to move to the right in that picture.

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
    print("no Matplotlib here, so no figures")

# %% [markdown]
# ## Two speeds
#
# A user notices two things: how long until the first token (*TTFT*, the prefill), and how long for each one after it
# (*TPOT*, time per output token, the decode).

# %% tags=["timing"]
text = llm.encode("All happy families are alike; every unhappy family is unhappy in its own way. ") * 32
params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
measured = {}
print("prompt      TTFT      TPOT   tokens a second: prefill  decode")
for length in (16, 128, 512):
    llm.reset_prefix_cache()
    metrics = measured[length] = llm.generate(text[:length], params)[0].metrics
    ttft, tpot = metrics.time_to_first_token, 1 / metrics.decode_tokens_per_second
    prefill, decode = metrics.prefill_tokens_per_second, metrics.decode_tokens_per_second
    print(f"{length:6} {1000 * ttft:6.0f} ms {1000 * tpot:6.1f} ms {prefill:25.0f} {decode:7.0f}")

# %% [markdown]
# Lesson 4 counted operations: a token costs nearly the same number of them in a prompt and in an answer. Here the
# longer prompts get several times as many tokens through in a second. So in decode the machine cannot be busy with
# operations. What is it waiting for?
#
# ## Operations for every byte
#
# Take one matrix of `O x I` weights, and `T` tokens to multiply by it. Each token uses each weight once, for a
# multiplication and an addition. But each weight has to come from memory only *once*, however many tokens are there to
# use it. The tokens themselves are small, and stay in the processor's caches. So the work is `2 T O I` operations, the
# traffic is `O I` weights, and their ratio, the *arithmetic intensity*, does not depend on the matrix at all:


# %%
def intensity(tokens, bytes_per_weight):
    return 2 * tokens / bytes_per_weight


from minillm.checkpoints import open_checkpoint

tensors = open_checkpoint(llm.path).tensors.values()
weights = sum(int(np.prod(shape)) for shape in config.tensor_shapes().values())
file_bytes = sum(tensor.data.nbytes for tensor in tensors)
formats = {"float32": 4, "16 bits": 2, "8 bits": 1, "our file": file_bytes / weights}
print(f"our file: {file_bytes:,} bytes for {weights:,} weights, {8 * file_bytes / weights:.2f} bits each")
print("tokens   ", *(f"{name:>9}" for name in formats), "  operations a byte")
for T in (1, 2, 4, 16, 64, 512):
    print(f"{T:6}   ", *(f"{intensity(T, size):9.1f}" for size in formats.values()))

# %% [markdown]
# Decode is the first line, prefill the last: a factor of 512 in what the machine gets to do for each byte it waits for.
# Fewer bits a weight raise every line, but at most eightfold.
#
# ## What can this machine do?
#
# Two numbers. How many bytes a second can be read? Let every core read a stretch of memory too long for any cache, and
# do next to nothing with it:
#
# {{ source: minillm.bench.engines.machine.read_all }}
#
# And how many operations a second? As many as tuned code does with large matrices: NumPy's BLAS. Each is measured in a
# process of its own, because the threads of one would disturb the other:

# %% tags=["timing"]
from minillm.bench.machine import describe_machine, measure_machine, usable_cores

machine = describe_machine(threads=usable_cores())
measure_machine(machine)
roofline = machine.roofline
ridge = roofline.peak / roofline.bandwidth
print(f"reads  {roofline.bandwidth / 1e9:6.1f} GB/s")
print(f"does   {roofline.peak / 1e9:6.1f} GFLOP/s, so {ridge:.1f} operations in the time it takes to read a byte")
for name, size in formats.items():
    print(f"with {name:8} weights, arithmetic is the limit from {ridge * size / 2:6.1f} tokens on")

# %% [markdown]
# Work that does fewer operations a byte than that waits for memory; work that does more waits for arithmetic. Reading
# and computing go on at the same time, so the slower of the two decides ([Williams, Waterman and Patterson
# 2009](https://doi.org/10.1145/1498765.1498785)):
#
# {{ source: minillm.trace.roofline.Roofline.attainable }}
#
# Drawn over intensity it is a slope and a flat roof; the corner between them, the *ridge point*, lies at the number of
# operations above. The line is what was measured, no law of nature: a point can come out above it, where others were
# using the machine when the line was measured, or where the BLAS has no code for the processor's widest vectors. (The
# one of this page had none; lesson 6 says what that costs.) How close are we? First a single product, of 134 MB of
# float32:


# %% tags=["timing"]
def best_seconds(action, *arguments, repeats=3):
    """The quickest of a few runs: whatever disturbs a measurement makes it longer."""
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
# Now the whole model. Its work is the same sum over all matrices, and attention, which reads the cache of lesson 4 in
# place of weights. A prompt of `T` tokens, and one step that adds a token to each of several sequences:
#
# {{ source: minillm.trace.roofline.prefill_work }}
#
# {{ source: minillm.trace.roofline.decode_work }}

# %% tags=["timing"]
from minillm.trace.roofline import decode_work, prefill_work

weight_bytes = llm.transformer.weight_bytes  # as they lie in memory


def run(chunks, cache):
    llm.transformer.forward(Batch.from_chunks(chunks, cache.block_size), cache)


def prefill_seconds(T):
    cache = KVCache.contiguous(config, length=T)
    return best_seconds(run, [Chunk(text[:T], 0, [[0]])], cache, repeats=3 if T < 128 else 1)


def decode_seconds(sequences, context):
    """One step, each sequence with `context` tokens before it (any keys and values will do)."""
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
    axes.set(xlabel="arithmetic intensity: operations for every byte read", ylabel="GFLOP/s")
    axes.yaxis.set_major_formatter(LogFormatter())
    axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    axes.set_title("The roofline of this machine, and what reaches it")

# %% [markdown]
# That is the answer to the first question. A single decode stands far to the left, where the line rises: only *bytes*
# count there, and most of the arithmetic units have nothing to do. A long prompt stands under the flat roof, where only
# *operations* count. Around the corner every real program falls short of the line, because it would have to keep both
# busy at once. Different resources, so different remedies: fewer bits a weight quicken decode and leave prefill as it
# was; more arithmetic does the reverse.
#
# Where the corner lies differs a great deal between machines. A CPU has little arithmetic for its memory, and a handful
# of tokens suffice to keep it busy. Accelerators are built the other way round. From their makers' data sheets, for
# 16-bit weights and 16-bit arithmetic:

# %%
accelerators = {"A100 80 GB": (312e12, 2.039e12), "H100 SXM": (989e12, 3.35e12), "H200": (989e12, 4.8e12)}
for name, (peak, bandwidth) in accelerators.items():
    share = intensity(1, 2) * bandwidth / peak
    print(
        f"{name:10} ridge at {peak / bandwidth:3.0f} operations a byte; one sequence in decode uses {share:.1%} of it"
    )

# %% [markdown]
# ([A100](https://www.nvidia.com/en-us/data-center/a100/), [H100](https://www.nvidia.com/en-us/data-center/h100/),
# [H200](https://www.nvidia.com/en-us/data-center/h200/); operations without sparsity.) A chip that serves one user at a
# time does nothing with more than 99 % of what it was bought for.
#
# ## A prediction
#
# If decode waits for bytes, its speed can be known without running it: bytes to read, over bytes a second. The bytes
# are the weights, and the keys and values of all tokens so far. In memory minillm lays the weights out anew, in about
# as many bytes as the file has; lesson 6 shows how.

# %% tags=["timing"]
print(f"weights in memory: {weight_bytes / 1e6:.0f} MB")
print("context  MB to read  at best, tokens/s  measured")
for context in (64, 1024, 4096):
    work = decode_work(config, weight_bytes, kv_bytes, [context])
    limit, seconds = 1 / roofline.seconds(work), decode_seconds(1, context)
    print(f"{context:7} {work.num_bytes / 1e6:11.0f} {limit:18.0f} {1 / seconds:9.0f} ({1 / seconds / limit:.0%})")

# %% [markdown]
# The limit falls as the text grows, though the model stays the same: its memory of the text must be read as well, for
# every token. How close the last column comes is a question of kernels, and of everything between them: merely to call
# a compiled function for each layer, with all its arrays, once took a tenth of a step, so now a single call [passes
# through all layers](../../minillm/ops/jit/layers.py). That a program in plain Python loops is in sight of the limit at
# all is the subject of lesson 6.
#
# ## Moving to the right
#
# A decode step wastes arithmetic because a weight that has come all the way from memory is used for one token. If
# several users are waiting, use it for a token of each: `S` sequences in a step share one reading of the weights. (In
# the figure, these are the five points of decode.) With the bytes of our file, this is where it leads:

# %%
from minillm.trace.roofline import Work, attention_flops, decode_work

print("sequences   operations a byte at a context of")
print("                  64     1024     8192")
for S in (1, 4, 16, 64, 256):
    row = (decode_work(config, file_bytes, kv_bytes, [context] * S).intensity for context in (64, 1024, 8192))
    print(f"{S:9} ", *(f"{x:8.1f}" for x in row))
looking = Work(num_bytes=kv_bytes, flops=attention_flops(config))
print(f"attention alone: {looking.intensity} operations a byte, for any number of sequences")

# %% [markdown]
# Look at the columns. With short texts, intensity grows with the number of sequences, as it did for prefill. With long
# texts it hardly moves. Weights are shared, but *keys and values are each sequence's own*: a key that was read is used
# by the queries of one token, and batching adds no one who could use it, too. Attention in decode waits for memory,
# whatever you do; only query heads that share keys (three, here) and fewer bits help (`kv_dtype="float16"` doubles the
# last line). So batching makes decode cheap until the cache, and not the weights, is most of what is read.

# %%
for context in (64, 1024, 8192):
    sequences = file_bytes / (kv_bytes * context)
    print(f"at a context of {context:4}, {sequences:5.1f} sequences read as much cache as weights")

# %% [markdown]
# ## What a user feels
#
# Put together, for one request: TTFT is at least the prompt's operations over the machine's, and TPOT at least the
# bytes of a step over its bandwidth. The runs from the beginning of this page, beside those limits:

# %% tags=["timing"]
print("prompt       TTFT, at best         TPOT, at best")
for length, metrics in measured.items():
    first = roofline.seconds(prefill_work(config, weight_bytes, kv_bytes, length))
    later = roofline.seconds(decode_work(config, weight_bytes, kv_bytes, [length + 8]))
    ttft, tpot = metrics.time_to_first_token, 1 / metrics.decode_tokens_per_second
    print(f"{length:6} {1000 * ttft:7.0f} ms {1000 * first:6.0f} ms {1000 * tpot:9.1f} ms {1000 * later:6.1f} ms")

# %% [markdown]
# Now you can say beforehand what a change will do. Twice the prompt: twice the TTFT, nearly the same TPOT. Weights of
# half the bytes: a better TPOT, the same TTFT. More users in a step: the same TPOT for each, as long as the step is
# left of the ridge, and so more tokens a second for all; right of it, each waits longer. And a long prompt that is
# computed between two decode steps makes everyone else's next token late by its TTFT. That last one is the trouble that
# lesson 9 is about.
#
# ## What production systems do differently
#
# - **Batches of hundreds.** To reach the ridge of an H100, some 300 sequences have to decode together. Whether there
#   is memory for their caches decides, which is why [vLLM](https://arxiv.org/abs/2309.06180) began with the memory, and
#   not with the arithmetic (lessons 7 and 8).
# - **Filling the gap with prefill.** [Sarathi-Serve](https://arxiv.org/abs/2403.02310) cuts prompts into chunks and
#   adds one to each decode step: the step is waiting for memory anyway, so part of the prompt's arithmetic is free.
# - **Two kinds of machines.** [Splitwise](https://arxiv.org/abs/2311.18677) and
#   [DistServe](https://arxiv.org/abs/2401.09670) compute prompts on some machines and answers on others, send the KV
#   cache across, and so can buy, and tune, for each limit. vLLM calls it [disaggregated
#   prefilling](https://docs.vllm.ai/en/latest/features/disagg_prefill/).
# - **Several tokens a step, for one user.** [Speculative decoding](https://arxiv.org/abs/2211.17192) guesses the next
#   few tokens with a small model and checks them in one pass of the large one: checking is a prefill of a few tokens,
#   for the bytes of one.
# - **Fewer bits where bytes are the limit.** [AWQ](https://arxiv.org/abs/2306.00978) stores weights in 4 bits and
#   computes in 16: for decode, that is what counts.
#
# ## Exercises
#
# In [exercises.py](exercises.py); `pytest lessons/05_prefill_decode` tells you whether they are right. The answers to
# the last two are quoted above.
#
# 1. `layer_flops`: the operations of a token in all layers, from the model's shapes.
# 2. `prefill_work`: the operations and bytes of a prompt. How many times does its 10th token look back?
# 3. `decode_work`: those of one step for several sequences. What do they share, and what not?
