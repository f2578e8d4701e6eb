# %% [markdown]
# # 10. Debugging
#
# **How do I stop inside a decode step and look at everything?**
#
# Numerical software fails silently. A wrong sign raises no exception; the text only gets a little worse, and no one can
# tell when that began. To find such a bug, we have to stop in the middle of the computation and look. In this lesson we
# stop a step after each of its stages with Python's own debugger, see every intermediate result by its name, and watch
# what an attention head reads. Then we plant five bugs, see which of them a user would notice, and track them down.

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
# Every step of the engine, whatever it serves, is these five calls:
#
# {{ source: minillm.engine.Engine.step }}
#
# *Schedule* decides, in integers, which sequences advance. *Batch* lays their tokens end to end. *Forward* computes the
# scores of the next tokens, *sample* chooses tokens, and *commit* appends them and passes their text to the callers.
# One thread in one process runs all five from top to bottom. No work is pending elsewhere, so a debugger that stops
# between two stages sees the complete state.
#
# [examples/debug_decode.py](../../examples/debug_decode.py) writes out the same five stages, with a line marked STOP
# after each. It runs two requests up to a step that decodes one and computes a chunk of the other's longer prompt. The
# session below is real; the script you are reading types the commands.

# %%
ROOT = Path(minillm.__file__).parents[1]
EXAMPLE = ROOT / "examples" / "debug_decode.py"
stops = [n for n, line in enumerate(EXAMPLE.read_text().splitlines(), start=1) if "  # STOP " in line]


def pdb(*commands, options=()):
    """Run the example under pdb, type commands, and print the session except for "Breakpoint 1 at ..."."""
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
# This session shows the whole engine. The *plan* lists two chunks: one token of the request that decodes, and the first
# 15 tokens of the other prompt, because the step's budget here is 16. In the *batch* they form one row. The first slot
# is in the first block and the others are in the next two; nothing else in these arrays separates the two sequences.
# The *forward* pass returns a row of scores for each chunk, and `seen` holds every intermediate result. Here we print
# the position that each of the last layer's nine heads attends to most while the first sequence decodes. *Sample*
# chooses only one token: most of the second prompt is still to come, so the token after its fifteenth is not needed.
# After *commit*, one sequence is a token longer, and 15 tokens of the other are computed. The *record* remains: plain
# data from which every view, trace and metric is made (lesson 7).
#
# A condition such as `record.step == 1` stops in the step that matters, and not in the thousand before it. Editors
# support conditions, too: in PyCharm, right-click a breakpoint. VS Code finds its configurations for the example in
# `.vscode/launch.json`.
#
# ## Down into attention
#
# With the compiled backend, the debugger steps over a matrix product or an attention as if it were one instruction.
# With `--backend numpy`, each operation is a few lines of Python ([ops/reference.py](../../minillm/ops/reference.py)),
# and the debugger can step into all of them. We stop after *batch*, set a breakpoint in `attend`, and continue:

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
# This is the decoding request in layer 0: nine heads, one query, six keys. `up` moves to the caller and its variables.
# `attention` has the block table of the sequence, and in the transformer above it, the tokens of both requests are
# still in one array. To find a bug in a kernel, set `NUMBA_DISABLE_JIT=1`. The compiled kernels then run as plain
# Python, slowly, and you can step through them in the same way.
#
# ## Everything by name
#
# Stepping shows one moment; a *probe* shows all of them. `Transformer.forward(..., probe=show)` calls `show(name,
# array)` for every intermediate result. `llm.probe` does this for a prompt, and `engine.probe = show` for a running
# engine. These are the names in one layer, and the shapes for five tokens:

# %%
prompt = "The capital of France is"
seen = llm.probe(prompt)
print(len(seen), "intermediates")
for name, value in seen.items():
    if "layers." not in name or name.startswith("layers.7"):
        print(f"{name:28} {' x '.join(map(str, value.shape))}")

# %% [markdown]
# Two of these arrays exist only when a probe is set. The compiled attention processes the keys in pieces and never
# stores all scores or weights at once (lesson 6). For a probe they are computed separately, by these few lines:
#
# {{ source: minillm.ops.reference.score }}
#
# A probe receives copies, so it cannot change the computation. This is worth checking, because a debugger that changes
# what it shows is worse than none:

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
# The model has 270 heads, and each attends to something. Which ones are interesting? Name a behaviour and measure it.
# An *induction head* (lesson 2) attends to the token that followed last time:
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
# The pattern is immediately visible. Until the text repeats, this head attends to the first token, which it uses when
# there is nothing to find. From the second `␣w` on, each token attends to the token that followed it in the first
# sentence. [examples/inspect_attention.py](../../examples/inspect_attention.py) prints this for any prompt and head;
# `--html` writes a page.
#
# ## Five bugs
#
# Now we break something. In *one* of the thirty layers of the NumPy backend, we break one operation, with mistakes that
# programmers really make:

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


bugs = {  # the wrong function, the operation it replaces, and how often a layer calls that
    pairs_neighbours: ("rotate", 2),
    masks_itself: ("attention", 1),
    forgets_the_scale: ("attention", 1),
    leaves_out_silu: ("swiglu", 1),
    uses_wrong_eps: ("rms_norm", 2),
}


def plant(bug, layer):
    """Return the model with one wrong operation in one layer."""
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
# Before you read on, guess: if each bug is in layer 20, what does the model say is the capital of France?

