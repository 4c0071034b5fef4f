// The token drawn from each row of logits: argmax(x / T + G), G being Philox noise of (seed, position, token).
//
// Logarithms are taken of a handful of tokens only: G can lift token i above a score s only if the noise's uniform u
// satisfies 1 - u ≤ e^(x_i / T - s), which is checked sixteen at a time in single precision with a little slack.
#pragma once
#include "linear.h"

namespace longdraft {
namespace LONGDRAFT_ISA {

constexpr int LANES = 16, AT_ONCE = 4 * LANES;  // one Philox counter gives four words

// words[4 i + j] = word j of counter (first + i, position, role, 0) under the key `seed`
#if defined(__AVX512F__)
inline void philox(uint32_t first, uint32_t position, uint32_t role, uint64_t seed, uint32_t* words) {
  // Eight counters to a register, each word in the low half of 64 bits, as the multiplication wants them.
  const __m512i m0 = _mm512_set1_epi64(0xD2511F53), m1 = _mm512_set1_epi64(0xCD9E8D57);
  const __m512i low = _mm512_set1_epi64(0xFFFFFFFF);
  __m512i a[2], b[2], c[2], d[2];
  for (int h = 0; h < 2; h++) {
    a[h] = _mm512_add_epi64(_mm512_set1_epi64(int64_t(first) + 8 * h), _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7));
    b[h] = _mm512_set1_epi64(position), c[h] = _mm512_set1_epi64(role), d[h] = _mm512_setzero_si512();
  }
  uint32_t key0 = uint32_t(seed), key1 = uint32_t(seed >> 32);
  for (int round = 0; round < 10; round++) {
    for (int h = 0; h < 2; h++) {
      const __m512i x = _mm512_mul_epu32(a[h], m0), y = _mm512_mul_epu32(c[h], m1);
      const __m512i k0 = _mm512_set1_epi64(key0), k1 = _mm512_set1_epi64(key1);
      a[h] = _mm512_xor_si512(_mm512_xor_si512(_mm512_srli_epi64(y, 32), b[h]), k0);
      c[h] = _mm512_xor_si512(_mm512_xor_si512(_mm512_srli_epi64(x, 32), d[h]), k1);
      b[h] = _mm512_and_si512(y, low);
      d[h] = _mm512_and_si512(x, low);
    }
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  for (int h = 0; h < 2; h++) {
    alignas(64) uint64_t even[8], odd[8];  // words 0 and 1, words 2 and 3 of a counter
    _mm512_store_si512(even, _mm512_or_si512(a[h], _mm512_slli_epi64(b[h], 32)));
    _mm512_store_si512(odd, _mm512_or_si512(c[h], _mm512_slli_epi64(d[h], 32)));
    for (int i = 0; i < 8; i++) {
      std::memcpy(words + 32 * h + 4 * i, even + i, 8);
      std::memcpy(words + 32 * h + 4 * i + 2, odd + i, 8);
    }
  }
}
#else
inline void philox(uint32_t first, uint32_t position, uint32_t role, uint64_t seed, uint32_t* words) {
  uint32_t a[LANES], b[LANES], c[LANES], d[LANES];
  for (int i = 0; i < LANES; i++) a[i] = first + i, b[i] = position, c[i] = role, d[i] = 0;
  uint32_t key0 = uint32_t(seed), key1 = uint32_t(seed >> 32);
  for (int round = 0; round < 10; round++) {
    for (int i = 0; i < LANES; i++) {
      const uint64_t x = uint64_t(a[i]) * 0xD2511F53u, y = uint64_t(c[i]) * 0xCD9E8D57u;
      a[i] = uint32_t(y >> 32) ^ b[i] ^ key0;
      c[i] = uint32_t(x >> 32) ^ d[i] ^ key1;
      b[i] = uint32_t(y);
      d[i] = uint32_t(x);
    }
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  for (int i = 0; i < LANES; i++)
    words[4 * i] = a[i], words[4 * i + 1] = b[i], words[4 * i + 2] = c[i], words[4 * i + 3] = d[i];
}
#endif

struct Best {
  double score;
  int64_t token;
};

class Row {
 public:
  Row(const float* x, int n, double temperature, int64_t seed, int64_t position, int role)
      : x_(x), n_(n), temperature_(temperature), seed_(uint64_t(seed)), position_(uint32_t(position)), role_(role) {}

  int64_t draw() {
    const int64_t top = largest_token();
    if (temperature_ == 0 || top < 0) return top;
    largest_ = x_[top];
    best_ = {-INFINITY, top};
    uint32_t words[AT_ONCE];
    philox(uint32_t(top / AT_ONCE * LANES), position_, role_, seed_, words);
    consider(top, words[top % AT_ONCE]);
    for (int first = 0; first < n_; first += AT_ONCE) {
      philox(uint32_t(first / 4), position_, role_, seed_, words);
      for (int at = 0; at < AT_ONCE && first + at < n_; at += LANES) sixteen(first + at, words + at);
    }
    return best_.token;
  }

 private:
  // The first of the largest; -1 if a NaN or an infinity is among them.
  int64_t largest_token() const {
    V top = splat(-INFINITY);
    int i = 0;
    for (; i + LANES <= n_; i += LANES) top = max(top, load(x_ + i));  // a NaN in the second place comes through
    float m = -INFINITY, lanes[LANES];
    store(lanes, top);
    bool bad = false;
    for (float lane : lanes) m = lane > m ? lane : m, bad |= lane != lane;
    for (; i < n_; i++) m = x_[i] > m ? x_[i] : m, bad |= x_[i] != x_[i];
    if (bad || !std::isfinite(m)) return -1;
    for (int j = 0; j < n_; j++)
      if (x_[j] == m) return j;
    return -1;
  }

  double scaled(int64_t token) const { return (double(x_[token]) - largest_) / temperature_; }

  void consider(int64_t token, uint32_t word) {
    const double u = (double(word) + 0.5) / 4294967296.0, score = scaled(token) - std::log(-std::log(u));
    if (score > best_.score || (score == best_.score && token < best_.token)) best_ = {score, token};
  }

  void sixteen(int first, const uint32_t* words) {
    float x[LANES], rest[LANES], limit[LANES];
    const int count = min(LANES, n_ - first);
    for (int i = 0; i < LANES; i++) {
      x[i] = i < count ? x_[first + i] : -INFINITY;
      rest[i] = float(~words[i]) * (1.0f / 4294967296.0f);  // 1 - u
    }
    const V y = (load(x) - splat(float(largest_))) * splat(float(1 / temperature_)) - splat(float(best_.score));
    store(limit, exp(where_below(y, zero(), y, zero())) * splat(1.001f) + splat(1e-9f));
    bool any = false;
    for (int i = 0; i < LANES; i++) any |= rest[i] <= limit[i];
    if (!any) return;
    for (int i = 0; i < count; i++)
      if (rest[i] <= limit[i] && x[i] != -INFINITY) consider(first + i, words[i]);
  }

  const float* x_;
  const int n_;
  const double temperature_;
  const uint64_t seed_;
  const uint32_t position_;
  const int role_;
  double largest_ = 0;
  Best best_{};
};

inline void draw(const Parallel& p, const float* logits, int rows, int n, const double* temperatures,
                 const int64_t* seeds, const int64_t* positions, int role, int64_t* tokens) {
  parallel(p, rows, [&](int i) {
    tokens[i] = Row(logits + int64_t(i) * n, n, temperatures[i], seeds[i], positions[i], role).draw();
  });
}

}  // namespace LONGDRAFT_ISA
}  // namespace longdraft
