// What the kernels of every instruction set offer: plain records and functions, no C++ library types, since this is
// shared by files that are compiled for different processors.
#pragma once
#include <cstdint>

namespace longdraft {

// Runs call(task, i) for every i in [0, count), possibly on several threads.
struct Parallel {
  void* pool;
  void (*run)(void* pool, int count, void (*call)(const void*, int), const void* task);
  int threads;
};

enum Type { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, COMPACT = 3 };

// A weight matrix [n, k] in blocks of 16 outputs: float32 [n/16][k][16], bfloat16 [n/16][k/2][16][2], the same compact
// (compact.h; k is a multiple of 8), int8 [n/16][k/4][16][4]; n and k are padded with zeros. Int8 has a scale per
// output, and the sum of its weights.
struct Packed {
  const void* data;
  const float* bias;  // [n] or null
  int n, k, type;
  const float* scales = nullptr;  // [n padded], int8 only
  const int32_t* sums = nullptr;  // [n padded], int8 only
  int spill = 0;                  // of a compact one's blocks
};

// One layer's keys and values in pages of 16 tokens, each KV head's block contiguous.
//   float32:  K [page][g][d][16]        V [page][g][16][d]
//   bfloat16: K [page][g][d/2][16][2]   V [page][g][8][d][2]
struct Cache {
  void *k, *v;
};

// Ragged queries of `rows` sequences over lists of pages. List (b, g or 0) has counts[b][g] pages; slot s of its page i
// holds position first[b][g][i] + s, or positions[b][g][16 i + s] where that is given. A query at position p sees the
// positions t ≤ p with t < sinks[b] or t ≥ window[b]. Slots at or past lens[b] hold junk.
struct View {
  int rows, lists, width;    // lists: KV heads, or 1 for all; width: pages per list, padded
  const int32_t *pages, *first, *counts;
  const int32_t* positions;  // or null
  const int32_t *starts;     // [rows + 1] first query of each row
  const int32_t *lens, *sinks, *window;
};

struct Shape {
  int heads, kv_heads, dim;
  bool kv_bf16;
};

// One piece of attention: some queries of a row over some of their pages, for one KV head or, where few queries read one
// list of pages, for all: their blocks of a page lie side by side, and memory is read best from end to end.
struct Piece {
  int row, head, heads;         // KV heads [head, head + heads)
  int query, count;             // `count` of the row's queries times heads of a group, from `query` on, for each KV head
  int page, pages;              // pages [page, page + pages) of the list
  int64_t partial;              // where its result goes: heads · count · (dim + 2) floats
};
// The pieces that make up one result, in the order in which they are merged.
struct Merge {
  int first, count;
};

// The mass of pages, of the tokens that it is wanted of; none if `out` is null.
struct Mass {
  const int64_t* at;  // [tokens] where a token's masses go, or a negative number
  float* out;         // [wanted tokens][kv_heads][width]
  float* notes;       // room for NOTES floats for each row of all pieces
};

// What one layer's attention reads in a step, and the work cut from it.
struct Part {
  View view;
  const Piece* pieces;
  const Merge* merges;
  int num_pieces, num_merges;
};

struct Layer {
  Packed qkv, output, gate_up, down;
  Packed kv;  // the keys' and values' part of `qkv`, or of another type
  const float *attention_norm, *mlp_norm, *q_norm, *k_norm;  // the last two may be null
};

struct Network {
  const Layer* layers;
  Shape shape;
  int hidden, intermediate, vocab;
  float eps;
  const float* norm;
  Packed head;
  const void* embedding;  // [vocab, hidden], float32 or bfloat16; null: the rows of the packed `tied`
  Packed tied;            // what `embedding` stands for, where it is null
  bool bf16;              // the embedding's type
};

// Buffers for n tokens; logits are wanted for some of them.
struct Scratch {
  float *x, *h, *qkv, *attention, *mlp, *gated, *partial;
  uint16_t* rounded;  // [tokens][widest input + 8], inputs of products in the weights' type
};

struct Step {
  int tokens, outputs;
  const int64_t *ids, *slots, *outputs_at;
  const float *cos, *sin;  // [tokens, dim / 2]
  const Part* parts;  // one for all layers, or one per layer of the network
  int num_parts;
  const int32_t* layers;  // those to run, in order
  int num_layers;
  const Cache* caches;  // one per layer of the network
  float* logits;        // [outputs, vocab]
  const int64_t* captured;  // [num_captured] tokens of which more is wanted
  int num_captured;
  float* queries;  // [layers of the network, num_captured, heads, dim], as attention reads them; or null
  Mass mass;       // `out` is that of the network's first layer; the others' follow
  const int32_t* taps;  // behind how many layers the residual stream is wanted
  int num_taps;
  float* hidden;  // [num_taps, num_captured, hidden]
  // Where a layer's attention reads, once the step's K and V are in its cache; null: in that. Asked by one thread.
  Cache (*decode)(const void* decoder, int layer);
  const void* decoder;
};

struct Kernels {
  const char* name;
  bool compact;  // whether they multiply compact weights
  void (*pack)(const float* weight, const Packed& out);
  void (*linear)(const Parallel&, const float* x, int m, const Packed&, const float* residual, float* y, uint16_t* tmp);
  void (*write)(const Shape&, const float* k, const float* v, const int64_t* slots, int n, int stride, const Cache&);
  void (*attention)(const Parallel&, const Shape&, const Part&, const float* q, const Cache&, float* partial, float* out,
                    const Mass&);
  void (*forward)(const Parallel&, const Network&, const Step&, const Scratch&);
  void (*project)(const Parallel&, const Network&, const float* streams, const Step&, const Scratch&);
  void (*draw)(const Parallel&, const float* logits, int rows, int n, const double* temperatures, const int64_t* seeds,
               const int64_t* positions, int role, int64_t* tokens);
  void (*read)(const Parallel&, const void* data, int64_t bytes, float* out);
  // mass[layers, kv_heads, count · PAGE] of the queries [layers, n, heads, dim] at positions `start`, … on a row's pages
  void (*token_mass)(const Parallel&, const Shape&, int layers, const float* q, int n, int start, const int64_t* pages,
                     int count, const void* k, int64_t layer_bytes, float* mass);
  // scores[layers, kv_heads, count] of pages by bounds[layers, num_pages, kv_heads, 2 dim], which parts (float) multiply
  void (*page_scores)(const Parallel&, const Shape&, int layers, const void* bounds, int64_t num_pages,
                      const float* parts, const int64_t* pages, int count, float* scores);
};

constexpr int PAGE = 16;         // tokens
constexpr int CHUNK_PAGES = 64;  // borders of partial results, in pages from the start of a list
constexpr int TILE = 4;          // pages that are worked on together
constexpr int QUERIES = 64;      // most queries (times heads) of one piece
// What a row of a piece notes for the masses of its pages: sums of weights, and each tile's maximum.
constexpr int NOTES = CHUNK_PAGES + CHUNK_PAGES / TILE;

}  // namespace longdraft
