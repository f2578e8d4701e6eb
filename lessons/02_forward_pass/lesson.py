# %% [markdown]
# # 2. The forward pass
#
# **What does a transformer compute between a token and the next?**
#
# In lesson 1 `llm.logits` took token ids and returned scores, and we did not look inside. Now we do. We walk one prompt
# through one layer of the real model by hand, with nothing but NumPy, and check every step against what the library
# computes. Then we look at two things nobody programmed: what attention attends to, and where between the first layer
# and the last the answer appears.

# %%
import numpy as np

from minillm import LLM
from minillm.ops import reference as ops

llm = LLM(backend="numpy")  # the reference backend: plain NumPy, a few lines an operation
model, config = llm.transformer, llm.config
print(model)

# %% tags=["hidden"]
try:
    import matplotlib.pyplot as plt
except ImportError:
    plt = None
    print("no Matplotlib here, so no figures")

# %% [markdown]
# Shapes are written with the same letters in all of minillm. For this model and this prompt they are:

# %%
prompt = "The capital of France is"
ids = llm.encode(prompt)
tokens = [llm.tokenizer.token_text(token_id) for token_id in ids]
T, K = len(ids), config.head_dim
print(tokens)
for letter, value, meaning in (
    ("T", T, "tokens"),
    ("V", config.vocab_size, "vocabulary"),
    ("D", config.hidden_size, "hidden size: numbers that describe a token on its way"),
    ("L", config.num_layers, "layers"),
    ("H", config.num_heads, "query heads"),
    ("G", config.num_kv_heads, "key/value heads, each shared by H / G query heads"),
    ("K", config.head_dim, "numbers in a head"),
    ("F", config.intermediate_size, "feed-forward size"),
):
    print(f"{letter} {value:6}  {meaning}")

# %% [markdown]
# To compare with, here is the library's own pass. A `Batch` says which tokens stand where, a `KVCache` receives keys
# and values (lesson 4), and a *probe* is shown every intermediate result by name:

# %%
from minillm.model.batch import Batch, Chunk
from minillm.model.kv_cache import KVCache


def run_watched(text):
    ids = llm.encode(text)
    cache = KVCache.contiguous(config, length=len(ids))
    batch = Batch.from_chunks([Chunk(ids, start=0, block_tables=[[0]])], cache.block_size)
    seen = {}
    model.forward(batch, cache, every_token=True, probe=seen.__setitem__)
    return seen


seen = run_watched(prompt)


def agrees(ours, name):
    return ours.shape == seen[name].shape and np.allclose(ours, seen[name], rtol=1e-4, atol=1e-4)


print([name for name in seen if not name.startswith("layers.") or name.startswith("layers.0")])

# %% [markdown]
# ## A token becomes a vector
#
# The first step is a table look-up: row `i` of the embedding matrix is the vector of token `i`. From here on a token is
# D numbers, and every layer *adds* something to them. This running sum is called the residual stream.

# %%
x = ops.embed(ids, model.embedding)  # [T, D]
print(x.shape, agrees(x, "embedding"))

# %% [markdown]
# Each layer reads the stream through a norm, which brings every token's vector to the same size, so that a layer sees
# directions and not magnitudes. The weights then stretch each of the D components as training saw fit:
#
# {{ source: minillm.ops.reference.rms_norm }}

# %%
layer = model.layers[0]
normed = ops.rms_norm(x, layer.attention_norm.weight, config.norm_eps)  # [T, D]
print(normed.shape, agrees(normed, "layers.0.attention_norm"))

# %% [markdown]
# ## Tokens look at tokens
#
# So far each token knows only itself. Attention is the one place where information moves between tokens. Three matrices
# turn a token's vector into a *query* (what am I looking for?), a *key* (what do I offer?) and a *value* (what do you
# get?), each cut into heads of K numbers. There are nine query heads but only three key/value heads, because keys and
# values must be kept for later, and a third of them is a third of the memory (*grouped-query attention*).

# %%
q = ops.linear(normed, layer.q.weight).reshape(T, -1, K)  # [T, H, K]
k = ops.linear(normed, layer.k.weight).reshape(T, -1, K)  # [T, G, K]
v = ops.linear(normed, layer.v.weight).reshape(T, -1, K)  # [T, G, K]
print(q.shape, k.shape, v.shape)

