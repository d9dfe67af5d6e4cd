"""A paged cache's layers as transformers sees them, made after the stock cache's own layers.

Takes the stock cache's layer objects, gives ours: a view on the paged cache for each layer that stores K and V, and
the library's own object for each that keeps something else (a recurrent or convolution state, nothing). It refuses
kinds of layers that it does not know.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from pagedkv.spec import UnsupportedModel

if TYPE_CHECKING:
    import torch

    from pagedkv.transformers.learned import Learned
    from pagedkv.transformers.paged_cache import PagedCache


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped here
    """One layer of a `PagedCache`: K and V lie in pages, and the rows are the whole cache's.

    Attributes:
        index: the layer's number.
        is_sliding: whether it sees a window only.
        sliding_window: that window; None for all.
    """

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: PagedCache, index: int, window: int | None) -> None:
        self._cache = cache
        self.index = index
        self.is_sliding = window is not None
        self.sliding_window = window

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedLayer:
        """Return another view on the same cache: models that loop over layers append copies of them."""
        return type(self)(self._cache, self.index, self.sliding_window)

    @property
    def keys(self) -> torch.Tensor | None:
        """All K that is stored, gathered: ``[rows, heads, columns, width]``; None while nothing is."""
        return self._cache.gather(self.index)[0] if self.is_initialized else None

    @keys.setter
    def keys(self, states: torch.Tensor | None) -> None:
        self._refuse_states(states)

    @property
    def values(self) -> torch.Tensor | None:
        """All V that is stored, gathered: ``[rows, heads, columns, width]``; None while nothing is."""
        return self._cache.gather(self.index)[1] if self.is_initialized else None

    @values.setter
    def values(self, states: torch.Tensor | None) -> None:
        self._refuse_states(states)

    def _refuse_states(self, states: torch.Tensor | None) -> None:
        """Let the library's base class say that there is nothing yet; K and V come by `update` alone."""
        if states is not None:
            raise TypeError(f"keys and values of layer {self.index} must be stored by update, were assigned")

    @property
    def is_initialized(self) -> bool:
        """Whether anything is stored, from earlier forwards."""
        return self.index in self._cache.learned.layers and self._cache.get_seq_length() > 0

    @property
    def record_past(self) -> bool:
        """Whether what leaves a window is kept until the next `crop`."""
        return self._cache.recording

    @record_past.setter
    def record_past(self, recording: bool) -> None:
        self._cache.recording = recording

    @property
    def batch_size(self) -> int:
        """Rows of the batch, or -1 before the first forward."""
        return self._cache.batch_size

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: pages were made with the cache."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store K and V; see `PagedCache.update`."""
        return self._cache.update(key_states, value_states, self.index)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return all columns and no offset, also for a window: what left it is 0, and masked."""
        return self._cache.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Return the columns, padding included."""
        return self._cache.get_seq_length()

    def get_max_length(self) -> int:
        """Return -1: no bound that a model should care for."""
        return -1

    # What the library keeps of a layer beside K and V: here nothing.

    def select_states(self, indices: torch.Tensor) -> None:
        """Make row ``i`` of what is kept beside K and V what row ``indices[i]`` was."""

    def crop_states(self, tokens_to_remove: int) -> None:
        """Take the last tokens away from what is kept beside K and V; ``tokens_to_remove`` is at most 0."""

    def reset_states(self) -> None:
        """Forget what is kept beside K and V."""

    def copy_states(self, other: PagedLayer) -> None:
        """Take over a copy of what ``other`` keeps beside K and V."""


class PagedHybridLayer(LinearAttentionLayer, PagedLayer):  # type: ignore[misc]
    """A layer with a recurrent or convolution state, which is the library's, beside K and V in pages."""

    is_compileable = False

    def __init__(self, cache: PagedCache, index: int, window: int | None, number_of_states: int = 1) -> None:
        PagedLayer.__init__(self, cache, index, window)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedHybridLayer:
        """Return another view on the same cache, with a copy of the state."""
        twin = type(self)(self._cache, self.index, self.sliding_window, self.number_of_states)
        twin.copy_states(self)
        return twin

    def select_states(self, indices: torch.Tensor) -> None:
        """Reorder the state's rows."""
        LinearAttentionLayer.reorder_cache(self, indices)

    def crop_states(self, tokens_to_remove: int) -> None:
        """Go back in the state, where the library can."""
        LinearAttentionLayer.crop(self, tokens_to_remove)

    def reset_states(self) -> None:
        """Clear the state."""
        LinearAttentionLayer.reset(self)

    def copy_states(self, other: PagedLayer) -> None:
        """Take over a copy of the other's state."""
        own = {"_cache", "index", "is_sliding", "sliding_window"}
        self.__dict__.update({name: copy.deepcopy(value) for name, value in vars(other).items() if name not in own})


