// What drafts choose by: the attention that each cached token gets, and the scores of pages by the bounds of their keys.
//
// Sums are of floats whatever the cache holds, in one order for any number of threads.
#pragma once
#include <cstdlib>

#include "tile.h"

namespace longdraft {
namespace LONGDRAFT_ISA {

// scores[r][16] = q[r] · K for R queries and the keys of one page
template <class T, int R>
inline void page_products(const float* q, int dim, const typename T::Item* k, float* scores, int64_t stride) {
  V acc[R][2];
  for (auto& row : acc) row[0] = row[1] = zero();
  for (int d = 0; d < dim; d += 2) {
    V first, second;
    if constexpr (T::PER_ITEM == 1)
      first = load(k + d * 16), second = load(k + (d + 1) * 16);
    else
      first = first_of(k + d * 8), second = second_of(k + d * 8);
    for (int r = 0; r < R; r++) {
      acc[r][0] = fma(splat(q[r * dim + d]), first, acc[r][0]);
      acc[r][1] = fma(splat(q[r * dim + d + 1]), second, acc[r][1]);
    }
  }
  for (int r = 0; r < R; r++) store(scores + r * stride, acc[r][0] + acc[r][1]);
}

// Turns a row of scores into weights that add up to 1; those behind `position` are hidden.
inline void weigh(float* scores, int position, int width, V scale) {
  for (int t = position + 1; t < width; t++) scores[t] = -INFINITY;
  V high = splat(-INFINITY), total = zero();
  for (int t = 0; t < width; t += 16) high = max(high, load(scores + t));
  const V top = splat(largest(high));
  for (int t = 0; t < width; t += 16) {
    const V weight = exp((load(scores + t) - top) * scale);
    store(scores + t, weight);
    total = total + weight;
  }
  const V share = splat(1.0f / sum(total));
  for (int t = 0; t < width; t += 16) store(scores + t, load(scores + t) * share);
}

// The mass [count · PAGE] of a row's tokens for one KV head, by the queries [n][heads][dim] at positions `start`, …
template <class T>
class HeadMass {
 public:
  HeadMass(const Shape& shape, const float* q, int start, int head, const int64_t* pages, int count, const void* k)
      : shape_(shape), q_(q), start_(start), head_(head), group_(shape.heads / shape.kv_heads), pages_(pages),
        count_(count), k_(static_cast<const typename T::Item*>(k)) {}

  void run(int n, float* mass) const {
    std::memset(mass, 0, sizeof(float) * count_ * PAGE);
    float* scores = static_cast<float*>(std::malloc(sizeof(float) * ROWS * count_ * PAGE));
    in_blocks<ROWS>(n * group_, [&](auto rows, int row, int, int) { add(rows, row, scores, mass); });
    std::free(scores);
  }

 private:
  static constexpr int ROWS = 6;

  template <int R>
  void add(Rows<R>, int row, float* scores, float* mass) const {
    const int dim = shape_.dim, width = count_ * PAGE;
    const int64_t block = int64_t(dim) / T::PER_ITEM * PAGE;
    const V scale = splat(1.0f / std::sqrt(float(dim)));
    float asked[R * MAX_DIM];
    for (int r = 0; r < R; r++) {
      const int at = (row + r) / group_ * shape_.heads + head_ * group_ + (row + r) % group_;
      std::memcpy(asked + r * dim, q_ + int64_t(at) * dim, sizeof(float) * dim);
    }
    for (int i = 0; i < count_; i++)
      page_products<T, R>(asked, dim, k_ + (pages_[i] * shape_.kv_heads + head_) * block, scores + i * PAGE, width);
    for (int r = 0; r < R; r++) weigh(scores + int64_t(r) * width, start_ + (row + r) / group_, width, scale);
    for (int t = 0; t < width; t += 16) {
      V total = load(mass + t);
      for (int r = 0; r < R; r++) total = total + load(scores + int64_t(r) * width + t);
      store(mass + t, total);
    }
  }

  const Shape& shape_;
  const float* q_;
  int start_, head_, group_;
  const int64_t* pages_;
  int count_;
  const typename T::Item* k_;
};

void token_mass(const Parallel& p, const Shape& shape, int layers, const float* q, int n, int start,
                const int64_t* pages, int count, const void* k, int64_t layer_bytes, float* mass) {
  parallel(p, layers * shape.kv_heads, [&](int i) {
    const int layer = i / shape.kv_heads, head = i % shape.kv_heads;
    const float* queries = q + int64_t(layer) * n * shape.heads * shape.dim;
    const void* keys = static_cast<const char*>(k) + layer * layer_bytes;
    float* out = mass + int64_t(i) * count * PAGE;
    if (shape.kv_bf16)
      HeadMass<Bf16>(shape, queries, start, head, pages, count, keys).run(n, out);
    else
      HeadMass<Float>(shape, queries, start, head, pages, count, keys).run(n, out);
  });
}

inline V load_as_float(const float* p) { return load(p); }
inline V load_as_float(const uint16_t* p) { return load_bf16(p); }

// scores[kv_heads][count] = parts[kv_heads][items] · bounds[page][kv_heads][items], four pages at a time
template <class E>
void scores_of_pages(const E* bounds, const float* parts, int kv_heads, int items, const int64_t* pages, int count,
                     float* scores) {
  const int64_t entry = int64_t(kv_heads) * items;
  for (int page = 0; page < count; page += 4) {
    const E *at[4], *ahead[4];
    for (int i = 0; i < 4; i++) {
      at[i] = bounds + pages[min(page + i, count - 1)] * entry;
      ahead[i] = bounds + pages[min(page + 4 + i, count - 1)] * entry;
    }
    for (int head = 0; head < kv_heads; head++) {
      V acc[4] = {zero(), zero(), zero(), zero()};
      float found[4];
      for (int d = head * items; d < (head + 1) * items; d += 16) {
        const V part = load(parts + d);
        for (int i = 0; i < 4; i++) {
          prefetch(ahead[i] + d);
          acc[i] = fma(part, load_as_float(at[i] + d), acc[i]);
        }
      }
      sums(acc, found);
      for (int i = 0; i < min(4, count - page); i++) scores[int64_t(head) * count + page + i] = found[i];
    }
  }
}

void page_scores(const Parallel& p, const Shape& shape, int layers, const void* bounds, int64_t num_pages,
                 const float* parts, const int64_t* pages, int count, float* scores) {
  const int items = 2 * shape.dim;
  const int64_t entry = int64_t(shape.kv_heads) * items;
  parallel(p, layers, [&](int layer) {
    const float* own = parts + layer * entry;
    float* out = scores + int64_t(layer) * shape.kv_heads * count;
    const int64_t first = layer * num_pages * entry;
    if (shape.kv_bf16)
      scores_of_pages(static_cast<const uint16_t*>(bounds) + first, own, shape.kv_heads, items, pages, count, out);
    else
      scores_of_pages(static_cast<const float*>(bounds) + first, own, shape.kv_heads, items, pages, count, out);
  });
}

}  // namespace LONGDRAFT_ISA
}  // namespace longdraft
