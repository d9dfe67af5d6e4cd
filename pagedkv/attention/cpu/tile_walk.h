// A task's keys, tile after tile, with a look at the tile that comes next.
#pragma once

#include "work.h"

namespace pagedkv {

// Tiles of at most kMostKeys keys. The next one of a task's last tile is the first of the thread's next task.
template <bool kScaled, int kMostKeys>
class TileWalk {
  public:
    TileWalk(const Call &call, Task task, Tasks &tasks)
        : call_(call), task_(task), tasks_(tasks), begin_(task.item->begin) {
        if (more()) point(*tile_, task_, begin_);
    }
    TileWalk(const TileWalk &) = delete;

    bool more() const { return begin_ < task_.item->end; }
    const Tile &tile() const { return *tile_; }

    // Look at the next tile, once for each and before `step` goes there. The tile itself where nothing comes after it.
    const Tile &next() {
        if (begin_ + kMostKeys < task_.item->end) {
            point(*next_, task_, begin_ + kMostKeys);
            return *next_;
        }
        const Task after = tasks_.upcoming();
        if (!after.item || after.item->begin >= after.item->end) return *tile_;
        point(*next_, after, after.item->begin);
        return *next_;
    }
    void step() {
        begin_ += kMostKeys;
        std::swap(tile_, next_);
    }

  private:
    void point(Tile &tile, Task task, int64_t begin) {
        const Item &item = *task.item;
        point_at<kScaled>(tile, call_.head_pages(task.kv_head), call_.table(item.sequence), item.keys, begin,
                          std::min(begin + kMostKeys, item.end));
    }

    const Call &call_;
    const Task task_;
    Tasks &tasks_;
    int64_t begin_;
    Tile tiles_[2];
    Tile *tile_ = &tiles_[0], *next_ = &tiles_[1];
};

}  // namespace pagedkv
