# %% [markdown]
# # 8. Paging
#
# **How do block tables avoid fragmentation and let requests share a prefix?**
#
# In lesson 7, memory limited the size of a batch, so wasted memory means smaller batches. We first measure how much is
# lost when every request gets one contiguous region. Then we divide memory into blocks and measure again. Block tables
# also let two sequences list the same block, so that one reuses what the other has computed. Sharing blocks requires an
# index of cached prefixes, an eviction rule, and a rule for writing to shared blocks.

# %%
from dataclasses import replace

import numpy as np

from minillm import LLM, Engine, EngineConfig, SamplingParams
from minillm.checkpoints import open_checkpoint
from minillm.engine.block_allocator import BlockAllocator
from minillm.engine.scheduler import Scheduler
from minillm.engine.sequence import Sequence
from minillm.model.kv_cache import KVCache
from minillm.model.transformer import Transformer
from minillm.trace import SampledToken, Trace, request_metrics

llm = LLM()

# %% tags=["hidden"]
try:
    import matplotlib.pyplot as plt
except ImportError:
    plt = None
    print("Matplotlib is not installed, so there are no figures")

# %% [markdown]
# ## How much does each request need?
#
# Waste depends on the lengths of prompts and answers, so we use realistic ones. Microsoft has published [the lengths of
# 19,366 requests](https://github.com/Azure/AzurePublicDataset/blob/master/AzureLLMInferenceDataset2023.md) to a chat
# service ([Patel et al. 2023](https://arxiv.org/abs/2311.18677)). Instead of the file, we use a few of its quantiles
# and interpolate between them. The length of a prompt is known on arrival, the length of an answer only at its end.

# %%
shares = (0, 0.05, 0.25, 0.5, 0.75, 0.95, 1)
prompt_quantiles = (20, 181, 396, 1020, 1189, 4083, 4142)  # the minimum and maximum are rounded
answer_quantiles = (10, 41, 85, 129, 395, 451, 1000)

random = np.random.default_rng(0)
prompts = np.interp(random.random(400), shares, prompt_quantiles).astype(int)
answers = np.interp(random.random(400), shares, answer_quantiles).astype(int)
for name, lengths in (("prompts", prompts), ("answers", answers), ("together", prompts + answers)):
    quarters = np.quantile(lengths, (0.25, 0.5, 0.75)).astype(int)
    print(f"{name:9} mean {lengths.mean():5.0f}, quartiles {quarters}, longest {lengths.max()}")

# %% [markdown]
# ## One contiguous region per request
#
# The memory has room for 65,536 positions (8.6 GB for Llama 3.1 8B in 16 bits, 3 GB for our model in float32), and 400
# requests wait. Each gets a contiguous region as soon as one is free, fills one more position per step, and frees the
# region at its end. How large should the regions be? We try three rules.

# %%
pool = 65_536


def contiguous(reserve):
    """Return means: positions with tokens, for future tokens, never used, in holes; and the number of requests."""
    waiting = list(zip(prompts.tolist(), answers.tolist(), strict=True))[::-1]
    running, seen = [], []  # running: [start, end, tokens, tokens at the end]
    while waiting:
        while waiting and (start := first_gap(running, size := reserve(*waiting[-1]))) is not None:
            prompt, answer = waiting.pop()
            running.append([start, start + size, prompt, prompt + answer])
        for region in running:
            region[2] += 1
        starts, ends, held, finally_held = np.array(running).sum(axis=0)
        reserved = ends - starts
        seen.append((held, finally_held - held, reserved - finally_held, pool - reserved, len(running)))
        running = [region for region in running if region[2] < region[3]]
    return np.mean(seen, axis=0)


def first_gap(running, size):
    """Return the start of the first contiguous free region of `size` positions, or None."""
    free_from = 0
    for start, end, *_ in sorted(running):
        if start - free_from >= size:
            return free_from
        free_from = end
    return free_from if pool - free_from >= size else None


