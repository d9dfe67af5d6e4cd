"""Pages that several sequences of a paged cache begin with, read once: the switch, and what it changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from pagedkv.attention.shared_prefix import Group, shared_of
from pagedkv.cache import PagedKVCache
from pagedkv.spec import KVSpec, LayerKV

if TYPE_CHECKING:
    from pagedkv.allocator import Sequence
    from pagedkv.step import PagedStep

FULL, WINDOW = LayerKV(1, 16, 16), LayerKV(1, 16, 16, window=100)
PROMPT = [(7 * n) % 90 for n in range(140)]


def shared_cache(*layers: LayerKV, **options: Any) -> tuple[PagedKVCache, list[Sequence]]:
    """Return a cache of random K and V, and three sequences: two that share 140 tokens, a stranger between."""
    spec = KVSpec(layers, max_len=512, vocab_size=100)
    cache = PagedKVCache(spec, num_pages=100, page_size=16, attention_backend="triton", check=True, **options)
    generator = torch.Generator().manual_seed(0)
    for buffer in cache.page_tensors:
        buffer.copy_(torch.randn(buffer.shape, generator=generator))
    first, stranger = cache.open(PROMPT), cache.open(PROMPT[::-1])
    for sequence, tokens in ((first, PROMPT), (stranger, PROMPT[::-1])):
        cache.end_step(cache.begin_step({sequence: tokens}))
    return cache, [first, stranger, first.fork()]


def decode(cache: PagedKVCache, sequences: list[Sequence]) -> tuple[PagedStep, list[torch.Tensor]]:
    """Return a decode step and what each layer's queries see; nothing is stored."""
    batch = cache.begin_step({sequence: [row] for row, sequence in enumerate(sequences)})
    q = torch.randn(len(sequences), 2, 16, generator=torch.Generator().manual_seed(1))
    kv = torch.randn(len(sequences), 1, 16, generator=torch.Generator().manual_seed(2))
    outputs = []
    for layer in range(cache.spec.num_layers):
        cache.write(layer, kv, kv, batch)
        outputs.append(cache.attend(layer, q, batch))
    cache.abandon_step(batch)
    return batch, outputs


def test_shared_pages_are_read_once_when_asked() -> None:
    """Layers of full attention cascade their own group's rows and agree within rounding; windows keep their bits."""
    found, outputs = {}, {}
    for mode in ("always", "never"):
        cache, sequences = shared_cache(FULL, WINDOW, shared_prefix=mode)
        batch, outputs[mode] = decode(cache, sequences)
        full = batch.groups[cache._homes[0]]  # type: ignore[index]
        found[mode] = shared_of(full.attention)

    assert found["never"] is None
    assert found["always"] is not None
    assert found["always"].groups == (Group((0, 2), 128),)
    for layer in (0, 1):
        torch.testing.assert_close(outputs["always"][layer], outputs["never"][layer], rtol=0, atol=2e-6)
    assert not torch.equal(outputs["always"][0], outputs["never"][0])
    assert torch.equal(outputs["always"][1], outputs["never"][1])


def test_auto_looks_on_a_gpu_only() -> None:
    """On a CPU the default leaves rows to themselves: nothing hangs on the step."""
    cache, sequences = shared_cache(FULL)
    batch = cache.begin_step({sequence: [1] for sequence in sequences})

    assert all(shared_of(step.attention) is None for step in batch.groups.values())
    assert all(step.attention.prepared == {} for step in batch.groups.values())


def test_nothing_is_looked_for_until_a_layer_asks() -> None:
    """The search is left to the first layer that can use it, and done once."""
    cache, sequences = shared_cache(FULL, shared_prefix="always")
    batch = cache.begin_step({sequence: [1] for sequence in sequences})
    (step,) = batch.groups.values()
    (left,) = step.attention.prepared.values()

    assert callable(left)
    found = shared_of(step.attention)
    assert found is not None
    assert shared_of(step.attention) is found


def test_an_unknown_switch_is_refused() -> None:
    """The message names the argument, what it may be and what it was."""
    with pytest.raises(ValueError, match=r"shared_prefix must be one of \('auto', 'always', 'never'\), was 'on'"):
        shared_cache(FULL, shared_prefix="on")
