# %% [markdown]
# # 9. Scheduling
#
# **What does a scheduler trade off when it splits prompts, preempts sequences and sets priorities?**
#
# A scheduler does not make the machine faster or the memory larger; it only chooses which request runs next. Time that
# one request gains is time that another loses, so we must find out which requests lose. We examine three choices in
# turn: how much of a prompt to compute per step, which sequence to preempt when memory is full, and which request to
# admit first. For each choice, we measure the gain and the cost. The answers themselves never change.

# %%
import numpy as np

from minillm import LLM, Engine, EngineConfig, SamplingParams
from minillm.engine.block_allocator import BlockAllocator
from minillm.engine.scheduler import Scheduler
from minillm.engine.sequence import Sequence
from minillm.model.kv_cache import KVCache
from minillm.trace import SampledToken, Trace, percentile, request_metrics, run_metrics

llm = LLM()


def new_engine(**options):
    """Return an engine that shares the model but has its own KV cache and scheduler, and the trace of its steps."""
    options = EngineConfig(**{"num_blocks": 128} | options)
    cache = KVCache(llm.config, options.num_blocks, options.block_size)
    engine = Engine(llm.transformer, cache, options.scheduler(cache), tokenizer=llm.tokenizer)
    trace = Trace(engine.facts)
    engine.listeners.append(trace.append)
    return engine, trace


def answers_of(trace):
    """Return the tokens and log-probabilities of each request."""
    answers = {}
    for record in trace:
        for chunk in record.chunks:
            answers.setdefault(chunk.request_id, []).extend((t.token_id, t.logprob) for t in chunk.sampled)
    return answers


# %% tags=["hidden"]
try:
    import matplotlib.pyplot as plt
except ImportError:
    plt = None
    print("Matplotlib is not installed, so there are no figures")

# %% [markdown]
# ## A long prompt arrives
#
# Four users are reading their answers as the tokens arrive. Then a request with a prompt of 512 tokens arrives. We
# serve these requests under two policies. *Continuous* computes prompts first, and here the whole prompt fits into one
# step. *Chunked* first gives each decoding sequence one token. A chunk of the prompt then fills the rest of the step's
# budget, here 64 tokens.

# %%
openings = [f"{place} is a city where" for place in ("Paris", "Cairo", "Lima", "Kyoto")]
long_prompt = (llm.encode("I am writing to you because of the noise in the street at night. ") * 40)[:512]


def run_readers(**options):
    """Return the trace of a run in which a long prompt arrives after four answers have run for twelve steps."""
    engine, trace = new_engine(**options)
    for n, opening in enumerate(openings):
        params = SamplingParams(temperature=0.8, seed=n, max_tokens=48, ignore_eos=True, logprobs=True)
        engine.add_request(llm.encode(opening), params, request_id=f"reader {n}")
    for _ in range(12):
        engine.step()
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=True)
    engine.add_request(long_prompt, params, request_id="long")
    while engine.has_unfinished:
        engine.step()
    return trace


whole = run_readers(policy="continuous", max_batch_tokens=1024)
split = run_readers(policy="chunked", max_batch_tokens=64)
for name, trace in (("continuous", whole), ("chunked, 64", split)):
    print(f"{name}: prefill + decode tokens, from step 11 on")
    for record in trace.steps[11:23]:
        prefill = sum(chunk.num_tokens for chunk in record.chunks if chunk.phase == "prefill")
        print(f"{prefill} + {record.num_tokens - prefill}", end="   ")
    print()
print("same tokens and bits:", answers_of(whole) == answers_of(split))

# %% [markdown]
# In the first run, one step computes the 512 tokens of the prompt, and no reader receives a token in it. In the second
# run, nine steps take longer than usual, but every reader receives a token in each. How long does a reader wait?

# %% tags=["timing"]
print("ms               between a reader's tokens: median   longest long prompt's first token         all done")
for name, trace in (("continuous", whole), ("chunked, 64", split)):
    metrics = request_metrics(trace)
    gaps = metrics["reader 0"].inter_token_latencies
    row = f"{1000 * percentile(gaps, 50):28.0f} {1000 * max(gaps):9.0f} {1000 * metrics['long'].ttft:24.0f}"
    print(f"{name:22} {row} {1000 * run_metrics(trace).seconds:16.0f}")

