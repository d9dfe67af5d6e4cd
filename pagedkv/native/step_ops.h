// The small operations between a model step's matrix products, one call each: what `step_ops.py` calls.
//
// Rows of channels that lie next to one another; strides are in elements. dtype is PAGEDKV_FLOAT32, PAGEDKV_BFLOAT16 or
// PAGEDKV_FLOAT16 and holds for every tensor of a call. Intermediate results are rounded to it where the models' own
// code rounds. At most num_threads threads of OpenMP's pool, fewer where the work is small; no result depends on it.
#pragma once

#include <stdint.h>

#include "abi.h"

#ifdef __cplusplus
extern "C" {
#endif

// out = weight * (x / sqrt(mean(x^2) + eps)), per row of dim channels. With residual, x + residual takes the place of x
// and is written to total too (which may be either of them).
PAGEDKV_EXPORT int32_t pagedkv_rms_norm(const void *x, int64_t x_stride, const void *residual, int64_t residual_stride,
                                        void *total, int64_t total_stride, const void *weight, void *out,
                                        int64_t out_stride, int64_t rows, int64_t dim, float eps, int32_t dtype,
                                        int32_t num_threads);

// Rotate the first `rotary_dim` channels of each head in place, channel i with channel i + rotary_dim / 2:
// x * cos + (-upper half, lower half) * sin. x [rows, heads, dim] has strides for row and head; cos and sin
// [rows, rotary_dim].
PAGEDKV_EXPORT int32_t pagedkv_rotary(void *x, int64_t row_stride, int64_t head_stride, int64_t heads, const void *cos,
                                      const void *sin, int64_t angle_stride, int64_t rows, int64_t rotary_dim,
                                      int32_t dtype, int32_t num_threads);

enum { PAGEDKV_SILU = 0, PAGEDKV_GELU_TANH = 1 };

// out = activation(gate) * up.
PAGEDKV_EXPORT int32_t pagedkv_gated(int32_t activation, const void *gate, int64_t gate_stride, const void *up,
                                     int64_t up_stride, void *out, int64_t out_stride, int64_t rows, int64_t dim,
                                     int32_t dtype, int32_t num_threads);

// Index of each row's largest element; the first of equals, the first NaN if there is one.
PAGEDKV_EXPORT int32_t pagedkv_argmax(const void *x, int64_t x_stride, int64_t *out, int64_t rows, int64_t dim,
                                      int32_t dtype, int32_t num_threads);

#ifdef __cplusplus
}
#endif
