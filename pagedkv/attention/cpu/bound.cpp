// The kernels called by way of a bound layer.

#include "bound.h"

int32_t pagedkv_attend_bound(const pagedkv_bound_layer *bound, const pagedkv_step *step, const void *q, void *out,
                             int32_t num_threads) {
    return pagedkv_attend(step, &bound->layer, q, bound->k_pages, bound->v_pages, bound->k_scales, bound->v_scales, out,
                          num_threads);
}

int32_t pagedkv_write_bound(const pagedkv_bound_write *bound, const void *k, const void *v, const int64_t *slot_mapping,
                            int64_t num_tokens, int32_t num_threads) {
    return pagedkv_write_kv(&bound->write, k, v, bound->k_pages, bound->v_pages, bound->k_scales, bound->v_scales,
                            slot_mapping, num_tokens, num_threads);
}

int64_t pagedkv_struct_bytes(int32_t which) {
    const int64_t bytes[] = {sizeof(pagedkv_step), sizeof(pagedkv_bound_layer), sizeof(pagedkv_bound_write)};
    return bytes[which];
}
