"""Draw the attention weights of one head as a heat map, one row per token.

    python examples/inspect_attention.py
    python examples/inspect_attention.py --layer 18 --head 8
    python examples/inspect_attention.py --prompt "def add(a, b): return a + b" --html attention.html

Without --head it draws the head with the clearest pattern. If a token of the prompt repeats, that is the head with the
most weight on the token that followed the earlier occurrence. Such an *induction head* is how a model continues a name
that it has never seen before. Otherwise it is the head with the most weight on the previous token. --layer restricts
the choice to one layer.
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
MAX_TOKENS = 256  # their weights in all layers of the default model take 71 MB, and larger heat maps are unreadable
PATTERNS = {
    "the token after an earlier occurrence": induction,
    "the previous token": lambda weights, ids: previous_token(weights),
}


def attention_weights(llm: LLM, token_ids: list[int]) -> np.ndarray:
    """Return the attention weights of every layer and head, [L, H, T, T]."""
    if len(token_ids) > MAX_TOKENS:
        raise ValueError(f"the prompt has {len(token_ids)} tokens; a heat map shows at most {MAX_TOKENS}")
    layers = llm.probe(token_ids, "*.attention.weights")
    return np.stack([weights.transpose(1, 0, 2) for weights in layers.values()])


def choose_head(
    weights: np.ndarray, token_ids: list[int], layer: int | None = None, head: int | None = None
) -> tuple[int, int, str]:
    """Return the layer and head to draw, and the reason for the choice.

    If `layer` or `head` is None, choose the one with the clearest pattern.
    """
    num_layers, num_heads = weights.shape[:2]
    for name, value, count in ("layer", layer, num_layers), ("head", head, num_heads):
        if value is not None and not 0 <= value < count:
            raise ValueError(f"there is no {name} {value}; this model has 0 to {count - 1}")
    layers = range(num_layers) if layer is None else [layer]
    heads = range(num_heads) if head is None else [head]
    for pattern, measure in PATTERNS.items():
        shares = np.stack([measure(weights[n].transpose(1, 0, 2), token_ids) for n in layers])[
            :, list(heads)
        ]  # [layers, heads]
        if shares.any():
            best = np.unravel_index(shares.argmax(), shares.shape)
            reason = f"On average, {shares.max():.0%} of its weight is on {pattern}."
            return layers[int(best[0])], heads[int(best[1])], reason
    return layers[0], heads[0], "A single token can only attend to itself."


def main() -> None:
    """Read the options, run the prompt with a probe, choose a head, and draw it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", default=PROMPT, help=f"default: {PROMPT!r}")
    parser.add_argument("--layer", type=int, metavar="N", help="from 0 (default: the one with the clearest pattern)")
    parser.add_argument("--head", type=int, metavar="N", help="from 0 (default: the one with the clearest pattern)")
    parser.add_argument("--html", metavar="FILE", help="also write the heat map to this file, as an HTML page")
    cli.add_model_options(parser)
    options = parser.parse_args()

    llm = cli.load_model(options)
    token_ids = llm.encode(options.prompt)
    weights = attention_weights(llm, token_ids)
    layer, head, reason = choose_head(weights, token_ids, options.layer, options.head)
    assert llm.tokenizer is not None  # `encode` needs it
    texts = [llm.tokenizer.token_text(token_id) for token_id in token_ids]
    heat_map = HeatMap(texts, weights[layer, head].tolist(), f"Layer {layer}, head {head} of {llm.path.name}")
    if options.html:
        Path(options.html).write_text(heat_page(heat_map, reason), encoding="utf-8")
    console = Console(highlight=False)
    console.print(heat_map)
    console.print(reason, markup=False)
    if options.html:
        console.print(f"written to {options.html}", markup=False)


if __name__ == "__main__":
    sys.exit(cli.run_safely(main))
