"""Engine: text or token ids in, text and token ids out, over one model and one cache.

Takes a transformers model, a tokenizer and a cache; gives `add_request` and `step`, and `generate` and `stream` on top
of them; leaves all decisions to `EngineCore` and all arithmetic to the model's runner.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from pagedkv.cache import PagedKVCache
from pagedkv.engine.build import find_eos_token_ids, load_pretrained, make_backend
from pagedkv.engine.checks import require_bool, require_int
from pagedkv.engine.core import EngineCore
from pagedkv.engine.params import SamplingParams
from pagedkv.engine.prompts import require_list, require_tokenizer, to_token_ids
from pagedkv.engine.stops import OutputText
from pagedkv.engine.stream import RequestStream
from pagedkv.spec import KVSpec

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Hashable

    import torch

    from pagedkv.backend import CacheBackend
    from pagedkv.engine.outputs import Completion, EngineStats, StepOutput
    from pagedkv.engine.prompts import Message
    from pagedkv.engine.text import Tokenizer

DEFAULT_MAX_BATCH = 32
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
        max_batch: the most requests running at a time; by default 32, or less if the given cache or
            ``max_step_tokens`` allow less.
        max_len: the most tokens of one request, prompt and generated together; by default the model's context.
        max_step_tokens: the most input tokens of one step, prefill chunks and decode together; at least ``max_batch``.
        watermark: the share of the cache that new requests leave free beside running ones, 0 to below 1; by default
            0.01 for pages and 0 for baselines.
        seed: of the seeds of requests that bring none, for runs that can be repeated, 0 to 2**64 - 1; None: from the
            system.
        clock: seconds, for metrics only.
        cuda_graphs: as `ModelRunner` takes it.

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
        max_batch: int | None = None,
        max_len: int | None = None,
        max_step_tokens: int = 1024,
        watermark: float | None = None,
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
        spec = KVSpec.from_config(model.config)
        context = spec.max_len if max_len is None else require_int("max_len", max_len, 1, spec.max_len)
        if max_batch is not None:
            require_int("max_batch", max_batch, 1)
        if backend is None or isinstance(backend, str):
            max_batch = max_batch or min(DEFAULT_MAX_BATCH, require_int("max_step_tokens", max_step_tokens, 1))
            cache = make_backend(
                backend or "paged",
                model,
                memory=memory,
                num_pages=num_pages,
                page_size=page_size,
                max_batch=max_batch,
                max_len=context,
                prefix_cache=prefix_cache,
            )
        else:
            if memory is not None or num_pages is not None:
                raise ValueError("memory and num_pages must be None when backend is a cache of its own")
            cache = backend
            if not hasattr(cache, "begin_step"):
                raise TypeError(f"backend must be a name or a CacheBackend, was {type(cache).__name__}")
            _require_made_for(cache, spec, model)
            max_batch = _batch_within(cache, max_batch)
            context = min(context, getattr(cache, "max_len", context))
        paged = cache if isinstance(cache, PagedKVCache) else None
        core = EngineCore(
            ModelRunner(model, cache, cuda_graphs=cuda_graphs),
            cache,
            vocab_size=spec.vocab_size,
            max_len=context,
            eos_token_ids=find_eos_token_ids(model, tokenizer),
            max_batch=max_batch,
            max_step_tokens=max_step_tokens,
            watermark=(DEFAULT_WATERMARK if paged else 0.0) if watermark is None else watermark,
            prefix_page_size=paged.page_size if paged and paged.allocator.prefix_cache else None,
            seed=seed,
            clock=clock,
        )
        if paged:
            paged.allocator.hand_over()  # to the thread that steps
        self._assemble(core, tokenizer)

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
    ) -> None:
        """Queue a request; it enters at the next step that has room for it.

        ``prompt`` is text, or token ids as a list or a 1-D integer array or tensor; ``messages`` instead are a chat,
        which the tokenizer's template turns into a prompt. ``request_id`` may be used again once its request has
        finished. ``params`` are `SamplingParams()` by default.

        Raises:
            ValueError, TypeError: for an empty prompt, ids that are no tokens of the model, text without a tokenizer,
                a chat without a template, an id in use, or a request that can never fit in the batch, the context or
                the cache; nothing has changed.
        """
        self.core.add_request(request_id, to_token_ids(self.tokenizer, prompt, messages), params)

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

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]] | None = None,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        messages: Sequence[Sequence[Message]] | None = None,
    ) -> list[Completion]:
        """Serve ``prompts``, or the chats ``messages``, to their ends; return their completions in the same order.

        ``params`` are one for all, or one each. Other requests go on meanwhile. If a prompt is refused, or the model
        raises, all of them are aborted at the next step.
        """
        if messages is not None and prompts is None:
            given = [(None, chat) for chat in require_list("messages", messages)]
        elif messages is None:
            given = [(prompt, None) for prompt in require_list("prompts", prompts)]
        else:
            raise TypeError("prompts or messages must be given, and not both, was both")
        each = _one_each(params, len(given))
        streams: list[RequestStream] = []
        try:
            for (prompt, chat), own in zip(given, each, strict=True):
                streams.append(self.stream(prompt, own, messages=chat))
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
    ) -> RequestStream:
        """Queue one request and return an iterator over its step outputs, which steps the engine as needed.

        Closing it early, or dropping it, aborts the request at the next step.
        """
        tokens = to_token_ids(self.tokenizer, prompt, messages)
        self._num_private += 1
        request_id = ("stream", self._num_private, object())  # nobody else can have this id
        box: deque[StepOutput] = deque()
        self._boxes[request_id] = box
        try:
            self.core.add_request(request_id, tokens, params)
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


def _one_each(params: Any, count: int) -> list[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence):
        raise TypeError(f"params must be SamplingParams or a list of them, was {type(params).__name__}")
    if len(params) != count:
        raise ValueError(f"params must be one, or one for each of {count} prompts, were {len(params)}")
    return list(params)


def _require_made_for(cache: Any, spec: KVSpec, model: Any) -> None:
    """Refuse a cache of another model's layers or dtype, where it says for which it was made."""
    own: KVSpec | None = getattr(cache, "spec", None)
    if own is not None and own.layers != spec.layers:
        raise ValueError(
            f"backend must be made for the model's {spec.num_layers} layers, {spec.layers[0]} first; "
            f"was made for {own.num_layers}, {own.layers[0]} first"
        )
    dtype = getattr(cache, "dtype", model.dtype)
    if dtype != model.dtype:
        raise ValueError(f"backend must be of the model's dtype, {model.dtype}, was {dtype}")


def _batch_within(cache: CacheBackend, max_batch: int | None) -> int:
    most: int | None = getattr(cache, "max_batch", None)
    if max_batch is None:
        return DEFAULT_MAX_BATCH if most is None else min(DEFAULT_MAX_BATCH, most)
    if most is not None and max_batch > most:
        raise ValueError(f"max_batch must be at most the cache's {most}, was {max_batch}")
    return max_batch
