# %% [markdown]
# # 7. Batching
#
# **Why does serving 16 users cost little more than serving one? Should batches be static or continuous?**
#
# Lesson 5 ended with an idea: once the weights have been read from memory, every request that needs a token can use
# them. Here we test this idea. First we measure how long a step takes. Batching helps up to a limit, which is lower
# than one might expect. Then we serve requests with answers of different lengths. A batch that waits for its longest
# answer loses most of the gain.

# %%
import numpy as np

from minillm import LLM, Engine, EngineConfig, SamplingParams
from minillm.model.kv_cache import KVCache
from minillm.trace import Trace

llm = LLM()
config, kv_bytes = llm.config, llm.kv_cache.bytes_per_token


def new_engine(**options):
    """Return an engine that shares the model but has its own KV cache and scheduler."""
    options = EngineConfig(**{"num_blocks": 256, "prefix_caching": False} | options)
    cache = KVCache(config, options.num_blocks, options.block_size)
    return Engine(llm.transformer, cache, options.scheduler(cache), tokenizer=llm.tokenizer)


# %% tags=["hidden"]
try:
    import matplotlib.pyplot as plt
except ImportError:
    plt = None
    print("Matplotlib is not installed, so there are no figures")

# %% [markdown]
# ## One step for all requests
#
# An engine is a loop around the forward pass of lesson 2. Requests can be added at any time. Each iteration, called a
# *step*, advances some of the requests and returns a record of the step. This is the code of one step:
#
# {{ source: minillm.engine.Engine.step }}
#
# The scheduler handles requests and does not use the model; the transformer handles a batch and does not use requests.
# A *step plan* connects them: it lists the sequences that advance and the number of tokens for each. The batch contains
# the plan's tokens, laid end to end. We build the batch of a step that computes one prompt while two other requests
# decode:

# %%
from minillm.model.batch import Batch

engine = new_engine()
params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
for text in ("Red, green,", "One, two, three,"):
    engine.add_request(llm.encode(text), params)
engine.step()
engine.add_request(llm.encode("Monday, Tuesday, Wednesday,"), params)

plan = engine.scheduler.schedule()
batch = Batch.from_plan(plan, engine.kv_cache.block_size)
print(plan)
for name in ("token_ids", "positions", "query_starts"):
    print(f"{name:13}", getattr(batch, name).tolist())
print("block_tables ", batch.block_tables[0].tolist())  # one table per sequence; lesson 8 has models with several

# %% [markdown]
# The batch has eight tokens from three sequences, and no padding. Nothing in it marks the first two sequences as
# decoding and the third as prefill. A matrix product treats all eight rows alike. Attention finds the earlier tokens of
# each row through the block table of the row's sequence, so no sequence reads the keys of another.
#
# ## Sixteen at once
#
# How long does a decode step take with 1, 2, 4, ... sequences in the batch? The column *at best* is the shortest time
# that the roofline of this machine (lesson 5) allows:

# %% tags=["timing"]
from minillm.bench.machine import describe_machine, measure_machine, usable_cores
from minillm.trace.roofline import decode_work

machine = describe_machine(threads=usable_cores())
measure_machine(machine)
roofline, weight_bytes = machine.roofline, llm.transformer.weight_bytes


def serve(engine, requests):
    """Add (prompt, params) pairs, step until all requests have finished, and return the trace."""
    trace = Trace(engine.facts)
    engine.listeners.append(trace.append)
    for prompt, params in requests:
        engine.add_request(prompt, params)
    while engine.has_unfinished:
        engine.step()
    return trace


prompt = llm.encode("All happy families are alike; every unhappy family is unhappy in its own way.")
answer = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
print("sequences     ms/step  at best  limited by  vs. one alone      tokens/s")
measured = {}
for S in (1, 2, 4, 8, 16, 32):
    trace = serve(new_engine(max_sequences=S, max_batch_tokens=1024), [(prompt, answer)] * S)
    ms = measured[S] = min(sum(record.milliseconds.values()) for record in trace.steps[1:])  # step 0 is the prefill
    work = decode_work(config, weight_bytes, kv_bytes, [len(prompt) + 8] * S)
    least, bound = 1000 * roofline.seconds(work), roofline.bound(work)
    print(f"{S:9} {ms:11.1f} {least:8.1f}  {bound:10} {ms / measured[1]:12.1f}x {1000 * S / ms:13.0f}")

