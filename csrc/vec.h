// Sixteen float lanes, and sixteen pairs of bfloat16, on whatever the instruction set offers.
//
// Kernels are written once against these two types and compiled once per instruction set; nothing else in csrc depends
// on one. Every operation is elementwise or has a fixed order, so a lane's result never depends on its neighbours.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace longdraft {
namespace LONGDRAFT_ISA {  // one namespace per instruction set: the linker must never mix them up

inline uint16_t to_bf16(float f) {  // round to nearest even; NaN stays NaN
  uint32_t u;
  std::memcpy(&u, &f, 4);
  if ((u & 0x7fffffff) > 0x7f800000) return uint16_t((u >> 16) | 0x40);
  return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
inline float from_bf16(uint16_t b) {
  uint32_t u = uint32_t(b) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

#if defined(__AVX512F__)

struct V {
  __m512 x;
};
inline V zero() { return {_mm512_setzero_ps()}; }
inline V splat(float f) { return {_mm512_set1_ps(f)}; }
inline V load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, V a) { _mm512_storeu_ps(p, a.x); }
inline V operator+(V a, V b) { return {_mm512_add_ps(a.x, b.x)}; }
inline V operator-(V a, V b) { return {_mm512_sub_ps(a.x, b.x)}; }
inline V operator*(V a, V b) { return {_mm512_mul_ps(a.x, b.x)}; }
inline V operator/(V a, V b) { return {_mm512_div_ps(a.x, b.x)}; }
inline V fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.x, b.x, c.x)}; }
inline V max(V a, V b) { return {_mm512_max_ps(a.x, b.x)}; }
inline V abs(V a) { return {_mm512_abs_ps(a.x)}; }
inline bool any_above(V a, V b) { return _mm512_cmp_ps_mask(a.x, b.x, _CMP_GT_OQ) != 0; }
inline V where_below(V a, V limit, V yes, V no) {  // a < limit ? yes : no
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.x, limit.x, _CMP_LT_OQ), no.x, yes.x)};
}
inline V floor(V a) { return {_mm512_roundscale_ps(a.x, 1)}; }
inline V scale2(V p, V n) { return {_mm512_scalef_ps(p.x, n.x)}; }  // p · 2^floor(n)
inline V first_of(const uint32_t* p) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))}; }
inline V second_of(const uint32_t* p) {
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(int(0xffff0000))))};
}
inline V load_bf16(const uint16_t* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}

#elif defined(__AVX2__)

