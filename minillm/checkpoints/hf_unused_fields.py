"""Warn about fields of `config.json` that minillm does not know: they may change what the model computes."""

from __future__ import annotations

import warnings

from minillm.checkpoints.fields import Fields
from minillm.errors import UnusedFieldsWarning

# Fields that do not change the logits: descriptions, training, special tokens, and the way transformers runs a model.
HARMLESS_FIELDS = {
    *("_attn_implementation", "_attn_implementation_internal", "_commit_hash", "_name_or_path", "architectures"),
    *("attn_implementation", "auto_map", "dtype", "finetuning_task", "model_type", "name_or_path", "torch_dtype"),
    *("torchscript", "transformers.js_config", "transformers_version", "unsloth_fixed", "unsloth_version"),
    *("id2label", "label2id", "num_labels", "problem_type", "task_specific_params", "tokenizer_class"),
    *("is_decoder", "is_encoder_decoder", "is_llama_config", "output_attentions", "output_hidden_states"),
    *("output_router_logits", "pretraining_tp", "return_dict", "use_cache", "cache_implementation", "use_return_dict"),
    *("bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id"),
    *("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "embd_pdrop", "hidden_dropout"),
    *("hidden_dropout_prob", "initializer_range", "resid_pdrop", "router_aux_loss_coef", "router_jitter_noise"),
    *("gradient_checkpointing", "use_flash_attn", "sparse_attention", "quantization", "rope_interleaved"),
    *("reorder_and_upcast_attn", "summary_activation", "summary_first_dropout", "summary_proj_to_labels"),
    *("summary_type", "summary_use_proj", "n_ctx", "max_length", "min_length", "temperature", "top_k", "top_p"),
    *("do_sample", "num_beams", "repetition_penalty", "seq_length", "max_sequence_length", "model_max_length"),
    "intermediate_size",  # of layers without experts, in a mixture that has none
    *("partial_rotary_factor", "rope_theta"),  # read only if the section of rotary settings lacks them
    "_sliding_window_pattern",  # a copy of sliding_window_pattern
}


def warn_about_unused(fields: Fields) -> None:
    """Warn once, by name, about the fields that have not been read, unless they cannot change the logits.

    A value that means "none" (null, false, 0, 1.0, or an empty list) is assumed to change nothing.

    Parameters
    ----------
    fields : the config, after everything that is implemented has been read from it.
    """
    unused = {name: value for name, value in fields.values.items() if name not in fields.used | HARMLESS_FIELDS}
    changing = sorted(
        name for name, value in unused.items() if value is True or value not in (None, False, 0, 1.0, "", [], {})
    )
    if changing:
        warnings.warn(
            f"{fields.source}: minillm does not know the fields {', '.join(map(repr, changing))} and computes the "
            "model without them; if they change what the model computes, its answers will be wrong",
            UnusedFieldsWarning,
            stacklevel=2,
        )
