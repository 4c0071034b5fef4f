// One forward pass of a decoder over a step that is laid out beforehand: all layers in one call.
#pragma once
#include "attention.h"

namespace longdraft {
namespace LONGDRAFT_ISA {

constexpr int SERIAL_WORK = 1 << 14;  // floats below which waking other threads costs more than it saves

// Calls f(token) for all tokens, in parallel where that pays.
template <class F>
void each_token(const Parallel& p, int tokens, int width, const F& f) {
  if (int64_t(tokens) * width < SERIAL_WORK) {
    for (int i = 0; i < tokens; i++) f(i);
    return;
  }
  const int size = max(1, tokens / (4 * p.threads));
  parallel(p, ceil_div(tokens, size), [&](int part) {
    for (int i = part * size; i < min(tokens, (part + 1) * size); i++) f(i);
  });
}

// out = x / rms(x) · weight
inline void normalise(const float* x, const float* weight, float eps, int n, float* out) {
  V squares = zero();
  int i = 0;
  for (; i + 16 <= n; i += 16) squares = fma(load(x + i), load(x + i), squares);
  float total = sum(squares);
  for (int j = i; j < n; j++) total += x[j] * x[j];
  const float factor = 1.0f / std::sqrt(total / n + eps);
  for (i = 0; i + 16 <= n; i += 16) store(out + i, load(x + i) * splat(factor) * load(weight + i));
  for (; i < n; i++) out[i] = x[i] * factor * weight[i];
}

// Turns the pairs (i, i + n/2) of one head by the angles of its position.
inline void rotate(float* x, const float* cos, const float* sin, int n) {
  float *first = x, *second = x + n / 2;
  int i = 0;
  for (; i + 16 <= n / 2; i += 16) {
    const V a = load(first + i), b = load(second + i), c = load(cos + i), s = load(sin + i);
    store(first + i, a * c - b * s);
    store(second + i, b * c + a * s);
  }
  for (; i < n / 2; i++) {
    const float a = first[i], b = second[i];
    first[i] = a * cos[i] - b * sin[i];
    second[i] = b * cos[i] + a * sin[i];
  }
}

// out = gate · sigmoid(gate) · up
inline V gated(V gate, V up) {
  const V e = exp(zero() - abs(gate)), one = splat(1.0f);  // it cannot overflow
  const V positive = one / (one + e);
  return gate * where_below(gate, zero(), e * positive, positive) * up;
}
inline void gate(const float* gate_up, int n, float* out) {
  int i = 0;
  for (; i + 16 <= n; i += 16) store(out + i, gated(load(gate_up + i), load(gate_up + n + i)));
  if (i == n) return;
  float a[16] = {}, b[16] = {};
  for (int j = i; j < n; j++) a[j - i] = gate_up[j], b[j - i] = gate_up[n + j];
  store(a, gated(load(a), load(b)));
  for (int j = i; j < n; j++) out[j] = a[j - i];
}

inline void embed(const Network& net, int64_t id, float* out) {
  const int n = net.hidden;
  if (!net.embedding && net.tied.type == COMPACT) {
    each_of_row(block_of(net.tied, id / 16), int(id % 16), n, [&](int i, uint16_t w) { out[i] = from_bf16(w); });
    return;
  }
  if (!net.embedding) {  // a row of packed weights
    const int step = net.bf16 ? 2 : 1;
    const int64_t block = id / 16 * ceil_div(n, step) * step * 16, row = id % 16;
    for (int i = 0; i < n; i++) {
      if (net.bf16)
        out[i] = from_bf16(static_cast<const uint16_t*>(net.tied.data)[block + i / 2 * 32 + row * 2 + i % 2]);
      else
        out[i] = static_cast<const float*>(net.tied.data)[block + int64_t(i) * 16 + row];
    }
    return;
  }
  if (!net.bf16) {
    std::memcpy(out, static_cast<const float*>(net.embedding) + id * n, n * sizeof(float));
    return;
  }
  const uint16_t* row = static_cast<const uint16_t*>(net.embedding) + id * n;
  for (int i = 0; i < n; i++) out[i] = from_bf16(row[i]);
}

// Norms and rotations of one token's query and key heads, in place, or of the key heads alone.
inline void turn(const Network& net, const Layer& layer, const Step& step, int token, bool queries, float* heads) {
  const Shape& s = net.shape;
  const int64_t at = int64_t(token) * (s.dim / 2);
  for (int h = queries ? 0 : s.heads; h < s.heads + s.kv_heads; h++, heads += s.dim) {
    const float* norm = h < s.heads ? layer.q_norm : layer.k_norm;
    if (norm) normalise(heads, norm, net.eps, s.dim, heads);
    rotate(heads, step.cos + at, step.sin + at, s.dim);
  }
}

inline void run_layer(const Parallel& p, const Network& net, int number, const Step& step, const Scratch& t) {
  const Shape& s = net.shape;
  const Layer& layer = net.layers[number];
  const Cache& cache = step.caches[number];
  const Part& part = step.parts[step.num_parts == 1 ? 0 : number];
  const int n = step.tokens, width = (s.heads + 2 * s.kv_heads) * s.dim, keys = s.heads * s.dim;
  const int values = keys + s.kv_heads * s.dim;
  each_token(p, n, net.hidden, [&](int i) {
    normalise(t.x + int64_t(i) * net.hidden, layer.attention_norm, net.eps, net.hidden, t.h + int64_t(i) * net.hidden);
  });
  linear(p, t.h, n, layer.qkv, nullptr, t.qkv, t.rounded);
  each_token(p, n, width, [&](int i) {
    float* row = t.qkv + int64_t(i) * width;
    turn(net, layer, step, i, true, row);
    write(s, row + keys, row + values, step.slots + i, 1, 0, cache);
  });
  for (int i = 0; step.queries && i < step.num_captured; i++)
    std::memcpy(step.queries + (int64_t(number) * step.num_captured + i) * keys, t.qkv + step.captured[i] * width,
                keys * sizeof(float));
  Mass mass = step.mass;
  if (mass.out) mass.out += int64_t(number) * step.num_captured * s.kv_heads * part.view.width;
  const Cache read = step.decode ? step.decode(step.decoder, number) : cache;
  attention(p, s, part, t.qkv, width, read, t.partial, t.attention, mass);
  linear(p, t.attention, n, layer.output, t.x, t.x, t.rounded);
  each_token(p, n, net.hidden, [&](int i) {
    normalise(t.x + int64_t(i) * net.hidden, layer.mlp_norm, net.eps, net.hidden, t.h + int64_t(i) * net.hidden);
  });
  linear(p, t.h, n, layer.gate_up, nullptr, t.mlp, t.rounded);
  const int m = net.intermediate;
  each_token(p, n, m, [&](int i) { gate(t.mlp + int64_t(i) * 2 * m, m, t.gated + int64_t(i) * m); });
  linear(p, t.gated, n, layer.down, t.x, t.x, t.rounded);
}

// Copies what is wanted of the residual stream behind `done` layers (0: the embeddings).
inline void note_hidden(const Network& net, const Step& step, int done, const float* x) {
  for (int tap = 0; tap < step.num_taps; tap++) {
    if (step.taps[tap] != done) continue;
    for (int i = 0; i < step.num_captured; i++)
      std::memcpy(step.hidden + (int64_t(tap) * step.num_captured + i) * net.hidden, x + step.captured[i] * net.hidden,
                  net.hidden * sizeof(float));
  }
}

inline void forward(const Parallel& p, const Network& net, const Step& step, const Scratch& t) {
  for (int i = 0; i < step.tokens; i++) embed(net, step.ids[i], t.x + int64_t(i) * net.hidden);
  note_hidden(net, step, 0, t.x);
  for (int i = 0; i < step.num_layers; i++) {
    run_layer(p, net, step.layers[i], step, t);
    note_hidden(net, step, step.layers[i] + 1, t.x);
  }
  for (int i = 0; i < step.outputs; i++)
    normalise(t.x + step.outputs_at[i] * net.hidden, net.norm, net.eps, net.hidden, t.h + int64_t(i) * net.hidden);
  if (step.outputs) linear(p, t.h, step.outputs, net.head, nullptr, step.logits, t.rounded);
}

// Writes the keys and values that each layer makes of its own residual streams [layers][tokens][hidden].
inline void project(const Parallel& p, const Network& net, const float* streams, const Step& step, const Scratch& t) {
  const Shape& s = net.shape;
  const int n = step.tokens, keys = s.kv_heads * s.dim, width = 2 * keys;
  for (int number = 0; number < step.num_layers; number++) {
    const Layer& layer = net.layers[number];
    each_token(p, n, net.hidden, [&](int i) {
      const int64_t at = int64_t(i) * net.hidden;
      normalise(streams + int64_t(number) * n * net.hidden + at, layer.attention_norm, net.eps, net.hidden, t.h + at);
    });
    linear(p, t.h, n, layer.kv, nullptr, t.qkv, t.rounded);
    each_token(p, n, width, [&](int i) {
      float* row = t.qkv + int64_t(i) * width;
      turn(net, layer, step, i, false, row);
      write(s, row, row + keys, step.slots + i, 1, 0, step.caches[number]);
    });
  }
}

}  // namespace LONGDRAFT_ISA
}  // namespace longdraft
