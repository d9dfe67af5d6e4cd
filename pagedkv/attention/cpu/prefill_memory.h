// The memory of a prefill item, what is brought into it and taken out of it. prefill.cpp says what it is for.
#pragma once

#include "pairs.h"
#include "work.h"

namespace pagedkv {

// Rows go in blocks of up to kBlockVectors vectors; the micro-kernel holds kBroadcasts x vectors sums in registers: 4 x 3
// of AVX2's 16, 8 x 3 of 32. A last block of one vector takes 8 broadcasts, for sums enough to hide the FMA's latency.
constexpr int kBlockVectors = 3;
constexpr int kBlockRows = kBlockVectors * kLanes;
template <int kVectors>
constexpr int kBroadcasts = kNumRegisters == 32 || kVectors == 1 ? 8 : 4;
constexpr int kMostBroadcasts = 8;

// Rows of the fp32 tile are a cache line longer than needed, so that a column of it does not fall into a few cache sets.
constexpr int kRowPadding = 16;

constexpr int64_t rounded_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// Elements of A and B: fp32, or pairs of bf16.
using Pair = uint32_t;
template <class Operand>
constexpr bool kPaired = std::is_same_v<Operand, Pair>;

// Keys that a row of v_tile or of weights stands for.
template <class Operand>
constexpr int kRowKeys = kPaired<Operand> ? 2 : 1;

// The tile, queries and weights lie in memory of floats.
template <class Operand>
inline const Operand *operands(const float *memory) {
    return reinterpret_cast<const Operand *>(memory);
}

// The memory of an item. In pairs, k_depth is half of the channels.
struct Buffers {
    int64_t k_depth, v_dim, v_padded, k_stride, v_stride;
    float *queries;  // [block][k_depth][rows of the block]
    float *sums;     // [block][v_padded][rows of the block]
    float *largest;  // [rows]
    float *weights;  // [rows]
    float *slopes;   // [rows]: ALiBi, in base 2
    float *positions;  // [rows], as int32; lanes without a row repeat the last one
    float *k_tile;   // [kTileKeys][k_stride]
    float *v_tile;   // [kTileKeys][v_stride]
    float *scores;   // [kTileKeys][kBlockRows]
    float *lines;    // [kLanes][k_depth], for transposing
    int64_t size;

