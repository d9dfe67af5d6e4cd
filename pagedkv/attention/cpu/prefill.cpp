// Prefill, chunks and large groups: many query rows against the same keys, one query row a vector lane.
//
// A row is one query token and query head of the group. Queries are transposed once per item, [channel][row]; a tile of
// K and V is widened to fp32 once for all rows. Then scores [key][row] and sums [channel][row] are both products of
// broadcast elements of the tile (A) with vectors of rows (B), in one register-blocked micro-kernel. With rows in the
// lanes, softmax needs no shuffle: largest, sum, mask and correction are vectors too.
#include "ahead.h"
#include "score_rule.h"
#include "tile_walk.h"

namespace pagedkv {
namespace {

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

// sums[i][v] = over `depth`: A[i] * B[v]. A's element (i, d) is a[i * row + d * step], one of which is 1; B is
// [depth][kVectors] vectors.
template <int kCount, int kVectors>
inline void product(Floats (&sums)[kCount][kVectors], const float *a, int64_t row, int64_t step, const float *b,
                    int64_t depth) {
    for (int i = 0; i < kCount; i++) {
        for (int v = 0; v < kVectors; v++) sums[i][v] = Floats{};
    }
    for (int64_t d = 0; d < depth; d++, a += step, b += kVectors * kLanes) {
        Floats lanes[kVectors];
        for (int v = 0; v < kVectors; v++) lanes[v] = load<Floats>(b + v * kLanes);
        for (int i = 0; i < kCount; i++) {
            for (int v = 0; v < kVectors; v++) sums[i][v] += a[i * row] * lanes[v];
        }
    }
}

// The memory of an item.
struct Buffers {
    int64_t k_dim, v_dim, v_padded, k_stride, v_stride;
    float *queries;  // [block][k_dim][rows of the block]
    float *sums;     // [block][v_padded][rows of the block]
    float *largest;  // [rows]
    float *weights;  // [rows]
    float *slopes;   // [rows]: ALiBi, in base 2
    float *positions;  // [rows], as int32; lanes without a row repeat the last one
    float *k_tile;   // [kTileKeys][k_stride]
    float *v_tile;   // [kTileKeys][v_stride]
    float *scores;   // [kTileKeys][kBlockRows]
    float *lines;    // [kLanes][k_dim], for transposing
    int64_t size;

    Buffers(float *memory, const pagedkv_layer &layer, int64_t rows)
        : k_dim(layer.k_dim), v_dim(layer.v_dim), v_padded(rounded_up(layer.v_dim, kMostBroadcasts)),
          k_stride(rounded_up(k_dim, 16) + kRowPadding), v_stride(rounded_up(v_padded, 16) + kRowPadding) {
        int64_t padded = rounded_up(rows, kLanes), used = 0;
        auto take = [&](int64_t count) {
            float *at = memory ? memory + used : nullptr;
            used += rounded_up(count, 16);
            return at;
        };
        queries = take(padded * k_dim);
        sums = take(padded * v_padded);
        largest = take(padded);
        weights = take(padded);
        slopes = take(padded);
        positions = take(padded);
        k_tile = take(kTileKeys * k_stride);
        v_tile = take(kTileKeys * v_stride);
        scores = take(kTileKeys * kBlockRows);
        lines = take(kLanes * std::max(k_dim, v_dim));
        size = used;
    }
};

// The rows of one block: their positions and what depends on them.
template <int kVectors>
struct BlockRows {
    Ints position[kVectors];
    Floats slope[kVectors];  // ALiBi, in base 2
    int64_t first, last;     // smallest and largest position

