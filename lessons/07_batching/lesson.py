# %% [markdown]
# # 7. Batching
#
# **Why does serving 16 people cost little more than serving one? Static or continuous?**
#
# Lesson 5 ended with a hope: weights that have come all the way from memory can serve everyone who waits for a token.
# Here we cash it in. First on the clock, where it turns out that the bargain has an end, and that the end is not where
# one might think. Then on the calendar: people come and go when they like, and a batch that waits for its slowest
# member gives most of the gain away again.

# %%
import numpy as np

from minillm import LLM, Engine, EngineConfig, SamplingParams
from minillm.model.kv_cache import KVCache
from minillm.trace import Trace

llm = LLM()
config, kv_bytes = llm.config, llm.kv_cache.bytes_per_token


def new_engine(**options):
    """An engine around the same model, with a memory and a scheduler of its own."""
    options = EngineConfig(**{"num_blocks": 256, "prefix_caching": False} | options)
    cache = KVCache(config, options.num_blocks, options.block_size)
    return Engine(llm.transformer, cache, options.scheduler(cache), tokenizer=llm.tokenizer)


# %% tags=["hidden"]
try:
    import matplotlib.pyplot as plt
except ImportError:
    plt = None
    print("no Matplotlib here, so no figures")

# %% [markdown]
# ## One step for everyone
#
# An engine is a loop around the forward pass of lesson 2. Anyone may add a request at any time; each turn of the loop
# advances some of them, and says what it did. This is the whole turn:
#
# {{ source: minillm.engine.Engine.step }}
#
# The scheduler knows requests and no model; the transformer knows a batch and no request. Between them goes a plan:
# these sequences, by so many tokens each. The batch is the plan's tokens laid end to end. Let us stop after the plan of
# a step in which one prompt is read while two answers go on:

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
print("block_tables ", batch.block_tables[0].tolist())  # one a sequence; lesson 8 has models with several

# %% [markdown]
# Eight tokens, three sequences, and no padding: nothing in the batch says that the first two are decoding and the third
# is not. A matrix product treats the eight rows alike. Attention looks each row's past up in its own block table, so
# that nobody sees a neighbour.
#
# ## Sixteen at once
#
# How long does a decode step take with 1, 2, 4, ... sequences in it? Beside it, the least that lesson 5's roofline of
# this machine allows:

# %% tags=["timing"]
from minillm.bench.machine import describe_machine, measure_machine, usable_cores
from minillm.trace.roofline import decode_work

machine = describe_machine(threads=usable_cores())
measure_machine(machine)
roofline, weight_bytes = machine.roofline, llm.transformer.weight_bytes


def serve(engine, requests):
    """Add (prompt, params) pairs, step until all have ended, and return the records of the steps."""
    trace = Trace(engine.facts)
    engine.listeners.append(trace.append)
    for prompt, params in requests:
        engine.add_request(prompt, params)
    while engine.has_unfinished:
        engine.step()
    return trace


prompt = llm.encode("All happy families are alike; every unhappy family is unhappy in its own way.")
answer = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
print("sequences   ms a step  at best  limited by   of one alone   tokens a second, all together")
measured = {}
for S in (1, 2, 4, 8, 16, 32):
    trace = serve(new_engine(max_sequences=S, max_batch_tokens=1024), [(prompt, answer)] * S)
    ms = measured[S] = min(sum(record.milliseconds.values()) for record in trace.steps[1:])  # the first is the prefill
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
# The last column is the good news: the machine makes more tokens the more people share it. But is a step for sixteen
# "little more" than a step for one? Look at the column before it, and at *limited by*. As long as a step waits for
# memory, another sequence is nearly free. On a machine of few cores, though, with weights of about five bits, the
# arithmetic is used up after a few sequences (the corner of the upper line), and from there on twice the people take
# twice the time. Nobody is slower for it than if they had taken turns; but they do not gain any more either.
#
# ## Where the bargain ends
#
# So the answer depends on two ratios: operations for every byte that *the machine* can do, and bytes that *a weight*
# takes. The second is ours to change. A single matrix in three forms: what do `T` rows cost, compared with one?

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
print("rows              1     2     4     8    16    32    memory is the limit up to   ms: 1 row  32 rows")
for name, weights in forms.items():
    matrix, costs = llm.ops.as_matrix(weights), []
    for T in (1, 2, 4, 8, 16, 32):
        rows = np.random.default_rng(1).standard_normal((T, 4096), np.float32)
        costs.append(best_seconds(lambda rows=rows, matrix=matrix: llm.ops.linear(rows, matrix)))
    ridge = roofline.peak / roofline.bandwidth * llm.ops.num_bytes(matrix) / W.size / 2
    print(f"{name:12}", *(f"{cost / costs[0]:5.1f}" for cost in costs), f"{ridge:12.1f} rows", end="")
    print(f"{1000 * costs[0]:21.1f} {1000 * costs[-1]:8.1f}")

