# %% [markdown]
# # 3. Sampling
#
# **How is one token chosen from 49,152 scores?**
#
# The model has computed a row of scores, one for each token of the vocabulary. The *sampler* now chooses one token.
# Sampling is the cheapest part of serving and the part that users control, with temperature, top-p, seed and other
# parameters. Each parameter takes a few lines of NumPy. This lesson shows the effect of each on a real distribution. It
# also shows how a draw can be random and still repeatable, whatever other requests the server is computing.

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
    print("Matplotlib is not installed, so there are no figures")

# %% [markdown]
# ## Scores, probabilities, surprise
#
# A single score has no meaning; only differences between scores matter. *Softmax* turns scores into probabilities:
# compute e to the power of each score, and divide by the sum. The maximum is subtracted first. This leaves the result
# unchanged and prevents overflow, as in e^800.
#
# {{ source: minillm.engine.sampling.softmax }}
#
# The model's certainty varies enormously from one position to the next. We use two prompts throughout this lesson:

# %%
prompts = {"sure": "Monday, Tuesday, Wednesday, Thursday,", "unsure": "We went to the city of"}
scores = {kind: next_scores(prompt) for kind, prompt in prompts.items()}


def entropy(probabilities):
    """Return the mean surprise in bits: 0 for a certain token, log2(n) for n equally likely ones."""
    positive = probabilities[probabilities > 0]
    return float(-np.sum(positive * np.log2(positive)))


for kind, prompt in prompts.items():
    probabilities = softmax(scores[kind])
    best = ", ".join(f"{name(i)!r} {probabilities[i]:.3f}" for i in np.argsort(-probabilities)[:3])
    bits = entropy(probabilities)
    print(f"{kind:6} {prompt!r}: {best}; {bits:.2f} bits, like {2**bits:.3g} equally likely tokens")

# %% [markdown]
# ## Always the best?
#
# Taking the best token every time (*greedy* decoding, temperature 0) sounds right, and often is. But try it on a story:

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
# Each token was the most likely one, but no person would write the whole. Look at the last line: with every repetition,
# the next one becomes more certain (compare the induction head of lesson 2), so greedy decoding cannot leave the loop.
# Human text is not a chain of most likely words; it makes mildly surprising choices throughout ([Holtzman et al.
# 2019](https://arxiv.org/abs/1904.09751)). So we draw at random. From which distribution?
#
# ## Temperature
#
# Divide all scores by a number, the *temperature*, before the softmax. Below 1, differences grow and the best tokens
# gain probability. Above 1, differences shrink and unlikely tokens gain.

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
# At 0.7 we get a story, and at 1.5 the text soon loses all sense. Why? Not because the second-best token is bad. The
# vocabulary is large: each of tens of thousands of unsuitable tokens has a tiny probability, but the sum of these
# probabilities is not tiny:

# %%
print("probability of a token outside the best 1,000:")
for temperature in (0.7, 1.0, 1.5):
    row = f"temperature {temperature}:"
    for kind in prompts:
        probabilities = softmax(apply_temperature(scores[kind], temperature))
        outside = 1 - np.sort(probabilities)[-1000:].sum()
        row += f"   {kind} {outside:.5f}"
    print(row)

# %% [markdown]
# One such token is enough, because the model then continues *that* text. So samplers cut off the tail of the
# distribution before they draw.
#
# ## Three cuts
#
# - **top-k** keeps the k best tokens.
# - **top-p** keeps the fewest tokens whose probabilities reach p ([Holtzman et al.
#   2019](https://arxiv.org/abs/1904.09751)).
# - **min-p** drops tokens that are less likely than a given fraction of the most likely one's probability ([Nguyen et
#   al. 2024](https://arxiv.org/abs/2407.01082)).
#
# {{ source: minillm.engine.sampling.keep_top_p }}
#
# They differ in how they respond to the model's certainty:

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
            axes.plot(
                last,
                sorted_probabilities[last - 1],
                marker,
                color=colour,
                markersize=8,
                markerfacecolor="white",
                markeredgewidth=2,
            )
    for label, marker in zip(cuts, "osD", strict=True):
        axes.plot([], [], marker, color="#555555", markerfacecolor="white", markeredgewidth=2, label=f"{label} ends")
    axes.set(xlabel="tokens, most likely first", ylabel="probability", ylim=(1e-9, 2))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="lower left")
    axes.set_title("Where three cuts end when the model is sure and unsure")

# %% [markdown]
# top-k ignores the distribution: it allows 39 wrong words after Thursday, but only 40 of a thousand possible cities.
# The other two cuts depend on the distribution. When the model is unsure, top-p needs hundreds of tokens to reach its
# sum and includes much of the tail. min-p compares each token with the best one and keeps only tokens that are nearly
# as good. minillm applies the three in this order, each to the tokens that the previous one has kept:
#
# {{ source: minillm.engine.sampling.candidates }}
#
# ## The draw
#
# Place the probabilities end to end on a line from 0 to 1, and take a random point on it. The token whose interval
# contains the point is chosen:
#
# {{ source: minillm.engine.sampling.draw }}
#
# Are tokens really drawn with these probabilities? We draw ten thousand times and count. Pearson's chi-square sums the
# squared differences from the expected counts, each divided by the expected count. If the draws are right, its mean for
# 8 tokens is 7, and it exceeds 24 once in a thousand times. To check that the test detects an error, we also test a
# sampler that omits the temperature:

# %%
from minillm.engine.sampling import distribution