results = {
    "longest possible request": contiguous(lambda prompt, answer: prompt_quantiles[-1] + answer_quantiles[-1]),
    "prompt + longest answer": contiguous(lambda prompt, answer: prompt + answer_quantiles[-1]),
    "exact, from an oracle": contiguous(lambda prompt, answer: prompt + answer),
}
head = "reserved                   tokens   future  never used  holes  requests"


def row(name, result):
    tokens, future, unused, holes = result[:4] / pool
    return f"{name:25} {tokens:7.0%} {future:8.0%} {unused:11.0%} {holes:6.0%} {result[4]:9.1f}"


print(head, *(row(*item) for item in results.items()), sep="\n")

# %% [markdown]
# For years, models were served as in the first line. Its 29 % is within the 20 to 38 % that [Kwon et al.
# 2023](https://arxiv.org/abs/2309.06180) measured in the systems of their time. Most of the memory is reserved for
# lengths that few requests reach. But even an oracle that reserves exactly what is needed (the third line) leaves a
# quarter unused. Some of this quarter is reserved for future tokens. The rest consists of *holes* between regions, each
# too small for the next request. This is *fragmentation*, and knowing the lengths does not prevent it.
#
# ## Blocks
#
# Operating systems solved this problem in the 1960s with pages: memory is divided into pieces of one size, and a table
# lists the pieces that a program sees as one contiguous region. A sequence's *block table* does the same (lesson 4).
# All free blocks are equally good, so there are no holes. A sequence takes another block only when its last one is
# full, so nothing is reserved. In minillm, this method extends the tables:
#
# {{ source: minillm.engine.block_allocator.BlockAllocator.allocate }}
#
# We serve the same requests in the same memory with minillm's scheduler, which works with integers and needs no model.


