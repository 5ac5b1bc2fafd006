#include "kit/on_ranks.h"

#include <exception>
#include <thread>

namespace heddle::kit {

std::vector<std::string> on_ranks(int ranks, std::chrono::milliseconds timeout,
                                  const std::function<void(distributed::Communicator&)>& body) {
  auto communicators = distributed::thread_communicators(ranks, timeout);
  std::vector<std::string> thrown(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      auto& own = communicators[static_cast<std::size_t>(rank)];
      try {
        body(*own);
      } catch (const std::exception& error) {
        thrown[static_cast<std::size_t>(rank)] = error.what();
        own.reset();  // the others need not wait for it
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return thrown;
}

}  // namespace heddle::kit
