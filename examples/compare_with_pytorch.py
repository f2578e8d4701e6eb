"""How far is every intermediate result from PyTorch's? Layer by layer, on the same weights.

    python examples/compare_with_pytorch.py
    python examples/compare_with_pytorch.py --backend numpy --prompt "def fibonacci(n):"

Both run in float32 and add up in different orders, so their last bits differ; each number printed is the largest
difference of an intermediate, as a share of its largest value. Needs the extra `test` (PyTorch, transformers).
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers.models.llama.modeling_llama import eager_attention_forward

from minillm import LLM, catalog, cli
from minillm.model.probe import difference

Record = Callable[[str, torch.Tensor], None]

# What one layer's results are called by `Transformer.forward`'s probe, in the order they are computed.
IN_A_LAYER = [
    "attention_norm",
    "attention.q",
    "attention.k",
    "attention.v",
    "attention.weights",
    "attention.gathered",
    "attention.output",
    "mlp_norm",
    "mlp.gated",
    "mlp.output",
    "",
]


def their_intermediates(model: transformers.LlamaForCausalLM, token_ids: list[int]) -> dict[str, np.ndarray]:
    """What `LLM.probe` shows, from transformers: caught by hooks on its modules and by an attention of our own."""
    seen, hooks = {}, []

    def record(name: str, value: torch.Tensor) -> None:
        seen[name] = value.detach()[0].numpy().copy()

    def hear(module: torch.nn.Module, name: str, take: Callable = lambda inputs, output: output) -> None:
        hooks.append(module.register_forward_hook(lambda module, inputs, output: record(name, take(inputs, output))))

    def attention(module, query, key, value, *args, **kwargs):
        name = f"layers.{module.layer_idx}.attention"
        gathered, weights = eager_attention_forward(module, query, key, value, *args, **kwargs)
        for part, tensor in (("q", query), ("k", key), ("v", value), ("weights", weights)):
            record(f"{name}.{part}", tensor.transpose(1, 2))
        record(f"{name}.gathered", gathered)
        return gathered, weights

    transformers.AttentionInterface.register("recorded", attention)
    transformers.AttentionMaskInterface.register("recorded", transformers.masking_utils.eager_mask)
    implementation = model.config._attn_implementation
    model.set_attn_implementation("recorded")
    hear(model.model.embed_tokens, "embedding")
    for index, layer in enumerate(model.model.layers):
        name = f"layers.{index}"
        hear(layer.input_layernorm, f"{name}.attention_norm")
        hear(layer.self_attn.o_proj, f"{name}.attention.output")
        hear(layer.post_attention_layernorm, f"{name}.mlp_norm")
        hear(layer.mlp.down_proj, f"{name}.mlp.gated", lambda inputs, output: inputs[0])
        hear(layer.mlp, f"{name}.mlp.output")
        hear(layer, name)
    hear(model.model.norm, "final_norm")
    hear(model.lm_head, "logits")
    with torch.no_grad():
        model(torch.tensor([token_ids]))
    for hook in hooks:
        hook.remove()
    model.set_attn_implementation(implementation)
    return seen


def load_transformers(path: Path) -> transformers.LlamaForCausalLM:
    """transformers' model of the same file or folder, its weights widened to float32."""
    where = {"gguf_file": path.name} if path.is_file() else {}
    folder = path.parent if path.is_file() else path
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **where, dtype=torch.float32).eval()


def compare(llm: LLM, model: transformers.LlamaForCausalLM, token_ids: list[int]) -> dict[str, float]:
    """For every intermediate: the largest difference as a share of the largest value."""
    ours, theirs = llm.probe(token_ids), their_intermediates(model, token_ids)
    return {name: difference(ours[name], theirs[name].reshape(ours[name].shape)) for name in theirs}


def table(differences: dict[str, float]) -> Table:
    """A row a layer, a column an intermediate."""
    shown = Table(title="largest difference / largest value")
    for column in ["layer", *IN_A_LAYER[:-1], "layer's output"]:
        shown.add_column(column.removeprefix("attention."), justify="right")
    layers = sorted({int(name.split(".")[1]) for name in differences if name.startswith("layers.")})
    for index in layers:
        names = [f"layers.{index}.{part}".removesuffix(".") for part in IN_A_LAYER]
        shown.add_row(str(index), *(f"{differences[name]:.1e}" for name in names))
    return shown


def main() -> None:
    """Load the model twice, run both, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", default="The quick brown fox jumps over the lazy dog, and then")
    cli.add_model_options(parser)
    options = parser.parse_args()

    path = catalog.resolve(options.model)
    llm = LLM(path, backend=options.backend, threads=options.threads)
    differences = compare(llm, load_transformers(path), llm.encode(options.prompt))

    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(table(differences))
    for name in ("embedding", "final_norm", "logits"):
        console.print(f"{name:>10}  {differences[name]:.1e}")
    worst = max(differences, key=differences.get)
    console.print(f"largest of all {len(differences)}: {differences[worst]:.1e}, at {worst}")


if __name__ == "__main__":
    sys.exit(cli.run_safely(main))
