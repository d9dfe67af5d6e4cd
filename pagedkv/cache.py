"""PagedKVCache: page tensors, an allocator and what a step needs, the only place that knows both sides.

Takes tokens and each layer's new K and V, gives attention over everything stored, and refuses to know about
models, requests or schedulers. It implements `pagedkv.backend.CacheBackend`, and with it a batch engine's whole
need: ``open``, ``begin_step``, ``write`` and ``attend`` per layer, ``end_step``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import torch

from pagedkv.allocator import BlockAllocator, Room, StepInFlight
from pagedkv.allocator import Sequence as PagedSequence
from pagedkv.attention import LayerSpec, paged_attention, write_kv
from pagedkv.attention.backends import backend_names
from pagedkv.backend import CacheUsage
from pagedkv.page_tensors import PageLayout, PageTensors
from pagedkv.sizing import require_count, require_float_dtype
from pagedkv.spec import KVSpec
from pagedkv.step import GroupStep, Home, PaddedStep, PagedStep, StepBuffers, StepRow

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from pagedkv.attention.shared_prefix import Mode
    from pagedkv.backend import StepBatch

# What decides a page's bytes, with the constructor's defaults.
_PLACED: dict[str, Any] = {
    "page_size": 16, "dtype": torch.float32, "kv_dtype": None, "device": "cpu", "device_map": None
}  # fmt: skip


class PagedKVCache:
    """K and V of many sequences in fixed-size pages, behind the `CacheBackend` protocol.

    Args:
        spec: what the model stores per token (`KVSpec.from_config`).
        num_pages: pages in the pool, the null page counted: ``num_pages - 1`` are usable.
        page_size: token slots per page, a power of two from 1 to 256.
        max_batch: the most sequences in one step.
        max_len: the most tokens in one sequence; by default the model's own context.
        dtype: of K and V as the model makes them.
        kv_dtype: None to store them so, ``"int8"`` or ``"fp8_e4m3"`` to quantise them with one float32 scale per
            slot and KV head.
        device: where pages live.
        device_map: instead, a device for each layer; ``device`` is then where a step's ids and positions are wanted.
        prefix_cache: whether sequences share the pages of equal beginnings.
        policy: which idle pages are evicted first.
        attention_backend: a backend of `pagedkv.attention` by name, or None to choose.
        shared_prefix: whether decode may read pages that several sequences begin with once for all of them (the
            "triton" backend can): ``"auto"`` on a GPU where it pays, ``"always"``, or ``"never"``. Answers then agree
            within rounding, not bit for bit, whoever else is in the step (docs/kernels.md).
        check: verify table contents at every call of the operator (tests set it; it costs a synchronisation).

    Layers that forget alike form a layer group with block tables of its own; all groups share one pool of pages
    (`GroupCut`, docs/memory-layout.md). ``k_pages[layer]`` and ``v_pages[layer]`` are ``[num_pages, num_kv_heads,
    page_size, dim]``. ``page_bytes`` is what a page takes over all its positions, ``bytes_per_token`` what one more
    token takes in all groups, until windows leave it behind.
    """

    def __init__(
        self,
        spec: KVSpec,
        *,
        num_pages: int,
        page_size: int = 16,
        max_batch: int = 256,
        max_len: int | None = None,
        dtype: torch.dtype = torch.float32,
        kv_dtype: str | None = None,
        device: torch.device | str = "cpu",
        device_map: Mapping[int, torch.device | str] | None = None,
        prefix_cache: bool = True,
        policy: str = "lru",
        attention_backend: str | None = None,
        shared_prefix: Mode = "auto",
        check: bool = False,
    ) -> None:
        self.spec = spec
        self.page_size = page_size
        self.max_batch = require_count("max_batch", max_batch)
        self.max_len = spec.max_len if max_len is None else require_count("max_len", max_len)
        self.dtype = require_float_dtype(dtype)
        if attention_backend is not None and attention_backend not in backend_names():
            raise ValueError(
                f"attention_backend must be None or one of {', '.join(backend_names())}, was {attention_backend!r}"
            )
        self.layout = PageLayout.of(
            spec,
            page_size=page_size,
            max_len=self.max_len,
            dtype=self.dtype,
            kv_dtype=kv_dtype,
            device=device,
            device_map=device_map,
        )
        self.device = torch.device(device)
        groups = self.layout.cut.groups
        self.allocator = BlockAllocator(num_pages, page_size, groups=groups, prefix_cache=prefix_cache, policy=policy)
        self.page_bytes = sum(self.layout.page_bytes().values())
        self.bytes_per_token = len(groups) * self.page_bytes // page_size
        self._attention_backend = attention_backend
        self._check = check
        self._pages = PageTensors(self.layout, num_pages)
        self.k_pages, self.v_pages = self._pages.k_pages, self._pages.v_pages
        self.kv_scales = self._pages.kv_scales
        self.layer_specs = [LayerSpec(layer.k_dim**-0.5, layer.window, layer.num_sink_tokens) for layer in spec.layers]
        self._homes = self.layout.homes()
        homes = [home for home in self._homes if home is not None]
        self._buffers = StepBuffers(max_batch, self.max_len, page_size, homes, self.device, shared_prefix=shared_prefix)
        self._step: PagedStep | None = None
        self._padded: PaddedStep | None = None
        self._in_flight: StepInFlight | None = None

    @classmethod
    def from_config(cls, config: Any, **options: Any) -> Self:
        """Build the cache for a transformers model config; ``options`` are those of `from_spec`.

        Raises:
            UnsupportedModel: if the config's K and V cannot be paged.
        """
        return cls.from_spec(KVSpec.from_config(config), **options)

    @classmethod
    def from_spec(
        cls,
        spec: KVSpec,
        *,
        memory: int | str | None = None,
        num_pages: int | None = None,
        max_len: int | None = None,
        **options: Any,
    ) -> Self:
        """Build the cache for what a model stores, within ``memory`` (bytes or "2GiB") or with ``num_pages``.

        With neither, room for 32 sequences of the model's context, at most a quarter of the free memory. Other
        ``options`` are the constructor's.

        Raises:
            ValueError: if both are given, or the memory holds no usable page.
        """
        if memory is not None and num_pages is not None:
            raise ValueError(f"memory and num_pages exclude each other, were {memory!r} and {num_pages!r}")
        if num_pages is None:
            placed = {name: options.get(name, default) for name, default in _PLACED.items()}
            longest = spec.max_len if max_len is None else require_count("max_len", max_len)
            num_pages = PageLayout.of(spec, max_len=longest, **placed).pages_within(memory, longest)
        return cls(spec, num_pages=num_pages, max_len=max_len, **options)

    @property
    def page_tensors(self) -> list[torch.Tensor]:
        """Every tensor that owns pages' memory, ``[num_pages, …]``: what a page copy moves."""
        return self._pages.buffers

    def bind_layer(self, layer: int, spec: LayerSpec) -> None:
        """Say how ``layer`` attends; by default scaled by ``k_dim ** -0.5`` with the config's window and sink tokens.

        Raises:
            ValueError: if it would see other tokens than its layer group keeps.
        """
        self._require_layer(layer)
        kept = self.spec.layers[layer]
        if spec.window != kept.window:
            raise ValueError(f"spec.window of layer {layer} must be the config's {kept.window}, was {spec.window}")
        if kept.window is not None and spec.num_sink_tokens != kept.num_sink_tokens:
            raise ValueError(
                f"spec.num_sink_tokens of layer {layer} must be {kept.num_sink_tokens}, as its pages are kept, "
                f"was {spec.num_sink_tokens}"
            )
        self.layer_specs[layer] = spec

    def open(self, tokens: Sequence[int], *, namespace: Hashable = None) -> PagedSequence:
        """Open a sequence that will hold ``tokens``; `num_tokens` of them are stored already, never all."""
        return self.allocator.open(tokens, namespace=namespace)

    def room(
        self, tokens: Sequence[int], *, growth: int = 0, chunk: int | None = None, namespace: Hashable = None
    ) -> Room:
        """Return the pages that ``tokens`` and ``growth`` more would take now, and those available.

        ``chunk`` is the most tokens of one step: a sliding window group never holds more than its window and a chunk.
        """
        return self.allocator.room(tokens, growth=growth, chunk=chunk, namespace=namespace)

    def begin_step(self, inputs: Mapping[PagedSequence, Sequence[int] | int]) -> PagedStep:
        """Make room for the next tokens of each sequence, and lay the step out; all sequences or none.

        Instead of token ids a sequence may have a count: KV that no token names, such as embeddings' or a padded
        text's. What is stored so, and all that follows it in the sequence, is never found by others. A step with such
        a sequence has no `input_ids`.

        Raises:
            TypeError: if an input is neither token ids nor a whole number.
            ValueError: if a sequence has no tokens, other tokens than its prompt, or too many; or the batch is too
                large.
            RuntimeError: if a step is in flight.
            OutOfPages: if the pool cannot take the whole step.
        """
        sequences = list(inputs)
        rows: list[StepRow] = [row if isinstance(row, int) else list(row) for row in inputs.values()]
        counts = [row if isinstance(row, int) else len(row) for row in rows]
        if self._step is not None:
            raise RuntimeError("begin_step needs the step in flight to be ended or abandoned first")
        self._buffers.require_fits(sequences, rows, counts)
        self.allocator.reserve_batch(sequences, counts)
        try:
            self.run_copies()
            tables = [self.allocator.block_tables(group) for group in range(len(self.allocator.groups))]
            step = PagedStep(sequences, rows, tables, self._buffers)
        except BaseException:
            self.allocator.commit_batch(sequences, [[] for _ in sequences])
            raise
        self._step, self._in_flight = step, self.allocator.begin_step()
        return step

    def run_copies(self) -> None:
        """Clear and copy pages as the allocator asks, before anything is written to them; `begin_step` does it too."""
        scrubs = self.allocator.take_scrubs()
        if len(scrubs):
            self._pages.clear(scrubs)
        copies = self.allocator.take_copies()
        if len(copies):
            self._pages.copy(copies)
            self.allocator.acknowledge_copies()

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, batch: StepBatch) -> None:
        """Store K ``[total_q, num_kv_heads, k_dim]`` and V ``[total_q, num_kv_heads, v_dim]`` of the step."""
        step = self._group_step(layer, batch)
        write_kv(
            k,
            v,
            self.k_pages[layer],
            self.v_pages[layer],
            step.slot_mapping,
            kv_scales=self.kv_scales[layer],
            backend=self._attention_backend,
            check=self._check,
        )

    def attend(self, layer: int, q: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """Attend from q ``[total_q, num_q_heads, k_dim]`` to all that is stored: ``[total_q, num_q_heads, v_dim]``."""
        step = self._group_step(layer, batch)
        if self.spec.layers[layer].chunked:
            raise ValueError(f"layer must attend by a window that slides, layer {layer} attends within chunks: gather")
        return paged_attention(
            q,
            self.k_pages[layer],
            self.v_pages[layer],
            step.attention,
            self.layer_specs[layer],
            kv_scales=self.kv_scales[layer],
            backend=self._attention_backend,
            check=self._check,
        )

    def can_pad(self, batch: StepBatch) -> bool:
        """Whether `pad_step` takes the step: one token of each sequence, known by its id; layers on one device."""
        return self._current(batch).is_decode and len(self._pages.devices) == 1

    def pad_step(self, batch: StepBatch, rows: int) -> PaddedStep:
        """Return the decode step in flight padded to ``rows`` rows, for `write` and `attend`; end the step itself.

        It lies in the same memory whenever ``rows`` is the same, so that it can be captured.
        """
        self._padded = self._buffers.pad(self._current(batch), rows)
        return self._padded

    def gather(self, layer: int, batch: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all K and V of ``layer`` for the step's sequences, each ``[sum(kv_lens), num_kv_heads, dim]``.

        Row after row in the order of positions, this step's included (so `write` comes first); quantised ones as
        float32. Of a sequence in a sliding window group only the positions that are still held: `held_positions`.
        """
        return self._pages.gather(layer, self._current(batch).held_slots(self._home(layer)))

    def held_positions(self, layer: int, batch: StepBatch) -> list[NDArray[np.int64]]:
        """Return for each row of the step the positions whose K and V `gather` returns for ``layer``, ascending."""
        return self._current(batch).held_positions(self._home(layer)[0])

    def end_step(self, batch: StepBatch, *, keep: Mapping[PagedSequence, int] | None = None) -> None:
        """Commit the step's tokens; with ``keep`` only the first ``keep[seq]`` of a sequence, the rest is undone.

        A sequence that was closed since `begin_step` is passed over; its pages were kept until now.

        Raises:
            ValueError: if ``keep`` names a sequence outside the step, or a count outside 0 to its new tokens.
        """
        step = self._current(batch)
        self._leave_step(step, step.tokens if keep is None else step.kept(keep))

    def abandon_step(self, batch: StepBatch) -> None:
        """Take the step back: every length is as before `begin_step`."""
        step = self._current(batch)
        self._leave_step(step, [[] for _ in step.sequences])

    def _leave_step(self, step: PagedStep, rows: Sequence[StepRow]) -> None:
        """Commit ``rows`` to the step's sequences that are still open, and let go of what was freed meanwhile."""
        live = [(sequence, row) for sequence, row in zip(step.sequences, rows, strict=True) if not sequence.closed]
        named = [(sequence, row) for sequence, row in live if not isinstance(row, int)]
        self.allocator.commit_batch([sequence for sequence, _ in named], [row for _, row in named])
        for sequence, row in live:
            if isinstance(row, int):
                sequence.commit(count=row)
        if self._in_flight is not None:
            self._in_flight.end()
        self._step = self._padded = self._in_flight = None

    def _require_layer(self, layer: int) -> None:
        if not 0 <= layer < self.spec.num_layers:
            raise ValueError(f"layer must be 0 to {self.spec.num_layers - 1}, was {layer}")

    def _home(self, layer: int) -> Home:
        self._require_layer(layer)
        home = self._homes[layer]
        if home is None:
            raise ValueError(f"layer must store K and V of its own, layer {layer} shares an earlier one's")
        return home

    def _group_step(self, layer: int, batch: StepBatch) -> GroupStep:
        """Return what ``layer`` shares with its group in the step in flight, or in its padded form."""
        home = self._home(layer)
        if self._padded is not None and batch is self._padded:
            return self._padded.groups[home]
        return self._current(batch).groups[home]

    def _current(self, batch: StepBatch) -> PagedStep:
        if batch is not self._step or self._step is None:
            raise RuntimeError("batch must be the step in flight; this one has ended, or is another cache's")
        return self._step

    def usage(self) -> CacheUsage:
        """Return what live sequences hold now; a page that several share counts once.

        With several layer groups a token counts in each that holds it, and a slot is one group's.
        """
        stats = self.allocator.stats()
        return CacheUsage(
            tokens_stored=stats.stored_tokens,
            slots_held=stats.held_slots,
            bytes_used=stats.stored_tokens * self.page_bytes // self.page_size,
            bytes_held=stats.referenced * self.page_bytes,
            in_use=stats.referenced,
        )
