# %% [markdown]
# # 10. Debugging
#
# **How do I stop inside a decode step and look at everything?**
#
# Software that computes numbers fails quietly. A wrong sign raises no exception; the text only becomes a little worse,
# and nobody can say since when. To find out, one has to stop in the middle and look. In this lesson we stop a step
# after each of its stages with Python's own debugger, see every number on the way by its name, and look over the
# shoulder of an attention head. Then we plant five bugs, find out which of them anybody would notice, and hunt them.

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
    print("no Matplotlib here, so no figures")

# %% [markdown]
# ## A step has five stages
#
# Whatever is served, a step of the engine is this:
#
# {{ source: minillm.engine.Engine.step }}
#
# *schedule* decides who advances, in integers. *batch* lays their tokens end to end. *forward* makes scores of them,
# *sample* chooses tokens, and *commit* hands these to the scheduler and to whoever waits for text. One thread does
# this, in one process, from top to bottom: nothing has been started elsewhere, nothing is still on its way. So a
# debugger that stops between two stages sees all there is.
#
# [examples/debug_decode.py](../../examples/debug_decode.py) has the same five with nothing around them, and a line
# marked STOP behind each. It brings two requests to the step in which one decodes and the other, longer, has a chunk of
# its prompt computed. What follows is a real session; the script you are reading types the commands.

# %%
ROOT = Path(minillm.__file__).parents[1]
EXAMPLE = ROOT / "examples" / "debug_decode.py"
stops = [n for n, line in enumerate(EXAMPLE.read_text().splitlines(), start=1) if "  # STOP " in line]


def pdb(*commands, options=()):
    """Type commands into pdb, started on the example, and show the session (but for "Breakpoint 1 at ...")."""
    run = [sys.executable, "-m", "pdb", str(EXAMPLE), "--quiet", *options]
    done = subprocess.run(run, cwd=ROOT, input="\n".join([*commands, "quit\n"]), capture_output=True, text=True)
    answers = done.stdout.split("(Pdb) ")[1:]
    if len(answers) <= len(commands):
        raise RuntimeError(done.stdout + done.stderr)
    for command, answer in zip(commands, answers, strict=False):
        print(f"(Pdb) {command}")
        if answer.strip() and not answer.startswith("Breakpoint"):
            print(answer.replace(f"{ROOT}/", "").rstrip())


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
# Read it slowly, it is the whole machine. The *plan* names two chunks: one token of the request that decodes, and the
# first fifteen of the one that is being read, since the step's budget here is sixteen. In the *batch* they have become
# one row. The first slot is in the first block, the others in the next two; that is all which still tells whose tokens
# these are. The *forward* pass gives a row of scores for each chunk, and `seen` holds all that happened on the way:
# here, at which position each of the last layer's nine heads looks most while the first sequence decodes. *Sample*
# chooses one token only: there is more to come of the second prompt, so nobody asked what follows its fifteenth token.
# After *commit* one sequence is a token longer, and of the other fifteen are computed. The *record* is what remains:
# plain data, from which every view, trace and metric is made (lesson 7).
#
# A condition such as `record.step == 1` is how one stops in the step that matters, and not in the thousand before it.
# The editors' debuggers take the same: VS Code finds its configurations in `.vscode/launch.json`, and in PyCharm a
# right click on a breakpoint asks for the condition.
#
# ## Down into attention
#
# With the compiled backend the debugger steps over a product or an attention as if it were one instruction. With
# `--backend numpy` the operations are a few lines of Python each ([ops/reference.py](../../minillm/ops/reference.py)),
# and one can go down to the last of them. Stop after *batch*, ask to be stopped in `attend`, and go on:

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
# This is the decoding request in layer 0: nine heads, one query, six keys to look at. `up` goes to whoever called, with
# *their* names: `attention` has the block table that says where the keys lie, and in the transformer above it the
# tokens of both requests still travel together. Where a bug sits in a kernel, set `NUMBA_DISABLE_JIT=1`: the compiled
# kernels then run as the plain Python they are written in, slowly, and can be stepped through in the same way.
#
# ## Everything by name
#
# Stepping shows one moment. A *probe* shows all of them: `Transformer.forward(..., probe=show)` calls
# `show(name, array)` for every intermediate result. `llm.probe` does it for a prompt, and `engine.probe = show`
# for an engine that is running. These are the names of one layer, and the shapes for five tokens:

# %%
prompt = "The capital of France is"
seen = llm.probe(prompt)
print(len(seen), "intermediates")
for name, value in seen.items():
    if "layers." not in name or name.startswith("layers.7"):
        print(f"{name:28} {' x '.join(map(str, value.shape))}")

# %% [markdown]
# Two of them do not exist while nobody looks. The compiled attention goes through the keys piece by piece and never
# holds the scores of all of them, nor their weights (lesson 6). For a probe they are worked out once more, beside it,
# by these few lines:
#
# {{ source: minillm.ops.reference.score }}
#
# What a probe is shown is a copy, and looking changes nothing. That is worth checking, for a debugger that moves what
# it points at is worse than none:

# %%
from minillm import SamplingParams
from minillm.model.probe import no_probe

params = SamplingParams(temperature=0.8, seed=1, max_tokens=12, logprobs=True)
(unseen,) = llm.generate(prompt, params)
shown = []
llm.engine.probe = lambda name, value: shown.append(name)
(watched,) = llm.generate(prompt, params)
llm.engine.probe = no_probe
print(f"shown: {len(shown)}; same tokens and bits: {unseen.logprobs == watched.logprobs}")

# %% [markdown]
# ## Over a head's shoulder
#
# 270 heads, and each looks at something. Which ones are worth a look? Ask for a habit, and measure it. An *induction
# head* (lesson 2) looks at what came next last time:
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
print(f"of {shares.size} heads, {np.count_nonzero(shares > 0.5)} give most of their look to it")
layer, head = map(int, np.unravel_index(shares.argmax(), shares.shape))
texts = [llm.tokenizer.token_text(token_id) for token_id in ids]
Console().print(HeatMap(texts, weights[f"layers.{layer}.attention.weights"][:, head], f"layer {layer}, head {head}"))

# %% [markdown]
# A glance is enough. Until the text repeats itself this head looks at the first token, which stands for "nothing to
# report"; from the second `␣w` on, each token looks at what followed it in the first sentence.
# [examples/inspect_attention.py](../../examples/inspect_attention.py) does this for any prompt and head, and `--html`
# makes a page of it.
#
# ## Five bugs
#
# Now something breaks. We take the NumPy backend, and in *one* of the thirty layers let one operation be wrong, in ways
# that happen to people who write such code:

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
    """Rotary embedding that turns (0, 1), (2, 3), ... instead of (0, K/2), (1, K/2 + 1), ..."""
    order = np.arange(heads.shape[-1]).reshape(-1, 2).T.ravel()
    turned = np.empty_like(heads)
    turned[..., order] = reference.rotate(heads[..., order], cosines, sines)
    return turned


def cannot_see_itself(q, keys, values, layer, positions, *rest):
    """A mask that is off by one."""
    return reference.attention(q, keys, values, layer, np.maximum(positions - 1, 0), *rest)


def forgets_to_divide(q, *rest):
    """Attention without the division by the root of head_dim."""
    return reference.attention(q * np.float32(q.shape[-1] ** 0.5), *rest)


def leaves_out_silu(gate, up):
    return gate * up


def reads_another_eps(x, weight, eps):
    return reference.rms_norm(x, weight, eps / 10)


bugs = {  # what is wrong, in which operation, and how often a layer calls that
    pairs_neighbours: ("rotate", 2),
    cannot_see_itself: ("attention", 1),
    forgets_to_divide: ("attention", 1),
    leaves_out_silu: ("swiglu", 1),
    reads_another_eps: ("rms_norm", 2),
}


