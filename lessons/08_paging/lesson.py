# %% [markdown]
# # 8. Paging
#
# **How do block tables end fragmentation and share prefixes?**
#
# Lesson 7 filled the batch until memory was full. So whoever wastes memory wastes seats. We first count how much of it
# is lost when every request gets one unbroken stretch, then cut memory into blocks and count again. Once tables say
# where a text lies, two may name the same block: what one user has computed, another need not. That takes an index of
# what is known, a rule for what to forget, and some care about who may write where.

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
    print("no Matplotlib here, so no figures")

# %% [markdown]
# ## Who needs how much?
#
# It all depends on lengths, so let us have realistic ones. Microsoft has published [the lengths of 19,366
# requests](https://github.com/Azure/AzurePublicDataset/blob/master/AzureLLMInferenceDataset2023.md) to a chat service
# ([Patel et al. 2023](https://arxiv.org/abs/2311.18677)). We do not need the file: below are a few of its quantiles,
# and we draw between them. A prompt says how long it is. An answer does not; nobody knows before it has ended.

# %%
shares = (0, 0.05, 0.25, 0.5, 0.75, 0.95, 1)
prompt_quantiles = (20, 181, 396, 1020, 1189, 4083, 4142)  # the shortest and the longest are rounded
answer_quantiles = (10, 41, 85, 129, 395, 451, 1000)

random = np.random.default_rng(0)
prompts = np.interp(random.random(400), shares, prompt_quantiles).astype(int)
answers = np.interp(random.random(400), shares, answer_quantiles).astype(int)
for name, lengths in (("prompts", prompts), ("answers", answers), ("together", prompts + answers)):
    quarters = np.quantile(lengths, (0.25, 0.5, 0.75)).astype(int)
    print(f"{name:9} mean {lengths.mean():5.0f}, quartiles {quarters}, longest {lengths.max()}")

# %% [markdown]
# ## One stretch each
#
# Memory for 65,536 positions (8.6 GB for Llama 3.1 8B in 16 bits, 3 GB for our model in float32), and a queue of 400
# requests. Each gets one unbroken stretch as soon as one is free, adds a token in every step, and gives it back at its
# end. How long should the stretch be? As long as any request may ever get; or the prompt, and the longest answer; or,
# if an oracle tells us, exactly what will be needed.

# %%
pool = 65_536


def contiguous(reserve):
    """Mean shares of the pool, while anyone waits: tokens held, tokens still to come, never used, holes; and seats."""
    waiting = list(zip(prompts.tolist(), answers.tolist(), strict=True))[::-1]
    running, seen = [], []  # running: [start, end, tokens, tokens at its end]
    while waiting:
        while waiting and (start := first_gap(running, size := reserve(*waiting[-1]))) is not None:
            prompt, answer = waiting.pop()
            running.append([start, start + size, prompt, prompt + answer])
        for stretch in running:
            stretch[2] += 1
        starts, ends, held, finally_held = np.array(running).sum(axis=0)
        reserved = ends - starts
        seen.append((held, finally_held - held, reserved - finally_held, pool - reserved, len(running)))
        running = [stretch for stretch in running if stretch[2] < stretch[3]]
    return np.mean(seen, axis=0)


def first_gap(running, size):
    """Where the first unbroken free stretch of `size` positions starts, or None."""
    at = 0
    for start, end, *_ in sorted(running):
        if start - at >= size:
            return at
        at = end
    return at if pool - at >= size else None


results = {
    "the longest there can be": contiguous(lambda prompt, answer: prompt_quantiles[-1] + answer_quantiles[-1]),
    "prompt + longest answer": contiguous(lambda prompt, answer: prompt + answer_quantiles[-1]),
    "what an oracle says": contiguous(lambda prompt, answer: prompt + answer),
}
head = "reserved                   tokens  to come  never used  holes   at once"


def row(name, result):
    tokens, to_come, unused, holes = result[:4] / pool
    return f"{name:25} {tokens:7.0%} {to_come:8.0%} {unused:11.0%} {holes:6.0%} {result[4]:9.1f}"


print(head, *(row(*item) for item in results.items()), sep="\n")