# %% [markdown]
# A query and a key will be compared by their dot product, which knows nothing of *where* the two tokens stand. *Rotary
# embedding* puts that in: take the K numbers of a head as K/2 points in a plane, and turn each point by an angle that
# grows with the token's position, fast for the first pair, very slowly for the last.
#
# {{ source: minillm.ops.reference.rotate }}
#
# Why turn? Because if a query is turned by its position and a key by its own, their dot product depends on the
# *difference* of the angles alone. "Three tokens back" looks the same at position 5 and at position 1,005:

# %%


def score(query_at, key_at):
    """Query head 0 of ' is' against key head 0 of ' France', as if they stood at these positions."""
    turned_q = ops.rotate(q[4:5], *ops.rotary_angles([query_at], model.frequencies))
    turned_k = ops.rotate(k[3:4], *ops.rotary_angles([key_at], model.frequencies))
    return float(turned_q[0, 0] @ turned_k[0, 0]) / K**0.5


for query_at, key_at in ((5, 2), (105, 102), (1005, 1002), (5, 4), (1005, 1004)):
    print(f"positions {query_at:4} and {key_at:4}, {query_at - key_at} apart: {score(query_at, key_at):.2f}")

# %% [markdown]
# Now attention itself. Every query is compared with the keys of its own token and of those before it; softmax turns the
# scores into weights that sum to one; the result is the mean of the values under those weights.
#
# {{ source: minillm.ops.reference.score }}
#
# {{ source: minillm.ops.reference.attend }}

# %%
positions = np.arange(T)
angles = ops.rotary_angles(positions, model.frequencies)
q, k = ops.rotate(q, *angles), ops.rotate(k, *angles)
keys, values = k.swapaxes(0, 1), v.swapaxes(0, 1)  # [G, T, K], a head's keys side by side
gathered = ops.attend(q, keys, values, positions)  # [T, H, K]
print(gathered.shape, agrees(gathered, "layers.0.attention.gathered"))

# %% [markdown]
# Is the turning needed? Take the last token's attention and put the four tokens before it in reverse order. Without
# rotary angles it cannot notice; to it "dog bites man" is "man bites dog":

# %%
plain_q = ops.linear(normed, layer.q.weight).reshape(T, -1, K)
plain_k = ops.linear(normed, layer.k.weight).reshape(T, -1, K)
reversed_order = [3, 2, 1, 0, 4]


def last_token(order, turn):
    here_q, here_k = plain_q[order], plain_k[order]
    if turn:
        here_q, here_k = ops.rotate(here_q, *angles), ops.rotate(here_k, *angles)
    return ops.attend(here_q, here_k.swapaxes(0, 1), v[order].swapaxes(0, 1), positions)[-1]


for turn in (False, True):
    change = np.abs(last_token(reversed_order, turn) - last_token([0, 1, 2, 3, 4], turn)).max()
    print(f"rotary {turn!s:5}  largest change when the order is reversed: {change:.3f}")

# %% [markdown]
# ## Each token thinks for itself
#
# A last matrix mixes the heads, and the result is *added* to the stream. Then comes the second half of the layer, in
# which tokens do not see each other: two matrices widen D numbers to F, one result gates the other, and a third matrix
# brings F back to D. Three quarters of a layer's weights are in these three matrices.
#
# {{ source: minillm.ops.reference.swiglu }}

# %%
x = x + ops.linear(gathered.reshape(T, -1), layer.output.weight)  # [T, D]
normed = ops.rms_norm(x, layer.mlp_norm.weight, config.norm_eps)
gated = ops.swiglu(ops.linear(normed, layer.mlp.gate.weight), ops.linear(normed, layer.mlp.up.weight))  # [T, F]
x = x + ops.linear(gated, layer.mlp.down.weight)  # [T, D]
print(x.shape, agrees(x, "layers.0"))

# %% [markdown]
# That was a whole layer. The other 29 do the same with other weights. This is the library's pass, and there is now
# nothing in it that you have not done yourself:
#
# {{ source: minillm.model.transformer.Transformer.forward }}
#
# {{ source: minillm.model.transformer.Transformer._layer }}
#
# (A *fused* layer is the same computation compiled in one piece, for speed; the reference backend has none, and with a
# probe nobody uses it.)
#
# At the end, the *head* compares the last vector with every row of a matrix [V, D]. In this model that matrix is the
# embedding again: the score of a token is how well the final vector points towards that token's own vector.

