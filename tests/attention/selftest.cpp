// A self-test of the library without Python, for processors that are only emulated: attention, linear layers and step
// operations against plain loops in double precision. Linked with the library by arm64.sh and avx512.sh. Exit status 0:
// every case is within its dtype's error.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "abi.h"
#include "linear.h"
#include "step_ops.h"

namespace {

// ---- Element types by their definitions: the test shares no conversion with the library -----------------------------

// A sign, an exponent that rises from 1 at 2^(1 - bias), 0 for subnormal numbers, and `fraction_bits` of fraction.
double from_bits(int bits, int exponent_bits, int fraction_bits, int bias) {
    const int one = 1 << fraction_bits, fraction = bits % one, exponent = bits / one % (1 << exponent_bits);
    const int significand = exponent ? one + fraction : fraction;
    const double size = std::ldexp(significand, std::max(exponent, 1) - bias - fraction_bits);
    return bits >> (exponent_bits + fraction_bits) & 1 ? -size : size;
}

// To nearest, ties to even. Subnormal numbers stand where the smallest normal ones would continue downwards.
int to_bits(double value, int exponent_bits, int fraction_bits, int bias) {
    const int sign = std::signbit(value) << (exponent_bits + fraction_bits);
    if (std::isinf(value)) return sign | ((1 << exponent_bits) - 1) << fraction_bits;
    const int exponent = value == 0 ? 1 - bias : std::max(std::ilogb(value), 1 - bias);
    const int significand = static_cast<int>(std::nearbyint(std::ldexp(std::fabs(value), fraction_bits - exponent)));
    return sign | (((exponent + bias - 1) << fraction_bits) + significand);
}

struct Tensor {
    int dtype;
    std::vector<char> bytes;

    static int width(int dtype) {
        return dtype == PAGEDKV_FLOAT32 ? 4 : dtype == PAGEDKV_BFLOAT16 || dtype == PAGEDKV_FLOAT16 ? 2 : 1;
    }

    // Filled with numbers far off, should a result stay unwritten.
    Tensor(size_t count, int dtype) : dtype(dtype), bytes(count * width(dtype), 0x7f) {}

    // Numbers from -2 to 2.
    Tensor(std::mt19937 &draw, size_t count, int dtype) : Tensor(count, dtype) {
        for (size_t i = 0; i < count; i++) set(i, static_cast<double>(draw() >> 8) * 0x1p-22 - 2);
    }

    void *data() { return bytes.data(); }

    void set(size_t i, double number) {
        if (dtype == PAGEDKV_FLOAT32) return put(i, static_cast<float>(number));
        const bool brain = dtype == PAGEDKV_BFLOAT16;
        put(i, static_cast<uint16_t>(brain ? to_bits(number, 8, 7, 127) : to_bits(number, 5, 10, 15)));
    }

    double get(size_t i) const {
        switch (dtype) {
            case PAGEDKV_FLOAT32: return at<float>(i);
            case PAGEDKV_BFLOAT16: return from_bits(at<uint16_t>(i), 8, 7, 127);
            case PAGEDKV_FLOAT16: return from_bits(at<uint16_t>(i), 5, 10, 15);
            case PAGEDKV_FP8_E4M3: return from_bits(at<uint8_t>(i), 4, 3, 7);
            default: return at<int8_t>(i);
        }
    }

    std::vector<double> numbers() const {
        std::vector<double> all(bytes.size() / width(dtype));
        for (size_t i = 0; i < all.size(); i++) all[i] = get(i);
        return all;
    }

