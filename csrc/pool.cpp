#include "pool.h"

#include <chrono>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace longdraft {
namespace {
constexpr auto SPIN = std::chrono::microseconds(100);
constexpr int SPINS_BEFORE_YIELD = 2000;  // some 50 µs

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}
}  // namespace

Pool::Pool(int threads) {
  for (int i = 1; i < threads; i++) workers_.emplace_back([this] { work(); });
}

Pool::~Pool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    region_.fetch_add(1);
  }
  wake_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void Pool::start(int count, Call call, const void* task) {
  call_ = call;
  task_ = task;
  count_ = count;
  next_.store(0, std::memory_order_relaxed);
  open_.store(true);
  region_.fetch_add(1);
  if (asleep_.load()) {
    { std::lock_guard<std::mutex> lock(mutex_); }  // nobody is between its last look and its sleep
    wake_.notify_all();
  }
  drain();
  open_.store(false);
  // Only threads that are inside are waited for: one that the system has not let run yet comes too late, no more.
  for (int spins = 0; inside_.load(); spins++) {
    if (spins < SPINS_BEFORE_YIELD)
      pause();
    else
      std::this_thread::yield();
  }
}

void Pool::drain() {
  for (int i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) call_(task_, i);
}

void Pool::work() {
  uint64_t seen = 0;
  for (;;) {
    auto until = std::chrono::steady_clock::now() + SPIN;
    while (region_.load() == seen) {
      for (int i = 0; i < 32 && region_.load() == seen; i++) pause();
      if (std::chrono::steady_clock::now() < until) continue;
      std::unique_lock<std::mutex> lock(mutex_);
      asleep_.fetch_add(1);
      wake_.wait(lock, [&] { return region_.load() != seen; });
      asleep_.fetch_sub(1);
    }
    seen = region_.load();
    if (stop_) return;
    inside_.fetch_add(1);
    if (open_.load()) drain();  // what it works on stays as it is until it has left
    inside_.fetch_sub(1);
  }
}

}  // namespace longdraft
