// Compiled once per instruction set, with LONGDRAFT_ISA set to its name.
#include "draw.h"
#include "forward.h"
#include "select.h"

namespace longdraft {
namespace LONGDRAFT_ISA {
namespace {

// The memory roof: a loop that reads and fetches ahead, on all threads.
void read(const Parallel& p, const void* data, int64_t bytes, float* out) {
  const int parts = p.threads * 8;
  const int64_t size = bytes / parts / 1024 * 1024;
  parallel(p, parts, [&](int i) {
    const char* at = static_cast<const char*>(data) + i * size;
    V a = zero(), b = zero(), c = zero(), d = zero();
    for (int64_t j = 0; j < size; j += 256) {
      for (int k = 0; k < 4; k++) prefetch(at + j + 2048 + k * 64);
      const float* f = reinterpret_cast<const float*>(at + j);
      a = a + load(f), b = b + load(f + 16), c = c + load(f + 32), d = d + load(f + 48);
    }
    out[i] = sum(a + b + (c + d));
  });
}

void attend(const Parallel& p, const Shape& shape, const Part& part, const float* q, const Cache& cache, float* partial,
            float* out, const Mass& mass) {
  attention(p, shape, part, q, shape.heads * shape.dim, cache, partial, out, mass);
}

}  // namespace

#define LONGDRAFT_STRING(x) #x
#define LONGDRAFT_NAME(x) LONGDRAFT_STRING(x)
extern const Kernels kernels;
const Kernels kernels = {LONGDRAFT_NAME(LONGDRAFT_ISA), COMPACT_PRODUCTS, pack, linear, write, attend, forward, project, draw, read,
                         token_mass, page_scores};

}  // namespace LONGDRAFT_ISA
}  // namespace longdraft
