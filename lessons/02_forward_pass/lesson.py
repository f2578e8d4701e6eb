# %% [markdown]
# # 2. The forward pass
#
# **What does a transformer compute between one token and the next?**
#
# In lesson 1, `llm.logits` turned token ids into scores, and we did not look inside. Now we do. We compute one layer of
# the real model by hand for one prompt, with nothing but NumPy, and compare each step with the library's result. Then
# we examine two things that training, and not a programmer, has decided: what attention heads attend to, and at which
# layer the answer appears.

# %%
import numpy as np

from minillm import LLM
from minillm.ops import reference as ops

llm = LLM(backend="numpy")  # the reference backend: plain NumPy, a few lines per operation
model, config = llm.transformer, llm.config
print(model)

# %% tags=["hidden"]
try:
    import matplotlib.pyplot as plt
except ImportError:
    plt = None
    print("Matplotlib is not installed, so there are no figures")

# %% [markdown]
# minillm uses the same letters for shapes everywhere. For this model and this prompt, they have these values:

# %%
prompt = "The capital of France is"
ids = llm.encode(prompt)
tokens = [llm.tokenizer.token_text(token_id) for token_id in ids]
T, K = len(ids), config.head_dim
print(tokens)
for letter, value, meaning in (
    ("T", T, "tokens"),
    ("V", config.vocab_size, "vocabulary"),
    ("D", config.hidden_size, "hidden size: numbers that represent a token between layers"),
    ("L", config.num_layers, "layers"),
    ("H", config.num_heads, "query heads"),
    ("G", config.num_kv_heads, "key/value heads, each shared by H / G query heads"),
    ("K", config.head_dim, "numbers in a head"),
    ("F", config.intermediate_size, "feed-forward size"),
):
    print(f"{letter} {value:6}  {meaning}")

# %% [markdown]
# For comparison, we run the library's own pass. A `Batch` holds the tokens and their positions, and a `KVCache`
# receives the keys and values (lesson 4). A *probe* is a function that the pass calls with each intermediate result and
# its name:

# %%
from minillm.model.batch import Batch, Chunk
from minillm.model.kv_cache import KVCache


def run_with_probe(text):
    ids = llm.encode(text)
    cache = KVCache.contiguous(config, length=len(ids))
    batch = Batch.from_chunks([Chunk(ids, start=0, block_tables=[[0]])], cache.block_size)
    results = {}
    model.forward(batch, cache, every_token=True, probe=results.__setitem__)
    return results


results = run_with_probe(prompt)


def agrees(ours, name):
    return ours.shape == results[name].shape and np.allclose(ours, results[name], rtol=1e-4, atol=1e-4)


print([name for name in results if not name.startswith("layers.") or name.startswith("layers.0")])

# %% [markdown]
# ## A token becomes a vector
#
# The first step is a table lookup: row `i` of the embedding matrix is the vector of token `i`. From here on, each token
# is represented by D numbers, and every layer *adds* something to them. This running sum is called the *residual
# stream*.

# %%
x = ops.embed(ids, model.embedding)  # [T, D]
print(x.shape, agrees(x, "embedding"))

# %% [markdown]
# Each layer first normalizes the stream: it scales the vector of every token to the same size, so that the layer sees
# directions and not magnitudes. It then multiplies each of the D components by a learned weight:
#
# {{ source: minillm.ops.reference.rms_norm }}

# %%
layer = model.layers[0]
normed = ops.rms_norm(x, layer.attention_norm.weight, config.norm_eps)  # [T, D]
print(normed.shape, agrees(normed, "layers.0.attention_norm"))

# %% [markdown]
# ## Attention
#
# So far, each vector depends only on its own token. Attention is the only operation that moves information between
# tokens. Three matrices turn a token's vector into a *query* (what this token is looking for), a *key* (what it can be
# found by) and a *value* (what it passes on), each divided into heads of K numbers. There are nine query heads but only
# three key/value heads. Keys and values must be stored for later tokens, and a third of the heads takes a third of the
# memory (*grouped-query attention*).

# %%
q = ops.linear(normed, layer.q.weight).reshape(T, -1, K)  # [T, H, K]
k = ops.linear(normed, layer.k.weight).reshape(T, -1, K)  # [T, G, K]
v = ops.linear(normed, layer.v.weight).reshape(T, -1, K)  # [T, G, K]
print(q.shape, k.shape, v.shape)

