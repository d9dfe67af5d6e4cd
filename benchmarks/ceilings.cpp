// What this machine can do at most: bytes read in order, bytes read in pages, multiply-adds; on all threads.

#include <algorithm>
#include <cstddef>
#include <cstring>

using Floats = float __attribute__((vector_size(64)));

// Sum of `count` floats, read once by `num_threads` threads.
extern "C" float stream_read(const float *from, size_t count, int num_threads) {
    float total = 0;
#pragma omp parallel for num_threads(num_threads) reduction(+ : total) schedule(static)
    for (int t = 0; t < num_threads; t++) {
        const float *at = from + count / num_threads * t;
        Floats sums[4] = {};
        for (size_t i = 0; i + 64 <= count / num_threads; i += 64) {
            for (int k = 0; k < 4; k++) {
                Floats value;
                std::memcpy(&value, at + i + 16 * k, sizeof value);
                sums[k] += value;
            }
        }
        for (int k = 0; k < 4; k++) total += sums[k][0];
    }
    return total;
}

// Sum of `count` runs of `floats` (a multiple of 16) each, read in the order of `runs`; the next one is asked for ahead.
extern "C" float page_read(const float *const *runs, size_t count, size_t floats, int num_threads) {
    float total = 0;
#pragma omp parallel for num_threads(num_threads) reduction(+ : total) schedule(static)
    for (int t = 0; t < num_threads; t++) {
        Floats sum = {};
        const size_t end = count * (t + 1) / num_threads;
        for (size_t run = count * t / num_threads; run < end; run++) {
            const float *from = runs[run], *next = runs[std::min(run + 1, end - 1)];
            for (size_t i = 0; i < floats; i += 16) {
                __builtin_prefetch(next + i, 0, 2);
                Floats value;
                std::memcpy(&value, from + i, sizeof value);
                sum += value;
            }
        }
        total += sum[0];
    }
    return total;
}

// `rounds` times `kChains` independent multiply-adds of `kLanes` floats on each thread.
#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kChains = 12;
using Vector = float __attribute__((vector_size(4 * kLanes)));

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
