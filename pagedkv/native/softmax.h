// Exponentials, tanh, and what a softmax in parts needs.
//
// Scores are kept in base 2, that is times log2(e), and weights are 2^(score - largest). -inf stands for what is not
// seen and comes out as weight 0 exactly; a NaN score stays NaN.
#pragma once

#include <cfloat>
#include <cmath>

#include "vectors.h"

namespace pagedkv {

constexpr float kLog2E = 1.44269504088896341f;
constexpr float kMinusInfinity = -__builtin_inff();

// 2^x for x <= 127, relative error below 2e-7, 0 below -126.
//
// The fraction in [-1/2, 1/2] goes through a polynomial of degree 5 (least largest relative error, 9e-8, with
// p(0) = 1), the whole part into the exponent of a factor. Adding 1.5 * 2^23 rounds to the nearest whole number.
inline Floats exp2_of(Floats x) {
    const Floats magic = splat(12582912.0f);
    Floats bounded = x < -126.0f ? splat(-126.0f) : x;
    Floats shifted = bounded + magic;
    Floats r = bounded - (shifted - magic);
    Floats p = splat(0.001326472731307149f);
    p = p * r + 0.009671512991189957f;
    p = p * r + 0.05550733581185341f;
    p = p * r + 0.24022242426872253f;
    p = p * r + 0.6931470036506653f;
    p = p * r + 1.0f;
    // A product, not a sum of bits: any NaN stays one.
    Floats power = p * as_floats((as_words(shifted) << 23) + 0x3f800000u);
    return x < -126.0f ? Floats{} : power;
}

// tanh with a relative error of a few units: an odd polynomial near 0, where 1 - 2 / (e^2x + 1) would cancel.
inline Floats tanh_of(Floats x) {
    Floats size = x < 0.0f ? -x : x, square = x * x;
    Floats p = splat(-0.005704981740564108f);
    p = p * square + 0.02063908241689205f;
    p = p * square - 0.05373971536755562f;
    p = p * square + 0.13331441581249237f;
    p = p * square - 0.3333328068256378f;
    Floats near = p * square * x + x;
    Floats bounded = size > 10.0f ? splat(10.0f) : size;
    Floats far = 1.0f - 2.0f / (exp2_of(bounded * (2.0f * kLog2E)) + 1.0f);
    return size < 0.625f ? near : (x < 0.0f ? -far : far);
}

// The largest score as something that can be subtracted: -inf minus -inf would be NaN.
inline Floats finite_floor(Floats largest) { return larger(largest, splat(-FLT_MAX)); }

inline float exp2_of(float x) { return exp2_of(splat(x))[0]; }

}  // namespace pagedkv
