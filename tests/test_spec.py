"""What a config says about its KV: counts, widths, windows and bytes, and refusals with the reason."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig

from pagedkv.spec import KVSpec, LayerKV, UnsupportedModel
from tests.tiny_models import SUPPORTED, VOCAB, WINDOW, require_known, tiny, tiny_config

# Kind: (KV heads, head width, windows of the layers).
EXPECTED = {
    "llama": (2, 8, (None, None)),
    "llama_mha": (4, 8, (None, None)),
    "llama_mqa": (1, 8, (None, None)),
    "qwen2": (2, 8, (None, None)),
    "qwen3": (2, 16, (None, None)),
    "mistral": (2, 8, (WINDOW, WINDOW)),
    "gemma2": (2, 8, (WINDOW, None)),
    "gemma3": (2, 8, (WINDOW,) * 5 + (None,)),
    "gpt_oss": (2, 8, (WINDOW, None)),
    "gpt_neox": (4, 8, (None, None)),
    "phi": (4, 8, (None, None)),
    "gpt2": (4, 8, (None, None)),
}


@pytest.mark.parametrize("name", SUPPORTED)
def test_tiny_configs_read_as_their_models_are(name: str) -> None:
    """Heads, widths and windows are the model's own; absent KV heads mean one per query head."""
    heads, dim, windows = EXPECTED[name]
    spec = KVSpec.from_config(tiny_config(name))

    assert tuple(LayerKV(heads, dim, dim, window) for window in windows) == spec.layers
    assert (len(windows), 256, VOCAB) == (spec.num_layers, spec.max_len, spec.vocab_size)


def test_bytes_per_token_count_every_layer_and_both_widths() -> None:
    """Bytes are the sum over layers of KV heads times (K width + V width), in the dtype asked for."""
    spec = KVSpec(layers=(LayerKV(2, 8, 6), LayerKV(1, 4, 4, window=3), LayerKV(0, 8, 8)), max_len=8, vocab_size=4)
    assert (2 * 14 + 8) * 4 == spec.bytes_per_token(torch.float32)
    assert (2 * 14 + 8) * 2 == spec.bytes_per_token(torch.bfloat16)


@pytest.mark.parametrize(
    ("model_type", "changes", "layers", "max_len"),
    [
        ("llama", {}, {LayerKV(32, 128, 128): 32}, 2048),
        ("mistral", {}, {LayerKV(8, 128, 128, 4096): 32}, 131072),
        ("mistral", {"sliding_window": None}, {LayerKV(8, 128, 128): 32}, 131072),
        ("gemma2", {}, {LayerKV(4, 256, 256, 4096): 13, LayerKV(4, 256, 256): 13}, 8192),
        ("gpt_oss", {}, {LayerKV(8, 64, 64, 128): 18, LayerKV(8, 64, 64): 18}, 131072),
        ("gpt_bigcode", {}, {LayerKV(1, 64, 64): 12}, 1024),
        ("mimo_v2_flash", {"sliding_window": 129}, {LayerKV(4, 192, 128, 129): 39, LayerKV(4, 192, 128): 9}, 131072),
        ("gemma3", {}, {LayerKV(4, 256, 256, 4096): 22, LayerKV(4, 256, 256): 4}, 131072),
        ("gemma4_text", {}, {LayerKV(4, 256, 256, 512): 25, LayerKV(4, 512, 512): 5}, 131072),
        ("opt", {}, {LayerKV(12, 64, 64): 12}, 2048),
        ("deepseek_v3", {}, {LayerKV(1, 512, 64): 61}, 4096),
        ("llama4_text", {}, {LayerKV(8, 128, 128, 8192, chunked=True): 36, LayerKV(8, 128, 128): 12}, 131072),
    ],
)
def test_library_defaults(
    model_type: str, changes: dict[str, object], layers: dict[LayerKV, int], max_len: int
) -> None:
    """Full size configs, whose layers may differ in width, window and kind, read layer by layer."""
    require_known(model_type)
    spec = KVSpec.from_config(AutoConfig.for_model(model_type, **changes))

    assert layers == {layer: spec.layers.count(layer) for layer in spec.layers}
    assert max_len == spec.max_len


def test_layers_that_share_kv_store_nothing() -> None:
    """Gemma 3n's last layers reuse earlier K and V: they have no KV heads and cost no bytes."""
    config = AutoConfig.for_model("gemma3n_text", num_kv_shared_layers=15, num_hidden_layers=35)
    spec = KVSpec.from_config(config)
    assert [0] * 15 == [layer.num_kv_heads for layer in spec.layers[20:]]
    assert 20 * 2 * 2 * 256 * 4 == spec.bytes_per_token(torch.float32)


def test_switching_rope_ends_the_context() -> None:
    """Where rotary scaling switches at a length, the context ends there: no neighbour can change an answer."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = tiny_config("llama", rope_parameters={**rope, "original_max_position_embeddings": 64})
    assert KVSpec.from_config(config).max_len == 64


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("bart", "encoder-decoder"),
        ("t5gemma", "encoder-decoder"),
        ("mamba", "recurrent state"),
        ("qwen3_next", "recurrent state"),
        ("falcon_h1", "recurrent state beside K and V"),
        ("lfm3", "convolution state"),
        ("deepseek_v4", "compressed"),
        ("mllama_text_model", "cross attention"),
        ("rwkv", "no attention heads"),
        ("bloom", "no context length"),
    ],
)
def test_other_pasts_are_refused_with_the_reason(model_type: str, reason: str) -> None:
    """A model that keeps anything else than K and V per token is refused, named, with what it keeps."""
    require_known(model_type)
    with pytest.raises(UnsupportedModel, match=rf"'{model_type}'.* {reason}"):
        KVSpec.from_config(AutoConfig.for_model(model_type))


def test_cross_attention_of_a_decoder_is_refused() -> None:
    """A decoder made for cross attention is refused although it could run alone."""
    with pytest.raises(UnsupportedModel, match="cross attention"):
        KVSpec.from_config(tiny_config("gpt2", add_cross_attention=True))


def test_wrong_values_are_refused() -> None:
    """What is no config, and numbers that describe no layer, raise by name."""
    with pytest.raises(TypeError, match="config must be a transformers config, was dict"):
        KVSpec.from_config({})
    with pytest.raises(ValueError, match="k_dim must be positive, was 0"):
        LayerKV(1, 0, 4)
    with pytest.raises(ValueError, match="window must be None or at least 1, was 0"):
        LayerKV(1, 4, 4, window=0)


def test_the_model_itself_agrees() -> None:
    """The bytes said are those that the library's own cache of the model holds."""
    for name in ("llama", "qwen3", "llama_mqa"):
        model = tiny(name)
        cache = model(torch.tensor([[5, 6, 7]]), use_cache=True).past_key_values
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        assert held == 3 * KVSpec.from_config(model.config).bytes_per_token(torch.float32)


def test_import_needs_no_model_library() -> None:
    """Importing the module loads neither torch nor transformers."""
    code = "import sys, pagedkv.spec; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
