// Attention over GPUs by NCCL, a process for each, forward and backward: held against one GPU, and timed.
//
// usage, once for each rank, all at once: heddle_distributed_nccl RANK RANKS FILE [ROWS [SCHEME]]
// FILE: a path that all ranks see and that is not there yet, over which they find each other. SCHEME: gather, ring,
// needed, ulysses, 2d or auto.
#include <heddle/distributed_nccl.h>
#include <heddle/error.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "on_gpus.h"

namespace {

using namespace heddle::distributed;

constexpr auto kTimeout = std::chrono::seconds(60);

// Rank 0 writes the id, under another name until all of it is there.
NcclId common_id(int rank, const std::filesystem::path& file) {
  if (rank == 0) {
    if (std::filesystem::exists(file))
      throw heddle::RuntimeError(file.string() + " is there already: an id serves once");
    const NcclId id = new_nccl_id();
    const std::filesystem::path part = file.string() + ".part";
    std::ofstream(part, std::ios::binary).write(reinterpret_cast<const char*>(id.bytes.data()), sizeof id);
    std::filesystem::rename(part, file);
    return id;
  }
  const auto end = std::chrono::steady_clock::now() + kTimeout;
  while (!std::filesystem::exists(file)) {
    if (std::chrono::steady_clock::now() > end) throw heddle::RuntimeError("rank 0 has not written " + file.string());
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  NcclId id;
  std::ifstream(file, std::ios::binary).read(reinterpret_cast<char*>(id.bytes.data()), sizeof id);
  return id;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc < 4) throw heddle::RuntimeError("usage: heddle_distributed_nccl RANK RANKS FILE [ROWS [SCHEME]]");
    const int rank = std::stoi(argv[1]), ranks = std::stoi(argv[2]);
    const std::string file = argv[3];
    use_gpu(rank);
    const auto communicator = nccl_communicator(common_id(rank, file), ranks, rank, {.timeout = kTimeout});
    if (rank == 0) std::filesystem::remove(file);  // all have read it, since the communicator is there
    attend_on_gpus(*communicator, argc > 4 ? std::stoll(argv[4]) : 32768,
                   scheme_named(argc > 5 ? argv[5] : "auto", "heddle_distributed_nccl"));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "heddle_distributed_nccl: %s\n", error.what());
    return 1;
  }
  return 0;
}
