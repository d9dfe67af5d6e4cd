// Which keys some queries of a sequence see, and where their rows lie: the only code that reads block tables.
//
// Gives the visible keys of a range of queries as one list without gaps (sink tokens, then the window), and for a tile of
// that list the addresses of its K and V rows. A page that no query sees is never looked up, a slot past the
// sequence's end never pointed at.
#pragma once

#include <algorithm>

#include "abi.h"
#include "vectors.h"

namespace pagedkv {

// Keys handled at once: 64 rows of 64 fp32 channels are half a 32 KiB L1.
constexpr int kTileKeys = 64;

// Those that decode handles: also a multiple of three.
constexpr int kDecodeKeys = 48;

inline int64_t read_index(const void *base, int64_t index, int bits) {
    return bits == 32 ? static_cast<const int32_t *>(base)[index] : static_cast<const int64_t *>(base)[index];
}

// The keys that at least one of some neighbouring queries sees: positions [0, sinks) and [start, end), sinks <= start.
struct VisibleKeys {
    int64_t sinks;
    int64_t start;
    int64_t end;

    int64_t count() const { return sinks + end - start; }
    int64_t position(int64_t index) const { return index < sinks ? index : index - sinks + start; }
};

// Keys that queries at positions `first` to `last` see. A position below 0 sees nothing.
inline VisibleKeys visible_keys(const pagedkv_layer &layer, int64_t first, int64_t last) {
    if (last < 0) return {0, 0, 0};
    int64_t start = layer.window ? std::max<int64_t>(0, std::max<int64_t>(first, 0) - layer.window + 1) : 0;
    return {std::min(layer.num_sink_tokens, start), start, last + 1};
}

// A sequence's row of the block table.
struct Table {
    const void *entries;
    int64_t stride;
    int bits;

    int64_t page(int64_t block) const { return read_index(entries, block * stride, bits); }
};

// One KV head of a layer's page tensors. Addresses are computed in 64 bits, in bytes.
struct HeadPages {
    const char *k, *v;                // first row of page 0
    const float *k_scales, *v_scales; // likewise, or null
    int64_t k_page, k_slot, v_page, v_slot;
    int64_t k_scale_page, k_scale_slot, v_scale_page, v_scale_slot;
    int64_t page_size;
};

// Keys that lie in one page, one slot after the other.
struct Piece {
    int first, count;
};

// Up to kTileKeys consecutive visible keys, in pieces. Up to three rows of K past `count` repeat the last one, so that
// keys can be taken by three or four.
struct Tile {
    static constexpr int kRoom = kTileKeys + kLanes;  // the last vector of addresses or positions may stand over
    int count, num_pieces;
    Piece pieces[kTileKeys];
    const char *k[kRoom], *v[kRoom];
    const float *k_scale[kRoom], *v_scale[kRoom];
    int32_t position[kRoom];
};

// Set to[i] = first + i * stride bytes for i < count, and for up to a vector more.
template <class Pointee>
inline void fill_addresses(const Pointee **to, const Pointee *first, int64_t stride, int count) {
    using Addresses = int64_t __attribute__((vector_size(kVectorBytes)));
    constexpr int kTogether = kVectorBytes / sizeof(int64_t);
    Addresses addresses;
    for (int i = 0; i < kTogether; i++) addresses[i] = reinterpret_cast<int64_t>(first) + i * stride;
    for (int i = 0; i < count; i += kTogether, addresses += kTogether * stride) store(to + i, addresses);
}

// Likewise first, first + 1, ….
inline void fill_positions(int32_t *to, int64_t first, int count) {
    Ints positions;
    for (int i = 0; i < kLanes; i++) positions[i] = static_cast<int32_t>(first + i);
    for (int i = 0; i < count; i += kLanes, positions += kLanes) store(to + i, positions);
}

// Point `tile` at the visible keys `begin` to `end` of the list, at most kTileKeys of them.
template <bool kScaled>
inline void point_at(Tile &tile, const HeadPages &pages, const Table &table, const VisibleKeys &keys, int64_t begin,
                     int64_t end) {
    int filled = 0;
    tile.num_pieces = 0;
    while (begin < end) {
        int64_t position = keys.position(begin), block = position / pages.page_size;
        int64_t offset = position - block * pages.page_size;
        int64_t stop = begin < keys.sinks ? std::min(end, keys.sinks) : end;
        int run = static_cast<int>(std::min(stop - begin, pages.page_size - offset));
        int64_t page = table.page(block);
        const char *k = pages.k + page * pages.k_page + offset * pages.k_slot;
        const char *v = pages.v + page * pages.v_page + offset * pages.v_slot;
        fill_addresses(tile.k + filled, k, pages.k_slot, run);
        fill_addresses(tile.v + filled, v, pages.v_slot, run);
        fill_positions(tile.position + filled, position, run);
        if constexpr (kScaled) {
            const float *k_scale = pages.k_scales + page * pages.k_scale_page + offset * pages.k_scale_slot;
            const float *v_scale = pages.v_scales + page * pages.v_scale_page + offset * pages.v_scale_slot;
            __builtin_prefetch(k_scale);
            __builtin_prefetch(v_scale);
            fill_addresses(tile.k_scale + filled, k_scale, pages.k_scale_slot * sizeof(float), run);
            fill_addresses(tile.v_scale + filled, v_scale, pages.v_scale_slot * sizeof(float), run);
        }
        tile.pieces[tile.num_pieces++] = {filled, run};
        filled += run;
        begin += run;
    }
    tile.count = filled;
    for (int i = 0; i < 3 && filled < kTileKeys; i++, filled++) {
        tile.k[filled] = tile.k[filled - 1];
        tile.position[filled] = tile.position[filled - 1];
    }
}

}  // namespace pagedkv
