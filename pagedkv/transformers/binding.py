"""A model bound to a pool of pages: the hooks that make a forward ours, and give everything back after it.

Takes a model, what was learned of it, and a `PagedKVCache`; gives the caches that share them one forward at a time;
refuses a second thread, another model and a forward that does not use the cache. Between forwards the model is as it
was: its configs name our attention only while one of our caches is its argument, also where the forward raises.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from pagedkv.allocator import WrongThread
from pagedkv.spec import UnsupportedModel
from pagedkv.transformers.cache_forward import CacheForward
from pagedkv.transformers.generate_interface import IMPLEMENTATION, active
from pagedkv.transformers.hook import implementation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagedkv.cache import PagedKVCache
    from pagedkv.transformers.learned import Learned
    from pagedkv.transformers.paged_cache import PagedCache


class Binding:
    """What the caches of one model share.

    Attributes:
        model: the model.
        learned: what is known of it.
        store: the pages.
        learning: whether the first forward is watched, for what layers need.
        caches: those that are not closed.
        forward: the forward that runs now, or None.
    """

    def __init__(self, model: PreTrainedModel, learned: Learned, store: PagedKVCache, *, learning: bool) -> None:
        self.model = model
        self.learned = learned
        self.store = store
        self.learning = learning
        self.caches: weakref.WeakSet[PagedCache] = weakref.WeakSet()
        self.forward: CacheForward | None = None
        self._outermost: torch.nn.Module | None = None
        self._stack = ExitStack()
        self._owner: threading.Thread | None = None
        modules = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
        configs = [getattr(module, "config", None) for module in model.modules()]
        self._configs = list({id(one): one for one in configs if isinstance(one, PreTrainedConfig)}.values())
        self._modules = {id(module) for module in modules}
        # The hooks must not keep the pages alive for as long as the model lives.
        here = weakref.ref(self)
        handles = []
        for module in modules:
            handles.append(module.register_forward_pre_hook(_Enter(here), with_kwargs=True))
            handles.append(module.register_forward_hook(_Leave(here), with_kwargs=True, always_call=True))
        self._finalizer = weakref.finalize(self, _remove, handles)

    def close(self) -> None:
        """Take the hooks out of the model."""
        self.settle()
        self._finalizer()

    @contextmanager
    def operation(self) -> Iterator[None]:
        """Do something to the pages between forwards; the calling thread is the owner from here on.

        Raises:
            WrongThread: another thread that still runs owns the caches of this pool.
        """
        self._claim()
        self.settle()
        try:
            yield
        finally:
            self.store.allocator.hand_over()

    def _claim(self) -> None:
        """Make the calling thread the owner; one that has ended owns nothing."""
        caller, owner = threading.current_thread(), self._owner
        if owner is not None and owner is not caller and owner.is_alive():
            raise WrongThread(
                f"the cache belongs to thread {owner.name!r}, which still runs, {caller.name!r} called; "
                "the owner must call hand_over() first"
            )
        self._owner = caller

    def hand_over(self) -> None:
        """Let the next thread that calls be the owner."""
        with self.operation():
            self._owner = None

    def settle(self) -> None:
        """Take back a forward that was left by an exception that no hook hears of, such as KeyboardInterrupt."""
        if self.forward is not None:
            self._end(failed=True)

    def enter(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a forward, if ``module`` is called with one of our caches and none runs yet."""
        if id(module) not in self._modules:
            return  # a copy of the model has copies of its hooks
        if self.forward is not None and module is self._outermost:
            self.settle()
        cache = self._our_cache(args, kwargs)
        if self.forward is not None or cache is None:
            return
        self._claim()
        cache.require_usable()
        said = _arguments(module, args, kwargs)
        if said.get("use_cache") is False:
            raise ValueError("use_cache must be true with a PagedCache: without it the whole text would be fed again")
        mask, ids = said.get("attention_mask"), said.get("input_ids")
        told = isinstance(mask, torch.Tensor) and not self.learned.stores_padding
        self._outermost = module
        self.forward = CacheForward(
            cache,
            self.learned,
            mask=mask if told else None,
            input_ids=ids if isinstance(ids, torch.Tensor) else None,
            learning=self.learning and not cache.get_seq_length(),
            own_attention=self.learned.untouched or _wants_weights(module, said),
        )
        try:
            self._take_over(cache, ids if ids is not None else said.get("inputs_embeds"))
        except BaseException:
            self._end(failed=True)
            raise

    def _take_over(self, cache: PagedCache, inputs: Any) -> None:
        forward = self.forward
        assert forward is not None
        if not forward.own_attention:
            forward.implementation_before = {id(one): one._attn_implementation for one in self._configs}
            self._stack.enter_context(implementation(self._configs, IMPLEMENTATION))
            self._stack.enter_context(active(forward))
        if cache.keeps_states and isinstance(inputs, torch.Tensor):
            # A state cannot be taken back once its layer has run, so whether there is room is found out before.
            forward.begin(inputs.shape[0], inputs.shape[1])

    def leave(self, module: torch.nn.Module, *, failed: bool) -> None:
        """End the forward that ``module`` began."""
        if self.forward is None or module is not self._outermost:
            return
        forward = self.forward
        self._end(failed=failed)
        if not failed and not forward.written:
            raise UnsupportedModel(f"{type(module).__name__} ignored the cache that it was given")

    def _end(self, *, failed: bool) -> None:
        forward, self.forward, self._outermost = self.forward, None, None
        assert forward is not None
        self._stack.close()
        if failed:
            forward.abandon()
        else:
            forward.end()
            if forward.learning:
                for layer in forward.written - forward.attended:
                    self.learned.gathered.setdefault(layer, "attention to other K and V than it stored, or unseen")
        self.store.allocator.hand_over()

    def _our_cache(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PagedCache | None:
        for value in (*kwargs.values(), *args):
            if getattr(value, "binding", None) is self:
                cache: PagedCache = value
                return cache
        return None


class _Enter:
    """The hook before a forward."""

    def __init__(self, binding: weakref.ref[Binding]) -> None:
        self._binding = binding

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        binding = self._binding()
        if binding is not None:
            binding.enter(module, args, kwargs)


class _Leave:
    """The hook after a forward, also one that raised: then there is no output."""

    def __init__(self, binding: weakref.ref[Binding]) -> None:
        self._binding = binding

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        binding = self._binding()
        if binding is not None:
            binding.leave(module, failed=output is None)


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def _arguments(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return what the forward was called with, by name."""
    if not args:
        return kwargs
    names = list(inspect.signature(module.forward).parameters)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _wants_weights(module: torch.nn.Module, said: dict[str, Any]) -> bool:
    """Whether the caller wants attention weights, which pages never have."""
    asked = said.get("output_attentions")
    return bool(getattr(module.config, "output_attentions", False) if asked is None else asked)