# %% tags=["timing"]
if plt:
    from minillm.view import plots

    works = {S: decode_work(config, weight_bytes, kv_bytes, [len(prompt) + 8] * S) for S in range(1, 33)}
    limit = {S: S / roofline.seconds(work) for S, work in works.items()}
    figure, axes = plt.subplots(figsize=(6.5, 4), num="decode-rate", layout="constrained")
    plots.decode_rate(axes, {"measured": {S: 1000 * S / ms for S, ms in measured.items()}}, limit)

# %% [markdown]
# The last column shows the gain: the more sequences share a step, the more tokens per second the machine generates. But
# does a step for sixteen sequences cost "little more" than a step for one? The columns *limited by* and *vs. one alone*
# give the answer. While memory limits a step, another sequence is nearly free. But on a machine with few cores, and
# with weights of about five bits, a few sequences already use all of the arithmetic (the corner of the upper line).
# Beyond this corner, the shortest possible time of a step doubles when the number of sequences doubles, so the roofline
# allows no further gain.
#
# ## Where batching stops helping
#
# The limit depends on two numbers: how many operations *the machine* can do per byte it reads, and how many bytes *a
# weight* takes. We can change the second number. How much longer does a product with `T` rows take than a product with
# one row? We measure one matrix in three formats:

# %% tags=["timing"]
from time import perf_counter

from minillm.quantization import quantize


def best_seconds(action, repeats=5):
    times = []
    for _ in range(repeats):
        begin = perf_counter()
        action()
        times.append(perf_counter() - begin)
    return min(times)


W = np.random.default_rng(0).standard_normal((8192, 4096), np.float32)
forms = {"float32": W, "8 bits": quantize(W, 8), "4 bits": quantize(W, 4)}
print("rows              1     2     4     8    16    32    memory-bound up to          ms: 1 row  32 rows")
for name, weights in forms.items():
    matrix, costs = llm.ops.as_matrix(weights), []
    for T in (1, 2, 4, 8, 16, 32):
        rows = np.random.default_rng(1).standard_normal((T, 4096), np.float32)
        costs.append(best_seconds(lambda rows=rows, matrix=matrix: llm.ops.linear(rows, matrix)))
    ridge = roofline.peak / roofline.bandwidth * llm.ops.num_bytes(matrix) / W.size / 2
    print(f"{name:12}", *(f"{cost / costs[0]:5.1f}" for cost in costs), f"{ridge:12.1f} rows", end="")
    print(f"{1000 * costs[0]:21.1f} {1000 * costs[-1]:8.1f}")

# %% [markdown]
# The wider the weights, the less another row costs. (Costs rise before the roofline's corner, because a real kernel
# cannot keep both memory and arithmetic fully busy there.) Quantization made the *first* row cheap by removing bytes.
# But while those bytes were read, the cores had time to compute more rows for free. This is no argument against fewer
# bits, as the milliseconds in the last two columns show. But batching and quantization use the same idle arithmetic,
# and it can be used only once.
#
# The first number depends on the machine, and accelerators can do far more operations per byte. We evaluate the same
# two functions for Llama 3.1 8B in 16 bits ([table 3](https://arxiv.org/abs/2407.21783)) on an H100 ([data
# sheet](https://www.nvidia.com/en-us/data-center/h100/)), with a context of 1,024 tokens per sequence:

# %%
from minillm.model.config import ModelConfig
from minillm.trace.roofline import Roofline, head_flops, layer_flops

