// What this machine can do at most: bytes read in order, bytes read in pages, multiply-adds; on all threads.

#include <algorithm>
#include <cstddef>
#include <cstring>

// Wider than the target's registers the sums would live in memory, and that would be measured.
#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
using Vector = float __attribute__((vector_size(4 * kLanes)));
constexpr size_t kSums = 8, kStride = kSums * kLanes;

// sums += `count` floats at `from`, a multiple of kLanes; with kAhead the same place from `next` on is asked for as well.
template <bool kAhead>
inline void add(Vector (&sums)[kSums], const float *from, size_t count, const float *next) {
    size_t i = 0;
    for (; i + kStride <= count; i += kStride) {
        if constexpr (kAhead) {
            for (size_t line = 0; line < kStride; line += 16) __builtin_prefetch(next + i + line, 0, 2);
        }
#pragma GCC unroll 8
        for (size_t k = 0; k < kSums; k++) {
            Vector value;
            std::memcpy(&value, from + i + k * kLanes, sizeof value);
            sums[k] += value;
        }
    }
    for (; i < count; i += kLanes) {
        Vector value;
        std::memcpy(&value, from + i, sizeof value);
        sums[0] += value;
    }
}

inline float total_of(const Vector (&sums)[kSums]) {
    float total = 0;
    for (size_t k = 0; k < kSums; k++) total += sums[k][0];
    return total;
}

// Sum of `count` floats at each of two places, read once, in order, by `num_threads` threads.
extern "C" float stream_read(const float *k, const float *v, size_t count, int num_threads) {
    float total = 0;
#pragma omp parallel for num_threads(num_threads) reduction(+ : total) schedule(static)
    for (int t = 0; t < num_threads; t++) {
        const size_t part = count / num_threads / kStride * kStride;
        Vector sums[kSums] = {};
        add<false>(sums, k + t * part, part, nullptr);
        add<false>(sums, v + t * part, part, nullptr);
        total += total_of(sums);
    }
    return total;
}

// Sum of `count` runs of `floats` (a multiple of 16) each, read in the order of `runs`; the next one is asked for ahead.
extern "C" float page_read(const float *const *runs, size_t count, size_t floats, int num_threads) {
    float total = 0;
#pragma omp parallel for num_threads(num_threads) reduction(+ : total) schedule(static)
    for (int t = 0; t < num_threads; t++) {
        const size_t end = count * (t + 1) / num_threads;
        Vector sums[kSums] = {};
        for (size_t run = count * t / num_threads; run < end; run++) {
            add<true>(sums, runs[run], floats, runs[std::min(run + 1, end - 1)]);
        }
        total += total_of(sums);
    }
    return total;
}

// `rounds` times `kChains` independent multiply-adds of `kLanes` floats on each thread.
constexpr int kChains = 12;

// Multiply-adds of one thread's round.
extern "C" long chains() { return long{kChains} * kLanes; }

extern "C" double multiply_adds(long rounds, int num_threads) {
    float total = 0;
#pragma omp parallel for num_threads(num_threads) reduction(+ : total)
    for (int t = 0; t < num_threads; t++) {
        Vector sums[kChains];
        for (int k = 0; k < kChains; k++) sums[k] = Vector{} + 0.1f * static_cast<float>(k + t);
        const Vector factor = Vector{} + 0.999f, addend = Vector{} + 1e-3f;
        for (long i = 0; i < rounds; i++) {
#pragma GCC unroll 12
            for (int k = 0; k < kChains; k++) sums[k] = sums[k] * factor + addend;
        }
        for (int k = 0; k < kChains; k++) total += sums[k][0];
    }
    return total == 0 ? 0 : 1.0 * static_cast<double>(rounds) * kChains * kLanes * num_threads;
}
