// Linear layers on few rows, over weights as they lie in memory.
//
// At decode's few rows reading the weights is the work, and multiplying must not keep it waiting. Every output is a dot
// product along the channels, so weights need no other order than their own: a tile takes a few weight rows with a few
// input rows and keeps all their sums in registers. Weight rows come from memory with their first tile and from the
// first-level cache with the others; meanwhile the lines of the next ones are asked for, spread evenly over the tiles.
// Measured with SmolLM2-135M's 121 products on two AVX2 cores, oneDNN's packed form in brackets, ms: fp32 40 (49) for 1
// row, 42 (64) for 4, 56 (91) for 16, 98 (113) for 32, 195 (214) for 64; bf16 21 (25), 27 (69), 55 (98), 88 (109), 197
// (199). From there on oneDNN is faster, up to 1.5 times; blocks for the second-level cache did not change that.

#include "linear.h"

#include <type_traits>
#include <utility>

#include "elements.h"
#include "scratch.h"

namespace pagedkv {
namespace {

// Of a tile: as many sums as leave registers for the weights and one input.
constexpr int kWeightRows = kNumRegisters > 16 ? 4 : 3;
constexpr int kInputRows = kNumRegisters > 16 ? 6 : 4;

// Up to this many multiply-adds the calling thread works alone. Chosen, not tuned.
constexpr int64_t kSerialWork = 1 << 16;

// Rows that are taken at once.
constexpr int64_t kBlockRows = 64;

// Inputs in fp32 and in the stored order of the weights' dtype, each row filled up with zeros to whole vectors.
struct Inputs {
    const float *base;
    int64_t stride;
    int64_t rows, dim;