struct V {
  __m256 x, y;
};
inline V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline V splat(float f) { return {_mm256_set1_ps(f), _mm256_set1_ps(f)}; }
inline V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, V a) {
  _mm256_storeu_ps(p, a.x);
  _mm256_storeu_ps(p + 8, a.y);
}
inline V operator+(V a, V b) { return {_mm256_add_ps(a.x, b.x), _mm256_add_ps(a.y, b.y)}; }
inline V operator-(V a, V b) { return {_mm256_sub_ps(a.x, b.x), _mm256_sub_ps(a.y, b.y)}; }
inline V operator*(V a, V b) { return {_mm256_mul_ps(a.x, b.x), _mm256_mul_ps(a.y, b.y)}; }
inline V operator/(V a, V b) { return {_mm256_div_ps(a.x, b.x), _mm256_div_ps(a.y, b.y)}; }
inline V fma(V a, V b, V c) { return {_mm256_fmadd_ps(a.x, b.x, c.x), _mm256_fmadd_ps(a.y, b.y, c.y)}; }
inline V max(V a, V b) { return {_mm256_max_ps(a.x, b.x), _mm256_max_ps(a.y, b.y)}; }
inline V abs(V a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.x), _mm256_andnot_ps(sign, a.y)};
}
inline bool any_above(V a, V b) {
  return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(a.x, b.x, _CMP_GT_OQ), _mm256_cmp_ps(a.y, b.y, _CMP_GT_OQ)));
}
inline V where_below(V a, V limit, V yes, V no) {
  return {_mm256_blendv_ps(no.x, yes.x, _mm256_cmp_ps(a.x, limit.x, _CMP_LT_OQ)),
          _mm256_blendv_ps(no.y, yes.y, _mm256_cmp_ps(a.y, limit.y, _CMP_LT_OQ))};
}
inline V floor(V a) { return {_mm256_floor_ps(a.x), _mm256_floor_ps(a.y)}; }
inline __m256 scale2(__m256 p, __m256 n) {
  const __m256i whole = _mm256_cvtps_epi32(_mm256_floor_ps(n));
  return _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(whole, _mm256_set1_epi32(127)), 23)));
}
inline V scale2(V p, V n) { return {scale2(p.x, n.x), scale2(p.y, n.y)}; }
inline __m256 first_half(const uint32_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const __m256i*)p), 16));
}
inline __m256 second_half(const uint32_t* p) {
  const __m256i high = _mm256_set1_epi32(int(0xffff0000));
  return _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256((const __m256i*)p), high));
}
inline V first_of(const uint32_t* p) { return {first_half(p), first_half(p + 8)}; }
inline V second_of(const uint32_t* p) { return {second_half(p), second_half(p + 8)}; }
inline __m256 half_of_bf16(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline V load_bf16(const uint16_t* p) { return {half_of_bf16(p), half_of_bf16(p + 8)}; }

#else

struct V {
  float x[16];
};
#define LONGDRAFT_LANES(expr) \
  V r;                        \
  for (int i = 0; i < 16; i++) r.x[i] = (expr); \
  return r
inline V splat(float f) { LONGDRAFT_LANES(f); }
inline V zero() { return splat(0.0f); }
inline V load(const float* p) { LONGDRAFT_LANES(p[i]); }
inline void store(float* p, V a) { std::memcpy(p, a.x, sizeof a.x); }
inline V operator+(V a, V b) { LONGDRAFT_LANES(a.x[i] + b.x[i]); }
inline V operator-(V a, V b) { LONGDRAFT_LANES(a.x[i] - b.x[i]); }
inline V operator*(V a, V b) { LONGDRAFT_LANES(a.x[i] * b.x[i]); }
inline V operator/(V a, V b) { LONGDRAFT_LANES(a.x[i] / b.x[i]); }
inline V fma(V a, V b, V c) { LONGDRAFT_LANES(a.x[i] * b.x[i] + c.x[i]); }
inline V max(V a, V b) { LONGDRAFT_LANES(a.x[i] > b.x[i] ? a.x[i] : b.x[i]); }
inline V abs(V a) { LONGDRAFT_LANES(std::fabs(a.x[i])); }
inline bool any_above(V a, V b) {
  bool any = false;
  for (int i = 0; i < 16; i++) any |= a.x[i] > b.x[i];
  return any;
}
inline V where_below(V a, V limit, V yes, V no) { LONGDRAFT_LANES(a.x[i] < limit.x[i] ? yes.x[i] : no.x[i]); }
inline V floor(V a) { LONGDRAFT_LANES(std::floor(a.x[i])); }
inline V scale2(V p, V n) { LONGDRAFT_LANES(std::ldexp(p.x[i], n.x[i] == n.x[i] ? int(std::floor(n.x[i])) : 0)); }
inline V first_of(const uint32_t* p) { LONGDRAFT_LANES(from_bf16(uint16_t(p[i]))); }
inline V second_of(const uint32_t* p) { LONGDRAFT_LANES(from_bf16(uint16_t(p[i] >> 16))); }
inline V load_bf16(const uint16_t* p) { LONGDRAFT_LANES(from_bf16(p[i])); }

#endif

// --- pairs of bfloat16: lane i holds elements 2i and 2i + 1, the first in the low half

#if defined(__AVX512BF16__)

struct P {
  __m512bh x;
};
inline P load_pairs(const uint32_t* p) { return {(__m512bh)_mm512_loadu_si512(p)}; }
inline P splat_pair(uint32_t u) { return {(__m512bh)_mm512_set1_epi32(int(u))}; }
inline V dot(V acc, P a, P b) { return {_mm512_dpbf16_ps(acc.x, a.x, b.x)}; }
inline void store_bf16(uint16_t* p, V a) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(a.x)); }

#else

struct P {
  V low, high;
};
inline P load_pairs(const uint32_t* p) { return {first_of(p), second_of(p)}; }
inline P splat_pair(uint32_t u) { return {splat(from_bf16(uint16_t(u))), splat(from_bf16(uint16_t(u >> 16)))}; }
inline V dot(V acc, P a, P b) { return fma(a.high, b.high, fma(a.low, b.low, acc)); }
inline void store_bf16(uint16_t* p, V a) {
  float f[16];
  store(f, a);
  for (int i = 0; i < 16; i++) p[i] = to_bf16(f[i]);
}

#endif

#if defined(__AVX512F__)

inline P pairs_of(__m512i words) {
#if defined(__AVX512BF16__)
  return {(__m512bh)words};
#else
  const __m512i high = _mm512_and_si512(words, _mm512_set1_epi32(int(0xffff0000)));
  return {{_mm512_castsi512_ps(_mm512_slli_epi32(words, 16))}, {_mm512_castsi512_ps(high)}};
#endif
}