# %%
def paged(block_size):
    blocks = BlockAllocator(pool // block_size, block_size)
    scheduler = Scheduler(blocks, max_batch_tokens=pool, max_sequences=400, prefix_caching=False)
    for n, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        scheduler.add(Sequence.from_prompt(str(n), [0] * int(prompt), int(answer)))
    seen, preempted = [], 0
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        preempted += len(plan.preempted)
        tokens, held = sum(chunk.stop for chunk in plan.chunks), blocks.num_held * block_size
        if scheduler.waiting:
            seen.append((tokens, 0, held - tokens, pool - held, len(plan.chunks)))
        ends = [s.num_generated + 1 == s.max_tokens for s in map(scheduler.sequence, plan.chunks)]
        scheduler.commit(plan, [[SampledToken(0, finish_reason="length" if end else None)] for end in ends])
    return np.mean(seen, axis=0), preempted


by_size = {block_size: paged(block_size) for block_size in (1, 16, 64, 256, 1024)}
print(head, "  preempted")
for block_size, (result, preempted) in by_size.items():
    print(row(f"blocks of {block_size}", result), f"{preempted:9}")
results["blocks of 16"] = by_size[16][0]

# %%
if plt:
    figure, axes = plt.subplots(figsize=(8, 3.2), num="where-memory-goes", layout="constrained")
    shares = np.array([result[:4] / pool for result in results.values()]).T
    labels, colours = ("tokens", "future tokens", "never used", "holes"), ("#0072B2", "#56B4E9", "#D55E00", "#DDDDDD")
    for label, colour, share, end in zip(labels, colours, shares, shares.cumsum(axis=0), strict=True):
        axes.barh(list(results), share, left=end - share, color=colour, label=label)
    axes.invert_yaxis()
    axes.set(xlabel="mean share of the memory", xlim=(0, 1), title="What the memory holds")
    figure.legend(frameon=False, ncols=4, loc="outside lower center")

# %% [markdown]
# With blocks of 16, tokens fill 97 % of the memory instead of 29 %, and 40 requests run at once instead of 12. The rest
# is a reserve of 1 % and the unused end of each sequence's last block, half a block on average. The last column is the
# cost of reserving nothing: when memory is full, a sequence must free its blocks and restart (lesson 9).
#
# Why not use blocks of one token? They waste nothing, but all work per block, such as the lookup in attention and the
# reference count, would be done for every token. Most systems use blocks of 16 to 64 tokens.
#
# ## Watch the pool
#
# Now we run the model on three requests, in a pool of 16 blocks of 4 positions. Letters mark each request's blocks:

# %%


def new_engine(model=llm.transformer, **options):
    """Return an engine with its own KV cache and scheduler, and the trace that records its steps."""
    options = EngineConfig(**{"num_blocks": 256} | options)
    cache = KVCache(model.config, options.num_blocks, options.block_size)
    engine = Engine(model, cache, options.scheduler(cache), tokenizer=llm.tokenizer)
    trace = Trace(engine.facts)
    engine.listeners.append(trace.append)
    return engine, trace


def run(engine):
    while engine.has_unfinished:
        engine.step()


def pool_map(record):
    """Return one character per block: the request that holds it, or `*` if shared, `~` if cached, `.` if free."""
    cells = ["."] * record.pool.num_blocks
    for sequence in record.running:
        for block in sequence.block_tables[0]:
            cells[block] = sequence.request_id if cells[block] == "." else "*"
    for block in record.pool.cached:
        cells[block] = "~"
    return "".join(cells)


engine, trace = new_engine(num_blocks=16, block_size=4, prefix_caching=False)
for name, length in (("A", 18), ("B", 5), ("C", 12)):
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    engine.add_request(llm.encode(f"Dear {name}, thank you for"), params, request_id=name)
run(engine)
for record in trace.steps[::3]:
    print(f"step {record.step:2}  {pool_map(record)} ", {s.request_id: s.block_tables[0] for s in record.running})

# %% [markdown]
# A's table continues with blocks that B has freed. A's keys are scattered over the pool, but A's answer does not
# change.
#
# ## Two tables, one block
#
# A chat service receives much of its input again and again: the system prompt, a document, the conversation so far.
# Keys and values depend only on the text up to their token (lesson 4). So every sequence that begins with the same text
# can use the same *full* block, if the block can be found. minillm keeps full blocks in an index, which is a tree. The
# content of a block depends on its own tokens *and all tokens before them*. So the path from the root to a node spells
# a prefix, and the node lists the last block of this prefix ([prefix_index.py](../../minillm/engine/prefix_index.py)):
#
# {{ source: minillm.engine.prefix_index.PrefixIndex.follow }}
#
# We ask four questions, one after another, with the same system prompt. The first request computes all of its tokens:

# %%
system = "You are a patient librarian. Answer in one sentence, name a book, and never make one up. " * 16
questions = ("Who wrote Emma?", "What is a sonnet?", "Who was Sappho?", "What is a haiku?")
short = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=True)


def ask_one_by_one(**options):
    engine, trace = new_engine(**options)
    for question in questions:
        engine.add_request(llm.encode(system + question), short)
        run(engine)
    return trace


trace = ask_one_by_one()
metrics = request_metrics(trace)
print("request  prompt  found  computed")
for request in metrics.values():
    found = request.num_cached_tokens
    print(f"{request.request_id:7} {request.num_prompt_tokens:7} {found:6} {request.num_prompt_tokens - found:9}")

# %% tags=["timing"]
print("ms to the first token:", *(f"{1000 * request.ttft:.0f}" for request in metrics.values()))

# %% [markdown]
# Only whole blocks are found: tokens that two prompts share beyond the last full block are computed again. Are the
# answers the same as without an index? We repeat the run with other block sizes, and without prefix caching:


# %%
def answers_of(trace):
    return [(c.request_id, t.token_id, t.logprob) for record in trace for c in record.chunks for t in c.sampled]


for options in ({"block_size": 4}, {"block_size": 64}, {"prefix_caching": False}):
    other = ask_one_by_one(**options)
    found = sum(request.num_cached_tokens for request in request_metrics(other).values())
    print(f"{options}: found {found} tokens; same tokens and bits: {answers_of(other) == answers_of(trace)}")

