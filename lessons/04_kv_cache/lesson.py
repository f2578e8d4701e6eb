# %% [markdown]
# # 4. The KV cache
#
# **Why is generating the 100th token not 100 times the work of the first? What does the memory cost?**
#
# The loop of lesson 1 computed the whole text again for every token it added. The library computed every token once and
# gave the same answer. A property of the model makes this possible, and we check it to the last bit. The price is
# memory, and we count it to the last byte. This memory is the KV cache, and most of serving is about it.

# %%
import textwrap

import numpy as np

from minillm import LLM, SamplingParams
from minillm.model.batch import Batch, Chunk
from minillm.model.kv_cache import KVCache

llm = LLM()
config = llm.config

# %% tags=["hidden"]
try:
    import matplotlib.pyplot as plt
except ImportError:
    plt = None
    print("Matplotlib is not installed, so there are no figures")

# %% [markdown]
# ## What does the past look like?
#
# In lesson 2, a token saw earlier tokens only through their keys and values, in every layer. So when a text grows, the
# question is what happens to the keys and values that already exist. We compute a text alone, and again as the
# beginning of a longer one. A `KVCache` stores the keys of all layers, here in one contiguous block of memory. A
# `Chunk` holds tokens and their position in the text:


# %%
def forward(ids, start, cache, table=(0,)):
    """Compute `ids`, which begin at position `start`; return the logits [V] for the next token."""
    batch = Batch.from_chunks([Chunk(ids, start, [table])], cache.block_size)
    return llm.transformer.forward(batch, cache)[-1]


def compute(text):
    """Return the keys [L, G, K, T] and values [L, G, T, K] of a text, computed in one pass."""
    ids = llm.encode(text)
    cache = KVCache.contiguous(config, length=len(ids))
    forward(ids, 0, cache)
    return cache.keys[0], cache.values[0]


short, long = "The capital of France is", "The capital of France is Paris. The capital of Italy is"
keys, values = compute(short)
longer_keys, longer_values = compute(long)
T = keys.shape[-1]
print(f"keys {keys.shape}, in the longer text {longer_keys.shape}")
print("keys that differ:", np.count_nonzero(keys != longer_keys[..., :T]))
print("values that differ:", np.count_nonzero(values != longer_values[:, :, :T]))

# %% [markdown]
# Not one bit differs, in 30 layers. A token never reads later positions, so later tokens cannot change its keys and
# values. (That is a property of *these* models. In BERT every token reads all others, and a new word changes
# everything.) Does a token then have the same keys in every text? Change one word near the beginning:

# %%
ids = llm.encode(long)
tokens = [llm.tokenizer.token_text(token_id) for token_id in ids]
other_keys, _ = compute(long.replace("France", "Spain"))
changed = (longer_keys != other_keys).any(axis=(1, 2))  # [L, T]
names = [token.strip() for token in tokens]
print("layer  ", *names)
for layer in (0, 1, 2, 29):
    marks = ["x" if flag else "" for flag in changed[layer]]
    print(f"{layer:5}  ", *(mark.center(len(name)) for mark, name in zip(marks, names, strict=True)))
print("changed in layers 1 to 29, for all tokens from the changed word on:", changed[1:, 3:].all())

# %% [markdown]
# In layer 0, a key depends only on its own token. From layer 1 on, *every* later key has changed, because attention
# passed the change on. So keys and values stay valid as long as everything before them stays the same, and no longer.
# Remember this rule; it decides below what two requests can share.
#
# ## Keep them
#
# Here is the loop in two versions. They differ in one line: the position at which they start to compute.

# %%
prompt, max_tokens = llm.encode("Once upon a time,"), 40


def generate(keep):
    """Return the greedy tokens, all their logits, and the number of tokens that were computed."""
    ids, rows, num_computed, work = list(prompt), [], 0, 0
    cache = KVCache.contiguous(config, length=len(prompt) + max_tokens)
    while len(rows) < max_tokens:
        start = num_computed if keep else 0
        rows.append(forward(ids[start:], start, cache))
        work += len(ids) - start
        num_computed = len(ids)
        ids.append(int(rows[-1].argmax()))
    return ids, np.array(rows), work