class PagedIndexedLayer(PagedLayer):
    """A layer whose sparse attention keeps the keys of an indexer, which are the library's, beside K and V in pages."""

    def __init__(self, cache: PagedCache, index: int, window: int | None) -> None:
        super().__init__(cache, index, window)
        self.indexer = DynamicIndexedLayer()  # its own K and V stay empty

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Store the indexer's new keys; return all."""
        keys: torch.Tensor = self.indexer.update_indexer(indexer_key_states)
        return keys

    @property
    def indexer_keys(self) -> torch.Tensor | None:
        """The indexer's keys."""
        keys: torch.Tensor | None = self.indexer.indexer_keys
        return keys

    @property
    def indexer_position_ids(self) -> torch.Tensor | None:
        """The indexer's positions, for models that keep them."""
        positions: torch.Tensor | None = self.indexer.indexer_position_ids
        return positions

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: torch.Tensor | None) -> None:
        self.indexer.indexer_position_ids = positions

    def select_states(self, indices: torch.Tensor) -> None:
        """Reorder the indexer's rows."""
        self.indexer.reorder_cache(indices)

    def crop_states(self, tokens_to_remove: int) -> None:
        """Take the indexer's last keys away."""
        self.indexer.crop(tokens_to_remove)

    def reset_states(self) -> None:
        """Forget the indexer's keys."""
        self.indexer = DynamicIndexedLayer()

    def copy_states(self, other: PagedLayer) -> None:
        """Take over a copy of the other's indexer."""
        assert isinstance(other, PagedIndexedLayer)
        self.indexer = copy.deepcopy(other.indexer)


def make_layers(cache: PagedCache, learned: Learned) -> list[Any]:
    """Return one layer object for each of the stock cache's.

    Raises:
        UnsupportedModel: if one is of a kind that the model's own file defines.
    """
    layers: list[Any] = []
    for index in range(learned.num_layers):
        kind = learned.kinds[index] if index < len(learned.kinds) else DynamicLayer()
        if type(kind).__module__ != CacheLayerMixin.__module__:
            raise UnsupportedModel(f"{learned.name} keeps a {type(kind).__name__} of its own in layer {index}")
        stored = learned.layers.get(index)
        window = None if stored is None else stored.window
        if not isinstance(kind, CacheLayerMixin):
            layers.append(_without_contents(kind))
        elif isinstance(kind, LinearAttentionLayer):
            layers.append(PagedHybridLayer(cache, index, window, kind.number_of_states))
        elif isinstance(kind, DynamicIndexedLayer):
            layers.append(PagedIndexedLayer(cache, index, window))
        elif type(kind) in {DynamicLayer, DynamicSlidingWindowLayer}:
            layers.append(PagedLayer(cache, index, window))
        else:
            raise UnsupportedModel(f"{learned.name} keeps a {type(kind).__name__} in layer {index}")
    return layers


def _without_contents(kind: Any) -> Any:
    """Return a fresh layer of the library's, of the same kind."""
    states = getattr(kind, "number_of_states", None)
    return type(kind)() if states is None else type(kind)(number_of_states=states)


def select_rows(layer: Any, indices: torch.Tensor) -> None:
    """Reorder what ``layer`` keeps beside pages."""
    if isinstance(layer, PagedLayer):
        layer.select_states(indices)
    else:
        layer.reorder_cache(indices)


def crop_tokens(layer: Any, tokens_to_remove: int) -> None:
    """Take the last tokens away from what ``layer`` keeps beside pages."""
    if isinstance(layer, PagedLayer):
        layer.crop_states(tokens_to_remove)
    else:
        layer.crop(tokens_to_remove)


def keeps_states(layer: Any) -> bool:
    """Whether ``layer`` keeps anything that changes beside pages."""
    return isinstance(layer, LinearAttentionCacheLayerMixin | PagedIndexedLayer)
