"""Tiny random decoders, one per kind of attention, for every test that needs a model.

``tiny("llama")`` builds it once per process, seeded, in float32 and eval mode: do not change what it returns.
Weights are drawn wide (std 0.2), so that logits are far apart and dropping a token of history changes them.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

if TYPE_CHECKING:
    from collections.abc import Callable

VOCAB = 97
WINDOW = 5
STD = 0.2
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": STD,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GQA = {"num_key_value_heads": 2}
_MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}

# Name: (model type, what its config says beyond the base).
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**_GQA}),
    "llama_mha": ("llama", {}),
    "llama_mqa": ("llama", {"num_key_value_heads": 1}),
    "qwen2": ("qwen2", {**_GQA}),
    "qwen3": ("qwen3", {**_GQA, "head_dim": 16}),
    "mistral": ("mistral", {**_GQA, "sliding_window": WINDOW, "head_dim": 8}),
    "gemma2": (
        "gemma2",
        {**_GQA, "head_dim": 8, "sliding_window": WINDOW, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    ),
    "gemma3": ("gemma3_text", {**_GQA, "head_dim": 8, "sliding_window": WINDOW, "num_hidden_layers": 6}),
    "gpt_oss": (
        "gpt_oss",
        {**_GQA, **_MOE, "head_dim": 8, "sliding_window": WINDOW, "num_local_experts": 4, "rope_parameters": None},
    ),
    "gpt_neox": ("gpt_neox", {}),
    "phi": ("phi", {"partial_rotary_factor": 0.5}),
    "gpt2": ("gpt2", {"n_positions": 256}),
}
_DEEPSEEK = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
}
_UNSUPPORTED: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon_alibi": ("falcon", {"alibi": True, "new_decoder_architecture": False, "multi_query": False}),
    "gpt_neo": ("gpt_neo", {"num_layers": 2, "attention_types": [[["global"], 2]], "num_heads": 4}),
    "bloom": ("bloom", {"n_layer": 2, "n_head": 4}),
    "mamba": ("mamba", {}),
    "qwen3_next": (
        "qwen3_next",
        {
            **_GQA,
            **_MOE,
            "head_dim": 8,
            "num_experts": 4,
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    ),
}
# K and V changed after they are stored, or a pattern that pages do not know: served by gathered histories.
_GATHERED: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": (
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            **_DEEPSEEK,
            **_MOE,
            "first_k_dense_replace": 2,
        },
    ),
    "jetmoe": (
        "jetmoe",
        {"kv_channels": 8, "num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 2},
    ),
    "llama4": ("llama4_text", {**_GQA, "head_dim": 8, "num_local_experts": 2, "attention_chunk_size": 8}),
}
SUPPORTED = tuple(_CONFIGS)
GATHERED = tuple(_GATHERED)
UNSUPPORTED = tuple(_UNSUPPORTED)


def tiny_config(name: str, **changes: Any) -> Any:
    """Return a fresh config of the kind ``name``, with ``changes``."""
    model_type, own = (_CONFIGS | _GATHERED | _UNSUPPORTED)[name]
    return AutoConfig.for_model(model_type, **{**_BASE, **own, **changes})


def require_known(model_type: str) -> None:
    """Skip the test where the installed transformers is too old to know ``model_type``."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} knows no {model_type!r}")


def build(config: Any, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """Return a fresh seeded model of ``config`` in eval mode, every weight matrix and bias drawn with `STD`.

    The caller's random number generator is left as it was.
    """
    # Before 5.20 transformers runs models with a softcap by SDPA, which drops it without a word.
    options = {"attn_implementation": "eager"} if getattr(config, "attn_logit_softcapping", None) else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, **options)
        for parameter in model.parameters():
            if parameter.dim() > 1 or not torch.any(parameter):
                torch.nn.init.normal_(parameter, std=STD)
    return model.eval().requires_grad_(False)


@cache
def tiny(name: str) -> Any:
    """Return the shared model of the kind ``name`` (`SUPPORTED`, `GATHERED` or `UNSUPPORTED`)."""
    return build(tiny_config(name))


@torch.no_grad()
def stock_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """Return ``[len(tokens), vocab]``: the model alone on one text, without any cache, at `generate`'s positions."""
    positions = {"position_ids": torch.arange(len(tokens)).unsqueeze(0)}
    takes = "position_ids" in inspect.signature(model.forward).parameters
    logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False, **(positions if takes else {})).logits
    return logits[0].float()


def stock_greedy(
    model: Any, tokens: list[int], count: int, logits: Callable[..., torch.Tensor] = stock_logits
) -> list[int]:
    """Return the ``count`` greedy tokens after ``tokens``, each from the whole text computed again."""
    text = list(tokens)
    for _ in range(count):
        text.append(int(logits(model, text)[-1].argmax()))
    return text[len(tokens) :]
