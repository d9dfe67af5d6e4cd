// `pagedkv_attend`: cuts a step into items of work, runs them on OpenMP's threads, joins the parts.
//
// Which kernel, tile and split a sequence gets follows from its own q_len and kv_len and the layer, never from the other
// sequences or the number of threads, and parts are joined in order: a row's bits depend on its own sequence alone.
#include <atomic>
#include <vector>

#include "scratch.h"
#include "softmax.h"
#include "work.h"

namespace pagedkv {
namespace {

// Query rows (tokens times group) of a prefill item. A tile is widened once an item, so few rows waste that; many leave
// fewer items to share out and more of the diagonal in one item.
constexpr int64_t kItemRows = 96;

// Keys of a split are kSplitParts-th parts of what is seen, within these bounds, in whole tiles: short contexts on few
// heads still occupy several threads, long ones stream long runs.
constexpr int64_t kSplitParts = 8, kShortestSplit = 128, kLongestSplit = 1024;

// Below this many multiply-adds the calling thread works alone. Two threads that are awake pay early: one sequence with
// 9 query heads of 64 channels gains 1.2x at 64 keys (73,000 multiply-adds) and 1.35x at 192.
constexpr int64_t kSerialWork = 32768;

int64_t split_keys(int64_t visible, bool decode) {
    const int64_t tile = decode ? kDecodeKeys : kTileKeys;
    const int64_t part = std::clamp(visible / kSplitParts, kShortestSplit, kLongestSplit);
    return (part + tile - 1) / tile * tile;
}

bool takes_decode(const Call &call, int64_t q_len) {
    return q_len == 1 && call.group() <= kMaxDecodeGroup && call.layer.k_dim % kLanes == 0 &&
           call.layer.v_dim % kLanes == 0;
}

struct Plan {
    std::vector<Item> items;  // each for every KV head
    int64_t partial_floats = 0;  // of the shared scratch, for one KV head
    int64_t most_rows = 0;
    int64_t work = 0;
    int32_t status = PAGEDKV_OK;
};

void add_items(Plan &plan, const Call &call, Item item) {
    const int64_t visible = item.keys.count(), rows = item.num_tokens * call.group();
    // Several items of queries keep the threads busy without splits.
    const bool whole = item.num_tokens * call.group() > kItemRows / 2 || visible == 0;
    const int64_t keys = whole ? std::max<int64_t>(visible, 1) : split_keys(visible, item.decode);
    item.first_split = static_cast<int64_t>(plan.items.size());
    item.num_splits = std::max<int64_t>(1, (visible + keys - 1) / keys);
    for (int64_t split = 0; split < item.num_splits; split++) {
        item.begin = split * keys;
        item.end = std::min(visible, item.begin + keys);
        item.partial = plan.partial_floats;
        if (item.num_splits > 1) plan.partial_floats += Partial::size(rows, call.layer.v_dim);
        plan.items.push_back(item);
    }
    plan.most_rows = std::max(plan.most_rows, rows);
    plan.work += visible * rows;
}

void plan_step(Plan &plan, const Call &call) {
    const pagedkv_step &step = call.step;
    const pagedkv_layer &layer = call.layer;
    const int64_t capacity = std::min<int64_t>(step.width * layer.page_size, INT32_MAX);
    const int64_t tokens_together = std::max<int64_t>(1, kItemRows / call.group());
    int64_t row = read_index(step.cu_q_lens, 0, step.cu_q_lens_bits);
    if (row < 0) plan.status = PAGEDKV_BAD_LENGTHS;
    for (int64_t sequence = 0; sequence < step.num_sequences; sequence++) {
        const int64_t stop = read_index(step.cu_q_lens, (sequence + 1) * step.cu_q_lens_stride, step.cu_q_lens_bits);
        const int64_t kv_len = read_index(step.kv_lens, sequence * step.kv_lens_stride, step.kv_lens_bits);
        const int64_t q_len = stop - row, first = kv_len - q_len;
        if (q_len < 0 || stop > step.total_q || kv_len < 0 || kv_len > capacity) plan.status = PAGEDKV_BAD_LENGTHS;
        if (plan.status != PAGEDKV_OK) return;
        Item item{};
        item.sequence = sequence;
        item.decode = takes_decode(call, q_len);
        // The last tokens first: they see most.
        for (int64_t token = (q_len - 1) / tokens_together * tokens_together; token >= 0 && q_len;
             token -= tokens_together) {
            item.q_row = row + token;
            item.q_position = first + token;
            item.num_tokens = static_cast<int32_t>(std::min(tokens_together, q_len - token));
            item.keys = visible_keys(layer, item.q_position, item.q_position + item.num_tokens - 1);
            add_items(plan, call, item);
        }
        row = stop;
    }
}

// ---- Queries in, results out ----------------------------------------------------------------------------------------

template <class Element>
void read_row(float *to, const char *from, int64_t stride, int64_t dim, float factor, bool split) {
    const Element *elements = reinterpret_cast<const Element *>(from);
    if constexpr (std::is_same_v<Element, BFloat16>) {
        if (split && stride == 1) return widen_row(to, elements, dim, factor);
    }
    widen_strided(to, elements, stride, dim, factor);
    if (split) split_even_odd(to, dim);
}

template <class Element>
void write_row(char *to, int64_t stride, float *from, int64_t dim, float factor, bool split) {
    Element *elements = reinterpret_cast<Element *>(to);
    if constexpr (std::is_same_v<Element, BFloat16>) {
        if (split && stride == 1) return narrow_row(elements, from, dim, factor);
    }
    if (split) join_even_odd(from, dim);
    narrow_strided(elements, stride, from, dim, factor);
}

// Write `values` (in stored order, overwritten) times `factor` to a row of `out`.
void write_output(const Call &call, int64_t row, int64_t head, float *values, float factor) {
    const bool split = call.layer.kv_dtype == PAGEDKV_BFLOAT16;
    const int64_t stride = call.out.strides[2], dim = call.layer.v_dim;
    char *to = call.out.at(row, head);
    switch (call.layer.q_dtype) {
        case PAGEDKV_FLOAT32: return write_row<float>(to, stride, values, dim, factor, split);
        case PAGEDKV_BFLOAT16: return write_row<BFloat16>(to, stride, values, dim, factor, split);
        default: return write_row<Float16>(to, stride, values, dim, factor, split);
    }
}

void write_zeros(const Call &call, int64_t first, int64_t last, std::vector<float> &zeros) {
    zeros.assign(call.layer.v_dim, 0.0f);
    for (int64_t row = first; row < last; row++) {
        for (int64_t head = 0; head < call.layer.num_q_heads; head++) write_output(call, row, head, zeros.data(), 1.0f);
    }
}

// Join the parts of an item's rows in order, add the sink logits to the denominators, and write the rows of `out`. The
// first part is overwritten.
void finish(const Call &call, const Item &item, int64_t kv_head, float *const *parts) {
    const int64_t group = call.group(), rows = item.num_tokens * group, v_dim = call.layer.v_dim;
    for (int64_t row = 0; row < rows; row++) {
        const int64_t head = kv_head * group + row % group;
        const float sink = call.layer.sink_logits ? call.layer.sink_logits[head] * kLog2E : kMinusInfinity;
        float largest = sink;
        for (int64_t part = 0; part < item.num_splits; part++) {
            float other = Partial(parts[part], rows, v_dim).largest[row];
            largest = other > largest ? other : largest;
        }
        const float floor = largest > -FLT_MAX ? largest : -FLT_MAX;
        float weight = call.layer.sink_logits ? exp2_of(sink - floor) : 0.0f;
        float *sums = Partial(parts[0], rows, v_dim).sums + row * v_dim;
        for (int64_t part = 0; part < item.num_splits; part++) {
            const Partial partial(parts[part], rows, v_dim);
            const float factor = exp2_of(partial.largest[row] - floor);
            const float *from = partial.sums + row * v_dim;
            weight += partial.weights[row] * factor;
            if (part == 0 && factor == 1.0f) continue;
            for (int64_t i = 0; i < v_dim; i++) sums[i] = (part ? sums[i] : 0.0f) + from[i] * factor;
        }
        const float inverse = weight == 0.0f ? 0.0f : 1.0f / weight;
        write_output(call, item.q_row + row / group, head, sums, inverse);
    }
}

// ---- Running --------------------------------------------------------------------------------------------------------

struct Run {
    const Call &call;
    const Plan &plan;
    float *partials;                     // [num_kv_heads][plan.partial_floats]
    std::atomic<int32_t> *missing_parts; // [items * num_kv_heads], used at each first split
    Kernel decode, prefill;
    int64_t kernel_floats;

