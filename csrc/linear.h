// y = x Wᵀ (+ bias) (+ residual) for any number of rows.
//
// Each output is summed in stretches of k that begin at fixed places (short sums round less), one accumulator running
// through a stretch in order, whatever the number of rows or columns worked on together: a row's result does not depend
// on its batch-mates.
#pragma once
#include "kernels.h"
#include "vec.h"

namespace longdraft {
namespace LONGDRAFT_ISA {

#if defined(__AVX512F__)
constexpr int LINEAR_ROWS = 12, LINEAR_BLOCKS = 2;
#elif defined(__AVX2__)
constexpr int LINEAR_ROWS = 5, LINEAR_BLOCKS = 1;
#else
constexpr int LINEAR_ROWS = 2, LINEAR_BLOCKS = 1;
#endif

constexpr int STRETCH = 256;  // of k, in words

template <class Task>
void parallel(const Parallel& p, int count, const Task& task) {
  p.run(p.pool, count, [](const void* t, int i) { (*static_cast<const Task*>(t))(i); }, &task);
}
inline int ceil_div(int a, int b) { return (a + b - 1) / b; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }

inline int64_t packed_block(const Packed& w) {  // bytes of 16 outputs
  return int64_t(w.bf16 ? ceil_div(w.k, 2) * 2 * 2 : w.k * 4) * 16;
}

// R rows times C blocks of 16 outputs. `ahead` is what will be read next: its lines are fetched along the way.
template <int R, int C>
inline void products(const float* x, int ldx, const float* w, int k, int from, int to, V (&acc)[R][C], const char* ahead) {
  for (int i = from; i < to; i++) {
    V b[C];
    for (int c = 0; c < C; c++) {
      if (ahead) prefetch(ahead + (int64_t(c) * k + i) * 64);
      b[c] = load(w + (int64_t(c) * k + i) * 16);
    }
    for (int r = 0; r < R; r++) {
      V a = splat(x[int64_t(r) * ldx + i]);
      for (int c = 0; c < C; c++) acc[r][c] = fma(a, b[c], acc[r][c]);
    }
  }
}
template <int R, int C>
inline void products(const uint32_t* x, int ldx, const uint32_t* w, int k, int from, int to, V (&acc)[R][C],
                     const char* ahead) {
  for (int i = from; i < to; i++) {
    P b[C];
    for (int c = 0; c < C; c++) {
      if (ahead) prefetch(ahead + (int64_t(c) * k + i) * 64);
      b[c] = load_pairs(w + (int64_t(c) * k + i) * 16);
    }
    for (int r = 0; r < R; r++) {
      P a = splat_pair(x[int64_t(r) * ldx + i]);
      for (int c = 0; c < C; c++) acc[r][c] = dot(acc[r][c], a, b[c]);
    }
  }
}

struct Output {
  const Packed& w;
  const float* residual;
  float* y;
};

inline void put(const Output& out, int row, int column, V v) {
  float* y = out.y + int64_t(row) * out.w.n + column;
  const float* residual = out.residual ? out.residual + int64_t(row) * out.w.n + column : nullptr;
  if (column + 16 <= out.w.n) {
    if (out.w.bias) v = v + load(out.w.bias + column);
    store(y, residual ? load(residual) + v : v);
    return;
  }
  float f[16];
  store(f, v);
  for (int i = 0; column + i < out.w.n; i++) {
    float value = out.w.bias ? f[i] + out.w.bias[column + i] : f[i];
    y[i] = residual ? residual[i] + value : value;
  }
}

template <int R, int C, class T>
inline void block(const T* x, int ldx, const T* w, int k, const Output& out, int row, int column, const char* ahead) {
  alignas(64) float total[R][C][16];
  V acc[R][C];
  for (int from = 0; from < k; from += STRETCH) {
    for (auto& line : acc)
      for (auto& v : line) v = zero();
    products<R, C>(x, ldx, w, k, from, min(k, from + STRETCH), acc, ahead);
    for (int r = 0; r < R; r++)
      for (int c = 0; c < C; c++) store(total[r][c], from ? load(total[r][c]) + acc[r][c] : acc[r][c]);
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) put(out, row + r, column + c * 16, load(total[r][c]));
}

template <int C, class T>
void rows_of(int rows, const T* x, int ldx, const T* w, int k, const Output& out, int row, int col, const char* ahead) {
#define LONGDRAFT_CASE(R)                                                                \
  case R:                                                                                \
    if constexpr (R <= LINEAR_ROWS) block<R, C, T>(x, ldx, w, k, out, row, col, ahead);  \
    break;
  switch (rows) {
    LONGDRAFT_CASE(1) LONGDRAFT_CASE(2) LONGDRAFT_CASE(3) LONGDRAFT_CASE(4) LONGDRAFT_CASE(5) LONGDRAFT_CASE(6)
    LONGDRAFT_CASE(7) LONGDRAFT_CASE(8) LONGDRAFT_CASE(9) LONGDRAFT_CASE(10) LONGDRAFT_CASE(11) LONGDRAFT_CASE(12)
  }
#undef LONGDRAFT_CASE
}

// All rows against some blocks of outputs. T is float, or uint32_t for pairs of bfloat16; k counts these.
template <int C, class T>
void columns(const T* x, int m, int k, const Output& out, int first_block, bool last) {
  const T* w = static_cast<const T*>(out.w.data) + int64_t(first_block) * k * 16;
  const int parts = ceil_div(m, LINEAR_ROWS), size = ceil_div(m, parts);
  for (int row = 0; row < m; row += size) {
    const char* ahead = row || last ? nullptr : reinterpret_cast<const char*>(w + int64_t(C) * k * 16);
    rows_of<C, T>(min(size, m - row), x + int64_t(row) * k, k, w, k, out, row, first_block * 16, ahead);
  }
}

template <class T>
void linear_in(const Parallel& p, const T* x, int m, int k, const Output& out) {
  const int blocks = ceil_div(out.w.n, 16), whole = blocks / LINEAR_BLOCKS, rest = blocks % LINEAR_BLOCKS;
  // A few tiles at a time, so that a thread reads a longer stretch; still enough of them to even out.
  const int group = max(1, min(8, whole / (4 * p.threads))), groups = ceil_div(whole, group);
  parallel(p, groups + (rest ? 1 : 0), [&](int i) {
    if (i == groups) return columns<1, T>(x, m, k, out, whole * LINEAR_BLOCKS, true);
    const int end = min(whole, (i + 1) * group);
    for (int tile = i * group; tile < end; tile++)
      columns<LINEAR_BLOCKS, T>(x, m, k, out, tile * LINEAR_BLOCKS, tile + 1 == whole);
  });
}

inline void round_row(const float* x, int k, uint16_t* out) {
  int i = 0;
  for (; i + 16 <= k; i += 16) store_bf16(out + i, load(x + i));
  for (; i < k; i++) out[i] = to_bf16(x[i]);
  if (k % 2) out[k] = 0;
}

inline void linear(const Parallel& p, const float* x, int m, const Packed& w, const float* residual, float* y,
                   uint16_t* rounded) {
  if (m == 0) return;
  Output out{w, residual, y};
  if (!w.bf16) return linear_in<float>(p, x, m, w.k, out);
  const int pairs = ceil_div(w.k, 2), at_once = 16;
  auto round_rows = [&](int i) {
    for (int r = i * at_once; r < min(m, (i + 1) * at_once); r++)
      round_row(x + int64_t(r) * w.k, w.k, rounded + int64_t(r) * pairs * 2);
  };
  if (m <= at_once)
    round_rows(0);
  else
    parallel(p, ceil_div(m, at_once), round_rows);
  linear_in<uint32_t>(p, reinterpret_cast<const uint32_t*>(rounded), m, pairs, out);
}

inline void pack(const float* weight, void* out, int n, int k, bool bf16) {
  const int k_padded = bf16 ? ceil_div(k, 2) * 2 : k;
  for (int row = 0; row < ceil_div(n, 16) * 16; row++)
    for (int i = 0; i < k_padded; i++) {
      const float f = row < n && i < k ? weight[int64_t(row) * k + i] : 0.0f;
      const int64_t block = int64_t(row / 16) * k_padded * 16;
      if (bf16)
        static_cast<uint16_t*>(out)[block + int64_t(i / 2) * 32 + (row % 16) * 2 + i % 2] = to_bf16(f);
      else
        static_cast<float*>(out)[block + int64_t(i) * 16 + row % 16] = f;
    }
}

}  // namespace LONGDRAFT_ISA
}  // namespace longdraft