// Words of a group of compact weights (compact.h).
struct Exponents {
  __m512i x;
};
inline Exponents exponents(const uint16_t* table) {
  return {_mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)table))};  // a fifth bit of a code is not looked at
}
template <int J>
inline __m512i expand(const uint8_t* group, Exponents table) {
  const __m512i codes = _mm512_srli_epi16(_mm512_loadu_si512(group), 4 * J);
  const __m512i rest = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)(group + 64 + 32 * J)));
  const __m512i exponent = _mm512_permutexvar_epi16(codes, table.x);
  return _mm512_ternarylogic_epi32(_mm512_set1_epi16(int16_t(0x807f)), rest, exponent, 0xca);  // the mask chooses
}

#endif

// --- sixteen sums of products of bytes: lane i of `b` holds four signed weights, `a` four unsigned inputs

#if defined(__AVX512VNNI__)

struct I {
  __m512i x;
};
inline I no_sum() { return {_mm512_setzero_si512()}; }
inline I dot4(I acc, uint32_t a, const uint32_t* b) {
  return {_mm512_dpbusd_epi32(acc.x, _mm512_set1_epi32(int(a)), _mm512_loadu_si512(b))};
}
inline void store(int32_t* p, I a) { _mm512_storeu_si512(p, a.x); }

#else

struct I {
  int32_t x[16];
};
inline I no_sum() { return I{}; }
inline I dot4(I acc, uint32_t a, const uint32_t* b) {
  const int8_t* w = reinterpret_cast<const int8_t*>(b);
  const int32_t a0 = a & 255, a1 = (a >> 8) & 255, a2 = (a >> 16) & 255, a3 = a >> 24;
  for (int i = 0; i < 16; i++)
    acc.x[i] += a0 * w[4 * i] + a1 * w[4 * i + 1] + a2 * w[4 * i + 2] + a3 * w[4 * i + 3];
  return acc;
}
inline void store(int32_t* p, I a) { std::memcpy(p, a.x, sizeof a.x); }

#endif

// --- made of the above

inline float sum(V a) {
  float f[16];
  store(f, a);
  for (int n = 8; n; n /= 2)
    for (int i = 0; i < n; i++) f[i] += f[i + n];
  return f[0];
}
// The sums of four vectors, side by side.
inline void sums(const V (&a)[4], float* out) {
#if defined(__AVX512F__)
  const auto pairs = [](V x, V y) { return _mm512_add_ps(_mm512_unpacklo_ps(x.x, y.x), _mm512_unpackhi_ps(x.x, y.x)); };
  const __m512d ac = _mm512_castps_pd(pairs(a[0], a[2])), bd = _mm512_castps_pd(pairs(a[1], a[3]));
  const __m512 low = _mm512_castpd_ps(_mm512_unpacklo_pd(ac, bd)), high = _mm512_castpd_ps(_mm512_unpackhi_pd(ac, bd));
  const __m512 all = _mm512_add_ps(low, high);  // a c b d in each quarter
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  const __m128 sum = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  _mm_storeu_ps(out, _mm_shuffle_ps(sum, sum, 0xd8));
#else
  for (int i = 0; i < 4; i++) out[i] = sum(a[i]);
#endif
}
inline float largest(V a) {
  float f[16];
  store(f, a);
  for (int n = 8; n; n /= 2)
    for (int i = 0; i < n; i++) f[i] = f[i] > f[i + n] ? f[i] : f[i + n];
  return f[0];
}

// 2^(floor(n) + f) for 0 ≤ f ≤ 1, to 1.5e-7; in float a longer polynomial gains nothing.
inline V exp2_of(V n, V f) {
  V p = splat(1.8671300495043397e-3f);
  p = fma(p, f, splat(9.0170307084918022e-3f));
  p = fma(p, f, splat(5.5799912661314011e-2f));
  p = fma(p, f, splat(2.4016444385051727e-1f));
  p = fma(p, f, splat(6.9315129518508911e-1f));
  p = fma(p, f, splat(1.0f));
  return scale2(p, n);
}

// 2^x for x ≤ 0 or hardly more; of −∞ exactly 0, so that hidden keys weigh nothing; NaN stays NaN.
inline V exp2(V x) {
#if defined(__AVX512F__)
  return exp2_of(x, {_mm512_reduce_ps(x.x, 1)});  // x − floor(x), and 0 where x is infinite
#else
  const V lowest = splat(-126.0f), y = max(lowest, x);
  return where_below(x, lowest, zero(), exp2_of(y, y - floor(y)));
#endif
}

// e^x for x ≤ 0; below −87 exactly 0. The product with log2(e) is kept to more digits than a float has.
inline V exp(V x) {
  const V lowest = splat(-87.0f), y = max(lowest, x), high = splat(1.44269502f), low = splat(1.92596303e-8f);
  const V n = floor(y * high);
  return where_below(x, lowest, zero(), exp2_of(n, fma(y, low, fma(y, high, zero() - n))));
}

inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }

}  // namespace LONGDRAFT_ISA
}  // namespace longdraft