    BlockRows(const Buffers &buffers, int64_t first_row) {
        for (int v = 0; v < kVectors; v++) {
            position[v] = load<Ints>(buffers.positions + first_row + v * kLanes);
            slope[v] = load<Floats>(buffers.slopes + first_row + v * kLanes);
        }
        first = position[0][0];
        last = position[kVectors - 1][kLanes - 1];
    }
};

// The part of a tile that a block of rows looks at: keys [begin, end), all of them by all rows unless `masked`.
struct KeySpan {
    int begin, end;
    bool masked;
};

template <int kVectors>
KeySpan span_of(const Tile &tile, const BlockRows<kVectors> &rows, const pagedkv_layer &layer) {
    KeySpan span{0, tile.count, false};
    while (span.end > 0 && tile.position[span.end - 1] > rows.last) span.end--;
    if (layer.window) {
        int64_t start = std::max<int64_t>(0, rows.first - layer.window + 1);
        while (span.begin < span.end && tile.position[span.begin] < start &&
               tile.position[span.begin] >= layer.num_sink_tokens) {
            span.begin++;
        }
        span.masked = span.begin < span.end && tile.position[span.begin] < rows.last - layer.window + 1;
    }
    span.masked |= span.end > 0 && tile.position[span.end - 1] > rows.first;
    return span;
}

// What an item's blocks share while they go through a tile. Loops take out what they need (where each product read it
// again, for stores might have changed it, prefill took 1.03x).
struct Pass {
    const Call &call;
    const Buffers &buffers;
    const ScoreRule &rule;
    const Tile &tile;
    bool v_finite;
    Ahead &ahead;  // of the next tile
    int lines;     // to ask for with each product
};

// Score every key of the span for kVectors vectors of rows.
template <int kVectors>
void block_scores(const Pass &pass, const float *queries, KeySpan span) {
    const Buffers &buffers = pass.buffers;
    Ahead &ahead = pass.ahead;
    const int lines = pass.lines;
    constexpr int kCount = kBroadcasts<kVectors>;
    for (int key = span.begin / kCount * kCount; key < span.end; key += kCount) {
        Floats sums[kCount][kVectors];
        ahead.ask_for(lines);
        product(sums, buffers.k_tile + key * buffers.k_stride, buffers.k_stride, 1, queries, buffers.k_dim);
        for (int i = 0; i < kCount; i++) {
            for (int v = 0; v < kVectors; v++) {
                store(buffers.scores + ((key + i) * kVectors + v) * kLanes, sums[i][v]);
            }
        }
    }
}

// Cap, slope and mask the scores of a span where a layer or the diagonal asks for it.
template <int kVectors>
void bend_scores(float *scores, const Tile &tile, KeySpan span, const BlockRows<kVectors> &rows, const Call &call,
                 const ScoreRule &rule) {
    const int64_t sinks = call.layer.num_sink_tokens;
    const bool windowed = call.layer.window > 0;
    const int32_t window = static_cast<int32_t>(std::min<int64_t>(call.layer.window, INT32_MAX));
    for (int key = span.begin; key < span.end; key++) {
        const int32_t position = tile.position[key];
        for (int v = 0; v < kVectors; v++) {
            float *at = scores + (key * kVectors + v) * kLanes;
            Floats score = rule.capped(load<Floats>(at));
            if (call.layer.alibi_slopes) score += rows.slope[v] * __builtin_convertvector(position - rows.position[v], Floats);
            if (span.masked) {
                Ints seen = position <= rows.position[v];
                if (windowed && position >= sinks) seen &= position > rows.position[v] - window;
                score = seen ? score : splat(kMinusInfinity);
            }
            store(at, score);
        }
    }
}

// Turn a span's scores into weights 2^(score - largest) and update the rows' running softmax. `corrections` get the
// factors for what was summed before.
template <int kVectors>
void block_weigh(float *scores, KeySpan span, float *largest, float *weights, Floats (&corrections)[kVectors]) {
    Floats top[kVectors], floor[kVectors], sum[kVectors] = {};
    for (int v = 0; v < kVectors; v++) top[v] = load<Floats>(largest + v * kLanes);
    for (int key = span.begin; key < span.end; key++) {
        for (int v = 0; v < kVectors; v++) {
            top[v] = larger(top[v], load<Floats>(scores + (key * kVectors + v) * kLanes));
        }
    }
    for (int v = 0; v < kVectors; v++) {
        floor[v] = finite_floor(top[v]);
        corrections[v] = exp2_of(load<Floats>(largest + v * kLanes) - floor[v]);
        store(largest + v * kLanes, top[v]);
    }
    for (int key = span.begin; key < span.end; key++) {
        for (int v = 0; v < kVectors; v++) {
            float *at = scores + (key * kVectors + v) * kLanes;
            Floats weight = exp2_of(load<Floats>(at) - floor[v]);
            store(at, weight);
            sum[v] += weight;
        }
    }
    for (int v = 0; v < kVectors; v++) {
        store(weights + v * kLanes, load<Floats>(weights + v * kLanes) * corrections[v] + sum[v]);
    }
}

// sums = sums * corrections + weights . V over the span.
template <int kVectors>
void block_values(const Pass &pass, float *sums, KeySpan span, const Floats (&corrections)[kVectors]) {
    const Buffers &buffers = pass.buffers;
    Ahead &ahead = pass.ahead;
    const int lines = pass.lines;
    constexpr int kCount = kBroadcasts<kVectors>;
    const float *weights = buffers.scores + span.begin * kVectors * kLanes;
    const float *values = buffers.v_tile + span.begin * buffers.v_stride;
    for (int64_t channel = 0; channel < buffers.v_dim; channel += kCount) {
        Floats added[kCount][kVectors];
        ahead.ask_for(lines);
        product(added, values + channel, 1, buffers.v_stride, weights, span.end - span.begin);
        float *to = sums + channel * kVectors * kLanes;
        for (int i = 0; i < kCount; i++) {
            for (int v = 0; v < kVectors; v++, to += kLanes) {
                store(to, load<Floats>(to) * corrections[v] + added[i][v]);
            }
        }
    }
}

// The same where V holds infinities or NaN and some rows do not see every key: a weight of 0 takes nothing from them.
template <int kVectors>
void block_values_guarded(const Buffers &buffers, float *sums, KeySpan span, const Floats (&corrections)[kVectors]) {
    for (int64_t channel = 0; channel < buffers.v_dim; channel++) {
        for (int v = 0; v < kVectors; v++) {
            float *to = sums + (channel * kVectors + v) * kLanes;
            Floats sum = load<Floats>(to) * corrections[v];
            for (int key = span.begin; key < span.end; key++) {
                Floats weight = load<Floats>(buffers.scores + (key * kVectors + v) * kLanes);
                sum += weight == 0.0f ? Floats{} : weight * buffers.v_tile[key * buffers.v_stride + channel];
            }
            store(to, sum);
        }
    }
}

bool all_finite(const Buffers &buffers, int count) {
    float probe = 0;
    for (int key = 0; key < count; key++) {
        const float *row = buffers.v_tile + key * buffers.v_stride;
        Floats sum = {};
        int64_t i = 0;
        for (; i + kLanes <= buffers.v_dim; i += kLanes) sum += load<Floats>(row + i) * 0.0f;
        for (; i < buffers.v_dim; i++) probe += row[i] * 0.0f;
        probe += sum_of(sum);
    }
    return probe == 0;
}

template <int kVectors>
void attend_block(const Pass &pass, int64_t first_row) {
    const Buffers &buffers = pass.buffers;
    const BlockRows<kVectors> rows(buffers, first_row);
    const KeySpan span = span_of(pass.tile, rows, pass.call.layer);
    if (span.begin >= span.end) return;
    block_scores<kVectors>(pass, buffers.queries + first_row * buffers.k_dim, span);
    if (span.masked || pass.call.layer.alibi_slopes || pass.rule.softcap > 0) {
        bend_scores(buffers.scores, pass.tile, span, rows, pass.call, pass.rule);
    }
    Floats corrections[kVectors];
    block_weigh(buffers.scores, span, buffers.largest + first_row, buffers.weights + first_row, corrections);
    float *sums = buffers.sums + first_row * buffers.v_padded;
    if (span.masked && !pass.v_finite) {
        block_values_guarded(buffers, sums, span, corrections);
    } else {
        block_values(pass, sums, span, corrections);
    }
}

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

void load_queries(const Call &call, const Item &item, int64_t kv_head, float factor, const Buffers &buffers) {
    const int64_t group = call.group(), num_rows = item.num_tokens * group;
    by_blocks(num_rows, [&](auto vectors, int64_t first_row) {
        for (int v = 0; v < vectors; v++) {
            for (int i = 0; i < kLanes; i++) {
                int64_t row = first_row + v * kLanes + i;
                float *line = buffers.lines + i * buffers.k_dim;
                if (row < num_rows) {
                    read_query(call, item.q_row + row / group, kv_head * group + row % group, factor, line);
                } else {
                    std::fill_n(line, buffers.k_dim, 0.0f);
                }
            }
            float *to = buffers.queries + first_row * buffers.k_dim + v * kLanes;
            transpose_rows(to, vectors * kLanes, buffers.lines, buffers.k_dim, buffers.k_dim);
        }
    });
}

void hand_over(const Buffers &buffers, int64_t num_rows, const Partial &result) {
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

template <class Element, bool kScaled>
void load_tile(const Buffers &buffers, const Tile &tile) {
    for (int key = 0; key < tile.count; key++) {
        widen_row(buffers.k_tile + key * buffers.k_stride, reinterpret_cast<const Element *>(tile.k[key]),
                  buffers.k_dim, kScaled ? *tile.k_scale[key] : 1.0f);
        widen_row(buffers.v_tile + key * buffers.v_stride, reinterpret_cast<const Element *>(tile.v[key]),
                  buffers.v_dim, kScaled ? *tile.v_scale[key] : 1.0f);
    }
}

// Lines of a whole tile's K and V that each product on the tile before it asks for.
int lines_a_product(int64_t num_rows, int64_t v_dim, int64_t lines_of_key) {
    const int64_t blocks = (num_rows + kBlockRows - 1) / kBlockRows;
    const int64_t products = blocks * (kTileKeys + v_dim) / kBroadcasts<kBlockVectors>;
    return static_cast<int>((kTileKeys * lines_of_key + products - 1) / products);
}

template <class Element, bool kScaled>
void prefill(const Call &call, Task task, Tasks &tasks, float *memory, Partial result) {
    const Item &item = *task.item;
    const int64_t num_rows = item.num_tokens * call.group(), padded = rounded_up(num_rows, kLanes);
    const size_t k_bytes = call.layer.k_dim * sizeof(Element), v_bytes = call.layer.v_dim * sizeof(Element);
    const int lines = lines_a_product(num_rows, call.layer.v_dim, lines_of(k_bytes) + lines_of(v_bytes));
    const ScoreRule rule(call.layer);
    const Buffers buffers(memory, call.layer, num_rows);

    load_queries(call, item, task.kv_head, rule.query_factor, buffers);
    for (int64_t row = 0; row < padded; row++) {
        const int64_t real = std::min(row, num_rows - 1), head = task.kv_head * call.group() + real % call.group();
        const int32_t position = static_cast<int32_t>(item.q_position + real / call.group());
        std::memcpy(buffers.positions + row, &position, sizeof position);
        buffers.slopes[row] = call.layer.alibi_slopes ? call.layer.alibi_slopes[head] * kLog2E : 0.0f;
    }
    std::fill_n(buffers.sums, padded * buffers.v_padded, 0.0f);
    std::fill_n(buffers.largest, padded, kMinusInfinity);
    std::fill_n(buffers.weights, padded, 0.0f);

    for (TileWalk<kScaled, kTileKeys> walk(call, task, tasks); walk.more(); walk.step()) {
        const Tile &tile = walk.tile();
        load_tile<Element, kScaled>(buffers, tile);
        Ahead ahead(walk.next(), k_bytes, v_bytes);
        const bool masked = call.layer.window || tile.position[tile.count - 1] > item.q_position;
        const Pass pass{call, buffers, rule, tile, !masked || all_finite(buffers, tile.count), ahead, lines};
        by_blocks(num_rows, [&](auto vectors, int64_t first_row) { attend_block<vectors>(pass, first_row); });
    }
    hand_over(buffers, num_rows, result);
}

}  // namespace

Kernel prefill_kernel(int32_t kv_dtype) {
    switch (kv_dtype) {
        case PAGEDKV_FLOAT32: return prefill<float, false>;
        case PAGEDKV_BFLOAT16: return prefill<BFloat16, false>;
        case PAGEDKV_FLOAT16: return prefill<Float16, false>;
        case PAGEDKV_INT8: return prefill<int8_t, true>;
        case PAGEDKV_FP8_E4M3: return prefill<Fp8, true>;
        default: return nullptr;
    }
}

int64_t prefill_scratch(const pagedkv_layer &layer, int64_t rows) { return Buffers(nullptr, layer, rows).size; }

}  // namespace pagedkv
