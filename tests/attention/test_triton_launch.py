"""How the "triton" backend launches: what it reads of a step (shapes only), how often, and how large the grids are."""

from __future__ import annotations

import mmap
from typing import Any

import pytest
import torch

from pagedkv.attention import AttentionBatch, LayerSpec, paged_attention, write_kv
from pagedkv.attention.backends import load
from pagedkv.attention.calls import AttendCall
from pagedkv.attention.shared_prefix import share_prefixes
from pagedkv.attention.triton import launch
from pagedkv.attention.triton.tuning import Layer, Target, decode_tiles, max_splits, prefill_tiles
from tests.attention.cases import make_batch
from tests.attention.test_triton import NATIVE


class Recorder:
    """Stands for a kernel and notes the grids it is launched with."""

    def __init__(self, name: str, launches: list[tuple[str, tuple[int, ...]]]) -> None:
        self._name, self._launches = name, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        """Return what notes a launch."""
        return lambda *args, **constants: self._launches.append((self._name, grid))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...]]]:
    """The launches of a test, whose kernels do nothing."""
    noted: list[tuple[str, tuple[int, ...]]] = []
    for name in ("decode", "merge", "prefill", "cascade"):
        monkeypatch.setattr(launch, f"{name}_kernel", Recorder(name, noted))
    return noted


