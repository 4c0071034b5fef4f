// The products of attention: a few queries times the keys, or the values, of a tile of four pages.
#pragma once
#include "linear.h"

namespace longdraft {
namespace LONGDRAFT_ISA {

constexpr int KEYS = TILE * PAGE, MAX_DIM = 256;
#if defined(__AVX512F__)
constexpr int SCORE_ROWS = 6, VALUE_ROWS = 6, VALUE_BLOCKS = 4;
#elif defined(__AVX2__)
constexpr int SCORE_ROWS = 1, VALUE_ROWS = 2, VALUE_BLOCKS = 2;
#else
constexpr int SCORE_ROWS = 1, VALUE_ROWS = 1, VALUE_BLOCKS = 2;
#endif

// What differs between the two storage types. An Item holds one float, or a pair of bfloat16.
struct Float {
  using Item = float;
  static constexpr int PER_ITEM = 1;
  static V multiply(V acc, const float* a, const float* b) { return fma(splat(*a), load(b), acc); }
};
struct Bf16 {
  using Item = uint32_t;
  static constexpr int PER_ITEM = 2;
  static V multiply(V acc, const uint32_t* a, const uint32_t* b) { return dot(acc, splat_pair(*a), load_pairs(b)); }
};

template <int R>
struct Rows {};

// A block that will be read later, fetched line by line between the products: each of `parts` blocks of rows does a part.
// A block that will be read later, fetched line by line between the products. Where `halves`, the steps of one block of
// rows go through half of its lines: the next block of rows does the others, and fetching never comes in bursts.
template <class T>
struct Later {
  const typename T::Item* at;
  bool halves;
  void fetch(int step) const { prefetch(at + (halves ? step / 2 : step) * 16); }
};

// Calls f(Rows<r>, first row, number of the block, blocks) for blocks of at most N rows; how rows are split does not show
// in their results.
template <int N, class F>
inline void in_blocks(int count, const F& f) {
  const int parts = ceil_div(count, N), size = ceil_div(count, parts);
  for (int row = 0; row < count; row += size) {
    const int rows = min(size, count - row);
#define LONGDRAFT_CASE(R) \
  if constexpr (R <= N)   \
    if (rows == R) f(Rows<R>(), row, row / size, parts);
    LONGDRAFT_CASE(1) LONGDRAFT_CASE(2) LONGDRAFT_CASE(3) LONGDRAFT_CASE(4) LONGDRAFT_CASE(5) LONGDRAFT_CASE(6)
#undef LONGDRAFT_CASE
  }
}

// scores[r][page's 16] = q[r] · K of one page and head: four sums over every fourth step of the head's dimensions.
// `ahead` is a block that will be read later, fetched line by line between the products.
template <class T, int R>
inline void scores_of(const typename T::Item* q, int items, const typename T::Item* k, Later<T> ahead, float* scores) {
  constexpr int SUMS = 4;
  V acc[R][SUMS];
  for (auto& row : acc)
    for (auto& v : row) v = zero();
  for (int d = 0; d < items; d += SUMS) {
    for (int i = 0; i < SUMS; i++) {
      ahead.fetch(d + i);
      for (int r = 0; r < R; r++) acc[r][i] = T::multiply(acc[r][i], q + r * items + d + i, k + (d + i) * 16);
    }
  }
  for (int r = 0; r < R; r++) store(scores + r * KEYS, (acc[r][0] + acc[r][1]) + (acc[r][2] + acc[r][3]));
}

// o[r][block of the dimensions] += p[r] · V of one page and head, in the order of the tokens
template <class T, int R, int B>
inline void values_of(const typename T::Item* p, const typename T::Item* v, Later<T> ahead, int dim, int at, float* o) {
  constexpr int STEPS = PAGE / T::PER_ITEM;
  const int line = dim;  // items per step: dim floats, or dim pairs
  V acc[R][B];
  for (int r = 0; r < R; r++)
    for (int b = 0; b < B; b++) acc[r][b] = load(o + r * dim + at + b * 16);
  for (int s = 0; s < STEPS; s++) {
    for (int b = 0; b < B; b++) {
      const int64_t step = int64_t(s) * line + at + b * 16;
      ahead.fetch((s * dim + at) / 16 + b);
      for (int r = 0; r < R; r++) acc[r][b] = T::multiply(acc[r][b], p + r * (KEYS / T::PER_ITEM) + s, v + step);
    }
  }
  for (int r = 0; r < R; r++)
    for (int b = 0; b < B; b++) store(o + r * dim + at + b * 16, acc[r][b]);
}

}  // namespace LONGDRAFT_ISA
}  // namespace longdraft