# %% [markdown]
# The first line is how models were served for years, and 29 % is in the range that [Kwon et al.
# 2023](https://arxiv.org/abs/2309.06180) found in the systems of their day: 20 to 38 %. Most of it is reserved for
# lengths that hardly anyone reaches. Yet the third line is the one to look at. Even an oracle, who reserves not one
# position too many, leaves a quarter unused: part of it waits for tokens to come, and part is *holes* between
# stretches, each too short for whoever is next. This is *fragmentation*, and no foresight helps against it.
#
# ## Blocks
#
# Operating systems had this trouble in the sixties, and solved it with pages: cut memory into pieces of one size, and
# let a table say which pieces, in which order, make up what a program takes for one stretch. A sequence's *block table*
# is just that (lesson 4). A free block is as good as any other, so there are no holes; a sequence takes the next only
# when it has filled the last, so nothing is reserved. In minillm, this is all it takes to grow:
#
# {{ source: minillm.engine.block_allocator.BlockAllocator.allocate }}
#
# The same requests and the same memory, now with the scheduler of the library. Without a model; it deals in integers.


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
        sequences = [scheduler.sequence(chunk) for chunk in plan.chunks]
        ends = [sequence.num_generated + 1 == sequence.max_tokens for sequence in sequences]
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
    labels, colours = ("tokens", "to come", "never used", "holes"), ("#0072B2", "#56B4E9", "#D55E00", "#DDDDDD")
    for label, colour, share, end in zip(labels, colours, shares, shares.cumsum(axis=0), strict=True):
        axes.barh(list(results), share, left=end - share, color=colour, label=label)
    axes.invert_yaxis()
    axes.set(xlabel="share of the memory, on average", xlim=(0, 1), title="What memory is filled with")
    figure.legend(frameon=False, ncols=4, loc="outside lower center")

# %% [markdown]
# From 29 % to 97 %, and from 12 seats to 40, on the same memory. What is left unused is the end of everyone's last
# block, half a block on average, and 1 % that the scheduler keeps as a reserve. The column on the right is the price of
# not reserving: now and then memory *is* full, and somebody has to give their blocks back and start over (lesson 9).
#
# Why not blocks of one token? Nothing would be wasted, but all that is done for a block (looking it up in attention,
# counting its owners) would be done for every token. Most systems take 16 to 64.
#
# ## Watch it happen
#
# Now with the model: three requests in a pool of 16 blocks of 4 positions, and a letter for every block that each has.

# %%


def new_engine(model=llm.transformer, **options):
    """An engine around a model, with a memory and a scheduler of its own, and the trace of what it does."""
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
    """A character a block: its owner, `*` if several share it, `~` if it is cached, `.` if it is free."""
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
# A's table goes on in what B has left. Its keys lie all over memory, and it does not notice.
#
# ## Two tables, one block
#
# Much of what a chat service is sent, it has been sent before: the system prompt, the document, everything said so far.
# Keys and values depend on nothing but the text up to their token (lesson 4). So a *full* block can serve every
# sequence that begins with the same text, if only it can be found. minillm keeps an index of full blocks by content, a
# tree: what a block holds is its own tokens *behind all that they follow*, so that the way down spells a beginning, and
# each node on it says which block that lies in ([prefix_index.py](../../minillm/engine/prefix_index.py)):
#
# {{ source: minillm.engine.prefix_index.PrefixIndex.follow }}
#
# A system prompt, and four questions one after another. The first computes all of it:

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
# Whole blocks only: the few tokens that two prompts share beyond the last full block are computed again. And are the
# answers those that would have come without an index? Once more, in blocks of other sizes, and without any sharing:


# %%
def answers_of(trace):
    return [(c.request_id, t.token_id, t.logprob) for record in trace for c in record.chunks for t in c.sampled]


for options in ({"block_size": 4}, {"block_size": 64}, {"prefix_caching": False}):
    other = ask_one_by_one(**options)
    found = sum(request.num_cached_tokens for request in request_metrics(other).values())
    print(f"{options}: {found} tokens found; same tokens and bits: {answers_of(other) == answers_of(trace)}")

# %% [markdown]
# ## At the same time
#
# A block may be found once it has been computed, and not before. What if two people ask at the same moment? Both
# compute everything; but when their blocks are full and turn out to be the same, the second table is pointed at the
# first's block, and gives its own back. Two questions come together, and two a step later:

# %%
engine, trace = new_engine(num_blocks=64)
for name, question in zip("ABCD", questions, strict=True):
    if name == "C":
        engine.step()  # C and D come a step later
    engine.add_request(llm.encode(system + question), short, request_id=name)
run(engine)
for step in (0, 1, 2, len(trace) - 1):
    record = trace.steps[step]
    print(f"step {step:2}  {pool_map(record)}  {record.pool.num_held} held, found {record.prefix_hits or 'nothing'}")

# %% [markdown]
# A and B have found nothing, for nothing was there. The step's budget (512 tokens) was enough for all of A's prompt and
# half of B's. C and D come when A is done, find all they have in common with it, and compute six tokens each. As B's
# blocks fill up, they are given back: 44 held, then 36, then 25. In the end three conversations hold one system prompt.
#
# ## Who may write?
#
# A shared block is full, so nobody has to write there, but for one case: three *completions* of a prompt (`n=3`) share
# its last block, too, and each has a next token to put there. Each gets a copy first, but the last: *copy-on-write*.

