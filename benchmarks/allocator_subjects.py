"""The allocators that are measured, each behind the same three verbs.

Takes token ids, gives how many were found stored, and refuses to know the trace. Each subject does what its own
scheduler makes it do per request and per step, and nothing that belongs to a model, a queue or a network. Runs in a
worker process, with nothing but the subject's own packages installed, so it must not import pagedkv for a peer.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


class Subject(Protocol):
    """One allocator with a pool of its own."""

    def admit(self, prompt: list[int]) -> tuple[Any, int]:
        """Store a prompt; return a handle and how many of its tokens were found stored."""

    def decode(self, handles: list[Any], tokens: list[int]) -> None:
        """Store one generated token per handle: the whole step of a batch."""

    def close(self, handle: Any) -> None:
        """Give a request's pages back."""

    def in_use(self) -> int:
        """Return the pages that requests hold."""


class PagedKV:
    """`pagedkv.allocator.BlockAllocator`, one call per step for the whole batch."""

    def __init__(self, num_pages: int, page_size: int, *, prefix_cache: bool) -> None:
        """Make the pool."""
        self._allocator = import_module("pagedkv.allocator").BlockAllocator(
            num_pages, page_size, prefix_cache=prefix_cache
        )

    def admit(self, prompt: list[int]) -> tuple[Any, int]:
        """Open, reserve, commit; the ids are made an array once, by `open`."""
        sequence = self._allocator.open(prompt)
        cached: int = sequence.num_tokens
        sequence.reserve(len(prompt) - cached)
        self._run_copies()
        sequence.commit(sequence.prompt.tokens[cached:])
        return sequence, cached

    def decode(self, handles: list[Any], tokens: list[int]) -> None:
        """Reserve and commit the batch."""
        self._allocator.reserve_batch(handles, 1)
        self._run_copies()
        self._allocator.commit_batch(handles, tokens)

    def _run_copies(self) -> None:
        if len(self._allocator.take_copies()):
            self._allocator.acknowledge_copies()

    def close(self, handle: Any) -> None:
        """Close the sequence."""
        handle.close()

    def in_use(self) -> int:
        """Return the referenced pages, after proving the books."""
        self._allocator.check()
        return int(self._allocator.stats().in_use)


class VLLM:
    """vLLM's ``KVCacheManager`` with one full-attention group and its default hash (SHA-256 over pickled blocks)."""

    def __init__(self, num_pages: int, page_size: int, *, prefix_cache: bool) -> None:
        """Make the manager and the hasher that requests are given."""
        interface = import_module("vllm.v1.kv_cache_interface")
        utils = import_module("vllm.v1.core.kv_cache_utils")
        manager = import_module("vllm.v1.core.kv_cache_manager").KVCacheManager
        sha256 = import_module("vllm.utils.hashing").sha256
        utils.init_none_hash(sha256)
        self._request = import_module("vllm.v1.request").Request
        self._params = import_module("vllm.sampling_params").SamplingParams(max_tokens=1 << 20)
        self._hasher = utils.get_request_block_hasher(page_size, sha256) if prefix_cache else None
        spec = interface.FullAttentionSpec(
            block_size=page_size, num_kv_heads=1, head_size=1, dtype=import_module("torch").float32
        )
        group = interface.KVCacheGroupSpec(layer_names=["layer"], kv_cache_spec=spec)
        config = interface.KVCacheConfig(num_blocks=num_pages, kv_cache_tensors=[], kv_cache_groups=[group])
        self._manager = manager(
            config,
            max_model_len=1 << 20,
            scheduler_block_size=page_size,
            hash_block_size=page_size,
            enable_caching=prefix_cache,
        )
        self._num_pages = num_pages
        self._admitted = 0

    def admit(self, prompt: list[int]) -> tuple[Any, int]:
        """Make the request (which hashes it), look it up, allocate the rest."""
        self._admitted += 1
        request = self._request(str(self._admitted), prompt, self._params, None, block_hasher=self._hasher)
        blocks, cached, _ = self._manager.get_computed_blocks(request)
        if self._manager.allocate_slots(request, len(prompt) - cached, cached, blocks) is None:
            raise RuntimeError("vLLM: the pool is full")
        request.num_computed_tokens = len(prompt)
        return request, int(cached)

    def decode(self, handles: list[Any], tokens: list[int]) -> None:
        """Append, allocate and count, request by request."""
        for request, token in zip(handles, tokens, strict=True):
            request.append_output_token_ids(token)
            if self._manager.allocate_slots(request, 1) is None:
                raise RuntimeError("vLLM: the pool is full")
            request.num_computed_tokens += 1

    def close(self, handle: Any) -> None:
        """Free the request."""
        self._manager.free(handle)

    def in_use(self) -> int:
        """Return the blocks that are not free; one is vLLM's null block."""
        return int(self._num_pages - 1 - self._manager.block_pool.get_num_free_blocks())


class Transformers:
    """The allocator of transformers' continuous batching, over a cache of one layer with one small head.

    The scheduler's calls per request and step, without its queue. Cached blocks are given up all at once when nothing
    else is left, as the scheduler does under pressure.
    """

    def __init__(self, num_pages: int, page_size: int, *, prefix_cache: bool) -> None:
        """Make the smallest model configuration that has a paged cache of ``num_pages`` blocks."""
        package = "transformers.generation.continuous_batching"
        torch, transformers = import_module("torch"), import_module("transformers")
        config = transformers.LlamaConfig(
            hidden_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, vocab_size=8
        )
        batching = import_module("transformers").ContinuousBatchingConfig(
            page_size=page_size, num_blocks=num_pages, max_batch_tokens=1, allow_block_sharing=prefix_cache
        )
        batching.max_memory_percent = 0.9
        batching.use_async_batching = False
        batching.max_blocks_per_request = 0
        helper = import_module(f"{package}.distributed").DistributedHelper(None, None)
        self._cache = import_module(f"{package}.cache").PagedAttentionCache(
            config, batching, torch.device("cpu"), helper, dtype=torch.float16
        )
        self._state = import_module(f"{package}.requests").RequestState
        self._admitted = 0

    def admit(self, prompt: list[int]) -> tuple[Any, int]:
        """Match the prefix, store the rest, mark its blocks complete."""
        self._admitted += 1
        state = self._state(str(self._admitted), prompt, max_new_tokens=None)
        cached = self._cache.search_prefix_match(state.request_id, state.remaining_prefill_tokens)
        state.position_offset = cached
        self._store(state, len(prompt) - cached)
        return state, int(cached)

    def decode(self, handles: list[Any], tokens: list[int]) -> None:
        """Store and mark, request by request."""
        for state, token in zip(handles, tokens, strict=True):
            state.generated_tokens.append(token)
            self._store(state, 1)

    def _store(self, state: Any, count: int) -> None:
        if not self._cache.can_store_request_tokens(state, count):
            self._cache.evict_cached_blocks()
            self._cache.pool.try_to_free_sectors()
            if not self._cache.can_store_request_tokens(state, count):
                raise RuntimeError("transformers: the pool is full")
        complete = self._cache.count_new_complete_blocks(state, count)
        state.position_offset += count
        self._cache.mark_complete_blocks(state, complete)

    def close(self, handle: Any) -> None:
        """Free the request's blocks."""
        self._cache.free_blocks(handle.request_id)

    def in_use(self) -> int:
        """Return the blocks in tables that are left."""
        return sum(len(table) for a in self._cache.cache_allocators.values() for table in a.block_table.values())


SUBJECTS: dict[str, Callable[..., Subject]] = {"pagedkv": PagedKV, "vllm": VLLM, "transformers": Transformers}
