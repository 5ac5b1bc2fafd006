// Where an operation runs and with what: threads, workspace, stream. Operations allocate nothing themselves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
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
  // Whether a kernel in front of the operation checks index data on a GPU (below). Not set: HEDDLE_VALIDATE says, 1 or
  // 0, read once; without it, no.
  std::optional<bool> validate = std::nullopt;
};

// Validate mode. On the CPU index data (cu_seqlens, lengths, page tables, rows, positions) is always checked before
// anything is written. On a GPU the host does not read it: there wrong values are clamped or dropped, as each operation
// says. With Runtime::validate one more kernel goes to the stream before the operation's, and checks it by the CPU's
// rules, without waiting. The operation runs all the same, nothing is read or written out of bounds, and its outputs
// mean nothing where something was found. Works under stream capture: then each replay of the graph checks.
//
// What is found first is kept for each stream until it is taken, and hides what is found later on that stream. The
// library keeps it in 128 KiB of page-locked memory, for 1024 streams of all GPUs, allocated by the process's first
// call in validate mode and never freed; a call on one stream more throws RuntimeError. A stream at the address
// of one that was destroyed has that one's record. Without validate mode nothing is allocated or launched.
//
// Takes what was found on `stream`, of the current GPU: what the CPU would have thrown, "[operation] tensor, index,
// value and rule". Empty if there is nothing, as always in a build without CUDA. last_error() waits for the stream, and
// throws RuntimeError if work on it failed; poll_error() takes what is there by now. Both may be called by any thread.
std::string last_error(void* stream);
std::string poll_error(void* stream);

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