# %% tags=["timing"]
if plt:
    figure, axes = plt.subplots(figsize=(7, 3.6), num="one-readers-gaps", layout="constrained")
    for name, trace, colour, style in (("continuous", whole, "#D55E00", "--"), ("chunked, 64", split, "#0072B2", "-")):
        gaps = 1000 * np.array(request_metrics(trace)["reader 0"].inter_token_latencies)
        axes.semilogy(np.arange(1, len(gaps) + 1), gaps, style, color=colour, linewidth=2, label=name)
    axes.set(xlabel="token of the answer", ylabel="ms since the previous token")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    axes.set_title("How a long prompt delays one reader's tokens")

# %% [markdown]
# A reader notices either one long pause or a period in which all tokens arrive a little more slowly. The median gap is
# the same, and the time until all requests are done is nearly the same. The *longest* gap differs. Users notice long
# gaps, so every serious measurement reports high percentiles. The long request's first token comes somewhat later,
# because its prompt now shares its steps with decodes.
#
# ## How large should a chunk be?
#
# The budget limits the duration of a step, and thus the time until every reader's next token. How small should the
# budget be? In the scheduler, a prompt advances by as many tokens as the budget has left:
#
# {{ source: minillm.engine.scheduler.Scheduler._schedule_chunk }}

# %% tags=["timing"]
points = []
print("budget   steps of the long prompt's prefill      longest gap, ms   first token, ms   all done, ms")
for budget in (16, 32, 64, 128, 256, 1024):
    trace = run_readers(policy="chunked", max_batch_tokens=budget)
    metrics = request_metrics(trace)
    gap, ttft = 1000 * max(metrics["reader 0"].inter_token_latencies), 1000 * metrics["long"].ttft
    steps = sum(any(chunk.request_id == "long" and chunk.phase == "prefill" for chunk in r.chunks) for r in trace)
    points.append((budget, gap, ttft))
    print(f"{budget:6} {steps:25} {gap:33.0f} {ttft:17.0f} {1000 * run_metrics(trace).seconds:14.0f}")

# %% tags=["timing"]
if plt:
    figure, axes = plt.subplots(figsize=(6, 4), num="budgets", layout="constrained")
    _, gaps, ttfts = zip(*points, strict=True)
    axes.loglog(gaps, ttfts, "o-", color="#0072B2", linewidth=1.5)
    for budget, gap, ttft in points:
        axes.annotate(f"{budget}", (gap, ttft), textcoords="offset points", xytext=(6, 5), fontsize=9)
    axes.set(xlabel="longest gap of a reader, ms", ylabel="time to the long prompt's first token, ms")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title("Waiting times for budgets of 16 to 1,024 tokens per step")

# %% [markdown]
# Each budget is a point on the curve. Lower points are better for the long prompt, and points further left are better
# for the readers. In the right half, larger budgets cost the readers a lot and help the long prompt only a little.
# Above the ridge point (lesson 5), twice the tokens take twice the time, so large steps are no more efficient than
# medium ones. In the left half, smaller budgets delay the long prompt more and more: even a chunk of four tokens has to
# read all the weights. A good budget is the smallest that still keeps the machine busy. On a CPU, this is a few dozen
# tokens. On an accelerator, which has its ridge point at hundreds of tokens, it is 512 or 2,048.
#
# ## How do the policies behave under load?
#
# One long prompt is a single example. For more general results, we run the same engine and scheduler on a *simulated*
# machine: Llama 3.1 8B in 16 bits on an H100 (lesson 7). The simulation computes no tokens. For each step, its clock
# advances by the shortest time that the roofline of lesson 5 allows. A real machine is slower.
#
# {{ source: minillm.bench.serving.SimulatedTransformer.forward }}
#
# The load comes from 4, 16 or 64 clients. Each client sends its next request when it has received the previous answer:

# %%
from minillm.bench.serving import SimulatedEngine, serve_clients
from minillm.model.config import ModelConfig
from minillm.trace.roofline import ModelCosts, Roofline, head_flops, layer_flops

h100 = Roofline(bandwidth=3.35e12, peak=989e12)
llama = ModelConfig("llama", 128256, 4096, 14336, 32, 32, num_kv_heads=8, head_dim=128, context_length=131072)
costs = ModelCosts.of(llama, layer_flops(llama) + head_flops(llama), kv_bytes_per_token=2 * 32 * 8 * 128 * 2)
memory = {"num_blocks": 2000, "block_size": 64, "max_sequences": 64, "prefix_caching": False}