  private:
    template <class Stored>
    void put(size_t i, Stored value) {
        std::memcpy(&bytes[i * sizeof value], &value, sizeof value);
    }
    template <class Stored>
    Stored at(size_t i) const {
        Stored value;
        std::memcpy(&value, &bytes[i * sizeof value], sizeof value);
        return value;
    }
};

// ---- Reports --------------------------------------------------------------------------------------------------------

struct Kind {
    const char *name;
    int dtype, kv_dtype;
    double limit;  // of an error, relative to 1 + the expected number
};
const Kind kKinds[] = {{"fp32", PAGEDKV_FLOAT32, PAGEDKV_FLOAT32, 2e-6},
                       {"bf16", PAGEDKV_BFLOAT16, PAGEDKV_BFLOAT16, 4e-3},
                       {"fp16", PAGEDKV_FLOAT16, PAGEDKV_FLOAT16, 5e-4},
                       {"fp32 on int8", PAGEDKV_FLOAT32, PAGEDKV_INT8, 2e-6},
                       {"bf16 on fp8", PAGEDKV_BFLOAT16, PAGEDKV_FP8_E4M3, 4e-3}};

int failures = 0;

// The errors of one kind of case: says at once which case is wrong, and the largest error at the end.
class Report {
  public:
    Report(std::string name, double limit) : name_(std::move(name)), limit_(limit) {
        std::printf("%-24s", name_.c_str());
        std::fflush(stdout);  // should the first case end the process
    }
    ~Report() { std::printf("%4d cases, largest error %.1e of at most %.1e\n", cases_, worst_, limit_); }

    void add(double error, const std::string &which) {
        cases_++;
        worst_ = error > worst_ ? error : worst_;
        if (error <= limit_) return;
        failures++;
        std::printf("\n  WRONG %s: error %.3g\n", which.c_str(), error);
    }

  private:
    std::string name_;
    double limit_, worst_ = 0;
    int cases_ = 0;
};

// Relative to 1 + `size`, of the number or of what it was summed from.
double difference(double got, double expected, double size) {
    const double error = std::fabs(got - expected) / (1 + size);
    return std::isnan(error) ? INFINITY : error;
}

double largest_difference(const Tensor &got, const std::vector<double> &expected) {
    double worst = 0;
    for (size_t i = 0; i < expected.size(); i++) {
        worst = std::max(worst, difference(got.get(i), expected[i], std::fabs(expected[i])));
    }
    return worst;
}

// ---- Attention ------------------------------------------------------------------------------------------------------

constexpr int kKvHeads = 2, kPage = 16;

struct Batch {
    int group, dim;
    std::vector<int> q_lens, kv_lens;
    int window = 0, threads = 1;
    float softcap = 0;
    bool alibi = false;
    bool infinite = false;  // V of each sequence's last key, which only its last query sees