# %% [markdown]
# ## At the same time
#
# What happens if two requests with the same prefix arrive at the same time? Both compute the whole prefix. But when
# blocks with the same content are full, the second request's table switches to the first request's blocks, and its own
# blocks are freed. Here two questions arrive together, and two more arrive one step later:

# %%
engine, trace = new_engine(num_blocks=64)
for name, question in zip("ABCD", questions, strict=True):
    if name == "C":
        engine.step()  # C and D arrive a step later
    engine.add_request(llm.encode(system + question), short, request_id=name)
run(engine)
for step in (0, 1, 2, len(trace) - 1):
    record = trace.steps[step]
    print(f"step {step:2}  {pool_map(record)}  {record.pool.num_held} held, found {record.prefix_hits or 'nothing'}")

# %% [markdown]
# A and B find nothing, because the cache is empty. The step's budget (512 tokens) covers all of A's prompt and half of
# B's. C and D arrive when A's prompt is done, find all blocks they share with A, and compute six tokens each. As B's
# blocks fill up, they are freed: 44 are held, then 36, then 25. At the end, three sequences share the system prompt.
#
# ## Copy-on-write
#
# A block in the index is full, so no sequence writes to it. But the *completions* of a prompt (here `n=3`) also share
# its last, partly filled block, and each writes its next token to it. All but the last copy it first: *copy-on-write*.

# %%
engine, trace = new_engine(num_blocks=24, block_size=4)
three = SamplingParams(temperature=0.9, seed=1, n=3, max_tokens=6, ignore_eos=True)
engine.add_request(llm.encode("In the middle of the night, the little lighthouse keeper heard a strange"), three)
run(engine)
for record in trace.steps[:3]:
    copies = [f"{copy.source} to {copy.target}" for copy in record.pool.copies]
    held = [count for count in record.pool.references if count]
    print(f"step {record.step}: references to each held block {held}, copied {copies or 'none'}")

# %% [markdown]
# ## Eviction
#
# When a request ends, its blocks are *cached*: no table lists them, but the index still finds them until the pool needs
# the space. The least recently used block is evicted first. How many blocks should the pool have? Below, the prompts of
# 48 users begin with the same 256 tokens, and each of a user's eight turns adds 100 to 400 tokens:

# %%
visits = [[] for _ in range(48)]  # for each user, the prompt of each turn
for user in range(48):
    history = list(range(256))
    for _ in range(8):
        start = 1000 + 10_000 * user + len(history)  # users share no other tokens
        history = history + list(range(start, start + int(random.integers(100, 400))))
        visits[user].append(history)
turns = {"one user after another": [prompt for prompts in visits for prompt in prompts]}
mixed = random.permutation(np.repeat(np.arange(48), 8))
turns["all users mixed"] = [visits[user].pop(0) for user in mixed]  # each user's turns stay in order