def serve(clients, **options):
    engine = SimulatedEngine(costs, h100, EngineConfig(**memory, **options))
    return run_metrics(serve_clients(engine, workload, clients))


random = np.random.default_rng(0)
prompt_lengths = random.lognormal(5.5, 1, 96).clip(20, 4000).astype(int).tolist()
prompts = [[0] * length for length in prompt_lengths]
workload = list(zip(prompts, random.geometric(1 / 32, 96).tolist(), strict=True))
budgets, loads = {"static": 4096, "continuous": 4096, "chunked": 512}, (4, 16, 64)
runs = {
    policy: {clients: serve(clients, policy=policy, max_batch_tokens=budget) for clients in loads}
    for policy, budget in budgets.items()
}
print("        clients         tokens/s  ms: median TPOT, 95 %, median TTFT, 95 %")
for policy, by_load in runs.items():
    for clients, run in by_load.items():
        times = (run.median_tpot, run.p95_tpot, run.median_ttft, run.p95_ttft)
        print(f"{policy:10} {clients:4} {run.throughput:16.0f}   ", *(f"{1000 * time:7.1f}" for time in times))

# %%
if plt:
    from minillm.view import plots

    figure, axes = plt.subplots(1, 2, figsize=(9, 4), num="latency-throughput", layout="constrained")
    plots.latency_against_throughput(axes[0], runs, "tpot")
    plots.latency_against_throughput(axes[1], runs, "ttft")
    figure.suptitle("Latency against throughput for three policies, on a simulated H100")

# %% [markdown]
# Each line is a policy, and each mark is a number of concurrent clients. Further right is better for the operator, who
# pays for the machine; lower is better for the users, who wait. *Static* has the lowest throughput: many places in its
# batches stay empty, and late requests wait for the next batch. *Chunked* generates more tokens per second than
# *continuous*, and at more even intervals. With 64 clients, the slowest answers take an eighth of the time per token,
# because decodes share the steps of prompts, which read the weights anyway. The right panel shows the cost. With 64
# clients, the median time to the first token more than doubles, because prompts share every step with all decodes.
#
# ## When memory is full
#
# With blocks, a sequence is admitted if the tokens it has *now* fit (lesson 8). But all sequences grow, so at some step
# one of them needs a block and none is available. Then some sequence must free its blocks. minillm preempts the
# sequence that was admitted last:
#
# {{ source: minillm.engine.scheduler.Scheduler._ensure_blocks }}
#
# A *preempted* sequence frees its blocks, keeps its tokens, and returns to the head of the queue. When there is room
# again, one prefill recomputes the prompt and the answer so far. We run five requests in a pool of 14 blocks of 4
# positions. In the chart, `#` is prefill, `=` is decode, `.` is waiting, and `!` is a preemption.

# %%
names = "ABCDE"


def run_five(num_blocks, prefix_caching=False):
    engine, trace = new_engine(num_blocks=num_blocks, block_size=4, prefix_caching=prefix_caching)
    for n, name in enumerate(names):
        params = SamplingParams(temperature=0.8, seed=n, max_tokens=20, ignore_eos=True, logprobs=True)
        engine.add_request(llm.encode(f"Dear {name}, thank you for"), params, request_id=name)
    while engine.has_unfinished:
        engine.step()
    return trace


def chart(trace):
    rows = {name: ["."] * len(trace) for name in names}
    for step, record in enumerate(trace):
        for chunk in record.chunks:
            rows[chunk.request_id][step] = "#" if chunk.phase == "prefill" else "="
        for preemption in record.preempted:
            rows[preemption.request_id][step] = "!"
    for name, row in rows.items():
        print(f"  {name} {''.join(row).rstrip('.')}")


ample, scarce, cached = run_five(64), run_five(14), run_five(14, prefix_caching=True)
chart(scarce)
print("                           steps  preempted      recomputed   max blocks held")
for name, trace in (("64 blocks", ample), ("14 blocks", scarce), ("14, prefix caching", cached)):
    metrics = run_metrics(trace)
    numbers = f"{metrics.num_steps:7} {metrics.num_preemptions:10} {metrics.num_recomputed_tokens:15}"
    print(f"{name:24} {numbers} {metrics.peak_blocks:17}")
print("same tokens and bits:", answers_of(ample) == answers_of(scarce) == answers_of(cached))