# %%
final = ops.rms_norm(seen["layers.29"], model.final_norm.weight, config.norm_eps)  # [T, D]
scores = ops.linear(final, model.head)  # [T, V]
probabilities = ops.softmax(scores[-1])
print(scores.shape, agrees(scores, "logits"))
for token_id in np.argsort(-probabilities)[:5]:
    print(f"{llm.tokenizer.token_text(token_id)!r:10} {probabilities[token_id]:.3f}")

# %% [markdown]
# ## What do heads look at?
#
# Nobody told any head what to look for. To see what one found, we need its attention weights, and the probe has been
# shown those, too.

# %%
text = "The wizard Zorbin met Kelda. Later the wizard Zorbin"
watched = run_watched(text)
labels = [llm.tokenizer.token_text(token_id) for token_id in llm.encode(text)]


def attention_weights(layer, head):
    return watched[f"layers.{layer}.attention.weights"][:, head]  # [T, T]


kinds = {"the token before": (16, 0), "what came next last time": (18, 6), "the first token": (18, 8)}
for index, head in kinds.values():
    weights = attention_weights(index, head)[-1]
    strongest = weights.argmax()
    print(f"layer {index} head {head}: {labels[-1]!r} gives {labels[strongest]!r} a weight of {weights[strongest]:.2f}")

# %%
if plt:
    figure, panels = plt.subplots(1, 3, figsize=(10, 4.4), sharey=True, num="three-heads", layout="constrained")
    for axes, (kind, (index, head)) in zip(panels, kinds.items(), strict=True):
        axes.imshow(attention_weights(index, head), cmap="Blues", vmin=0, vmax=1)
        axes.set_title(f"layer {index}, head {head}:\n{kind}", fontsize=10)
        axes.set_xticks(range(len(labels)), labels, rotation=90, fontsize=8)
        axes.set_yticks(range(len(labels)), labels, fontsize=8)
        axes.set_xlabel("looks at")
    panels[0].set_ylabel("this token")
    figure.suptitle("Three attention heads, each with a habit of its own")

# %% [markdown]
# Each row is a token, and its dark cell is where it looks. The first head nearly always looks one token back. The
# second does nothing (it looks at the first token) until the text repeats itself; then every token looks at *what
# followed it the first time*: the second `␣w` at `izard`, the second `izard` at `␣Z`. It is an *induction head*, and it
# is how the model can continue a name it has never been trained on ([Olsson et al.
# 2022](https://arxiv.org/abs/2209.11895)). The third looks at the first token whatever comes. Softmax weights must sum
# to one, so a head with nothing to say needs somewhere harmless to look: an *attention sink* ([Xiao et al.
# 2023](https://arxiv.org/abs/2309.17453)).
#
# ## Where does the answer appear?
#
# Every layer leaves a vector of the same kind in the stream. So we may ask early: apply the final norm and the head
# after *each* layer, as if the model ended there. This is the *logit lens* ([nostalgebraist
# 2020](https://www.lesswrong.com/posts/AcKRB8wDpdaN6v6ru/interpreting-gpt-the-logit-lens)). We measure *surprise* at
# the final answer, -log2 of its probability: 1 bit for the toss of a coin, 15.6 bits for a blind guess among 49,152.
# Before you read on, guess: does surprise shrink steadily from layer to layer?

# %%
from minillm.engine.sampling import log_softmax


def lens(text):
    """Log-probabilities of the next token [1 + L, V], read after the embedding and after each layer."""
    seen = run_watched(text)
    stream = [seen["embedding"][-1], *(seen[f"layers.{index}"][-1] for index in range(config.num_layers))]
    scores = ops.linear(ops.rms_norm(np.array(stream), model.final_norm.weight, config.norm_eps), model.head)
    return log_softmax(scores)


read = lens(prompt)
paris = int(read[-1].argmax())
print("after layer  best guess   surprise at ' Paris', bits")
for depth in (0, 10, 15, 20, 24, 26, 27, 28, 30):
    best = llm.tokenizer.token_text(int(read[depth].argmax()))
    print(f"{depth or 'embedding':>11}  {best!r:11} {-read[depth, paris] / np.log(2):9.1f}")

