// The Python side of the kernels. Tensors come as addresses; longdraft/kernels/native.py checks what they point to.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "compact.h"
#include "kernels.h"
#include "openmp.h"
#include "pool.h"

namespace nb = nanobind;
using namespace longdraft;

#define LONGDRAFT_DECLARE(name) \
  namespace longdraft {         \
  namespace name {              \
  extern const Kernels kernels; \
  }                             \
  }
LONGDRAFT_DECLARE(plain)
#if defined(__x86_64__)
LONGDRAFT_DECLARE(avx2)
LONGDRAFT_DECLARE(avx512)
LONGDRAFT_DECLARE(avx512bf16)
#endif

namespace {

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// Kernels that this processor can run, the fastest first.
std::vector<const Kernels*> usable() {
  std::vector<const Kernels*> out;
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  // Every processor with the former has the latter.
  if (avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")) out.push_back(&avx512bf16::kernels);
  if (avx512) out.push_back(&longdraft::avx512::kernels);
  if (avx2) out.push_back(&longdraft::avx2::kernels);
#endif
  out.push_back(&plain::kernels);
  return out;
}

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (const Kernels* kernels : usable()) names.push_back(kernels->name);
  return names;
}

// Asks for large pages: caches and weights are read from end to end, and with small ones every other line costs a look
// into the page table. Only a hint; other systems ignore it.
void huge_pages([[maybe_unused]] uintptr_t address, [[maybe_unused]] int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t small = 4096;
  const uintptr_t first = (address + small - 1) / small * small, end = (address + bytes) / small * small;
  if (end > first) madvise(at<void>(first), end - first, MADV_HUGEPAGE);
#endif
}

struct Weight {
  uintptr_t data, bias;
  int n, k, type;
  uintptr_t scales, sums;
  int spill;
  Packed packed() const {
    return {at<const void>(data), at<const float>(bias), n, k, type, at<const float>(scales), at<const int32_t>(sums),
            spill};
  }
};

// What attention reads in a step, cut into pieces: one part for all layers, or one per layer where each reads its own
// lists.
struct Plan {
  Shape shape;
  std::vector<Part> parts;
  int64_t partial = 0;

  // Of lists that were made beforehand; the arrays must outlive the plan.
  Plan(int heads, int kv_heads, int dim, bool kv_bf16, int layers, int rows, int lists, int width, uintptr_t pages,
       uintptr_t first, uintptr_t counts, uintptr_t positions, uintptr_t starts, uintptr_t lens, uintptr_t sinks,
       uintptr_t window)
      : shape{heads, kv_heads, dim, kv_bf16}, cuts_(layers) {
    cut({rows, lists, width, at<const int32_t>(pages), at<const int32_t>(first), at<const int32_t>(counts),
         at<const int32_t>(positions), at<const int32_t>(starts), at<const int32_t>(lens), at<const int32_t>(sinks),
         at<const int32_t>(window)});
  }

  // Of tables[rows][width] of all pages, and two ranges of tokens in them: [0, sinks) and [starts[b], lens[b]); no
  // starts: all tokens. Queries of row b: [queries[b], queries[b + 1]). Nothing of this need outlive the call.
  Plan(int heads, int kv_heads, int dim, bool kv_bf16, int rows, int width, uintptr_t tables, uintptr_t lens,
       uintptr_t queries, int sinks, uintptr_t starts)
      : shape{heads, kv_heads, dim, kv_bf16}, cuts_(1) {
    const auto *table = at<const int64_t>(tables), *length = at<const int64_t>(lens), *start = at<const int64_t>(starts);
    const auto ceil = [](int64_t tokens) { return int((tokens + PAGE - 1) / PAGE); };
    std::vector<int> before(rows), from(rows), counts(rows);  // pages of sinks alone, the window's first, and all
    for (int b = 0; b < rows; b++) {
      from[b] = start ? int(start[b] / PAGE) : 0;
      before[b] = std::min(ceil(std::min<int64_t>(sinks, length[b])), from[b]);
      counts[b] = before[b] + ceil(length[b]) - from[b];
    }
    const int most = rows ? *std::max_element(counts.begin(), counts.end()) : 0;
    own_.reserve(int64_t(rows) * (2 * most + 5) + 1);  // it must not move: views point into it
    const auto room = [&](int64_t n) { return own_.insert(own_.end(), n, 0); };
    const auto pages = room(int64_t(rows) * most), first = room(int64_t(rows) * most), used = room(rows);
    const auto tokens = room(rows + 1), ends = room(rows), sunk = room(rows), window = room(rows);
    for (int b = 0; b < rows; b++) {
      for (int i = 0; i < counts[b]; i++) {
        const int number = i < before[b] ? i : i - before[b] + from[b];
        pages[int64_t(b) * most + i] = int32_t(table[int64_t(b) * width + number]);
        first[int64_t(b) * most + i] = number * PAGE;
      }
      used[b] = counts[b], ends[b] = int32_t(length[b]);
      if (start) sunk[b] = sinks, window[b] = int32_t(start[b]);
    }
    for (int b = 0; b <= rows; b++) tokens[b] = int32_t(at<const int64_t>(queries)[b]);
    cut({rows, 1, most, &*pages, &*first, &*used, nullptr, &*tokens, &*ends, &*sunk, &*window});
  }
  Plan(const Plan&) = delete;

