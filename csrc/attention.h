// Attention of ragged queries over pages: prefill chunks, decoding and verifying are the same routine.
//
// A piece is up to 64 queries (times heads of a KV group) of a row over at most 64 pages; K and V of a page are read
// once for all of them. Pieces begin at fixed pages and are merged in order, so a query's result depends on its own
// pages alone, not on the queries beside it.
#pragma once
#include "linear.h"

namespace longdraft {
namespace LONGDRAFT_ISA {

constexpr int TILE = 4, KEYS = TILE * PAGE, MAX_DIM = 256;
#if defined(__AVX512F__)
constexpr int SCORE_ROWS = 6, SCORE_PAGES = 4, VALUE_ROWS = 6, VALUE_BLOCKS = 4;
#elif defined(__AVX2__)
constexpr int SCORE_ROWS = 2, SCORE_PAGES = 2, VALUE_ROWS = 2, VALUE_BLOCKS = 2;
#else
constexpr int SCORE_ROWS = 1, SCORE_PAGES = 2, VALUE_ROWS = 1, VALUE_BLOCKS = 2;
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

// Calls f(Rows<r>) for blocks of at most N rows; how rows are split does not show in their results.
template <int N, class F>
inline void in_blocks(int count, const F& f) {
  const int parts = ceil_div(count, N), size = ceil_div(count, parts);
  for (int row = 0; row < count; row += size) {
    const int rows = min(size, count - row);
#define LONGDRAFT_CASE(R) \
  if constexpr (R <= N)   \
    if (rows == R) f(Rows<R>(), row);
    LONGDRAFT_CASE(1) LONGDRAFT_CASE(2) LONGDRAFT_CASE(3) LONGDRAFT_CASE(4) LONGDRAFT_CASE(5) LONGDRAFT_CASE(6)
#undef LONGDRAFT_CASE
  }
}

// Keys of a tile of four pages; where each page's block begins, and what will be read after it.
template <class T>
struct Tile {
  const typename T::Item* block[TILE];
  const char* ahead[TILE];  // or null
};

// scores[r][64] = q[r] · K, in steps over the head's dimensions
template <class T, int R, int C>
inline void scores_of(const typename T::Item* q, int items, const Tile<T>& k, int page, float* scores, bool fetch) {
  V acc[R][C];
  for (auto& line : acc)
    for (auto& v : line) v = zero();
  for (int d = 0; d < items; d++) {
    for (int c = 0; c < C; c++) {
      if (fetch) prefetch(k.ahead[page + c] + d * 64);
      for (int r = 0; r < R; r++) acc[r][c] = T::multiply(acc[r][c], q + r * items + d, k.block[page + c] + d * 16);
    }
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) store(scores + r * KEYS + (page + c) * PAGE, acc[r][c]);
}

// o[r][block of the dimensions] += p[r] · V, in the order of the tokens
template <class T, int R, int B>
inline void values_of(const typename T::Item* p, const Tile<T>& v, int dim, int at, float* o, bool fetch) {
  constexpr int STEPS = PAGE / T::PER_ITEM;
  const int line = dim;  // items per step: dim floats, or dim pairs
  V acc[R][B];
  for (int r = 0; r < R; r++)
    for (int b = 0; b < B; b++) acc[r][b] = load(o + r * dim + at + b * 16);
  for (int page = 0; page < TILE; page++) {
    const typename T::Item* block = v.block[page] + at;
    for (int s = 0; s < STEPS; s++) {
      for (int b = 0; b < B; b++) {
        if (fetch) prefetch(v.ahead[page] + (int64_t(s) * line + at + b * 16) * 4);
        for (int r = 0; r < R; r++)
          acc[r][b] = T::multiply(acc[r][b], p + r * (KEYS / T::PER_ITEM) + page * STEPS + s, block + s * line + b * 16);
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int b = 0; b < B; b++) store(o + r * dim + at + b * 16, acc[r][b]);
}

// The state of a piece: queries, running maxima and sums (per lane), unnormalised outputs.
template <class T>
struct State {
  alignas(64) float scores[QUERIES * KEYS];
  alignas(64) uint16_t weights[QUERIES * KEYS];
  alignas(64) float largest[QUERIES], sums[QUERIES * 16], out[QUERIES * MAX_DIM];
  alignas(64) typename T::Item queries[QUERIES * MAX_DIM];
  alignas(64) typename T::Item clean[TILE][PAGE * MAX_DIM];  // values of pages that end in junk
  int position[QUERIES];
};

template <class T>
class Worker {
 public:
  Worker(const Shape& shape, const View& view, const Piece& piece, const Cache& cache)
      : shape_(shape), view_(view), piece_(piece), group_(shape.heads / shape.kv_heads),
        scale_(splat(1.4426950408889634f / std::sqrt(float(shape.dim)))) {  // weights are powers of two, not of e
    const int64_t list = int64_t(piece.row) * view.lists + (view.lists == 1 ? 0 : piece.head);
    rows_ = piece.heads * piece.count;
    pages_ = view.pages + list * view.width;
    first_ = view.first + list * view.width;
    positions_ = view.positions ? view.positions + list * view.width * PAGE : nullptr;
    items_ = shape.dim / T::PER_ITEM;
    page_items_ = int64_t(items_) * PAGE;
    k_ = static_cast<const typename T::Item*>(cache.k);
    v_ = static_cast<const typename T::Item*>(cache.v);
  }

  void run(const float* q, int stride, float* partial) {
    prepare(q, stride);
    const int end = piece_.page + piece_.pages;
    for (int page = piece_.page; page < end; page += TILE)
      for (int head = 0; head < piece_.heads; head++) tile(head, page, min(TILE, end - page));
    for (int r = 0; r < rows_; r++) {
      float* out = partial + int64_t(r) * (shape_.dim + 2);
      out[0] = s_.largest[r];
      out[1] = sum(load(s_.sums + r * 16));
      std::memcpy(out + 2, s_.out + r * shape_.dim, shape_.dim * sizeof(float));
    }
  }

 private:
  void prepare(const float* q, int stride) {
    const int row = piece_.row, first = view_.starts[row], queries = view_.starts[row + 1] - first;
    lowest_ = 1 << 30, highest_ = -1;
    for (int r = 0; r < rows_; r++) {
      const int query = piece_.query + r % piece_.count, token = query / group_;
      const int head = (piece_.head + r / piece_.count) * group_ + query % group_;
      const float* from = q + int64_t(first + token) * stride + int64_t(head) * shape_.dim;
      for (int d = 0; d < shape_.dim; d += 16) {
        if constexpr (T::PER_ITEM == 1)
          store(reinterpret_cast<float*>(s_.queries) + r * shape_.dim + d, load(from + d));
        else
          store_bf16(reinterpret_cast<uint16_t*>(s_.queries) + r * shape_.dim + d, load(from + d));
      }
      const int position = view_.lens[row] - queries + token;
      s_.position[r] = position;
      lowest_ = min(lowest_, position), highest_ = max(highest_, position);
      s_.largest[r] = -INFINITY;
    }
    std::memset(s_.sums, 0, sizeof(float) * rows_ * 16);
    std::memset(s_.out, 0, sizeof(float) * rows_ * shape_.dim);
  }

  const typename T::Item* at(const typename T::Item* storage, int page, int head) const {
    return storage + (int64_t(pages_[page]) * shape_.kv_heads + piece_.head + head) * page_items_;
  }

  int slot(int page, int i) const { return positions_ ? positions_[page * PAGE + i] : first_[page] + i; }

  bool visible(int position) const {
    return position < view_.sinks[piece_.row] || position >= view_.window[piece_.row];
  }

  // Whether every query sees every slot of a page.
  bool plain(int page) const {
    const int first = first_[page], last = first + PAGE - 1;
    return !positions_ && last <= lowest_ && (first >= view_.window[piece_.row] || last < view_.sinks[piece_.row]);
  }

  void tile(int head, int page, int count) {
    if (!positions_ && first_[page] > highest_) return;
    Tile<T> k, v;
    bool whole = count == TILE;
    for (int i = 0; i < TILE; i++) {
      const int here = page + min(i, count - 1);
      k.block[i] = at(k_, here, head);
      v.block[i] = at(v_, here, head);
      whole = whole && plain(here);
    }
    const bool more = look_ahead(head, page, count, k, v);
    if (!whole) hide_junk(page, count, v);
    const int base = head * piece_.count;
    in_blocks<SCORE_ROWS>(piece_.count, [&](auto rows, int row) { scores(rows, base + row, k, more && row == 0); });
    if (!whole) mask(base, page, count);
    for (int r = 0; r < piece_.count; r++) softmax(base + r);
    in_blocks<VALUE_ROWS>(piece_.count, [&](auto rows, int row) { values(rows, base + row, v, more && row == 0); });
  }

  // Notes what will be read next, to be fetched meanwhile: the next head's blocks, or the next tile's.
  bool look_ahead(int head, int page, int count, Tile<T>& k, Tile<T>& v) const {
    const int end = piece_.page + piece_.pages;
    const bool same = head + 1 < piece_.heads;
    const int next = same ? page : page + TILE, left = same ? count : end - next;
    if (left <= 0) return false;
    for (int i = 0; i < TILE; i++) {
      const int after = next + min(i, min(TILE, left) - 1);
      k.ahead[i] = reinterpret_cast<const char*>(at(k_, after, same ? head + 1 : 0));
      v.ahead[i] = reinterpret_cast<const char*>(at(v_, after, same ? head + 1 : 0));
    }
    return true;
  }

  template <int R>
  void scores(Rows<R>, int row, const Tile<T>& k, bool fetch) {
    for (int page = 0; page < TILE; page += SCORE_PAGES)
      scores_of<T, R, SCORE_PAGES>(s_.queries + row * items_, items_, k, page, s_.scores + row * KEYS, fetch);
  }

  template <int R>
  void values(Rows<R>, int row, const Tile<T>& v, bool fetch) {
    const typename T::Item* p;
    if constexpr (T::PER_ITEM == 1)
      p = s_.scores + row * KEYS;
    else
      p = reinterpret_cast<const uint32_t*>(s_.weights) + row * (KEYS / 2);
    int d = 0;
    for (; d + VALUE_BLOCKS * 16 <= shape_.dim; d += VALUE_BLOCKS * 16)
      values_of<T, R, VALUE_BLOCKS>(p, v, shape_.dim, d, s_.out + row * shape_.dim, fetch);
    for (; d < shape_.dim; d += 16) values_of<T, R, 1>(p, v, shape_.dim, d, s_.out + row * shape_.dim, fetch);
  }

  // Values behind the row's length may be anything, and 0 · NaN is NaN: such pages are read through a clean copy.
  void hide_junk(int page, int count, Tile<T>& v) {
    for (int i = 0; i < TILE; i++) {
      bool junk = i >= count;
      for (int t = 0; t < PAGE && !junk; t++) junk = slot(page + i, t) >= view_.lens[piece_.row];
      if (!junk) continue;
      std::memcpy(s_.clean[i], v.block[i], page_items_ * sizeof(typename T::Item));
      for (int t = 0; t < PAGE; t++) {
        if (i < count && slot(page + i, t) < view_.lens[piece_.row]) continue;
        for (int d = 0; d < shape_.dim; d++) {
          if constexpr (T::PER_ITEM == 1)
            s_.clean[i][t * shape_.dim + d] = 0.0f;
          else
            reinterpret_cast<uint16_t*>(s_.clean[i])[((t / 2) * shape_.dim + d) * 2 + t % 2] = 0;
        }
      }
      v.block[i] = s_.clean[i];
    }
  }

  void mask(int base, int page, int count) {
    for (int i = 0; i < TILE; i++)
      for (int t = 0; t < PAGE; t++) {
        const int position = i < count ? slot(page + i, t) : 1 << 30;
        const bool seen = i < count && visible(position);
        for (int r = base; r < base + piece_.count; r++)
          if (!seen || position > s_.position[r]) s_.scores[r * KEYS + i * PAGE + t] = -INFINITY;
      }
  }

  // Scores of a query become weights; its sums and outputs are rescaled where a larger score has come.
  void softmax(int r) {
    float* scores = s_.scores + r * KEYS;
    V a[TILE], top = load(scores) * scale_;
    for (int i = 0; i < TILE; i++) a[i] = load(scores + i * PAGE) * scale_, top = max(a[i], top);
    if (any_above(top, splat(s_.largest[r]))) {
      const float now = longest(top, s_.largest[r]);
      const V factor = exp2(splat(s_.largest[r] - now));
      s_.largest[r] = now;
      store(s_.sums + r * 16, load(s_.sums + r * 16) * factor);
      for (int d = 0; d < shape_.dim; d += 16)
        store(s_.out + r * shape_.dim + d, load(s_.out + r * shape_.dim + d) * factor);
    }
    const bool none = s_.largest[r] == -INFINITY;  // nothing seen so far
    V total = zero();
    for (int i = 0; i < TILE; i++) {
      a[i] = none ? keep_nan(a[i]) : exp2(a[i] - splat(s_.largest[r]));
      total = total + a[i];
      if constexpr (T::PER_ITEM == 1)
        store(scores + i * PAGE, a[i]);
      else
        store_bf16(s_.weights + r * KEYS + i * PAGE, a[i]);
    }
    store(s_.sums + r * 16, load(s_.sums + r * 16) + total);
  }

  static float longest(V top, float before) {
    const float now = longdraft::LONGDRAFT_ISA::largest(top);
    return now > before ? now : before;
  }
  static V keep_nan(V a) { return where_below(a, splat(INFINITY), zero(), a); }

  const Shape& shape_;
  const View& view_;
  const Piece& piece_;
  const int group_;
  const V scale_;
  const int32_t *pages_, *first_, *positions_;
  const typename T::Item *k_, *v_;
  int rows_, items_, lowest_, highest_;
  int64_t page_items_;
  State<T> s_;
};

inline void merge(const Shape& shape, const View& view, const Piece* pieces, const Merge& merge, const float* partial,
                  float* out) {
  const Piece& first = pieces[merge.first];
  const int group = shape.heads / shape.kv_heads, dim = shape.dim;
  for (int r = 0; r < first.heads * first.count; r++) {
    float top = -INFINITY;
    for (int i = 0; i < merge.count; i++) {
      const float m = partial[pieces[merge.first + i].partial + int64_t(r) * (dim + 2)];
      top = m > top ? m : top;
    }
    const int query = first.query + r % first.count, head = (first.head + r / first.count) * group + query % group;
    float* to = out + (int64_t(view.starts[first.row] + query / group) * shape.heads + head) * dim;
    float total = 0;
    for (int d = 0; d < dim; d += 16) store(to + d, zero());
    for (int i = 0; i < merge.count; i++) {
      const float* p = partial + pieces[merge.first + i].partial + int64_t(r) * (dim + 2);
      if (p[0] == -INFINITY && p[1] == 0) continue;  // it saw nothing there
      const float factor = std::exp2(p[0] - top);
      total += factor * p[1];
      for (int d = 0; d < dim; d += 16) store(to + d, fma(splat(factor), load(p + 2 + d), load(to + d)));
    }
    for (int d = 0; d < dim; d += 16) store(to + d, load(to + d) / splat(total));
  }
}

inline void attention(const Parallel& p, const Shape& shape, const View& view, const Piece* pieces, int num_pieces,
                      const Merge* merges, int num_merges, const float* q, int stride, const Cache& cache,
                      float* partial, float* out) {
  parallel(p, num_pieces, [&](int i) {
    const Piece& piece = pieces[i];
    if (shape.kv_bf16)
      Worker<Bf16>(shape, view, piece, cache).run(q, stride, partial + piece.partial);
    else
      Worker<Float>(shape, view, piece, cache).run(q, stride, partial + piece.partial);
  });
  parallel(p, num_merges, [&](int i) { merge(shape, view, pieces, merges[i], partial, out); });
}

// K and V of new tokens, `stride` floats apart, into their slots.
inline void write(const Shape& shape, const float* k, const float* v, const int64_t* slots, int n, int stride,
                  const Cache& cache) {
  const int dim = shape.dim;
  for (int i = 0; i < n; i++)
    for (int g = 0; g < shape.kv_heads; g++) {
      const int64_t block = (slots[i] / PAGE * shape.kv_heads + g) * PAGE * dim;
      const int t = int(slots[i] % PAGE);
      const float *from_k = k + int64_t(i) * stride + g * dim, *from_v = v + int64_t(i) * stride + g * dim;
      for (int d = 0; d < dim; d++) {
        if (shape.kv_bf16) {
          static_cast<uint16_t*>(cache.k)[block + (d / 2) * 32 + t * 2 + d % 2] = to_bf16(from_k[d]);
          static_cast<uint16_t*>(cache.v)[block + ((t / 2) * dim + d) * 2 + t % 2] = to_bf16(from_v[d]);
        } else {
          static_cast<float*>(cache.k)[block + d * 16 + t] = from_k[d];
          static_cast<float*>(cache.v)[block + t * dim + d] = from_v[d];
        }
      }
    }
}

}  // namespace LONGDRAFT_ISA
}  // namespace longdraft
