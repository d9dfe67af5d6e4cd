// Products of bf16 where the processor has them: two channels, or two keys, a lane.
//
// A word holds a pair, the first in its lower half. vdpbf16ps multiplies and adds a vector of pairs where a fused
// multiply-add takes single fp32 numbers, and bf16 need not be widened. Products are exact, sums are rounded to fp32,
// subnormal numbers count as 0; weights have to be rounded to bf16, as on a GPU. A prototype on two Zen 4 cores decoded
// 4 heads of 128 a KV head from the caches at 54 GB/s with it against 28 for code that widens, and multiplied prefills at up
// to 307 GFLOP/s, where fp32 peaks at 234. What this code reaches was not measured yet.
#pragma once

#include "vectors.h"

namespace pagedkv {

// PAGEDKV_PLAIN_PAIRS has AVX2 and AVX-512 take the same ways with plain arithmetic: for tests.
#if defined(__AVX512BF16__) || (defined(PAGEDKV_PLAIN_PAIRS) && defined(__AVX2__))
constexpr bool kPairProducts = true;
#else
constexpr bool kPairProducts = false;
#endif

// sum + a's lower half * b's lower half + a's upper half * b's upper half, in each lane.
inline Floats add_pair_products(Floats sum, Words a, Words b) {
#if defined(__AVX512BF16__)
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    return sum + as_floats(a << 16) * as_floats(b << 16) + as_floats(upper_halves(a)) * as_floats(upper_halves(b));
#endif
}

// What `sum` becomes when a[i] * b[i] is added: one product a lane of floats, two of words.
inline Floats add_product(Floats sum, float a, Floats b) { return sum + a * b; }
inline Floats add_product(Floats sum, uint32_t a, Words b) { return add_pair_products(sum, Words{} + a, b); }

// Two rows' words to pairs of the two rows: of the even channels, and of the odd ones.
inline Words even_pairs(Words first, Words second) { return (first & 0xffff) | (second << 16); }
inline Words odd_pairs(Words first, Words second) { return (first >> 16) | upper_halves(second); }

}  // namespace pagedkv