# %%
engine, trace = new_engine(num_blocks=24, block_size=4)
three = SamplingParams(temperature=0.9, seed=1, n=3, max_tokens=6, ignore_eos=True)
engine.add_request(llm.encode("In the middle of the night, the little lighthouse keeper heard a strange"), three)
run(engine)
for record in trace.steps[:3]:
    copies = [f"{copy.source} to {copy.target}" for copy in record.pool.copies]
    held = [count for count in record.pool.references if count]
    print(f"step {record.step}: owners of each block held {held}, copied {copies or 'none'}")

# %% [markdown]
# ## What to forget
#
# When a request ends, its blocks are *cached*: nobody holds them, but the index still finds them, until somebody needs
# the room. Then whoever has not been used for the longest time goes first. How much is worth keeping? That depends on
# what comes between two turns. 48 users share 256 tokens; each of their eight turns adds 100 to 400 of their own:

# %%
visits = [[] for _ in range(48)]  # by user, the prompts of each turn
for user in range(48):
    history = list(range(256))
    for _ in range(8):
        start = 1000 + 10_000 * user + len(history)  # so that no two users' tokens are the same
        history = history + list(range(start, start + int(random.integers(100, 400))))
        visits[user].append(history)
turns = {"one user after another": [prompt for prompts in visits for prompt in prompts]}
mixed = random.permutation(np.repeat(np.arange(48), 8))
turns["all mixed"] = [visits[user].pop(0) for user in mixed]  # each user's turns stay in order


def hit_rate(visits, num_blocks):
    """Share of all prompts' tokens found in a pool of blocks of 16, the requests coming one by one."""
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
# If a user's next turn comes at once, a pool that holds one conversation finds all that can be found. If 47 others come
# in between, all their histories must stay, and short of that, most memory is spent on remembering people who are about
# to be forgotten. So an index alone is not enough: *where* a request is sent, and *when*, decides what it finds.
#
# ## What nobody looks at any more
#
# In some layers a query sees only a *window* of the last few hundred positions. Such a layer's blocks can be given back
# while a sequence runs, as soon as no query to come sees any of them; its table keeps its length, with -1 for what is
# gone. But Gemma 3 has a window in five layers of six, and if a block held the keys of *all* layers, the sixth would
# keep it. So layers that see equally far form groups, a block holds one group's, and a table names a *row* of blocks,
# one of each group, for the same positions:
#
# {{ source: minillm.engine.block_table.BlockTable.free_before }}
#
# Our model, as if it had been made to see 32 positions in none, all, or five of six of its 30 layers:

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
print(np.array(traces["5 of 6"].steps[60].running[0].block_tables))  # a row per group; -1 is a freed block
print("same tokens and bits:", answers_of(traces["5 of 6"]) == answers_of(traces["5 of 6, kept"]))

# %% [markdown]
# With windows everywhere a text soon holds as much as it ever will; with five in six, a sixth of it grows on.
#
# ## What production systems do differently
#
# - **The index.** vLLM keys a block by a [hash of its tokens and its parent's
#   hash](https://docs.vllm.ai/en/latest/design/prefix_caching/), which fits into a table shared by many processes.
#   SGLang's [radix tree](https://arxiv.org/abs/2312.07104) finds prefixes of any length, and who finds most is next.
# - **Groups of layers.** vLLM has [the same](https://docs.vllm.ai/en/latest/design/hybrid_kv_cache_manager/).
# - **Page tables in hardware.** [vAttention](https://arxiv.org/abs/2405.04437) leaves the sequence in one stretch of
#   *virtual* memory and lets the GPU's own page tables do the rest, so that attention kernels need know nothing of it.
# - **More memory behind the memory.** What is evicted goes to the host's memory, a disk, or a machine next door:
#   [Mooncake](https://arxiv.org/abs/2407.00079), lesson 13. A router that knows who has what sends people there.
# - **Walls.** A hit is quicker, and quicker can be measured: [Gu et al. 2025](https://arxiv.org/abs/2502.07776) found
#   seven providers whose customers shared one cache, so that one could have learnt what another had asked. vLLM can add
#   a [salt](https://docs.vllm.ai/en/latest/design/prefix_caching/) to the hashes, for those who are to share.
#
# ## Exercises
#
# In [exercises.py](exercises.py); `pytest lessons/08_paging` tells you whether they are right.
#
# 1. `extend`: blocks for a table that grows. All that it needs or, if there are too few, none.
# 2. `follow`: how much of a prompt is known, down a tree of blocks that follow each other.
# 3. `own`: a copy of a shared block before it is written, and one owner fewer for the original.
