// What one thread does at a time: an item of work, where its result goes, and the memory it works in.
#pragma once

#include <atomic>
#include <vector>

#include "abi.h"
#include "page_walk.h"
#include "pairs.h"

namespace pagedkv {

// Query heads of a KV head that the decode kernel takes; larger groups fill prefill's lanes as well.
constexpr int64_t kMaxDecodeGroup = 8;

// A tensor pointer with [row, head, channel] strides.
struct Rows {
    char *base;
    const int64_t *strides;
    int64_t element_size;

    char *at(int64_t row, int64_t head) const {
        return base + (row * strides[0] + head * strides[1]) * element_size;
    }
};

// Consecutive query tokens of one sequence, and a part of the keys they see; taken for one KV head at a time.
struct Item {
    int64_t q_row;          // of the first token
    int64_t q_position;     // of the first token
    int32_t num_tokens;
    bool decode;            // which kernel
    int64_t sequence;
    VisibleKeys keys;       // of all its tokens together
    int64_t begin, end;     // this item's part of the list of visible keys
    int64_t first_split;    // index of the first item of the same tokens, and how many there are
    int64_t num_splits;
    int64_t partial;        // where its partial result lies in the shared scratch, if num_splits > 1
};

// An item for one KV head; no item where there is nothing left to do.
struct Task {
    const Item *item;
    int64_t kv_head;
};

// One thread's way through the tasks of a call, which all threads take from one counter. A task can be looked at before
// it is taken, and is this thread's from then on: to be looked at shortly before the one in hand is done.
class Tasks {
  public:
    Tasks(const std::vector<Item> &items, int64_t num_kv_heads, std::atomic<int64_t> &counter)
        : items_(items), num_kv_heads_(num_kv_heads), counter_(counter) {}

    // Make sure of a task: done by all threads before the first begins, so that none finds its own looked at by another.
    void reserve() {
        if (claimed_ < 0) claimed_ = counter_.fetch_add(1, std::memory_order_relaxed);
    }
    Task upcoming() {
        reserve();
        looked_ = true;
        if (claimed_ >= static_cast<int64_t>(items_.size()) * num_kv_heads_) return {nullptr, 0};
        return {&items_[claimed_ / num_kv_heads_], claimed_ % num_kv_heads_};
    }
    Task take() {
        foreseen_ = looked_;
        const Task task = upcoming();
        looked_ = false;
        claimed_ = -1;
        return task;
    }
    // Whether the task in hand was looked at before.
    bool foreseen() const { return foreseen_; }

  private:
    const std::vector<Item> &items_;
    const int64_t num_kv_heads_;
    std::atomic<int64_t> &counter_;
    int64_t claimed_ = -1;
    bool looked_ = false, foreseen_ = false;
};

// An unfinished softmax over some keys for some query rows, one row a token and query head of the group:
// out = sum / weight. Channels are in the stored order of the pages' dtype.
struct Partial {
    float *sums;     // [rows, v_dim]
    float *largest;  // [rows], in base 2; -inf where nothing was seen
    float *weights;  // [rows]

    static int64_t size(int64_t rows, int64_t v_dim) { return rows * (v_dim + 2); }
    Partial(float *memory, int64_t rows, int64_t v_dim)
        : sums(memory), largest(memory + rows * v_dim), weights(largest + rows) {}
};

// Everything that stays the same during a call.
struct Call {
    const pagedkv_step &step;
    const pagedkv_layer &layer;
    Rows q, out;
    const char *k_pages, *v_pages;
    const float *k_scales, *v_scales;
    int64_t kv_element_size;

    int64_t group() const { return layer.num_q_heads / layer.num_kv_heads; }

    HeadPages head_pages(int64_t kv_head) const {
        const pagedkv_layer &l = layer;
        int64_t size = kv_element_size;
        return {k_pages + kv_head * l.k_strides[1] * size,
                v_pages + kv_head * l.v_strides[1] * size,
                k_scales ? k_scales + kv_head * l.k_scale_strides[1] : nullptr,
                v_scales ? v_scales + kv_head * l.v_scale_strides[1] : nullptr,
                l.k_strides[0] * size,
                l.k_strides[2] * size,
                l.v_strides[0] * size,
                l.v_strides[2] * size,
                l.k_scale_strides[0],
                l.k_scale_strides[2],
                l.v_scale_strides[0],
                l.v_scale_strides[2],
                l.page_size};
    }

    Table table(int64_t sequence) const {
        int64_t bytes = step.table_bits / 8 * step.table_row_stride * sequence;
        return {static_cast<const char *>(step.block_tables) + bytes, step.table_entry_stride, step.table_bits};
    }
};

// The queries of a row, fp32 times `factor`, in the stored order of the pages' dtype.
void read_query(const Call &call, int64_t row, int64_t head, float factor, float *to);

// Its bf16 as it is, in plain order.
void copy_query(const Call &call, int64_t row, int64_t head, BFloat16 *to);

// Whether a layer's K and V are multiplied in pairs (pairs.h): bf16 in whole vectors of them.
inline bool takes_pairs(const pagedkv_layer &layer) {
    return kPairProducts && layer.kv_dtype == PAGEDKV_BFLOAT16 && layer.k_dim % (2 * kLanes) == 0 &&
           layer.v_dim % (2 * kLanes) == 0;
}

// The two kernels: attend from the task's tokens with the query heads of its KV head to the task's keys. Both ask for the
// first keys of the task that comes after it in `tasks`.
//
// decode: one token, few query heads; dot products along the channels. Needs dims that are multiples of kLanes.
// prefill: any rows; one row a vector lane.
// `memory` holds decode_scratch() or prefill_scratch() floats.
using Kernel = void (*)(const Call &, Task, Tasks &tasks, float *memory, Partial result);

Kernel decode_kernel(const pagedkv_layer &layer);
int64_t decode_scratch(const pagedkv_layer &layer);
Kernel prefill_kernel(const pagedkv_layer &layer);
int64_t prefill_scratch(const pagedkv_layer &layer, int64_t rows);

}  // namespace pagedkv
