# %% [markdown]
# # 9. Scheduling
#
# **What does a scheduler trade when it chunks, preempts and prioritises?**
#
# A scheduler computes nothing. It cannot make a machine faster or a memory larger; all it does is choose who goes next.
# So whatever it gives to one it takes from another, and the art is in knowing what is taken from whom. We look at its
# three choices in turn: how much of a prompt to read in a step, whom to send away when memory is full, and whom to let
# in first. For each we measure both sides of the bargain. One thing it never trades is the answers.

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
    """An engine around the same model, with a memory and a scheduler of its own, and the trace of what it does."""
    options = EngineConfig(**{"num_blocks": 128} | options)
    cache = KVCache(llm.config, options.num_blocks, options.block_size)
    engine = Engine(llm.transformer, cache, options.scheduler(cache), tokenizer=llm.tokenizer)
    trace = Trace(engine.facts)
    engine.listeners.append(trace.append)
    return engine, trace


def answers_of(trace):
    """Tokens and log-probabilities of each request."""
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
    print("no Matplotlib here, so no figures")

# %% [markdown]
# ## A stranger with a long letter
#
# Four people are reading their answers as they come, word by word. Then somebody sends a prompt of 512 tokens. We serve
# them under two policies: *continuous*, which reads prompts first and whole, and *chunked*, which gives every decode
# its token first, and fills what is left of a budget, here 64 tokens, with a piece of the prompt.

# %%
openings = [f"{place} is a city where" for place in ("Paris", "Cairo", "Lima", "Kyoto")]
letter = (llm.encode("I am writing to you because of the noise in the street at night. ") * 40)[:512]


def interrupt(**options):
    """Four answers under way, and after twelve steps a long prompt: the trace of it all."""
    engine, trace = new_engine(**options)
    for n, opening in enumerate(openings):
        params = SamplingParams(temperature=0.8, seed=n, max_tokens=48, ignore_eos=True, logprobs=True)
        engine.add_request(llm.encode(opening), params, request_id=f"reader {n}")
    for _ in range(12):
        engine.step()
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=True)
    engine.add_request(letter, params, request_id="stranger")
    while engine.has_unfinished:
        engine.step()
    return trace


whole = interrupt(policy="continuous", max_batch_tokens=1024)
pieces = interrupt(policy="chunked", max_batch_tokens=64)
for name, trace in (("continuous", whole), ("chunked, 64", pieces)):
    print(f"{name}: tokens of prompts + decodes, from step 11 on")
    for record in trace.steps[11:23]:
        prefill = sum(chunk.num_tokens for chunk in record.chunks if chunk.phase == "prefill")
        print(f"{prefill} + {record.num_tokens - prefill}", end="   ")
    print()
print("same tokens and bits:", answers_of(whole) == answers_of(pieces))

# %% [markdown]
# In the first run there is a step of 512 tokens in which no reader gets anything. In the second there are nine longer
# steps, and everybody gets a token in each. What does a reader feel?

# %% tags=["timing"]
print("ms               between a reader's tokens: median   longest   stranger's first token   all done after")
for name, trace in (("continuous", whole), ("chunked, 64", pieces)):
    metrics = request_metrics(trace)
    gaps = metrics["reader 0"].inter_token_latencies
    row = f"{1000 * percentile(gaps, 50):28.0f} {1000 * max(gaps):9.0f} {1000 * metrics['stranger'].ttft:24.0f}"
    print(f"{name:22} {row} {1000 * run_metrics(trace).seconds:16.0f}")

# %% tags=["timing"]
if plt:
    figure, axes = plt.subplots(figsize=(7, 3.6), num="one-readers-gaps", layout="constrained")
    for name, trace, colour, style in (("continuous", whole, "#D55E00", "--"), ("chunked, 64", pieces, "#0072B2", "-")):
        gaps = 1000 * np.array(request_metrics(trace)["reader 0"].inter_token_latencies)
        axes.semilogy(np.arange(1, len(gaps) + 1), gaps, style, color=colour, linewidth=2, label=name)
    axes.set(xlabel="token of the answer", ylabel="ms since the one before")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    axes.set_title("What one reader notices of a stranger's letter")

# %% [markdown]
# One long silence, or a stretch in which everything is a little slow. The median gap is the same, and so, nearly, is
# the time until all is done. What differs is the *longest* gap, and that is what a person notices: hence the high
# percentiles in every serious measurement. The stranger pays for it, a little, because the prompt now shares its steps
# with decodes.
#
# ## How large a piece?
#
# The budget bounds a step, and with it the time until anybody's next token. How small should it be? The scheduler's
# side of the question is a few words: a prompt advances by as much as the budget has left.
#
# {{ source: minillm.engine.scheduler.Scheduler._schedule_chunk }}

