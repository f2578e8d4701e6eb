# %% [markdown]
# # 4. The KV cache
#
# **Why is generating the 100th token not 100 times the work? What does the memory cost?**
#
# The loop of lesson 1 computed the whole text again for every token it added. The library computed every token once,
# and gave the same answer. It may do so because of one property of the model, which we check to the last bit; and it
# pays for it in memory, which we count to the last byte. That memory, the KV cache, is what most of serving is about.

# %%
import textwrap

import numpy as np

from minillm import LLM, SamplingParams
from minillm.engine.block_allocator import BlockAllocator
from minillm.model.batch import Batch, Chunk
from minillm.model.kv_cache import KVCache

llm = LLM()
config = llm.config

# %% tags=["hidden"]
try:
    import matplotlib.pyplot as plt
except ImportError:
    plt = None
    print("no Matplotlib here, so no figures")

# %% [markdown]
# ## What does the past look like?
#
# In lesson 2, a token saw the tokens before it through one thing only: their keys and values, in every layer. So, when
# a text grows, the question is what happens to the keys and values that are already there. Let us compute a text alone
# and as the beginning of a longer one. A `KVCache` receives the keys of all layers, here as one unbroken stretch of
# memory, and a `Chunk` says where in the text its tokens stand:


# %%
def forward(ids, start, cache, table=(0,)):
    """Compute `ids`, which stand at positions `start` and up; return the scores [V] for what follows."""
    batch = Batch.from_chunks([Chunk(ids, start, [table])], cache.block_size)
    return llm.transformer.forward(batch, cache)[-1]


def compute(text):
    """The keys [L, G, K, T] and values [L, G, T, K] of a text, all of it in one pass."""
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
# Not one bit, in 30 layers. A token never looks ahead, so what comes later cannot change it. (That is a property of
# *these* models. In BERT every token sees all others, and a new word changes everything.) Does it follow that every
# token has its keys, whatever stands around it? Change one word near the beginning:

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
print("changed in all layers from 1 to 29, from the word on:", changed[1:, 3:].all())

# %% [markdown]
# In layer 0 a key depends on its own token alone. From layer 1 on, *every* later key has changed: attention has carried
# the news forward. So keys and values may be kept for as long as everything before them stays as it was, and not a
# token longer. Remember that rule; it decides below what two requests can share.
#
# ## Keep them
#
# Here is the loop again, twice. The two differ in one line: where they start to compute.

# %%
prompt, max_tokens = llm.encode("Once upon a time,"), 40


def generate(keep):
    """Greedy tokens and all their scores; how many tokens went through the transformer."""
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
# A twentieth of the work, and two million scores equal to the last bit. The first pass of the loop with the cache
# computes the prompt (*prefill*); each later pass computes one token (*decode*). They are the same function: the pass
# of lesson 2 asks the cache for the past, and does not mind how much of it there is.
#
# The last bit is a promise of minillm's kernels, not of arithmetic. Sums of floating-point numbers depend on their
# order, and a matrix library chooses another order for 1 row than for 40, so most engines get scores that are only
# close. Lesson 6 shows what it takes.
#
# ## The hundredth token
#
# Now count operations instead of tokens. Matrix products cost a token the same wherever it stands; attention costs it
# so much for each token it looks at, itself included. These functions count both from the model's shapes:
#
# {{ source: minillm.trace.roofline.attention_flops }}

# %%
from minillm.trace.roofline import attention_flops, head_flops, layer_flops


def with_cache(n):
    """Operations to compute the n-th token of a text, and the scores that follow from it."""
    return layer_flops(config) + head_flops(config) + n * attention_flops(config)


def without_cache(n):
    """The same, computing all n tokens."""
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
# So that is the first answer. With a cache the hundredth token costs 3 % more than the first, because it looks at a
# hundred tokens and not at one. Without, it costs nearly 80 times as much. The line with the cache is
# not flat, though: after a few thousand tokens looking back is most of the work, and each further token is dearer than
# the last.

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
# On the clock the gain is smaller than in operations: a pass over 100 tokens takes less than 100 times as long as a
# pass over one. Why, is lesson 5.
#
# ## Blocks
#
# Where should keys and values lie? The textbook's picture is a row for each sequence, as long as the sequence may ever
# become. But nobody knows how long an answer will be, and memory that is reserved and not used serves no one. So
# minillm cuts its memory into *blocks* of a few positions, and a sequence takes one when it has filled the last:

# %%
cache = KVCache(config, num_blocks=8, block_size=4)
print(cache)
print("keys   [N, L, G, K, B]", cache.keys.shape)
print("values [N, L, G, B, K]", cache.values.shape)
blocks = BlockAllocator(cache.num_blocks, cache.block_size)
first, second = blocks.new_tables(), blocks.new_tables()  # of two sequences that grow in turn
for length in range(1, 10):
    blocks.allocate(first, length)
    blocks.allocate(second, length)
print("block tables", first[0].blocks, "and", second[0].blocks)
print(blocks)