h100 = Roofline(bandwidth=3.35e12, peak=989e12)
llama = ModelConfig("llama", 128256, 4096, 14336, 32, 32, num_kv_heads=8, head_dim=128, context_length=131072)
llama_bytes = layer_flops(llama) + head_flops(llama)  # 2 bytes per weight, and also 2 operations
llama_kv = 2 * 32 * 8 * 128 * 2
print("sequences best ms/step         vs. one alone        tokens/s     memory, GB")
works = {S: decode_work(llama, llama_bytes, llama_kv, [1024] * S) for S in (1, 4, 16, 64, 256, 1024)}
for S, work in works.items():
    seconds = h100.seconds(work)
    ratio = seconds / h100.seconds(works[1])
    print(f"{S:9} {1000 * seconds:12.2f} {ratio:20.2f}x {S / seconds:15,.0f} {work.num_bytes / 1e9:14.1f}")

# %% [markdown]
# On *this* machine, a step for sixteen sequences takes only an eighth longer than a step for one. Even a step for 64
# sequences takes only about half as long again. The extra time is spent on reading keys and values, which sequences do
# not share (lesson 5). The last line needs more memory than the 80 GB of the card. A serving system therefore fills its
# batch until *memory* is full. Lesson 8 shows how to waste almost none of it.
#
# ## Does batching change my answer?
#
# In a batch, the tokens of your request are rows among the rows of other requests. In minillm, this does not change a
# single bit of the result; lesson 6 showed why. We run sixteen requests with random sampling, first one at a time and
# then all together:

# %%
openings = [f"{place} is known for" for place in ("Paris", "Rome", "Cairo", "Oslo", "Lima", "Delhi", "Kyoto", "Quito")]
openings += [f"A {animal} can" for animal in ("cat", "whale", "spider", "crow", "horse", "bee", "shark", "snail")]
requests = [SamplingParams(temperature=0.8, seed=n, max_tokens=6 + n, logprobs=True) for n in range(16)]
alone = [llm.generate(opening, params)[0] for opening, params in zip(openings, requests, strict=True)]
together = llm.generate(openings, requests)
print("same tokens:", [a.token_ids for a in alone] == [b.token_ids for b in together])
print("same log-probabilities, to the bit:", [a.logprobs for a in alone] == [b.logprobs for b in together])
print(openings[8] + together[8].text)

# %% [markdown]
# ## Static or continuous?
#
# So far we have looked at a single step. Now we look at many. *Static* batching works like a ferry: it waits for
# passengers, crosses with them, and takes no others until it has returned. Neural networks were served this way for
# years. But answers differ in length, and their lengths are not known in advance. *Continuous* batching ([Yu et al.
# 2022](https://www.usenix.org/conference/osdi22/presentation/yu)) works like a bus: at *every* step, finished sequences
# leave and waiting sequences join. In the scheduler, the difference takes a few lines:
#
# {{ source: minillm.engine.scheduler.Scheduler.schedule }}
#
# (Lesson 9 covers `chunked`, the default, which also splits prompts.) We serve twelve requests, at most four at a time.
# In the charts, each column is a step and each row is a request: `#` is prefill, `=` is decode, and `.` is waiting.

# %%
lengths = (40, 6, 10, 8, 12, 36, 4, 8, 6, 10, 28, 5)


def workload():
    """Yield twelve requests with answers of these lengths."""
    for n, length in enumerate(lengths):
        params = SamplingParams(temperature=0.8, seed=n, max_tokens=length, ignore_eos=True)
        yield llm.encode(openings[n]), params


def chart(trace):
    """Return one row per request, with one character per step."""
    rows = [["."] * len(trace) for _ in lengths]
    for step, record in enumerate(trace):
        for chunk in record.chunks:
            rows[int(chunk.request_id)][step] = "#" if chunk.phase == "prefill" else "="
    return ["".join(row).rstrip(".") for row in rows]


traces = {policy: serve(new_engine(policy=policy, max_sequences=4), workload()) for policy in ("static", "continuous")}
for policy, trace in traces.items():
    print(f"{policy}: {len(trace)} steps for {sum(lengths)} tokens, {sum(lengths) / len(trace):.2f} per step")
    for n, row in enumerate(chart(trace)):
        print(f"{n:3} {row}")

