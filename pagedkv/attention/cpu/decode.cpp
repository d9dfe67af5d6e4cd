// Decode: one query token, all query heads of a KV head at once, so that K and V are read once for the group.
//
// Lanes are channels. Every tile of keys is walked twice: its K rows for the scores, four keys and a few heads in
// registers together, then its V rows for the weighted sums. Meanwhile the rows of the next tile are asked for, a line
// between every few multiply-adds; see docs/kernels.md.
#include "score_rule.h"
#include "work.h"

namespace pagedkv {
namespace {

// Query heads whose scores are summed in registers together, and keys for each: at most 12 sums with 16 registers.
constexpr int kScoreHeads = 4;
template <int kHeads>
constexpr int kScoreKeys = kHeads == 4 && kNumRegisters == 16 ? 2 : 4;

// Query heads whose outputs are, and pairs of channel vectors for each. With 16 registers three heads have 12 sums beside
// the weights only where no constant takes a register to widen an element (12 of bf16 spill, hot: 1.14x slower).
constexpr int kValueHeads = 4;
template <class Element>
constexpr bool kWidensPlainly = !std::is_same_v<Element, BFloat16> && !std::is_same_v<Element, Fp8>;
template <class Element, int kHeads>
constexpr int kValuePairs = kHeads == 1                              ? 4
                            : kHeads == 2 || kNumRegisters == 32     ? 2
                            : kHeads == 3 && kWidensPlainly<Element> ? 2
                                                                     : 1;

// sums[h][key] += query h . key, over one vector of channels: kHeads + kKeys loads for kHeads * kKeys multiply-adds.
template <int kHeads, int kKeys, class Widen>
inline void add_products(Floats (&sums)[kHeads][kKeys], const float *queries, int64_t dim, Widen widen_key) {
    // GCC would read four heads' queries again for every key (alone, group 4, 128 channels: fp32 1.2x, bf16 1.15x).
    constexpr bool kHold = kHeads == 4 && kNumRegisters == 16;
    Floats query[kHeads];
    for (int h = 0; h < kHeads; h++) {
        query[h] = load<Floats>(queries + h * dim);
        if constexpr (kHold) hold(query[h]);
    }
    for (int key = 0; key < kKeys; key++) {
        Floats channels = widen_key(key);
        if constexpr (kHold) hold(channels);
        for (int h = 0; h < kHeads; h++) sums[h][key] += channels * query[h];
    }
}

// scores[h][0..3] = query h . key 0..3, for heads 0 to kHeads - 1 and four rows of K, kScoreKeys at a time; with kAhead
// the four rows at `ahead` are asked for. A function of its own, as `add_values` is: inlined into the walk, GCC spills the
// sums (with the above, hot, group 3: fp32 1.1x, int8 1.2x).
template <class Element, int kHeads, bool kAhead>
[[gnu::noinline]] void four_scores(const float *queries, const char *const *rows, const char *const *ahead, int64_t dim,
                                   float *scores) {
    constexpr int kKeys = kScoreKeys<kHeads>;
    constexpr int64_t kPairBytes = 2 * kLanes * sizeof(Element);
    Floats all[kHeads][4];
    for (int first = 0; first < 4; first += kKeys) {
        const Element *keys[kKeys];
        for (int key = 0; key < kKeys; key++) keys[key] = reinterpret_cast<const Element *>(rows[first + key]);
        Floats sums[kHeads][kKeys] = {};
        int64_t i = 0;
        for (; i + 2 * kLanes <= dim; i += 2 * kLanes) {
            if constexpr (kAhead) {
                for (int key = 0; key < kKeys; key++) {
                    prefetch_part<kPairBytes>(ahead[first + key], i * sizeof(Element));
                }
            }
            add_products(sums, queries + i, dim, [&](int key) { return widen_half<0>(keys[key] + i); });
            add_products(sums, queries + i + kLanes, dim, [&](int key) { return widen_half<1>(keys[key] + i); });
        }
        if (i < dim) add_products(sums, queries + i, dim, [&](int key) { return widen(keys[key] + i); });
        for (int h = 0; h < kHeads; h++) {
            for (int key = 0; key < kKeys; key++) all[h][first + key] = sums[h][key];
        }
    }
    for (int h = 0; h < kHeads; h++) {
        Floats totals = four_sums(all[h][0], all[h][1], all[h][2], all[h][3]);
        std::memcpy(scores + h * kTileKeys, &totals, 4 * sizeof(float));
    }
}

// Call `body` with 1 to kMost heads as a constant, until all are done; rather two and two than three and one.
template <int kMost, class Body>
inline void by_heads(int num_heads, Body body) {
    for (int h = 0; h < num_heads;) {
        const int left = num_heads - h;
        const int count = left > kMost ? (left == kMost + 1 ? kMost - 1 : kMost) : left;
        if (count == 4) {
            if constexpr (kMost >= 4) body(std::integral_constant<int, 4>{}, h);
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

// Scores of a tile for all heads, four keys at a time so that their rows stay in L1 for every head; asks for the rows of
// the next tile's K meanwhile.
template <class Element>
void tile_scores(const float *queries, int num_heads, const Tile &tile, const Tile *next, int64_t dim, float *scores) {
    for (int key = 0; key < tile.count; key += 4) {
        by_heads<kScoreHeads>(num_heads, [&](auto heads, int h) {
            const float *own = queries + h * dim;
            float *to = scores + h * kTileKeys + key;
            if (next && h == 0) {
                four_scores<Element, heads, true>(own, tile.k + key, next->k + key, dim, to);
            } else {
                four_scores<Element, heads, false>(own, tile.k + key, nullptr, dim, to);
            }
        });
    }
}

// sums[h] = sums[h] * corrections[h] + weights[h] . V, for kHeads heads and 2 * kPairs vectors of channels at `offset`;
// with kAhead the same channels of `next` are asked for.
template <class Element, int kHeads, int kPairs, bool kAhead>
[[gnu::noinline]] void add_values(float *sums, const float *corrections, const float *weights, const Tile &tile,
                                  const Tile *next, int64_t dim, int64_t offset) {
    Floats added[kHeads][2 * kPairs];
    for (int h = 0; h < kHeads; h++) {
        for (int i = 0; i < 2 * kPairs; i++) added[h][i] = Floats{};
    }
    int key = 0;
    // A loop that may run no time would have GCC clear the sums in memory first (hot, group 4: 1.05x).
    do {
        if constexpr (kAhead) {
            prefetch_part<kPairs * 2 * kLanes * sizeof(Element)>(next->v[key], offset * sizeof(Element));
        }
        const Element *row = reinterpret_cast<const Element *>(tile.v[key]) + offset;
        for (int pair = 0; pair < kPairs; pair++) {
            const Floats first = widen_half<0>(row + pair * 2 * kLanes);
            for (int h = 0; h < kHeads; h++) added[h][2 * pair] += weights[h * kTileKeys + key] * first;
            const Floats second = widen_half<1>(row + pair * 2 * kLanes);
            for (int h = 0; h < kHeads; h++) added[h][2 * pair + 1] += weights[h * kTileKeys + key] * second;
        }
    } while (++key < tile.count);
    for (int h = 0; h < kHeads; h++) {
        float *to = sums + h * dim + offset;
        for (int i = 0; i < 2 * kPairs; i++, to += kLanes) store(to, load<Floats>(to) * corrections[h] + added[h][i]);
    }
}

// The same for a last single vector of channels.
template <class Element, int kHeads>
void add_last_values(float *sums, const float *corrections, const float *weights, const Tile &tile, int64_t dim,
                     int64_t offset) {
    Floats added[kHeads] = {};
    for (int key = 0; key < tile.count; key++) {
        Floats channels = widen(reinterpret_cast<const Element *>(tile.v[key]) + offset);
        for (int h = 0; h < kHeads; h++) added[h] += weights[h * kTileKeys + key] * channels;
    }
    for (int h = 0; h < kHeads; h++) {
        float *to = sums + h * dim + offset;
        store(to, load<Floats>(to) * corrections[h] + added[h]);
    }
}

template <class Element, int kHeads, bool kAhead>
void tile_values(float *sums, const float *corrections, const float *weights, const Tile &tile, const Tile *next,
                 int64_t dim) {
    constexpr int kPairs = kValuePairs<Element, kHeads>;
    int64_t offset = 0;
    for (; offset + kPairs * 2 * kLanes <= dim; offset += kPairs * 2 * kLanes) {
        add_values<Element, kHeads, kPairs, kAhead>(sums, corrections, weights, tile, next, dim, offset);
    }
    for (; offset + 2 * kLanes <= dim; offset += 2 * kLanes) {
        add_values<Element, kHeads, 1, kAhead>(sums, corrections, weights, tile, next, dim, offset);
    }
    if (offset < dim) add_last_values<Element, kHeads>(sums, corrections, weights, tile, dim, offset);
}

// What turns one head's products of a tile into weights.
struct HeadRule {
    ScoreRule rule;
    float slope;  // ALiBi, in base 2
    int64_t q_position;
};

// scores [count] become weights 2^(score - largest); updates the running softmax of the head. Returns the factor for
// what was summed before.
inline float weigh(float *scores, const Tile &tile, const float *k_scales, const HeadRule &head, float &largest,
                   float &weight) {
    Ints lane;
    for (int i = 0; i < kLanes; i++) lane[i] = i;
    Floats top = splat(largest);
    for (int key = 0; key < tile.count; key += kLanes) {
        Floats score = load<Floats>(scores + key);
        if (k_scales) score *= load<Floats>(k_scales + key);
        score = head.rule.capped(score);
        if (head.slope != 0) {
            Ints distance = load<Ints>(tile.position + key) - static_cast<int32_t>(head.q_position);
            score += head.slope * __builtin_convertvector(distance, Floats);
        }
        score = lane + key < tile.count ? score : splat(kMinusInfinity);
        store(scores + key, score);
        top = larger(top, score);
    }
    float now = largest_of(top);
    Floats floor = finite_floor(splat(now)), sum = {};
    for (int key = 0; key < tile.count; key += kLanes) {
        Floats part = exp2_of(load<Floats>(scores + key) - floor);
        store(scores + key, part);
        sum += part;
    }
    float correction = exp2_of(largest - floor[0]);
    largest = now;
    weight = weight * correction + sum_of(sum);
    return correction;
}

inline void read_scales(float *to, const float *const *from, int count) {
    for (int key = 0; key < count; key++) to[key] = *from[key];
}

template <class Element, bool kScaled>
void decode(const Call &call, const Item &item, int64_t kv_head, float *queries, Partial result) {
    const pagedkv_layer &layer = call.layer;
    const int64_t k_dim = layer.k_dim, v_dim = layer.v_dim, first_head = kv_head * call.group();
    const int group = static_cast<int>(call.group());
    const HeadPages pages = call.head_pages(kv_head);
    const Table table = call.table(item.sequence);
    const ScoreRule rule(layer);

    Tile tiles[2];
    auto point = [&](Tile &tile, int64_t begin) {
        point_at<kScaled>(tile, pages, table, item.keys, begin, std::min(begin + kTileKeys, item.end));
    };
    point(tiles[0], item.begin);
    for (int key = 0; key < tiles[0].count; key++) prefetch_row(tiles[0].k[key], k_dim * sizeof(Element));

    for (int h = 0; h < group; h++) {
        read_query(call, item.q_row, first_head + h, rule.query_factor, queries + h * k_dim);
        result.largest[h] = kMinusInfinity;
        result.weights[h] = 0;
    }
    std::fill_n(result.sums, group * v_dim, 0.0f);

    alignas(64) float scores[kMaxDecodeGroup * kTileKeys] = {};
    alignas(64) float k_scales[kTileKeys] = {}, v_scales[kTileKeys] = {};
    float corrections[kMaxDecodeGroup];
    for (int64_t begin = item.begin, turn = 0; begin < item.end; begin += kTileKeys, turn ^= 1) {
        const Tile &tile = tiles[turn];
        Tile *next = nullptr;
        if (begin + kTileKeys < item.end) {
            next = &tiles[turn ^ 1];
            point(*next, begin + kTileKeys);
            // A shorter last tile is walked with this one's count.
            for (int key = next->count; key < kTileKeys; key++) next->k[key] = next->v[key] = next->k[next->count - 1];
        }
        if constexpr (kScaled) {
            read_scales(k_scales, tile.k_scale, tile.count);
            read_scales(v_scales, tile.v_scale, tile.count);
        }
        tile_scores<Element>(queries, group, tile, next, k_dim, scores);
        for (int h = 0; h < group; h++) {
            HeadRule head{rule, layer.alibi_slopes ? layer.alibi_slopes[first_head + h] * kLog2E : 0, item.q_position};
            float *weights = scores + h * kTileKeys;
            corrections[h] =
                weigh(weights, tile, kScaled ? k_scales : nullptr, head, result.largest[h], result.weights[h]);
            if constexpr (kScaled) {
                for (int key = 0; key < tile.count; key++) weights[key] *= v_scales[key];
            }
        }
        by_heads<kValueHeads>(group, [&](auto heads, int h) {
            float *sums = result.sums + h * v_dim;
            const float *factors = corrections + h, *weights = scores + h * kTileKeys;
            if (next && h == 0) {
                tile_values<Element, heads, true>(sums, factors, weights, tile, next, v_dim);
            } else {
                tile_values<Element, heads, false>(sums, factors, weights, tile, nullptr, v_dim);
            }
        });
    }
}

}  // namespace

DecodeKernel decode_kernel(int32_t kv_dtype) {
    switch (kv_dtype) {
        case PAGEDKV_FLOAT32: return decode<float, false>;
        case PAGEDKV_BFLOAT16: return decode<BFloat16, false>;
        case PAGEDKV_FLOAT16: return decode<Float16, false>;
        case PAGEDKV_INT8: return decode<int8_t, true>;
        case PAGEDKV_FP8_E4M3: return decode<Fp8, true>;
        default: return nullptr;
    }
}

int64_t decode_scratch(const pagedkv_layer &layer) { return layer.num_q_heads / layer.num_kv_heads * layer.k_dim; }

}  // namespace pagedkv
