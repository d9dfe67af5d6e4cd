"""Arithmetic that the attention kernels share: bending scores, the running softmax, reading int8 and fp8.

Takes and gives tiles in registers; it knows no address. Everything is fp32 and in powers of two: a score is multiplied
by log2(e), so that ``exp2`` does the softmax.
"""
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator"
# ruff: noqa: N803, PLR0124, PLR0917

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def tanh(x):
    """Return tanh, to a few units of the last place of fp32: by its series near 0, where 1 - 2 / (e^2x + 1) cancels."""
    z = x * x
    series = x + x * z * (
        -0.3333333333333333
        + z * (0.13333333333333333 + z * (-0.05396825396825397 + z * (0.021869488536155203 - z * 0.008863235529902197)))
    )
    size = tl.abs(x)
    far = 1.0 - 2.0 / (tl.exp2((size + size) * LOG2E) + 1.0)
    return tl.where(size < 0.4, series, tl.where(x < 0, -far, far))


@triton.jit
def bend(products, scale, softcap, slopes, q_positions, k_positions, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr):
    """Return log2(e) times the score of each product ``q.k``: scaled, capped, with its ALiBi bias; not yet masked."""
    if SOFTCAP or ALIBI:
        scores = products * scale
        if SOFTCAP:
            scores = softcap * tanh(scores / softcap)
        if ALIBI:
            scores += slopes[:, None] * (k_positions[None, :] - q_positions[:, None]).to(tl.float32)
        scores *= LOG2E
    else:
        scores = products * (scale * LOG2E)
    return scores


@triton.jit
def begin_softmax(M: tl.constexpr, D: tl.constexpr):
    """Return the running softmax ``(acc, top, total)`` of ``M`` rows that have seen nothing; see `accumulate`."""
    return tl.zeros([M, D], tl.float32), tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)


@triton.jit
def accumulate(acc, top, total, scores, v):
    """Fold a tile of masked scores ``[M, N]`` and its V ``[N, D]`` into the running softmax.

    ``acc`` is the sum of V weighted by ``exp2(score - top)``, ``total`` the sum of the weights, ``top`` the largest
    score so far. A row that has seen nothing keeps ``top`` at -inf and both sums at 0; no finite number means -inf.
    """
    new_top = tl.maximum(top, tl.max(scores, 1))
    finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - finite_top[:, None])
    shrink = tl.exp2(top - finite_top)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return acc, new_top, total


@triton.jit
def finish(acc, top, total, sink_logits, SINK_LOGITS: tl.constexpr):
    """Return the output of rows that have seen all their keys; exactly 0 where they saw none."""
    if SINK_LOGITS:
        sinks = sink_logits * LOG2E
        new_top = tl.maximum(top, sinks)
        finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = tl.exp2(top - finite_top)
        acc = acc * shrink[:, None]
        total = total * shrink + tl.exp2(sinks - finite_top)
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def widen(stored, QUANT: tl.constexpr, DTYPE: tl.constexpr):
    """Return stored K or V in ``DTYPE``, exactly: int8 and fp8 fit into 8 bits of mantissa.

    Without hardware fp8 the byte is moved to where fp16 has its exponent and mantissa, and the difference of the
    exponents' biases, 15 - 7, is multiplied back; that is right for subnormals too. Code 0x7F gives 480, not NaN: it
    is only ever stored beside a scale that is not finite.
    """
    if QUANT == "fp8_bits":
        bits = stored.to(tl.uint16)
        bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return (bits.to(tl.float16, bitcast=True) * 256.0).to(DTYPE)
    return stored.to(DTYPE)


@triton.jit
def to_int8(x):
    """Round fp32 within ±127 to the nearest int8, ties to even: adding 1.5 * 2**23 leaves no bits for a fraction."""
    return ((x + 12582912.0) - 12582912.0).to(tl.int8)


@triton.jit
def to_fp8_bits(x):
    """Round fp32 within ±448 to the nearest float8_e4m3fn, ties to even, and return its byte.

    Normal numbers: round the mantissa at its third bit and re-bias the exponent. Below 2**-6 the code is the number
    of steps of 2**-9; eight of them are the smallest normal number's code, as it happens to be written. NaN gives 0x7F.
    """
    size = tl.abs(x)
    bits = size.to(tl.uint32, bitcast=True)
    rounded = bits + 0x7FFFF + ((bits >> 20) & 1)
    normal = (rounded >> 20) - (120 << 3)
    steps = ((size * 512.0 + 8388608.0) - 8388608.0).to(tl.uint32)
    code = tl.where(size < 0.015625, steps, normal)
    code = tl.where(x == x, code, 0x7F)
    return (code | ((x.to(tl.uint32, bitcast=True) >> 31) << 7)).to(tl.uint8)
