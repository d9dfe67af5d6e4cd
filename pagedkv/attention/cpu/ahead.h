// Asking for the rows of a tile before they are used.
//
// What is asked for in the order of addresses arrives at nearly the speed of reading, however it is used afterwards:
// the processor's own prefetching takes up the thread. Asked for in the order of use (three rows in turn for K, a column
// of a tile for V) it came at two thirds of that (Zen 3, 16 KB pieces scattered over 400 MB, 8 multiply-adds a line:
// columns 8.8 against 13.7 GB/s), in bursts of 16 lines at three quarters, for dozens at once are more than a core keeps.
#pragma once

#include "page_walk.h"

namespace pagedkv {

constexpr int kLineBytes = 64;

constexpr int lines_of(size_t bytes) { return static_cast<int>((bytes + kLineBytes - 1) / kLineBytes); }

// Lines, in the order of addresses, of the K rows of a tile and then of its V rows.
class Ahead {
  public:
    Ahead(const Tile &tile, int64_t k_bytes, int64_t v_bytes) {
        add(tile, tile.k, k_bytes);
        add(tile, tile.v, v_bytes);
        turn();
    }

    // Where the asking stands; a copy of its own for a loop, so that it stays in registers.
    struct Place {
        const char *at, *end;
    };
    Place place() const { return place_; }
    void settle(Place place) { place_ = place; }

    // Ask for the line that is `line` lines on, into L2 (hint T1), where it does not push the tile in use out of L1.
    static void ask(Place place, int line) { __builtin_prefetch(place.at + line * kLineBytes, 0, 2); }

    // Move on by `lines`. After the last line it begins again: asking for what is on its way costs no traffic.
    void pass(Place &place, int lines) {
        place.at += lines * kLineBytes;
        if (place.at >= place.end) {
            turn();
            place = place_;
        }
    }

    // Ask for the next `lines` lines, over as many runs as it takes: for prefill, where hundreds of multiply-adds follow
    // each time, so that its bursts (up to 26 lines) have time to arrive.
    void ask_for(int lines) {
        while (lines > 0) {
            const int here = std::min(lines, lines_of(place_.end - place_.at));
            for (int line = 0; line < here; line++) ask(place_, line);
            pass(place_, here);
            lines -= here;
        }
    }

  private:
    void add(const Tile &tile, const char *const *rows, int64_t row_bytes) {
        for (int i = 0; i < tile.num_pieces; i++) {
            const auto [first, count] = tile.pieces[i];
            const bool together = count == 1 || rows[first + 1] - rows[first] == row_bytes;
            for (int row = first; row < first + count; row += together ? count : 1) {
                runs_[num_runs_++] = {rows[row], rows[row] + row_bytes * (together ? count : 1)};
            }
        }
    }
    [[gnu::noinline]] void turn() {
        place_ = runs_[next_run_];
        next_run_ = next_run_ + 1 == num_runs_ ? 0 : next_run_ + 1;
    }

    Place place_;
    int num_runs_ = 0, next_run_ = 0;
    Place runs_[2 * kTileKeys];
};

// Ask for all rows of K of a tile at once, where nothing was asked for before.
inline void ask_for_keys(const Tile &tile, int64_t row_bytes) {
    for (int key = 0; key < tile.count; key++) {
        for (int64_t i = 0; i < row_bytes; i += kLineBytes) __builtin_prefetch(tile.k[key] + i, 0, 2);
    }
}

}  // namespace pagedkv
