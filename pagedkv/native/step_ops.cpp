// RMS norm, rotary embedding, gated activations and argmax over rows.

// A product and a sum are rounded one after the other, as torch rounds them: a fused one would change last
// bits. Said before the headers, whose functions are inlined here.
#if defined(__clang__)
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif

#include "step_ops.h"

#include <algorithm>
#include <cmath>

#include "elements.h"
#include "softmax.h"

namespace pagedkv {
namespace {

// Up to this many elements the calling thread works alone: a decode step of 16 sequences of 576 channels (9,216) is done
// about as soon as other threads wake. Chosen, not tuned.
constexpr int64_t kParallelElements = 1 << 14;

// fp32 rounded to Element and back.
template <class Element>
inline Floats rounded(Floats value) {
    Element narrowed[kLanes];
    narrow(narrowed, value);
    return widen(narrowed);
}
template <>
inline Floats rounded<float>(Floats value) {
    return value;
}

template <class Row>
void for_rows(int64_t rows, int64_t elements, int num_threads, Row row) {
#pragma omp parallel for num_threads(num_threads) schedule(static) if (num_threads > 1 && elements > kParallelElements)
    for (int64_t i = 0; i < rows; i++) row(i);
}

// ---- RMS norm (Zhang and Sennrich, arXiv:1910.07467) ------------------------------------------------------------------

template <class Element>
void rms_norm_row(const Element *x, const Element *residual, Element *total, const Element *weight, Element *out,
                  int64_t dim, float eps) {
    Floats squares = {};
    for (int64_t i = 0; i < dim; i += kLanes) {
        Floats value = read(x + i, dim - i);
        if (residual) {
            value = rounded<Element>(value + read(residual + i, dim - i));
            write(total + i, value, dim - i);
        }
        squares += value * value;
    }
    const float factor = 1.0f / std::sqrt(sum_of(squares) / static_cast<float>(dim) + eps);
    const Element *values = residual ? total : x;
    for (int64_t i = 0; i < dim; i += kLanes) {
        Floats normed = rounded<Element>(read(values + i, dim - i) * factor);
        write(out + i, normed * read(weight + i, dim - i), dim - i);
    }
}

// ---- Rotary embedding (Su et al., arXiv:2104.09864), halves as in GPT-NeoX ----------------------------------------------

template <class Element>
void rotate_head(Element *x, const Element *cos, const Element *sin, int64_t half) {
    for (int64_t i = 0; i < half; i += kLanes) {
        const int64_t count = half - i;
        Floats lower = read(x + i, count), upper = read(x + half + i, count);
        Floats new_lower = rounded<Element>(lower * read(cos + i, count)) +
                           rounded<Element>(-upper * read(sin + i, count));
        Floats new_upper = rounded<Element>(upper * read(cos + half + i, count)) +
                           rounded<Element>(lower * read(sin + half + i, count));
        write(x + i, new_lower, count);
        write(x + half + i, new_upper, count);
    }
}

// ---- Gated activations --------------------------------------------------------------------------------------------------

struct Silu {
    static Floats of(Floats x) {
        Floats power = x * -kLog2E;
        return x / (1.0f + exp2_of(power > 126.0f ? splat(126.0f) : power));
    }
};

// The tanh approximation: x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))). Written as x / (1 + e^-2t), which keeps
// its relative accuracy where 1 + tanh would cancel.
struct GeluTanh {
    static Floats of(Floats x) {
        Floats t = 0.7978845608028654f * (x + 0.044715f * (x * x * x));
        Floats power = t * (-2.0f * kLog2E);
        return x / (1.0f + exp2_of(power > 126.0f ? splat(126.0f) : power));
    }
};

template <class Activation, class Element>
void gated_row(const Element *gate, const Element *up, Element *out, int64_t dim) {
    for (int64_t i = 0; i < dim; i += kLanes) {
        Floats active = rounded<Element>(Activation::of(read(gate + i, dim - i)));
        write(out + i, active * read(up + i, dim - i), dim - i);
    }
}

// ---- Argmax ---------------------------------------------------------------------------------------------------------------

template <class Element>
int64_t argmax_row(const Element *x, int64_t dim) {
    Floats largest = splat(kMinusInfinity);
    Ints any_nan = {};
    int64_t i = 0;
    for (; i + kLanes <= dim; i += kLanes) {
        Floats value = widen(x + i);
        any_nan |= value != value;
        largest = larger(largest, value);
    }
    float top = largest_of(largest);
    bool nan = false;
    for (int lane = 0; lane < kLanes; lane++) nan |= any_nan[lane] != 0;
    for (; i < dim; i++) {
        float value = widen_one(x + i);
        nan |= value != value;
        top = value > top ? value : top;
    }
    for (int64_t first = 0; first < dim; first += kLanes) {
        const int64_t count = std::min<int64_t>(kLanes, dim - first);
        Floats value = read(x + first, count);
        Ints found = nan ? value != value : value == top;
        for (int64_t lane = 0; lane < count; lane++) {
            if (found[lane]) return first + lane;
        }
    }
    return 0;
}

}  // namespace
}  // namespace pagedkv