    float *part(int64_t kv_head, const Item &item) const {
        return partials + kv_head * plan.partial_floats + item.partial;
    }

    // Run an item for one KV head; whoever finishes the last part of its rows joins them.
    void operator()(Task task, Tasks &tasks, float *memory, std::vector<float *> &parts) const {
        const int64_t heads = call.layer.num_kv_heads, kv_head = task.kv_head;
        const Item &item = *task.item;
        const int64_t rows = item.num_tokens * call.group(), v_dim = call.layer.v_dim;
        float *own = item.num_splits > 1 ? part(kv_head, item) : memory + kernel_floats;
        const Partial result(own, rows, v_dim);
        (item.decode ? decode : prefill)(call, task, tasks, memory, result);
        if (item.num_splits == 1) return finish(call, item, kv_head, &own);
        std::atomic<int32_t> &missing = missing_parts[item.first_split * heads + kv_head];
        if (missing.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
        parts.clear();
        for (int64_t split = 0; split < item.num_splits; split++) {
            parts.push_back(part(kv_head, plan.items[item.first_split + split]));
        }
        finish(call, item, kv_head, parts.data());
    }
};

struct ThreadMemory {
    Scratch kernel;
    std::vector<float *> parts;
};

int32_t attend(const Call &call, int32_t num_threads) {
    thread_local Plan plan;
    thread_local Scratch shared;
    thread_local std::vector<std::atomic<int32_t>> missing_parts;
    thread_local std::vector<float> zeros;

    plan.items.clear();
    plan.partial_floats = plan.most_rows = plan.work = 0;
    plan.status = PAGEDKV_OK;
    plan_step(plan, call);
    if (plan.status != PAGEDKV_OK) return plan.status;

    const int64_t heads = call.layer.num_kv_heads, num_tasks = static_cast<int64_t>(plan.items.size()) * heads;
    const int64_t kernel_floats =
        std::max(decode_scratch(call.layer), prefill_scratch(call.layer, plan.most_rows)) / 16 * 16 + 16;
    const int64_t thread_floats = kernel_floats + Partial::size(plan.most_rows, call.layer.v_dim);
    float *partials = shared.floats(plan.partial_floats * heads + 1);
    if (!partials) return PAGEDKV_OUT_OF_MEMORY;
    if (plan.partial_floats) {
        if (static_cast<int64_t>(missing_parts.size()) < num_tasks) {
            missing_parts = std::vector<std::atomic<int32_t>>(num_tasks);
        }
        for (int64_t i = 0; i < static_cast<int64_t>(plan.items.size()); i++) {
            for (int64_t head = 0; head < heads; head++) {
                missing_parts[i * heads + head].store(plan.items[i].num_splits, std::memory_order_relaxed);
            }
        }
    }
    const Run run{call, plan, partials, missing_parts.data(), decode_kernel(call.layer),
                  prefill_kernel(call.layer), kernel_floats};

    const int64_t work = plan.work * heads * (call.layer.k_dim + call.layer.v_dim);
    const int64_t threads = work < kSerialWork ? 1 : std::min<int64_t>(num_threads, num_tasks);
    std::atomic<bool> short_of_memory{false};
    std::atomic<int64_t> counter{0};
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        thread_local ThreadMemory memory;
        float *floats = memory.kernel.floats(thread_floats);
        if (!floats) short_of_memory = true;
        Tasks tasks(run.plan.items, heads, counter);
        tasks.reserve();
#pragma omp barrier
        while (!short_of_memory.load(std::memory_order_relaxed)) {
            const Task task = tasks.take();
            if (!task.item) break;
            run(task, tasks, floats, memory.parts);
        }
    }
    if (short_of_memory) return PAGEDKV_OUT_OF_MEMORY;
    const int64_t last = call.step.num_sequences * call.step.cu_q_lens_stride;
    write_zeros(call, 0, read_index(call.step.cu_q_lens, 0, call.step.cu_q_lens_bits), zeros);
    write_zeros(call, read_index(call.step.cu_q_lens, last, call.step.cu_q_lens_bits), call.step.total_q, zeros);
    return PAGEDKV_OK;
}

int64_t element_size(int32_t dtype) {
    switch (dtype) {
        case PAGEDKV_FLOAT32: return 4;
        case PAGEDKV_BFLOAT16:
        case PAGEDKV_FLOAT16: return 2;
        default: return 1;
    }
}

bool arguments_known(const pagedkv_layer &layer, const float *k_scales, const float *v_scales) {
    const bool scaled = layer.kv_dtype == PAGEDKV_INT8 || layer.kv_dtype == PAGEDKV_FP8_E4M3;
    return layer.q_dtype >= PAGEDKV_FLOAT32 && layer.q_dtype <= PAGEDKV_FLOAT16 &&
           (scaled ? k_scales && v_scales : layer.kv_dtype == layer.q_dtype) && layer.num_kv_heads > 0 &&
           layer.num_q_heads > 0 && layer.num_q_heads % layer.num_kv_heads == 0 && layer.k_dim > 0 &&
           layer.v_dim > 0 && layer.page_size > 0;
}

}  // namespace

void read_query(const Call &call, int64_t row, int64_t head, float factor, float *to) {
    const bool split = call.layer.kv_dtype == PAGEDKV_BFLOAT16;
    const int64_t stride = call.q.strides[2], dim = call.layer.k_dim;
    const char *from = call.q.at(row, head);
    switch (call.layer.q_dtype) {
        case PAGEDKV_FLOAT32: return read_row<float>(to, from, stride, dim, factor, split);
        case PAGEDKV_BFLOAT16: return read_row<BFloat16>(to, from, stride, dim, factor, split);
        default: return read_row<Float16>(to, from, stride, dim, factor, split);
    }
}

void copy_query(const Call &call, int64_t row, int64_t head, BFloat16 *to) {
    const BFloat16 *from = reinterpret_cast<const BFloat16 *>(call.q.at(row, head));
    const int64_t stride = call.q.strides[2], dim = call.layer.k_dim;
    if (stride == 1) {
        std::copy_n(from, dim, to);
    } else {
        for (int64_t i = 0; i < dim; i++) to[i] = from[i * stride];
    }
}

}  // namespace pagedkv

