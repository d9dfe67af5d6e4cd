// Memory that a thread keeps from call to call.
#pragma once

#include <cstdint>
#include <memory>
#include <new>

namespace pagedkv {

// It only grows.
class Scratch {
  public:
    // At least `count` floats, aligned to a cache line; contents undefined. Null if there is no room.
    float *floats(int64_t count) {
        if (count > capacity_) {
            memory_.reset();
            capacity_ = 0;
            memory_.reset(static_cast<float *>(::operator new(count * sizeof(float), std::align_val_t{64}, std::nothrow)));
            if (memory_) capacity_ = count;
        }
        return memory_.get();
    }

  private:
    struct Release {
        void operator()(float *memory) const { ::operator delete(memory, std::align_val_t{64}); }
    };
    std::unique_ptr<float, Release> memory_;
    int64_t capacity_ = 0;
};

}  // namespace pagedkv