    Buffers(float *memory, const pagedkv_layer &layer, int64_t rows, bool paired)
        : k_depth(paired ? layer.k_dim / 2 : layer.k_dim), v_dim(layer.v_dim),
          v_padded(rounded_up(layer.v_dim, kMostBroadcasts)),
          k_stride(rounded_up(k_depth, 16) + kRowPadding), v_stride(rounded_up(v_padded, 16) + kRowPadding) {
        int64_t padded = rounded_up(rows, kLanes), used = 0;
        auto take = [&](int64_t count) {
            float *at = memory ? memory + used : nullptr;
            used += rounded_up(count, 16);
            return at;
        };
        queries = take(padded * k_depth);
        sums = take(padded * v_padded);
        largest = take(padded);
        weights = take(padded);
        slopes = take(padded);
        positions = take(padded);
        k_tile = take(kTileKeys * k_stride);
        v_tile = take(kTileKeys * v_stride);
        scores = take(kTileKeys * kBlockRows);
        lines = take(kLanes * k_depth);
        size = used;
    }
};

// Call `body` for each block of rows, with its number of vectors as a constant.
template <class Body>
inline void by_blocks(int64_t num_rows, Body body) {
    for (int64_t row = 0; row < num_rows; row += kBlockRows) {
        int64_t vectors = (num_rows - row + kLanes - 1) / kLanes;
        if (vectors >= kBlockVectors) {
            body(std::integral_constant<int, kBlockVectors>{}, row);
        } else if (vectors == 2) {
            body(std::integral_constant<int, 2>{}, row);
        } else {
            body(std::integral_constant<int, 1>{}, row);
        }
    }
}

// [kLanes][dim] rows, `stride` apart, to [dim] vectors, `to_stride` apart.
inline void transpose_rows(float *to, int64_t to_stride, const float *from, int64_t stride, int64_t dim) {
    int64_t d = 0;
    for (; d + kLanes <= dim; d += kLanes) {
        Floats block[kLanes];
        for (int i = 0; i < kLanes; i++) block[i] = load<Floats>(from + i * stride + d);
        transpose(block);
        for (int i = 0; i < kLanes; i++) store(to + (d + i) * to_stride, block[i]);
    }
    for (; d < dim; d++) {
        for (int i = 0; i < kLanes; i++) to[d * to_stride + i] = from[i * stride + d];
    }
}

// [dim] vectors, `from_stride` apart, to `count` rows of [dim], `stride` apart.
inline void transpose_back(float *to, int64_t stride, int count, const float *from, int64_t from_stride, int64_t dim) {
    int64_t d = 0;
    for (; d + kLanes <= dim; d += kLanes) {
        Floats block[kLanes];
        for (int i = 0; i < kLanes; i++) block[i] = load<Floats>(from + (d + i) * from_stride);
        transpose(block);
        for (int i = 0; i < count; i++) store(to + i * stride + d, block[i]);
    }
    for (; d < dim; d++) {
        for (int i = 0; i < count; i++) to[i * stride + d] = from[d * from_stride + i];
    }
}

// Queries times `factor`, or as they came where they are taken in pairs.
template <class Operand>
void load_queries(const Call &call, const Item &item, int64_t kv_head, float factor, const Buffers &buffers) {
    const int64_t group = call.group(), num_rows = item.num_tokens * group, depth = buffers.k_depth;
    by_blocks(num_rows, [&](auto vectors, int64_t first_row) {
        for (int v = 0; v < vectors; v++) {
            for (int i = 0; i < kLanes; i++) {
                const int64_t row = first_row + v * kLanes + i;
                const int64_t token = item.q_row + row / group, head = kv_head * group + row % group;
                float *line = buffers.lines + i * depth;
                if (row >= num_rows) {
                    std::fill_n(line, depth, 0.0f);
                } else if constexpr (kPaired<Operand>) {
                    copy_query(call, token, head, reinterpret_cast<BFloat16 *>(line));
                } else {
                    read_query(call, token, head, factor, line);
                }
            }
            float *to = buffers.queries + first_row * depth + v * kLanes;
            transpose_rows(to, vectors * kLanes, buffers.lines, depth, depth);
        }
    });
}

// The tile, widened.
template <class Element, bool kScaled>
void load_tile(const Buffers &buffers, const Tile &tile) {
    for (int key = 0; key < tile.count; key++) {
        widen_row(buffers.k_tile + key * buffers.k_stride, reinterpret_cast<const Element *>(tile.k[key]),
                  buffers.k_depth, kScaled ? *tile.k_scale[key] : 1.0f);
        widen_row(buffers.v_tile + key * buffers.v_stride, reinterpret_cast<const Element *>(tile.v[key]),
                  buffers.v_dim, kScaled ? *tile.v_scale[key] : 1.0f);
    }
}

// The tile in pairs; after the last key of an odd number comes one of zeros.
inline void load_pairs(const Buffers &buffers, const Tile &tile) {
    for (int key = 0; key < tile.count; key++) {
        std::memcpy(buffers.k_tile + key * buffers.k_stride, tile.k[key], buffers.k_depth * sizeof(Pair));
    }
    for (int key = 0; key < tile.count; key += 2) {
        float *to = buffers.v_tile + key / 2 * buffers.v_stride;
        for (int64_t i = 0; i < buffers.v_dim; i += 2 * kLanes) {
            const int64_t bytes = i * sizeof(BFloat16);
            const Words first = load<Words>(tile.v[key] + bytes);
            const Words second = key + 1 < tile.count ? load<Words>(tile.v[key + 1] + bytes) : Words{};
            store(to + i, even_pairs(first, second));
            store(to + i + kLanes, odd_pairs(first, second));
        }
    }
}

// A channel of a key of the tile.
template <class Operand>
inline float value_of(const Buffers &buffers, int key, int64_t channel) {
    if constexpr (kPaired<Operand>) {
        const Pair pair = operands<Pair>(buffers.v_tile)[key / kRowKeys<Pair> * buffers.v_stride + channel];
        const Pair bits = key % 2 ? pair & 0xffff0000u : pair << 16;
        float value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    } else {
        return buffers.v_tile[key * buffers.v_stride + channel];
    }
}

// Whether V of the tile's keys holds neither infinities nor NaN.
template <class Operand>
bool all_finite(const Buffers &buffers, int count) {
    float probe = 0;
    for (int key = 0; key < count; key += kRowKeys<Operand>) {
        const float *row = buffers.v_tile + key / kRowKeys<Operand> * buffers.v_stride;
        Floats sum = {};
        int64_t i = 0;
        for (; i + kLanes <= buffers.v_dim; i += kLanes) {
            if constexpr (kPaired<Operand>) {
                const Words pairs = load<Words>(row + i);
                sum += as_floats(pairs << 16) * 0.0f + as_floats(upper_halves(pairs)) * 0.0f;
            } else {
                sum += load<Floats>(row + i) * 0.0f;
            }
        }
        for (; i < buffers.v_dim; i++) probe += row[i] * 0.0f;
        probe += sum_of(sum);
    }
    return probe == 0;
}

// The sums so far, row by row.
inline void hand_over(const Buffers &buffers, int64_t num_rows, const Partial &result) {
    by_blocks(num_rows, [&](auto vectors, int64_t first_row) {
        for (int v = 0; v < vectors; v++) {
            int64_t row = first_row + v * kLanes;
            int count = static_cast<int>(std::min<int64_t>(kLanes, num_rows - row));
            const float *from = buffers.sums + first_row * buffers.v_padded + v * kLanes;
            transpose_back(result.sums + row * buffers.v_dim, buffers.v_dim, count, from, vectors * kLanes,
                           buffers.v_dim);
        }
    });
    std::copy_n(buffers.largest, num_rows, result.largest);
    std::copy_n(buffers.weights, num_rows, result.weights);
}

}  // namespace pagedkv