def meta_call(rows: int, total_q: int, max_q_len: int, max_kv_len: int, **layer: Any) -> AttendCall:
    """Return a call whose tensors have shapes and nothing else: reading one raises."""
    q = torch.empty(total_q, 32, 128, device="meta", dtype=torch.bfloat16)
    k_pages, v_pages = (torch.empty(100, 8, 16, 128, device="meta", dtype=torch.bfloat16) for _ in range(2))
    tables = torch.empty(rows, max_kv_len // 16 + 1, dtype=torch.int32, device="meta")
    lens = [torch.empty(n, dtype=torch.int32, device="meta") for n in (rows, rows + 1)]
    batch = AttentionBatch(tables, lens[0], lens[1], max_q_len, max_kv_len)
    return AttendCall(q, k_pages, v_pages, batch, LayerSpec(0.1, **layer), None, None, {})


def run(call: AttendCall) -> None:
    """Run the backend on shapes alone."""
    load("triton").attend(call, torch.empty(call.q.shape, dtype=call.q.dtype, device="meta"))


def test_decode_of_short_sequences_is_one_launch(launches: list[tuple[str, tuple[int, ...]]]) -> None:
    """No sequence over a split's 512 tokens: no merge, no prefill, and nothing is read of the step's tensors."""
    run(meta_call(16, 16, 1, 512))

    assert launches == [("decode", (16, 8, 1))]


def test_long_sequences_are_split_and_merged(launches: list[tuple[str, tuple[int, ...]]]) -> None:
    """A grid for the longest; at 32k tokens the splits stop becoming more."""
    run(meta_call(2, 2, 1, 1025))
    run(meta_call(2, 2, 1, 131072))

    assert launches == [
        ("decode", (2, 8, 3)), ("merge", (2, 32, 1)), ("decode", (2, 8, 64)), ("merge", (2, 32, 1)),
    ]  # fmt: skip


def test_a_window_bounds_the_grid(launches: list[tuple[str, tuple[int, ...]]]) -> None:
    """With a window the splits are those that the window and the sink tokens can touch, not those of the length."""
    run(meta_call(2, 2, 1, 131072, window=400, num_sink_tokens=4))

    assert launches == [("decode", (2, 8, 1))] or launches[0] == ("decode", (2, 8, 2))


def test_mixed_steps_add_one_grid_of_tiles(launches: list[tuple[str, tuple[int, ...]]]) -> None:
    """Queries that do not fit decode's tile go through prefill; its grid follows from their total, not the longest."""
    run(meta_call(3, 1000, 998, 500))

    # 16-bit prefill tiles hold 128 rows: 32 queries of a group of 4.
    assert launches == [("prefill", (1000 // 32 + 3, 8)), ("decode", (3, 8, 1))]


def test_layers_of_a_step_plan_once(launches: list[tuple[str, tuple[int, ...]]]) -> None:
    """What is derived from shapes hangs on the batch; a second layer of the kind adds nothing."""
    call = meta_call(2, 2, 1, 4096)
    run(call)
    kept = dict(call.batch.prepared)
    run(call._replace(k_pages=torch.empty_like(call.k_pages)))

    assert call.batch.prepared == kept
    assert len(launches) == 4


@pytest.mark.parametrize("mode", ["always", "never", "auto"])
def test_cascade_is_launched_when_asked_or_when_it_pays(mode: Any, launches: list[tuple[str, tuple[int, ...]]]) -> None:
    """Forced, forbidden, and left to the estimate, which refuses two rows that share 128 tokens."""
    pages = torch.zeros(60, 2, 16, 32)
    tables = [list(range(1, 30)), [*range(1, 9), *range(30, 51)]]
    batch = make_batch([(1, 460), (1, 460)], tables)
    share_prefixes(batch, 16, mode=mode)
    q = torch.zeros(2, 4, 32)
    paged_attention(q, pages, pages, batch, LayerSpec(1.0), backend="triton")
    paged_attention(q, pages, pages, batch, LayerSpec(1.0, window=100), backend="triton")
    names = [name for name, _ in launches]

    assert names == (["decode", "cascade", "merge", "decode"] if mode == "always" else ["decode", "decode"])


def test_tiles_follow_from_the_layer_alone() -> None:
    """Rows of a tile hold the whole group; a split is 512 tokens on every layer; padded dims are powers of two."""
    for target in (Target("cuda", 80), Target("cuda", 90), Target("cuda", 100), Target("hip"), Target("interpreter")):
        for dtype in (torch.bfloat16, torch.float32):
            for group in (1, 3, 17, 71):
                for dim in (8, 80, 128, 256):
                    layer = Layer(8, group, dim, dim, 16, dtype, "none")
                    for tiles in (decode_tiles(layer, target), prefill_tiles(layer, target)):
                        assert tiles.block_m >= max(16, group)
                        assert dim <= tiles.k_pad == tiles.v_pad < 2 * max(dim, 16)
                        assert 512 % tiles.block_n == 0 == 128 % tiles.block_n
    assert max_splits(Layer(8, 4, 64, 64, 16, torch.float16, "none")) == 64


@pytest.mark.skipif(NATIVE, reason="a device's memory is not lent without being there")
@pytest.mark.parametrize("page_size", [16, 256])
def test_addresses_are_64_bit(page_size: int) -> None:
    """Pages beyond 2**31 elements, and beyond 2**32 bytes, are read and written where they are.

    The pool is address space that the system backs by memory only where it is touched.
    """
    heads, dim = 2, 64
    num_pages = (2**31 + 2**27) // (heads * page_size * dim)
    element = heads * page_size * dim
    size = num_pages * element * 2
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    shape = (num_pages, heads, page_size, dim)
    k_pages, v_pages = (
        torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.float16).view(shape) for _ in range(2)
    )
    last = num_pages - 1
    table = [last, 1, last - 3]
    length = 2 * page_size + 3
    positions = torch.arange(length)
    slots = torch.tensor(table)[positions // page_size] * page_size + positions % page_size
    k, v = torch.randn(length, 2, 64).half(), torch.randn(length, 2, 64).half()
    write_kv(k, v, k_pages, v_pages, slots, backend="triton", check=True)
    near_k, near_v = torch.zeros(2, 4, 2, page_size, 64).half()
    moved = torch.tensor([3, 1, 2])[positions // page_size] * page_size + positions % page_size
    write_kv(k, v, near_k, near_v, moved, backend="torch", check=True)
    q = torch.randn(1, 4, 64).half()
    far = paged_attention(q, k_pages, v_pages, make_batch([(1, length)], [table]), LayerSpec(0.125), backend="triton")
    close = paged_attention(
        q, near_k, near_v, make_batch([(1, length)], [[3, 1, 2]]), LayerSpec(0.125), backend="triton"
    )

    assert torch.equal(far, close)
