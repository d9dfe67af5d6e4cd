// Linear layers on few rows: what `bound_ops.linear` calls.
#pragma once

#include <stdint.h>

#include "abi.h"

#ifdef __cplusplus
extern "C" {
#endif

// One layer: weight [out_features, in_features], bias [out_features] or null.
typedef struct {
    const void *weight;
    const void *bias;
    int64_t weight_stride;  // elements from one output's weights to the next one's
    int64_t out_features;
} pagedkv_linear_layer;

// out = x @ weight.T + bias for layers of one input, their outputs beside one another in a row of out.
//
// x [rows, in_features] and out [rows, sum of out_features] have rows `x_stride` and `out_stride` elements apart. dtype is
// PAGEDKV_FLOAT32, PAGEDKV_BFLOAT16 or PAGEDKV_FLOAT16 and holds for all of them; sums are fp32, rounded once. At most
// num_threads threads of OpenMP's pool. A row's result depends neither on the other rows nor on the threads.
PAGEDKV_EXPORT int32_t pagedkv_linear(const pagedkv_linear_layer *layers, int64_t num_layers, const void *x,
                                      int64_t x_stride, void *out, int64_t out_stride, int64_t rows, int64_t in_features,
                                      int32_t dtype, int32_t num_threads);

#ifdef __cplusplus
}
#endif
