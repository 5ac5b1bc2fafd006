// Where an operation runs and with what: threads, workspace, stream. Operations allocate nothing themselves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace heddle {

// Runs independent tasks. Heddle's own pool is the default; a host may pass its own executor instead.
class Executor {
 public:
  virtual ~Executor() = default;
  // Upper bound of the `worker` numbers given to tasks, >= 1.
  virtual int workers() const = 0;
  // Calls task(index, worker) for every index in [0, count), in any order; returns when all are done. No two tasks that
  // run at the same time get the same worker number. The first exception that a task throws is rethrown here.
  virtual void parallel_for(std::int64_t count, const std::function<void(std::int64_t index, int worker)>& task) = 0;
};

// Of one pool. More would take a machine's process ids before they did any good.
inline constexpr int kMaxThreads = 4096;

// A pool of `threads` persistent threads, the calling one included. Concurrent calls of parallel_for are served in
// turn. Throws Error unless 1 <= threads <= kMaxThreads; RuntimeError, with how many were reached, where the system
// starts no more of them: a limit on processes or on address space. None is left running then.
std::unique_ptr<Executor> make_thread_pool(int threads);

// The process-wide pool, made at first use with num_threads() threads. Throws RuntimeError as make_thread_pool does, at
// each use until set_num_threads asks for what can be had; also for an HEDDLE_NUM_THREADS that is no number from 1 to
// kMaxThreads.
Executor& default_executor();
// Threads of the default pool: HEDDLE_NUM_THREADS, or else the processors this process may run on. Makes the pool.
int num_threads();
// Replaces the default pool; must not run beside an operation that uses it. The new one is made at its first use.
// Throws Error unless 1 <= threads <= kMaxThreads.
void set_num_threads(int threads);

// Scratch memory of the caller, aligned to 64 bytes. Its contents mean nothing between calls.
struct Workspace {
  void* data = nullptr;
  std::size_t bytes = 0;
};

// Owning scratch memory that only grows; keep one per thread that calls operations.
class WorkspaceBuffer {
 public:
  WorkspaceBuffer() = default;
  ~WorkspaceBuffer();
  WorkspaceBuffer(const WorkspaceBuffer&) = delete;
  WorkspaceBuffer& operator=(const WorkspaceBuffer&) = delete;
  // At least `bytes` bytes; throws std::bad_alloc when the memory cannot be had.
  Workspace get(std::size_t bytes);

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// What one call runs with.
struct Runtime {
  Workspace workspace;           // at least what the operation's *_workspace() query answers
  Executor* executor = nullptr;  // null: default_executor()
  void* stream = nullptr;        // CUDA stream; unused on the CPU
};

// The SIMD target that CPU kernels run with: "emu128", "sse4", "avx2", "avx512", "avx512_bf16", "neon". The best one
// this processor has, or HEDDLE_CPU_TARGET; throws RuntimeError if that names a target that is unknown, not built or
// not supported here.
std::string cpu_target();
// All targets built into this library that this processor can run, best first.
std::vector<std::string> cpu_targets();
// Chooses a target for later calls (as HEDDLE_CPU_TARGET does); "" goes back to the default choice.
void set_cpu_target(const std::string& name);

// "0.1.0"
const char* version();

}  // namespace heddle