# %% [markdown]
# A query and a key are compared by their dot product, which does not depend on the *positions* of the two tokens.
# *Rotary position embedding* adds this dependence. It treats the K numbers of a head as K/2 points in a plane and
# rotates each point by an angle that grows with the token's position: fast for the first pair, very slowly for the
# last.
#
# {{ source: minillm.ops.reference.rotate }}
#
# Why a rotation? If the query is rotated according to its position and the key according to its own, their dot product
# depends only on the *difference* of the angles. "Three tokens back" gives the same score at position 5 and at position
# 1,005:

# %%


def score(query_position, key_position):
    """Return the score of query head 0 of ' is' and key head 0 of ' France', as if they were at these positions."""
    rotated_q = ops.rotate(q[4:5], *ops.rotary_angles([query_position], model.frequencies))
    rotated_k = ops.rotate(k[3:4], *ops.rotary_angles([key_position], model.frequencies))
    return float(rotated_q[0, 0] @ rotated_k[0, 0]) / K**0.5


for i, j in ((5, 2), (105, 102), (1005, 1002), (5, 4), (1005, 1004)):
    print(f"positions {i:4} and {j:4}, {i - j} apart: {score(i, j):.2f}")

# %% [markdown]
# Now we can compute attention. Each query is compared with the keys of its own token and of all earlier ones. Softmax
# turns the scores into weights that sum to one, and the result is the mean of the values with these weights.
#
# {{ source: minillm.ops.reference.score }}
#
# {{ source: minillm.ops.reference.attend }}

# %%
positions = np.arange(T)
angles = ops.rotary_angles(positions, model.frequencies)
q, k = ops.rotate(q, *angles), ops.rotate(k, *angles)
keys, values = k.swapaxes(0, 1), v.swapaxes(0, 1)  # [G, T, K]
gathered = ops.attend(q, keys, values, positions)  # [T, H, K]
print(gathered.shape, agrees(gathered, "layers.0.attention.gathered"))

# %% [markdown]
# Is the rotation necessary? We compute the last token's attention again with the four tokens before it in reverse
# order. Without the rotation, the result is the same: attention could not distinguish "dog bites man" from "man bites
# dog".

# %%
plain_q = ops.linear(normed, layer.q.weight).reshape(T, -1, K)
plain_k = ops.linear(normed, layer.k.weight).reshape(T, -1, K)
reversed_order = [3, 2, 1, 0, 4]


def last_token(order, rotary):
    ordered_q, ordered_k = plain_q[order], plain_k[order]
    if rotary:
        ordered_q, ordered_k = ops.rotate(ordered_q, *angles), ops.rotate(ordered_k, *angles)
    return ops.attend(ordered_q, ordered_k.swapaxes(0, 1), v[order].swapaxes(0, 1), positions)[-1]


for rotary in (False, True):
    change = np.abs(last_token(reversed_order, rotary) - last_token([0, 1, 2, 3, 4], rotary)).max()
    print(f"rotary {rotary!s:5}  largest change when the order is reversed: {change:.3f}")

# %% [markdown]
# ## The feed-forward layer
#
# An output matrix combines the heads, and the result is *added* to the stream. The second half of the layer processes
# each token separately. Two matrices widen its D numbers to F, one result gates the other, and a third matrix returns
# to D numbers. These three matrices hold three quarters of a layer's weights.
#
# {{ source: minillm.ops.reference.swiglu }}

# %%
x = x + ops.linear(gathered.reshape(T, -1), layer.output.weight)  # [T, D]
normed = ops.rms_norm(x, layer.mlp_norm.weight, config.norm_eps)
gated = ops.swiglu(ops.linear(normed, layer.mlp.gate.weight), ops.linear(normed, layer.mlp.up.weight))  # [T, F]
x = x + ops.linear(gated, layer.mlp.down.weight)  # [T, D]
print(x.shape, agrees(x, "layers.0"))

