// `write_kv`: a step's K and V into their slots, as they are or quantised.
//
// Takes rows of any strides and slots that may be anything; writes each token's heads and nothing beside them. Quantised
// values and scales are bit for bit those of `pagedkv.attention.quantise`: true divisions, ties to even.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "abi.h"
#include "vectors.h"

namespace pagedkv {
namespace {

// Up to this many bytes of K and V (counted as 16-bit elements) the calling thread works alone: a decode step's tokens are
// copied sooner than other threads wake. Chosen, not tuned.
constexpr int64_t kParallelBytes = 1 << 17;

// One side (K or V) of the call.
struct Side {
    const char *rows;
    const int64_t *row_strides;
    char *pages;
    const int64_t *page_strides;
    float *scales;
    const int64_t *scale_strides;
    int64_t dim;
};

// ---- Plain copies ---------------------------------------------------------------------------------------------------

template <class Element>
void copy_row(Element *to, const Element *from, int64_t stride, int64_t dim) {
    if (stride == 1) {
        std::memcpy(to, from, dim * sizeof(Element));
    } else {
        for (int64_t i = 0; i < dim; i++) to[i] = from[i * stride];
    }
}

template <class Element>
void put_row(const Side &side, int64_t token, int64_t head, int64_t page, int64_t slot) {
    const int64_t *in = side.row_strides, *out = side.page_strides;
    const Element *from = reinterpret_cast<const Element *>(side.rows) + token * in[0] + head * in[1];
    Element *to = reinterpret_cast<Element *>(side.pages) + page * out[0] + head * out[1] + slot * out[2];
    copy_row(to, from, in[2], side.dim);
}

// ---- Quantised ------------------------------------------------------------------------------------------------------

// The magnitude of the largest element. Magnitudes compare like integers, NaN above infinity above all numbers, so what
// is not finite stays visible in the scale.
float largest_magnitude(const float *values, int64_t dim) {
    int32_t largest = 0;
    for (int64_t i = 0; i < dim; i++) {
        int32_t bits;
        std::memcpy(&bits, values + i, sizeof bits);
        largest = std::max(largest, bits & 0x7fffffff);
    }
    float found;
    std::memcpy(&found, &largest, sizeof found);
    return found;
}

// Adding and taking away 1.5 * 2^23 rounds to an integer, ties to even, for magnitudes up to 2^22.
inline void encode(int8_t *to, float value) {
    constexpr float kRounder = 0x1.8p23f;
    float rounded = (value + kRounder) - kRounder;
    *to = rounded == rounded ? static_cast<int8_t>(static_cast<int32_t>(rounded)) : 0;
}

// Magnitudes up to 448, or NaN. Normal ones round at bit 20 and move the exponent by 120; below 2^-6 the FPU rounds at
// 2^-9 when 2^14 is added.
inline void encode(Fp8 *to, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    uint32_t sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
    float absolute;
    std::memcpy(&absolute, &magnitude, sizeof absolute);
    float shifted = absolute + 0x1p14f;
    uint32_t subnormal;
    std::memcpy(&subnormal, &shifted, sizeof subnormal);
    subnormal -= 0x46800000u;
    uint32_t normal = (magnitude - (120u << 23) + 0x7ffff + (magnitude >> 20 & 1)) >> 20;
    uint32_t code = magnitude < 0x3c800000u ? subnormal : normal;
    to->bits = static_cast<uint8_t>((magnitude > 0x7f800000u ? 0x7f : code) | sign);
}

template <class Code>
constexpr float kLargest = 448.0f;
template <>
constexpr float kLargest<int8_t> = 127.0f;

template <class Element, class Code>
void quantise_row(const Side &side, int64_t token, int64_t head, int64_t page, int64_t slot, float *row) {
    const int64_t *in = side.row_strides, *out = side.page_strides, *per = side.scale_strides;
    const Element *from = reinterpret_cast<const Element *>(side.rows) + token * in[0] + head * in[1];
    Code *to = reinterpret_cast<Code *>(side.pages) + page * out[0] + head * out[1] + slot * out[2];
    widen_strided(row, from, in[2], side.dim, 1.0f);
    constexpr float largest = kLargest<Code>;
    float scale = largest_magnitude(row, side.dim) / largest;
    side.scales[page * per[0] + head * per[1] + slot * per[2]] = scale;
    float divisor = scale == 0.0f ? 1.0f : scale;
    for (int64_t i = 0; i < side.dim; i++) {
        float value = row[i] / divisor;
        // A scale that lost bits because it is subnormal leaves values beyond the largest code. NaN passes.
        value = value > largest ? largest : value;
        value = value < -largest ? -largest : value;
        encode(to + i, value);
    }
}

// ---- All tokens -----------------------------------------------------------------------------------------------------

// Longest row that is quantised on the stack; longer ones are refused.
constexpr int64_t kLongestRow = 4096;

template <class PutRow>
void for_each_row(const pagedkv_write &write, const Side (&sides)[2], const int64_t *slots, int64_t num_tokens,
                  int num_threads, PutRow put) {
    const int64_t heads = write.num_kv_heads, page_size = write.page_size;
    const int64_t bytes = num_tokens * heads * (write.k_dim + write.v_dim) * 2;
#pragma omp parallel for num_threads(num_threads) schedule(static) if (num_threads > 1 && bytes > kParallelBytes)
    for (int64_t token = 0; token < num_tokens; token++) {
        const int64_t slot = slots[token * write.slot_stride];
        const int64_t page = slot / page_size, offset = slot % page_size;
        for (const Side &side : sides) {
            for (int64_t head = 0; head < heads; head++) put(side, token, head, page, offset);
        }
    }
}

template <class Element>
int32_t write_plain(const pagedkv_write &write, const Side (&sides)[2], const int64_t *slots, int64_t num_tokens,
                    int num_threads) {
    for_each_row(write, sides, slots, num_tokens, num_threads,
                 [](const Side &side, int64_t token, int64_t head, int64_t page, int64_t slot) {
                     put_row<Element>(side, token, head, page, slot);
                 });
    return PAGEDKV_OK;
}

template <class Element, class Code>
int32_t write_quantised(const pagedkv_write &write, const Side (&sides)[2], const int64_t *slots, int64_t num_tokens,
                        int num_threads) {
    if (std::max(write.k_dim, write.v_dim) > kLongestRow) return PAGEDKV_BAD_ARGUMENT;
    for_each_row(write, sides, slots, num_tokens, num_threads,
                 [](const Side &side, int64_t token, int64_t head, int64_t page, int64_t slot) {
                     float row[kLongestRow];
                     quantise_row<Element, Code>(side, token, head, page, slot, row);
                 });
    return PAGEDKV_OK;
}

template <class Code>
int32_t write_quantised_from(const pagedkv_write &write, const Side (&sides)[2], const int64_t *slots,
                             int64_t num_tokens, int num_threads) {
    switch (write.source_dtype) {
        case PAGEDKV_FLOAT32: return write_quantised<float, Code>(write, sides, slots, num_tokens, num_threads);
        case PAGEDKV_BFLOAT16: return write_quantised<BFloat16, Code>(write, sides, slots, num_tokens, num_threads);
        case PAGEDKV_FLOAT16: return write_quantised<Float16, Code>(write, sides, slots, num_tokens, num_threads);
        default: return PAGEDKV_BAD_ARGUMENT;
    }
}

}  // namespace
}  // namespace pagedkv

