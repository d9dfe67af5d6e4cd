// Vectors of fp32 as wide as the target's registers, and how elements of each dtype become fp32 and back.
//
// Written with the compilers' vector types, so that one source serves AVX2, AVX-512 and NEON. Knows nothing of attention.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace pagedkv {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
constexpr int kNumRegisters = 32;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
constexpr int kNumRegisters = 16;
#elif defined(__aarch64__)
constexpr int kVectorBytes = 16;
constexpr int kNumRegisters = 32;
#else
constexpr int kVectorBytes = 16;
constexpr int kNumRegisters = 16;
#endif

constexpr int kLanes = kVectorBytes / 4;

using Floats = float __attribute__((vector_size(kVectorBytes)));
using Ints = int32_t __attribute__((vector_size(kVectorBytes)));
using Words = uint32_t __attribute__((vector_size(kVectorBytes)));
using Halves = uint16_t __attribute__((vector_size(kVectorBytes / 2)));
using Bytes = uint8_t __attribute__((vector_size(kVectorBytes / 4)));
using SignedBytes = int8_t __attribute__((vector_size(kVectorBytes / 4)));

// Read or write a vector anywhere: memcpy says that neither alignment nor type is promised.
template <class Vector>
inline Vector load(const void *from) {
    Vector value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <class Vector>
inline void store(void *to, Vector value) {
    std::memcpy(to, &value, sizeof value);
}

// Have the compiler keep a value in a register from here on, where it would read it again for every use.
inline void hold(Floats &value) {
#if defined(__AVX512F__)
    asm("" : "+v"(value));
#elif defined(__SSE2__)
    asm("" : "+x"(value));
#elif defined(__aarch64__)
    asm("" : "+w"(value));
#endif
}

// Subtracting 0 changes no float, -0 included, and costs nothing; adding it would turn -0 into 0.
inline Floats splat(float value) { return value - Floats{}; }

// The larger of each lane; NaN in `b` is passed over, NaN in `a` kept.
inline Floats larger(Floats a, Floats b) { return b > a ? b : a; }

// ---- Shuffles -------------------------------------------------------------------------------------------------------

template <class Vector, int... kIndex>
inline Vector pick(Vector a, Vector b, std::integer_sequence<int, kIndex...>) {
#if defined(__clang__) || __GNUC__ >= 12
    return __builtin_shufflevector(a, b, kIndex...);
#else
    return __builtin_shuffle(a, b, Ints{kIndex...});
#endif
}

// Index lists for `exchange`: lanes whose bit kBit is clear come from `a`, the others from `b` (indices kLanes and up);
// the first list keeps a's lower and b's upper lanes, the second a's upper and b's lower ones, each moved by kBit.
template <int kBit, int... kLane>
constexpr auto stay(std::integer_sequence<int, kLane...>) {
    return std::integer_sequence<int, (kLane & kBit ? kLanes + kLane - kBit : kLane)...>{};
}
template <int kBit, int... kLane>
constexpr auto cross(std::integer_sequence<int, kLane...>) {
    return std::integer_sequence<int, (kLane & kBit ? kLanes + kLane : kLane + kBit)...>{};
}
template <int kBit, int... kLane>
constexpr auto swapped(std::integer_sequence<int, kLane...>) {
    return std::integer_sequence<int, (kLane ^ kBit)...>{};
}
using EveryLane = std::make_integer_sequence<int, kLanes>;

// One step of a transpose: swap a's lanes that have bit kBit with b's that have not.
template <int kBit>
inline void exchange(Floats &a, Floats &b) {
    Floats first = pick(a, b, stay<kBit>(EveryLane{}));
    b = pick(a, b, cross<kBit>(EveryLane{}));
    a = first;
}

template <int kBit = 1>
inline void transpose(Floats (&rows)[kLanes]) {
    for (int i = 0; i < kLanes; i++) {
        if (!(i & kBit)) exchange<kBit>(rows[i], rows[i + kBit]);
    }
    if constexpr (2 * kBit < kLanes) transpose<2 * kBit>(rows);
}

// Lanes of equal (lane % kBit) added together; the sum stands in each of them.
template <int kBit>
inline Floats fold(Floats value) {
    if constexpr (kBit < kLanes) {
        return fold<2 * kBit>(value + pick(value, value, swapped<kBit>(EveryLane{})));
    } else {
        return value;
    }
}

// Index lists for `add_interleaved`: in every four lanes, a's and b's lanes 0 and 1 in turn, or 2 and 3.
template <int kFirst, int... kLane>
constexpr auto interleaved(std::integer_sequence<int, kLane...>) {
    return std::integer_sequence<int, (kLane / 4 * 4 + kFirst + kLane % 4 / 2 + kLane % 2 * kLanes)...>{};
}

// Of every four lanes (a0 + a2, b0 + b2, a1 + a3, b1 + b3): two shuffles that every target has, and a sum.
inline Floats add_interleaved(Floats a, Floats b) {
    return pick(a, b, interleaved<0>(EveryLane{})) + pick(a, b, interleaved<2>(EveryLane{}));
}

// Likewise: lanes 0 and 1 of a, then of b, or lanes 2 and 3.
template <int kFirst, int... kLane>
constexpr auto paired(std::integer_sequence<int, kLane...>) {
    return std::integer_sequence<int, (kLane / 4 * 4 + kFirst + kLane % 2 + kLane % 4 / 2 * kLanes)...>{};
}

// Four vectors to four sums in the first lanes, in order; each vector's lanes are added in the same order, whatever the
// others hold.
inline Floats four_sums(Floats a, Floats b, Floats c, Floats d) {
    Floats ab = add_interleaved(a, b), cd = add_interleaved(c, d);
    return fold<4>(pick(ab, cd, paired<0>(EveryLane{})) + pick(ab, cd, paired<2>(EveryLane{})));
}

inline float sum_of(Floats value) { return fold<1>(value)[0]; }

// The largest of the lanes of equal (lane % kBit), in each of them.
template <int kBit>
inline Floats fold_largest(Floats value) {
    if constexpr (kBit < kLanes) {
        return fold_largest<2 * kBit>(larger(value, pick(value, value, swapped<kBit>(EveryLane{}))));
    } else {
        return value;
    }
}
inline float largest_of(Floats value) { return fold_largest<1>(value)[0]; }

// ---- Element types --------------------------------------------------------------------------------------------------

struct BFloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};
struct Fp8 {
    uint8_t bits;
};

