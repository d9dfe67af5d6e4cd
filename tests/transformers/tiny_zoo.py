"""Every decoder-only architecture that the installed transformers knows, made tiny by what its config says.

Takes a config class of `MODEL_FOR_CAUSAL_LM_MAPPING`, gives a seeded float32 model of a few layers with windows and
chunks of eight tokens, and refuses to know architectures by name where a rule over the names of config attributes does:
`OWN` lists the few values that no rule can guess. Weights are drawn wide, so that what a token does not see shows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

if TYPE_CHECKING:
    from collections.abc import Iterator

VOCAB = 97
WINDOW = 8
STD = 0.2
MOST_PARAMETERS = 8_000_000
_LAYERS = 4

# What is written over a config's own value, by the attribute's name. Only attributes that the config has are set.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"), VOCAB),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embed_dim", "emb_dim", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("embedding_size", "input_embedding_size", "output_embedding_size", "embedding_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner", "dff"), 48),
    **dict.fromkeys(("dim_ff", "d_inner", "ffn_hidden_size", "dense_intermediate_size", "intermediate_size_mlp"), 48),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("shared_experts_intermediate_size", "moe_shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "v_head_dim", "swa_head_dim", "kv_channels", "attention_head_dim", "dim_head"), 8),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "attention_head_size", "index_head_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim", "laurel_rank", "index_n_heads", "index_topk"), 4),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), _LAYERS),
    **dict.fromkeys(("encoder_layers", "num_encoder_layers", "num_decoder_layers"), _LAYERS),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length"), 128),
    **dict.fromkeys(("max_target_positions", "max_source_positions", "context_length", "max_sequence_length"), 128),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_chunk_size", "window_size"), WINDOW),
    **dict.fromkeys(("local_attention", "attention_window_size", "keep_window_size", "mem_len"), WINDOW),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "n_shared_experts"), 1),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads", "n_mamba_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "mamba_d_conv", "mamba_n_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "shared_intermediate_size", "adapter_rank"), 16),
    **dict.fromkeys(("mamba_num_heads", "hidden_size_per_layer_input", "router_hidden_size"), 8),
    **dict.fromkeys(("lru_width",), 32),
    **dict.fromkeys(("mamba_d_ssm", "attention_hidden_size"), 64),
    **dict.fromkeys(("pronunciation_embed_dim", "shape_embed_dim", "pronunciation_vocab_size", "shape_vocab_size"), 16),
    **dict.fromkeys(("hidden_size_global", "backbone_hidden_size"), 32),
    **dict.fromkeys(("encoder_hash_byte_group_vocab",), VOCAB),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Values that no rule over names can guess, by model type.
_MAMBA2 = {"num_heads": 4, "head_dim": 16, "n_groups": 1}
OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("full_attention", "sliding_attention")
        },
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dory": {
        "num_hidden_layers": 8,
        "n_input_layers": 2,
        "n_recurrent_layers": 4,
        "n_output_layers": 2,
        "layer_types": ["sliding_attention", "mlp", "full_attention", "mlp"] * 2,
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots3_note_text": {
        "head_dim": 16,
        "per_layer_config": {
            layer: {"num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 16, "qk_nope_head_dim": 12}
            for layer in (1, 3)
        },
        "layer_types": ["indexed_attention", "sliding_attention"] * 2,
    },
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "intermediate_size": 48,
    },
    "gemma4_text": {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "hrm_text": {"num_layers_per_stack": 2, "num_hidden_layers": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": _MAMBA2,
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "rwkv": {"attention_hidden_size": 32},
    "reformer": {"axial_pos_shape": [8, 16], "axial_pos_embds_dim": [16, 16], "feed_forward_size": 48},
    "xlstm": {"num_blocks": 4},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}


class Architecture(NamedTuple):
    """One entry of the library's causal-LM mapping."""

    config_class: type[Any]
    model_class: type[Any]

    @property
    def model_type(self) -> str:
        """The config's own name."""
        return str(self.config_class.model_type)