# %% tags=["timing"]
points = []
print("budget   steps until the stranger's first token   longest gap, ms   first token, ms   all done, ms")
for budget in (16, 32, 64, 128, 256, 1024):
    trace = interrupt(policy="chunked", max_batch_tokens=budget)
    metrics = request_metrics(trace)
    gap, ttft = 1000 * max(metrics["reader 0"].inter_token_latencies), 1000 * metrics["stranger"].ttft
    reading = sum(any(chunk.request_id == "stranger" and chunk.phase == "prefill" for chunk in r.chunks) for r in trace)
    points.append((budget, gap, ttft))
    print(f"{budget:6} {reading:25} {gap:33.0f} {ttft:17.0f} {1000 * run_metrics(trace).seconds:14.0f}")

# %% tags=["timing"]
if plt:
    figure, axes = plt.subplots(figsize=(6, 4), num="budgets", layout="constrained")
    _, gaps, ttfts = zip(*points, strict=True)
    axes.loglog(gaps, ttfts, "o-", color="#0072B2", linewidth=1.5)
    for budget, gap, ttft in points:
        axes.annotate(f"{budget}", (gap, ttft), textcoords="offset points", xytext=(6, 5), fontsize=9)
    axes.set(xlabel="longest gap of a reader, ms", ylabel="time to the stranger's first token, ms")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title("Whose time? Budgets from 16 to 1,024 tokens a step")

# %% [markdown]
# Downwards the curve is good for the stranger, to the left it is good for the readers, and a budget is a point on it.
# The right half costs the readers a great deal and gives the stranger little: above the ridge point (lesson 5) twice
# the tokens take twice the time, so large steps are no more efficient than middling ones. The left half costs the
# stranger more and more: a piece of four tokens reads all the weights for four tokens. A good budget is the smallest
# that still keeps the machine busy. On a CPU that is a few dozen tokens; on an accelerator, whose ridge lies at
# hundreds of tokens, it is 512 or 2,048.
#
# ## What does a policy buy?
#
# One stranger is an anecdote. What does each policy make of a crowd? Here is the same engine and scheduler around a
# *model* of a machine: it computes nothing, and its clock moves by what the roofline of lesson 5 says that each step
# would take at best, for Llama 3.1 8B in 16 bits on an H100 (lesson 7). No real machine is that good.
#
# {{ source: minillm.bench.serving.ImaginedTransformer.forward }}
#
# It is sent requests by 4, 16 or 64 clients, each of whom sends the next one when it has its answer:

# %%
from minillm.bench.serving import ImaginedEngine, serve_clients
from minillm.model.config import ModelConfig
from minillm.trace.roofline import ModelCosts, Roofline, head_flops, layer_flops

h100 = Roofline(bandwidth=3.35e12, peak=989e12)
llama = ModelConfig("llama", 128256, 4096, 14336, 32, 32, num_kv_heads=8, head_dim=128, context_length=131072)
costs = ModelCosts.of(llama, layer_flops(llama) + head_flops(llama), kv_bytes_per_token=2 * 32 * 8 * 128 * 2)
memory = {"num_blocks": 2000, "block_size": 64, "max_sequences": 64, "prefix_caching": False}


def serve(clients, **options):
    engine = ImaginedEngine(costs, h100, EngineConfig(**memory, **options))
    return run_metrics(serve_clients(engine, crowd, clients))


random = np.random.default_rng(0)
prompt_lengths = random.lognormal(5.5, 1, 96).clip(20, 4000).astype(int).tolist()
prompts = [[0] * length for length in prompt_lengths]
crowd = list(zip(prompts, random.geometric(1 / 32, 96).tolist(), strict=True))
budgets, loads = {"static": 4096, "continuous": 4096, "chunked": 512}, (4, 16, 64)
runs = {
    policy: {clients: serve(clients, policy=policy, max_batch_tokens=budget) for clients in loads}
    for policy, budget in budgets.items()
}
print("clients at once  tokens a second  ms: median TPOT, 95 %, median TTFT, 95 %")
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
    figure.suptitle("Latency against throughput for three policies, on a model of an H100")

# %% [markdown]
# Each line is a policy, each mark a number of people who want something at once. To the right is good for whoever pays
# for the machine, down is good for whoever waits. *Static* lies left of the others: its seats stand empty, and those
# who come late wait for the next crossing. *Chunked* makes more tokens a second than *continuous*, and makes them come
# more evenly: with 64 clients the slowest answers take an eighth of the time a token, since decodes ride along with the
# prompts, in steps that read the weights anyway. What that costs is on the right. With 64 clients the median first
# token comes more than twice as late, for prompts now share every step with all who decode.
#
# ## When memory is full
#
# With blocks, sequences are let in as long as *their present* fits (lesson 8). All of them grow, so it happens that one
# needs a block and there is none. Somebody must go. minillm sends away whoever was admitted last:
#
# {{ source: minillm.engine.scheduler.Scheduler._ensure_blocks }}
#
# *Preempted* means: its blocks are given back, its tokens are kept, and it goes to the head of the queue. When there is
# room again, it computes all its tokens anew, prompt and answer so far, in one prefill. Five requests in a pool of 14
# blocks of 4 positions: `#` prefill, `=` decode, `.` waiting, `!` preempted.