# %% [markdown]
# Only the order of the work has changed. Request 1 has six tokens, which are ready after six steps under both policies.
# Request 11 has five tokens, but under *static* it waits for two batches, each as long as its longest answer. In the
# lower chart, wherever a row has a `.` in its middle, another row has a `#` in the same column: while a prompt is
# computed, no sequence decodes. The prompts here are short; long prompts make the delay noticeable (lesson 9).

# %%
print("request           ", *(f"{n:3}" for n in range(len(lengths))), "  mean")
texts = {}
for policy, trace in traces.items():
    ended = {int(finish.request_id): record.step + 1 for record in trace for finish in record.finished}
    steps = [ended[n] for n in range(len(lengths))]
    print(f"{policy:10} ends at", *(f"{step:3}" for step in steps), f"{np.mean(steps):6.1f}")
    texts[policy] = [""] * len(lengths)
    for record in trace:
        for chunk in record.chunks:
            texts[policy][int(chunk.request_id)] += "".join(token.text for token in chunk.sampled)
print("same answers:", texts["static"] == texts["continuous"])

# %% tags=["timing"]
from minillm.trace import run_metrics

for policy, trace in traces.items():
    metrics = run_metrics(trace)
    print(f"{policy:10} {metrics.seconds:5.2f} s, {metrics.throughput:5.0f} tokens/s")

# %% [markdown]
# In seconds, the gain is smaller than in steps. On a CPU, a step with four sequences takes longer than a step with one,
# as we saw above, so the half-empty steps of *static* are also short. If all steps took the same time, the gain in
# seconds would equal the gain in steps.
#
# ## How much is continuous batching worth?
#
# The gain depends on how much the answers differ in length; if all lengths are equal, there is no gain. We measure it
# for 512 requests per distribution of lengths, without a model. The scheduler works with integers only, so we give it
# sampled tokens that are all 0:

# %%
from minillm.engine.block_allocator import BlockAllocator
from minillm.engine.scheduler import Scheduler
from minillm.engine.sequence import Sequence
from minillm.trace import SampledToken


def steps_taken(policy, lengths, max_sequences):
    """Return the number of steps that answers of these lengths take if all requests wait from the start."""
    blocks = BlockAllocator(num_blocks=10_000, block_size=16)
    scheduler = Scheduler(blocks, policy=policy, max_sequences=max_sequences, prefix_caching=False)
    for n, length in enumerate(lengths):
        scheduler.add(Sequence.from_prompt(str(n), [0], max_tokens=int(length)))
    steps = 0
    while scheduler.has_unfinished:
        plan, steps = scheduler.schedule(), steps + 1
        sequences = [scheduler.sequence(chunk) for chunk in plan.chunks]
        ends = [sequence.num_generated + 1 == sequence.max_tokens for sequence in sequences]
        scheduler.commit(plan, [[SampledToken(0, finish_reason="length" if end else None)] for end in ends])
    return steps


random = np.random.default_rng(0)
kinds = {
    "all 32 tokens": np.full(512, 32),
    "uniform, 1 to 63": random.integers(1, 64, 512),
    "geometric, mean 32": random.geometric(1 / 32, 512),
}
policies, sizes = ("static", "continuous", "chunked"), (1, 2, 4, 8, 16, 32)
per_step = {
    (kind, policy): [answers.sum() / steps_taken(policy, answers, n) for n in sizes]
    for kind, answers in kinds.items()
    for policy in policies
}
print("max_sequences                ", "".join(f"{n:7}" for n in sizes))
for (kind, policy), values in per_step.items():
    print(f"{kind:18} {policy:10}", "".join(f"{value:7.2f}" for value in values))

