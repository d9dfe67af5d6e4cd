// What functions over rows of any dtype share: a row's last vector, and the type that a number names.
#pragma once

#include <algorithm>

#include "abi.h"
#include "vectors.h"

namespace pagedkv {

// A vector of a row with `count` channels left; past the last ones it holds zeros and writes nothing.
template <class Element>
inline Floats read(const Element *from, int64_t count) {
    if (count >= kLanes) return widen(from);
    Element padded[kLanes] = {};
    std::copy_n(from, count, padded);
    return widen(padded);
}
template <class Element>
inline void write(Element *to, Floats value, int64_t count) {
    if (count >= kLanes) return narrow(to, value);
    Element padded[kLanes];
    narrow(padded, value);
    std::copy_n(padded, count, to);
}

// Call `body` with a value of the element type that `dtype` names.
template <class Body>
int32_t with_element(int32_t dtype, Body body) {
    switch (dtype) {
        case PAGEDKV_FLOAT32: body(float{}); return PAGEDKV_OK;
        case PAGEDKV_BFLOAT16: body(BFloat16{}); return PAGEDKV_OK;
        case PAGEDKV_FLOAT16: body(Float16{}); return PAGEDKV_OK;
        default: return PAGEDKV_BAD_ARGUMENT;
    }
}

}  // namespace pagedkv
