# %% [markdown]
# # 10. Debugging
#
# **How do I stop inside a decode step and inspect every intermediate result?**
#
# Bugs in numerical software are often silent. A wrong sign raises no exception; the text only gets a little worse, and
# it is hard to tell when this began. To find such a bug, we have to stop in the middle of the computation and inspect
# its state. In this lesson, we stop after each stage of a step with Python's own debugger, print intermediate results
# by name, and see which tokens an attention head attends to. Then we plant five bugs, see which of them a user would
# notice, and locate them.

# %%
import subprocess
import sys
from pathlib import Path

import numpy as np

import minillm
from minillm import LLM

llm = LLM()

# %% tags=["hidden"]
try:
    import matplotlib.pyplot as plt
except ImportError:
    plt = None
    print("Matplotlib is not installed, so there are no figures")

# %% [markdown]
# ## A step has five stages
#
# Every step of the engine consists of the same five calls:
#
# {{ source: minillm.engine.Engine.step }}
#
# *Schedule* decides which sequences advance, and by how many tokens. *Batch* lays these tokens end to end. *Forward*
# computes the logits of the next tokens. *Sample* chooses the tokens, and *commit* appends them and passes their text
# to the callers. One thread in one process runs all five stages in order. No work is pending elsewhere, so a debugger
# that stops between two stages sees the complete state.
#
# [examples/debug_decode.py](../../examples/debug_decode.py) writes out the same five stages, with a line marked STOP
# after each stage. It runs two requests up to a step that decodes one request and computes a chunk of the other's
# longer prompt. The session below is real: this lesson's script enters the commands.

# %%
ROOT = Path(minillm.__file__).parents[1]
EXAMPLE = ROOT / "examples" / "debug_decode.py"
stops = [n for n, line in enumerate(EXAMPLE.read_text().splitlines(), start=1) if "  # STOP " in line]


def pdb(*commands, options=()):
    """Run the example under pdb, enter the commands, and print the session without "Breakpoint 1 at ..."."""
    argv = [sys.executable, "-m", "pdb", str(EXAMPLE), "--quiet", *options]
    done = subprocess.run(argv, cwd=ROOT, input="\n".join([*commands, "quit\n"]), capture_output=True, text=True)
    outputs = done.stdout.split("(Pdb) ")[1:]
    if len(outputs) <= len(commands):
        raise RuntimeError(done.stdout + done.stderr)
    for command, output in zip(commands, outputs, strict=False):
        print(f"(Pdb) {command}")
        if output.strip() and not output.startswith("Breakpoint"):
            print(output.replace(f"{ROOT}/", "").rstrip())


in_the_second_step = [f"break {line}, record.step == 1" for line in stops]
pdb(
    *in_the_second_step,
    "continue",
    "p plan",
    "p plan.chunks",
    "continue",
    "p batch",
    "p batch.token_ids",
    "p batch.slots",
    "continue",
    "p logits.shape, len(seen)",
    "p seen['layers.29.attention.weights'][0].argmax(axis=1)",
    "continue",
    "p llm.tokenizer.token_text(tokens[0][0].token_id), tokens[1]",
    "continue",
    "p scheduler.running",
    "continue",
    "p record",
)

# %% [markdown]
# This session shows every stage of a step. The *plan* lists two chunks: one token of the request that decodes, and the
# first 15 tokens of the other request's prompt, because the step's budget is 16 here. In the *batch*, the chunks form
# one row. The first slot is in the first block and the others are in the next two; nothing else in these arrays
# separates the two sequences. The *forward* pass returns a row of logits for each chunk, and `seen` holds every
# intermediate result. Here we print the position that each of the last layer's nine heads attends to most while the
# first sequence decodes. *Sample* chooses only one token: the second prompt is not complete, so the token after its
# fifteenth is not needed. After *commit*, the first sequence is one token longer, and 15 tokens of the second have been
# computed. The *record* describes the step as plain data, from which every view, trace and metric is made (lesson 7).
#
# With a condition such as `record.step == 1`, the debugger stops only in the step of interest. Editors support
# conditions, too: in PyCharm, right-click a breakpoint. For VS Code, `.vscode/launch.json` contains configurations that
# run the example.
#
# ## Down into attention
#
# With the compiled backend, the debugger steps over a matrix product or an attention call as if it were one
# instruction. With `--backend numpy`, each operation is a few lines of Python
# ([ops/reference.py](../../minillm/ops/reference.py)), and the debugger can step into every operation. We stop after
# *batch*, set a breakpoint in `attend`, and continue:

# %%
pdb(
    in_the_second_step[1],
    "continue",
    "break llm.ops.attend",
    "continue",
    "next",
    "next",
    "next",
    "p weights.shape",
    "p weights[0].round(2)",
    "up",
    "p block_tables[sequence]",
    "up",
    "p name, q.shape",
    options=["--backend", "numpy"],
)

# %% [markdown]
# These are the weights of the decoding request in layer 0: nine heads, one query, six keys. `up` moves to the caller
# and its variables. The first `up` leads to `attention`, which has the block table of the sequence. The second leads to
# the transformer, where the tokens of both requests are still in one array. To find a bug in a kernel, set
# `NUMBA_DISABLE_JIT=1`. The compiled kernels then run as plain Python. This is slow, but you can step through them in
# the same way.
#
# ## Everything by name
#
# A debugger shows one point of the computation; a *probe* receives the results of all of it. `Transformer.forward(...,
# probe=show)` calls `show(name, array)` for every intermediate result. `llm.probe` returns all results for a prompt,
# and `engine.probe = show` sets the probe of a running engine. These are the names in one layer and outside the layers,
# with the shapes for five tokens:

# %%
prompt = "The capital of France is"
seen = llm.probe(prompt)
print(len(seen), "intermediates")
for name, value in seen.items():
    if "layers." not in name or name.startswith("layers.7"):
        print(f"{name:28} {' x '.join(map(str, value.shape))}")

# %% [markdown]
# Two of these arrays, `scores` and `weights`, exist only if a probe is set. The compiled attention processes the keys
# in pieces and never stores all scores or weights at once. For a probe, the scores are computed separately by these few
# lines:
#
# {{ source: minillm.ops.reference.score }}
#
# A probe receives copies, so it cannot change the computation. We verify this, because a probe that changed the results
# would be useless:

# %%
from minillm import SamplingParams
from minillm.model.probe import no_probe

params = SamplingParams(temperature=0.8, seed=1, max_tokens=12, logprobs=True)
(unprobed,) = llm.generate(prompt, params)
shown = []
llm.engine.probe = lambda name, value: shown.append(name)
(probed,) = llm.generate(prompt, params)
llm.engine.probe = no_probe
print(f"{len(shown)} arrays shown; same tokens and bits: {unprobed.logprobs == probed.logprobs}")

# %% [markdown]
# ## What a head attends to
#
# The model has 270 heads. To find interesting ones, define a behaviour and measure it. An *induction head* (lesson 2)
# attends to the token that followed an earlier occurrence of the current token:
#
# {{ source: minillm.model.probe.induction }}

# %%
from rich.console import Console

from minillm.model.probe import induction
from minillm.view import HeatMap

text = "The wizard Zorbin met Kelda. Later the wizard Zorbin met"
ids = llm.encode(text)
weights = llm.probe(ids, "*.attention.weights")
shares = np.stack([induction(of_layer, ids) for of_layer in weights.values()])  # [L, H]
print(f"{np.count_nonzero(shares > 0.5)} of {shares.size} heads put most of their weight there")
layer, head = map(int, np.unravel_index(shares.argmax(), shares.shape))
texts = [llm.tokenizer.token_text(token_id) for token_id in ids]
Console().print(HeatMap(texts, weights[f"layers.{layer}.attention.weights"][:, head], f"layer {layer}, head {head}"))

# %% [markdown]
# The pattern is immediately visible. Until the text repeats, this head attends to the first token, an *attention sink*.
# From the second `␣w` on, each token attends to the token that followed it in the first sentence.
# [examples/inspect_attention.py](../../examples/inspect_attention.py) prints this table for any prompt and head; with
# `--html`, it writes an HTML page.
#
# ## Five bugs
#
# Now we plant bugs. Each bug breaks one operation in *one* of the thirty layers of the NumPy backend. All five are
# mistakes that programmers really make:

# %%
import copy
from itertools import count
from types import SimpleNamespace

from minillm.model.batch import Batch, Chunk
from minillm.model.kv_cache import KVCache
from minillm.ops import reference

plain = LLM(backend="numpy")
L = plain.config.num_layers


def pairs_neighbours(heads, cosines, sines):
    """Rotate the pairs (0, 1), (2, 3), ... instead of (0, K/2), (1, K/2 + 1), ..."""
    order = np.arange(heads.shape[-1]).reshape(-1, 2).T.ravel()
    rotated = np.empty_like(heads)
    rotated[..., order] = reference.rotate(heads[..., order], cosines, sines)
    return rotated


