// What happens to a product of query and key before softmax: scale and softcap.
#pragma once

#include "abi.h"
#include "softmax.h"

namespace pagedkv {

// What a layer does to q.k, in base 2. `query_factor` goes into the queries beforehand.
struct ScoreRule {
    float query_factor;
    float softcap;  // 0: none, else the cap in base 2

    explicit ScoreRule(const pagedkv_layer &layer)
        : query_factor(layer.softcap > 0 ? layer.scale / layer.softcap : layer.scale * kLog2E),
          softcap(layer.softcap * kLog2E) {}

    Floats capped(Floats product) const { return softcap > 0 ? tanh_of(product) * softcap : product; }
};

}  // namespace pagedkv