    const float *row(int64_t index) const { return base + index * stride; }
};

// Multiply and add kWeights weight rows with kInputs input rows; kFetch rows from `next` on are asked for meanwhile.
// Inlined whatever the compiler thinks of it: called, it would keep its sums in memory (16 rows: 105 ms for 55).
template <int kWeights, int kInputs, int kFetch, class Element>
[[gnu::always_inline]] inline void add_products(Floats (&sums)[kInputs][kWeightRows], const Element *weights,
                                                int64_t stride, const float *x, const Inputs &inputs,
                                                const Element *next) {
    auto step = [&](auto weight_at, int64_t channel) {
        Floats weight[kWeights];
        for (int i = 0; i < kWeights; i++) {
            weight[i] = weight_at(weights + i * stride);
            hold(weight[i]);
        }
        for (int row = 0; row < kInputs; row++) {
            Floats input = load<Floats>(x + row * inputs.stride + channel);
            for (int i = 0; i < kWeights; i++) sums[row][i] += weight[i] * input;
        }
    };
    int64_t channel = 0;
    for (; channel + 2 * kLanes <= inputs.dim; channel += 2 * kLanes) {
        for (int i = 0; i < kFetch; i++) __builtin_prefetch(next + i * stride + channel);
        step([&](const Element *row) { return widen_half<0>(row + channel); }, channel);
        step([&](const Element *row) { return widen_half<1>(row + channel); }, channel + kLanes);
    }
    for (; channel < inputs.dim; channel += kLanes) {
        step([&](const Element *row) { return read(row + channel, inputs.dim - channel); }, channel);
    }
}

// Call `body` with the constant that `value` is; nothing where it is none of them.
template <int... kValue, class Body>
void with_constant(int64_t value, std::integer_sequence<int, kValue...>, Body body) {
    ((value == kValue && (body(std::integral_constant<int, kValue>{}), true)) || ...);
}

// kWeights outputs from `first` on of one layer, for all rows.
template <int kWeights, class Element>
void outputs(const pagedkv_linear_layer &layer, int64_t first, const Inputs &inputs, Element *out, int64_t out_stride) {
    const int64_t stride = layer.weight_stride;
    const Element *weights = static_cast<const Element *>(layer.weight) + first * stride;
    const int64_t following = kWeights > 1 ? std::min<int64_t>(kWeights, layer.out_features - first - kWeights) : 0;
    const Floats bias = layer.bias ? read(static_cast<const Element *>(layer.bias) + first, kWeights) : Floats{};
    const int64_t blocks = (inputs.rows + kInputRows - 1) / kInputRows;
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t row = inputs.rows * block / blocks, row_end = inputs.rows * (block + 1) / blocks;
        const int64_t fetched = following * block / blocks, fetched_end = following * (block + 1) / blocks;
        const Element *next = weights + (kWeights + fetched) * stride;
        with_constant(row_end - row, std::integer_sequence<int, 1, 2, 3, 4, 5, 6>{}, [&](auto inputs_of_tile) {
            with_constant(fetched_end - fetched, std::integer_sequence<int, 0, 1, 2, 3, 4>{}, [&](auto fetch) {
                constexpr int kInputs = inputs_of_tile, kFetch = fetch;
                if constexpr (kInputs <= kInputRows && (kFetch == 0 || (kWeights > 1 && kFetch <= kWeights))) {
                    Floats sums[kInputs][kWeightRows] = {};
                    add_products<kWeights, kInputs, kFetch>(sums, weights, stride, inputs.row(row), inputs, next);
                    for (int i = 0; i < kInputs; i++) {
                        Floats last = kWeightRows > 3 ? sums[i][kWeightRows - 1] : Floats{};
                        Floats sum = four_sums(sums[i][0], sums[i][1], sums[i][2], last);
                        write(out + (row + i) * out_stride + first, sum + bias, kWeights);
                    }
                }
            });
        });
    }
}

int64_t groups_of(const pagedkv_linear_layer &layer) { return (layer.out_features + kWeightRows - 1) / kWeightRows; }

// The layers' outputs in groups of kWeightRows, numbered through; a thread takes consecutive ones.
template <class Element>
void groups(const pagedkv_linear_layer *layers, int64_t num_layers, int64_t begin, int64_t end, const Inputs &inputs,
            Element *out, int64_t out_stride) {
    for (const pagedkv_linear_layer *layer = layers; layer < layers + num_layers && end > 0; layer++) {
        const int64_t count = groups_of(*layer);
        for (int64_t group = std::max<int64_t>(begin, 0); group < std::min(end, count); group++) {
            const int64_t first = group * kWeightRows;
            if (first + kWeightRows <= layer->out_features) {
                outputs<kWeightRows>(*layer, first, inputs, out, out_stride);
            } else {
                for (int64_t one = first; one < layer->out_features; one++) outputs<1>(*layer, one, inputs, out, out_stride);
            }
        }
        begin -= count;
        end -= count;
        out += layer->out_features;
    }
}

// x as the products take it: itself where it is fp32 in whole vectors, else a copy. False if there is no room for it.
template <class Element>
bool widen_inputs(const Element *x, int64_t x_stride, Inputs &inputs) {
    if constexpr (std::is_same_v<Element, float>) {
        if (inputs.dim % kLanes == 0) {
            inputs.base = x;
            inputs.stride = x_stride;
            return true;
        }
    }
    thread_local Scratch scratch;
    inputs.stride = (inputs.dim + kLanes - 1) / kLanes * kLanes;
    float *copy = scratch.floats(inputs.rows * inputs.stride);
    inputs.base = copy;
    if (!copy) return false;
    for (int64_t row = 0; row < inputs.rows; row++, copy += inputs.stride) {
        widen_row(copy, x + row * x_stride, inputs.dim, 1.0f);
        std::fill(copy + inputs.dim, copy + inputs.stride, 0.0f);
    }
    return true;
}

}  // namespace
}  // namespace pagedkv

int32_t pagedkv_linear(const pagedkv_linear_layer *layers, int64_t num_layers, const void *x, int64_t x_stride, void *out,
                       int64_t out_stride, int64_t rows, int64_t in_features, int32_t dtype, int32_t num_threads) {
    using namespace pagedkv;
    int64_t count = 0, features = 0;
    for (int64_t i = 0; i < num_layers; i++) {
        count += groups_of(layers[i]);
        features += layers[i].out_features;
    }
    bool room = true;
    const int32_t known = with_element(dtype, [&](auto kind) {
        using Element = decltype(kind);
        // By blocks, so that what is widened stays small; weights read again for 64 rows cost little beside their products.
        for (int64_t row = 0; row < rows; row += kBlockRows) {
            Inputs inputs{nullptr, 0, std::min(kBlockRows, rows - row), in_features};
            room = widen_inputs(static_cast<const Element *>(x) + row * x_stride, x_stride, inputs);
            if (!room) return;
            Element *to = static_cast<Element *>(out) + row * out_stride;
            const bool serial = inputs.rows * in_features * features < kSerialWork;
            const int64_t threads = serial ? 1 : std::min<int64_t>(num_threads, count);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
            for (int64_t part = 0; part < threads; part++) {
                groups(layers, num_layers, count * part / threads, count * (part + 1) / threads, inputs, to, out_stride);
            }
        }
    });
    return room ? known : PAGEDKV_OUT_OF_MEMORY;
}
