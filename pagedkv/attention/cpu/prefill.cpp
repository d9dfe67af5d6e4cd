// Prefill, chunks and large groups: many query rows against the same keys, one query row a vector lane.
//
// A row is one query token and query head of the group. Queries are transposed once per item, [channel][row]; a tile of
// K and V is widened to fp32 once for all rows. Then scores [key][row] and sums [channel][row] are both products of
// broadcast elements of the tile (A) with vectors of rows (B), in one register-blocked micro-kernel. With rows in the
// lanes, softmax needs no shuffle: largest, sum, mask and correction are vectors too.
//
// Where the processor multiplies bf16 (pairs.h), A and B are words instead: pairs of channels for the scores, of keys for
// the sums, and the tile is not widened.
#include "ahead.h"
#include "prefill_memory.h"
#include "score_rule.h"
#include "tile_walk.h"

namespace pagedkv {
namespace {

// sums[i][v] = over `depth`: A[i] * B[v]. A's element (i, d) is a[i * row + d * step], one of which is 1; B is
// [depth][kVectors] vectors.
template <int kCount, int kVectors, class Operand>
inline void product(Floats (&sums)[kCount][kVectors], const Operand *a, int64_t row, int64_t step, const Operand *b,
                    int64_t depth) {
    using Lanes = std::conditional_t<kPaired<Operand>, Words, Floats>;
    for (int i = 0; i < kCount; i++) {
        for (int v = 0; v < kVectors; v++) sums[i][v] = Floats{};
    }
    for (int64_t d = 0; d < depth; d++, a += step, b += kVectors * kLanes) {
        Lanes lanes[kVectors];
        for (int v = 0; v < kVectors; v++) lanes[v] = load<Lanes>(b + v * kLanes);
        for (int i = 0; i < kCount; i++) {
            for (int v = 0; v < kVectors; v++) sums[i][v] = add_product(sums[i][v], a[i * row], lanes[v]);
        }
    }
}

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
template <int kVectors, class Operand>
void block_scores(const Pass &pass, const float *queries, KeySpan span) {
    const Buffers &buffers = pass.buffers;
    Ahead &ahead = pass.ahead;
    const int lines = pass.lines;
    constexpr int kCount = kBroadcasts<kVectors>;
    for (int key = span.begin / kCount * kCount; key < span.end; key += kCount) {
        Floats sums[kCount][kVectors];
        ahead.ask_for(lines);
        product(sums, operands<Operand>(buffers.k_tile) + key * buffers.k_stride, buffers.k_stride, 1,
                operands<Operand>(queries), buffers.k_depth);
        for (int i = 0; i < kCount; i++) {
            for (int v = 0; v < kVectors; v++) {
                if constexpr (kPaired<Operand>) sums[i][v] *= pass.rule.query_factor;
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

// Weights [key] of a span become pairs [key / 2], in their place; a key outside the span counts as 0.
template <int kVectors>
void block_pair_weights(float *weights, KeySpan span) {
    constexpr int kRow = kVectors * kLanes;
    for (int key = span.begin / 2 * 2; key < span.end; key += 2) {
        for (int i = 0; i < kRow; i += kLanes) {
            const float *from = weights + key * kRow + i;
            const Floats first = key >= span.begin ? load<Floats>(from) : Floats{};
            const Floats second = key + 1 < span.end ? load<Floats>(from + kRow) : Floats{};
            store(weights + key / 2 * kRow + i, round_to_pairs(first, second));
        }
    }
}

// sums = sums * corrections + weights . V over the span.
template <int kVectors, class Operand>
void block_values(const Pass &pass, float *sums, KeySpan span, const Floats (&corrections)[kVectors]) {
    const Buffers &buffers = pass.buffers;
    Ahead &ahead = pass.ahead;
    const int lines = pass.lines;
    constexpr int kCount = kBroadcasts<kVectors>, kKeys = kRowKeys<Operand>;
    const int first = span.begin / kKeys, depth = (span.end + kKeys - 1) / kKeys - first;
    const Operand *weights = operands<Operand>(buffers.scores) + first * kVectors * kLanes;
    const Operand *values = operands<Operand>(buffers.v_tile) + first * buffers.v_stride;
    for (int64_t channel = 0; channel < buffers.v_dim; channel += kCount) {
        Floats added[kCount][kVectors];
        ahead.ask_for(lines);
        product(added, values + channel, 1, buffers.v_stride, weights, depth);
        float *to = sums + channel * kVectors * kLanes;
        for (int i = 0; i < kCount; i++) {
            for (int v = 0; v < kVectors; v++, to += kLanes) {
                store(to, load<Floats>(to) * corrections[v] + added[i][v]);
            }
        }
    }
}

// The same where V holds infinities or NaN and some rows do not see every key: a weight of 0 takes nothing from them.
template <int kVectors, class Operand>
void block_values_guarded(const Buffers &buffers, float *sums, KeySpan span, const Floats (&corrections)[kVectors]) {
    for (int64_t channel = 0; channel < buffers.v_dim; channel++) {
        for (int v = 0; v < kVectors; v++) {
            float *to = sums + (channel * kVectors + v) * kLanes;
            Floats sum = load<Floats>(to) * corrections[v];
            for (int key = span.begin; key < span.end; key++) {
                Floats weight = load<Floats>(buffers.scores + (key * kVectors + v) * kLanes);
                if constexpr (kPaired<Operand>) weight = as_floats(round_to_bfloat16(weight) << 16);
                sum += weight == 0.0f ? Floats{} : weight * value_of<Operand>(buffers, key, channel);
            }
            store(to, sum);
        }
    }
}

template <int kVectors, class Operand>
void attend_block(const Pass &pass, int64_t first_row) {
    const Buffers &buffers = pass.buffers;
    const BlockRows<kVectors> rows(buffers, first_row);
    const KeySpan span = span_of(pass.tile, rows, pass.call.layer);
    if (span.begin >= span.end) return;
    block_scores<kVectors, Operand>(pass, buffers.queries + first_row * buffers.k_depth, span);
    if (span.masked || pass.call.layer.alibi_slopes || pass.rule.softcap > 0) {
        bend_scores(buffers.scores, pass.tile, span, rows, pass.call, pass.rule);
    }
    Floats corrections[kVectors];
    block_weigh(buffers.scores, span, buffers.largest + first_row, buffers.weights + first_row, corrections);
    float *sums = buffers.sums + first_row * buffers.v_padded;
    // A pair may reach out of the span, to a key that none of the rows sees.
    if (!pass.v_finite && (span.masked || kPaired<Operand>)) {
        block_values_guarded<kVectors, Operand>(buffers, sums, span, corrections);
    } else {
        if constexpr (kPaired<Operand>) block_pair_weights<kVectors>(buffers.scores, span);
        block_values<kVectors, Operand>(pass, sums, span, corrections);
    }
}

// Lines that each product on a tile asks for, so that all of them ask for the next one's K and V.
int lines_a_product(int64_t num_rows, int64_t v_dim, int64_t lines_of_key) {
    int64_t products = 0;
    by_blocks(num_rows, [&](auto vectors, int64_t) { products += (kTileKeys + v_dim) / kBroadcasts<vectors>; });
    return static_cast<int>((kTileKeys * lines_of_key + products - 1) / products);
}

template <class Element, bool kScaled, class Operand = float>
void prefill(const Call &call, Task task, Tasks &tasks, float *memory, Partial result) {
    const Item &item = *task.item;
    const int64_t num_rows = item.num_tokens * call.group(), padded = rounded_up(num_rows, kLanes);
    const size_t k_bytes = call.layer.k_dim * sizeof(Element), v_bytes = call.layer.v_dim * sizeof(Element);
    const int lines = lines_a_product(num_rows, call.layer.v_dim, lines_of(k_bytes) + lines_of(v_bytes));
    const ScoreRule rule(call.layer);
    const Buffers buffers(memory, call.layer, num_rows, kPaired<Operand>);

    load_queries<Operand>(call, item, task.kv_head, rule.query_factor, buffers);
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
        if constexpr (kPaired<Operand>) {
            load_pairs(buffers, tile);
        } else {
            load_tile<Element, kScaled>(buffers, tile);
        }
        Ahead ahead(walk.next(), k_bytes, v_bytes);
        const bool masked = call.layer.window || tile.position[tile.count - 1] > item.q_position;
        const bool v_finite = !masked || all_finite<Operand>(buffers, tile.count);
        const Pass pass{call, buffers, rule, tile, v_finite, ahead, lines};
        by_blocks(num_rows, [&](auto vectors, int64_t first_row) { attend_block<vectors, Operand>(pass, first_row); });
    }
    hand_over(buffers, num_rows, result);
}

}  // namespace

Kernel prefill_kernel(const pagedkv_layer &layer) {
    switch (layer.kv_dtype) {
        case PAGEDKV_FLOAT32: return prefill<float, false>;
        case PAGEDKV_BFLOAT16:
            return takes_pairs(layer) ? prefill<BFloat16, false, Pair> : prefill<BFloat16, false>;
        case PAGEDKV_FLOAT16: return prefill<Float16, false>;
        case PAGEDKV_INT8: return prefill<int8_t, true>;
        case PAGEDKV_FP8_E4M3: return prefill<Fp8, true>;
        default: return nullptr;
    }
}

int64_t prefill_scratch(const pagedkv_layer &layer, int64_t rows) { return Buffers(nullptr, layer, rows, false).size; }

}  // namespace pagedkv