 private:
  struct Cut {
    std::vector<Piece> pieces;
    std::vector<Merge> merges;
  };

  void cut(View view) {
    for (Cut& cut : cuts_) {
      cut_rows(view, cut);
      parts.push_back({view, cut.pieces.data(), cut.merges.data(), int(cut.pieces.size()), int(cut.merges.size())});
      const int64_t step = int64_t(view.rows) * view.lists;
      view.pages += step * view.width, view.first += step * view.width, view.counts += step;
      if (view.positions) view.positions += step * view.width * PAGE;
    }
  }

  void cut_rows(const View& view, Cut& cut) {
    int64_t partial = 0;  // layers run one after the other: they share the space
    for (int row = 0; row < view.rows; row++) {
      const bool few = (view.starts[row + 1] - view.starts[row]) * shape.heads <= QUERIES;
      const int together = view.lists == 1 && few ? shape.kv_heads : 1;
      for (int head = 0; head < shape.kv_heads; head += together) cut_row(view, row, head, together, cut, partial);
    }
    this->partial = std::max(this->partial, partial);
  }

  void cut_row(const View& view, int row, int head, int heads, Cut& cut, int64_t& partial) {
    const int64_t list = int64_t(row) * view.lists + (view.lists == 1 ? 0 : head);
    const int group = shape.heads / shape.kv_heads, queries = view.starts[row + 1] - view.starts[row];
    // A token's heads stay together, as their masses are added up.
    const int most = group > QUERIES ? QUERIES : QUERIES / group * group;
    for (int query = 0; query < queries * group; query += most) {
      const int count = std::min(most, queries * group - query), start = int(cut.pieces.size());
      const int highest = view.lens[row] - queries + (query + count - 1) / group;
      for (int page = 0; page < view.counts[list]; page += CHUNK_PAGES) {
        if (page && !view.positions && view.first[list * view.width + page] > highest) break;
        const int pages = std::min(CHUNK_PAGES, view.counts[list] - page);
        cut.pieces.push_back({row, head, heads, query, count, page, pages, partial});
        partial += int64_t(heads) * count * (shape.dim + 2);
      }
      cut.merges.push_back({start, int(cut.pieces.size()) - start});
    }
  }

  std::vector<Cut> cuts_;
  std::vector<int32_t> own_;
};

struct Decoder {
  Network net{};
  std::vector<Layer> layers;
  Weight head{};
};

// Asks a Python function where a layer's attention reads. It must not call the runtime.
Cache ask(const void* decode, int layer) {
  nb::gil_scoped_acquire held;
  const nb::handle call(static_cast<PyObject*>(const_cast<void*>(decode)));
  auto [k, v] = nb::cast<std::tuple<uintptr_t, uintptr_t>>(call(layer));
  return {at<void>(k), at<void>(v)};
}

template <class Team>
Parallel parallel(Team* team) {
  return {team, [](void* team, int n, void (*call)(const void*, int), const void* task) {
            static_cast<Team*>(team)->run(n, [&](int i) { call(task, i); });
          },
          team->size()};
}

class Runtime {
 public:
  // `threads`: of a pool of its own; 0: those of the process's OpenMP.
  Runtime(const std::string& isa, int threads) {
    for (const Kernels* kernels : usable())
      if (isa == kernels->name) kernels_ = kernels;
    if (!kernels_) throw std::invalid_argument("this processor has no instruction set " + isa);
    if (!threads && !openmp_.found()) throw std::invalid_argument("this process has no OpenMP");
    if (threads) pool_ = new Pool(threads);
    parallel_ = pool_ ? parallel(pool_) : parallel(&openmp_);
  }
  ~Runtime() {
    if (owner_ == getpid()) delete pool_;  // in a forked child there are no threads to wait for: leave it alone
  }
  Runtime(const Runtime&) = delete;

