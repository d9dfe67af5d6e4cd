"""PagedKVCache: page tensors, an allocator and what a step needs, the only place that knows both sides.

Takes tokens and each layer's new K and V, gives attention over everything stored, and refuses to know about
models, requests or schedulers. It implements `pagedkv.backend.CacheBackend`, and with it a batch engine's whole
need: ``open``, ``begin_step``, ``write`` and ``attend`` per layer, ``end_step``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pagedkv.allocator import BlockAllocator, Room, StepInFlight
from pagedkv.allocator import Sequence as PagedSequence
from pagedkv.attention import LayerSpec, copy_pages, paged_attention, write_kv
from pagedkv.attention.backends import backend_names
from pagedkv.backend import CacheUsage
from pagedkv.sizing import bytes_per_token, default_num_pages, parse_memory, require_count, require_float_dtype
from pagedkv.spec import KVSpec
from pagedkv.step import PaddedStep, PagedStep, StepBuffers

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from pagedkv.backend import StepBatch

KV_DTYPES = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}


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
        prefix_cache: whether sequences share the pages of equal beginnings.
        policy: which idle pages are evicted first.
        attention_backend: a backend of `pagedkv.attention` by name, or None to choose.
        check: verify table contents at every call of the operator (tests set it; it costs a synchronisation).

    ``k_pages[layer]`` and ``v_pages[layer]`` are ``[num_pages, num_kv_heads, page_size, dim]``
    (docs/memory-layout.md). Memory is not cleared: no slot is read before it was written.
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
        prefix_cache: bool = True,
        policy: str = "lru",
        attention_backend: str | None = None,
        check: bool = False,
    ) -> None:
        _require_page_size(page_size)
        stored = _stored_dtype(kv_dtype)
        self.spec = spec
        self.page_size = page_size
        self.max_batch = require_count("max_batch", max_batch)
        self.max_len = spec.max_len if max_len is None else require_count("max_len", max_len)
        self.dtype = require_float_dtype(dtype)
        if attention_backend is not None and attention_backend not in backend_names():
            raise ValueError(
                f"attention_backend must be None or one of {', '.join(backend_names())}, was {attention_backend!r}"
            )
        self.device = torch.device(device)
        self.allocator = BlockAllocator(num_pages, page_size, prefix_cache=prefix_cache, policy=policy)
        self.bytes_per_token = bytes_per_token(spec, dtype, stored)
        self._attention_backend = attention_backend
        self._check = check
        self._allocate_pages(num_pages, stored)
        self.layer_specs = [LayerSpec(scale=layer.k_dim**-0.5, window=layer.window) for layer in spec.layers]
        self._buffers = StepBuffers(max_batch, self.max_len, page_size, self.device)
        self._step: PagedStep | None = None
        self._stand_in: PaddedStep | None = None
        self._in_flight: StepInFlight | None = None

    @classmethod
    def from_config(
        cls,
        config: Any,
        *,
        memory: int | str | None = None,
        num_pages: int | None = None,
        page_size: int = 16,
        max_len: int | None = None,
        dtype: torch.dtype = torch.float32,
        kv_dtype: str | None = None,
        device: torch.device | str = "cpu",
        **options: Any,
    ) -> PagedKVCache:
        """Build the cache for a transformers model config, within ``memory`` or with ``num_pages``.

        With neither, room for 32 sequences of the model's context, at most a quarter of the free memory. Other
        ``options`` are the constructor's.

        Raises:
            ValueError: if both are given, or the memory holds no usable page.
            UnsupportedModel: if the config's K and V cannot be paged.
        """
        if memory is not None and num_pages is not None:
            raise ValueError(f"memory and num_pages exclude each other, were {memory!r} and {num_pages!r}")
        _require_page_size(page_size)
        spec = KVSpec.from_config(config)
        page_bytes = page_size * bytes_per_token(spec, require_float_dtype(dtype), _stored_dtype(kv_dtype))
        if memory is not None:
            size = parse_memory(memory)
            num_pages = size // page_bytes
            if num_pages < 2:
                raise ValueError(
                    f"memory must hold the null page and one more, {2 * page_bytes} bytes at page_size {page_size}, "
                    f"was {size} bytes"
                )
        elif num_pages is None:
            num_pages = default_num_pages(page_size, page_bytes, max_len or spec.max_len, torch.device(device))
        return cls(
            spec,
            num_pages=num_pages,
            page_size=page_size,
            max_len=max_len,
            dtype=dtype,
            kv_dtype=kv_dtype,
            device=device,
            **options,
        )

    def _allocate_pages(self, num_pages: int, stored: torch.dtype | None) -> None:
        def pages(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty((num_pages, *shape), dtype=dtype, device=self.device)

        dtype = self.dtype if stored is None else stored
        layers = self.spec.layers
        self.k_pages = [pages(spec.num_kv_heads, self.page_size, spec.k_dim, dtype=dtype) for spec in layers]
        self.v_pages = [pages(spec.num_kv_heads, self.page_size, spec.v_dim, dtype=dtype) for spec in layers]
        self.kv_scales: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * len(layers)
        if stored is not None:
            self.kv_scales = [
                (
                    pages(spec.num_kv_heads, self.page_size, dtype=torch.float32),
                    pages(spec.num_kv_heads, self.page_size, dtype=torch.float32),
                )
                for spec in layers
            ]

    @property
    def page_tensors(self) -> list[torch.Tensor]:
        """Every tensor whose first dimension is pages: what a page copy moves."""
        scales = [scale for pair in self.kv_scales if pair is not None for scale in pair]
        return [*self.k_pages, *self.v_pages, *scales]

    def bind_layer(self, layer: int, spec: LayerSpec) -> None:
        """Say how ``layer`` attends; by default scaled by ``k_dim ** -0.5`` with the config's window."""
        self._require_layer(layer)
        window = self.spec.layers[layer].window
        if spec.window != window:
            raise ValueError(f"spec.window of layer {layer} must be the config's {window}, was {spec.window}")
        self.layer_specs[layer] = spec

    def open(self, tokens: Sequence[int], *, namespace: Hashable = None) -> PagedSequence:
        """Open a sequence that will hold ``tokens``; `num_tokens` of them are stored already, never all."""
        return self.allocator.open(tokens, namespace=namespace)

    def room(self, tokens: Sequence[int], *, growth: int = 0, namespace: Hashable = None) -> Room:
        """Return the pages that ``tokens`` and ``growth`` more would take now, and those available."""
        return self.allocator.room(tokens, growth=growth, namespace=namespace)

    def begin_step(self, inputs: Mapping[PagedSequence, Sequence[int]]) -> PagedStep:
        """Make room for the next tokens of each sequence, and lay the step out; all sequences or none.

        Raises:
            ValueError: if a sequence has no tokens, other tokens than its prompt, or too many; or the batch is too
                large.
            RuntimeError: if a step is in flight.
            OutOfPages: if the pool cannot take the whole step.
        """
        sequences = list(inputs)
        tokens = [list(row) for row in inputs.values()]
        self._require_step(sequences, tokens)
        counts = [len(row) for row in tokens]
        self.allocator.reserve_batch(sequences, counts)
        try:
            self._run_copies()
            step = PagedStep(sequences, tokens, self.allocator.block_tables(), self._buffers)
        except BaseException:
            self.allocator.commit_batch(sequences, [[] for _ in sequences])
            raise
        self._step, self._in_flight = step, self.allocator.begin_step()
        return step

    def _require_step(self, sequences: list[PagedSequence], tokens: list[list[int]]) -> None:
        if self._step is not None:
            raise RuntimeError("begin_step needs the step in flight to be ended or abandoned first")
        if not 1 <= len(sequences) <= self.max_batch:
            raise ValueError(f"inputs must hold 1 to max_batch = {self.max_batch} sequences, held {len(sequences)}")
        for sequence, row in zip(sequences, tokens, strict=True):
            if not row:
                raise ValueError(f"inputs must hold at least one token for each sequence, held none for {sequence!r}")
            if sequence.num_tokens + len(row) > self.max_len:
                raise ValueError(
                    f"inputs must keep each sequence within max_len = {self.max_len} tokens, "
                    f"would take {sequence!r} to {sequence.num_tokens + len(row)}"
                )
            sequence.require_next(row)

    def _run_copies(self) -> None:
        """Clear and copy pages as the allocator asks, before anything is written to them."""
        scrubs = self.allocator.take_scrubs()
        if len(scrubs):
            pages = torch.from_numpy(scrubs.astype(np.int64)).to(self.device)
            for tensor in self.page_tensors:
                tensor[pages] = 0
        copies = self.allocator.take_copies()
        if len(copies):
            copy_pages(self.page_tensors, torch.from_numpy(copies).to(self.device))
            self.allocator.acknowledge_copies()

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, batch: StepBatch) -> None:
        """Store K ``[total_q, num_kv_heads, k_dim]`` and V ``[total_q, num_kv_heads, v_dim]`` of the step."""
        self._require_layer(layer)
        step = self._current(batch)
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
        self._require_layer(layer)
        step = self._current(batch)
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

    def pad_step(self, batch: StepBatch, rows: int) -> PaddedStep:
        """Return the decode step in flight padded to ``rows`` rows, for `write` and `attend`; end the step itself."""
        self._stand_in = self._buffers.pad(self._in_step(batch), rows)
        return self._stand_in

    def end_step(self, batch: StepBatch, *, keep: Mapping[PagedSequence, int] | None = None) -> None:
        """Commit the step's tokens; with ``keep`` only the first ``keep[seq]`` of a sequence, the rest is undone.

        A sequence that was closed since `begin_step` is passed over; its pages were kept until now.

        Raises:
            ValueError: if ``keep`` names a sequence outside the step, or a count outside 0 to its new tokens.
        """
        step = self._in_step(batch)
        tokens = step.tokens
        if keep is not None:
            tokens = _kept(step, keep)
        self._leave_step(step, tokens)

    def abandon_step(self, batch: StepBatch) -> None:
        """Take the step back: every length is as before `begin_step`."""
        step = self._in_step(batch)
        self._leave_step(step, [[] for _ in step.sequences])

    def _leave_step(self, step: PagedStep, tokens: list[list[int]]) -> None:
        """Commit ``tokens`` to the step's sequences that are still open, and let go of what was freed meanwhile."""
        rows = [(sequence, row) for sequence, row in zip(step.sequences, tokens, strict=True) if not sequence.closed]
        self.allocator.commit_batch([sequence for sequence, _ in rows], [row for _, row in rows])
        if self._in_flight is not None:
            self._in_flight.end()
        self._step = self._in_flight = self._stand_in = None

    def _require_layer(self, layer: int) -> None:
        if not 0 <= layer < self.spec.num_layers:
            raise ValueError(f"layer must be 0 to {self.spec.num_layers - 1}, was {layer}")

    def _in_step(self, batch: StepBatch) -> PagedStep:
        if batch is not self._step or self._step is None:
            raise RuntimeError("batch must be the step in flight; this one has ended, or is another cache's")
        return self._step

    def _current(self, batch: StepBatch) -> PagedStep | PaddedStep:
        """Return the step in flight, or its padded form where that was asked for."""
        if self._stand_in is not None and batch is self._stand_in:
            return self._stand_in
        return self._in_step(batch)

    def usage(self) -> CacheUsage:
        """Return what live sequences hold now; a page that several share counts once."""
        stats = self.allocator.stats()
        slots = stats.referenced * self.page_size
        return CacheUsage(
            tokens_stored=stats.stored_tokens,
            slots_held=slots,
            bytes_used=stats.stored_tokens * self.bytes_per_token,
            bytes_held=slots * self.bytes_per_token,
            in_use=stats.referenced,
        )


