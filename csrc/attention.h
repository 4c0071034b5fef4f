// Attention of ragged queries over pages: prefill chunks, decoding and verifying are the same routine.
//
// A piece is up to 64 queries (times heads of a KV group) of a row over at most 64 pages; K and V of a page are read
// once for all of them. Pieces begin at fixed pages and are merged in order, so a query's result depends on its own
// pages alone, not on the queries beside it.
//
// The mass of a page is the share of attention that a query gives it, summed over the heads of a KV group. A piece notes
// the sums of its weights, page by page, and the maximum they are relative to, tile by tile; merging makes shares of them.
#pragma once
#include "tile.h"

namespace longdraft {
namespace LONGDRAFT_ISA {

// The state of a piece: queries, running maxima and sums (per lane), unnormalised outputs.
template <class T>
struct State {
  alignas(64) float scores[QUERIES * KEYS];
  alignas(64) uint16_t weights[QUERIES * KEYS];
  alignas(64) float largest[QUERIES], sums[QUERIES * 16], out[QUERIES * MAX_DIM];
  alignas(64) typename T::Item queries[QUERIES * MAX_DIM];
  alignas(64) typename T::Item clean[PAGE * MAX_DIM];  // values of a page that ends in junk
  int position[QUERIES];
  bool noted[QUERIES];  // whether its masses are wanted
};

template <class T>
class Worker {
 public:
  using Item = typename T::Item;

  // `next`: the piece that this thread will work on afterwards, or null
  Worker(const Shape& shape, const View& view, const Piece& piece, const Piece* next, const Cache& cache, const Mass& mass)
      : shape_(shape), view_(view), piece_(piece), next_(next), mass_(mass), group_(shape.heads / shape.kv_heads),
        notes_(mass.notes + piece.partial / (shape.dim + 2) * NOTES), scale_(splat(1.4426950408889634f / std::sqrt(float(shape.dim)))) {  // weights are powers of two, not of e
    const int64_t list = list_of(piece);
    rows_ = piece.heads * piece.count;
    first_ = view.first + list * view.width;
    positions_ = view.positions ? view.positions + list * view.width * PAGE : nullptr;
    items_ = shape.dim / T::PER_ITEM;
    page_items_ = int64_t(items_) * PAGE;
    k_ = static_cast<const Item*>(cache.k);
    v_ = static_cast<const Item*>(cache.v);
  }

  void run(const float* q, int stride, float* partial) {
    prepare(q, stride);
    const int end = piece_.page + piece_.pages;
    Tile now = tile_at(piece_, piece_.page);
    for (int page = piece_.page; page < end; page += TILE) {
      const Tile next = page + TILE < end ? tile_at(piece_, page + TILE) : next_ ? tile_at(*next_, next_->page) : now;
      if (positions_ || first_[page] <= highest_) tile(page, now, next);
      now = next;
    }
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
      s_.noted[r] = mass_.out && mass_.at[first + token] >= 0;
      if (!s_.noted[r]) continue;
      std::memset(notes_ + r * NOTES, 0, sizeof(float) * CHUNK_PAGES);
      for (int tile = 0; tile < CHUNK_PAGES / TILE; tile++) notes_[r * NOTES + CHUNK_PAGES + tile] = -INFINITY;
    }
    std::memset(s_.sums, 0, sizeof(float) * rows_ * 16);
    std::memset(s_.out, 0, sizeof(float) * rows_ * shape_.dim);
  }