# %% [markdown]
# This completes the first layer. The other 29 compute the same with other weights. Here is the library's pass. You have
# now computed each of its steps yourself:
#
# {{ source: minillm.model.transformer.Transformer.forward }}
#
# {{ source: minillm.model.transformer.Transformer._layer }}
#
# (Between the two, `_layers` calls `_layer` for one layer after another. For speed, the default backend can run all
# layers as one compiled, *fused* call instead, but not while a probe is set.)
#
# At the end, the *head* multiplies the last vector by a matrix [V, D]. In this model, this is the embedding matrix
# again, so the score of a token is the dot product of the final vector and the token's own embedding.

# %%
final = ops.rms_norm(results["layers.29"], model.final_norm.weight, config.norm_eps)  # [T, D]
scores = ops.linear(final, model.head)  # [T, V]
probabilities = ops.softmax(scores[-1])
print(scores.shape, agrees(scores, "logits"))
for token_id in np.argsort(-probabilities)[:5]:
    print(f"{llm.tokenizer.token_text(token_id)!r:10} {probabilities[token_id]:.3f}")

# %% [markdown]
# ## What do heads attend to?
#
# No programmer assigned a task to any head. To see what a head has learned, we need its attention weights, which the
# probe also receives.

# %%
text = "The wizard Zorbin met Kelda. Later the wizard Zorbin"
results_of_text = run_with_probe(text)
labels = [llm.tokenizer.token_text(token_id) for token_id in llm.encode(text)]


def attention_weights(layer, head):
    return results_of_text[f"layers.{layer}.attention.weights"][:, head]  # [T, T]


kinds = {"the previous token": (16, 0), "what followed last time": (18, 6), "the first token": (18, 8)}
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
        axes.set_xlabel("attends to")
    panels[0].set_ylabel("token")
    figure.suptitle("Attention weights of three heads")

# %% [markdown]
# Each row is a token, and its dark cell is the token it attends to most. The first head nearly always attends to the
# previous token. The second attends to the first token until the text repeats itself; then every token attends to *what
# followed it the first time*: the second `␣w` to `izard`, the second `izard` to `␣Z`. This is an *induction head*. With
# it, the model can continue a name that it has never seen in training ([Olsson et al.
# 2022](https://arxiv.org/abs/2209.11895)). The third head attends to the first token in any text. Softmax weights must
# sum to one, so a head that has nothing to contribute needs a harmless token to attend to: an *attention sink* ([Xiao
# et al. 2023](https://arxiv.org/abs/2309.17453)).
#
# ## Where does the answer appear?
#
# The stream has the same shape after every layer. So we can apply the final norm and the head after *each* layer, as if
# the model ended there. This is the *logit lens* ([nostalgebraist
# 2020](https://www.lesswrong.com/posts/AcKRB8wDpdaN6v6ru/interpreting-gpt-the-logit-lens)). We measure the *surprise*
# at the final answer, -log2 of its probability: 1 bit for a coin toss, 15.6 bits for a random guess among 49,152
# tokens. Make a guess before you read on: does the surprise shrink steadily from layer to layer?

# %%
from minillm.engine.sampling import log_softmax


def lens(text):
    """Return log-probabilities of the next token [1 + L, V], after the embedding and after each layer."""
    results = run_with_probe(text)
    stream = [results["embedding"][-1], *(results[f"layers.{index}"][-1] for index in range(config.num_layers))]
    scores = ops.linear(ops.rms_norm(np.array(stream), model.final_norm.weight, config.norm_eps), model.head)
    return log_softmax(scores)


log_probabilities = lens(prompt)
paris = int(log_probabilities[-1].argmax())
print("after layer  best guess   surprise at ' Paris', bits")
for depth in (0, 10, 15, 20, 24, 26, 27, 28, 30):
    best = llm.tokenizer.token_text(int(log_probabilities[depth].argmax()))
    print(f"{depth or 'embedding':>11}  {best!r:11} {-log_probabilities[depth, paris] / np.log(2):9.1f}")