kept_ids, kept_scores, kept_work = generate(keep=True)
again_ids, again_scores, again_work = generate(keep=False)
print(f"tokens computed: {again_work} without a cache, {kept_work} with")
print(f"scores that differ: {np.count_nonzero(kept_scores != again_scores)} of {kept_scores.size:,}")
print(textwrap.fill(llm.tokenizer.decode(kept_ids), 100))

# %% [markdown]
# With the cache, the loop does a twentieth of the work, and two million scores are equal to the last bit. The first
# pass with the cache computes the prompt (*prefill*); each later pass computes one token (*decode*). Both are the same
# function: the forward pass of lesson 2 reads earlier keys and values from the cache, however many there are.
#
# Equal bits are a promise of minillm's kernels, not of arithmetic. Sums of floating-point numbers depend on their
# order, and a matrix library chooses one order for 1 row and another for 40. In most engines the scores are therefore
# only close. Lesson 6 shows how minillm makes them equal.
#
# ## The hundredth token
#
# Now count operations instead of tokens. Matrix products cost the same for every token. Attention costs a fixed amount
# for each token that is read, including the token itself. These functions count both from the model's shapes:
#
# {{ source: minillm.trace.roofline.attention_flops }}

# %%
from minillm.trace.roofline import attention_flops, head_flops, layer_flops


def with_cache(n):
    """Return the number of operations that compute the n-th token of a text and its logits."""
    return layer_flops(config) + head_flops(config) + n * attention_flops(config)


def without_cache(n):
    """Return the number of operations if all n tokens are computed again."""
    return n * layer_flops(config) + head_flops(config) + n * (n + 1) // 2 * attention_flops(config)


print("operations, millions: without a cache   with one   ratio")
for n in (1, 10, 100, 1000, 8000):
    again, once = without_cache(n), with_cache(n)
    print(f"token {n:5} {again / 1e6:26,.0f} {once / 1e6:10,.0f} {again / once:7,.0f}")
print(f"the 100th token costs {with_cache(100) / with_cache(1):.2f} times the first")

# %%
if plt:
    figure, axes = plt.subplots(figsize=(6.5, 4), num="work-per-token", layout="constrained")
    positions = np.unique(np.geomspace(1, config.context_length, 100).astype(int))
    for label, work, colour, style in (
        ("compute everything again", without_cache, "#D55E00", "--"),
        ("keep keys and values", with_cache, "#0072B2", "-"),
    ):
        axes.loglog(positions, [work(int(n)) for n in positions], style, color=colour, linewidth=2, label=label)
    axes.set(xlabel="position of the token in its text", ylabel="operations to compute it")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    axes.set_title("What one more token costs")

# %% [markdown]
# This answers the first question. With a cache, the hundredth token costs 3 % more than the first, because it reads a
# hundred tokens instead of one. Without a cache, it costs nearly 80 times as much. The line with the cache is not flat,
# though: after a few thousand tokens, attention is most of the work, and each further token costs more than the last.

# %% tags=["timing"]
from time import perf_counter


def seconds(ids, start, cache):
    begin = perf_counter()
    forward(ids, start, cache)
    return perf_counter() - begin


for n in (10, 100, 400):
    cache = KVCache.contiguous(config, length=n)
    text = (prompt * n)[:n]
    again = seconds(text, 0, cache)
    once = min(seconds(text[-1:], n - 1, cache) for _ in range(3))
    print(f"token {n:3}: {1000 * again:6.1f} ms without a cache, {1000 * once:5.1f} ms with")

# %% [markdown]
# Measured in time, the gain is smaller than in operations: a pass over 100 tokens takes less than 100 times as long as
# a pass over one. Lesson 5 explains why.
#
# ## Blocks
#
# Where should keys and values be stored? The textbook gives each sequence a row that is as long as the sequence may
# ever become. But the length of an answer is not known in advance, and memory that is reserved and not used is wasted.
# So minillm divides its memory into *blocks* of a few positions. A sequence takes a new block when its last one is
# full. A `BlockAllocator` hands out the blocks; a *block table* lists the blocks of one sequence in order:

# %%
from minillm.engine.block_allocator import BlockAllocator

cache = KVCache(config, num_blocks=8, block_size=4)
print(cache)
print("keys   [N, L, G, K, B]", cache.keys.shape)
print("values [N, L, G, B, K]", cache.values.shape)
allocator = BlockAllocator(cache.num_blocks, cache.block_size)
(first,), (second,) = allocator.new_tables(), allocator.new_tables()  # one table each, of two sequences
for length in range(1, 10):  # both grow by one position at a time
    allocator.allocate([first], length)
    allocator.allocate([second], length)
print("block tables", first.blocks, "and", second.blocks)
print(allocator)

# %% [markdown]
# Position `p` of a sequence is in block `table[p // B]`, at offset `p % B`. Nine positions take three blocks, and the
# last one is nearly empty: each sequence wastes less than one block. A batch turns tables into *slots*, which are the
# places of its tokens in the pool, and each layer writes its keys and values to these slots:
#
# {{ source: minillm.ops.reference.write_kv }}
#
# Write nine tokens into the first sequence's blocks, and look at one of them:

# %%
nine = ids[:9]
batch = Batch.from_chunks([Chunk(nine, 0, [first.blocks])], cache.block_size)
seen = {}
llm.transformer.forward(batch, cache, probe=seen.__setitem__)
print("slots of the batch:", batch.slots[0].tolist())
print("slots in use:      ", np.flatnonzero(cache.values.any(axis=(1, 2, 4))).tolist())
block, offset = divmod(int(batch.slots[0, 5]), cache.block_size)
print(f"token 5, {tokens[5]!r}, is in block {block} at offset {offset}. Layer 0, head 0:")
key, value = cache.keys[block, 0, 0, :, offset], cache.values[block, 0, 0, offset, :]
key_is_equal = np.array_equal(key, seen["layers.0.attention.k"][5, 0])
value_is_equal = np.array_equal(value, seen["layers.0.attention.v"][5, 0])
print("its key  ", key[:4].round(2), "... equals the computed one:", key_is_equal)
print("its value", value[:4].round(2), "... equals the computed one:", value_is_equal)

# %% [markdown]
# Why is the offset the last axis of the keys, but not of the values? Because of the order in which attention reads
# them. It multiplies one component of the query with that component of *every key* in the block, and it sums one *whole
# value* after another. Each array is laid out so that attention reads consecutive memory.
#
# Reading reverses writing. Gather the blocks that a table lists, then compute attention as if they had been contiguous:
#
# {{ source: minillm.ops.reference.attention }}
#
# The textbook's contiguous row is the special case of one block that is as long as the sequence. The scores do not
# depend on it:

# %%
whole = forward(nine, 0, KVCache.contiguous(config, length=9))
for block_size, table in ((9, [0]), (4, [6, 1, 3]), (2, [4, 3, 2, 1, 0]), (1, [8, 2, 5, 0, 1, 7, 3, 6, 4])):
    scores = forward(nine, 0, KVCache(config, num_blocks=9, block_size=block_size), table)
    print(f"blocks of {block_size}, table {table}: same bits {np.array_equal(scores, whole)}")

# %% [markdown]
# Lesson 8 shows what such tables make possible: sequences that grow and end in any order, and share their common
# blocks.
#
# ## What does it cost?
#
# A position takes a key and a value, of `K` numbers each, for each of `G` heads in each of `L` layers:


# %%
def bytes_per_token(layers, kv_heads, head_dim, bytes_per_number):
    return 2 * layers * kv_heads * head_dim * bytes_per_number


ours = bytes_per_token(config.num_layers, config.num_kv_heads, config.head_dim, 4)  # float32
print(f"{ours:,} bytes per token; the library computes {llm.kv_cache.bytes_per_token:,}")
print(f"if each of the {config.num_heads} query heads had its own: {ours * config.num_heads // config.num_kv_heads:,}")
print(f"the model's file, {llm.path.stat().st_size / 1e6:.0f} MB, is as large as the cache of ", end="")
print(f"{llm.path.stat().st_size / ours:,.0f} tokens; its context is {config.context_length:,}")