inline Floats as_floats(Words bits) { return (Floats)bits; }
inline Words as_words(Floats value) { return (Words)value; }

// kLanes small integers to 32 bits. GCC 12 splits __builtin_convertvector in halves here, hence the intrinsics (decode
// int8 hot: 3x).
inline Words extend(const uint16_t *from) {
#if defined(__AVX512F__)
    return (Words)_mm512_cvtepu16_epi32(load<__m256i>(from));
#elif defined(__AVX2__)
    return (Words)_mm256_cvtepu16_epi32(load<__m128i>(from));
#else
    return __builtin_convertvector(load<Halves>(from), Words);
#endif
}

inline Words extend(const uint8_t *from) {
#if defined(__AVX512F__)
    return (Words)_mm512_cvtepu8_epi32(load<__m128i>(from));
#elif defined(__AVX2__)
    return (Words)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(from)));
#else
    return __builtin_convertvector(load<Bytes>(from), Words);
#endif
}

inline Ints extend(const int8_t *from) {
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtepi8_epi32(load<__m128i>(from));
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(from)));
#else
    return __builtin_convertvector(load<SignedBytes>(from), Ints);
#endif
}

// kLanes elements to fp32, exactly.
inline Floats widen(const float *from) { return load<Floats>(from); }

inline Floats widen(const BFloat16 *from) { return as_floats(extend(&from->bits) << 16); }

inline Floats widen(const Float16 *from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(load<__m256i>(from));
#elif defined(__F16C__)
    return (Floats)_mm256_cvtph_ps(load<__m128i>(from));
#else
    Words half = extend(&from->bits);
    // Exponent and fraction moved into fp32's place read 2^-112 times too small; an exponent of all ones stays one.
    Words magnitude = as_words(as_floats((half & 0x7fff) << 13) * 0x1p112f);
    Words special = (Words)((half & 0x7c00) == 0x7c00) & 0x7f800000u;
    return as_floats(magnitude | special | (half & 0x8000) << 16);
#endif
}

inline Floats widen(const int8_t *from) {
    return __builtin_convertvector(extend(from), Floats);
}

inline Floats widen(const Fp8 *from) {
    Words byte = extend(&from->bits);
    Words magnitude = as_words(as_floats((byte & 0x7f) << 20) * 0x1p120f);
    Words nan = (Words)((byte & 0x7f) == 0x7f) & 0x7fc00000u;
    return as_floats(magnitude | nan | (byte & 0x80) << 24);
}

// One element, by way of a vector that holds nothing else.
template <class Element>
inline float widen_one(const Element *from) {
    Element padded[kLanes] = {};
    padded[0] = *from;
    return widen(padded)[0];
}
inline float widen_one(const float *from) { return *from; }

// fp32 to the 16 upper bits' format, to nearest, ties to even; NaN stays NaN.
inline Words round_to_bfloat16(Floats value) {
    Words bits = as_words(value);
    Words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (Words)(value != value) ? (bits >> 16 | 0x40) : rounded;
}

// Two of them a word, the first in its lower half.
inline Words round_to_pairs(Floats first, Floats second) {
    return round_to_bfloat16(first) | round_to_bfloat16(second) << 16;
}

inline void narrow(float *to, Floats value) { store(to, value); }

inline void narrow(BFloat16 *to, Floats value) { store(to, __builtin_convertvector(round_to_bfloat16(value), Halves)); }