  std::string isa() const { return kernels_->name; }
  int threads() const { return parallel_.threads; }
  bool has_compact() const { return kernels_->compact; }

  void pack(uintptr_t weight, const Weight& out) {
    // Blocks of 16 outputs are packed apart: each is contiguous in the result.
    const int step = out.type == FLOAT32 ? 1 : out.type == BFLOAT16 ? 2 : 4;
    const int64_t bytes = int64_t(16) * 4 * ((out.k + step - 1) / step);
    each_block(out.n, [&](int i) {
      Packed block = out.packed();
      block.data = at<const char>(out.data) + i * bytes;
      block.n = std::min(16, out.n - i * 16);
      if (out.type == INT8) block.scales += i * 16, block.sums += i * 16;
      kernels_->pack(at<const float>(weight) + int64_t(i) * 16 * out.k, block);
    });
  }

  // What compact blocks of a packed bfloat16 weight need room for: the most groups of one that stay as they are.
  int spill(const Weight& raw) {
    std::atomic<int> most = 0;
    each_block(raw.n, [&](int i) {
      const int kept = make_compact(at<const uint16_t>(raw.data) + int64_t(i) * 16 * raw.k, raw.k / 2, 0, nullptr);
      for (int known = most; known < kept && !most.compare_exchange_weak(known, kept);) {}
    });
    return most;
  }

  void compact(const Weight& raw, const Weight& out) {
    each_block(raw.n, [&](int i) {
      const CompactBlock block = block_of(out.packed(), i);
      make_compact(at<const uint16_t>(raw.data) + int64_t(i) * 16 * raw.k, block.words, block.spill,
                   const_cast<uint8_t*>(block.data));
    });
  }

  // Rows of a compact weight, bfloat16 [count, k].
  void rows(const Weight& weight, uintptr_t ids, int64_t count, uintptr_t out) {
    for (int64_t i = 0; i < count; i++) {
      const int64_t id = at<const int64_t>(ids)[i];
      uint16_t* row = at<uint16_t>(out) + i * weight.k;
      each_of_row(block_of(weight.packed(), id / 16), int(id % 16), weight.k, [&](int j, uint16_t w) { row[j] = w; });
    }
  }

  void linear(uintptr_t x, int m, const Weight& w, uintptr_t residual, uintptr_t y) {
    std::lock_guard<std::mutex> lock(mutex_);
    rounded_.resize(int64_t(m) * (w.k + 8));
    kernels_->linear(parallel_, at<const float>(x), m, w.packed(), at<const float>(residual), at<float>(y),
                     rounded_.data());
  }

  void write(const Plan& plan, uintptr_t k, uintptr_t v, uintptr_t slots, int n, uintptr_t cache_k, uintptr_t cache_v) {
    kernels_->write(plan.shape, at<const float>(k), at<const float>(v), at<const int64_t>(slots), n,
                    plan.shape.kv_heads * plan.shape.dim, {at<void>(cache_k), at<void>(cache_v)});
  }

  void attention(const Plan& plan, uintptr_t q, uintptr_t cache_k, uintptr_t cache_v, uintptr_t out, int captured,
                 uintptr_t captured_at, uintptr_t mass) {
    std::lock_guard<std::mutex> lock(mutex_);
    partial_.resize(plan.partial);
    kernels_->attention(parallel_, plan.shape, plan.parts[0], at<const float>(q), {at<void>(cache_k), at<void>(cache_v)},
                        partial_.data(), at<float>(out), masses(plan, captured, captured_at, mass));
  }

  void forward(const Decoder& decoder, const Plan& plan, const std::vector<int32_t>& layers, int tokens, uintptr_t ids,
               uintptr_t slots, uintptr_t cos, uintptr_t sin, int outputs, uintptr_t outputs_at,
               const std::vector<std::tuple<uintptr_t, uintptr_t>>& caches, uintptr_t logits, int captured,
               uintptr_t captured_at, uintptr_t queries, uintptr_t mass_at, uintptr_t mass, uintptr_t hidden,
               const std::vector<int32_t>& taps, std::optional<nb::handle> decode) {
    std::lock_guard<std::mutex> lock(mutex_);
    point_to(caches);
    Step step{tokens, outputs, at<const int64_t>(ids), at<const int64_t>(slots), at<const int64_t>(outputs_at),
              at<const float>(cos), at<const float>(sin), plan.parts.data(), int(plan.parts.size()), layers.data(),
              int(layers.size()), caches_.data(), at<float>(logits), at<const int64_t>(captured_at), captured,
              at<float>(queries), masses(plan, captured, mass_at, mass), taps.data(), int(taps.size()),
              at<float>(hidden), decode ? ask : nullptr, decode ? decode->ptr() : nullptr};
    Network net = decoder.net;
    net.layers = decoder.layers.data();
    kernels_->forward(parallel_, net, step, scratch(net, tokens, plan.partial));
  }

