// A small pool of threads for one process: parallel regions of many small tasks, hundreds of them per step.
//
// Workers spin for a short while between regions, since the next one mostly follows within microseconds, and then
// sleep. Tasks are taken one by one from a counter, so a thread that the system holds up delays nobody for long; which
// thread runs a task never changes its result.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace longdraft {

class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  int size() const { return int(workers_.size()) + 1; }

  // Calls task(i) for every i in [0, count), here and on the workers; returns when all are done.
  template <class Task>
  void run(int count, const Task& task) {
    if (count <= 1 || workers_.empty()) {
      for (int i = 0; i < count; i++) task(i);
      return;
    }
    start(count, [](const void* t, int i) { (*static_cast<const Task*>(t))(i); }, &task);
  }

 private:
  using Call = void (*)(const void*, int);
  void start(int count, Call call, const void* task);
  void work();
  void drain();

  std::vector<std::thread> workers_;
  Call call_ = nullptr;
  const void* task_ = nullptr;
  int count_ = 0;
  alignas(64) std::atomic<int> next_{0};
  alignas(64) std::atomic<int> inside_{0};  // threads that may touch the tasks
  std::atomic<bool> open_{false};
  alignas(64) std::atomic<uint64_t> region_{0};
  std::atomic<int> asleep_{0};
  bool stop_ = false;
  std::mutex mutex_;
  std::condition_variable wake_;
};

}  // namespace longdraft