def plant(bug, layer):
    """The model, but one operation of one layer is wrong."""
    name, calls = bugs[bug]
    right, number = getattr(reference, name), count()
    model = copy.copy(plain.transformer)
    model.ops = SimpleNamespace(**vars(reference))
    setattr(model.ops, name, lambda *given: (bug if next(number) // calls % L == layer else right)(*given))
    return model


def look(model):
    """Every intermediate of a pass over the prompt."""
    seen, ids = {}, plain.encode(prompt)
    batch = Batch.from_chunks([Chunk(ids, 0, [[0]])], len(ids))
    model.forward(batch, KVCache.contiguous(plain.config, len(ids)), every_token=True, probe=seen.__setitem__)
    return seen


# %% [markdown]
# Before you read on, guess: with each of them in layer 20, what will the model say is the capital of France?

# %%
from minillm.model.probe import difference

healthy, broken = look(plain.transformer), {bug: look(plant(bug, 20)) for bug in bugs}
print(f"{'':20} says         how sure   scores differ by")
for name, seen in [("healthy", healthy), *((bug.__name__, seen) for bug, seen in broken.items())]:
    scores = seen["logits"][-1]
    best = int(scores.argmax())
    says, apart = plain.tokenizer.token_text(best), difference(seen["logits"], healthy["logits"])
    print(f"{name:20} {says!r:12} {reference.softmax(scores)[best]:8.0%} {apart:18.3f}")

# %% [markdown]
# Four of five still say Paris, and are nearly as sure of it. A transformer adds up what thirty layers say, and one that
# talks nonsense is outvoted. So reading answers is no test of an implementation; nor is comparing the *tokens* of an
# answer with somebody else's. The probe sees more.
#
# ## The first difference
#
# Two passes over the same tokens are equal until something makes them differ. Everything after that is consequence, so
# look for the *first* name under which they part:
#
# {{ source: minillm.model.probe.first_difference }}

# %%
from minillm.model.probe import first_difference

for bug, seen in broken.items():
    elsewhere = first_difference(look(plant(bug, 7)), healthy)
    print(f"{bug.__name__:20} {first_difference(seen, healthy):28} and planted in layer 7: {elsewhere}")

# %% [markdown]
# Each name leads to the line. Queries differ and what they are made from, the norm, does not: then it is the product or
# the turning. Twice it is `gathered`, where scores and weights, which the probe works out for itself, were still
# equal: so the queries and keys are right, and it is what attention *does* with them that is wrong.
#
# That was easy, because there was a healthy twin to compare with, to the last bit. Mostly there is not: one compares
# with another implementation, which adds up in another order. Then nothing is equal, and one has to say how much
# difference is none. Let our compiled backend be the other implementation.

# %% tags=["timing"]
other = llm.probe(prompt)  # the compiled backend, the same file
streams = [f"layers.{index}" for index in range(L)]
noise = [difference(other[name], healthy[name]) for name in streams]
print(f"two healthy backends differ by {min(noise):.0e} to {max(noise):.0e} of the largest number")
if plt:
    figure, axes = plt.subplots(figsize=(7, 4), num="where-it-begins", layout="constrained")
    axes.semilogy(noise, color="#cccccc", linewidth=7, label="two healthy backends")
    drawn = [(pairs_neighbours, 20, "-"), (cannot_see_itself, 12, "--"), (reads_another_eps, 5, "-.")]
    for (bug, layer, style), colour in zip(drawn, ("#0072B2", "#D55E00", "#009E73"), strict=True):
        seen = look(plant(bug, layer))
        apart = [difference(other[name], seen[name]) for name in streams]
        axes.semilogy(apart, style, color=colour, linewidth=2, label=f"{bug.__name__}, in layer {layer}")
    axes.set(xlabel="layer", ylabel="largest difference / largest number")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    axes.set_title("Where a bug begins, seen from another implementation")

# %% [markdown]
# The broad line is rounding: it is there from the first layer on, and nobody's fault. A bug is a step upwards at its
# layer, if it is larger than that. A tolerance belongs between the two. The stream is not the best place to look,
# because in this model its first token carries numbers in the tens of thousands, beside which all else is small; arrays
# inside a layer are of one size. With a tolerance of one per mille:

# %%
for bug, seen in broken.items():
    print(f"{bug.__name__:20} {first_difference(seen, other, tolerance=1e-3)}")

# %% [markdown]
# Four are found as before. The fifth is not: a wrong `eps` moves numbers by less than rounding does, in a layer whose
# numbers are large. Whether it shows anywhere depends on the weights, and on *which* layer:

# %%
for layer in range(4):
    found = first_difference(look(plant(reads_another_eps, layer)), other, tolerance=1e-4)
    print(f"a wrong eps in layer {layer}, tolerance 1e-4: {found}")

# %% [markdown]
# The embedding's numbers are small, so behind it a wrong eps is plain to see; one layer further up the stream has grown
# and drowns it. This is the other use of *the same bits*: a program that gives equal numbers in equal circumstances can
# be compared with itself, before and after a change, with a tolerance of nothing; one that gives *nearly* equal numbers
# hides every bug smaller than "nearly".
#
# What does looking cost?

# %% tags=["timing"]
from timeit import repeat

for what, action in {"computed": lambda: llm.logits(ids), "shown and kept": lambda: llm.probe(ids)}.items():
    print(f"{len(ids)} tokens {what}: {1000 * min(repeat(action, number=1, repeat=3)):.0f} ms")

# %% [markdown]
# ## What production systems do differently
#
# - **There is no one place to stop.** vLLM's scheduler runs in a process of its own, where a breakpoint finds no
#   terminal; its [guide](https://docs.vllm.ai/en/latest/usage/troubleshooting/) says how to bring it back into one. An
#   accelerator also runs behind the program that feeds it: an error surfaces at some later call, unless
#   [CUDA_LAUNCH_BLOCKING=1](https://docs.pytorch.org/docs/stable/notes/cuda.html#asynchronous-execution) makes every
#   launch wait.
# - **What runs is not what one reads.** A decode step is recorded once and replayed as a CUDA graph, in which no line
#   of Python runs any more. [NVIDIA's
#   advice](https://docs.nvidia.com/dl-cuda-graph/troubleshooting/debugging-strategies.html) for a graph that misbehaves
#   is to make the eager program right first, then to halve what is captured until the culprit is left.
# - **Hooks.** llama.cpp calls back for every node of its graph
#   ([eval-callback](https://github.com/ggml-org/llama.cpp/tree/master/examples/eval-callback)); PyTorch has hooks on
#   modules; [TransformerLens](https://github.com/TransformerLensOrg/TransformerLens) names every activation, and lets a
#   hook change it, which is how one finds out what a head is *for*. Our probe may only look.
# - **The first difference** is how ports are debugged: Modular's
#   [guide](https://docs.modular.com/develop/layer-comparison/) captures each layer of a new model and of PyTorch's and
#   looks for the first that parts by more than a tolerance.
# - **Attention weights are gone.** [FlashAttention](https://arxiv.org/abs/2205.14135) never writes them to memory, so
#   whoever wants to see them runs another, slower attention, as our probe does.
#
# ## Exercises
#
# In [exercises.py](exercises.py); `pytest lessons/10_debugging` tells you whether they are right. Their answers are
# quoted above, so close this page first.
#
# 1. `score`: what a query thinks of each key, and of those it must not see.
# 2. `first_difference`: where two passes part. What is a difference, when there is infinity about, and NaN?
# 3. `induction`: how much of a head's look goes to what came next last time.