int32_t pagedkv_rms_norm(const void *x, int64_t x_stride, const void *residual, int64_t residual_stride, void *total,
                         int64_t total_stride, const void *weight, void *out, int64_t out_stride, int64_t rows,
                         int64_t dim, float eps, int32_t dtype, int32_t num_threads) {
    using namespace pagedkv;
    return with_element(dtype, [&](auto kind) {
        using Element = decltype(kind);
        for_rows(rows, rows * dim, num_threads, [&](int64_t row) {
            rms_norm_row(static_cast<const Element *>(x) + row * x_stride,
                         residual ? static_cast<const Element *>(residual) + row * residual_stride : nullptr,
                         total ? static_cast<Element *>(total) + row * total_stride : nullptr,
                         static_cast<const Element *>(weight), static_cast<Element *>(out) + row * out_stride, dim, eps);
        });
    });
}

int32_t pagedkv_rotary(void *x, int64_t row_stride, int64_t head_stride, int64_t heads, const void *cos, const void *sin,
                       int64_t angle_stride, int64_t rows, int64_t rotary_dim, int32_t dtype, int32_t num_threads) {
    using namespace pagedkv;
    return with_element(dtype, [&](auto kind) {
        using Element = decltype(kind);
        for_rows(rows, rows * heads * rotary_dim, num_threads, [&](int64_t row) {
            for (int64_t head = 0; head < heads; head++) {
                rotate_head(static_cast<Element *>(x) + row * row_stride + head * head_stride,
                            static_cast<const Element *>(cos) + row * angle_stride,
                            static_cast<const Element *>(sin) + row * angle_stride, rotary_dim / 2);
            }
        });
    });
}

int32_t pagedkv_gated(int32_t activation, const void *gate, int64_t gate_stride, const void *up, int64_t up_stride,
                      void *out, int64_t out_stride, int64_t rows, int64_t dim, int32_t dtype, int32_t num_threads) {
    using namespace pagedkv;
    return with_element(dtype, [&](auto kind) {
        using Element = decltype(kind);
        for_rows(rows, rows * dim, num_threads, [&](int64_t row) {
            const Element *from = static_cast<const Element *>(gate) + row * gate_stride;
            const Element *other = static_cast<const Element *>(up) + row * up_stride;
            Element *to = static_cast<Element *>(out) + row * out_stride;
            if (activation == PAGEDKV_SILU) {
                gated_row<Silu>(from, other, to, dim);
            } else {
                gated_row<GeluTanh>(from, other, to, dim);
            }
        });
    });
}

int32_t pagedkv_argmax(const void *x, int64_t x_stride, int64_t *out, int64_t rows, int64_t dim, int32_t dtype,
                       int32_t num_threads) {
    using namespace pagedkv;
    return with_element(dtype, [&](auto kind) {
        using Element = decltype(kind);
        for_rows(rows, rows * dim, num_threads, [&](int64_t row) {
            out[row] = argmax_row(static_cast<const Element *>(x) + row * x_stride, dim);
        });
    });
}