# %%
if plt:
    figure, axes = plt.subplots(figsize=(6.5, 3.8), num="logit-lens", layout="constrained")
    prompts = (prompt, "Monday, Tuesday, Wednesday, Thursday,", "To be, or not to")
    for text, colour, style in zip(prompts, ("#0072B2", "#D55E00", "#009E73"), ("-", "--", "-."), strict=True):
        log_probabilities = lens(text)
        answer = int(log_probabilities[-1].argmax())
        label = f"{text} [{llm.tokenizer.token_text(answer).strip()}]"
        surprise = -log_probabilities[1:, answer] / np.log(2)
        axes.plot(range(1, 31), surprise, color=colour, linestyle=style, linewidth=2, label=label)
    axes.axhline(np.log2(config.vocab_size), color="#555555", linewidth=1, linestyle=":")
    axes.text(16, np.log2(config.vocab_size) + 1, "random guess", fontsize=9, color="#555555")
    axes.set(xlabel="layers computed", ylabel="surprise at the answer, bits", ylim=(0, 100))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    axes.set_title("Surprise at the final answer after each layer")

# %% [markdown]
# It does not. Over two thirds of the depth, the best guesses are blanks and full stops, and `Paris` and `Friday` are
# *less* likely than in a random guess: the stream represents something else. Nearly all of the change happens in the
# last eight layers. And `be`, from a phrase that the model has memorized, appears five layers before `Paris`.
#
# One caution: the head was trained only on vectors of the last layer. So an answer that the lens cannot read may still
# be present in the stream. [Belrose et al. 2023](https://arxiv.org/abs/2303.08112) train a translator for each layer
# and find answers earlier.
#
# ## What does a token cost?
#
# Nearly all of the work is matrix products. For each token, a matrix of n weights takes n multiplications and n
# additions, 2n floating-point operations. So counting parameters is counting operations:

# %%
parameters = {"embedding and head": 0, "attention": 0, "mlp": 0, "norms": 0}
for name, shape in config.tensor_shapes().items():
    parts = {"embedding": "embedding and head", "norm": "norms", ".attention.": "attention", ".mlp.": "mlp"}
    part = next(part for substring, part in parts.items() if substring in name)
    parameters[part] += int(np.prod(shape))
total = sum(parameters.values())
for part, count in parameters.items():
    print(f"{part:18} {count / 1e6:6.2f} million, {count / total:4.0%}")
matrices = total - parameters["norms"]
print(f"{'total':18} {total / 1e6:6.2f} million: {2 * matrices / 1e6:.0f} million operations per token")

# %% [markdown]
# Attention adds to this, and its cost grows with the number of earlier tokens. In each head of each layer, every key
# takes 2 K operations for its score and 2 K more for its value.

# %%
per_earlier_token = 4 * config.num_layers * config.num_heads * K
for length in (5, 1000, 8000):
    print(f"token {length:5}: attention adds {per_earlier_token * length / (2 * matrices):6.1%}")
print(f"attention doubles the work at token {2 * matrices / per_earlier_token:,.0f}")

# %% [markdown]
# For short texts, a token costs about two operations per parameter, and everything else is small in comparison. Later
# lessons rely on this rule of thumb.
#
# ## What production systems do differently
#
# - **Fewer, larger kernels.** vLLM's
#   [Llama](https://github.com/vllm-project/vllm/blob/main/vllm/model_executor/models/llama.py) multiplies by q, k and v
#   as one matrix and by gate and up as another, and it adds the residual inside the norm. Each kernel launch costs
#   time, and so does each transfer of an intermediate result to memory and back. The mathematics is the same.
# - **Attention without stored weights.** [FlashAttention](https://arxiv.org/abs/2205.14135) never stores the T x T
#   weights that we plotted. It processes the keys in tiles, keeps a running maximum and sum, and rescales its partial
#   result whenever the maximum grows.
# - **Fewer bits.** This lesson computes in float32. On a GPU, activations are bfloat16 or smaller, because the tensor
#   cores compute faster in these types and the memory traffic is halved.
# - **Other layers in the same places.** A mixture of experts computes only a few of many feed-forward layers for each
#   token ([Mixtral](https://arxiv.org/abs/2401.04088)), and latent attention compresses keys and values
#   ([DeepSeek-V2](https://arxiv.org/abs/2405.04434)). The residual stream and the generation loop stay the same.
#
# ## Exercises
#
# Write the functions in [exercises.py](exercises.py), and test them with `pytest lessons/02_forward_pass`. The answers
# are quoted above, so close this page first.
#
# 1. `rms_norm`: normalize and weight each row. Which axis is averaged, and where is `eps` added?
# 2. `rotate`: rotate the pairs of each head. Which two numbers form a pair?
# 3. `attend`: compute attention for one sequence whose query heads share key/value heads.