# %% [markdown]
# With 40 % of the memory that the requests would use, the run takes twice the steps and gives the same answers to the
# last bit. (Not every engine guarantees this. Tokens that were computed one by one in decodes are recomputed together
# in one prefill. If the kernels then add in a different order, the text can continue differently.) With the prefix
# index of lesson 8, the blocks of a preempted sequence can be found until they are evicted. Here this saves almost
# nothing: the sequence was preempted *because* memory was full, so its blocks were soon evicted.
#
# Why preempt the sequence admitted last? Older sequences usually have more computed tokens to lose. In addition, the
# oldest sequence is never preempted, so it always finishes, and then the next sequence is the oldest. So every request
# finishes, which proves that none starves.
#
# ## How many sequences should be admitted?
#
# Preemptions can be avoided by reserving memory for the running sequences. The `watermark` is the share of the pool
# that an admission must leave available. Is a reserve worthwhile? To find out, we need many requests but no model: the
# scheduler plans the steps, and we skip the computation. Arrivals are measured in steps, and lengths in tokens:


# %%
def replay(requests, *, num_blocks=2000, **options):
    """Serve (arrival step, prompt length, answer length, priority) tuples; return steps to first token, and totals."""
    options = {"max_batch_tokens": 256, "max_sequences": 64, "prefix_caching": False} | options
    scheduler = Scheduler(BlockAllocator(num_blocks, 16), **options)
    step, waits, totals = 0, {}, {"steps": 0, "tokens": 0, "preempted": 0, "recomputed": 0}
    arrivals = iter(enumerate(requests))
    upcoming = next(arrivals, None)
    while upcoming or scheduler.has_unfinished:
        while upcoming and upcoming[1][0] <= step:
            n, (_, prompt, answer, priority) = upcoming
            scheduler.add(Sequence.from_prompt(str(n), [0] * prompt, answer, priority=priority))
            upcoming = next(arrivals, None)
        plan = scheduler.schedule()
        choices = []
        for chunk in plan.chunks:
            sequence = scheduler.sequence(chunk)
            ends = sequence.num_generated + 1 == sequence.max_tokens
            choices.append([SampledToken(0, finish_reason="length" if ends else None)] * chunk.num_samples)
            if chunk.num_samples and not sequence.num_generated:
                waits[int(sequence.request_id)] = step + 1 - requests[int(sequence.request_id)][0]
        scheduler.commit(plan, choices)
        totals["preempted"] += len(plan.preempted)
        totals["recomputed"] += sum(preempted.num_computed for preempted in plan.preempted)
        totals["tokens"] += plan.num_tokens
        totals["steps"] = step = step + 1
    return np.array([waits[n] for n in range(len(requests))]), totals


random = np.random.default_rng(0)
burst = [
    (0, int(p), int(a), 0) for p, a in zip(random.integers(20, 200, 300), random.geometric(1 / 150, 300), strict=True)
]
watermarks = (0.0, 0.01, 0.05, 0.1, 0.2, 0.4, 0.6)
outcomes = {watermark: replay(burst, num_blocks=400, watermark=watermark)[1] for watermark in watermarks}
print("watermark  steps  tokens computed     recomputed  preempted")
for watermark, totals in outcomes.items():
    numbers = f"{totals['steps']:6} {totals['tokens']:16,} {totals['recomputed']:14,} {totals['preempted']:10}"
    print(f"{watermark:9.0%} {numbers}")

# %% [markdown]
# With no reserve, sequences are admitted, preempted and admitted again. The recomputed tokens are nearly half as many
# as the requests need. With a large reserve, no sequence is preempted, but some of the memory stays unused. Where is
# the optimum? Measured in steps, it is near 0 %; measured in computed tokens, it is above 10 %. Each answer is right
# for some machine. On an accelerator below its ridge point, a step takes the same time for any number of tokens, so
# only the steps count, and recomputing is nearly free. On our CPU, every token takes time, so recomputing is expensive.
#
# ## Which request goes first?
#
# The last choice is the order of the queue. *First come, first served* is fair and easy to explain. But a short request
# behind a long one waits for all of it. `admission="shortest"` admits the shortest prompt first, and
# `admission="priority"` admits the request with the smallest priority number first. We simulate 600 requests, nine out
# of ten of them short, which arrive slightly more slowly than they can be served. One in five has paid for priority:

# %%
count = 600
short_ones = random.random(count) < 0.9
prompt_lengths = np.where(short_ones, random.integers(20, 120, count), random.integers(2000, 4000, count))
answer_lengths = random.geometric(1 / 20, count)
paid = random.random(count) < 0.2
gaps = random.exponential(1.03 * (prompt_lengths + answer_lengths).mean() / 256, count)
arrivals = np.cumsum(gaps).astype(int)
requests = [
    (int(step), int(prompt), int(answer), int(not first))
    for step, prompt, answer, first in zip(arrivals, prompt_lengths, answer_lengths, paid, strict=True)
]
groups = {"all": short_ones | True, "short": short_ones, "long": ~short_ones, "paid": paid, "unpaid": ~paid}
waits_of = {admission: replay(requests, admission=admission)[0] for admission in ("fcfs", "shortest", "priority")}
print("steps until the first token: mean and maximum")
print(" " * 9, *(f"{name:>8}    max" for name in groups))
for admission, waits in waits_of.items():
    print(f"{admission:9}", *(f"{waits[group].mean():8.0f} {waits[group].max():6.0f}" for group in groups.values()))

# %%
if plt:
    figure, axes = plt.subplots(figsize=(6.5, 3.8), num="who-waits", layout="constrained")
    percents = np.linspace(0, 100, 201)
    for (admission, waits), colour, style in zip(
        waits_of.items(), ("#555555", "#D55E00", "#0072B2"), ("-", "--", "-."), strict=True
    ):
        values = [percentile(waits.tolist(), percent) for percent in percents]
        axes.semilogy(percents, values, style, color=colour, linewidth=2, label=admission)
    axes.set(xlabel="percentile of the requests", ylabel="steps until the first token")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    axes.set_title("The same requests under three orders of admission")

# %% [markdown]
# *Shortest* cuts the mean wait to a quarter, and short requests wait only a few steps. But a long request waits until
# no shorter request is left. The longest wait is four times the longest wait under *first come, first served*, and in a
# service with a queue that never empties, a long request could wait forever. By the mean, and even by the 95th
# percentile, *shortest* is clearly best; only the right end of the figure shows its cost. With *priority*, paid
# requests wait a fifth as long, and the others a seventh longer. This cost is small while few requests have priority;
# if all have it, none gains. The two orders also differ in the total. Serving short requests first reduces the *sum* of
# all waits: one request waiting for ten short ones is better than ten requests waiting for a long one. Priority only
# moves waiting time from some requests to others.
#
# ## What production systems do differently
#
# - **Chunked prefill is the default.** [Sarathi-Serve](https://arxiv.org/abs/2403.02310) (Agrawal et al. 2024)
#   introduced steps that schedule decodes first and fill the remaining budget with prompts. For Mistral 7B on one A100,
#   it reports serving 2.6 times the requests of vLLM at the same limit on tail latency. vLLM now [does the
#   same](https://docs.vllm.ai/en/stable/configuration/optimization/), and its budget is `max_num_batched_tokens`.
# - **No preemption, or swapping.** By default,
#   [TensorRT-LLM](https://nvidia.github.io/TensorRT-LLM/performance/performance-tuning-guide/useful-runtime-flags.html)
#   admits a request only if memory for all of its tokens is guaranteed (`GUARANTEED_NO_EVICT`). `MAX_UTILIZATION`
#   admits more requests and may have to pause some. [Kwon et al. 2023](https://arxiv.org/abs/2309.06180) (section 4.5)
#   compare recomputing with copying blocks to the host and back.
# - **Two machines instead of one budget.** [DistServe](https://arxiv.org/abs/2401.09670) computes prefill and decode on
#   different GPUs. Neither phase then delays the other, and each machine can be tuned for its phase.
# - **Fairness between customers.** First come, first served favours the customer who sends the most requests. [Sheng et
#   al. 2024](https://arxiv.org/abs/2401.00588) count the tokens served per customer and admit requests of the customer
#   with the fewest. [FastServe](https://arxiv.org/abs/2305.05920) preempts running sequences so that short answers
#   overtake long ones, although their lengths are not known in advance.
#
# ## Exercises
#
# Write the functions in [exercises.py](exercises.py), and test them with `pytest lessons/09_scheduling`. The answers to
# the first two exercises are quoted above.
#
# 1. `_schedule_chunk`: schedule the next chunk of a prompt. How many tokens may the chunk have?
# 2. `_ensure_blocks`: get blocks for a sequence's next tokens. Which sequences must be preempted to free blocks?
# 3. `percentile`: compute a percentile, such as the 95th, of measured times.
