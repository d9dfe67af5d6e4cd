"""SlidingCache: a paged cache in which layers of full attention see a recent window and a text's first tokens only.

Takes a model's `KVSpec` and a window; gives the `CacheBackend` protocol, so that pages which leave the window come
back; refuses to promise equal answers: what is outside the window is lost to the model, and only eager attention under
the same mask says the same. Positions stay the text's own. The first tokens stay visible because attention leans on
them (Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Self

from pagedkv.cache import PagedKVCache
from pagedkv.sizing import require_count

if TYPE_CHECKING:
    from pagedkv.attention import LayerSpec
    from pagedkv.spec import KVSpec

DEFAULT_WINDOW: Final = 1024
DEFAULT_SINK_TOKENS: Final = 4


class SlidingCache(PagedKVCache):
    """`PagedKVCache` whose layers without a window of their own have one. Built by `of`.

    Layers that have a window in the model keep it, and see no sink tokens.
    """

    @classmethod
    def of(
        cls,
        spec: KVSpec,
        *,
        window: int = DEFAULT_WINDOW,
        num_sink_tokens: int = DEFAULT_SINK_TOKENS,
        **options: Any,
    ) -> Self:
        """Build it for what a model stores; other ``options`` are those of `PagedKVCache.from_spec`.

        Raises:
            TypeError, ValueError: ``window`` is below 1, ``num_sink_tokens`` below 0; or as in `from_spec`.
        """
        require_count("window", window)
        if num_sink_tokens:
            require_count("num_sink_tokens", num_sink_tokens)
        layers = tuple(
            replace(layer, window=window, num_sink_tokens=num_sink_tokens) if layer.window is None else layer
            for layer in spec.layers
        )
        return cls.from_spec(replace(spec, layers=layers), **options)

    def bind_layer(self, layer: int, spec: LayerSpec) -> None:
        """Say how ``layer`` attends; what the model lets see everything sees the window instead."""
        if spec.window is None:
            kept = self.spec.layers[layer]
            spec = replace(spec, window=kept.window, num_sink_tokens=kept.num_sink_tokens)
        super().bind_layer(layer, spec)
