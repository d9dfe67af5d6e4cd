// The C interface of the CPU kernels: what Python fills in through ctypes, and the functions it may call.
//
// Plain C structs and functions: no torch, no C++ type crosses this line. Everything here is checked by the caller
// (shapes, dtypes, strides) before it comes in; the functions check only what the contents of the step's small
// integer tensors could break. All strides are in elements of their tensor. Pointers need the alignment of their
// element, nothing more. No function keeps a pointer after it returns.
//
// Any change of a struct or a signature raises PAGEDKV_ABI_VERSION; the loader compares it.
#pragma once

#include <stdint.h>

#define PAGEDKV_ABI_VERSION 1

#if defined(__GNUC__)
#define PAGEDKV_EXPORT __attribute__((visibility("default")))
#else
#define PAGEDKV_EXPORT
#endif

#ifdef __cplusplus
extern "C" {
#endif

// Element types. q and out are one of the first three; pages are q's type, or int8 or fp8.
enum {
    PAGEDKV_FLOAT32 = 0,
    PAGEDKV_BFLOAT16 = 1,
    PAGEDKV_FLOAT16 = 2,
    PAGEDKV_INT8 = 3,
    PAGEDKV_FP8_E4M3 = 4,
};

// What the functions return. On anything but OK nothing was written.
enum {
    PAGEDKV_OK = 0,
    PAGEDKV_BAD_LENGTHS = 1,      // cu_q_lens leave [0, total_q] or fall, or a kv_len leaves [0, width * page_size] or 31 bits
    PAGEDKV_BAD_ARGUMENT = 2,     // a dtype or a size that this library does not know
    PAGEDKV_OUT_OF_MEMORY = 3,    // no room for scratch
    PAGEDKV_BAD_PAGES = 4,        // slot_mapping or copies name a page outside the pool
};

// One step of one layer group: `AttentionBatch`. Fill once per step.
typedef struct {
    const void *block_tables;     // int32 or int64 [num_sequences, width]
    const void *kv_lens;          // int32 or int64 [num_sequences]
    const void *cu_q_lens;        // int32 or int64 [num_sequences + 1]
    int64_t table_row_stride;
    int64_t table_entry_stride;
    int64_t kv_lens_stride;
    int64_t cu_q_lens_stride;
    int64_t num_sequences;
    int64_t width;                // entries of a row of block_tables
    int64_t total_q;              // rows of q and out
    int32_t table_bits;           // 32 or 64, likewise the two below
    int32_t kv_lens_bits;
    int32_t cu_q_lens_bits;
    int32_t reserved;             // 0
} pagedkv_step;

// One layer: `LayerSpec`, and the looks of the tensors that go with it. Fill once per layer and set of strides.
typedef struct {
    int64_t num_q_heads;          // a multiple of num_kv_heads
    int64_t num_kv_heads;
    int64_t k_dim;                // at least 1, likewise v_dim; fastest where it is a multiple of 16
    int64_t v_dim;
    int64_t page_size;            // at least 1
    int64_t q_strides[3];         // [row, head, channel]
    int64_t out_strides[3];       // [row, head, channel]
    int64_t k_strides[3];         // pages: [page, head, slot]; channels lie next to one another
    int64_t v_strides[3];
    int64_t k_scale_strides[3];   // [page, head, slot]; unused where the pages have no scales
    int64_t v_scale_strides[3];
    const float *sink_logits;     // fp32 [num_q_heads], or null
    const float *alibi_slopes;    // fp32 [num_q_heads], or null
    int64_t window;               // a token sees itself and the window - 1 before it; 0: no window
    int64_t num_sink_tokens;
    float scale;
    float softcap;                // 0: none
    int32_t q_dtype;              // of q and out
    int32_t kv_dtype;             // of both page tensors
} pagedkv_layer;

// Attend from every query row of the step to its sequence's pages: `paged_attention`.
//
// q [total_q, num_q_heads, k_dim] and out [total_q, num_q_heads, v_dim]; k_scales and v_scales are null unless kv_dtype
// has scales. Writes every row of out. Uses at most num_threads threads of OpenMP's pool, the calling one included
// (pass torch.get_num_threads()), fewer where the work is small; the result does not depend on it.
// There is nothing to prepare: the list of work items is made in the call (about 10 ns a sequence).
PAGEDKV_EXPORT int32_t pagedkv_attend(const pagedkv_step *step, const pagedkv_layer *layer, const void *q,
                                      const void *k_pages, const void *v_pages, const float *k_scales,
                                      const float *v_scales, void *out, int32_t num_threads);

// The looks of the tensors of a `write_kv`. Fill once per layer and set of strides.
typedef struct {
    int64_t num_pages;
    int64_t num_kv_heads;
    int64_t k_dim;
    int64_t v_dim;
    int64_t page_size;
    int64_t k_row_strides[3];     // k [total_q, num_kv_heads, k_dim]: [row, head, channel]
    int64_t v_row_strides[3];
    int64_t k_strides[3];         // pages: [page, head, slot]; channels lie next to one another
    int64_t v_strides[3];
    int64_t k_scale_strides[3];   // [page, head, slot]; unused where the pages have no scales
    int64_t v_scale_strides[3];
    int64_t slot_stride;          // of slot_mapping
    int32_t source_dtype;         // of k and v: kv_dtype, or for int8 and fp8 one of the first three
    int32_t kv_dtype;
} pagedkv_write;

// Store num_tokens tokens in their slots, and their scales where k_scales and v_scales are not null: `write_kv`.
PAGEDKV_EXPORT int32_t pagedkv_write_kv(const pagedkv_write *write, const void *k, const void *v, void *k_pages,
                                        void *v_pages, float *k_scales, float *v_scales, const int64_t *slot_mapping,
                                        int64_t num_tokens, int32_t num_threads);

// Copy whole pages within each of num_tensors tensors, all sources read before any destination is written: `copy_pages`.
//
// Tensor t starts at tensors[t], its pages are page_bytes[t] contiguous bytes, page_strides[t] bytes apart. copies is
// int32 or int64 (copies_bits) [num_copies, 2], contiguous: source and destination page ids, no destination twice.
PAGEDKV_EXPORT int32_t pagedkv_copy_pages(void *const *tensors, const int64_t *page_bytes, const int64_t *page_strides,
                                          int64_t num_tensors, int64_t num_pages, const void *copies,
                                          int32_t copies_bits, int64_t num_copies, int32_t num_threads);

// PAGEDKV_ABI_VERSION of the library that was loaded.
PAGEDKV_EXPORT int32_t pagedkv_abi_version(void);

// What the library was compiled for: "x86-64-v3", "x86-64-v4", "aarch64" or "baseline", with "+bf16" where bf16 is multiplied
// in pairs.
PAGEDKV_EXPORT const char *pagedkv_isa(void);

#ifdef __cplusplus
}
#endif