# %%
from minillm.model.probe import difference

correct, broken = run(plain.transformer), {bug: run(plant(bug, 20)) for bug in bugs}
print(f"{'':20} says      probability   difference of scores")
for name, seen in [("correct", correct), *((bug.__name__, seen) for bug, seen in broken.items())]:
    scores = seen["logits"][-1]
    best = int(scores.argmax())
    text, apart = plain.tokenizer.token_text(best), difference(seen["logits"], correct["logits"])
    print(f"{name:20} {text!r:12} {reference.softmax(scores)[best]:8.0%} {apart:18.3f}")

# %% [markdown]
# With four of the five bugs, the model still says Paris, and with almost the same probability. A transformer adds up
# the outputs of thirty layers, and one wrong layer is outvoted. So reading answers does not test an implementation; nor
# does comparing the *tokens* of an answer with another implementation's. The probe shows more.
#
# ## The first difference
#
# Two passes over the same tokens are equal until the first wrong operation. Everything after it is a consequence, so
# find the *first* name under which they differ:
#
# {{ source: minillm.model.probe.first_difference }}

# %%
from minillm.model.probe import first_difference

for bug, seen in broken.items():
    in_layer_7 = first_difference(run(plant(bug, 7)), correct)
    print(f"{bug.__name__:20} {first_difference(seen, correct):28} and planted in layer 7: {in_layer_7}")

# %% [markdown]
# Each name leads to the faulty line. If the queries differ but the norm before them does not, the bug is in the product
# or in the rotation. In two cases the name is `gathered`, while the scores and weights, which the probe computes
# separately, are equal. So the queries and keys are right, and the bug is in `attention` itself.
#
# That was easy, because we had a correct twin to compare with, to the last bit. Usually there is none, and the
# comparison is with another implementation, which adds in a different order. Then no array is equal, and we must decide
# how large a difference to ignore. We use our compiled backend as the other implementation.

# %% tags=["timing"]
other = llm.probe(prompt)  # the compiled backend, the same file
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
# The broad line is rounding: it starts in the first layer and is not a bug. A bug is a step upwards at its layer, if it
# is larger than the rounding. A good tolerance is between the two. The stream is not the best place to look: in this
# model its first token has values in the tens of thousands, and differences in all other values are small beside them.
# Within a layer, the values of an array have similar sizes. With a tolerance of one in a thousand:

# %%
for bug, seen in broken.items():
    print(f"{bug.__name__:20} {first_difference(seen, other, tolerance=1e-3)}")

# %% [markdown]
# Four are found as before. The fifth is not: a wrong `eps` changes values by less than rounding does, if the layer's
# values are large. Whether it can be found at all depends on the weights, and on the *layer*:

# %%
for layer in range(4):
    found = first_difference(run(plant(uses_wrong_eps, layer)), other, tolerance=1e-4)
    print(f"a wrong eps in layer {layer}, tolerance 1e-4: {found}")

# %% [markdown]
# The embedding's values are small, so a wrong `eps` right after it is easy to see; one layer later the stream has grown
# and hides it. This is another use of *the same bits*: if a program returns equal numbers under equal conditions, it
# can be compared with itself before and after a change, with a tolerance of zero. If it returns *nearly* equal numbers,
# every bug smaller than "nearly" stays hidden.
#
# What does a probe cost?

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
# - **No single place to stop.** vLLM's scheduler runs in its own process, where a breakpoint has no terminal; its
#   [guide](https://docs.vllm.ai/en/latest/usage/troubleshooting/) explains how to run it in the main process. An
#   accelerator also runs asynchronously: an error appears at a later call, unless
#   [CUDA_LAUNCH_BLOCKING=1](https://docs.pytorch.org/docs/stable/notes/cuda.html#asynchronous-execution) makes every
#   launch wait.
# - **The code that runs is not the code you read.** A decode step is recorded once and replayed as a CUDA graph, which
#   executes no Python. For a faulty graph, [NVIDIA's
#   advice](https://docs.nvidia.com/dl-cuda-graph/troubleshooting/debugging-strategies.html) is to make the eager
#   program right first, and then to halve the captured part until the faulty operation is left.
# - **Hooks.** llama.cpp calls a function for every node of its graph
#   ([eval-callback](https://github.com/ggml-org/llama.cpp/tree/master/examples/eval-callback)), and PyTorch has hooks
#   on modules. [TransformerLens](https://github.com/TransformerLensOrg/TransformerLens) names every activation and lets
#   a hook change it, which shows what a head is *for*. Our probe can only read.
# - **The first difference** is how ports are debugged: Modular's
#   [guide](https://docs.modular.com/develop/layer-comparison/) captures each layer of a new model and of the PyTorch
#   original, and finds the first that differs by more than a tolerance.
# - **No attention weights.** [FlashAttention](https://arxiv.org/abs/2205.14135) never writes them to memory. To see
#   them, run a second, slower attention, as our probe does.
#
# ## Exercises
#
# Write the functions in [exercises.py](exercises.py), and test them with `pytest lessons/10_debugging`. The answers are
# quoted above, so close this page first.
#
# 1. `score`: compute the score of each key for each query, and hide the keys that a query must not see.
# 2. `first_difference`: find where two passes diverge. When do two arrays with infinities and NaNs differ?
# 3. `induction`: measure how much a head attends to the token that followed last time.
