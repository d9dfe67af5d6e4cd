"""Wrong arguments are refused at the door by an error that names the argument, what it must be and what it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedkv.attention import AttentionBatch, LayerSpec, copy_pages, paged_attention, write_kv
from tests.attention.cases import Shape, make_batch, make_case

SHAPE = Shape([(1, 9), (3, 5)], heads=(4, 2), dims=(16, 8), page_size=4)
SPEC = LayerSpec(0.25)


def _attend(**changes: Any) -> None:
    case = make_case(SHAPE)
    arguments: dict[str, Any] = {
        "q": case.q, "k_pages": case.k_pages, "v_pages": case.v_pages, "batch": case.batch, "spec": SPEC,
    }  # fmt: skip
    paged_attention(**(arguments | changes))


_CODES = torch.zeros(9, 2, 4, 16, dtype=torch.int8)
_NARROW_CODES = torch.zeros(9, 2, 4, 8, dtype=torch.int8)
_SCALES = torch.zeros(9, 2, 4)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": [1, 2]}, TypeError, r"q must be a tensor \[total_q, num_q_heads, k_dim\], got list"),
        ({"q": torch.zeros(4, 16)}, ValueError, r"q must be \[total_q, num_q_heads, k_dim\], got \[4, 16\]"),
        ({"q": torch.zeros(4, 4, 16).int()}, TypeError, "q must be float32, .* got torch.int32"),
        ({"q": torch.zeros(4, 4, 12)}, ValueError, "q must have the k_dim of k_pages, 16, got 12"),
        ({"q": torch.zeros(4, 3, 16)}, ValueError, "q must have a multiple of the 2 num_kv_heads, got 3 heads"),
        ({"q": torch.zeros(4, 0, 16)}, ValueError, "q must have a multiple of the 2 num_kv_heads, got 0 heads"),
        ({"q": torch.zeros(5, 4, 16)}, ValueError, r"q must have cu_q_lens\[-1\] = 4 rows, got 5"),
        ({"q": torch.zeros(4, 4, 16).half()}, TypeError, "k_pages must be torch.float16 like q, .*got torch.float32"),
        ({"q": torch.zeros(4, 4, 16, device="meta")}, ValueError, "k_pages must be on meta like q, got cpu"),
        ({"k_pages": None}, TypeError, "k_pages must be a tensor .* got NoneType"),
        ({"k_pages": torch.zeros(9, 2, 64)}, ValueError, r"k_pages must be \[num_pages, .* got \[9, 2, 64\]"),
        ({"k_pages": torch.zeros(0, 2, 4, 16)}, ValueError, "k_pages must have no empty dimension"),
        ({"v_pages": torch.zeros(9, 2, 4, 0)}, ValueError, r"v_pages must be .* like k_pages, got \[9, 2, 4, 0\]"),
        ({"v_pages": torch.zeros(9, 2, 5, 8)}, ValueError, r"v_pages must be .* like k_pages, got \[9, 2, 5, 8\]"),
        ({"v_pages": torch.zeros(9, 2, 4, 8).half()}, TypeError, "v_pages must be torch.float32 like k_pages"),
        ({"batch": 3}, TypeError, "batch must be an AttentionBatch, got int"),
        ({"spec": 0.25}, TypeError, "spec must be a LayerSpec, got float"),
        ({"kv_scales": (_SCALES, _SCALES)}, ValueError, "kv_scales must be None for pages of torch.float32"),
        ({"out": torch.zeros(4, 4, 16)}, ValueError, r"out must be .* = \[4, 4, 8\], got \[4, 4, 16\]"),
        ({"out": torch.zeros(4, 4, 8).half()}, TypeError, "out must be torch.float32 like q, got torch.float16"),
        ({"out": torch.zeros(4, 1, 8).expand(4, 4, 8)}, ValueError, r"out must have memory of its own .* \[8, 0, 1\]"),
        ({"out": "x"}, TypeError, "out must be a tensor .* got str"),
        ({"spec": LayerSpec(1.0, sink_logits=torch.zeros(3))}, ValueError, r"spec.sink_logits must be .* = \[4\]"),
        ({"spec": LayerSpec(1.0, alibi_slopes=torch.zeros(5))}, ValueError, r"spec.alibi_slopes .* got \[5\]"),
        ({"backend": "cuda"}, ValueError, "backend must be None or one of .*'torch'.* got 'cuda'"),
    ],
)  # fmt: skip
def test_attention_arguments(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    """Each wrong argument of `paged_attention`."""
    with pytest.raises(error, match=message):
        _attend(**changes)


@pytest.mark.parametrize(
    ("scales", "error", "message"),
    [
        (None, ValueError, r"kv_scales must be \(k_scales, v_scales\) for pages of torch.int8, got None"),
        ([_SCALES, _SCALES], TypeError, "kv_scales must be a tuple .* got list"),
        ((_SCALES,), TypeError, "kv_scales must be a tuple"),
        ((_SCALES, None), TypeError, r"kv_scales\[1\] must be a tensor"),
        ((_SCALES.half(), _SCALES), TypeError, r"kv_scales\[0\] must be float32, got torch.float16"),
        ((_SCALES, _SCALES[:8]), ValueError, r"kv_scales\[1\] must be .* = \[9, 2, 4\], got \[8, 2, 4\]"),
    ],
)
def test_scales(scales: Any, error: type[Exception], message: str) -> None:
    """Quantised pages need both scales, of the right shape and dtype."""
    with pytest.raises(error, match=message):
        _attend(k_pages=_CODES, v_pages=_NARROW_CODES, kv_scales=scales)
    with pytest.raises(error, match=message):
        write_kv(
            torch.zeros(1, 2, 16), torch.zeros(1, 2, 8), _CODES, _NARROW_CODES, torch.tensor([4]), kv_scales=scales
        )


def test_an_accepted_call_does_not_admit_a_different_one() -> None:
    """Checks are remembered per step by everything they read: a later wrong call of the same step is still refused."""
    case = make_case(SHAPE)
    case.run(SPEC)
    with pytest.raises(ValueError, match="v_pages must be"):
        paged_attention(case.q, case.k_pages, case.v_pages[:, :1], case.batch, SPEC)
    with pytest.raises(ValueError, match="out must be"):
        case.run(SPEC, out=torch.zeros(4, 4, 9))
    with pytest.raises(ValueError, match="kv_scales must be None"):
        paged_attention(case.q, case.k_pages, case.v_pages, case.batch, SPEC, kv_scales=(_SCALES, _SCALES))


def test_named_backend_never_falls_back() -> None:
    """A backend asked for by name that cannot serve the call raises; None finds one that can."""
    case = make_case(Shape([(1, 9)], dtype=torch.float64))
    with pytest.raises(ValueError, match=r"backend 'torch' cannot serve this call: q must be float32, .*float64"):
        case.run(SPEC)

    assert torch.equal(case.run(SPEC, backend=None), case.reference(SPEC))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"scale": "1"}, TypeError, "scale must be a number, got str"),
        ({"scale": float("nan")}, ValueError, "scale must be finite, got nan"),
        ({"window": 0}, ValueError, "window must be at least 1, got 0"),
        ({"window": -3}, ValueError, "window must be at least 1, got -3"),
        ({"window": 2.0}, TypeError, "window must be an integer, got float"),
        ({"window": True}, TypeError, "window must be an integer, got bool"),
        ({"num_sink_tokens": -1}, ValueError, "num_sink_tokens must be at least 0, got -1"),
        ({"softcap": 0.0}, ValueError, "softcap must be greater than 0 or None, got 0.0"),
        ({"softcap": float("inf")}, ValueError, "softcap must be finite, got inf"),
        ({"sink_logits": [1.0]}, TypeError, r"sink_logits must be a tensor \[num_q_heads\] or None, got list"),
        ({"sink_logits": torch.zeros(2, 2)}, ValueError, r"sink_logits must be floating \[num_q_heads\], .*\[2, 2\]"),
        ({"alibi_slopes": torch.zeros(2).int()}, ValueError, "alibi_slopes must be floating .*torch.int32"),
    ],
)
def test_layer_spec(options: dict[str, Any], error: type[Exception], message: str) -> None:
    """Each value that no layer can mean."""
    with pytest.raises(error, match=message):
        LayerSpec(**({"scale": 1.0} | options))


_TABLE = torch.zeros(2, 3, dtype=torch.int32)
_LENS = torch.zeros(2, dtype=torch.int32)
_CU = torch.zeros(3, dtype=torch.int32)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([[1]], _LENS, _CU, 1, 1), TypeError, "block_tables must be a tensor, got list"),
        ((_TABLE.float(), _LENS, _CU, 1, 1), TypeError, "block_tables must be int32 or int64, got torch.float32"),
        ((_TABLE[0], _LENS, _CU, 1, 1), ValueError, r"block_tables must be \[num_sequences, width\], got \[3\]"),
        ((_TABLE, _LENS[:1], _CU, 1, 1), ValueError, r"kv_lens must be \[2\], one per row .* got \[1\]"),
        ((_TABLE, _LENS, _CU[:2], 1, 1), ValueError, r"cu_q_lens must be \[3\], one more than .* got \[2\]"),
        ((_TABLE, _LENS.to("meta"), _CU, 1, 1), ValueError, "kv_lens must be on cpu like block_tables, got meta"),
        ((_TABLE, _LENS, _CU.to("meta"), 1, 1), ValueError, "cu_q_lens must be on cpu like block_tables, got meta"),
        ((_TABLE, _LENS, _CU, 1.5, 1), TypeError, "max_q_len must be an integer, got float"),
        ((_TABLE, _LENS, _CU, 1, -1), ValueError, "max_kv_len must be at least 0, got -1"),
    ],
)  # fmt: skip
def test_batch_shapes(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    """Each wrong argument of `AttentionBatch`."""
    with pytest.raises(error, match=message):
        AttentionBatch(*arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lens": [21, 5]}, r"kv_lens\[0\] must be 0 to 9 \(max_kv_len 9, table holds 20\), got 21"),
        ({"kv_lens": [21, 5], "max_kv_len": 99}, r"kv_lens\[0\] must be 0 to 20 .*got 21"),
        ({"kv_lens": [9, -1]}, r"kv_lens\[1\] must be 0 to 9 .*got -1"),
        ({"kv_lens": [9, 2]}, r"kv_lens\[1\] must be 0 or at least its q_len, 3, got 2"),
        ({"cu_q_lens": [0, 5, 4]}, r"cu_q_lens must grow by 0 to max_q_len \(3\) at row 0, got a step of 5"),
        ({"cu_q_lens": [0, 2, 4], "max_q_len": 1}, "at row 0, got a step of 2"),
        ({"cu_q_lens": [0, 3, 1]}, "cu_q_lens must run from 0 to the rows of q, 4, got 0 to 1"),
        ({"cu_q_lens": [1, 1, 4]}, "cu_q_lens must run from 0 to the rows of q, 4, got 1 to 4"),
        ({"table": (0, 2, 9)}, r"block_tables\[0, 2\] must be a page id from 1 to 8, got 9"),
        ({"table": (1, 0, 0)}, r"block_tables\[1, 0\] must be a page id from 1 to 8, got 0"),
        ({"table": (1, 1, -1)}, r"block_tables\[1, 1\] must be a page id from 1 to 8, got -1"),
    ],
)
def test_batch_contents(changes: dict[str, Any], message: str) -> None:
    """``check=True`` refuses lengths, sums and page ids that cannot be, naming the row."""
    case = make_case(SHAPE)
    tables = case.batch.block_tables.clone()
    if "table" in changes:
        row, block, page = changes["table"]
        tables[row, block] = page
    batch = AttentionBatch(
        tables,
        torch.tensor(changes.get("kv_lens", [9, 5]), dtype=torch.int32),
        torch.tensor(changes.get("cu_q_lens", [0, 1, 4]), dtype=torch.int32),
        changes.get("max_q_len", 3),
        changes.get("max_kv_len", 9),
    )
    with pytest.raises(ValueError, match=message):
        case.with_batch(batch).run(SPEC)


def test_contents_outside_the_window_are_not_checked() -> None:
    """Blocks that left a layer's window may name the null page; the same batch is refused for a full layer."""
    case = make_case(Shape([(1, 9)], page_size=4))
    batch = make_batch([(1, 9)], [[0, *case.batch.block_tables[0, 1:3].tolist()]])
    moved = case.with_batch(batch)

    assert moved.run(LayerSpec(1.0, window=5)).isfinite().all()
    with pytest.raises(ValueError, match=r"block_tables\[0, 0\] must be a page id"):
        moved.run(LayerSpec(1.0, window=6))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"k": torch.zeros(2, 16)}, ValueError, r"k must be \[total_q, num_kv_heads, k_dim\], got \[2, 16\]"),
        ({"k": torch.zeros(2, 3, 16)}, ValueError, r"k must be .* = \[2, 2, 16\], got \[2, 3, 16\]"),
        ({"v": torch.zeros(3, 2, 8)}, ValueError, r"v must be .* = \[2, 2, 8\], got \[3, 2, 8\]"),
        ({"v": torch.zeros(2, 2, 8).half()}, TypeError, "v must be torch.float32 like v_pages, got torch.float16"),
        ({"k": torch.zeros(2, 2, 16).int()}, TypeError, "k must be float32, .* got torch.int32"),
        ({"k": torch.zeros(2, 2, 16, device="meta")}, ValueError, "k must be on cpu like k_pages, got meta"),
        ({"slot_mapping": torch.zeros(2).int()}, TypeError, "slot_mapping must be int64, got torch.int32"),
        ({"slot_mapping": torch.zeros(3).long()}, ValueError, r"slot_mapping must be .* = \[2\], got \[3\]"),
        ({"slot_mapping": [4, 5]}, TypeError, r"slot_mapping must be a tensor \[total_q\], got list"),
        ({"slot_mapping": torch.tensor([4, 36])}, ValueError, "slot_mapping must be from 0 to 35, got 36"),
        ({"slot_mapping": torch.tensor([-1, 5])}, ValueError, "slot_mapping must be from 0 to 35, got -1"),
        ({"slot_mapping": torch.tensor([9, 9])}, ValueError, "slot_mapping must name each slot once, got slot 9 twice"),
        ({"backend": "fast"}, ValueError, "backend must be None or one of"),
    ],
)
def test_write_arguments(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    """Each wrong argument of `write_kv`, and nothing was written."""
    k_pages, v_pages = torch.zeros(9, 2, 4, 16), torch.zeros(9, 2, 4, 8)
    arguments: dict[str, Any] = {
        "k": torch.ones(2, 2, 16), "v": torch.ones(2, 2, 8), "k_pages": k_pages, "v_pages": v_pages,
        "slot_mapping": torch.tensor([4, 5]), "check": True,
    }  # fmt: skip
    with pytest.raises(error, match=message):
        write_kv(**(arguments | changes))

    assert k_pages.count_nonzero() == 0
    assert v_pages.count_nonzero() == 0


def test_padding_may_share_the_null_page() -> None:
    """Slots of the null page are the one place that several tokens may name."""
    k_pages, v_pages = torch.zeros(3, 1, 2, 4), torch.zeros(3, 1, 2, 4)
    write_kv(torch.ones(3, 1, 4), torch.ones(3, 1, 4), k_pages, v_pages, torch.tensor([0, 4, 0]), check=True)

    assert (k_pages[2, :, 0] == 1).all()
    assert k_pages[1:].count_nonzero() == 4


@pytest.mark.parametrize(
    ("pages", "copies", "error", "message"),
    [
        ([], torch.tensor([[1, 2]]), ValueError, "pages must be a tensor or a sequence of at least one, got none"),
        ([None], torch.tensor([[1, 2]]), TypeError, r"pages\[0\] must be a tensor \[num_pages, …\], got NoneType"),
        ([torch.zeros(4, 2), torch.zeros(5, 2)], torch.tensor([[1, 2]]), ValueError, r"pages\[1\] must be \[4, …\]"),
        (torch.zeros(4, 2), torch.tensor([1, 2]), ValueError, r"copies must be \[num_copies, 2\], got \[2\]"),
        (torch.zeros(4, 2), torch.tensor([[1, 2, 3]]), ValueError, r"copies must be .* = \[1, 2\], got \[1, 3\]"),
        (torch.zeros(4, 2), torch.tensor([[1.0, 2.0]]), TypeError, "copies must be int32 or int64, got torch.float32"),
        (torch.zeros(4, 2), [[1, 2]], TypeError, "copies must be a tensor .* got list"),
        (torch.zeros(4, 2), torch.tensor([[1, 4]]), ValueError, "copies must hold page ids from 0 to 3, got 4"),
        (torch.zeros(4, 2), torch.tensor([[-2, 1]]), ValueError, "copies must hold page ids from 0 to 3, got -2"),
        (torch.zeros(4, 2), torch.tensor([[1, 3], [2, 3]]), ValueError, "each destination once, got page 3 twice"),
        (torch.zeros(4, 2), torch.tensor([[1, 0]]), ValueError, "copies must not write the null page"),
        (
            torch.zeros(4, 2, device="meta"),
            torch.tensor([[1, 2]]),
            ValueError,
            r"pages\[0\] must be on cpu like copies",
        ),
    ],
)
def test_copy_arguments(pages: Any, copies: Any, error: type[Exception], message: str) -> None:
    """Each wrong argument of `copy_pages`."""
    with pytest.raises(error, match=message):
        copy_pages(pages, copies, check=True)