def hit_rate(visits, num_blocks):
    """Return the share of all prompt tokens that are found when requests run one by one; blocks have 16 positions."""
    blocks, found = BlockAllocator(num_blocks, 16), 0
    for prompt in visits:
        cached, node = blocks.match_prefix(prompt[:-1])
        found += cached[0].capacity
        tables = blocks.add_reference(cached)
        blocks.allocate(tables, len(prompt))
        for index in range(len(cached[0].blocks), len(prompt) // 16):
            node = blocks.publish(tables, index, prompt[16 * index : 16 * index + 16], node)
        blocks.free(tables)
    return found / sum(map(len, visits))


sizes = (200, 400, 800, 1600, 3200, 6400, 12800)
rates = {order: [hit_rate(visits, size) for size in sizes] for order, visits in turns.items()}
print("blocks                ", *(f"{size:6}" for size in sizes))
for order, values in rates.items():
    print(f"{order:22}", *(f"{value:6.0%}" for value in values))

# %% [markdown]
# If a user's next turn comes immediately, a pool that holds one conversation is large enough. If the turns of 47 other
# users come in between, the pool must hold the histories of all users. In a smaller pool, most conversations are
# evicted before their next turn. An index alone is not enough: *where* and *when* a request runs matters, too.
#
# ## Sliding windows
#
# In some layers, a query reads only a *window* of the last few hundred positions. The blocks of such a layer can be
# freed while the sequence runs, as soon as no later query reads them. The block table then lists -1. But in Gemma 3,
# only five of six layers have a window. If a block held the keys of *all* layers, the sixth would keep the block. So
# layers with the same window form *KV-cache groups*, each with its own blocks and its own table per sequence:
#
# {{ source: minillm.engine.block_table.BlockTable.free_before }}
#
# We give our model a window of 32 positions in no layer, in all layers, and in five of six (*kept* frees no block):

# %%
traces, tensors = {}, open_checkpoint(llm.path).tensors
long = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True, logprobs=True)
five = [layer for layer in range(30) if layer % 6 != 5]
for name, layers in (("none", []), ("all", range(30)), ("5 of 6", five), ("5 of 6, kept", five)):
    config = replace(llm.config, sliding_window=32, window_layers=tuple(layers))
    model = Transformer(config, lambda tensor: tensors[tensor].read(), llm.ops)
    engine, traces[name] = new_engine(model, block_size=8)
    cache = engine.kv_cache
    if name.endswith("kept"):
        engine.scheduler.blocks.windows = (None,) * cache.num_groups
    engine.add_request(llm.encode("Once upon a time"), long)
    run(engine)
    held = (traces[name].steps[step].pool.num_held * cache.bytes_per_block / 1e6 for step in (20, 60, 199))
    print(f"{name:12} {cache.num_groups} groups; MB held in step 20, 60, 199:", *(f"{size:4.1f}" for size in held))
print(np.array(traces["5 of 6"].steps[60].running[0].block_tables))  # one row per group; -1 marks a freed block
print("same tokens and bits:", answers_of(traces["5 of 6"]) == answers_of(traces["5 of 6, kept"]))

# %% [markdown]
# With windows in all layers, a sequence's memory soon stops growing. With five of six, a sixth of it keeps growing.
#
# ## What production systems do differently
#
# - **The index.** vLLM identifies a block by a [hash of its tokens and its parent's
#   hash](https://docs.vllm.ai/en/latest/design/prefix_caching/), which fits a table shared by many processes. SGLang's
#   [radix tree](https://arxiv.org/abs/2312.07104) finds prefixes of any length. The longest match is served first.
# - **Groups of layers.** vLLM has [similar groups](https://docs.vllm.ai/en/latest/design/hybrid_kv_cache_manager/).
# - **Page tables in hardware.** [vAttention](https://arxiv.org/abs/2405.04437) keeps a sequence contiguous in *virtual*
#   memory and uses the GPU's own page tables, so attention kernels need no block tables.
# - **More memory.** Some systems move evicted blocks to host memory, a disk, or another machine
#   ([Mooncake](https://arxiv.org/abs/2407.00079), lesson 13). A router can then choose a machine that has the prefix.
# - **Isolation.** A cache hit is measurably faster. [Gu et al. 2025](https://arxiv.org/abs/2502.07776) found seven
#   providers whose customers shared one cache, so that a customer could learn what others had asked. In vLLM, requests
#   with different [salts](https://docs.vllm.ai/en/latest/design/prefix_caching/) share no blocks.
#
# ## Exercises
#
# Write the functions in [exercises.py](exercises.py), and test them with `pytest lessons/08_paging`.
#
# 1. `allocate`: append all the blocks that a sequence's tables need or, if too few are available, none.
# 2. `follow`: find the longest known prefix of a prompt in a tree of blocks.
# 3. `copy_on_write`: replace a shared block before it is written, and remove one reference to the original.
