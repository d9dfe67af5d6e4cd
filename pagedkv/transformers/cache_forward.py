"""One forward of a model on a `PagedCache`: the step that it is to the pages, from the first layer to the last.

Takes what layers store and ask, gives attention through pages or K and V gathered for the model's own attention, and
refuses to decide which: the attention function does. Only real tokens are stored: between a padded batch of columns
and the ragged step of positions it translates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pagedkv.spec import UnsupportedModel
from pagedkv.transformers.columns import last_hole
from pagedkv.transformers.dense import column_slots, gather_columns, group_of

if TYPE_CHECKING:
    from pagedkv.attention import LayerSpec
    from pagedkv.step import PagedStep
    from pagedkv.transformers.learned import Learned
    from pagedkv.transformers.paged_cache import PagedCache
    from pagedkv.transformers.rows import Rows

_TAG = "_pagedkv_tag"


class Tag(NamedTuple):
    """What a K or V that came out of `PagedCache.update` carries: whose, which, and whether it has the past in it."""

    forward: CacheForward
    layer: int
    role: str
    gathered: bool


def tag_of(states: torch.Tensor) -> Tag | None:
    """Return the tag of K or V, or None where the model made them itself."""
    tag: Tag | None = getattr(states, _TAG, None)
    return tag


class CacheForward:
    """One forward on one cache.

    Attributes:
        cache: the cache.
        learned: what is known of the model.
        learning: whether this forward has no past and is watched: every layer stores, none is expected to be known.
        own_attention: whether every layer attends in the model's own way, to gathered K and V.
        implementation_before: by id of a config, the attention implementation that it named.
        written: the layers that have stored.
        attended: the layers whose attention read pages (or could have, while learning).
        masks: our own masks by the address of their storage, with the window that each describes.
    """

    def __init__(
        self,
        cache: PagedCache,
        learned: Learned,
        *,
        mask: torch.Tensor | None,
        input_ids: torch.Tensor | None,
        learning: bool,
        own_attention: bool,
    ) -> None:
        self.cache = cache
        self.learned = learned
        self.learning = learning
        self.own_attention = own_attention
        self.implementation_before: dict[int, str | None] = {}
        self.written: set[int] = set()
        self.attended: set[int] = set()
        self.masks: dict[int, tuple[Any, int | None]] = {}
        self._mask = mask
        self._input_ids = input_ids
        self._rows: Rows | None = None
        self._step: PagedStep | None = None
        self._real: torch.Tensor | None = None
        self._count = 0
        self._start = 0
        self._hole = -1
        self._slots: dict[int, torch.Tensor] = {}

    # The step.

    def begin(self, num_rows: int, count: int) -> None:
        """Make room for ``count`` columns in ``num_rows`` rows, all or nothing; the first call of a forward counts.

        Raises:
            ValueError: the batch is not the one in the cache, or the mask disagrees with what is stored.
            OutOfPages: the pool cannot take them; nothing has changed.
        """
        if self._rows is not None:
            if (num_rows, count) != (self._rows.columns.num_rows, self._count):
                raise UnsupportedModel(
                    f"{self.learned.name} stores {num_rows} rows of {count} tokens in a forward of "
                    f"{self._rows.columns.num_rows} rows of {self._count}"
                )
            return
        with self.cache.rows_for(num_rows) as rows:
            mask = self._mask if self._mask is not None and self._mask.dim() == 2 else None
            self._real = rows.columns.read(mask, count)
            self._start = rows.columns.count
            inputs = self._inputs(rows, num_rows, count)
            if inputs:
                self._step = self.cache.store.begin_step(inputs)
            self._rows, self._count = rows, count
            self._hole = rows.columns.last_hole if self._real is None else last_hole(self._all_real())

    def _inputs(self, rows: Rows, num_rows: int, count: int) -> dict[Any, list[int] | int]:
        """Return what the step takes: token ids where they are to be indexed, else how many."""
        counts = [count] * num_rows if self._real is None else self._real.sum(1).tolist()
        sequences = [(i, sequence) for i, sequence in enumerate(rows.sequences) if counts[i]]
        ids = self._input_ids
        if not self.cache.indexing or ids is None or tuple(ids.shape) != (num_rows, count):
            return {sequence: counts[i] for i, sequence in sequences}
        ids = ids.cpu()
        return {
            sequence: (ids[i] if self._real is None else ids[i][self._real[i]]).tolist() for i, sequence in sequences
        }

    def end(self) -> None:
        """Commit what was stored: the forward is over."""
        if self._rows is not None:
            if self._step is not None:
                self.cache.store.end_step(self._step)
            self._rows.columns.append(self._real, self._count)
        self._rows = self._step = None

    def abandon(self) -> None:
        """Take everything back: the forward raised."""
        if self._step is not None:
            self.cache.store.abandon_step(self._step)
        self._rows = self._step = None
        self.cache.forward_failed()

    @property
    def columns_end(self) -> int:
        """Columns with this forward's."""
        return self._start + self._count

    @property
    def needs_masks(self) -> bool:
        """Whether some layer must be given a mask: columns are padding, or a layer attends in the model's own way."""
        padded = self._real is not None or (self._rows is not None and self._rows.columns.padded)
        return padded or self.learning or bool(self.learned.gathered)

    # Layers.

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store K ``[rows, heads, count, width]`` and V of ``layer``; return what the model is to go on with, tagged.

        That is the new K and V themselves where the layer reads pages, else everything stored, gathered.
        """
        stored = self.learned.layers.get(layer)
        if stored is None:
            raise ValueError(f"layer {layer} must store no K and V, as when the model was tried out")
        if k.requires_grad or v.requires_grad:
            raise RuntimeError("a PagedCache keeps no gradients: call the model under torch.no_grad()")
        stored.require(layer, k, v)
        self.begin(k.shape[0], k.shape[2])
        if layer in self.written:
            raise UnsupportedModel(f"{self.learned.name} stores K and V of layer {layer} twice in one forward")
        if self._step is not None:
            self.cache.store.write(layer, self._packed(k, stored.folded), self._packed(v, stored.folded), self._step)
        self.written.add(layer)
        gathered = self.own_attention or not self.learned.paged(layer)
        if gathered:
            k, v = self.gather(layer)
        return self._tagged(k, layer, "key", gathered), self._tagged(v, layer, "value", gathered)

    def _packed(self, states: torch.Tensor, folded: bool) -> torch.Tensor:
        """Return ``[rows, heads, count, width]`` as ``[total, heads, width]``, padding left out."""
        states = states.transpose(1, 2)
        if folded:
            states = states.flatten(2).unsqueeze(2)
        if self._real is None:
            return states.flatten(0, 1)
        return states[self._real.to(states.device)]

    def _tagged(self, states: torch.Tensor, layer: int, role: str, gathered: bool) -> torch.Tensor:
        view = states.view_as(states)
        setattr(view, _TAG, Tag(self, layer, role, gathered))
        return view

    def attend(self, layer: int, query: torch.Tensor, spec: LayerSpec) -> torch.Tensor:
        """Attend from query ``[rows, heads, n, width]``, the last n columns, to pages: ``[rows, n, heads, v_width]``.

        Padding gives zeros.
        """
        store = self.cache.store
        if store.layer_specs[layer] is not spec:
            store.bind_layer(layer, spec)
        num_rows, num_heads, n, _ = query.shape
        v_dim = self.learned.layers[layer].v_shape[1]
        if self._step is None:
            return query.new_zeros(num_rows, n, num_heads, v_dim)
        if n < self._count:
            # A layer may ask for its last columns only; the step's rows are all columns.
            query = torch.nn.functional.pad(query, (0, 0, self._count - n, 0))
        out = store.attend(layer, self._packed(query, folded=False), self._step)
        if self._real is None:
            dense = out.view(num_rows, self._count, num_heads, v_dim)
        else:
            dense = out.new_zeros(num_rows, self._count, num_heads, v_dim)
            dense[self._real.to(out.device)] = out
        return dense[:, self._count - n :]

    def gather(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all K and V of ``layer``, this forward's included, ``[rows, heads, columns, width]``; padding is 0."""
        assert self._rows is not None
        group = group_of(self.cache.store, layer)
        if group not in self._slots:
            self._slots[group] = column_slots(self._rows.sequences, self._all_real(), group)
        stored = self.learned.layers[layer]
        return gather_columns(self.cache.store, layer, self._slots[group], stored.k_shape[0], stored.v_shape[0])

    def _all_real(self) -> torch.Tensor:
        """Return which columns are real, this forward's included: bool ``[rows, columns]``."""
        assert self._rows is not None
        real = self._rows.columns.real
        new = torch.ones(len(real), self._count, dtype=torch.bool) if self._real is None else self._real
        return torch.cat([real, new], 1)

    @property
    def ends_in_padding(self) -> bool:
        """Whether a row's last column is padding: `generate` reads its answer all the same, as of any query."""
        return self._real is not None and not bool(self._real[:, -1].all())

    # Masks.

    def own_mask(self, layer: int, n: int, device: torch.device) -> torch.Tensor:
        """Return what the last ``n`` columns see of a layer's columns, bool ``[rows, 1, n, columns]``."""
        real, stored = self._all_real(), self.learned.layers[layer]
        keys = torch.arange(self.columns_end)
        queries = keys[-n:, None]
        seen = keys <= queries
        if stored.window is not None and not stored.chunked:
            seen &= keys > queries - stored.window
        elif stored.window is not None:
            padding = (real.cumsum(1) == 0).sum(1)[:, None, None]
            seen = seen & ((keys - padding) // stored.window == (queries - padding) // stored.window)
        return (seen & real[:, None, :]).unsqueeze(1).to(device)

    def remember(self, mask: Any, window: int | None) -> None:
        """Note that ``mask`` says nothing but causality, padding and ``window``."""
        self.masks[mask_key(mask)] = (mask, window)

    def is_within_window(self, window: int | None) -> bool:
        """Whether distances between columns are distances between positions, as far as a window reaches back."""
        return window is None or self._hole < max(0, self._start - window + 1)


def mask_key(mask: Any) -> int:
    """Return what tells a mask, and views of it, from others."""
    if isinstance(mask, torch.Tensor):
        return mask.untyped_storage().data_ptr()
    return id(mask)