params = SamplingParams(temperature=0.7, top_k=8)
correct = distribution(scores["unsure"], params)
untempered = distribution(scores["unsure"], SamplingParams(top_k=8))
points = [uniform(seed=0, index=index) for index in range(10_000)]
kept = np.flatnonzero(correct)
expected = correct[kept] * len(points)
for label, probabilities in (("correct", correct), ("without temperature", untempered)):
    counts = np.bincount([draw(probabilities, point) for point in points], minlength=len(correct))[kept]
    print(f"{label:19} chi-square {np.sum((counts - expected) ** 2 / expected):6.1f}")

# %% [markdown]
# ## Random and repeatable
#
# A seed should make a request repeatable. The usual random generator has a *state* that changes with each number. In a
# server, this is a problem. If requests share a generator, the numbers of one request depend on the other requests. If
# each has its own, its state must be saved whenever the request is interrupted. A *counter-based* generator has no
# state. It is a function that computes a number from the seed and the count of tokens that the request has drawn so far
# ([Salmon et al. 2011](https://doi.org/10.1145/2063384.2063405)).
#
# {{ source: minillm.engine.sampling.uniform }}
#
# So the tenth number can be computed without the nine before it:

# %%
print([round(uniform(seed=7, index=index), 4) for index in (0, 1, 2, 9)])
print([round(uniform(seed=7, index=index), 4) for index in (9, 2, 1, 0)])

# %% [markdown]
# Now the important experiment. We run a request alone, and then together with another one. Then we resume it in the
# middle from nothing but its tokens so far, as a server does after an interruption:

# %%
from minillm.engine.sampling import sample

params = SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=16, ignore_eos=True)
alone = llm.generate(story, params)[0].token_ids
batched = llm.generate(["Something else entirely", story], params)[1].token_ids

resumed = [*llm.encode(story), *alone[:6]]
for index in range(6, 16):
    resumed.append(sample(llm.logits(resumed)[-1], params, seed=7, index=index).token_id)

print(llm.tokenizer.decode(alone))
print("same tokens with another request in the batch:", batched == alone)
print("same tokens when resumed after six:", resumed[-16:] == alone)

# %% [markdown]
# The random numbers are only half of the explanation. The other half is that the *scores* have the same bits, whichever
# way the text was computed: token by token in `generate`, or all at once in `logits`. If a draw falls close to a border
# between two tokens, the smallest difference selects the other token. Lesson 6 shows how the kernels keep the bits the
# same.
#
# ## How likely was that?
#
# The `logprobs` that we requested above are the logarithms of the chosen tokens' probabilities *under the model
# itself*, before temperature and cuts. So they describe the text and do not depend on the sampling parameters. We can
# also compute them for a text that was not generated. The mean surprise at a text's tokens, expressed as a number of
# equally likely choices, is its *perplexity*:


# %%
def surprise(text):
    """Return the surprise at each token in bits, with the text at the beginning of a document."""
    ids = llm.encode("<|endoftext|>" + text)  # separates documents in the training data
    rows = llm.logits(ids[:-1]).astype(np.float64)
    return np.array([-log_softmax(row)[token_id] for row, token_id in zip(rows, ids[1:], strict=True)]) / np.log(2)


texts = {
    "a sentence": "The cat sat on the mat and looked out of the window at the rain.",
    "its words, shuffled": "The mat rain sat window at the out of looked the on and cat the.",
    "a famous one": "We hold these truths to be self-evident, that all men are created equal.",
    "Korean": "고양이가 창밖의 비를 바라보았다.",
}
print("                      tokens  perplexity  bits per byte")
for label, text in texts.items():
    bits = surprise(text)
    perplexity = float(f"{2 ** bits.mean():.3g}")
    print(f"{label:20} {len(bits):7} {perplexity:11,g} {bits.sum() / len(text.encode()):14.2f}")

# %% [markdown]
# Shuffling the words raises the perplexity more than a hundredfold: the model has learned word order, not only words.
# The famous sentence has a low perplexity because it occurs often in the training data, so a low perplexity does not
# mean good writing. The Korean row is a warning. By perplexity it is nearly as easy as the English sentence, but only
# because its tokens are so small (lesson 1): after the first byte of a character, the other bytes are hardly
# surprising. Perplexities of different tokenizers or scripts cannot be compared. *Bits per byte* are a fairer measure,
# and by this measure Korean is the hardest of the four.
#
# ## What production systems do differently
#
# - **On the GPU, for the whole batch.** Sorting a few hundred scores, as our `keep_top_p` does, is cheap once but
#   expensive a thousand times per step. FlashInfer's kernels draw by rejection and [never
#   sort](https://docs.flashinfer.ai/api/sampling.html).
# - **More parameters.** Presence and frequency penalties, biases for single tokens, banned tokens, and grammars that
#   mask every token that would break a JSON schema all change the scores before the draw ([vLLM's
#   SamplingParams](https://docs.vllm.ai/en/v0.15.0/api/vllm/sampling_params/)).
# - **Weaker guarantees.** Most servers give each seeded request its own generator, but do not guarantee the same
#   *scores* when a request shares its batch. For speed, vLLM [does not guarantee
#   reproducibility](https://docs.vllm.ai/en/latest/usage/reproducibility/) by default; it offers a batch-invariant
#   mode. [He et al. 2025](https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/) explain where
#   the bits change.
# - **Counter-based generators.** JAX builds on them ([its design
#   note](https://docs.jax.dev/en/latest/jep/263-prng.html)), and GPU kernels use them for the same reason as minillm:
#   there is no state to share.
#
# ## Exercises
#
# Write the functions in [exercises.py](exercises.py), and test them with `pytest lessons/03_sampling`. The answers to
# the last two are quoted above.
#
# 1. `log_softmax`: compute log-probabilities for scores of any size, without an infinity in place of a finite number.
# 2. `keep_top_p`: keep the fewest tokens that reach p. The token that crosses the threshold is kept; the next is not.
# 3. `draw`: return the token for a point on the line, even if the probabilities sum to a little less than 1.