int32_t pagedkv_write_kv(const pagedkv_write *write, const void *k, const void *v, void *k_pages, void *v_pages,
                         float *k_scales, float *v_scales, const int64_t *slot_mapping, int64_t num_tokens,
                         int32_t num_threads) {
    using namespace pagedkv;
    const int64_t num_slots = write->num_pages * write->page_size;
    for (int64_t token = 0; token < num_tokens; token++) {
        const int64_t slot = slot_mapping[token * write->slot_stride];
        if (slot < 0 || slot >= num_slots) return PAGEDKV_BAD_PAGES;
    }
    const Side sides[2] = {
        {static_cast<const char *>(k), write->k_row_strides, static_cast<char *>(k_pages), write->k_strides, k_scales,
         write->k_scale_strides, write->k_dim},
        {static_cast<const char *>(v), write->v_row_strides, static_cast<char *>(v_pages), write->v_strides, v_scales,
         write->v_scale_strides, write->v_dim},
    };
    switch (write->kv_dtype) {
        case PAGEDKV_FLOAT32: return write_plain<uint32_t>(*write, sides, slot_mapping, num_tokens, num_threads);
        case PAGEDKV_BFLOAT16:
        case PAGEDKV_FLOAT16: return write_plain<uint16_t>(*write, sides, slot_mapping, num_tokens, num_threads);
        case PAGEDKV_INT8: return write_quantised_from<int8_t>(*write, sides, slot_mapping, num_tokens, num_threads);
        case PAGEDKV_FP8_E4M3: return write_quantised_from<Fp8>(*write, sides, slot_mapping, num_tokens, num_threads);
        default: return PAGEDKV_BAD_ARGUMENT;
    }
}
