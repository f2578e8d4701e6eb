"""Write tiny random checkpoints: Hugging Face folders with transformers, GGUF files with the gguf package."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

TINY = {
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": None,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# The name of an architecture in transformers -> its name in llama.cpp, if they differ.
GGUF_ARCHITECTURES = {"mistral": "llama", "mixtral": "llama", "gemma3_text": "gemma3", "qwen3_moe": "qwen3moe"}
# The name of a module in transformers -> its name in llama.cpp.
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
GPT2_NAMES = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "lm_head": "output",
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}


# Storage type that the gguf package can read but not write -> offsets of the float16 scales in a block, in bytes.
READ_ONLY_TYPES = {
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)},
    **{"IQ4_NL": (0,), "IQ4_XS": (0,)},
}


def random_model(config: transformers.PreTrainedConfig, seed: int = 0) -> transformers.PreTrainedModel:
    """Return a float32 causal language model with the given config. All its parameters are random.

    It uses the eager implementations of attention and experts, which support every setting.
    """
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_config(config, **eager).to(torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.2 * noise)
            else:
                parameter.copy_(noise / math.sqrt(parameter.shape[-1]) if parameter.dim() >= 2 else 0.2 * noise)
    return model


def random_llama(seed: int = 0, **config_overrides) -> transformers.LlamaForCausalLM:
    """Return a random Llama with the sizes in `TINY`. Overrides are arguments of LlamaConfig."""
    return random_model(transformers.LlamaConfig(**(TINY | config_overrides)), seed)


def write_hf_folder(
    path: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str | int = "1GB",
    with_tokenizer: bool = False,
    **config_overrides,
) -> tuple[Path, transformers.LlamaForCausalLM]:
    """Save a random tiny Llama as a Hugging Face folder at `path`; return the path and the model."""
    model = random_llama(seed, **config_overrides).to(dtype)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    if with_tokenizer:
        tokenizer().save(str(Path(path) / "tokenizer.json"))
    return Path(path), model


def write_gguf(
    path: Path,
    model: transformers.PreTrainedModel,
    storage: str = "F32",
    *,
    with_tokenizer: bool = False,
    alignment: int | None = None,
    edit: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:
    """Write `model` as llama.cpp's converter would: with the same keys, names, and order of weights.

    A matrix is stored as `storage` if its rows are a multiple of the block size. Other matrices, and all vectors, are
    stored as F32. If `storage` is in `READ_ONLY_TYPES`, matrices hold `random_blocks` instead of the model's weights.
    `edit` may change the writer's `kv_data[0]` and `tensors[0]` just before they are written.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, GGUF_ARCHITECTURES.get(config.model_type, config.model_type))
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    if config.model_type == "gpt2":
        writer.add_feed_forward_length(config.n_inner or 4 * config.n_embd)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        _add_rotary_model_keys(writer, config)
    if with_tokenizer:
        _add_tokenizer(writer)
    for name, values in _gguf_tensors(model):
        kind = storage_for(values.shape, storage)
        if kind.name in READ_ONLY_TYPES:
            stored = random_blocks(kind, values.shape, np.random.default_rng(len(writer.tensors[0])))
        else:
            stored = gguf.quants.quantize(np.ascontiguousarray(values), kind)
        writer.add_tensor(name, stored, raw_dtype=kind)
    edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)


