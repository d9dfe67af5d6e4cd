"""What an engine is made of: a model by name, a cache by name, the ids that end a text.

Takes what a caller wrote, gives transformers objects and cache backends, and refuses with the argument's name. Nothing
that comes with a model's files is executed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedkv.engine.baselines import ConcatCache, NoCache, StaticCache
from pagedkv.engine.checks import require_token_ids
from pagedkv.engine.defaults import BASELINE_BATCH
from pagedkv.engine.strategies import make_paged
from pagedkv.sizing import parse_memory
from pagedkv.spec import KVSpec
from pagedkv.transformers import observe_kv_spec

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pagedkv.backend import CacheBackend
    from pagedkv.engine.strategies import Sizes, StrategyChoice

BACKENDS = ("paged", "concat", "static", "none")


def load_pretrained(
    name_or_path: str | os.PathLike[str], dtype: torch.dtype | str | None, device: torch.device | str | None
) -> tuple[Any, Any]:
    """Return a causal language model in eval mode and its tokenizer, from a local folder or by its hub name.

    ``dtype`` None keeps the one the weights are stored in; ``device`` None is the CPU.

    Raises:
        ValueError: if there is no such folder or model, or the model is no decoder-only language model.
    """
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    if not isinstance(name_or_path, str | os.PathLike):
        raise TypeError(f"name_or_path must be a folder or a hub name, was {name_or_path!r:.60}")
    name = os.fspath(name_or_path)
    if _is_path(name) and not (Path(name) / "config.json").is_file():
        what = "a folder without config.json" if Path(name).is_dir() else "no folder"
        raise ValueError(f"name_or_path must be a folder with a model or a hub name, was {name!r}: {what}")
    try:
        config = AutoConfig.from_pretrained(name)
        KVSpec.from_config(config)
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype="auto" if dtype is None else dtype)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(
            f"name_or_path must be a folder with a decoder-only model or a hub name, was {name!r}: {error}"
        ) from error
    if device is not None:
        model = model.to(device)
    return model.eval(), tokenizer


def _is_path(name: str) -> bool:
    return Path(name).exists() or name.startswith((".", "~", os.sep)) or name.count("/") > 1


def make_cache(
    backend: Any,
    model: Any,
    strategy: str,
    sizes: Sizes,
    *,
    window: int,
    num_sink_tokens: int,
    prefix_cache: bool,
) -> tuple[CacheBackend, StrategyChoice | None]:
    """Return the cache that ``backend`` names or is, and for "paged" (None) what it keeps and why; see `Engine`.

    Raises:
        TypeError: ``backend`` is neither a name nor a cache.
        ValueError: a cache of another model, or sizes and strategies that it has no use for.
    """
    if backend is None or backend == "paged":
        return make_paged(
            model, strategy, sizes, window=window, num_sink_tokens=num_sink_tokens, prefix_cache=prefix_cache
        )
    if strategy != "full":
        raise ValueError(f"strategy must be 'full' for any backend but 'paged', was {strategy!r}")
    if isinstance(backend, str):
        return make_baseline(backend, model, sizes), None
    if sizes.memory is not None or sizes.num_pages is not None:
        raise ValueError("memory and num_pages must be None when backend is a cache of its own")
    if not hasattr(backend, "begin_step"):
        raise TypeError(f"backend must be a name or a CacheBackend, was {type(backend).__name__}")
    _require_made_for(backend, model)
    most: int | None = getattr(backend, "max_batch", None)
    if sizes.max_batch is not None and most is not None and sizes.max_batch > most:
        raise ValueError(f"max_batch must be at most the cache's {most}, was {sizes.max_batch}")
    return backend, None


def _require_made_for(cache: Any, model: Any) -> None:
    """Refuse a cache of another model's layers or dtype, where it says for which it was made."""
    spec = observe_kv_spec(model)
    own: KVSpec | None = getattr(cache, "model_spec", None) or getattr(cache, "spec", None)
    if own is not None and own.layers != spec.layers:
        raise ValueError(
            f"backend must be made for the model's {spec.num_layers} layers, {spec.layers[0]} first; "
            f"was made for {own.num_layers}, {own.layers[0]} first"
        )
    dtype = getattr(cache, "dtype", model.dtype)
    if dtype != model.dtype:
        raise ValueError(f"backend must be of the model's dtype, {model.dtype}, was {dtype}")


def make_baseline(name: str, model: Any, sizes: Sizes) -> CacheBackend:
    """Return the baseline cache called ``name`` for ``model``, in its dtype and on its device.

    ``sizes.memory`` bounds the tokens of "concat" and the slabs of "static".

    Raises:
        ValueError: for an unknown name, or a size that the cache has no use for or cannot keep.
    """
    options: dict[str, Any] = {"dtype": model.dtype, "device": model.device}
    memory, max_batch = sizes.memory, sizes.max_batch or BASELINE_BATCH
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)} or a CacheBackend, was {name!r}")
    if sizes.num_pages is not None:
        raise ValueError(f"num_pages must be None for backend {name!r}, which has no pages, was {sizes.num_pages}")
    spec = observe_kv_spec(model)
    if name == "none":
        if memory is not None:
            raise ValueError(f"memory must be None for backend 'none', which keeps nothing, was {memory!r}")
        return NoCache(spec, **options)
    tokens = None if memory is None else parse_memory(memory) // spec.bytes_per_token(model.dtype)
    if name == "concat":
        return ConcatCache(spec, max_tokens=tokens, **options)
    slabs = max_batch if tokens is None else min(max_batch, tokens // sizes.max_len)
    if slabs < 1:
        raise ValueError(
            f"memory must hold one slab of max_len = {sizes.max_len} tokens for backend 'static', was {memory!r}"
        )
    return StaticCache(spec, max_batch=slabs, max_len=sizes.max_len, **options)


def find_eos_token_ids(model: Any, tokenizer: Any) -> list[int]:
    """Return the ids that end a text: the generation config's, as `generate` has it, else the tokenizer's."""
    generation = getattr(model, "generation_config", None)
    for source in (generation, model.config.get_text_config(decoder=True), tokenizer):
        ids: int | Sequence[int] | None = getattr(source, "eos_token_id", None)
        if ids is not None:
            return require_token_ids("eos_token_id", [ids] if isinstance(ids, int) else ids, None)
    return []