# %%
letters = "ABCDE"


def crowded(num_blocks, prefix_caching=False):
    engine, trace = new_engine(num_blocks=num_blocks, block_size=4, prefix_caching=prefix_caching)
    for n, name in enumerate(letters):
        params = SamplingParams(temperature=0.8, seed=n, max_tokens=20, ignore_eos=True, logprobs=True)
        engine.add_request(llm.encode(f"Dear {name}, thank you for"), params, request_id=name)
    while engine.has_unfinished:
        engine.step()
    return trace


def chart(trace):
    rows = {name: ["."] * len(trace) for name in letters}
    for step, record in enumerate(trace):
        for chunk in record.chunks:
            rows[chunk.request_id][step] = "#" if chunk.phase == "prefill" else "="
        for preemption in record.preempted:
            rows[preemption.request_id][step] = "!"
    for name, row in rows.items():
        print(f"  {name} {''.join(row).rstrip('.')}")


roomy, tight, remembering = crowded(64), crowded(14), crowded(14, prefix_caching=True)
chart(tight)
print("                           steps  preempted  computed again  most blocks held")
for name, trace in (("64 blocks", roomy), ("14 blocks", tight), ("14, with a prefix index", remembering)):
    metrics = run_metrics(trace)
    numbers = f"{metrics.num_steps:7} {metrics.num_preemptions:10} {metrics.num_recomputed_tokens:15}"
    print(f"{name:24} {numbers} {metrics.peak_blocks:17}")
print("same tokens and bits:", answers_of(roomy) == answers_of(tight) == answers_of(remembering))

# %% [markdown]
# Forty per cent of the memory that it would have liked, twice the steps, and the same answers to the last bit. (That is
# not to be taken for granted: what was computed token by token in decodes is computed again in one prefill, beside
# other neighbours. An engine whose kernels then add up in another order continues another text.) With the prefix index
# of lesson 8, what a preempted sequence gives back stays findable until somebody overwrites it. Here that saves next to
# nothing, and you can see why: it was sent away *because* memory was full.
#
# Why the last admitted? Because whoever has been at it for longest has most to lose; and because then the *first* one
# is never sent away. It goes on to its end, whatever happens, and then the next is the first. So everyone's turn comes.
# It is the whole proof that nobody starves.
#
# ## How many to let in?
#
# Preemptions can be avoided: keep some memory back for those who run. The `watermark` is the share of the pool that a
# newcomer must leave. Is it worth it? Here we need many requests and no model. Arrivals in steps, lengths in tokens;
# the scheduler plans, and somebody pretends to have computed:


# %%
def replay(requests, *, num_blocks=2000, **options):
    """Serve (arrival step, prompt length, answer length, priority); waits for the first token, and totals."""
    options = {"max_batch_tokens": 256, "max_sequences": 64, "prefix_caching": False} | options
    scheduler = Scheduler(BlockAllocator(num_blocks, 16), **options)
    step, waits, totals = 0, {}, {"steps": 0, "tokens": 0, "preempted": 0, "computed again": 0}
    arrivals = iter(enumerate(requests))
    next_one = next(arrivals, None)
    while next_one or scheduler.has_unfinished:
        while next_one and next_one[1][0] <= step:
            n, (_, prompt, answer, priority) = next_one
            scheduler.add(Sequence.from_prompt(str(n), [0] * prompt, answer, priority=priority))
            next_one = next(arrivals, None)
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
        totals["computed again"] += sum(preempted.num_computed for preempted in plan.preempted)
        totals["tokens"] += plan.num_tokens
        totals["steps"] = step = step + 1
    return np.array([waits[n] for n in range(len(requests))]), totals


random = np.random.default_rng(0)
rush = [
    (0, int(p), int(a), 0) for p, a in zip(random.integers(20, 200, 300), random.geometric(1 / 150, 300), strict=True)
]
marks = (0.0, 0.01, 0.05, 0.1, 0.2, 0.4, 0.6)
outcomes = {mark: replay(rush, num_blocks=400, watermark=mark)[1] for mark in marks}
print("watermark  steps  tokens computed  of them again  preempted")
for mark, totals in outcomes.items():
    numbers = f"{totals['steps']:6} {totals['tokens']:16,} {totals['computed again']:14,} {totals['preempted']:10}"
    print(f"{mark:9.0%} {numbers}")