# %% [markdown]
# Pause at the first number. The text of a token is about four bytes; its keys and values take 46 thousand. Three query
# heads share each key/value head (*grouped-query attention*, [Ainslie et al. 2023](https://arxiv.org/abs/2305.13245));
# without sharing, they would take 138 thousand. Half of the bytes can be saved: `EngineConfig(kv_dtype="float16")`
# rounds keys and values to 11 significant bits. How much does this change the scores?

# %%
rounded = forward(nine, 0, half := KVCache.contiguous(config, length=9, dtype="float16"))
print(f"{half.bytes_per_token:,} bytes per token; the best token is the same: {rounded.argmax() == whole.argmax()}")
print(f"scores from {whole.min():.0f} to {whole.max():.0f} change by at most {np.abs(rounded - whole).max():.2f}")

# %% [markdown]
# The change is small but not zero, so float32 is the default. Here is the formula for some well-known models, in 16
# bits, as is usual:

# %%
models = {  # L, H, G, K: from each paper's table of sizes
    "GPT-3 175B": (96, 96, 96, 128),
    "Llama 2 7B": (32, 32, 32, 128),
    "Llama 3.1 8B": (32, 32, 8, 128),
    "Llama 3.1 70B": (80, 64, 8, 128),
    "Llama 3.1 405B": (126, 128, 8, 128),
}
print("                 L    H    G    K    KB/token  saved by sharing  8,192 tokens")
for name, (layers, heads, kv_heads, head_dim) in models.items():
    size, shared = bytes_per_token(layers, kv_heads, head_dim, 2), heads // kv_heads
    row = f"{name:14} {layers:3} {heads:4} {kv_heads:4} {head_dim:4}"
    print(f"{row} {size / 1e3:11,.0f} {shared:16}x {size * 8192 / 1e9:10.1f} GB")

# %% [markdown]
# (Sizes from [Brown et al. 2020](https://arxiv.org/abs/2005.14165), table 2.1; [Touvron et al.
# 2023](https://arxiv.org/abs/2307.09288); [Llama 3, 2024](https://arxiv.org/abs/2407.21783), table 3.) A single text of
# 8,192 tokens would have taken 39 GB in addition to GPT-3's weights. Llama 3.1 70B has a little less than half as many
# parameters, but its cache takes only a fourteenth of the memory. The size of the cache per token is one of the few
# properties of serving that are decided before training.

# %%
if plt:
    from minillm.view import plots

    figure, axes = plt.subplots(figsize=(7, 4.2), num="cache-size", layout="constrained")
    drawn = ("GPT-3 175B", "Llama 2 7B", "Llama 3.1 70B", "Llama 3.1 8B")
    sizes = {name: bytes_per_token(models[name][0], *models[name][2:], 2) for name in drawn}
    levels = {"all the memory of an 80 GB accelerator": 80e9, "our model's file": llm.path.stat().st_size}
    plots.kv_bytes(axes, sizes | {"our model, float32": ours}, levels)

# %% [markdown]
# Read the figure from the upper level line. The memory of an accelerator that the weights leave free holds a certain
# number of *tokens*: one user with a long document, or a hundred users with short chats. This number, and not
# arithmetic, most often limits how many users can be served at once.
#
# ## One prompt, twice
#
# Keys and values depend only on the tokens before them, so they need not be discarded when a request ends. A later
# request that *begins* the same way can reuse them. In a conversation this is always the case, because each turn sends
# all earlier messages again:

# %%
params = SamplingParams(temperature=0.0, max_tokens=24, logprobs=True)
questions = ("What is the capital of South Korea?", "And of Japan?", "Which of them is larger?")
messages = []
llm.reset_prefix_cache()
print("turn  prompt  found in the cache  computed  KV cache held")
for turn, question in enumerate(questions, start=1):
    messages.append({"role": "user", "content": question})
    output = llm.chat(messages, params)
    messages.append({"role": "assistant", "content": output.text})
    metrics = output.metrics
    found, computed = metrics.num_cached_tokens, metrics.num_prompt_tokens - metrics.num_cached_tokens
    print(f"{turn:4} {metrics.num_prompt_tokens:7} {found:19} {computed:9} {metrics.kv_bytes / 1e6:11.2f} MB")

# %% [markdown]
# The prompts grow from turn to turn, but the number of computed tokens does not. Is the answer the same as one that is
# computed from scratch? Ask the last question again, after `reset_prefix_cache`:

# %%
llm.reset_prefix_cache()
fresh = llm.generate(output.prompt_token_ids, params)[0]
print("found in the cache:", fresh.metrics.num_cached_tokens)
print("same tokens:", fresh.token_ids == output.token_ids)
print("same log-probabilities, to the bit:", fresh.logprobs == output.logprobs)

# %% [markdown]
# Reuse ends at the first difference between two prompts. Everything that changes from request to request (the time, a
# user's name, the question) belongs at the end. Here are two questions about one document, in both orders:

# %%
document = "The KV cache holds a key and a value for every token, in every layer. " * 8
asked = ("What does the cache hold?", "For which tokens?")
one_token = SamplingParams(temperature=0.0, max_tokens=1)
orders = {"document, then question": "{document}{question}", "question, then document": "{question} {document}"}
for label, order in orders.items():
    prompts = [llm.encode(order.format(document=document, question=question)) for question in asked]
    llm.reset_prefix_cache()
    metrics = [llm.generate(prompt, one_token)[0].metrics for prompt in prompts]
    counted = " and ".join(str(m.num_prompt_tokens - m.num_cached_tokens) for m in metrics)
    common = next(n for n, (ours, theirs) in enumerate(zip(*prompts, strict=False)) if ours != theirs)
    print(f"{label}: {common} tokens in common; computed {counted}")

# %% [markdown]
# In the first order, the same words cost far less to compute. The cache finds whole blocks only, of 16 tokens here, and
# they may have been computed for *any* earlier request. Lesson 8 explains how they are found.
#
# ## What production systems do differently
#
# - **Blocks everywhere.** vLLM introduced block tables to serving ([Kwon et al.
#   2023](https://arxiv.org/abs/2309.06180)), and found that systems which reserve contiguous rows waste 60 to 80 % of
#   the cache. It finds common prefixes by [hashing each block together with everything before
#   it](https://docs.vllm.ai/en/latest/design/prefix_caching/); SGLang keeps them in a [radix
#   tree](https://arxiv.org/abs/2312.07104). Some APIs pass part of the saving on, and charge [a
#   fraction](https://api-docs.deepseek.com/news/news0802) of the price for prompt tokens that were found in the cache.
# - **Fewer bits.** 16 bits per number are usual, and [8-bit
#   caches](https://docs.vllm.ai/en/latest/features/quantization/quantized_kvcache/) are common;
#   [KIVI](https://arxiv.org/abs/2402.02750) uses two. With half the bytes per token, the cache serves twice the users.
# - **Fewer numbers.** DeepSeek-V3 keeps one compressed vector of 512 numbers and one small key of 64 for all its 128
#   heads ([section 4.2](https://arxiv.org/abs/2412.19437)): 70 KB per token in 16 bits, for a model of 671 billion
#   parameters. In Mistral 7B, every layer reads only [the last 4,096 tokens](https://arxiv.org/abs/2310.06825), so its
#   cache stops growing.
# - **More storage.** Blocks that are not in use move to the host's memory, to disk, or to another machine
#   ([Mooncake](https://arxiv.org/abs/2407.00079)): lesson 13.
#
# ## Exercises
#
# Write the functions in [exercises.py](exercises.py), and test them with `pytest lessons/04_kv_cache`. Both answers are
# quoted above.
#
# 1. `write_kv`: write each token's key and value to its slot.
# 2. `attention`: read them through block tables, for a batch of several sequences.