  int64_t list_of(const Piece& piece) const {
    return int64_t(piece.row) * view_.lists + (view_.lists == 1 ? 0 : piece.head);
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

  // Where the pages of a tile lie, in items from the beginning of a layer's keys or values.
  struct Tile {
    int count, heads;
    int64_t at[TILE];
    const Item* block(const Item* storage, int i, int head, int64_t items) const {
      return storage + at[min(i, count - 1)] + min(head, heads - 1) * items;
    }
  };
  Tile tile_at(const Piece& piece, int page) const {
    Tile t{min(TILE, piece.page + piece.pages - page), piece.heads, {}};
    const int32_t* numbers = view_.pages + list_of(piece) * view_.width + page;
    for (int i = 0; i < t.count; i++) t.at[i] = (int64_t(numbers[i]) * shape_.kv_heads + piece.head) * page_items_;
    return t;
  }

  // Keys, then values, in the order of their addresses: page by page, and all heads of each. The processor fetches ahead
  // by itself only where a thread reads on, and jumps from page to page cost a third of the bandwidth. What is fetched
  // meanwhile comes next: values after keys, the last page's between the softmaxes, and the next tile's keys after
  // values. It must not be driven out before.
  void tile(int page, const Tile& now, const Tile& next) {
    bool whole = now.count == TILE;
    for (int i = 0; i < now.count; i++) whole = whole && plain(page + i);
    const int last = now.count > 1 ? now.count - 1 : now.count;
    for (int i = 0; i < now.count; i++)
      for (int head = 0; head < piece_.heads; head++) {
        const Item* k = now.block(k_, i, head, page_items_);
        const Item* later = i == last ? k : now.block(v_, i, head, page_items_);  // k: nothing
        const int base = head * piece_.count;
        in_blocks<SCORE_ROWS>(piece_.count, [&](auto rows, int row, int block, int blocks) {
          scores(rows, base + row, i, k, part(later, block, blocks));
        });
      }
    if (!whole) mask(page, now.count);
    weigh(page - piece_.page, last < now.count ? now.block(v_, last, 0, page_items_) : nullptr);
    for (int i = 0; i < now.count; i++)
      for (int head = 0; head < piece_.heads; head++) {
        const Item *v = now.block(v_, i, head, page_items_), *later = next.block(k_, i, head, page_items_);
        if (!whole) v = without_junk(page + i, v);
        const int base = head * piece_.count;
        in_blocks<VALUE_ROWS>(piece_.count, [&](auto rows, int row, int block, int blocks) {
          values(rows, base + row, i, v, part(later, block, blocks));
        });
      }
  }

  // What of a block is fetched beside some rows.
  Later<T> part(const Item* block, int number, int of) const {
    return {block + (of > 1 ? number % 2 * (page_items_ / 2) : 0), of > 1};
  }

  // All rows' softmaxes; `later`: a page's values, of all heads, which are fetched meanwhile.
  void weigh(int page, const Item* later) {
    const int lines = later ? int(page_items_ / 16) * piece_.heads : 0;
    for (int r = 0, line = 0; r < rows_; r++) {
      for (const int stop = lines * (r + 1) / rows_; line < stop; line++) prefetch(later + line * 16);
      softmax(r, page);
    }
  }

  template <int R>
  void scores(Rows<R>, int row, int i, const Item* k, Later<T> ahead) {
    scores_of<T, R>(s_.queries + row * items_, items_, k, ahead, s_.scores + row * KEYS + i * PAGE);
  }

  template <int R>
  void values(Rows<R>, int row, int i, const Item* v, Later<T> ahead) {
    const Item* p;
    if constexpr (T::PER_ITEM == 1)
      p = s_.scores + row * KEYS + i * PAGE;
    else
      p = reinterpret_cast<const uint32_t*>(s_.weights) + (row * KEYS + i * PAGE) / 2;
    float* out = s_.out + row * shape_.dim;
    int d = 0;
    for (; d + VALUE_BLOCKS * 16 <= shape_.dim; d += VALUE_BLOCKS * 16)
      values_of<T, R, VALUE_BLOCKS>(p, v, ahead, shape_.dim, d, out);
    for (; d < shape_.dim; d += 16) values_of<T, R, 1>(p, v, ahead, shape_.dim, d, out);
  }

  // Values behind the row's length may be anything, and 0 · NaN is NaN: such a page is read through a clean copy.
  const Item* without_junk(int page, const Item* v) {
    bool junk = false;
    for (int t = 0; t < PAGE && !junk; t++) junk = slot(page, t) >= view_.lens[piece_.row];
    if (!junk) return v;
    std::memcpy(s_.clean, v, page_items_ * sizeof(Item));
    for (int t = 0; t < PAGE; t++) {
      if (slot(page, t) < view_.lens[piece_.row]) continue;
      for (int d = 0; d < shape_.dim; d++) {
        if constexpr (T::PER_ITEM == 1)
          s_.clean[t * shape_.dim + d] = 0.0f;
        else
          reinterpret_cast<uint16_t*>(s_.clean)[((t / 2) * shape_.dim + d) * 2 + t % 2] = 0;
      }
    }
    return s_.clean;
  }

  void mask(int page, int count) {
    for (int i = 0; i < TILE; i++)
      for (int t = 0; t < PAGE; t++) {
        const int position = i < count ? slot(page + i, t) : 1 << 30;
        const bool seen = i < count && visible(position);
        for (int r = 0; r < rows_; r++)
          if (!seen || position > s_.position[r]) s_.scores[r * KEYS + i * PAGE + t] = -INFINITY;
      }
  }

  // Scores of a query become weights; its sums and outputs are rescaled where a larger score has come.
  void softmax(int r, int page) {
    float* scores = s_.scores + r * KEYS;
    V a[TILE], top = a[0] = load(scores);
    for (int i = 1; i < TILE; i++) a[i] = load(scores + i * PAGE), top = max(a[i], top);
    top = top * scale_;
    if (any_above(top, splat(s_.largest[r]))) {
      const float now = longest(top, s_.largest[r]);
      const V factor = exp2(splat(s_.largest[r] - now));
      s_.largest[r] = now;
      store(s_.sums + r * 16, load(s_.sums + r * 16) * factor);
      for (int d = 0; d < shape_.dim; d += 16)
        store(s_.out + r * shape_.dim + d, load(s_.out + r * shape_.dim + d) * factor);
    }
    const V less = splat(s_.largest[r] == -INFINITY ? 0.0f : -s_.largest[r]);  // nothing seen so far: weights of 0
    V total = zero();
    for (int i = 0; i < TILE; i++) {
      a[i] = exp2(fma(a[i], scale_, less));
      total = total + a[i];
      if constexpr (T::PER_ITEM == 1)
        store(scores + i * PAGE, a[i]);
      else
        store_bf16(s_.weights + r * KEYS + i * PAGE, a[i]);
    }
    store(s_.sums + r * 16, load(s_.sums + r * 16) + total);
    if (!s_.noted[r]) return;
    sums(a, notes_ + r * NOTES + page);
    notes_[r * NOTES + CHUNK_PAGES + page / TILE] = s_.largest[r];
  }

  static float longest(V top, float before) {
    const float now = longdraft::LONGDRAFT_ISA::largest(top);
    return now > before ? now : before;
  }

  const Shape& shape_;
  const View& view_;
  const Piece& piece_;
  const Piece* next_;
  const Mass& mass_;
  const int group_;
  float* const notes_;
  const V scale_;
  const int32_t *first_, *positions_;
  const Item *k_, *v_;
  int rows_, items_, lowest_, highest_;
  int64_t page_items_;
  State<T> s_;
};

// Adds a query's shares of the pages of a piece to `mass`; `top` and `total` are those of all its pieces.
inline void add_mass(const float* notes, int pages, float top, float total, float* mass) {
  float factors[CHUNK_PAGES / TILE];
  for (int i = 0; i < CHUNK_PAGES / TILE; i += 16)
    store(factors + i, exp2(load(notes + CHUNK_PAGES + i) - splat(top)) / splat(total));
  for (int tile = 0; tile < pages / TILE; tile++)
    for (int i = tile * TILE; i < tile * TILE + TILE; i++) mass[i] += notes[i] * factors[tile];
  for (int i = pages / TILE * TILE; i < pages; i++) mass[i] += notes[i] * factors[pages / TILE];
}

inline void merge(const Shape& shape, const View& view, const Piece* pieces, const Merge& merge, const float* partial,
                  float* out, const Mass& mass) {
  const Piece& first = pieces[merge.first];
  const int group = shape.heads / shape.kv_heads, dim = shape.dim;
  for (int r = 0; r < first.heads * first.count; r++) {
    float top = -INFINITY;
    for (int i = 0; i < merge.count; i++) {
      const float m = partial[pieces[merge.first + i].partial + int64_t(r) * (dim + 2)];
      top = m > top ? m : top;
    }
    const int query = first.query + r % first.count, kv_head = first.head + r / first.count;
    const int64_t token = view.starts[first.row] + query / group;
    float* to = out + (token * shape.heads + kv_head * group + query % group) * dim;
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
    if (!mass.out || mass.at[token] < 0) continue;
    float* masses = mass.out + (mass.at[token] * shape.kv_heads + kv_head) * view.width;
    if (query % group == 0) std::memset(masses, 0, sizeof(float) * view.width);
    for (int i = 0; i < merge.count; i++) {
      const Piece& piece = pieces[merge.first + i];
      add_mass(mass.notes + (piece.partial / (dim + 2) + r) * NOTES, piece.pages, top, total, masses + piece.page);
    }
  }
}

inline void attention(const Parallel& p, const Shape& shape, const Part& part, const float* q, int stride,
                      const Cache& cache, float* partial, float* out, const Mass& mass) {
  const View& view = part.view;
  int taken = 0;
  const auto take = [&] {
    const int i = __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED);
    return i < part.num_pieces ? part.pieces + i : nullptr;
  };
  parallel(p, min(p.threads, part.num_pieces), [&](int) {
    const Piece* next;
    for (const Piece* piece = take(); piece; piece = next ? next : take()) {
      // Taken before its turn, so that its first tile is fetched in time; but the last ones go to whoever is free.
      const bool plenty = part.num_pieces - __atomic_load_n(&taken, __ATOMIC_RELAXED) > p.threads;
      next = plenty ? take() : nullptr;
      if (shape.kv_bf16)
        Worker<Bf16>(shape, view, *piece, next, cache, mass).run(q, stride, partial + piece->partial);
      else
        Worker<Float>(shape, view, *piece, next, cache, mass).run(q, stride, partial + piece->partial);
    }
  });
  parallel(p, part.num_merges, [&](int i) { merge(shape, view, part.pieces, part.merges[i], partial, out, mass); });
}

// K and V of new tokens, `stride` floats apart, into their slots; negative ones are nobody's.
inline void write(const Shape& shape, const float* k, const float* v, const int64_t* slots, int n, int stride,
                  const Cache& cache) {
  const int dim = shape.dim;
  for (int i = 0; i < n; i++)
    for (int g = 0; g < shape.kv_heads && slots[i] >= 0; g++) {
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