    std::string name() const {
        char text[120];
        std::snprintf(text, sizeof text, "group %d, %d channels, %d tokens, window %d, %d threads%s%s%s", group, dim,
                      q_lens[0], window, threads, softcap > 0 ? ", softcap" : "", alibi ? ", alibi" : "",
                      infinite ? ", infinite" : "");
        return text;
    }
};

// Whether stored numbers (codes times scales) are the written ones, or for int8 and fp8 as near as a code can be.
bool close_enough(double stored, double written, double scale, int kv_dtype) {
    const double fp8 = std::max(std::fabs(written) / 16, scale / 1024);
    const double half_a_code = kv_dtype == PAGEDKV_INT8 ? scale / 2 : kv_dtype == PAGEDKV_FP8_E4M3 ? fp8 : 0;
    return std::fabs(stored - written) <= half_a_code * 1.00001;
}

// Write K and V to pages in an order of their own, attend, and return the largest error.
double attention_error(const Kind &kind, const Batch &batch) {
    std::mt19937 draw(7);
    const int rows = static_cast<int>(batch.q_lens.size()), dim = batch.dim, heads = kKvHeads * batch.group;
    std::vector<int32_t> cu{0}, tables;
    std::vector<int64_t> mapping;
    int width = 0, pages = 1;
    for (int kv_len : batch.kv_lens) width = std::max(width, (kv_len + kPage - 1) / kPage);
    for (int row = 0; row < rows; row++) {
        cu.push_back(cu.back() + batch.q_lens[row]);
        for (int page = 0; page < width; page++) tables.push_back(page * kPage < batch.kv_lens[row] ? pages++ : -1);
        const auto first = tables.end() - width;
        std::reverse(first, first + (batch.kv_lens[row] + kPage - 1) / kPage);
        for (int i = 0; i < batch.kv_lens[row]; i++) mapping.push_back(first[i / kPage] * kPage + i % kPage);
    }
    const size_t tokens = mapping.size(), slots = static_cast<size_t>(pages) * kKvHeads * kPage;
    Tensor q(draw, static_cast<size_t>(cu.back()) * heads * dim, kind.dtype), out(q.numbers().size(), kind.dtype);
    Tensor k(draw, tokens * kKvHeads * dim, kind.dtype), v(draw, tokens * kKvHeads * dim, kind.dtype);
    Tensor k_pages(slots * dim, kind.kv_dtype), v_pages(slots * dim, kind.kv_dtype);
    const bool scaled = kind.kv_dtype != kind.dtype;
    std::vector<float> k_scales(slots, 1.0f), v_scales(slots, 1.0f), slopes;
    for (int head = 0; head < heads; head++) slopes.push_back(0.3f / static_cast<float>(head + 1));

    const int64_t of_head = kPage * dim, of_page = kKvHeads * of_head, row_size = kKvHeads * dim;
    const pagedkv_write write{pages, kKvHeads, dim, dim, kPage, {row_size, dim, 1}, {row_size, dim, 1},
                              {of_page, of_head, dim}, {of_page, of_head, dim}, {kKvHeads * kPage, kPage, 1},
                              {kKvHeads * kPage, kPage, 1}, 1, kind.dtype, kind.kv_dtype};
    if (pagedkv_write_kv(&write, k.data(), v.data(), k_pages.data(), v_pages.data(), scaled ? k_scales.data() : nullptr,
                         scaled ? v_scales.data() : nullptr, mapping.data(), tokens, batch.threads)) return INFINITY;
    auto slot_of = [&](int row, int key, int head) {
        return (static_cast<size_t>(tables[row * width + key / kPage]) * kKvHeads + head) * kPage + key % kPage;
    };
    for (int i = 0; batch.infinite && i < rows * kKvHeads; i++) {
        v_pages.set(slot_of(i / kKvHeads, batch.kv_lens[i / kKvHeads] - 1, i % kKvHeads) * dim, INFINITY);
    }

    const pagedkv_step step{tables.data(), batch.kv_lens.data(), cu.data(), width, 1, 1, 1, rows, width, cu.back(), 32,
                            32, 32, 0};
    const float scale = 1 / std::sqrt(static_cast<float>(dim));
    const pagedkv_layer layer{heads, kKvHeads, dim, dim, kPage, {heads * dim, dim, 1}, {heads * dim, dim, 1},
                              {of_page, of_head, dim}, {of_page, of_head, dim}, {kKvHeads * kPage, kPage, 1},
                              {kKvHeads * kPage, kPage, 1}, nullptr, batch.alibi ? slopes.data() : nullptr,
                              batch.window, 0, scale, batch.softcap, kind.dtype, kind.kv_dtype};
    if (pagedkv_attend(&step, &layer, q.data(), k_pages.data(), v_pages.data(), scaled ? k_scales.data() : nullptr,
                       scaled ? v_scales.data() : nullptr, out.data(), batch.threads)) return INFINITY;

    std::vector<double> queries = q.numbers(), keys = k_pages.numbers(), values = v_pages.numbers();
    const std::vector<double> written_k = k.numbers(), written_v = v.numbers();
    for (size_t i = 0; i < keys.size(); i++) {
        keys[i] *= k_scales[i / dim];
        values[i] *= v_scales[i / dim];
    }
    double worst = 0;
    for (int row = 0, first = 0; row < rows; first += batch.kv_lens[row++]) {
        const int kv_len = batch.kv_lens[row], q_len = batch.q_lens[row];
        for (int i = 0; i < kv_len * row_size && !batch.infinite; i++) {
            const size_t slot = slot_of(row, i / row_size, i / dim % kKvHeads), to = slot * dim + i % dim;
            const size_t from = first * row_size + i;
            if (!close_enough(keys[to], written_k[from], k_scales[slot], kind.kv_dtype)) return INFINITY;
            if (!close_enough(values[to], written_v[from], v_scales[slot], kind.kv_dtype)) return INFINITY;
        }
        for (int i = 0; i < q_len - batch.infinite; i++) {
            const int position = kv_len - q_len + i;
            const int begin = batch.window ? std::max(0, position - batch.window + 1) : 0;
            for (int head = 0; head < heads; head++) {
                const size_t at = (static_cast<size_t>(cu[row] + i) * heads + head) * dim;
                std::vector<double> sum(dim);
                double total = 0;
                for (int key = begin; key <= position; key++) {
                    const size_t slot = slot_of(row, key, head / batch.group) * dim;
                    double score = 0;
                    for (int d = 0; d < dim; d++) score += queries[at + d] * keys[slot + d];
                    score *= scale;
                    if (batch.softcap > 0) score = batch.softcap * std::tanh(score / batch.softcap);
                    if (batch.alibi) score += slopes[head] * (key - position);
                    const double weight = std::exp(score);
                    total += weight;
                    for (int d = 0; d < dim; d++) sum[d] += weight * values[slot + d];
                }
                for (int d = 0; d < dim; d++) {
                    const double expected = sum[d] / total;
                    worst = std::max(worst, difference(out.get(at + d), expected, std::fabs(expected)));
                }
            }
        }
    }
    return worst;
}

void test_attention(const Kind &kind) {
    const std::string name = kind.name;
    {
        // Groups up to 8 with whole vectors of channels are the decode kernel's, others prefill's.
        Report report("decode " + name, kind.limit);
        for (int group = 1; group <= 9; group++) {
            for (int dim : {20, 64, 80, 96, 112, 128}) {
                const Batch batch{group, dim, {1, 1, 1}, {1, 18, 150}};
                report.add(attention_error(kind, batch), batch.name());
            }
        }
    }
    {
        // Three rows a token: one, two and three vectors of 4, 8 and 16 lanes, and more than an item of 96 rows.
        Report report("prefill " + name, kind.limit);
        for (int dim : {20, 64, 80}) {
            for (int tokens : {2, 3, 5, 8, 10, 11, 16, 17, 45}) {
                const Batch batch{3, dim, {tokens, 1, tokens}, {tokens, 40, tokens + 70}};
                report.add(attention_error(kind, batch), batch.name());
            }
        }
    }
    Report report("rules " + name, kind.limit);
    for (int threads : {1, 2}) {
        for (int group : {3, 4}) {
            std::vector<Batch> batches(5, Batch{group, 64, {1, 5, 40, 1}, {33, 5, 130, 200}, 0, threads});
            batches[1].window = 9;
            batches[2].softcap = 1.5f;
            batches[3].alibi = true;
            batches[4].infinite = kind.kv_dtype <= PAGEDKV_FLOAT16;
            for (const Batch &batch : batches) report.add(attention_error(kind, batch), batch.name());
        }
    }
}

// ---- Linear layers --------------------------------------------------------------------------------------------------

// Two layers of 7 and 34 outputs, the first with a bias.
double linear_error(const Kind &kind, int rows, int dim, int threads) {
    constexpr int kFeatures[2] = {7, 34}, kAll = 41;
    std::mt19937 draw(11);
    Tensor x(draw, rows * dim, kind.dtype), weight(draw, kAll * dim, kind.dtype), bias(draw, kFeatures[0], kind.dtype);
    Tensor out(rows * kAll, kind.dtype);
    const int64_t second = static_cast<int64_t>(kFeatures[0]) * dim * Tensor::width(kind.dtype);
    const pagedkv_linear_layer layers[2] = {
        {weight.data(), bias.data(), dim, kFeatures[0]}, {&weight.bytes[second], nullptr, dim, kFeatures[1]}};
    if (pagedkv_linear(layers, 2, x.data(), dim, out.data(), kAll, rows, dim, kind.dtype, threads)) return INFINITY;
    const std::vector<double> inputs = x.numbers(), weights = weight.numbers();
    double worst = 0;
    for (int i = 0; i < rows * kAll; i++) {
        const int row = i / kAll, feature = i % kAll;
        double sum = feature < kFeatures[0] ? bias.get(feature) : 0, size = 0;
        for (int d = 0; d < dim; d++) {
            const double product = inputs[row * dim + d] * weights[feature * dim + d];
            sum += product;
            size += std::fabs(product);
        }
        worst = std::max(worst, difference(out.get(i), sum, size));
    }
    return worst;
}

void test_linear(const Kind &kind) {
    Report report(std::string("linear ") + kind.name, kind.limit);
    for (int dim : {16, 77, 96}) {
        for (int rows = 1; rows <= 17; rows++) {
            const std::string which = std::to_string(rows) + " rows of " + std::to_string(dim);
            report.add(linear_error(kind, rows, dim, rows % 2 + 1), which);
        }
    }
}

// ---- Step operations ------------------------------------------------------------------------------------------------

// The largest element in every place and once more in the last, then NaN there. Returns how many are not found.
int argmax_misses(const Kind &kind, int dim) {
    std::mt19937 draw(13);
    int misses = 0;
    for (int i = 0; i < 2 * dim; i++) {
        Tensor x(draw, dim, kind.dtype);
        int64_t found = -1;
        x.set(dim - 1, 3);
        x.set(i / 2, i % 2 && kind.dtype == PAGEDKV_FLOAT32 ? NAN : 3);
        pagedkv_argmax(x.data(), dim, &found, 1, dim, kind.dtype, 1);
        misses += found != i / 2;
    }
    return misses;
}

void test_step_operations(const Kind &kind) {
    constexpr int kRows = 6;
    // Results in between are rounded too.
    Report report(std::string("step operations ") + kind.name, 4 * kind.limit);
    for (int dim : {2, 14, 16, 34, 48, 98}) {
        const int count = kRows * dim;
        const std::string where = " of " + std::to_string(dim);
        std::mt19937 draw(17);
        Tensor x(draw, count, kind.dtype), y(draw, count, kind.dtype), z(draw, count, kind.dtype);
        Tensor total(count, kind.dtype), out(count, kind.dtype);
        const std::vector<double> xs = x.numbers(), ys = y.numbers(), zs = z.numbers();
        std::vector<double> expected(count), silu(count), gelu(count), rotated(count);
        pagedkv_rms_norm(x.data(), dim, y.data(), dim, total.data(), dim, z.data(), out.data(), dim, kRows, dim, 1e-5f,
                         kind.dtype, 1);
        for (int i = 0; i < count; i++) expected[i] = xs[i] + ys[i];
        report.add(largest_difference(total, expected), "residual" + where);
        for (int first = 0; first < count; first += dim) {
            double squares = 0;
            for (int d = 0; d < dim; d++) squares += total.get(first + d) * total.get(first + d);
            const double factor = 1 / std::sqrt(squares / dim + 1e-5);
            for (int d = 0; d < dim; d++) expected[first + d] = total.get(first + d) * factor * zs[d];
        }
        report.add(largest_difference(out, expected), "rms_norm" + where);
        pagedkv_rms_norm(total.data(), dim, nullptr, 0, nullptr, 0, z.data(), out.data(), dim, kRows, dim, 1e-5f,
                         kind.dtype, 1);
        report.add(largest_difference(out, expected), "rms_norm without a residual" + where);

        for (int i = 0; i < count; i++) {
            const double tanh = std::tanh(0.7978845608028654 * (xs[i] + 0.044715 * xs[i] * xs[i] * xs[i]));
            silu[i] = xs[i] / (1 + std::exp(-xs[i])) * ys[i];
            gelu[i] = xs[i] / 2 * (1 + tanh) * ys[i];
            // Two heads a row share their angles.
            const int angle = i / (2 * dim) * dim + i % dim;
            const double other = i % dim < dim / 2 ? -xs[i + dim / 2] : xs[i - dim / 2];
            rotated[i] = xs[i] * ys[angle] + other * zs[angle];
        }
        pagedkv_gated(PAGEDKV_SILU, x.data(), dim, y.data(), dim, out.data(), dim, kRows, dim, kind.dtype, 1);
        report.add(largest_difference(out, silu), "silu" + where);
        pagedkv_gated(PAGEDKV_GELU_TANH, x.data(), dim, y.data(), dim, out.data(), dim, kRows, dim, kind.dtype, 1);
        report.add(largest_difference(out, gelu), "gelu" + where);
        pagedkv_rotary(x.data(), 2 * dim, dim, 2, y.data(), z.data(), dim, kRows / 2, dim, kind.dtype, 1);
        report.add(largest_difference(x, rotated), "rotary" + where);
        report.add(argmax_misses(kind, dim), "argmax" + where);
    }
}

}  // namespace

int main() {
    std::printf("%s\n", pagedkv_isa());
    for (const Kind &kind : kKinds) test_attention(kind);
    for (const Kind &kind : kKinds) {
        if (kind.dtype != kind.kv_dtype) continue;
        test_linear(kind);
        test_step_operations(kind);
    }
    std::printf("%s\n", failures ? "FAILED" : "ok");
    return failures != 0;
}