# %% [markdown]
# Position `p` of a sequence lies in block `table[p // B]`, at offset `p % B`. Nine positions take three blocks, the
# last of them nearly empty; less than a block is wasted a sequence. A batch turns tables into *slots*, the place of
# each token in the pool, and each layer writes its keys and values there:
#
# {{ source: minillm.ops.reference.write_kv }}
#
# Write nine tokens into the first sequence's blocks, and look at one of them:

# %%
nine = ids[:9]
batch = Batch.from_chunks([Chunk(nine, 0, [first[0].blocks])], cache.block_size)
seen = {}
llm.transformer.forward(batch, cache, probe=seen.__setitem__)
print("slots of the batch:       ", batch.slots[0].tolist())
print("slots that hold something:", np.flatnonzero(cache.values.any(axis=(1, 2, 4))).tolist())
block, offset = divmod(int(batch.slots[0, 5]), cache.block_size)
print(f"token 5, {tokens[5]!r}, lies in block {block} at offset {offset}. Layer 0, head 0:")
key, value = cache.keys[block, 0, 0, :, offset], cache.values[block, 0, 0, offset, :]
print(
    "its key  ", key[:4].round(2), "... is what was computed:", np.array_equal(key, seen["layers.0.attention.k"][5, 0])
)
print("its value", value[:4].round(2), "... too:", np.array_equal(value, seen["layers.0.attention.v"][5, 0]))

# %% [markdown]
# Why is the key's offset last, and the value's not? Because of what attention reads one after the other. It multiplies
# one component of the query with that component of *every key* in the block; and it adds up one *whole value* after
# another. Each array lies so that its reader walks along memory.
#
# Reading is writing in reverse. Gather the blocks that a table names, and attend as if they had never been apart:
#
# {{ source: minillm.ops.reference.attention }}
#
# And the textbook's contiguous row is nothing special: it is one block, as long as the sequence. The scores cannot
# tell.

# %%
whole = forward(nine, 0, KVCache.contiguous(config, length=9))
for block_size, table in ((9, [0]), (4, [6, 1, 3]), (2, [4, 3, 2, 1, 0]), (1, [8, 2, 5, 0, 1, 7, 3, 6, 4])):
    scores = forward(nine, 0, KVCache(config, num_blocks=9, block_size=block_size), table)
    print(f"blocks of {block_size}, table {table}: same bits {np.array_equal(scores, whole)}")

# %% [markdown]
# What such tables are good for (sequences that grow and end in any order, and share what they have in common) is
# lesson 8.
#
# ## What does it cost?
#
# A position takes a key and a value, of `K` numbers each, for each of `G` heads in each of `L` layers:


# %%
def bytes_per_token(layers, kv_heads, head_dim, bytes_per_number):
    return 2 * layers * kv_heads * head_dim * bytes_per_number


ours = bytes_per_token(config.num_layers, config.num_kv_heads, config.head_dim, 4)  # float32
print(f"{ours:,} bytes a token; the library says {llm.kv_cache.bytes_per_token:,}")
print(f"if each of the {config.num_heads} query heads had its own: {ours * config.num_heads // config.num_kv_heads:,}")
print(f"the model's file, {llm.path.stat().st_size / 1e6:.0f} MB, is as large as the cache of ", end="")
print(f"{llm.path.stat().st_size / ours:,.0f} tokens; its context is {config.context_length:,}")

# %% [markdown]
# Pause at the first number. The text of a token is about four bytes; what the model must remember of it is 46 thousand.
# Three query heads share each key/value head (*grouped-query attention*, [Ainslie et al.
# 2023](https://arxiv.org/abs/2305.13245)), or it would be 138 thousand. And half of it need not be kept:
# `EngineConfig(kv_dtype="float16")` has keys and values rounded to 11 bits. How much of it do the scores feel?

# %%
rounded = forward(nine, 0, half := KVCache.contiguous(config, length=9, dtype="float16"))
print(f"{half.bytes_per_token:,} bytes a token; the best token is the same: {rounded.argmax() == whole.argmax()}")
print(f"scores from {whole.min():.0f} to {whole.max():.0f} are off by {np.abs(rounded - whole).max():.2f} at most")

# %% [markdown]
# Little, but not nothing: float32 is the default. The formula for models that made history, in 16 bits, as is usual:

# %%
models = {  # L, H, G, K: from each paper's table of sizes
    "GPT-3 175B": (96, 96, 96, 128),
    "Llama 2 7B": (32, 32, 32, 128),
    "Llama 3.1 8B": (32, 32, 8, 128),
    "Llama 3.1 70B": (80, 64, 8, 128),
    "Llama 3.1 405B": (126, 128, 8, 128),
}
print("                 L    H    G    K  KB a token  saved by sharing  8,192 tokens")
for name, (layers, heads, kv_heads, head_dim) in models.items():
    size, shared = bytes_per_token(layers, kv_heads, head_dim, 2), heads // kv_heads
    row = f"{name:14} {layers:3} {heads:4} {kv_heads:4} {head_dim:4}"
    print(f"{row} {size / 1e3:11,.0f} {shared:16}x {size * 8192 / 1e9:10.1f} GB")

