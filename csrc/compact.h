// Bfloat16 weights in 12 bits each, exactly.
//
// A block of 16 outputs uses few exponents: a weight's sign and fraction are kept as they are, a byte, and of the
// exponent four bits, its place in the block's table of the 16 most frequent ones. Four words of inputs (bfloat16
// [4][16][2], 256 bytes) make a group of 192 bytes: codes [16][2], 16 bits each, four for every word, then [4][16][2]
// bytes. A group that has another exponent stays as it was: three words in its place, the fourth behind all groups.
//
//   block: table [16] uint16, numbers of the groups that stay as they were, ascending, [spill + 1] int32,
//          padding to 64 bytes; groups; [spill] words of 64 bytes
#pragma once
#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace longdraft {

constexpr int GROUP_WORDS = 4, WORD_BYTES = 64, GROUP_BYTES = 192;

struct CompactBlock {
  const uint8_t* data;
  int words, spill;  // words: of inputs, a multiple of GROUP_WORDS

  static int64_t head(int spill) { return (32 + 4 * (int64_t(spill) + 1) + 63) / 64 * 64; }
  static int64_t bytes(int words, int spill) {
    return head(spill) + int64_t(words) / GROUP_WORDS * GROUP_BYTES + int64_t(spill) * WORD_BYTES;
  }
  const uint16_t* table() const { return reinterpret_cast<const uint16_t*>(data); }
  const int32_t* kept() const { return reinterpret_cast<const int32_t*>(data + 32); }
  const uint8_t* groups() const { return data + head(spill); }
  const uint8_t* spilled() const { return groups() + int64_t(words) / GROUP_WORDS * GROUP_BYTES; }
};

inline CompactBlock block_of(const Packed& w, int64_t number) {
  const int words = w.k / 2;
  return {static_cast<const uint8_t*>(w.data) + number * CompactBlock::bytes(words, w.spill), words, w.spill};
}

// Codes of the exponents of `raw` [words][32]; 16 for those that have none. Ties go to the lower exponent.
inline void choose_exponents(const uint16_t* raw, int words, uint16_t (&table)[16], uint8_t (&code)[256]) {
  int32_t counts[256] = {};
  for (int64_t i = 0; i < int64_t(words) * 32; i++) counts[raw[i] >> 7 & 255]++;
  std::memset(code, 16, sizeof code);
  for (int n = 0; n < 16; n++) {
    int best = 0;
    for (int e = 1; e < 256; e++)
      if (counts[e] > counts[best]) best = e;
    table[n] = uint16_t(best << 7);
    code[best] = uint8_t(n);
    counts[best] = -1;
  }
}

// Makes a block of `raw` [words][16][2] if it has room for `spill` groups that stay as they are; their number in any
// case. `out` may be null.
inline int make_compact(const uint16_t* raw, int words, int spill, uint8_t* out) {
  uint16_t table[16];
  uint8_t code[256];
  choose_exponents(raw, words, table, code);
  const int groups = words / GROUP_WORDS;
  int kept = 0;
  const CompactBlock block{out, words, spill};
  for (int g = 0; g < groups; g++) {
    const uint16_t* from = raw + int64_t(g) * GROUP_WORDS * 32;
    bool fits = true;
    for (int i = 0; i < GROUP_WORDS * 32; i++) fits &= code[from[i] >> 7 & 255] < 16;
    const int number = kept;
    kept += !fits;
    if (!out || kept > spill) continue;
    uint8_t* to = const_cast<uint8_t*>(block.groups()) + int64_t(g) * GROUP_BYTES;
    if (!fits) {
      const_cast<int32_t*>(block.kept())[number] = g;
      std::memcpy(to, from, GROUP_BYTES);
      std::memcpy(const_cast<uint8_t*>(block.spilled()) + int64_t(number) * WORD_BYTES, from + 3 * 32, WORD_BYTES);
      continue;
    }
    for (int i = 0; i < 32; i++) {
      uint16_t codes = 0;
      for (int j = 0; j < GROUP_WORDS; j++) {
        const uint16_t w = from[j * 32 + i];
        codes |= uint16_t(code[w >> 7 & 255] << 4 * j);
        to[WORD_BYTES + j * 32 + i] = uint8_t(w >> 8 & 0x80) | uint8_t(w & 0x7f);
      }
      std::memcpy(to + 2 * i, &codes, 2);
    }
  }
  if (out && kept <= spill) {
    std::memcpy(out, table, sizeof table);
    for (int n = kept; n <= spill; n++) const_cast<int32_t*>(block.kept())[n] = groups;  // no such group
  }
  return kept;
}

// Calls take(i, w) for the first `k` inputs' weights w of one of a block's outputs, bfloat16.
template <class F>
void each_of_row(const CompactBlock& block, int row, int k, const F& take) {
  int next = 0;
  for (int i = 0; i < k; i++) {
    const int g = i / 2 / GROUP_WORDS, j = i / 2 % GROUP_WORDS, lane = row * 2 + i % 2;
    while (block.kept()[next] < g) next++;
    const uint8_t* group = block.groups() + int64_t(g) * GROUP_BYTES;
    uint16_t bits;
    if (block.kept()[next] == g) {
      const uint8_t* word = j < 3 ? group + j * WORD_BYTES : block.spilled() + int64_t(next) * WORD_BYTES;
      std::memcpy(&bits, word + 2 * lane, 2);
    } else {
      std::memcpy(&bits, group + 2 * lane, 2);
      const uint8_t rest = group[WORD_BYTES + j * 32 + lane];
      bits = uint16_t((rest & 0x80) << 8 | block.table()[bits >> 4 * j & 15] | (rest & 0x7f));
    }
    take(i, bits);
  }
}

}  // namespace longdraft
