// The threads of an OpenMP that is in the process anyway, as in engines that run on torch. They stay awake for a while
// between regions: a pool of our own would fight them for the cores. Found by name, so nothing here depends on OpenMP.
#pragma once
#include <dlfcn.h>

#include <atomic>

namespace longdraft {

class OpenMP {
 public:
  bool found() const { return parallel_ && threads_; }
  int size() const { return threads_(); }

  // Calls task(i) for every i in [0, count); tasks are taken one by one. Returns when all are done.
  template <class Task>
  void run(int count, const Task& task) {
    Region<Task> region{count, task};
    if (count <= 1)
      region.drain();
    else
      parallel_([](void* r) { static_cast<Region<Task>*>(r)->drain(); }, &region, 0, 0);
  }

 private:
  template <class Task>
  struct Region {
    const int count;
    const Task& task;
    std::atomic<int> next{0};
    void drain() {
      for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) task(i);
    }
  };
  template <class Function>
  static Function* find(const char* name) {
    return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
  }

  // What compilers call for a parallel region, in GNU's, LLVM's and Intel's runtime; 0 threads: as many as usual.
  using Parallel = void(void (*)(void*), void*, unsigned, unsigned);
  Parallel* const parallel_ = find<Parallel>("GOMP_parallel");
  int (*const threads_)() = find<int()>("omp_get_max_threads");
};

}  // namespace longdraft