class CannotBeTiny(ValueError):  # noqa: N818  (named for the situation)
    """The config refuses small numbers, or the model stays large."""


def architectures() -> Iterator[Architecture]:
    """Yield every architecture of the installed library's causal-LM mapping, by its config's name."""
    for config_class, model_class in sorted(MODEL_FOR_CAUSAL_LM_MAPPING.items(), key=lambda item: item[0].model_type):
        yield Architecture(config_class, model_class if isinstance(model_class, type) else model_class[0])


def tiny_config(config_class: type[Any]) -> Any:
    """Return a config of ``config_class`` with a few narrow layers, one of each of its kinds where it has several."""
    own = OWN.get(config_class.model_type, {})
    return config_class(**_shrunk(config_class, own))


def _shrunk(config_class: type[Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return what to say to ``config_class``: sizes by name, picked layers, nested configs, then its own values."""
    try:
        default = config_class()
    except Exception:
        return own
    said = vars(default)
    values: dict[str, Any] = {}
    for name, value in said.items():
        if hasattr(value, "to_dict"):
            values[name] = {"model_type": value.model_type, **_shrunk(type(value), own.get(name, {}))}
        elif name in _SIZES and (value is not None or name == "head_dim"):
            values[name] = _SIZES[name]
    if "qk_rope_head_dim" in values:  # latents: every query head has its own K and V, rotated in a part
        values |= {"head_dim": values["qk_rope_head_dim"], "num_key_value_heads": values["num_attention_heads"]}
    values |= _picked_layers(said)
    if getattr(default, "is_encoder_decoder", False):
        values |= {"is_encoder_decoder": False, "is_decoder": True}
    elif "is_decoder" in said:
        values["is_decoder"] = True
    return {**values, **{key: value for key, value in own.items() if not isinstance(values.get(key), dict)}}


def _picked_layers(said: dict[str, Any]) -> dict[str, list[Any]]:
    """Return the per-layer lists cut to `_LAYERS`: the first layer of each kind, in order, then the same again."""
    total = next((said[name] for name in ("num_hidden_layers", "n_layer", "num_layers") if name in said), None)
    if not isinstance(total, int):
        return {}
    lists = {
        name: value
        for name, value in said.items()
        if isinstance(value, (list, tuple)) and len(value) == total and name not in {"id2label"}
    }
    kinds: dict[str, int] = {}
    for layer in range(total):
        kinds.setdefault(repr([value[layer] for value in lists.values()]), layer)
    first = list(kinds.values())[:_LAYERS]
    layers = sorted(first) if len(first) == _LAYERS else (first * _LAYERS)[:_LAYERS]
    return {name: [value[layer] for layer in layers] for name, value in lists.items()}


def _text_class(architecture: Architecture) -> type[Any]:
    """Return the config class that the model is built from: of a composite entry the text part, where it takes that."""
    wanted = architecture.model_class.config_class
    parts = getattr(architecture.config_class, "sub_configs", {}).values()
    return wanted if wanted in parts else architecture.config_class


def build(architecture: Architecture, *, seed: int = 0) -> Any:
    """Return the architecture's seeded float32 model in eval mode, attention eager.

    Raises:
        CannotBeTiny: the config or the model refuses, or has too many parameters; the text says which.
    """
    try:
        config = tiny_config(_text_class(architecture))
        with torch.device("meta"):
            size = sum(one.numel() for one in architecture.model_class(config).parameters())
    except Exception as error:
        raise CannotBeTiny(f"{type(error).__name__}: {error}") from error
    if size > MOST_PARAMETERS:
        raise CannotBeTiny(f"{size:,} parameters")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = architecture.model_class._from_config(config, attn_implementation="eager", dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() > 1 or not torch.any(parameter):
                torch.nn.init.normal_(parameter, std=STD)
    return model.eval().requires_grad_(False)