# %%
if plt:
    figure, axes = plt.subplots(figsize=(6.5, 3.8), num="logit-lens", layout="constrained")
    prompts = (prompt, "Monday, Tuesday, Wednesday, Thursday,", "To be, or not to")
    for text, colour, style in zip(prompts, ("#0072B2", "#D55E00", "#009E73"), ("-", "--", "-."), strict=True):
        read = lens(text)
        answer = int(read[-1].argmax())
        label = f"{text} [{llm.tokenizer.token_text(answer).strip()}]"
        axes.plot(range(1, 31), -read[1:, answer] / np.log(2), color=colour, linestyle=style, linewidth=2, label=label)
    axes.axhline(np.log2(config.vocab_size), color="#555555", linewidth=1, linestyle=":")
    axes.text(16, np.log2(config.vocab_size) + 1, "a blind guess", fontsize=9, color="#555555")
    axes.set(xlabel="layers done", ylabel="surprise at the answer, bits", ylim=(0, 100))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    axes.set_title("How surprised the model would be by its own answer, layer by layer")

# %% [markdown]
# It does not. For two thirds of the depth the lens reads blanks and full stops, and finds `Paris` and `Friday` *less*
# likely than a blind guess would: the stream is busy with something else. Nearly everything happens in the last eight
# layers. And `be`, from a phrase that the model knows by heart, is there five layers before `Paris`.
#
# One caution. The lens reads with a head that was trained for the last layer's vectors only, so "not yet readable" need
# not mean "not yet known". [Belrose et al. 2023](https://arxiv.org/abs/2303.08112) train a translator for each layer
# and find answers earlier.
#
# ## What does a token cost?
#
# Every number so far came out of a matrix product, and a matrix of n weights costs a token n multiplications and n
# additions, 2n floating-point operations. So counting parameters is counting work:

# %%
parameters = {"embedding and head": 0, "attention": 0, "mlp": 0, "norms": 0}
for name, shape in config.tensor_shapes().items():
    parts = {"embedding": "embedding and head", "norm": "norms", ".attention.": "attention", ".mlp.": "mlp"}
    part = next(part for mark, part in parts.items() if mark in name)
    parameters[part] += int(np.prod(shape))
total = sum(parameters.values())
for part, count in parameters.items():
    print(f"{part:18} {count / 1e6:6.2f} million, {count / total:4.0%}")
matrices = total - parameters["norms"]
print(f"{'in all':18} {total / 1e6:6.2f} million: {2 * matrices / 1e6:.0f} million operations a token")

# %% [markdown]
# Scoring keys and averaging values come on top, and they grow with the number of tokens before this one: 2 K operations
# a key for the score and 2 K for the value, in each head of each layer.

# %%
per_earlier_token = 4 * config.num_layers * config.num_heads * K
for length in (5, 1000, 8000):
    print(f"token {length:5}: attention adds {per_earlier_token * length / (2 * matrices):6.1%}")
print(f"attention doubles the work at token {2 * matrices / per_earlier_token:,.0f}")

# %% [markdown]
# For short texts, then, a token costs two operations a parameter, and the rest is small change. Remember that rule of
# thumb: later lessons lean on it.
#
# ## What production systems do differently
#
# - **Fewer, larger kernels.** vLLM's
#   [Llama](https://github.com/vllm-project/vllm/blob/main/vllm/model_executor/models/llama.py) multiplies by q, k and v
#   as one matrix and by gate and up as another, and adds the residual inside the norm: each kernel that is launched,
#   and each trip of an intermediate to memory and back, costs time. The mathematics is the same.
# - **Attention without the weights.** The T x T weights we drew are never stored.
#   [FlashAttention](https://arxiv.org/abs/2205.14135) goes through the keys in tiles, keeps a running maximum and sum,
#   and rescales what it has gathered so far whenever the maximum grows.
# - **Fewer bits.** Here everything is float32. On a GPU activations are bfloat16 or smaller, for the tensor cores and
#   for half the traffic.
# - **Other layers in the same places.** Mixtures of experts run a few of many feed-forward blocks for each token
#   ([Mixtral](https://arxiv.org/abs/2401.04088)); latent attention compresses keys and values
#   ([DeepSeek-V2](https://arxiv.org/abs/2405.04434)). The stream, and the loop around it, stay.
#
# ## Exercises
#
# In [exercises.py](exercises.py); `pytest lessons/02_forward_pass` tells you whether they are right. Their answers are
# quoted above, so close this page first.
#
# 1. `rms_norm`: one line, and two ways to get it subtly wrong.
# 2. `rotate`: the turning. Which number is the partner of which?
# 3. `attend`: all of attention, for one sequence, with shared key/value heads.