def masks_itself(q, keys, values, layer, positions, *rest, **options):
    """Apply a mask that is off by one."""
    return reference.attention(q, keys, values, layer, np.maximum(positions - 1, 0), *rest, **options)


def forgets_the_scale(q, *rest, **options):
    """Compute attention without dividing by the square root of head_dim."""
    return reference.attention(q * np.float32(q.shape[-1] ** 0.5), *rest, **options)


def leaves_out_silu(gate, up):
    return gate * up


def uses_wrong_eps(x, weight, eps):
    return reference.rms_norm(x, weight, eps / 10)


bugs = {  # the wrong function, the operation that it replaces, and the number of calls per layer
    pairs_neighbours: ("rotate", 2),
    masks_itself: ("attention", 1),
    forgets_the_scale: ("attention", 1),
    leaves_out_silu: ("swiglu", 1),
    uses_wrong_eps: ("rms_norm", 2),
}


def plant(bug, layer):
    """Return a copy of the model with one wrong operation in one layer."""
    name, calls = bugs[bug]
    correct, number = getattr(reference, name), count()
    model = copy.copy(plain.transformer)
    model.ops = SimpleNamespace(**vars(reference))

    def replaced(*args, **options):
        return (bug if next(number) // calls % L == layer else correct)(*args, **options)

    setattr(model.ops, name, replaced)
    return model


def run(model):
    """Return every intermediate result of a pass over the prompt."""
    seen, ids = {}, plain.encode(prompt)
    batch = Batch.from_chunks([Chunk(ids, 0, [[0]])], len(ids))
    model.forward(batch, KVCache.contiguous(plain.config, len(ids)), every_token=True, probe=seen.__setitem__)
    return seen


# %% [markdown]
# Before you read on, guess: with each bug in layer 20, which city does the model name as the capital of France?

# %%
from minillm.model.probe import difference

correct, broken = run(plain.transformer), {bug: run(plant(bug, 20)) for bug in bugs}
print(f"{'':20} says      probability   difference in logits")
for name, seen in [("correct", correct), *((bug.__name__, seen) for bug, seen in broken.items())]:
    scores = seen["logits"][-1]
    best = int(scores.argmax())
    text, apart = plain.tokenizer.token_text(best), difference(seen["logits"], correct["logits"])
    print(f"{name:20} {text!r:12} {reference.softmax(scores)[best]:8.0%} {apart:18.3f}")

# %% [markdown]
# With four of the five bugs, the model still answers Paris, and with almost the same probability. A transformer adds up
# the outputs of thirty layers, so one wrong layer often changes little. Reading answers is therefore no test of an
# implementation, and neither is comparing the *tokens* of an answer with another implementation's. A probe shows more.
#
# ## The first difference
#
# Two passes over the same tokens are equal until the first wrong operation. All later differences are consequences of
# this operation, so find the *first* name under which the passes differ:
#
# {{ source: minillm.model.probe.first_difference }}

# %%
from minillm.model.probe import first_difference

for bug, seen in broken.items():
    in_layer_7 = first_difference(run(plant(bug, 7)), correct)
    print(f"{bug.__name__:20} {first_difference(seen, correct):28} and planted in layer 7: {in_layer_7}")

# %% [markdown]
# Each name leads to the faulty operation. If the queries differ but the norm before them does not, the bug is in the
# product or in the rotation. For two bugs, the name is `gathered`, while the scores and weights, which are computed
# separately for the probe, are equal. So the queries and keys are right, and the bug is in `attention` itself.
#
# This was easy, because the two passes have the same bits up to the bug. Usually we can compare only with another
# implementation, which adds in a different order. Then almost no array is equal, and we must decide how large a
# difference to ignore. We use our compiled backend as the other implementation.

# %% tags=["timing"]
other = llm.probe(prompt)  # the compiled backend with the same model file
streams = [f"layers.{index}" for index in range(L)]
noise = [difference(other[name], correct[name]) for name in streams]
print(f"two correct backends differ by {min(noise):.0e} to {max(noise):.0e} of the largest value")
if plt:
    figure, axes = plt.subplots(figsize=(7, 4), num="where-it-begins", layout="constrained")
    axes.semilogy(noise, color="#cccccc", linewidth=7, label="two correct backends")
    drawn = [(pairs_neighbours, 20, "-"), (masks_itself, 12, "--"), (uses_wrong_eps, 5, "-.")]
    for (bug, layer, style), colour in zip(drawn, ("#0072B2", "#D55E00", "#009E73"), strict=True):
        seen = run(plant(bug, layer))
        apart = [difference(other[name], seen[name]) for name in streams]
        axes.semilogy(apart, style, color=colour, linewidth=2, label=f"{bug.__name__}, in layer {layer}")
    axes.set(xlabel="layer", ylabel="largest difference / largest value")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    axes.set_title("Difference from another implementation, layer by layer")

# %% [markdown]
# The broad line is rounding: it starts in the first layer and is not a bug. A bug appears as a step upwards at its
# layer, if it is larger than the rounding. A good tolerance is between the two. The residual stream is not the best
# place to look: in this model, its first token has values in the tens of thousands, and differences in all other values
# are small in comparison. The values of an array within a layer are similar in size. We compare all arrays with a
# tolerance of one in a thousand:

# %%
for bug, seen in broken.items():
    print(f"{bug.__name__:20} {first_difference(seen, other, tolerance=1e-3)}")

# %% [markdown]
# Four bugs are found as before. The fifth is not: if the inputs of the norm are large, a wrong `eps` changes values by
# less than rounding does. Whether this bug can be found at all depends on the weights, and on the *layer*:

# %%
for layer in range(4):
    found = first_difference(run(plant(uses_wrong_eps, layer)), other, tolerance=1e-4)
    print(f"a wrong eps in layer {layer}, tolerance 1e-4: {found}")

# %% [markdown]
# The embedding's values are small, so a wrong `eps` right after the embedding is easy to find. One layer later, the
# values in the stream are larger and hide the error. This is another advantage of *the same bits*: if a program returns
# equal numbers under equal conditions, its results before and after a change can be compared with a tolerance of zero.
# If the numbers are only *nearly* equal, every bug with a smaller effect stays hidden.
#
# How much time does a probe take?

# %% tags=["timing"]
from timeit import repeat

for what, action in {
    "without a probe": lambda: llm.logits(ids),
    "with a probe": lambda: llm.probe(ids),
}.items():
    print(f"{len(ids)} tokens, {what}: {1000 * min(repeat(action, number=1, repeat=3)):.0f} ms")

# %% [markdown]
# ## What production systems do differently
#
# - **No single place to stop.** vLLM's scheduler runs in its own process, where a breakpoint has no terminal; vLLM's
#   [guide](https://docs.vllm.ai/en/latest/usage/troubleshooting/) explains how to use the main process instead. An
#   accelerator also runs asynchronously: an error appears at a later call, unless
#   [CUDA_LAUNCH_BLOCKING=1](https://docs.pytorch.org/docs/stable/notes/cuda.html#asynchronous-execution) makes the host
#   wait for every kernel.
# - **The code that runs is not the code you read.** A decode step is recorded once and replayed as a CUDA graph, which
#   executes no Python. To debug a graph, [NVIDIA
#   recommends](https://docs.nvidia.com/dl-cuda-graph/troubleshooting/debugging-strategies.html) correcting the eager
#   program first, and then halving the captured part until only the faulty operation is left.
# - **Hooks.** llama.cpp calls a function for every node of its graph
#   ([eval-callback](https://github.com/ggml-org/llama.cpp/tree/master/examples/eval-callback)), and PyTorch modules
#   have hooks. [TransformerLens](https://github.com/TransformerLensOrg/TransformerLens) names every activation and lets
#   a hook change it, which reveals the effect of a head. Our probe can only read activations.
# - **The first difference.** Ports of models are debugged in the same way. Modular's
#   [guide](https://docs.modular.com/develop/layer-comparison/) captures each layer of a new model and of the PyTorch
#   original, and finds the first layer that differs by more than a tolerance.
# - **No attention weights.** [FlashAttention](https://arxiv.org/abs/2205.14135) never writes the weights to memory. To
#   see them, compute attention a second time with slower code, as minillm does for a probe.
#
# ## Exercises
#
# Write the functions in [exercises.py](exercises.py), and test them with `pytest lessons/10_debugging`. The answers are
# quoted above, so close this page first.
#
# 1. `score`: compute the score of each key for each query, and hide the keys that a query must not see.
# 2. `first_difference`: find where two passes diverge. When do two arrays with infinities and NaNs differ?
# 3. `induction`: measure how much a head attends to the token that followed an earlier occurrence of the current token.