# %% [markdown]
# (Sizes from [Brown et al. 2020](https://arxiv.org/abs/2005.14165), table 2.1; [Touvron et al.
# 2023](https://arxiv.org/abs/2307.09288); [Llama 3, 2024](https://arxiv.org/abs/2407.21783), table 3.) A single text of
# 8,192 tokens would have taken 39 GB beside GPT-3's weights. Llama 3.1 70B is less than half as large a model, and
# takes a fourteenth of that. The cache is one of the few things about serving that is decided before training.

# %%
if plt:
    from minillm.view import plots

    figure, axes = plt.subplots(figsize=(7, 4.2), num="cache-size", layout="constrained")
    drawn = ("GPT-3 175B", "Llama 2 7B", "Llama 3.1 70B", "Llama 3.1 8B")
    sizes = {name: bytes_per_token(models[name][0], *models[name][2:], 2) for name in drawn}
    levels = {"all the memory of an 80 GB accelerator": 80e9, "our model's file": llm.path.stat().st_size}
    plots.kv_bytes(axes, sizes | {"our model, float32": ours}, levels)

# %% [markdown]
# Read the figure from the upper level line. What is left of an accelerator's memory, after the weights, is a number of
# *tokens*: it can be one user with a long document, or a hundred users with short chats. That number, and not
# arithmetic, is most often what limits how many can be served at once.
#
# ## One prompt, twice
#
# If keys and values depend on what came before and nothing else, they need not be thrown away when a request ends.
# A next request that *begins* the same way can have them. In a conversation that is always so, because each turn sends
# everything that was said:

# %%
params = SamplingParams(temperature=0.0, max_tokens=24, logprobs=True)
questions = ("What is the capital of South Korea?", "And of Japan?", "Which of them is larger?")
messages = []
llm.reset_prefix_cache()
print("turn  prompt  found in the cache  computed  memory held")
for turn, question in enumerate(questions, start=1):
    messages.append({"role": "user", "content": question})
    output = llm.chat(messages, params)
    messages.append({"role": "assistant", "content": output.text})
    metrics = output.metrics
    found, computed = metrics.num_cached_tokens, metrics.num_prompt_tokens - metrics.num_cached_tokens
    print(f"{turn:4} {metrics.num_prompt_tokens:7} {found:19} {computed:9} {metrics.kv_bytes / 1e6:9.2f} MB")

# %% [markdown]
# The prompts grow from turn to turn; what must be computed does not. Is the answer the same as one that was computed
# from nothing? Ask the last question again, after `reset_prefix_cache`:

# %%
llm.reset_prefix_cache()
fresh = llm.generate(output.prompt_token_ids, params)[0]
print("found in the cache:", fresh.metrics.num_cached_tokens)
print("same tokens:", fresh.token_ids == output.token_ids)
print("same log-probabilities, to the bit:", fresh.logprobs == output.logprobs)

# %% [markdown]
# What counts is where two prompts first differ. Anything that changes from request to request (the time, a user's name,
# the question) belongs at the end. Here are two questions about one document, asked in both orders:

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
# The same words, in another order, for a fraction of the price. What is found is a number of whole blocks, of 16
# tokens here, and it may have been computed for *anyone*: how that is looked up is lesson 8.
#
# ## What production systems do differently
#
# - **Blocks for everyone.** vLLM introduced block tables to serving ([Kwon et al.
#   2023](https://arxiv.org/abs/2309.06180)) and found that systems which reserve contiguous rows waste 60 to 80 % of
#   the cache. It finds common beginnings by [hashing each block together with all before
#   it](https://docs.vllm.ai/en/latest/design/prefix_caching/); SGLang keeps them in a [radix
#   tree](https://arxiv.org/abs/2312.07104). APIs pass part of the saving on, and bill prompt tokens that were found in
#   the cache at [a fraction](https://api-docs.deepseek.com/news/news0802) of the price.
# - **Fewer bits.** 16 bits a number are usual, and [8-bit
#   caches](https://docs.vllm.ai/en/latest/features/quantization/quantized_kvcache/) common;
#   [KIVI](https://arxiv.org/abs/2402.02750) goes to two. Half the bytes are twice the users.
# - **Fewer numbers.** DeepSeek-V3 keeps one compressed vector of 512 numbers and one small key of 64 for all its 128
#   heads ([section 4.2](https://arxiv.org/abs/2412.19437)): in 16 bits 70 KB a token, for a model of 671 billion
#   parameters. Mistral 7B looks back [4,096 tokens and no further](https://arxiv.org/abs/2310.06825) in each layer, so
#   that its cache stops growing.
# - **More places.** Blocks that nobody uses just now move to the host's memory, to disk, or to another machine
#   ([Mooncake](https://arxiv.org/abs/2407.00079)): lesson 13.
#
# ## Exercises
#
# In [exercises.py](exercises.py); `pytest lessons/04_kv_cache` tells you whether they are right. Both answers are
# quoted above.
#
# 1. `write_kv`: put each token's key and value into its slot.
# 2. `attention`: find them again through block tables, for a batch of several sequences.
