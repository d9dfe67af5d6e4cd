"""A row's bits depend on its own sequence and the layer alone (AtomaAI#257, vllm#48271, flash-attention#1897)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from pagedkv.attention import LayerSpec
from tests.attention.cases import Shape, make_batch, make_case
from tests.attention.test_matrix import spec_for

if TYPE_CHECKING:
    from collections.abc import Iterator

FAST = ("cpu", "torch")
ROWS = [(1, 192), (1, 187), (1, 33), (1, 256), (7, 200), (1, 224), (40, 40), (1, 1000), (1, 5), (3, 64)]


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def _check_independence(shape: Shape, spec: LayerSpec, orders: list[list[int]], backend: str) -> None:
    """Compare each row alone with the same row in batches that take the rows of ``orders``."""
    case = make_case(shape)
    starts = [0]
    for q_len, _ in shape.rows:
        starts.append(starts[-1] + q_len)
    tables = [
        case.batch.block_tables[row, : -(-kv_len // shape.page_size)].tolist()
        for row, (_, kv_len) in enumerate(shape.rows)
    ]

    def run(order: list[int]) -> list[torch.Tensor]:
        batch = make_batch([shape.rows[row] for row in order], [tables[row] for row in order])
        q = torch.cat([case.q[starts[row] : starts[row + 1]] for row in order])
        return list(torch.split(case.with_batch(batch, q=q).run(spec, backend), [shape.rows[row][0] for row in order]))

    alone = [run([row])[0] for row in range(len(shape.rows))]
    for order in orders:
        for row, result in zip(order, run(order), strict=True):
            assert torch.equal(result, alone[row]), f"row {row} {shape.rows[row]} in batch {order}"


def _every_position(size: int, count: int) -> list[list[int]]:
    """Return batches of ``size`` in which every row stands once at every position."""
    return [[(first + i) % count for i in range(size)] for first in range(count)]


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("size", [2, 5, 8])
@pytest.mark.parametrize("feature", ["plain", "everything"])
def test_row_alone_equals_row_in_a_batch(size: int, feature: str, backend: str) -> None:
    """In batches of 2, 5 and 8 of other lengths, at each position, bit for bit; also with two threads."""
    shape = Shape(ROWS, heads=(9, 3), page_size=16)
    _check_independence(shape, spec_for(feature, 9), _every_position(size, len(ROWS)), backend)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize(
    ("heads", "head_dim", "dtype"),
    [
        ((7, 7), 8, torch.float32),
        ((71, 1), 64, torch.bfloat16),
        ((1, 1), 128, torch.float16),
        ((14, 2), 80, torch.float32),
        ((6, 2), 20, torch.float32),
    ],
)
@pytest.mark.parametrize("feature", ["plain", "softcap", "sink logits"])
@pytest.mark.parametrize("backend", FAST)
def test_independence_for_other_shapes(
    heads: tuple[int, int], head_dim: int, dtype: torch.dtype, feature: str, backend: str
) -> None:
    """The same for head counts and dims whose rows do not begin at aligned addresses."""
    shape = Shape([*ROWS[:5], *ROWS[7:]], heads, (head_dim, head_dim), 16, dtype)
    orders = [[0, 1, 2, 3, 4, 5, 6, 7], [7, 5, 3, 1, 6, 4, 2, 0], [1, 1, 0, 0, 0]]
    _check_independence(shape, spec_for(feature, heads[0]), orders, backend)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("backend", FAST)
def test_equal_rows_give_equal_bits(backend: str) -> None:
    """Many copies of one sequence, more than are gathered at once, all give the same bits."""
    case = make_case(Shape([(1, 450)], heads=(16, 8), dims=(128, 128)))
    table = case.batch.block_tables[0, :29].tolist()
    many = case.with_batch(make_batch([(1, 450)] * 11, [table] * 11), q=case.q.repeat(11, 1, 1))
    out = many.run(LayerSpec(0.1), backend)

    assert torch.equal(out, case.run(LayerSpec(0.1), backend).expand_as(out))


@pytest.mark.parametrize("backend", FAST)
def test_cold_and_cached_agree_within_rounding(backend: str) -> None:
    """Across paths (one-shot prefill, chunks of 7, token by token) the answer moves by rounding only."""
    case = make_case(Shape([(50, 50)], heads=(6, 2), page_size=4))
    table = [case.batch.block_tables[0, :13].tolist()]
    spec = LayerSpec(0.125, window=20)
    cold = case.run(spec, backend)
    for chunk in (1, 7, 16):
        parts = []
        for start in range(0, 50, chunk):
            stop = min(50, start + chunk)
            batch = make_batch([(stop - start, stop)], table)
            parts.append(case.with_batch(batch, q=case.q[start:stop]).run(spec, backend))

        torch.testing.assert_close(torch.cat(parts), cold, rtol=0, atol=2e-6)