  void project(const Decoder& decoder, int tokens, uintptr_t streams, uintptr_t slots, uintptr_t cos, uintptr_t sin,
               const std::vector<std::tuple<uintptr_t, uintptr_t>>& caches) {
    std::lock_guard<std::mutex> lock(mutex_);
    point_to(caches);
    Step step{};
    step.tokens = tokens, step.slots = at<const int64_t>(slots);
    step.cos = at<const float>(cos), step.sin = at<const float>(sin);
    step.num_layers = int(decoder.layers.size()), step.caches = caches_.data();
    Network net = decoder.net;
    net.layers = decoder.layers.data();
    kernels_->project(parallel_, net, at<const float>(streams), step, scratch(net, tokens, 0));
  }

  void draw(uintptr_t logits, int rows, int n, uintptr_t temperatures, uintptr_t seeds, uintptr_t positions, int role,
            uintptr_t tokens) {
    std::lock_guard<std::mutex> lock(mutex_);
    kernels_->draw(parallel_, at<const float>(logits), rows, n, at<const double>(temperatures),
                   at<const int64_t>(seeds), at<const int64_t>(positions), role, at<int64_t>(tokens));
  }

  void token_mass(std::tuple<int, int, int, bool> shape, int layers, uintptr_t q, int n, int start, uintptr_t pages,
                  int count, uintptr_t k, int64_t layer_bytes, uintptr_t mass) {
    auto [heads, kv_heads, dim, kv_bf16] = shape;
    std::lock_guard<std::mutex> lock(mutex_);
    kernels_->token_mass(parallel_, {heads, kv_heads, dim, kv_bf16}, layers, at<const float>(q), n, start,
                         at<const int64_t>(pages), count, at<const void>(k), layer_bytes, at<float>(mass));
  }

  void page_scores(std::tuple<int, int, int, bool> shape, int layers, uintptr_t bounds, int64_t num_pages,
                   uintptr_t parts, uintptr_t pages, int count, uintptr_t scores) {
    auto [heads, kv_heads, dim, kv_bf16] = shape;
    std::lock_guard<std::mutex> lock(mutex_);
    kernels_->page_scores(parallel_, {heads, kv_heads, dim, kv_bf16}, layers, at<const void>(bounds), num_pages,
                          at<const float>(parts), at<const int64_t>(pages), count, at<float>(scores));
  }

  double read(uintptr_t data, int64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<float> out(parallel_.threads * 8);
    kernels_->read(parallel_, at<const void>(data), bytes, out.data());
    double total = 0;
    for (float f : out) total += f;
    return total;
  }

 private:
  // Calls task(i) for all blocks of 16 of n outputs.
  template <class Task>
  void each_block(int n, const Task& task) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto call = [](const void* task, int i) { (*static_cast<const Task*>(task))(i); };
    parallel_.run(parallel_.pool, (n + 15) / 16, call, &task);
  }

  void point_to(const std::vector<std::tuple<uintptr_t, uintptr_t>>& caches) {
    caches_.clear();
    for (auto& [k, v] : caches) caches_.push_back({at<void>(k), at<void>(v)});
  }

  // Where the masses of the tokens `captured_at` go: `out` [layers, captured, kv_heads, width], or nowhere if it is null.
  // Those of a negative token are not wanted.
  Mass masses(const Plan& plan, int captured, uintptr_t captured_at, uintptr_t out) {
    if (!out) return {};
    const View& view = plan.parts[0].view;
    if (plan.shape.heads / plan.shape.kv_heads > QUERIES) throw std::invalid_argument("too many heads to a KV head");
    mass_at_.assign(view.starts[view.rows], -1);
    for (int i = 0; i < captured; i++)
      if (const int64_t token = at<const int64_t>(captured_at)[i]; token >= 0) mass_at_[token] = i;
    const int64_t room = plan.partial / (plan.shape.dim + 2) * NOTES;
    if (int64_t(notes_.size()) < room) notes_.resize(room);
    return {mass_at_.data(), at<float>(out), notes_.data()};
  }