def _kept(step: PagedStep, keep: Mapping[PagedSequence, int]) -> list[list[int]]:
    """Return each row's first ``keep[sequence]`` tokens, all of them where ``keep`` is silent."""
    unknown = set(keep) - set(step.sequences)
    if unknown:
        raise ValueError(f"keep must name sequences of the step, named {unknown.pop()!r}")
    rows = []
    for sequence, row in zip(step.sequences, step.tokens, strict=True):
        count = keep.get(sequence, len(row))
        if not 0 <= count <= len(row):
            raise ValueError(f"keep[{sequence!r}] must be 0 to {len(row)}, was {count}")
        rows.append(row[:count])
    return rows


def _require_page_size(page_size: int) -> None:
    if isinstance(page_size, bool) or not isinstance(page_size, int):
        raise TypeError(f"page_size must be an int, was {page_size!r}")
    if not 1 <= page_size <= 256 or page_size & (page_size - 1):
        raise ValueError(f"page_size must be a power of two from 1 to 256, was {page_size}")


def _stored_dtype(kv_dtype: str | None) -> torch.dtype | None:
    if kv_dtype is None:
        return None
    if kv_dtype not in KV_DTYPES:
        raise ValueError(f"kv_dtype must be None or one of {sorted(KV_DTYPES)}, was {kv_dtype!r}")
    return KV_DTYPES[kv_dtype]