def _add_rotary_model_keys(writer: gguf.GGUFWriter, config: transformers.PreTrainedConfig) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    ropes = config.rope_parameters
    rope = ropes.get("full_attention", ropes)
    if config.model_type != "gemma3_text":
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_frequency_factors(config))
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_attn_factors(rope["attention_factor"])
        for length in ("short", "long"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32))
    if config.model_type in ("gemma2", "gemma3_text", "phi3") and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    if getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if getattr(config, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if hasattr(config, "num_experts_per_tok"):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _gguf_tensors(model: transformers.PreTrainedModel) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name and the values of each tensor, as llama.cpp's converter writes them."""
    config = model.config
    for name, parameter in model.named_parameters():  # omits a tied head
        values = parameter.detach().to(torch.float32).numpy()
        if config.model_type in ("llama", "mistral", "mixtral"):
            if ".q_proj." in name:
                values = permute(values, config.num_attention_heads)
            if ".k_proj." in name:
                values = permute(values, config.num_key_value_heads)
        if config.model_type.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        if config.model_type == "gpt2" and ".c_" in name and values.ndim == 2:
            values = values.T
        if name.endswith("experts.gate_up_proj"):  # [E, 2F, D]
            gate, up = np.split(values, 2, axis=1)
            yield gguf_name(name.replace("gate_up_proj", "gate_proj.weight")), gate
            yield gguf_name(name.replace("gate_up_proj", "up_proj.weight")), up
        elif name.endswith("experts.down_proj"):
            yield gguf_name(f"{name}.weight"), values
        else:
            yield gguf_name(name, config.model_type), values


def storage_for(shape: tuple[int, ...], storage: str) -> GGMLQuantizationType:
    """Return the type in which `write_gguf` stores a tensor of this shape."""
    kind = GGMLQuantizationType[storage]
    whole_blocks = shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
    return kind if len(shape) >= 2 and whole_blocks else GGMLQuantizationType.F32


def random_blocks(kind: GGMLQuantizationType, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Return the bytes of a random matrix of a type in `READ_ONLY_TYPES`, with scales that keep its weights below 1."""
    block_size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // block_size, num_bytes), np.uint8)
    for offset in READ_ONLY_TYPES[kind.name]:
        scales = rng.uniform(-2e-4, 2e-4, (*blocks.shape[:-1], 1)).astype(np.float16)
        blocks[..., offset : offset + 2] = scales.view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def gguf_name(hf_name: str, model_type: str = "llama") -> str:
    """Return llama.cpp's name for the tensor that transformers calls `hf_name`."""
    names = GPT2_NAMES if model_type == "gpt2" else GGUF_NAMES
    if model_type.startswith("gemma"):
        names = names | GEMMA_NAMES
    module, _, kind = hf_name.rpartition(".")
    layer = re.fullmatch(r"(?:model\.layers|transformer\.h)\.(\d+)\.(.+)", module)
    return f"blk.{layer[1]}.{names[layer[2]]}.{kind}" if layer else f"{names[module]}.{kind}"


def permute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Interleave the two halves of each head's rows: 0, K/2, 1, K/2 + 1, ..."""
    head_dim = rows.shape[0] // num_heads
    order = [
        head * head_dim + half * (head_dim // 2) + pair
        for head in range(num_heads)
        for pair in range(head_dim // 2)
        for half in range(2)
    ]
    return np.ascontiguousarray(rows[order])


def llama3_frequency_factors(config: transformers.LlamaConfig) -> np.ndarray:
    """Return the divisors of the rotary frequencies that transformers computes: float32 [K/2]."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    return ((1.0 / config.rope_parameters["rope_theta"] ** exponents) / scaled).numpy()


def tokenizer() -> Tokenizer:
    """Return a byte-level BPE tokenizer of 262 tokens: 3 special tokens, 256 bytes and 3 merges."""
    merges = [("h", "e"), ("l", "l"), ("he", "ll")]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<unk>", "<s>", "</s>", *letters, *("".join(pair) for pair in merges)]
    built = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, merges))
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens(words[:3])
    return built


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    vocabulary = sorted(tokenizer().get_vocab().items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([word for word, _ in vocabulary])
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(vocabulary) - 3))
    writer.add_token_merges(["h e", "l l", "he ll"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def without_compiler_notice(stderr: str) -> str:
    """Remove the compiler's announcement from the output of a program: only the first program to run prints it."""
    return stderr.replace("compiling the kernels for this machine (once, about a minute) ...\n", "")
