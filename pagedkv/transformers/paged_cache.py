"""PagedCache: what a user gives to ``model.generate`` to have K and V in pages.

Takes a model and a size, gives transformers' own `Cache` interface over a `PagedKVCache`, and refuses whatever it
could not do as the stock cache does. How a forward becomes a step stands in `cache_forward`, how the model is reached
in `binding`, and what is known of its layers in `learned`.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import torch
from transformers.cache_utils import Cache

from pagedkv.transformers.build import build_binding
from pagedkv.transformers.dense import column_slots, gather_columns, group_of
from pagedkv.transformers.layers import PagedLayer, crop_tokens, keeps_states, make_layers, select_rows
from pagedkv.transformers.rows import Rows, row_numbers
from pagedkv.transformers.versions import hide_renaming_warning

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

    from pagedkv.backend import CacheUsage
    from pagedkv.cache import PagedKVCache
    from pagedkv.transformers.binding import Binding
    from pagedkv.transformers.learned import Learned


class PagedCache(Cache):  # type: ignore[misc]  # transformers is untyped here
    """A KV cache in pages for ``model.generate(…, past_key_values=cache)``.

    It grows without copying, keeps what it holds between calls, and frees it on `reset` or `close`, or at the end of
    a ``with``. ``copy.deepcopy(cache)`` forks it: both go on alone and share what they had, page by page.

    Args:
        model: the model it will be used with, in eval mode; it is tried out once with a few tokens.
        memory: bytes for pages, or text such as ``"2GiB"``; or
        num_pages: pages, the null page counted. By default room for 32 texts of the model's context, at most a
            quarter of the free memory.
        page_size: token slots per page, a power of two from 1 to 256.
        max_len: the longest text, in tokens; by default the model's own context.
        max_batch: the most rows, beams counted one by one.
        policy: which idle pages are evicted first (see `match`).
        attention_backend: a backend of `pagedkv.attention` by name, or None to choose.
        check: verify table contents at every call of the operator.

    Attributes:
        binding: the model and its pages, which forks share.
        indexing: whether tokens that are stored can be found by later calls (`match`).
        recording: whether what leaves a sliding window is kept until the next `crop`.

    Raises:
        TypeError: if ``model`` is no transformers model.
        ValueError: if it is in training mode, or a size is wrong.
        UnsupportedModel: if the model's past cannot be paged; the message says why.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        memory: int | str | None = None,
        num_pages: int | None = None,
        page_size: int = 16,
        max_len: int | None = None,
        max_batch: int = 256,
        policy: str = "lru",
        attention_backend: str | None = None,
        check: bool = False,
    ) -> None:
        options: dict[str, Any] = {
            "memory": memory, "num_pages": num_pages, "page_size": page_size, "max_len": max_len,
            "max_batch": max_batch, "policy": policy, "attention_backend": attention_backend, "check": check,
        }  # fmt: skip
        self._begin(build_binding(model, **options))
        hide_renaming_warning()

    @classmethod
    def on(cls, binding: Binding) -> Self:
        """Return an empty cache on pages that are there already."""
        cache = cls.__new__(cls)
        cache._begin(binding)
        return cache

    def _begin(self, binding: Binding) -> None:
        self.binding: Binding | None = binding
        self.indexing = False
        self.recording = False
        self._rows: Rows | None = None
        self._matched = False
        self._spoiled = False
        super().__init__(layers=make_layers(self, binding.learned))
        self.keeps_states = any(keeps_states(layer) for layer in self.layers)
        binding.caches.add(self)

    def __repr__(self) -> str:
        if self.binding is None:
            return "PagedCache(closed)"
        return f"PagedCache({self.binding.learned.name}, rows={self.batch_size}, columns={self.get_seq_length()})"

    def __enter__(self) -> Self:
        self._bound()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # What it stands on.

    def _bound(self) -> Binding:
        if self.binding is None:
            raise RuntimeError("this PagedCache was used after close()")
        return self.binding

    @property
    def store(self) -> PagedKVCache:
        """The pages."""
        return self._bound().store

    @property
    def learned(self) -> Learned:
        """What is known of the model's layers; ``learned.gathered`` says which cannot attend through pages, and why."""
        return self._bound().learned

    def require_usable(self) -> None:
        """Raise RuntimeError where the last forward left a state that cannot be taken back."""
        if self._spoiled:
            raise RuntimeError(
                "a forward on this PagedCache raised after a recurrent layer had changed its state, which cannot be "
                "taken back; call reset()"
            )

    def forward_failed(self) -> None:
        """Note that a forward raised: pages are as before it, but recurrent states may not be."""
        self._spoiled = self.keeps_states

    def usage(self) -> CacheUsage:
        """Return what is held now, by all caches on these pages; a page that several share counts once."""
        return self.store.usage()

    def hand_over(self) -> None:
        """Let another thread use this cache and its forks from now on; a thread that has ended needs no such call."""
        self._bound().hand_over()

    # Transformers' questions.

    @property
    def batch_size(self) -> int:
        """Rows of the batch, or -1 before the first forward."""
        return -1 if self._rows is None else self._rows.columns.num_rows

    @property
    def row_lengths(self) -> list[int]:
        """Each row's stored tokens, padding left out."""
        return [] if self._rows is None else [sequence.num_tokens for sequence in self._rows.sequences]

    @property
    def is_compileable(self) -> bool:
        """False: the library would build masks ahead and compile."""
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the columns so far, padding included."""
        return 0 if self._rows is None else self._rows.columns.count

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return the columns so far."""
        return self.get_seq_length()

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return all columns, the next ``query_length`` included, and no offset; also for windows."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1: no bound that a model should care for."""
        return -1

    # Storing.

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store K and V ``[rows, heads, tokens, width]`` of a layer; return what its attention is to be given.

        Raises:
            RuntimeError: no forward of this cache's own model is running, or gradients are wanted.
            ValueError: K or V is not as the layer's was when the model was tried out.
            OutOfPages: there are too few pages; nothing of this forward is stored.
        """
        forward = self._bound().forward
        if forward is None or forward.cache is not self:
            raise RuntimeError(
                f"this PagedCache was made for a {self.learned.name} and stores what that model's forward "
                "gives it; another model, or other code, called update"
            )
        return forward.store(layer_idx, key_states, value_states)

    @contextmanager
    def rows_for(self, num_rows: int) -> Iterator[Rows]:
        """Give the rows that a forward of ``num_rows`` goes on with; new ones are closed again if it cannot begin."""
        opened = self._rows is None
        rows = Rows.opened(self.store, num_rows) if self._rows is None else self._rows
        rows.fit(num_rows, matched=self._matched)
        if self.recording:
            for sequence in rows.sequences:
                sequence.hold_window()
        try:
            yield rows
        except BaseException:
            if opened:
                rows.close()
            raise
        self._rows, self._matched = rows, False

    def gather(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all K and V of ``layer``, each ``[rows, heads, columns, width]``; padding is 0."""
        binding, stored = self._bound(), self.learned.layers[layer]
        if self._rows is None:
            raise RuntimeError("gather needs a cache in which something is stored")
        slots = column_slots(self._rows.sequences, self._rows.columns.real, group_of(binding.store, layer))
        return gather_columns(binding.store, layer, slots, stored.k_shape[0], stored.v_shape[0])

    # Rows and columns.

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make row ``i`` what row ``beam_idx[i]`` was: tables are permuted, shared pages are copied when written.

        The pages of rows that nobody took come back.
        """
        self._select(row_numbers(beam_idx))

    def batch_select_indices(self, indices: torch.Tensor | list[int]) -> None:
        """Keep the rows of ``indices`` (numbers, or one bool per row)."""
        self._select(row_numbers(indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Make ``repeats`` rows of each, next to one another; they share their pages."""
        if repeats < 1:
            raise ValueError(f"repeats must be at least 1, was {repeats}")
        self._select([row for row in range(max(self.batch_size, 0)) for _ in range(repeats)])

    def _select(self, indices: list[int]) -> None:
        with self._bound().operation():
            self.require_usable()
            if self._rows is None:
                return
            self._rows.select(indices)
            if self.keeps_states:
                for layer in self.layers:
                    select_rows(layer, torch.tensor(indices))

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last ``-tokens_to_remove`` columns away; 0 ends what `activate_past_recording` holds.

        Raises:
            ValueError: the number is positive.
            BeyondWindow: a sliding window has given back what would be seen again (`activate_past_recording`).
        """
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove must be 0 or negative, was {tokens_to_remove}")
        with self._bound().operation():
            self.require_usable()
            if self._rows is not None and tokens_to_remove:
                self._rows.crop(-tokens_to_remove)
            if self.keeps_states:
                for layer in self.layers:
                    crop_tokens(layer, tokens_to_remove)

    def activate_past_recording(self) -> None:
        """Keep what leaves a sliding window until the next `crop`, from the next forward on."""
        self.recording = True
        for layer in self.layers:
            if not isinstance(layer, PagedLayer) and hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()

    # Texts that were here before.

    def match(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> int:
        """Begin anew with what is stored of these prompts already; from now on what is stored can be found.

        What the cache held is given back first, and found again where the texts begin alike. Call it before
        ``generate`` with the same ``input_ids``; generate then computes the rest.

        Args:
            input_ids: ``[rows, columns]``.
            attention_mask: ``[rows, columns]``, true for real tokens; None: all are.

        Returns:
            The columns that need not be computed: the least over the rows, and never all.
        """
        if input_ids.dim() != 2:
            raise ValueError(f"input_ids must be [rows, columns], was {[*input_ids.shape]}")
        if self.keeps_states:
            raise ValueError("match needs a model that keeps nothing but K and V: a recurrent state is not in pages")
        if self.learned.stores_padding:
            raise ValueError("match needs a model whose answers do not depend on what stands in padding")
        real = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        if real.shape != input_ids.shape:
            raise ValueError(f"attention_mask must be {[*input_ids.shape]}, as input_ids, was {[*real.shape]}")
        self.reset()
        self.indexing = True
        with self._bound().operation():
            self._rows = Rows.matched(self.store, input_ids.cpu(), real.cpu())
            self._matched = self._rows is not None
        return self.get_seq_length()

    # The end.

    def reset(self) -> None:
        """Give every page back; the cache is empty, and usable."""
        binding = self._bound()
        with binding.operation():
            if self._rows is not None:
                self._rows.close()
            self._rows, self._matched, self._spoiled, self.recording = None, False, False, False
            self.layers = make_layers(self, binding.learned)

    def close(self) -> None:
        """Give every page back, and the memory too with the last cache on it; the cache cannot be used any more."""
        if self.binding is None:
            return
        self.reset()
        binding, self.binding = self.binding, None
        binding.caches.discard(self)
        if not binding.caches:
            binding.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedCache:
        """Return a fork: it shares every page until one of the two writes into it."""
        binding = self._bound()
        self.require_usable()
        fork = type(self).on(binding)
        memo[id(self)] = fork
        fork.indexing, fork.recording, fork._matched = self.indexing, self.recording, self._matched
        with binding.operation():
            fork._rows = None if self._rows is None else self._rows.fork()
        for mine, own in zip(self.layers, fork.layers, strict=True):
            own.copy_states(mine) if isinstance(own, PagedLayer) else vars(own).update(copy.deepcopy(vars(mine)))
        return fork
