// y = x Wᵀ (+ bias) (+ residual) for any number of rows.
//
// Each output is summed in stretches of k that begin at fixed places (short sums round less), one accumulator running
// through a stretch in order, whatever the number of rows or columns worked on together: a row's result does not depend
// on its batch-mates.
#pragma once
#include <cstdlib>

#include "compact.h"
#include "kernels.h"
#include "vec.h"

namespace longdraft {
namespace LONGDRAFT_ISA {

#if defined(__AVX512F__)
constexpr int LINEAR_ROWS = 12, LINEAR_BLOCKS = 2;
constexpr bool COMPACT_PRODUCTS = true;
#elif defined(__AVX2__)
constexpr int LINEAR_ROWS = 5, LINEAR_BLOCKS = 1;
constexpr bool COMPACT_PRODUCTS = false;
#else
constexpr int LINEAR_ROWS = 2, LINEAR_BLOCKS = 1;
constexpr bool COMPACT_PRODUCTS = false;
#endif

constexpr int STRETCH = 256;  // of k, in words
constexpr int FEW_ROWS = 8;     // up to so many, memory is what limits
constexpr int AHEAD = 8192;     // bytes: how far ahead one stream is fetched

template <class Task>
void parallel(const Parallel& p, int count, const Task& task) {
  p.run(p.pool, count, [](const void* t, int i) { (*static_cast<const Task*>(t))(i); }, &task);
}
inline int ceil_div(int a, int b) { return (a + b - 1) / b; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }

// Calls task(i) for every i in [0, count). Each thread goes through a stretch of its own, in order, so that memory is
// read from end to end; who is done takes over what others have not begun.
template <class Task>
void in_spans(const Parallel& p, int count, const Task& task) {
  constexpr int MOST = 256;
  struct alignas(64) Span {
    int next, end;
  };
  const int spans = min(p.threads, MOST);
  Span all[MOST];
  for (int i = 0; i < spans; i++) all[i] = {int(int64_t(count) * i / spans), int(int64_t(count) * (i + 1) / spans)};
  parallel(p, spans, [&](int own) {
    for (int n = 0; n < spans; n++) {
      Span& span = all[(own + n) % spans];
      while (__atomic_load_n(&span.next, __ATOMIC_RELAXED) < span.end) {
        const int i = __atomic_fetch_add(&span.next, 1, __ATOMIC_RELAXED);
        if (i < span.end) task(i);
      }
    }
  });
}

// What will be read next: a line of each is fetched at every step.
struct Ahead {
  const char *first, *second;  // either may be null
  void fetch(int i) const {
    if (first) prefetch(first + int64_t(i) * 64);
    if (second) prefetch(second + int64_t(i) * 64);
  }
};

// R rows times C blocks of 16 outputs. `ahead` is what will be read next: its lines are fetched along the way.
template <int R, int C>
inline void products(const float* x, int ldx, const float* w, int k, int from, int to, V (&acc)[R][C],
                     const Ahead& ahead) {
  for (int i = from; i < to; i++) {
    ahead.fetch(i);
    V b[C];
    for (int c = 0; c < C; c++) b[c] = load(w + (int64_t(c) * k + i) * 16);
    for (int r = 0; r < R; r++) {
      V a = splat(x[int64_t(r) * ldx + i]);
      for (int c = 0; c < C; c++) acc[r][c] = fma(a, b[c], acc[r][c]);
    }
  }
}
template <int R, int C>
inline void products(const uint32_t* x, int ldx, const uint32_t* w, int k, int from, int to, V (&acc)[R][C],
                     const Ahead& ahead) {
  for (int i = from; i < to; i++) {
    ahead.fetch(i);
    P b[C];
    for (int c = 0; c < C; c++) b[c] = load_pairs(w + (int64_t(c) * k + i) * 16);
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
inline void block(const T* x, int ldx, const T* w, int k, const Output& out, int row, int column, const Ahead& ahead) {
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

// Inputs in bytes: u = round(x / scale) + 128, so that w · x = scale · w_scale · (w · u - 128 · sum of w). A row of
// inputs is `ldx` words long; its scale stands behind its k words.
struct Bytes {
  uint32_t word;
};
template <int R, int C>
inline void block(const Bytes* x, int ldx, const Bytes* w, int k, const Output& out, int row, int column,
                  const Ahead& ahead) {
  I acc[R][C];
  for (auto& line : acc)
    for (auto& v : line) v = no_sum();
  for (int i = 0; i < k; i++) {
    ahead.fetch(i);
    for (int c = 0; c < C; c++)
      for (int r = 0; r < R; r++)
        acc[r][c] = dot4(acc[r][c], x[int64_t(r) * ldx + i].word, &w[(int64_t(c) * k + i) * 16].word);
  }
  for (int r = 0; r < R; r++) {
    float scale;
    std::memcpy(&scale, x + int64_t(r) * ldx + k, 4);
    for (int c = 0; c < C; c++) {
      int32_t sums[16];
      float y[16];
      store(sums, acc[r][c]);
      for (int i = 0; i < 16; i++)
        y[i] = scale * out.w.scales[column + c * 16 + i] * float(sums[i] - 128 * out.w.sums[column + c * 16 + i]);
      put(out, row + r, column + c * 16, load(y));
    }
  }
}

#if defined(__AVX512F__)

// The four words of group g of inputs; `next` is the first of the groups from g on that stay as they were.
struct Group {
  const uint8_t* data;
  const uint8_t* fourth;  // null: it is compact
};
inline Group group_at(const CompactBlock& w, int g, int& next) {
  const uint8_t* data = w.groups() + int64_t(g) * GROUP_BYTES;
  return {data, w.kept()[next] == g ? w.spilled() + int64_t(next++) * WORD_BYTES : nullptr};
}
inline void words_of(const Group& group, Exponents table, __m512i (&words)[GROUP_WORDS]) {
  if (group.fourth) {
    for (int j = 0; j < 3; j++) words[j] = _mm512_loadu_si512(group.data + j * WORD_BYTES);
    words[3] = _mm512_loadu_si512(group.fourth);
    return;
  }
  words[0] = expand<0>(group.data, table), words[1] = expand<1>(group.data, table);
  words[2] = expand<2>(group.data, table), words[3] = expand<3>(group.data, table);
}

// R rows times a compact block, in the same order of summation as of one that is not.
template <int R>
inline void block(const uint32_t* x, int ldx, const CompactBlock& w, const Output& out, int row, int column) {
  alignas(64) float total[R][16];
  const Exponents table = exponents(w.table());
  int next = 0;
  V acc[R];
  for (int from = 0; from < w.words; from += STRETCH) {
    for (auto& v : acc) v = zero();
    for (int i = from; i < min(w.words, from + STRETCH); i += GROUP_WORDS) {
      const Group group = group_at(w, i / GROUP_WORDS, next);
      for (int line = 0; line < GROUP_BYTES; line += 64) prefetch(group.data + AHEAD + line);
      __m512i words[GROUP_WORDS];
      words_of(group, table, words);
      for (int j = 0; j < GROUP_WORDS; j++)
        for (int r = 0; r < R; r++) acc[r] = dot(acc[r], splat_pair(x[int64_t(r) * ldx + i + j]), pairs_of(words[j]));
    }
    for (int r = 0; r < R; r++) store(total[r], from ? load(total[r]) + acc[r] : acc[r]);
  }
  for (int r = 0; r < R; r++) put(out, row + r, column, load(total[r]));
}

// A compact block as it was: [words][16].
inline void expand_block(const CompactBlock& w, uint32_t* out) {
  const Exponents table = exponents(w.table());
  int next = 0;
  for (int g = 0; g < w.words / GROUP_WORDS; g++) {
    __m512i words[GROUP_WORDS];
    words_of(group_at(w, g, next), table, words);
    for (int j = 0; j < GROUP_WORDS; j++) _mm512_storeu_si512(out + (int64_t(g) * GROUP_WORDS + j) * 16, words[j]);
  }
}

#endif

template <int C, class T>
void rows_of(int rows, const T* x, int ldx, const T* w, int k, const Output& out, int row, int col, const Ahead& ahead) {
#define LONGDRAFT_CASE(R)                                                                \
  case R:                                                                                \
    if constexpr (R <= LINEAR_ROWS) block<R, C>(x, ldx, w, k, out, row, col, ahead);     \
    break;
  switch (rows) {
    LONGDRAFT_CASE(1) LONGDRAFT_CASE(2) LONGDRAFT_CASE(3) LONGDRAFT_CASE(4) LONGDRAFT_CASE(5) LONGDRAFT_CASE(6)
    LONGDRAFT_CASE(7) LONGDRAFT_CASE(8) LONGDRAFT_CASE(9) LONGDRAFT_CASE(10) LONGDRAFT_CASE(11) LONGDRAFT_CASE(12)
  }
#undef LONGDRAFT_CASE
}

// All rows against C blocks of outputs, from `w` on; T is float, uint32_t for pairs of bfloat16, or Bytes; k counts these.
// What lies at `ahead` is fetched meanwhile.
template <int C, class T>
void columns(const T* x, int ldx, int m, const T* w, int k, const Output& out, int column, const void* ahead) {
  const int parts = ceil_div(m, LINEAR_ROWS), size = ceil_div(m, parts);
  const char *next = static_cast<const char*>(ahead), *second = C == 2 ? next + int64_t(k) * 64 : nullptr;
  for (int row = 0; row < m; row += size) {
    const Ahead ahead{next, parts == 1 ? second : nullptr};
    rows_of<C, T>(min(size, m - row), x + int64_t(row) * ldx, ldx, w, k, out, row, column, ahead);
    next = second, second = nullptr;  // the fetching is spread over the parts
  }
}

template <int C, class T>
void linear_in(const Parallel& p, const T* x, int ldx, int m, int k, const Output& out) {
  const int blocks = ceil_div(out.w.n, 16);
  const T* w = static_cast<const T*>(out.w.data);
  const int64_t distance = C == 1 ? AHEAD : int64_t(C) * k * 64;
  in_spans(p, ceil_div(blocks, C), [&](int i) {
    const T* from = w + int64_t(i) * C * k * 16;
    const void* ahead = reinterpret_cast<const char*>(from) + distance;
    if ((i + 1) * C <= blocks)
      columns<C, T>(x, ldx, m, from, k, out, i * C * 16, ahead);
    else
      columns<1, T>(x, ldx, m, from, k, out, i * C * 16, ahead);
  });
}

// Few rows leave time: then memory is read in one stream, which is fastest. Many share each load of a row's inputs.
template <class T>
void linear_of(const Parallel& p, const T* x, int ldx, int m, int k, const Output& out) {
  if (m <= FEW_ROWS || LINEAR_BLOCKS == 1)
    linear_in<1, T>(p, x, ldx, m, k, out);
  else
    linear_in<LINEAR_BLOCKS, T>(p, x, ldx, m, k, out);
}

#if defined(__AVX512F__)

template <int R = 1>
void compact_rows(int m, const uint32_t* x, int ldx, const CompactBlock& w, const Output& out, int column) {
  if (m == R)
    block<R>(x, ldx, w, out, 0, column);
  else if constexpr (R < LINEAR_ROWS)
    compact_rows<R + 1>(m, x, ldx, w, out, column);
}

// Room of a thread's own, for as long as it lives.
inline uint32_t* room(int64_t words) {
  static thread_local struct Room {
    void* data = nullptr;
    int64_t words = 0;
    ~Room() { std::free(data); }
  } own;
  if (own.words < words) {
    std::free(own.data);
    own.data = std::aligned_alloc(64, words * 4), own.words = words;
  }
  return static_cast<uint32_t*>(own.data);
}

// Few rows: words are expanded where they are multiplied. Many: once for all rows, and then they are as any others.
inline void linear_compact(const Parallel& p, const uint32_t* x, int ldx, int m, int k, const Output& out) {
  const int blocks = ceil_div(out.w.n, 16), together = m <= LINEAR_ROWS ? 1 : LINEAR_BLOCKS;
  in_spans(p, ceil_div(blocks, together), [&](int i) {
    const int first = i * together, column = first * 16;
    if (together == 1) return compact_rows(m, x, ldx, block_of(out.w, first), out, column);
    uint32_t* whole = room(int64_t(LINEAR_BLOCKS) * k * 16);
    const int count = min(together, blocks - first);
    for (int c = 0; c < count; c++) expand_block(block_of(out.w, first + c), whole + int64_t(c) * k * 16);
    const void* ahead = block_of(out.w, first + count).data;
    if (count == LINEAR_BLOCKS)
      columns<LINEAR_BLOCKS>(x, ldx, m, whole, k, out, column, ahead);
    else
      columns<1>(x, ldx, m, whole, k, out, column, ahead);
  });
}

#else

inline void linear_compact(const Parallel&, const uint32_t*, int, int, int, const Output&) {}  // never asked for

#endif

inline void round_row(const float* x, int k, uint16_t* out) {
  int i = 0;
  for (; i + 16 <= k; i += 16) store_bf16(out + i, load(x + i));
  for (; i < k; i++) out[i] = to_bf16(x[i]);
  if (k % 2) out[k] = 0;
}

inline void quantise_row(const float* x, int k, uint8_t* out) {
  V top = zero();
  int i = 0;
  for (; i + 16 <= k; i += 16) top = max(top, abs(load(x + i)));
  float most = largest(top);
  for (; i < k; i++) most = std::fabs(x[i]) > most ? std::fabs(x[i]) : most;
  const float inverse = most > 0 ? 127.0f / most : 0.0f, scale = most / 127.0f;
  for (i = 0; i < k; i++) out[i] = uint8_t(int(std::nearbyintf(x[i] * inverse)) + 128);
  for (; i % 4; i++) out[i] = 128;
  std::memcpy(out + i, &scale, 4);
}

inline int words(const Packed& w) { return w.type == FLOAT32 ? w.k : ceil_div(w.k, w.type == INT8 ? 4 : 2); }

inline void linear(const Parallel& p, const float* x, int m, const Packed& w, const float* residual, float* y,
                   uint16_t* rounded) {
  if (m == 0) return;
  Output out{w, residual, y};
  const int k = words(w), at_once = 16;
  if (w.type == FLOAT32) return linear_of<float>(p, x, k, m, k, out);
  const int ldx = w.type == INT8 ? k + 1 : k;
  auto round_rows = [&](int i) {
    for (int r = i * at_once; r < min(m, (i + 1) * at_once); r++) {
      if (w.type == INT8)
        quantise_row(x + int64_t(r) * w.k, w.k, reinterpret_cast<uint8_t*>(rounded) + int64_t(r) * ldx * 4);
      else
        round_row(x + int64_t(r) * w.k, w.k, rounded + int64_t(r) * ldx * 2);
    }
  };
  if (m <= at_once)
    round_rows(0);
  else
    parallel(p, ceil_div(m, at_once), round_rows);
  if (w.type == INT8)
    linear_of<Bytes>(p, reinterpret_cast<const Bytes*>(rounded), ldx, m, k, out);
  else if (w.type == COMPACT)
    linear_compact(p, reinterpret_cast<const uint32_t*>(rounded), ldx, m, k, out);
  else
    linear_of<uint32_t>(p, reinterpret_cast<const uint32_t*>(rounded), ldx, m, k, out);
}

// Sixteen rows of a weight at most; int8 also sets their scales and sums.
inline void pack(const float* weight, const Packed& out) {
  const int k = out.k, step = out.type == FLOAT32 ? 1 : out.type == BFLOAT16 ? 2 : 4;
  for (int row = 0; row < 16; row++) {
    const float* from = weight + int64_t(row) * k;
    float most = 0;
    for (int i = 0; i < k && row < out.n; i++) most = std::fabs(from[i]) > most ? std::fabs(from[i]) : most;
    const float scale = most / 127.0f, inverse = most > 0 ? 127.0f / most : 0.0f;
    int32_t total = 0;
    for (int i = 0; i < ceil_div(k, step) * step; i++) {
      const float f = row < out.n && i < k ? from[i] : 0.0f;
      const int64_t at = int64_t(i / step) * 16 * step + row * step + i % step;
      void* data = const_cast<void*>(out.data);
      if (out.type == FLOAT32)
        static_cast<float*>(data)[at] = f;
      else if (out.type == BFLOAT16)
        static_cast<uint16_t*>(data)[at] = to_bf16(f);
      else
        total += static_cast<int8_t*>(data)[at] = int8_t(std::nearbyintf(f * inverse));
    }
    if (out.type == INT8) {
      const_cast<float*>(out.scales)[row] = scale;
      const_cast<int32_t*>(out.sums)[row] = total;
    }
  }
}

}  // namespace LONGDRAFT_ISA
}  // namespace longdraft
