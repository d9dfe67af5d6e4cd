// A self-test of the library without Python, for machines that are only emulated: write K and V, attend, compare with a
// plain loop in double precision. Run by arm64.sh. Exit status 0: every case is within its dtype's error.

#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "abi.h"
#include "linear.h"
#include "step_ops.h"

namespace {

template <class Function>
Function *symbol(void *library, const char *name) {
    void *found = dlsym(library, name);
    if (!found) {
        std::printf("missing: %s\n", name);
        std::exit(2);
    }
    return reinterpret_cast<Function *>(found);
}

// bf16 by its definition, so that the test shares no conversion with the library.
uint16_t to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
float from_bf16(uint16_t half) {
    uint32_t bits = static_cast<uint32_t>(half) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// Numbers held both as the library's dtype and as what that dtype holds.
struct Numbers {
    std::vector<char> stored;
    std::vector<double> exact;

    Numbers(std::mt19937 &draw, size_t count, int dtype) : stored(count * (dtype == PAGEDKV_FLOAT32 ? 4 : 2)), exact(count) {
        std::normal_distribution<float> normal;
        for (size_t i = 0; i < count; i++) {
            float value = normal(draw);
            if (dtype == PAGEDKV_FLOAT32) {
                std::memcpy(&stored[4 * i], &value, 4);
            } else if (dtype == PAGEDKV_BFLOAT16) {
                uint16_t half = to_bf16(value);
                std::memcpy(&stored[2 * i], &half, 2);
                value = from_bf16(half);
            } else {
                __fp16 half = static_cast<__fp16>(value);
                std::memcpy(&stored[2 * i], &half, 2);
                value = half;
            }
            exact[i] = value;
        }
    }
};

double read(const char *stored, size_t i, int dtype) {
    if (dtype == PAGEDKV_FLOAT32) return reinterpret_cast<const float *>(stored)[i];
    if (dtype == PAGEDKV_BFLOAT16) return from_bf16(reinterpret_cast<const uint16_t *>(stored)[i]);
    return reinterpret_cast<const __fp16 *>(stored)[i];
}

constexpr int kHeads = 6, kKvHeads = 2, kDim = 64, kPage = 16;
const std::vector<int> kQLens = {1, 5, 40, 1}, kKvLens = {33, 5, 70, 200};

// One batch of prefill, chunk and decode rows; returns the largest error.
double largest_error(void *library, int dtype, int kv_dtype, int window, int threads) {
    std::mt19937 draw(7);
    std::vector<int32_t> cu{0}, tables;
    int width = 0, next = 1, tokens = 0;
    for (int kv_len : kKvLens) width = std::max(width, (kv_len + kPage - 1) / kPage);
    for (size_t row = 0; row < kQLens.size(); row++) {
        cu.push_back(cu.back() + kQLens[row]);
        for (int block = 0; block < width; block++) tables.push_back(block * kPage < kKvLens[row] ? next++ : -1);
        tokens += kKvLens[row];
    }
    const int element = kv_dtype == PAGEDKV_INT8 ? 1 : dtype == PAGEDKV_FLOAT32 ? 4 : 2, total_q = cu.back();
    Numbers q(draw, total_q * kHeads * kDim, dtype), k(draw, tokens * kKvHeads * kDim, dtype);
    Numbers v(draw, tokens * kKvHeads * kDim, dtype);
    const size_t slots = static_cast<size_t>(next) * kKvHeads * kPage;
    std::vector<char> k_pages(slots * kDim * element), v_pages(k_pages.size());
    std::vector<float> k_scales(slots), v_scales(slots);
    std::vector<int64_t> mapping;
    for (size_t row = 0; row < kQLens.size(); row++) {
        for (int i = 0; i < kKvLens[row]; i++) mapping.push_back(tables[row * width + i / kPage] * kPage + i % kPage);
    }
    const bool scaled = kv_dtype == PAGEDKV_INT8;
    const int64_t per_page = kKvHeads * kPage;
    pagedkv_write write{next, kKvHeads, kDim, kDim, kPage, {kKvHeads * kDim, kDim, 1}, {kKvHeads * kDim, kDim, 1},
                        {per_page * kDim, kPage * kDim, kDim}, {per_page * kDim, kPage * kDim, kDim},
                        {per_page, kPage, 1}, {per_page, kPage, 1}, 1, dtype, kv_dtype};
    if (symbol<decltype(pagedkv_write_kv)>(library, "pagedkv_write_kv")(
            &write, k.stored.data(), v.stored.data(), k_pages.data(), v_pages.data(), scaled ? k_scales.data() : nullptr,
            scaled ? v_scales.data() : nullptr, mapping.data(), tokens, threads)) return INFINITY;
    std::vector<int32_t> kv_lens(kKvLens.begin(), kKvLens.end());
    pagedkv_step step{tables.data(), kv_lens.data(), cu.data(), width, 1, 1, 1, static_cast<int64_t>(kQLens.size()), width,
                      total_q, 32, 32, 32, 0};
    pagedkv_layer layer{kHeads, kKvHeads, kDim, kDim, kPage, {kHeads * kDim, kDim, 1}, {kHeads * kDim, kDim, 1},
                        {per_page * kDim, kPage * kDim, kDim}, {per_page * kDim, kPage * kDim, kDim},
                        {per_page, kPage, 1}, {per_page, kPage, 1}, nullptr, nullptr, window, 0, 0.125f, 0.0f, dtype,
                        kv_dtype};
    std::vector<char> out(q.stored.size(), 0x7f);
    if (symbol<decltype(pagedkv_attend)>(library, "pagedkv_attend")(
            &step, &layer, q.stored.data(), k_pages.data(), v_pages.data(), scaled ? k_scales.data() : nullptr,
            scaled ? v_scales.data() : nullptr, out.data(), threads)) return INFINITY;
    double worst = 0;
    int first = 0;
    for (size_t row = 0; row < kQLens.size(); first += kKvLens[row++]) {
        for (int i = 0; i < kQLens[row]; i++) {
            const int position = kKvLens[row] - kQLens[row] + i, begin = window ? std::max(0, position - window + 1) : 0;
            for (int head = 0; head < kHeads; head++) {
                const double *query = &q.exact[((cu[row] + i) * kHeads + head) * kDim];
                auto at = [&](int key) { return ((first + key) * kKvHeads + head / (kHeads / kKvHeads)) * kDim; };
                std::vector<double> weights, sum(kDim);
                double total = 0;
                for (int key = begin; key <= position; key++) {
                    double score = 0;
                    for (int d = 0; d < kDim; d++) score += query[d] * k.exact[at(key) + d];
                    weights.push_back(std::exp(0.125 * score));
                    total += weights.back();
                    for (int d = 0; d < kDim; d++) sum[d] += weights.back() * v.exact[at(key) + d];
                }
                for (int d = 0; d < kDim; d++) {
                    const double got = read(out.data(), ((cu[row] + i) * kHeads + head) * kDim + d, dtype);
                    worst = std::max(worst, std::isnan(got) ? INFINITY : std::fabs(got - sum[d] / total));
                }
            }
        }
    }
    return worst;
}

// A linear layer of 7 outputs and 77 channels with a bias, on 9 rows; returns the largest error.
double largest_linear_error(void *library, int dtype, int threads) {
    const int rows = 9, dim = 77, features = 7;
    std::mt19937 draw(11);
    Numbers x(draw, rows * dim, dtype), weight(draw, features * dim, dtype), bias(draw, features, dtype);
    const pagedkv_linear_layer layer{weight.stored.data(), bias.stored.data(), dim, features};
    std::vector<char> out(rows * features * (dtype == PAGEDKV_FLOAT32 ? 4 : 2), 0x7f);
    if (symbol<decltype(pagedkv_linear)>(library, "pagedkv_linear")(&layer, 1, x.stored.data(), dim, out.data(), features,
                                                                  rows, dim, dtype, threads)) return INFINITY;
    double worst = 0;
    for (int i = 0; i < rows * features; i++) {
        double sum = bias.exact[i % features], magnitude = 1;
        for (int d = 0; d < dim; d++) {
            const double product = x.exact[i / features * dim + d] * weight.exact[i % features * dim + d];
            sum += product;
            magnitude += std::fabs(product);
        }
        const double got = read(out.data(), i, dtype);
        worst = std::max(worst, std::isnan(got) ? INFINITY : std::fabs(got - sum) / magnitude);
    }
    return worst;
}

}  // namespace

int main(int, char **arguments) {
    void *library = dlopen(arguments[1], RTLD_NOW);
    if (!library) {
        std::printf("%s\n", dlerror());
        return 2;
    }
    std::printf("%s\n", symbol<decltype(pagedkv_isa)>(library, "pagedkv_isa")());
    const struct {
        const char *name;
        int dtype, kv_dtype;
        double limit;
    } cases[] = {{"fp32", PAGEDKV_FLOAT32, PAGEDKV_FLOAT32, 3e-6},
                 {"bf16", PAGEDKV_BFLOAT16, PAGEDKV_BFLOAT16, 2e-2},
                 {"fp16", PAGEDKV_FLOAT16, PAGEDKV_FLOAT16, 3e-3},
                 {"int8", PAGEDKV_FLOAT32, PAGEDKV_INT8, 5e-2}};
    int failures = 0;
    for (const auto &one : cases) {
        for (int window : {0, 9}) {
            for (int threads : {1, 2}) {
                const double error = largest_error(library, one.dtype, one.kv_dtype, window, threads);
                std::printf("%s window %d threads %d: %.2g (at most %.2g)\n", one.name, window, threads, error, one.limit);
                failures += !(error <= one.limit);
            }
        }
    }
    for (const auto &one : cases) {
        const double error = one.dtype == one.kv_dtype ? largest_linear_error(library, one.dtype, 2) : 0;
        std::printf("linear %s: %.2g\n", one.name, error);
        failures += !(error <= one.limit);
    }
    const float x[5] = {3, -4, 0, 5, 1}, weight[5] = {1, 1, 1, 1, 2};
    float normed[5];
    int64_t largest;
    symbol<decltype(pagedkv_rms_norm)>(library, "pagedkv_rms_norm")(x, 5, nullptr, 0, nullptr, 0, weight, normed, 5, 1, 5,
                                                                  0.0f, PAGEDKV_FLOAT32, 1);
    symbol<decltype(pagedkv_argmax)>(library, "pagedkv_argmax")(x, 5, &largest, 1, 5, PAGEDKV_FLOAT32, 1);
    failures += std::fabs(normed[4] - 2 / std::sqrt(51 / 5.0)) > 1e-6 || largest != 3;
    std::printf("%s\n", failures ? "FAILED" : "ok");
    return failures != 0;
}
