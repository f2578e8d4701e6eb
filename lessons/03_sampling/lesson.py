# %% [markdown]
# # 3. Sampling
#
# **How is one token chosen from 49,152 scores?**
#
# The model has done its work and left a row of scores, one for each token of the vocabulary. Something must now pick
# one. It is the cheapest part of serving and the part that users turn the knobs of: temperature, top-p, seed. Each knob
# is a few lines of NumPy. This lesson shows what each does to a real distribution, and how a draw can be random and yet
# come out the same, whatever else the server is doing.

# %%
import numpy as np

from minillm import LLM, SamplingParams
from minillm.engine.sampling import draw, log_softmax, softmax, uniform

llm = LLM()


def next_scores(prompt):
    return llm.logits(llm.encode(prompt))[-1].astype(np.float64)  # [V]


def name(token_id):
    return llm.tokenizer.token_text(int(token_id))


# %% tags=["hidden"]
try:
    import matplotlib.pyplot as plt
except ImportError:
    plt = None
    print("no Matplotlib here, so no figures")

# %% [markdown]
# ## Scores, probabilities, surprise
#
# A score on its own means nothing; only differences count. *Softmax* turns scores into probabilities: raise e to each,
# divide by the sum. The maximum is taken off first, which changes no result and keeps e^800 from overflowing.
#
# {{ source: minillm.engine.sampling.softmax }}
#
# How sure the model is varies enormously from one position to the next. Two prompts will stay with us:

# %%
prompts = {"sure": "Monday, Tuesday, Wednesday, Thursday,", "unsure": "We went to the city of"}
scores = {kind: next_scores(prompt) for kind, prompt in prompts.items()}


def entropy(probabilities):
    """Bits of surprise to expect: 0 for a certainty, log2(n) for n equal chances."""
    possible = probabilities[probabilities > 0]
    return float(-np.sum(possible * np.log2(possible)))


for kind, prompt in prompts.items():
    probabilities = softmax(scores[kind])
    best = ", ".join(f"{name(i)!r} {probabilities[i]:.3f}" for i in np.argsort(-probabilities)[:3])
    bits = entropy(probabilities)
    print(f"{kind:6} {prompt!r}: {best}; {bits:.2f} bits, as among {2**bits:.3g} equal chances")

# %% [markdown]
# ## Always the best?
#
# Taking the best token every time (*greedy*, temperature 0) sounds right and often is. But try it on a story:

# %%
import textwrap

story = "Once upon a time, there was a little girl who"


def tell(**params):
    output = llm.generate(story, SamplingParams(ignore_eos=True, **params))[0]
    groups = list(zip(*(output.token_ids[start:] for start in range(4)), strict=False))
    print(textwrap.fill("..." + output.text, 100))
    print(f"[{1 - len(set(groups)) / len(groups):.0%} of all groups of four tokens are repeats]\n")
    return output


greedy = tell(temperature=0.0, max_tokens=120, logprobs=True)
probabilities = np.exp(greedy.logprobs).reshape(-1, 15).mean(axis=1)
print("mean probability of the chosen token, 15 at a time:", " ".join(f"{mean:.2f}" for mean in probabilities))

# %% [markdown]
# Each step was the likeliest, and the whole is a text that no person would write. Look at the last line: with every
# repetition the next becomes more certain (think of the induction head of lesson 2), so greedy choice has no way out.
# Human text is not a chain of likeliest words; it keeps taking mildly surprising turns ([Holtzman et al.
# 2019](https://arxiv.org/abs/1904.09751)). So we draw at random, and the question becomes: from what?
#
# ## Temperature
#
# Divide all scores by a number before the softmax. Below 1, differences grow and the best tokens gain; above 1 they
# shrink and everything becomes possible.

# %%
from minillm.engine.sampling import apply_temperature

print("temperature   sure: best token, bits    unsure: best token, bits")
for temperature in (0.3, 0.7, 1.0, 1.5):
    row = f"{temperature:11}"
    for kind in prompts:
        probabilities = softmax(apply_temperature(scores[kind], temperature))
        row += f"{probabilities.max():18.3f} {entropy(probabilities):6.2f}"
    print(row)

# %%
for temperature, seed, max_tokens in ((0.7, 10, 40), (1.5, 61, 20)):
    tell(temperature=temperature, seed=seed, max_tokens=max_tokens)

# %% [markdown]
# At 0.7 a story; at 1.5 a fever. Why does it derail? Not because the second best token is bad. The vocabulary is large,
# and each of tens of thousands of hopeless tokens has a tiny chance, but together they have a real one:

