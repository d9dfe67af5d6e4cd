// A layer bound to its page tensors: what one call of attention or writing shares with the next, behind one pointer.
//
// A call through ctypes costs some 0.15 us an argument; of the nine of `pagedkv_attend` five stay the same for as long as
// a layer has its pages.
#pragma once

#include "abi.h"

typedef struct {
    pagedkv_layer layer;
    const void *k_pages;
    const void *v_pages;
    const float *k_scales;
    const float *v_scales;
} pagedkv_bound_layer;

typedef struct {
    pagedkv_write write;
    void *k_pages;
    void *v_pages;
    float *k_scales;
    float *v_scales;
} pagedkv_bound_write;

#ifdef __cplusplus
extern "C" {
#endif

PAGEDKV_EXPORT int32_t pagedkv_attend_bound(const pagedkv_bound_layer *bound, const pagedkv_step *step, const void *q,
                                            void *out, int32_t num_threads);

PAGEDKV_EXPORT int32_t pagedkv_write_bound(const pagedkv_bound_write *bound, const void *k, const void *v,
                                           const int64_t *slot_mapping, int64_t num_tokens, int32_t num_threads);

// Sizes of the structs above and in abi.h, so that a test can hold their Python twins to them: step, bound layer, bound
// write.
PAGEDKV_EXPORT int64_t pagedkv_struct_bytes(int32_t which);

#ifdef __cplusplus
}
#endif