# %% [markdown]
# The wider the weights, the less another row costs. (Costs rise before the row where the roofline has its corner,
# because a real kernel cannot keep memory and arithmetic both busy there.) Quantization has made the *first* seat cheap
# by taking bytes away, and with them went the slack that the other seats would have filled. That is no reason against
# fewer bits: see the milliseconds at the ends of the lines. But "sixteen for the price of one" and "4 bits are several
# times as fast" are made of the same slack, and it can be spent only once.
#
# The first ratio is the machine's, and there accelerators are built differently. The same two functions, with the
# numbers of an [H100](https://www.nvidia.com/en-us/data-center/h100/)'s data sheet and of Llama 3.1 8B in 16 bits
# ([table 3](https://arxiv.org/abs/2407.21783)), each sequence at a context of 1,024:

# %%
from minillm.model.config import ModelConfig
from minillm.trace.roofline import Roofline, head_flops, layer_flops

h100 = Roofline(bandwidth=3.35e12, peak=989e12)
llama = ModelConfig("llama", 128256, 4096, 14336, 32, 32, num_kv_heads=8, head_dim=128, context_length=131072)
llama_bytes = layer_flops(llama) + head_flops(llama)  # two operations a weight, and two bytes
llama_kv = 2 * 32 * 8 * 128 * 2
print("sequences   ms a step, at best   of one alone   tokens a second   memory, GB")
works = {S: decode_work(llama, llama_bytes, llama_kv, [1024] * S) for S in (1, 4, 16, 64, 256, 1024)}
for S, work in works.items():
    seconds = h100.seconds(work)
    ratio = seconds / h100.seconds(works[1])
    print(f"{S:9} {1000 * seconds:12.2f} {ratio:20.2f}x {S / seconds:15,.0f} {work.num_bytes / 1e9:14.1f}")

# %% [markdown]
# *There* is the sentence from the title: sixteen people cost an eighth more than one. Even 64 only cost half as much
# again, and what makes the step longer is not arithmetic but their keys and values, which nobody shares (lesson 5). The
# last line does not fit into the card's 80 GB at all. A serving system fills its batch until *memory* is full; how to
# waste none of it is lesson 8.
#
# ## Does it change my answer?
#
# In a batch, my tokens are rows among strangers' rows. In minillm that cannot matter, to the bit, and lesson 6 showed
# why. Sixteen requests, each alone and then all together, with random draws:

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
# So much for a step. Now for the days of a server's life. The obvious way to batch is the one of a ferry: wait until
# people are there, take as many as there are seats, cross, come back. It is how neural networks had always been served,
# and here it is called *static*. But answers end at different times, and nobody knows beforehand when. The other way is
# the one of a bus: whoever has arrived gets off, whoever waits gets on, at *every* step. That is *continuous* batching
# ([Yu et al. 2022](https://www.usenix.org/conference/osdi22/presentation/yu)). In the scheduler, the difference is a
# few words:
#
# {{ source: minillm.engine.scheduler.Scheduler.schedule }}
#
# (`chunked`, the default, is continuous with another twist, and lesson 9's subject.) Twelve requests, four seats. A
# column is a step, a row a request: `#` its prompt is computed, `=` it decodes, `.` it waits.

# %%
lengths = (40, 6, 10, 8, 12, 36, 4, 8, 6, 10, 28, 5)


def crowd():
    """Twelve requests with answers of these lengths."""
    for n, length in enumerate(lengths):
        params = SamplingParams(temperature=0.8, seed=n, max_tokens=length, ignore_eos=True)
        yield llm.encode(openings[n]), params


def chart(trace):
    """A row a request, a cell a step."""
    rows = [["."] * len(trace) for _ in lengths]
    for step, record in enumerate(trace):
        for chunk in record.chunks:
            rows[int(chunk.request_id)][step] = "#" if chunk.phase == "prefill" else "="
    return ["".join(row).rstrip(".") for row in rows]


traces = {policy: serve(new_engine(policy=policy, max_sequences=4), crowd()) for policy in ("static", "continuous")}
for policy, trace in traces.items():
    print(f"{policy}: {len(trace)} steps for {sum(lengths)} tokens, {sum(lengths) / len(trace):.2f} a step")
    for n, row in enumerate(chart(trace)):
        print(f"{n:3} {row}")

# %% [markdown]
# Nothing but the order has changed. Look at request 1, whose six tokens are ready after six steps in both. And look at
# request 11: five tokens, but under *static* it waits through two crossings, each as long as its longest answer. In the
# lower chart, a `.` in the middle of a row stands below or above a `#`: while a prompt is computed, nobody decodes.
# Here that is a step of a few tokens; with long prompts it will hurt (lesson 9).

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
    print(f"{policy:10} {metrics.seconds:5.2f} s, {metrics.throughput:5.0f} tokens a second")

# %% [markdown]
# On the clock the gain is smaller than in steps, for a reason that you have seen above: on a CPU a step of four costs
# more than a step of one, so the half-empty steps of *static* are also cheap ones. On a machine where they cost the
# same, the number of steps *is* the time.
#
# ## How much is it worth?
#
# It must depend on how different the answers' lengths are. Equal lengths: nothing. For a thousand cases we need no
# model, for the scheduler has never seen one. It deals in integers, so we hand it tokens that are all 0:

# %%
from minillm.engine.block_allocator import BlockAllocator
from minillm.engine.scheduler import Scheduler
from minillm.engine.sequence import Sequence
from minillm.trace import SampledToken


def steps_taken(policy, lengths, seats):
    """Steps until requests with answers of these lengths, all there from the start, have ended."""
    blocks = BlockAllocator(num_blocks=10_000, block_size=16)
    scheduler = Scheduler(blocks, policy=policy, max_sequences=seats, prefix_caching=False)
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
    "1 to 63, evenly": random.integers(1, 64, 512),
    "geometric, mean 32": random.geometric(1 / 32, 512),
}
policies, seats = ("static", "continuous", "chunked"), (1, 2, 4, 8, 16, 32)
per_step = {
    (kind, policy): [some.sum() / steps_taken(policy, some, n) for n in seats]
    for kind, some in kinds.items()
    for policy in policies
}
print("seats                        ", "".join(f"{n:7}" for n in seats))
for (kind, policy), values in per_step.items():
    print(f"{kind:18} {policy:10}", "".join(f"{value:7.2f}" for value in values))

# %%
if plt:
    figure, axes = plt.subplots(figsize=(6.5, 4), num="static-or-continuous", layout="constrained")
    axes.plot(seats, seats, color="#999999", linewidth=1, linestyle=":", label="every seat taken in every step")
    for policy, colour, marker in zip(policies, ("#D55E00", "#0072B2", "#009E73"), "osD", strict=True):
        values = per_step["geometric, mean 32", policy]
        axes.plot(seats, values, marker=marker, color=colour, linewidth=2, label=policy)
    axes.set(xlabel="seats", ylabel="tokens a step", xlim=(0, 33), ylim=(0, 33))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    axes.set_title("How many seats are taken, when answers differ in length")

# %% [markdown]
# With equal lengths all fill every seat, as they should. With many short answers and a few long ones, *static* leaves
# two seats of three empty, and the more seats there are, the worse it gets. That can be worked out: the longest of `n`
# geometric lengths is on average 1 + 1/2 + ... + 1/n times their mean, so `n` seats do the work of `n` divided by that
# sum.

# %%
print("seats   static, predicted   measured")
for n, measured in zip(seats, per_step["geometric, mean 32", "static"], strict=True):
    print(f"{n:5} {n / sum(1 / k for k in range(1, n + 1)):12.2f} {measured:16.2f}")

# %% [markdown]
# But *continuous* falls short, too, and more so with more seats. The chart above shows why: whenever somebody joins,
# the others stand still for a step, and the more seats there are, the oftener somebody joins. (Here each prompt is one
# token, and a step for that alone costs as much as any; prompts that share a step with decodes, as under *chunked*,
# cost nobody a turn.) What *chunked* lacks to the dotted line is the end, when nobody is left to take the free seats.
#
# What about fairness? A step takes the time of its slowest row, and all rows take one step: so nobody in a batch is
# held up by a *longer* answer beside it, only by a *fuller* batch. Whoever wants the shortest time between two tokens
# wants few seats; whoever wants the most tokens a second wants many. `max_sequences` is that choice, and nothing in the
# software can make it for you.
#
# ## What production systems do differently
#
# - **Continuous is what everybody does.** Orca introduced it as *iteration-level scheduling* ([Yu et al.
#   2022](https://www.usenix.org/conference/osdi22/presentation/yu)) and reports 36.9 times the throughput of
#   FasterTransformer on a model of GPT-3's size, at the same latency. TensorRT-LLM calls it [in-flight
#   batching](https://nvidia.github.io/TensorRT-LLM/features/paged-attention-ifb-scheduler.html), and wants its inputs
#   packed without padding, as ours are.
# - **Attention apart.** Orca batched all but attention, for which it ran sequence after sequence (*selective
#   batching*). Attention that reads block tables takes the ragged batch as it is:
#   [PagedAttention](https://arxiv.org/abs/2309.06180), [FlashInfer](https://arxiv.org/abs/2501.01005).
# - **Some padding comes back.** Starting hundreds of small GPU kernels costs more than running them, so servers record
#   a decode step once and replay it ([CUDA graphs](https://docs.vllm.ai/en/latest/design/cuda_graphs/)). A recording
#   has a fixed batch size; a step of 13 is padded to the next recorded size.
# - **The host must keep up.** A step on a GPU takes some milliseconds, and Python's scheduling is not free. SGLang
#   [prepares the next batch while the GPU computes this one](https://lmsys.org/blog/2024-12-04-sglang-v0-4/).
# - **Bits.** Kernels chosen by the batch's size give a request other bits in other company; [He et al.
#   2025](https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/) measured how soon answers part.
#
# ## Exercises
#
# In [exercises.py](exercises.py); `pytest lessons/07_batching` tells you whether they are right. The answer to the
# second is quoted above.
#
# 1. `from_chunks`: lay chunks of any length end to end, and say where each token's key and value belong.
# 2. `schedule`: three policies from three moves. Who may join, and who must wait while a prompt is computed?