  Scratch scratch(const Network& net, int64_t n, int64_t partial) {
    const int64_t qkv = int64_t(net.shape.heads + 2 * net.shape.kv_heads) * net.shape.dim;
    const int64_t keys = int64_t(net.shape.heads) * net.shape.dim, widest = std::max({int64_t(net.hidden), keys,
                                                                                     int64_t(net.intermediate)});
    const int64_t sizes[] = {net.hidden, net.hidden, qkv, keys, 2 * net.intermediate, net.intermediate};
    int64_t total = 0;
    for (int64_t size : sizes) total += n * size;
    if (int64_t(floats_.size()) < total) floats_.resize(total);
    if (int64_t(partial_.size()) < partial) partial_.resize(partial);
    if (int64_t(rounded_.size()) < n * (widest + 8)) rounded_.resize(n * (widest + 8));
    float* p[6];
    float* next = floats_.data();
    for (int i = 0; i < 6; i++) p[i] = next, next += n * sizes[i];
    return {p[0], p[1], p[2], p[3], p[4], p[5], partial_.data(), rounded_.data()};
  }

  const pid_t owner_ = getpid();
  Pool* pool_ = nullptr;
  OpenMP openmp_;
  Parallel parallel_;
  const Kernels* kernels_ = nullptr;
  std::mutex mutex_;  // one call at a time: the buffers are shared
  std::vector<float> floats_, partial_, notes_;
  std::vector<int64_t> mass_at_;
  std::vector<uint16_t> rounded_;
  std::vector<Cache> caches_;
};

}  // namespace

NB_MODULE(_native, m) {
  using Release = nb::call_guard<nb::gil_scoped_release>;
  m.doc() = "Native CPU kernels; used through longdraft.kernels.native.";
  m.def("isas", &isas);
  m.def("huge_pages", &huge_pages);
  m.def("compact_bytes", &CompactBlock::bytes);
  m.attr("PAGE") = PAGE;
  nb::class_<Weight>(m, "Weight").def(
      "__init__", [](Weight* w, uintptr_t data, uintptr_t bias, int n, int k, int type, uintptr_t scales, uintptr_t sums,
                     int spill) { new (w) Weight{data, bias, n, k, type, scales, sums, spill}; });
  nb::class_<Plan>(m, "Plan").def(nb::init<int, int, int, bool, int, int, int, int, uintptr_t, uintptr_t, uintptr_t,
                                           uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t>())
      .def(nb::init<int, int, int, bool, int, int, uintptr_t, uintptr_t, uintptr_t, int, uintptr_t>());
  nb::class_<Decoder>(m, "Decoder")
      .def("__init__",
           [](Decoder* d, std::tuple<int, int, int, bool> shape, int hidden, int intermediate, int vocab, float eps,
              uintptr_t norm, const Weight& head, uintptr_t embedding, const Weight& tied, bool bf16) {
             auto [heads, kv_heads, dim, kv_bf16] = shape;
             new (d) Decoder;
             d->net = {nullptr, {heads, kv_heads, dim, kv_bf16}, hidden, intermediate, vocab, eps,
                       at<const float>(norm), head.packed(), at<const void>(embedding), tied.packed(), bf16};
           })
      .def("add_layer", [](Decoder& d, const Weight& qkv, const Weight& output, const Weight& gate_up,
                           const Weight& down, const Weight& kv, uintptr_t attention_norm, uintptr_t mlp_norm,
                           uintptr_t q_norm, uintptr_t k_norm) {
        d.layers.push_back({qkv.packed(), output.packed(), gate_up.packed(), down.packed(), kv.packed(),
                            at<const float>(attention_norm), at<const float>(mlp_norm), at<const float>(q_norm),
                            at<const float>(k_norm)});
      });
  nb::class_<Runtime>(m, "Runtime")
      .def(nb::init<const std::string&, int>())
      .def_prop_ro("isa", &Runtime::isa)
      .def_prop_ro("threads", &Runtime::threads)
      .def_prop_ro("has_compact", &Runtime::has_compact)
      .def("pack", &Runtime::pack, Release())
      .def("spill", &Runtime::spill, Release())
      .def("compact", &Runtime::compact, Release())
      .def("rows", &Runtime::rows, Release())
      .def("linear", &Runtime::linear, Release())
      .def("write", &Runtime::write, Release())
      .def("attention", &Runtime::attention, Release())
      .def("forward", &Runtime::forward, Release())
      .def("project", &Runtime::project, Release())
      .def("draw", &Runtime::draw, Release())
      .def("token_mass", &Runtime::token_mass, Release())
      .def("page_scores", &Runtime::page_scores, Release())
      .def("read", &Runtime::read, Release());
}
