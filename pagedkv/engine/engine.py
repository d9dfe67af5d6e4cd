"""Engine: text or token ids in, text and token ids out, over one model and one cache.

Takes a transformers model, a tokenizer and a cache; gives `add_request` and `step`, and `generate` and `stream` on top
of them; leaves all decisions to `EngineCore` and all arithmetic to the model's runner.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, Self

from pagedkv.cache import PagedKVCache
from pagedkv.engine.build import find_eos_token_ids, load_pretrained, make_cache
from pagedkv.engine.checks import require_bool, require_int
from pagedkv.engine.core import DEFAULT_AGEING, EngineCore
from pagedkv.engine.defaults import default_max_batch, default_max_step_tokens
from pagedkv.engine.model_step import FastRunner
from pagedkv.engine.params import SamplingParams, one_each
from pagedkv.engine.prompts import prompts_or_chats, require_tokenizer, to_token_ids
from pagedkv.engine.stops import OutputText
from pagedkv.engine.strategies import Sizes
from pagedkv.engine.stream import RequestStream
from pagedkv.sizing import free_memory
from pagedkv.sliding import DEFAULT_SINK_TOKENS, DEFAULT_WINDOW
from pagedkv.spec import KVSpec
from pagedkv.swap_space import SwapSpace

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Hashable, Sequence

    import torch

    from pagedkv.backend import CacheBackend
    from pagedkv.engine.core import Scheduling
    from pagedkv.engine.outputs import Completion, EngineStats, StepOutput
    from pagedkv.engine.preemption import PreemptionMode
    from pagedkv.engine.prompts import Message
    from pagedkv.engine.text import Tokenizer

DEFAULT_WATERMARK = 0.01


class Engine:
    """A batch engine: continuous batching over a paged KV cache.

    Args:
        model: a transformers decoder-only model in eval mode; it is not changed.
        tokenizer: its tokenizer; None: token ids only.
        backend: ``"paged"`` (None means the same), a baseline ``"concat"``, ``"static"`` or ``"none"``, or any object
            with the `CacheBackend` protocol, which nobody else should take from meanwhile.
        memory: for the cache: bytes, or text such as ``"2GiB"``. By default as `PagedKVCache.from_config` chooses.
        num_pages: of the paged cache, instead of ``memory``; one of them is the null page.
        page_size: tokens per page.
        prefix_cache: whether requests share the pages of equal beginnings.
        strategy: of the paged cache: ``"full"`` keeps all K and V; ``"sliding"`` a recent window and the first tokens,
            so that answers change; ``"recompute"`` some layers' input states, for models where these are smaller;
            ``"auto"`` decides between them, once, from ``max_batch`` x ``max_len``: see `strategy`.
        sliding_window, num_sink_tokens: of strategy "sliding": recent tokens seen, the token itself included, and
            first tokens seen.
        swap_memory: host memory for preempted requests, bytes or text; None: they are computed again.
        preemption: ``"auto"`` by cost, ``"swap"`` or ``"recompute"`` always.
        scheduling: ``"fcfs"``, first come, first served; or ``"priority"``, with ``ageing`` steps of waiting counting
            as one level.
        max_batch: the most requests running at a time; by default as many as the pages hold 64 tokens of, up to 256,
            or less if the given cache or ``max_step_tokens`` allow less.
        max_len: the most tokens of one request, prompt and generated together; by default the model's context.
        max_step_tokens: the most input tokens of one step, prefill chunks and decode together; at least ``max_batch``.
            By default 1,024, or less where memory is short.
        watermark: the share of the cache that new requests leave free beside running ones, 0 to below 1; by default
            0.01 for pages and 0 for baselines.
        packed: whether the model's linears take more than 64 rows over packed copies of their weights, which double its
            memory on the CPU (triple it where bfloat16 has to be widened); None: where the copies take a quarter of the
            free memory or less.
        exact: whether every token must be that of the model's own operations, even at a tie; fewer parts are
            faster then.
        threads: of torch's pool while a step runs; None: as many as it has.
        seed: of the seeds of requests that bring none, for runs that can be repeated, 0 to 2**64 - 1; None: from the
            system.
        clock: seconds, for metrics and the cost of preemption.
        cuda_graphs: as `ModelRunner` takes it.

    Attributes:
        strategy: of the cache that the engine made: its name and why; None for any other cache.

    Requests end at the EOS ids of the model's generation config, else of its tokenizer. ``add_request`` and ``abort``
    may be called from any thread; everything else belongs to the thread that steps first, whichever built the engine.

    An exception from the model reaches the caller of ``step`` (or ``generate``, ``stream``) with every request as it
    was before the step; call again, or abort the request that cannot be served.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer | None = None,
        *,
        backend: CacheBackend | str | None = None,
        memory: int | str | None = None,
        num_pages: int | None = None,
        page_size: int = 16,
        prefix_cache: bool = True,
        strategy: str = "full",
        sliding_window: int = DEFAULT_WINDOW,
        num_sink_tokens: int = DEFAULT_SINK_TOKENS,
        swap_memory: int | str | None = None,
        preemption: PreemptionMode = "auto",
        scheduling: Scheduling = "fcfs",
        ageing: int = DEFAULT_AGEING,
        max_batch: int | None = None,
        max_len: int | None = None,
        max_step_tokens: int | None = None,
        watermark: float | None = None,
        packed: bool | None = None,
        exact: bool = False,
        threads: int | None = None,
        seed: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        cuda_graphs: bool | None = None,
    ) -> None:
        """Build the cache and the runner, and try the model out on a few tokens."""
        from pagedkv.transformers import ModelRunner

        if not hasattr(model, "config"):
            raise TypeError(f"model must be a transformers model, was {type(model).__name__}")
        require_tokenizer(tokenizer)
        require_bool("prefix_cache", prefix_cache)
        require_bool("exact", exact)
        if packed is not None:
            require_bool("packed", packed)
        if threads is not None:
            require_int("threads", threads, 1)
        spec = KVSpec.from_config(model.config)
        context = spec.max_len if max_len is None else require_int("max_len", max_len, 1, spec.max_len)
        for name, value in (("max_batch", max_batch), ("max_step_tokens", max_step_tokens)):
            if value is not None:
                require_int(name, value, 1)
        sizes = Sizes(memory, num_pages, page_size, max_batch, context)
        cache, self.strategy = make_cache(
            backend,
            model,
            strategy,
            sizes,
            window=sliding_window,
            num_sink_tokens=num_sink_tokens,
            prefix_cache=prefix_cache,
        )
        context = min(context, getattr(cache, "max_len", context))
        paged = cache if isinstance(cache, PagedKVCache) else None
        if swap_memory is not None and paged is None:
            raise ValueError(f"swap_memory must be None for a cache without pages, was {swap_memory!r}")
        max_batch = max_batch or default_max_batch(cache, max_step_tokens)
        core = EngineCore(
            FastRunner(ModelRunner(model, cache, cuda_graphs=cuda_graphs), packed=packed, exact=exact, threads=threads),
            cache,
            vocab_size=spec.vocab_size,
            max_len=context,
            eos_token_ids=find_eos_token_ids(model, tokenizer),
            max_batch=max_batch,
            max_step_tokens=max_step_tokens
            or default_max_step_tokens(model.config, model.dtype, free_memory(model.device), max_batch),
            scheduling=scheduling,
            ageing=ageing,
            swap_space=SwapSpace(paged, swap_memory, clock=clock) if paged and swap_memory is not None else None,
            preemption=preemption,
            watermark=(DEFAULT_WATERMARK if paged else 0.0) if watermark is None else watermark,
            prefix_page_size=paged.page_size if paged and paged.allocator.prefix_cache else None,
            seed=seed,
            clock=clock,
        )
        self._assemble(core, tokenizer)
        self.hand_over()

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike[str],
        *,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> Self:
        """Load model and tokenizer from a local folder or by hub name; other ``options`` are the constructor's.

        Raises:
            ValueError: if there is no such model or it is no decoder-only language model; `UnsupportedModel` if its
                attention cannot be routed through a cache.
        """
        model, tokenizer = load_pretrained(name_or_path, dtype, device)
        return cls(model, tokenizer, **options)

    @classmethod
    def from_core(cls, core: EngineCore, tokenizer: Tokenizer | None = None) -> Self:
        """Put text and the convenient calls on top of a core with a runner of one's own and no requests yet."""
        require_tokenizer(tokenizer)
        engine = cls.__new__(cls)
        engine.strategy = None
        engine._assemble(core, tokenizer)
        return engine

    def _assemble(self, core: EngineCore, tokenizer: Tokenizer | None) -> None:
        self.core = core
        self.backend = core.backend
        self.tokenizer = tokenizer
        if tokenizer is not None:
            core.use_text(lambda params: OutputText(tokenizer, params.stop))
        self._outputs: deque[StepOutput] = deque()
        self._boxes: dict[Hashable, deque[StepOutput]] = {}
        self._num_private = 0

    @property
    def stats(self) -> EngineStats:
        """Counters since the engine was made."""
        return self.core.stats

    @property
    def has_unfinished(self) -> bool:
        """Whether another `step` has something to do or to tell."""
        return bool(self._outputs) or self.core.has_unfinished

    def add_request(
        self,
        request_id: Hashable,
        prompt: str | Sequence[int] | None = None,
        params: SamplingParams | None = None,
        *,
        messages: Sequence[Message] | None = None,
        priority: int = 0,
    ) -> None:
        """Queue a request; it enters at the next step that has room for it.

        ``prompt`` is text, or token ids as a list or a 1-D integer array or tensor; ``messages`` instead are a chat,
        which the tokenizer's template turns into a prompt. ``request_id`` may be used again once its request has
        finished. ``params`` are `SamplingParams()` by default. ``priority`` is -100 to 100, smaller goes first; other
        than 0 only with scheduling "priority".

        Raises:
            ValueError, TypeError: for an empty prompt, ids that are no tokens of the model, text without a tokenizer,
                a chat without a template, an id in use, or a request that can never fit in the batch, the context or
                the cache; nothing has changed.
        """
        self.core.add_request(request_id, to_token_ids(self.tokenizer, prompt, messages), params, priority=priority)

    def step(self) -> list[StepOutput]:
        """Run the model once and return what each request got: a token each, more where drafts held, and who finished.

        Where `generate` or `stream` has stepped meanwhile and other requests got outputs, those come first, without a
        new step.
        """
        if not self._outputs:
            self._advance()
        outputs = list(self._outputs)
        self._outputs.clear()
        return outputs

    def abort(self, request_id: Hashable) -> bool:
        """Ask for a request's end at the next step; say whether there was such a request. Safe from any thread."""
        return self.core.abort(request_id)

    def hand_over(self) -> None:
        """Let go of the cache: the next thread that steps owns it. Called by its owner, where it has one.

        Raises:
            WrongThread: if another thread owns the cache.
        """
        if isinstance(self.backend, PagedKVCache):
            self.backend.allocator.hand_over()

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]] | None = None,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        messages: Sequence[Sequence[Message]] | None = None,
        priority: int = 0,
    ) -> list[Completion]:
        """Serve ``prompts``, or the chats ``messages``, to their ends; return their completions in the same order.

        ``params`` are one for all, or one each; ``priority`` is every one's. Other requests go on meanwhile. If a
        prompt is refused, or the model raises, all of them are aborted at the next step.
        """
        given = prompts_or_chats(prompts, messages)
        each = one_each(params, len(given))
        streams: list[RequestStream] = []
        try:
            for (prompt, chat), own in zip(given, each, strict=True):
                streams.append(self.stream(prompt, own, messages=chat, priority=priority))
            return [stream.completion() for stream in streams]
        finally:
            for stream in streams:
                stream.close()

    def stream(
        self,
        prompt: str | Sequence[int] | None = None,
        params: SamplingParams | None = None,
        *,
        messages: Sequence[Message] | None = None,
        priority: int = 0,
    ) -> RequestStream:
        """Queue one request, as `add_request` does, and return an iterator over its outputs, which steps the engine.

        Closing it early, or dropping it, aborts the request at the next step.
        """
        tokens = to_token_ids(self.tokenizer, prompt, messages)
        self._num_private += 1
        request_id = ("stream", self._num_private, object())  # nobody else can have this id
        box: deque[StepOutput] = deque()
        self._boxes[request_id] = box
        try:
            self.core.add_request(request_id, tokens, params, priority=priority)
        except BaseException:
            del self._boxes[request_id]
            raise
        return RequestStream(self._advance, self._forget, request_id, tuple(tokens), box)

    def _forget(self, request_id: Hashable) -> None:
        """Abort a request that nobody reads any more; what still comes of it goes nowhere."""
        self._boxes[request_id] = deque(maxlen=0)
        if not self.core.abort(request_id):
            del self._boxes[request_id]

    def _advance(self) -> None:
        """Step the core once and hand its outputs to whom they belong."""
        for output in self.core.step():
            self._boxes.get(output.request_id, self._outputs).append(output)
            if output.ends_request:
                self._boxes.pop(output.request_id, None)