# %%
if plt:
    figure, axes = plt.subplots(figsize=(6.5, 4), num="static-or-continuous", layout="constrained")
    axes.plot(sizes, sizes, color="#999999", linewidth=1, linestyle=":", label="every place used in every step")
    for policy, colour, marker in zip(policies, ("#D55E00", "#0072B2", "#009E73"), "osD", strict=True):
        values = per_step["geometric, mean 32", policy]
        axes.plot(sizes, values, marker=marker, color=colour, linewidth=2, label=policy)
    axes.set(xlabel="max_sequences", ylabel="tokens per step", xlim=(0, 33), ylim=(0, 33))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    axes.set_title("Tokens per step when answers differ in length")

# %% [markdown]
# With equal lengths, all policies use every place in the batch, as they should. With many short answers and a few long
# ones, *static* leaves about two out of three places empty, and larger batches have a larger empty share. We can
# predict this share: a static batch runs as long as its longest answer, and the longest of `n` geometric lengths is on
# average 1 + 1/2 + ... + 1/n times their mean. So the number of tokens per step is `n` divided by that sum.

# %%
print("max_sequences   static, predicted   measured")
for n, measured in zip(sizes, per_step["geometric, mean 32", "static"], strict=True):
    print(f"{n:13} {n / sum(1 / k for k in range(1, n + 1)):19.2f} {measured:10.2f}")

# %% [markdown]
# *Continuous* also stays below the dotted line, and the distance grows with the batch. The chart of twelve requests
# shows why: whenever a sequence joins, the others wait for a step, and sequences join a larger batch more often. (Here
# each prompt is one token, and a step that computes only a prompt counts as much as any other step.) Under *chunked*,
# prompts share their steps with decodes and delay no sequence. *Chunked* falls short of the dotted line only at the
# end, when no waiting requests are left to fill the free places.
#
# Is batching fair? All rows of a step are computed together and finish at the same time. So a *longer* answer in the
# batch delays no other sequence; only a *fuller* batch does. Small batches give a short time between two tokens; large
# batches give more tokens per second. `max_sequences` sets this trade-off, and its best value depends on the service.
#
# ## What production systems do differently
#
# - **Continuous batching is standard.** Orca introduced it as *iteration-level scheduling* ([Yu et al.
#   2022](https://www.usenix.org/conference/osdi22/presentation/yu)) and reports 36.9 times the throughput of
#   FasterTransformer on a model of GPT-3's size, at the same latency. TensorRT-LLM calls it [in-flight
#   batching](https://nvidia.github.io/TensorRT-LLM/features/paged-attention-ifb-scheduler.html). Its inputs must be
#   packed without padding, as they are in minillm.
# - **Attention in the batch.** Orca batched everything except attention, which it ran sequence by sequence (*selective
#   batching*). Attention kernels that read block tables, such as [PagedAttention](https://arxiv.org/abs/2309.06180) and
#   [FlashInfer](https://arxiv.org/abs/2501.01005), accept sequences of different lengths in one batch.
# - **Some padding returns.** Launching hundreds of small GPU kernels costs more time than running them. So servers
#   record a decode step once and replay the recording ([CUDA
#   graphs](https://docs.vllm.ai/en/latest/design/cuda_graphs/)). A recording has a fixed batch size, so a step with 13
#   sequences is padded to the next recorded size.
# - **The host must keep up.** A GPU step takes only a few milliseconds, so the time for scheduling in Python matters.
#   SGLang [prepares the next batch while the GPU computes the current
#   one](https://lmsys.org/blog/2024-12-04-sglang-v0-4/).
# - **Different bits.** If the kernel depends on the batch size, the bits of an answer depend on the other requests in
#   its batch. [He et al. 2025](https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/) measured
#   how soon answers diverge.
#
# ## Exercises
#
# Write the functions in [exercises.py](exercises.py), and test them with `pytest lessons/07_batching`. The answer to
# the second exercise is quoted above.
#
# 1. `from_chunks`: lay chunks of any length end to end, and compute where each token's key and value are stored.
# 2. `schedule`: build three policies from three methods. Which sequences may join, and which wait while a prompt is
#    computed?