# %%
print("chance of a token outside the best 1,000:")
for temperature in (0.7, 1.0, 1.5):
    row = f"temperature {temperature}:"
    for kind in prompts:
        probabilities = softmax(apply_temperature(scores[kind], temperature))
        outside = 1 - np.sort(probabilities)[-1000:].sum()
        row += f"   {kind} {outside:.5f}"
    print(row)

# %% [markdown]
# One such token is enough, because the model then continues *that* text. So, before drawing, the tail is cut off.
#
# ## Three ways to cut
#
# - **top-k** keeps the k best tokens.
# - **top-p** keeps the fewest tokens whose probabilities reach p ([Holtzman et al.
#   2019](https://arxiv.org/abs/1904.09751)).
# - **min-p** drops what is less likely than a share of the likeliest ([Nguyen et al.
#   2024](https://arxiv.org/abs/2407.01082)).
#
# {{ source: minillm.engine.sampling.keep_top_p }}
#
# They differ in how they react to the model being sure or not:

# %%
from minillm.engine.sampling import keep_min_p, keep_top_k, keep_top_p

cuts = {"top-k 40": (keep_top_k, 40), "top-p 0.8": (keep_top_p, 0.8), "min-p 0.1": (keep_min_p, 0.1)}
print("tokens kept    sure  unsure")
for label, (keep, value) in cuts.items():
    kept = {kind: int(np.isfinite(keep(scores[kind], value)).sum()) for kind in prompts}
    print(f"{label:10} {kept['sure']:8} {kept['unsure']:7}")

# %%
if plt:
    figure, axes = plt.subplots(figsize=(6.5, 4), num="three-cuts", layout="constrained")
    for kind, colour in (("sure", "#0072B2"), ("unsure", "#D55E00")):
        sorted_probabilities = np.sort(softmax(scores[kind]))[::-1]
        ranks = np.unique(np.geomspace(1, len(sorted_probabilities), 200).astype(int))
        axes.loglog(ranks, sorted_probabilities[ranks - 1], color=colour, linewidth=2, label=prompts[kind])
        for (keep, value), marker in zip(cuts.values(), "osD", strict=True):
            last = int(np.isfinite(keep(scores[kind], value)).sum())
            where = (last, sorted_probabilities[last - 1])
            axes.plot(*where, marker, color=colour, markersize=8, markerfacecolor="white", markeredgewidth=2)
    for label, marker in zip(cuts, "osD", strict=True):
        axes.plot([], [], marker, color="#555555", markerfacecolor="white", markeredgewidth=2, label=f"{label} ends")
    axes.set(xlabel="tokens, likeliest first", ylabel="probability", ylim=(1e-9, 2))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="lower left")
    axes.set_title("Where three cuts end, when the model is sure and when it is not")

# %% [markdown]
# top-k is blind: it lets 39 wrong words follow Thursday, and allows 40 of a thousand possible cities. The other two ask
# the distribution. When the model is unsure, top-p needs hundreds of tokens to reach its sum and takes far into the
# tail; min-p measures everything against the best token and stays with what is nearly as good. minillm applies all
# three in this order, each to what the one before has left:
#
# {{ source: minillm.engine.sampling.candidates }}
#
# ## The draw
#
# Lay the probabilities end to end on a line from 0 to 1. Take a random point on it. The token whose stretch it falls
# into is chosen:
#
# {{ source: minillm.engine.sampling.draw }}
#
# Are tokens really drawn as often as they should be? Draw ten thousand times and count. Pearson's chi-square adds up
# the squared differences from what was expected. For 8 tokens it should be about 7, and exceeds 24 once in a thousand
# times, if the draws are right. To see that it would notice if they were not, a second sampler forgets the temperature:

# %%
from minillm.engine.sampling import distribution

params = SamplingParams(temperature=0.7, top_k=8)
wanted = distribution(scores["unsure"], params)
forgetful = distribution(scores["unsure"], SamplingParams(top_k=8))
points = [uniform(seed=0, index=index) for index in range(10_000)]
kept = np.flatnonzero(wanted)
expected = wanted[kept] * len(points)
for label, probabilities in (("as asked", wanted), ("forgetful", forgetful)):
    counts = np.bincount([draw(probabilities, point) for point in points], minlength=len(wanted))[kept]
    print(f"{label:9} chi-square {np.sum((counts - expected) ** 2 / expected):6.1f}")

# %% [markdown]
# ## Random, and the same every time
#
# A seed should make a request repeatable. The usual generator keeps a *state*, and each number changes it. In a server
# that is a trap: if requests share a generator, the numbers you get depend on who else is asking; if each has its own,
# the state must be saved whenever a request is interrupted. A *counter-based* generator has no state. It is a function:
# give it the seed and how many tokens this request has drawn, get the number ([Salmon et al.
# 2011](https://doi.org/10.1145/2063384.2063405)).
#
# {{ source: minillm.engine.sampling.uniform }}
#
# So the tenth number can be had without the nine before it:

# %%
print([round(uniform(seed=7, index=index), 4) for index in (0, 1, 2, 9)])
print([round(uniform(seed=7, index=index), 4) for index in (9, 2, 1, 0)])

# %% [markdown]
# Now the experiment that matters. Let a request run; run it again after another one; and take it over in the middle,
# with nothing in hand but its tokens so far, as a server does that had to interrupt it:

# %%
from minillm.engine.sampling import sample

params = SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=16, ignore_eos=True)
alone = llm.generate(story, params)[0].token_ids
beside = llm.generate(["Something else entirely", story], params)[1].token_ids

resumed = [*llm.encode(story), *alone[:6]]
for index in range(6, 16):
    resumed.append(sample(llm.logits(resumed)[-1], params, seed=7, index=index).token_id)

print(llm.tokenizer.decode(alone))
print("beside another request:", beside == alone, "  taken over after six tokens:", resumed[-16:] == alone)

# %% [markdown]
# The random number is half of that. The other half is that the *scores* come out with the same bits, however the text
# was computed: here token by token in `generate`, all at once in `logits`. A draw that falls close to a border between
# two tokens tips over at the smallest difference. Lesson 6 shows how the kernels keep that promise.
#
# ## How likely was that?
#
# The `logprobs` we asked for above are the logarithms of the chosen tokens' probabilities *under the model itself*,
# before temperature and cuts, so that they say something about the text and nothing about your knobs. The same can be
# asked of a text that was not generated at all. The mean surprise of a text's tokens, as a number of equal chances, is
# its *perplexity*:


# %%
def surprise(text):
    """Bits of surprise at each token, read at the beginning of a document."""
    ids = llm.encode("<|endoftext|>" + text)  # the token that separates documents in training
    rows = llm.logits(ids[:-1]).astype(np.float64)
    return np.array([-log_softmax(row)[token_id] for row, token_id in zip(rows, ids[1:], strict=True)]) / np.log(2)


texts = {
    "a sentence": "The cat sat on the mat and looked out of the window at the rain.",
    "its words, shuffled": "The mat rain sat window at the out of looked the on and cat the.",
    "a famous one": "We hold these truths to be self-evident, that all men are created equal.",
    "Korean": "고양이가 창밖의 비를 바라보았다.",
}
print("                      tokens  perplexity  bits a byte")
for label, text in texts.items():
    bits = surprise(text)
    perplexity = float(f"{2 ** bits.mean():.3g}")
    print(f"{label:20} {len(bits):7} {perplexity:11,g} {bits.sum() / len(text.encode()):12.2f}")

# %% [markdown]
# Shuffling the same words makes the text more than a hundred times as perplexing: the model knows order, not only
# words. The famous sentence is cheap, because training showed it often; a low perplexity is not good writing. And the
# Korean row is a warning. By perplexity it is nearly as easy as the English sentence, but only because its tokens are
# so small (lesson 1): once the first byte of a character is known, the rest are no great surprise. Perplexities of
# different tokenizers or scripts do not compare. *Bits a byte* are fairer, and there Korean is the hardest of the four.
#
# ## What production systems do differently
#
# - **On the GPU, for the whole batch.** Sorting a few hundred scores, as our `keep_top_p` does, is cheap once and
#   dear a thousand times a step. FlashInfer's kernels draw by rejection and [never
#   sort](https://docs.flashinfer.ai/api/sampling.html).
# - **More knobs.** Presence and frequency penalties, biases for single tokens, bans, grammars that mask all tokens that
#   would break a JSON schema: all are changes to the scores before the draw ([vLLM's
#   SamplingParams](https://docs.vllm.ai/en/v0.15.0/api/vllm/sampling_params/)).
# - **Weaker promises.** Most servers give each seeded request a generator, but do not promise the same *scores* when a
#   request shares its batch: vLLM [does not guarantee
#   reproducibility](https://docs.vllm.ai/en/latest/usage/reproducibility/) by default, for speed, and has a
#   batch-invariant mode for those who need it. [He et al.
#   2025](https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/) explain where it is lost.
# - **Counter-based generators** are what JAX builds on ([its design
#   note](https://docs.jax.dev/en/latest/jep/263-prng.html)), and what GPUs use inside kernels, for the same reason as
#   here: no state to share.
#
# ## Exercises
#
# In [exercises.py](exercises.py); `pytest lessons/03_sampling` tells you whether they are right.
#
# 1. `log_softmax`: for scores of any size, without infinity where a number belongs.
# 2. `keep_top_p`: the fewest tokens that reach p. The one that crosses the line is in, the next is out.
# 3. `draw`: a token for a point on the line, that no rounding can push off its end.
