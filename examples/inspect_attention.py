"""What does one attention head look at? A heat map, a row a token.

    python examples/inspect_attention.py
    python examples/inspect_attention.py --layer 18 --head 8
    python examples/inspect_attention.py --prompt "def add(a, b): return a + b" --html attention.html

Without --head it shows the head with the clearest habit. If some token of the prompt has stood before, that is the head
which looks most at what came next last time (an induction head: it is how a model continues a name it has never seen);
else the one which looks most at the token before. --layer alone chooses within that layer.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from rich.console import Console

from minillm import LLM, cli
from minillm.model.probe import induction, previous_token
from minillm.view import HeatMap, heat_page

PROMPT = "The wizard Zorbin met Kelda. Later the wizard Zorbin met"
MOST_TOKENS = 256  # all layers' weights of so many take 71 MB in the default model; a picture of more says little
HABITS = {"what came next last time": induction, "the token before": lambda weights, ids: previous_token(weights)}


def attention_weights(llm: LLM, token_ids: list[int]) -> np.ndarray:
    """Who looks at whom, in every layer and head: [L, H, T, T]."""
    if len(token_ids) > MOST_TOKENS:
        raise ValueError(f"the prompt has {len(token_ids)} tokens; a heat map shows at most {MOST_TOKENS}")
    seen = llm.probe(token_ids, "*.attention.weights")
    return np.stack([weights.transpose(1, 0, 2) for weights in seen.values()])


def choose(
    weights: np.ndarray, token_ids: list[int], layer: int | None = None, head: int | None = None
) -> tuple[int, int, str]:
    """Layer, head, and how they were chosen: as told, or by the clearest habit; see above."""
    layers, heads = weights.shape[:2]
    for name, value, count in ("layer", layer, layers), ("head", head, heads):
        if value is not None and not 0 <= value < count:
            raise ValueError(f"there is no {name} {value}; this model has 0 to {count - 1}")
    chosen = range(layers) if layer is None else [layer]
    for habit, measure in HABITS.items():
        shares = np.stack([measure(weights[n].transpose(1, 0, 2), token_ids) for n in chosen])  # [layers, H]
        if head is not None:
            shares = shares[:, [head]]
        if shares.any():
            best, which = np.unravel_index(shares.argmax(), shares.shape)
            which = which if head is None else head
            return chosen[best], int(which), f"It gives {shares.max():.0%} of its look to {habit}, on average."
    return chosen[0], head or 0, "A single token can only look at itself."


def main() -> None:
    """Read the options, run the prompt with a probe, choose a head, and show it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", default=PROMPT, help=f"default: {PROMPT!r}")
    parser.add_argument("--layer", type=int, metavar="N", help="from 0 on (default: the one with the clearest habit)")
    parser.add_argument("--head", type=int, metavar="N", help="from 0 on (default: the one with the clearest habit)")
    parser.add_argument("--html", metavar="FILE", help="write the picture there, as a page for a browser")
    cli.add_model_options(parser)
    options = parser.parse_args()

    llm = cli.load_model(options)
    token_ids = llm.encode(options.prompt)
    weights = attention_weights(llm, token_ids)
    layer, head, why = choose(weights, token_ids, options.layer, options.head)
    texts = [llm.tokenizer.token_text(token_id) for token_id in token_ids]
    heat = HeatMap(texts, weights[layer, head].tolist(), f"Layer {layer}, head {head} of {llm.path.name}")
    if options.html:
        Path(options.html).write_text(heat_page(heat, why), encoding="utf-8")
    console = Console(highlight=False)
    console.print(heat)
    console.print(why, markup=False)
    if options.html:
        console.print(f"written: {options.html}", markup=False)


if __name__ == "__main__":
    sys.exit(cli.run_safely(main))