extern "C" {

int32_t pagedkv_attend(const pagedkv_step *step, const pagedkv_layer *layer, const void *q, const void *k_pages,
                       const void *v_pages, const float *k_scales, const float *v_scales, void *out,
                       int32_t num_threads) {
    using namespace pagedkv;
    if (!arguments_known(*layer, k_scales, v_scales)) return PAGEDKV_BAD_ARGUMENT;
    const int64_t q_size = element_size(layer->q_dtype);
    const Call call{*step,
                    *layer,
                    {const_cast<char *>(static_cast<const char *>(q)), layer->q_strides, q_size},
                    {static_cast<char *>(out), layer->out_strides, q_size},
                    static_cast<const char *>(k_pages),
                    static_cast<const char *>(v_pages),
                    k_scales,
                    v_scales,
                    element_size(layer->kv_dtype)};
    try {
        return attend(call, num_threads);
    } catch (const std::bad_alloc &) {
        return PAGEDKV_OUT_OF_MEMORY;
    }
}

int32_t pagedkv_abi_version(void) { return PAGEDKV_ABI_VERSION; }

const char *pagedkv_isa(void) {
#if defined(__AVX512F__)
    return pagedkv::kPairProducts ? "x86-64-v4+bf16" : "x86-64-v4";
#elif defined(__AVX2__)
    return pagedkv::kPairProducts ? "x86-64-v3+bf16" : "x86-64-v3";
#elif defined(__aarch64__)
    return "aarch64";
#else
    return "baseline";
#endif
}

}  // extern "C"
