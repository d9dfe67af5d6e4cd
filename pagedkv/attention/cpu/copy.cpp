// `copy_pages`: whole pages onto others within each tensor, all sources read before any destination is written.
//
// Pages are bytes here. Only a source that is some copy's destination too needs a place in between.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

#include "abi.h"

namespace pagedkv {
namespace {

// Below this many bytes one thread is faster than waking the others (as for `write_kv`).
constexpr int64_t kParallelBytes = 1 << 17;

struct Copy {
    int64_t source;
    int64_t destination;
    int64_t staged;  // its place among the staged pages, -1: straight from the source
};

template <class Index>
void read_copies(const void *copies, int64_t num_copies, std::vector<Copy> &into) {
    const Index *pairs = static_cast<const Index *>(copies);
    for (int64_t i = 0; i < num_copies; i++) into.push_back({pairs[2 * i], pairs[2 * i + 1], -1});
}

// Give a place to each copy whose source will be overwritten, and return how many there are.
int64_t stage(std::vector<Copy> &copies) {
    std::vector<int64_t> written;
    for (const Copy &copy : copies) written.push_back(copy.destination);
    std::sort(written.begin(), written.end());
    int64_t count = 0;
    for (Copy &copy : copies) {
        if (std::binary_search(written.begin(), written.end(), copy.source)) copy.staged = count++;
    }
    return count;
}

void copy_tensor(char *pages, int64_t bytes, int64_t stride, const std::vector<Copy> &copies, char *between,
                 int num_threads) {
    const int64_t count = static_cast<int64_t>(copies.size());
#pragma omp parallel num_threads(num_threads) if (num_threads > 1 && count * bytes > kParallelBytes)
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < count; i++) {
            const Copy &copy = copies[i];
            if (copy.staged >= 0) std::memcpy(between + copy.staged * bytes, pages + copy.source * stride, bytes);
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < count; i++) {
            const Copy &copy = copies[i];
            const char *from = copy.staged >= 0 ? between + copy.staged * bytes : pages + copy.source * stride;
            std::memcpy(pages + copy.destination * stride, from, bytes);
        }
    }
}

}  // namespace
}  // namespace pagedkv

int32_t pagedkv_copy_pages(void *const *tensors, const int64_t *page_bytes, const int64_t *page_strides,
                           int64_t num_tensors, int64_t num_pages, const void *copies, int32_t copies_bits,
                           int64_t num_copies, int32_t num_threads) {
    using namespace pagedkv;
    try {
        std::vector<Copy> list;
        list.reserve(num_copies);
        if (copies_bits == 32) {
            read_copies<int32_t>(copies, num_copies, list);
        } else {
            read_copies<int64_t>(copies, num_copies, list);
        }
        for (const Copy &copy : list) {
            if (std::min(copy.source, copy.destination) < 0) return PAGEDKV_BAD_PAGES;
            if (std::max(copy.source, copy.destination) >= num_pages) return PAGEDKV_BAD_PAGES;
        }
        int64_t largest = 0;
        for (int64_t t = 0; t < num_tensors; t++) largest = std::max(largest, page_bytes[t]);
        std::vector<char> between(stage(list) * largest);
        for (int64_t t = 0; t < num_tensors; t++) {
            copy_tensor(static_cast<char *>(tensors[t]), page_bytes[t], page_strides[t], list, between.data(),
                        num_threads);
        }
    } catch (const std::bad_alloc &) {
        return PAGEDKV_OUT_OF_MEMORY;
    }
    return PAGEDKV_OK;
}
