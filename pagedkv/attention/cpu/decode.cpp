// Decode: one query token, all query heads of a KV head at once, so that K and V are read once for the group.
//
// Lanes are channels. A tile of keys is walked twice for up to four heads: its K rows for the scores, three keys and the
// heads in registers together, then its V rows for the weighted sums. Meanwhile the rows of the next tile are asked for,
// and at the end those of the next task; see docs/kernels.md.
//
// bf16 is multiplied in pairs where the processor can (pairs.h): pairs of channels for the scores, of keys for the sums.
//
// Where another thread shares the core, the loops below are bound by instructions fetched, not by multiply-adds: they are
// written for few instructions, and unrolled so that it matters little where they fall in memory.
#include "ahead.h"
#include "pairs.h"
#include "score_rule.h"
#include "tile_walk.h"

namespace pagedkv {
namespace {

// Query heads taken together.
constexpr int kMostHeads = 4;

// Queries are fp32, or bf16 as they came, for products of pairs.
template <class Query>
constexpr bool kPairedQuery = std::is_same_v<Query, BFloat16>;

// Scores and weights of a tile stand key by key, a slot a head: then a vector holds whole keys, softmax needs no shuffles
// but at the end, and what is for a head is in lanes of equal (lane % kSlots). Three heads leave a slot empty.
template <int kHeads>
constexpr int kSlots = kHeads == 3 ? 4 : kHeads;

// Keys whose scores are summed in registers together: 12 sums with 16 registers leave room for their keys (alone, group 4
// of 128 channels, a busy neighbour on the core, against two keys: fp32, bf16 and int8 1.25x).
template <int kHeads>
constexpr int kScoreKeys = kHeads == 4 && kNumRegisters == 16 ? 3 : 4;
static_assert(kDecodeKeys % 12 == 0 && kDecodeKeys <= kTileKeys);

// Vectors of channels whose outputs are. Three heads by four vectors would fit in 16 registers too, but ask for lines in
// longer bursts (fp32 cold, group 3: 0.9x).
template <int kHeads>
constexpr int kValueVectors = kHeads == 1 ? 8 : kHeads == 2 || kNumRegisters == 32 ? 4 : 2;

// Vector number `i` of a block of kVectors: halves of pairs, or a row's last one.
template <int kVectors, class Element>
inline Floats channels(const Element *block, int i) {
    if constexpr (kVectors == 1) return widen(block);
    const Element *pair = block + i / 2 * 2 * kLanes;
    return i % 2 ? widen_half<1>(pair) : widen_half<0>(pair);
}

// sums[key][h] += query h . key, over one vector of channels: kHeads + kKeys loads for kHeads * kKeys multiply-adds.
template <int kHeads, int kKeys, class Widen>
inline void add_products(Floats (&sums)[kKeys][kSlots<kHeads>], const float *queries, int64_t dim, Widen widen_key) {
    Floats keys[kKeys];
    for (int key = 0; key < kKeys; key++) {
        keys[key] = widen_key(key);
        // GCC would read the keys again for every head.
        if constexpr (kHeads == 4) hold(keys[key]);
    }
    for (int h = 0; h < kHeads; h++) {
        Floats query = load<Floats>(queries + h * dim);
        for (int key = 0; key < kKeys; key++) sums[key][h] += keys[key] * query;
    }
}

// The same over pairs of channels, two vectors of them.
template <int kHeads, int kKeys>
inline void add_products(Floats (&sums)[kKeys][kSlots<kHeads>], const BFloat16 *queries, int64_t dim,
                         const BFloat16 *const (&rows)[kKeys], int64_t i) {
    Words keys[kKeys];
    for (int key = 0; key < kKeys; key++) keys[key] = load<Words>(rows[key] + i);
    for (int h = 0; h < kHeads; h++) {
        const Words query = load<Words>(queries + h * dim + i);
        for (int key = 0; key < kKeys; key++) sums[key][h] = add_pair_products(sums[key][h], keys[key], query);
    }
}

// scores[key][h] = query h . key, for kHeads heads and all keys of a tile. A function of its own, as `add_values` is:
// inlined into the walk, GCC spills the sums.
template <class Element, class Query, int kHeads>
[[gnu::noinline]] void tile_scores(const Query *queries, const Tile &tile, int64_t dim, Ahead &ahead, float *scores) {
    constexpr int kKeys = kScoreKeys<kHeads>, kPair = 2 * kLanes;
    constexpr int kLines = lines_of(kKeys * kPair * sizeof(Element));
    Ahead::Place place = ahead.place();
    for (int first = 0; first < tile.count; first += kKeys) {
        const Element *keys[kKeys];
        for (int key = 0; key < kKeys; key++) keys[key] = reinterpret_cast<const Element *>(tile.k[first + key]);
        Floats sums[kKeys][kSlots<kHeads>];
        for (auto &of_key : sums) {
            for (Floats &sum : of_key) sum = Floats{};
        }
        int64_t i = 0;
        for (; i + kPair <= dim; i += kPair) {
            for (int line = 0; line < kLines; line++) Ahead::ask(place, line);
            if constexpr (kPairedQuery<Query>) {
                add_products<kHeads, kKeys>(sums, queries, dim, keys, i);
            } else {
                add_products<kHeads, kKeys>(sums, queries + i, dim, [&](int key) { return widen_half<0>(keys[key] + i); });
                add_products<kHeads, kKeys>(sums, queries + i + kLanes, dim,
                                            [&](int key) { return widen_half<1>(keys[key] + i); });
            }
            ahead.pass(place, kLines);
        }
        if constexpr (!kPairedQuery<Query>) {
            if (i < dim) {
                add_products<kHeads, kKeys>(sums, queries + i, dim, [&](int key) { return widen(keys[key] + i); });
            }
        }
        const Floats *flat = &sums[0][0];
        for (int slot = 0; slot < kKeys * kSlots<kHeads>; slot += 4) {
            const Floats totals = four_sums(flat[slot], flat[slot + 1], flat[slot + 2], flat[slot + 3]);
            std::memcpy(scores + first * kSlots<kHeads> + slot, &totals, 4 * sizeof(float));
        }
    }
    ahead.settle(place);
}

// Call `body` with 1 to kMostHeads heads as a constant, until all are done; rather three and two than four and one.
template <class Body>
inline void by_heads(int num_heads, Body body) {
    for (int h = 0; h < num_heads;) {
        const int left = num_heads - h;
        const int count = left == kMostHeads + 1 ? kMostHeads - 1 : std::min(left, kMostHeads);
        if (count == 4) {
            body(std::integral_constant<int, 4>{}, h);
        } else if (count == 3) {
            body(std::integral_constant<int, 3>{}, h);
        } else if (count == 2) {
            body(std::integral_constant<int, 2>{}, h);
        } else {
            body(std::integral_constant<int, 1>{}, h);
        }
        h += count;
    }
}

// sums[h] = sums[h] * corrections[h] + weights[.][h] . V, in blocks of kVectors vectors of channels from `offset` on;
// returns where no block is left.
template <class Element, int kHeads, int kVectors>
[[gnu::noinline]] int64_t add_values(float *sums, const float *corrections, const float *weights, const Tile &tile,
                                     int64_t dim, int64_t offset, Ahead &ahead) {
    constexpr int kBlock = kVectors * kLanes, kKeys = 4;
    constexpr int kLines = lines_of(kKeys * kBlock * sizeof(Element));
    Ahead::Place place = ahead.place();
    for (; offset + kBlock <= dim; offset += kBlock) {
        Floats added[kHeads][kVectors];
        for (auto &of_head : added) {
            for (Floats &sum : of_head) sum = Floats{};
        }
        auto add = [&](int key) {
            const Element *row = reinterpret_cast<const Element *>(tile.v[key]) + offset;
            const float *own = weights + key * kSlots<kHeads>;
            for (int i = 0; i < kVectors; i++) {
                const Floats part = channels<kVectors>(row, i);
                for (int h = 0; h < kHeads; h++) added[h][i] += own[h] * part;
            }
        };
        int key = 0;
        for (; key + kKeys <= tile.count; key += kKeys) {
            for (int i = 0; i < kKeys; i++) {
                for (int line = i; line < kLines; line += kKeys) Ahead::ask(place, line);
                add(key + i);
            }
            ahead.pass(place, kLines);
        }
        for (; key < tile.count; key++) add(key);
        for (int h = 0; h < kHeads; h++) {
            float *to = sums + h * dim + offset;
            for (int i = 0; i < kVectors; i++, to += kLanes) {
                store(to, load<Floats>(to) * corrections[h] + added[h][i]);
            }
        }
    }
    ahead.settle(place);
    return offset;
}

// weights [key][slot] of even keys become pairs of themselves and the next key's, 0 after the last.
template <int kHeads>
void pair_weights(float *weights, int count) {
    static_assert(!kPairProducts || 2 * kSlots<kHeads> <= kLanes);
    for (int i = 0; i < count * kSlots<kHeads>; i += kLanes) {
        const Floats own = load<Floats>(weights + i);
        store(weights + i, round_to_pairs(own, pick(own, own, swapped<kSlots<kHeads>>(EveryLane{}))));
    }
}

// The same from pairs of keys: all channels, two vectors at a time, which leaves them in stored order.
template <int kHeads>
[[gnu::noinline]] void add_paired_values(float *sums, const float *corrections, const float *pairs, const Tile &tile,
                                         int64_t dim, Ahead &ahead) {
    constexpr int kBlock = 2 * kLanes, kKeys = 4;
    constexpr int kLines = lines_of(kKeys * kBlock * sizeof(BFloat16));
    Ahead::Place place = ahead.place();
    for (int64_t offset = 0; offset < dim; offset += kBlock) {
        Floats even[kHeads] = {}, odd[kHeads] = {};
        auto row = [&](int key) { return load<Words>(reinterpret_cast<const BFloat16 *>(tile.v[key]) + offset); };
        auto add = [&](int key, Words second) {
            const Words first = row(key);
            const Words evens = even_pairs(first, second), odds = odd_pairs(first, second);
            for (int h = 0; h < kHeads; h++) {
                uint32_t weights;
                std::memcpy(&weights, pairs + key * kSlots<kHeads> + h, sizeof weights);
                even[h] = add_product(even[h], weights, evens);
                odd[h] = add_product(odd[h], weights, odds);
            }
        };
        int key = 0;
        for (; key + kKeys <= tile.count; key += kKeys) {
            for (int line = 0; line < kLines; line++) Ahead::ask(place, line);
            add(key, row(key + 1));
            add(key + 2, row(key + 3));
            ahead.pass(place, kLines);
        }
        for (; key + 1 < tile.count; key += 2) add(key, row(key + 1));
        if (key < tile.count) add(key, Words{});
        for (int h = 0; h < kHeads; h++) {
            float *to = sums + h * dim + offset;
            store(to, load<Floats>(to) * corrections[h] + even[h]);
            store(to + kLanes, load<Floats>(to + kLanes) * corrections[h] + odd[h]);
        }
    }
    ahead.settle(place);
}

template <class Element, int kHeads>
void tile_values(float *sums, const float *corrections, const float *weights, const Tile &tile, int64_t dim,
                 Ahead &ahead) {
    constexpr int kVectors = kValueVectors<kHeads>;
    int64_t offset = add_values<Element, kHeads, kVectors>(sums, corrections, weights, tile, dim, 0, ahead);
    if constexpr (kVectors > 2) {
        offset = add_values<Element, kHeads, 2>(sums, corrections, weights, tile, dim, offset, ahead);
    }
    if (offset < dim) add_values<Element, kHeads, 1>(sums, corrections, weights, tile, dim, offset, ahead);
}

// The factor of the key in each lane, from the factors of as many keys.
template <int kSlots, int... kLane>
constexpr auto key_of_lane(std::integer_sequence<int, kLane...>) {
    return std::integer_sequence<int, kLane / kSlots...>{};
}

// values[key][slot] *= factors[key]
template <int kHeads>
void scale_keys(float *values, const float *const *factors, const Tile &tile) {
    alignas(64) float own[kDecodeKeys + kLanes];
    for (int piece = 0; piece < tile.num_pieces; piece++) {
        const auto [first, count] = tile.pieces[piece];
        if (count > 1 && factors[first + 1] - factors[first] == 1) {
            std::copy_n(factors[first], count, own + first);
        } else {
            for (int key = first; key < first + count; key++) own[key] = *factors[key];
        }
    }
    std::fill_n(own + tile.count, kLanes, 0.0f);
    for (int i = 0; i < tile.count * kSlots<kHeads>; i += kLanes) {
        const Floats keys = load<Floats>(own + i / kSlots<kHeads>);
        store(values + i, load<Floats>(values + i) * pick(keys, keys, key_of_lane<kSlots<kHeads>>(EveryLane{})));
    }
}

// The running softmax of up to four heads, a head in lanes of equal (lane % kSlots).
struct Softmax {
    Floats largest = splat(kMinusInfinity), weight = {};
};

// What turns products of queries with keys into scores, for the heads taken together.
struct HeadRule {
    const ScoreRule &rule;
    const float *slopes;  // ALiBi, of the first of the heads; or null
    int64_t q_position;
};

template <int kHeads>
void bend_scores(float *scores, const Tile &tile, const HeadRule &head) {
    if (head.rule.softcap > 0) {
        for (int i = 0; i < tile.count * kSlots<kHeads>; i += kLanes) {
            store(scores + i, head.rule.capped(load<Floats>(scores + i)));
        }
    }
    if (!head.slopes) return;
    for (int key = 0; key < tile.count; key++) {
        const float distance = static_cast<float>(tile.position[key] - static_cast<int32_t>(head.q_position));
        for (int h = 0; h < kHeads; h++) scores[key * kSlots<kHeads> + h] += head.slopes[h] * kLog2E * distance;
    }
}

// scores [count] become weights 2^(score - largest), of key after key; updates the softmax. Returns the factors for what
// was summed before, in the lanes of their heads.
template <int kHeads>
Floats weigh(float *scores, int count, Softmax &softmax) {
    Ints lane;
    for (int i = 0; i < kLanes; i++) lane[i] = i;
    const int last = (count - 1) / kLanes * kLanes;
    store(scores + last, lane + last < count ? load<Floats>(scores + last) : splat(kMinusInfinity));
    Floats top = softmax.largest;
    for (int i = 0; i < count; i += kLanes) top = larger(top, load<Floats>(scores + i));
    top = fold_largest<kSlots<kHeads>>(top);
    const Floats floor = finite_floor(top);
    Floats sum = {};
    for (int i = 0; i < count; i += kLanes) {
        const Floats part = exp2_of(load<Floats>(scores + i) - floor);
        store(scores + i, part);
        sum += part;
    }
    const Floats correction = exp2_of(softmax.largest - floor);
    softmax.largest = top;
    softmax.weight = softmax.weight * correction + fold<kSlots<kHeads>>(sum);
    return correction;
}

// What attends to a tile: kHeads query heads and their state.
template <class Query>
struct Heads {
    const Query *queries;
    float *sums;
    Softmax &softmax;
    HeadRule rule;
};

template <class Element, bool kScaled, int kHeads, class Query>
void attend_tile(const Heads<Query> &heads, const Tile &tile, int64_t k_dim, int64_t v_dim, Ahead &ahead) {
    alignas(64) float scores[kDecodeKeys * kSlots<kHeads>];
    alignas(64) float corrections[kLanes];
    const int count = tile.count * kSlots<kHeads>;
    tile_scores<Element, Query, kHeads>(heads.queries, tile, k_dim, ahead, scores);
    if constexpr (kPairedQuery<Query>) {
        for (int i = 0; i < count; i += kLanes) {
            store(scores + i, load<Floats>(scores + i) * heads.rule.rule.query_factor);
        }
    }
    if constexpr (kScaled) scale_keys<kHeads>(scores, tile.k_scale, tile);
    bend_scores<kHeads>(scores, tile, heads.rule);
    store(corrections, weigh<kHeads>(scores, count, heads.softmax));
    if constexpr (kScaled) scale_keys<kHeads>(scores, tile.v_scale, tile);
    if constexpr (kPairedQuery<Query>) {
        pair_weights<kHeads>(scores, tile.count);
        add_paired_values<kHeads>(heads.sums, corrections, scores, tile, v_dim, ahead);
    } else {
        tile_values<Element, kHeads>(heads.sums, corrections, scores, tile, v_dim, ahead);
    }
}

template <class Element, bool kScaled, class Query = float>
void decode(const Call &call, Task task, Tasks &tasks, float *memory, Partial result) {
    const pagedkv_layer &layer = call.layer;
    const Item &item = *task.item;
    const int64_t k_dim = layer.k_dim, v_dim = layer.v_dim, first_head = task.kv_head * call.group();
    const int group = static_cast<int>(call.group());
    const ScoreRule rule(layer);

    Softmax softmax[kMaxDecodeGroup];  // of the heads taken together, at the first of them
    Query *queries = reinterpret_cast<Query *>(memory);
    for (int h = 0; h < group; h++) {
        if constexpr (kPairedQuery<Query>) {
            copy_query(call, item.q_row, first_head + h, queries + h * k_dim);
        } else {
            read_query(call, item.q_row, first_head + h, rule.query_factor, queries + h * k_dim);
        }
    }
    std::fill_n(result.sums, group * v_dim, 0.0f);

    TileWalk<kScaled, kDecodeKeys> walk(call, task, tasks);
    if (walk.more() && !tasks.foreseen()) ask_for_keys(walk.tile(), k_dim * sizeof(Element));
    for (; walk.more(); walk.step()) {
        Ahead ahead(walk.next(), k_dim * sizeof(Element), v_dim * sizeof(Element));
        by_heads(group, [&](auto heads, int h) {
            const float *slopes = layer.alibi_slopes ? layer.alibi_slopes + first_head + h : nullptr;
            attend_tile<Element, kScaled, heads, Query>(
                {queries + h * k_dim, result.sums + h * v_dim, softmax[h], {rule, slopes, item.q_position}}, walk.tile(),
                k_dim, v_dim, ahead);
        });
    }
    by_heads(group, [&](auto heads, int h) {
        for (int i = 0; i < heads; i++) {
            result.largest[h + i] = softmax[h].largest[i];
            result.weights[h + i] = softmax[h].weight[i];
        }
    });
}

}  // namespace

Kernel decode_kernel(const pagedkv_layer &layer) {
    switch (layer.kv_dtype) {
        case PAGEDKV_FLOAT32: return decode<float, false>;
        case PAGEDKV_BFLOAT16:
            return takes_pairs(layer) ? decode<BFloat16, false, BFloat16> : decode<BFloat16, false>;
        case PAGEDKV_FLOAT16: return decode<Float16, false>;
        case PAGEDKV_INT8: return decode<int8_t, true>;
        case PAGEDKV_FP8_E4M3: return decode<Fp8, true>;
        default: return nullptr;
    }
}

int64_t decode_scratch(const pagedkv_layer &layer) { return layer.num_q_heads / layer.num_kv_heads * layer.k_dim; }

}  // namespace pagedkv