inline void narrow(Float16 *to, Floats value) {
#if defined(__AVX512F__)
    store(to, _mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    store(to, _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT));
#else
    Words bits = as_words(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    // Normal: round at bit 13 and move the exponent by 112. Subnormal: the FPU rounds at 2^-24 when 0.5 is added.
    Words normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    Words subnormal = as_words(as_floats(magnitude) + 0.5f) - 0x3f000000u;
    Words half = magnitude < 0x38800000u ? subnormal : normal;
    half = magnitude >= 0x477ff000u ? Words{} + 0x7c00 : half;
    half = magnitude > 0x7f800000u ? Words{} + 0x7e00 : half;
    store(to, __builtin_convertvector(half | sign, Halves));
#endif
}

template <class Element>
inline void narrow_one(Element *to, float value) {
    Element padded[kLanes];
    narrow(padded, splat(value));
    *to = padded[0];
}
inline void narrow_one(float *to, float value) { *to = value; }

// ---- Rows of channels -----------------------------------------------------------------------------------------------
//
// A row of bf16 is read two vectors at a time without a shuffle: the even channels are the 32-bit words shifted up, the
// odd ones the words with their lower half cleared. So a row of `dim` channels is held in *stored order*: for bf16, in
// each full 2 * kLanes channels the even ones come first; everything else, and every other dtype, is in plain order. A
// dot product does not mind as long as both sides agree, and results are put right when they are written.

// The upper 16 bits of each lane. With few registers the mask is read from memory at every use: it would take one from
// sums, and two shifts cost an instruction more (three keys by four heads of bf16: 1.07x).
inline Words upper_halves(Words words) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    alignas(kVectorBytes) static constexpr uint32_t mask[kLanes] = {0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u,
                                                                    0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u};
    Words upper;
    asm("vpand %2, %1, %0" : "=x"(upper) : "x"(words), "m"(mask));
    return upper;
#else
    return words & 0xffff0000u;
#endif
}

// Vector 0 or 1 of a full pair in stored order.
template <int kHalf, class Element>
inline Floats widen_half(const Element *pair) {
    return widen(pair + kHalf * kLanes);
}
template <int kHalf>
inline Floats widen_half(const BFloat16 *pair) {
    Words words = load<Words>(pair);
    if constexpr (kHalf == 0) return as_floats(words << 16);
    return as_floats(upper_halves(words));
}

// `dim` channels that lie next to one another to fp32 in stored order, times `factor`.
template <class Element>
inline void widen_row(float *to, const Element *from, int64_t dim, float factor) {
    int64_t i = 0;
    for (; i + 2 * kLanes <= dim; i += 2 * kLanes) {
        store(to + i, widen_half<0>(from + i) * factor);
        store(to + i + kLanes, widen_half<1>(from + i) * factor);
    }
    for (; i + kLanes <= dim; i += kLanes) store(to + i, widen(from + i) * factor);
    for (; i < dim; i++) to[i] = widen_one(from + i) * factor;
}

// The same in plain order, from channels `stride` elements apart.
template <class Element>
inline void widen_strided(float *to, const Element *from, int64_t stride, int64_t dim, float factor) {
    int64_t i = 0;
    if (stride == 1) {
        for (; i + kLanes <= dim; i += kLanes) store(to + i, widen(from + i) * factor);
    }
    for (; i < dim; i++) to[i] = widen_one(from + i * stride) * factor;
}

// Put a row of plain order into the stored order of bf16, or back.
inline void split_even_odd(float *row, int64_t dim) {
    for (; dim >= 2 * kLanes; dim -= 2 * kLanes, row += 2 * kLanes) {
        float block[2 * kLanes];
        for (int j = 0; j < 2 * kLanes; j++) block[j / 2 + j % 2 * kLanes] = row[j];
        std::memcpy(row, block, sizeof block);
    }
}
inline void join_even_odd(float *row, int64_t dim) {
    for (; dim >= 2 * kLanes; dim -= 2 * kLanes, row += 2 * kLanes) {
        float block[2 * kLanes];
        for (int j = 0; j < 2 * kLanes; j++) block[j] = row[j / 2 + j % 2 * kLanes];
        std::memcpy(row, block, sizeof block);
    }
}

// `dim` channels in plain order, times `factor`, to places `stride` elements apart.
template <class Element>
inline void narrow_strided(Element *to, int64_t stride, const float *from, int64_t dim, float factor) {
    int64_t i = 0;
    if (stride == 1) {
        for (; i + kLanes <= dim; i += kLanes) narrow(to + i, load<Floats>(from + i) * factor);
    }
    for (; i < dim; i++) narrow_one(to + i * stride, from[i] * factor);
}

// The same from stored order, to bf16 channels that lie next to one another.
inline void narrow_row(BFloat16 *to, const float *from, int64_t dim, float factor) {
    int64_t i = 0;
    for (; i + 2 * kLanes <= dim; i += 2 * kLanes) {
        store(to + i, round_to_pairs(load<Floats>(from + i) * factor, load<Floats>(from + i + kLanes) * factor));
    }
    narrow_strided(to + i, 1, from + i, dim - i, factor);
}

}  // namespace pagedkv