# %% [markdown]
# With nothing held back, sequences are let in, sent away and let in again, and half as much work as was asked for is
# done a second time. With much held back, nobody is sent away, but seats stay empty that could have been used. Where is
# the best place? Read the steps, and it is near 0 %; read the tokens computed, and it is past 10 %. Both readings are
# right, on different machines: where a step costs the same for any number of tokens (an accelerator, left of its
# ridge), steps are time, and work done twice is nearly free; where each token costs (our CPU), it is not. It is the
# trade of overbooking a flight, and the answer depends on what it costs to rebook.
#
# ## Who goes first?
#
# Last, the queue. First come, first served is fair, and simple to explain. But a short request behind a long one waits
# for all of it. `admission="shortest"` lets in the shortest prompt, `"priority"` the smallest number. For 600 requests,
# nine in ten of them short, that arrive a little more slowly than they can be served; one in five has paid for
# priority:

# %%
count = 600
short_ones = random.random(count) < 0.9
prompt_lengths = np.where(short_ones, random.integers(20, 120, count), random.integers(2000, 4000, count))
answer_lengths = random.geometric(1 / 20, count)
paid = random.random(count) < 0.2
gaps = random.exponential(1.03 * (prompt_lengths + answer_lengths).mean() / 256, count)
arrivals = np.cumsum(gaps).astype(int)
day = [
    (int(at), int(prompt), int(answer), int(not first))
    for at, prompt, answer, first in zip(arrivals, prompt_lengths, answer_lengths, paid, strict=True)
]
groups = {"all": short_ones | True, "short": short_ones, "long": ~short_ones, "paid": paid, "unpaid": ~paid}
waits_of = {admission: replay(day, admission=admission)[0] for admission in ("fcfs", "shortest", "priority")}
print("steps until the first token, mean and worst")
print(" " * 9, *(f"{name:>8}  worst" for name in groups))
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
    axes.set_title("The same day under three orders of admission")

# %% [markdown]
# *Shortest* makes the mean wait a quarter of what it was. A short request hardly notices that anyone else is there; a
# long one waits until there is nobody shorter, and the unluckiest waited four times as long as anybody under *first
# come, first served*. In a service that never empties, it could be for ever. By its mean, and even by its 95th
# percentile, this order wins by far; only the right end of the figure shows who pays. With *priority*, those who have
# paid wait a fifth as long, and the others a seventh longer. That is cheap as long as few pay: if everybody does,
# nobody gains. Mind the difference between the two. Letting the short ones first makes the *sum* of all waits smaller,
# since it is better that one waits for ten than that ten wait for one; priority only moves waiting from some to others.
#
# ## What production systems do differently
#
# - **Chunks are the default.** [Sarathi-Serve](https://arxiv.org/abs/2403.02310) (Agrawal et al. 2024) introduced
#   decodes first and prompts in what is left, and reports 2.6 times the requests of vLLM at the same limit on tail
#   latency, for Mistral 7B on one A100. vLLM [does the
#   same](https://docs.vllm.ai/en/stable/configuration/optimization/) now; the budget is `max_num_batched_tokens`.
# - **Never preempt, or swap.**
#   [TensorRT-LLM](https://nvidia.github.io/TensorRT-LLM/performance/performance-tuning-guide/useful-runtime-flags.html)
#   by default admits a request only if it is sure to find memory to its very end (`GUARANTEED_NO_EVICT`), and overbooks
#   if told to (`MAX_UTILIZATION`). [Kwon et al. 2023](https://arxiv.org/abs/2309.06180) (section 4.5) compare
#   recomputing with copying the blocks to the host and back.
# - **Two machines instead of one budget.** [DistServe](https://arxiv.org/abs/2401.09670) computes prompts and answers
#   on different GPUs, so that neither waits for the other; each then has its own limit to be tuned for.
# - **Fairness between customers.** First come, first served favours whoever sends most. [Sheng et al.
#   2024](https://arxiv.org/abs/2401.00588) count the tokens that each customer has been served, and let in who has had
#   the least. [FastServe](https://arxiv.org/abs/2305.05920) preempts running answers, so that short ones overtake long
#   ones even though nobody knows lengths beforehand.
#
# ## Exercises
#
# In [exercises.py](exercises.py); `pytest lessons/09_scheduling` tells you whether they are right. The answers to the
# first two are quoted above.
#
# 1. `_schedule_chunk`: the next piece of a prompt. How long may it be?
# 2. `_ensure_blocks`: a block for the next token, whoever has to go.
# 3. `percentile`: the number by which a service is judged.
