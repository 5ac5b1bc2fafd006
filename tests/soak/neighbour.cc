#include "soak/neighbour.h"

#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

#include "soak/subject.h"

namespace heddle::soak {

Neighbour::Neighbour() {
  std::array<int, 2> ends{};
  if (pipe(ends.data()) != 0) throw std::runtime_error("pipe: " + std::string(std::strerror(errno)));
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[0], STDIN_FILENO);
  posix_spawn_file_actions_addclose(&actions, ends[1]);
  std::string self = "/proc/self/exe", flag = "--neighbour";
  std::array<char*, 3> arguments = {self.data(), flag.data(), nullptr};
  const int status = posix_spawn(&process_, self.c_str(), &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(ends[0]);
  if (status != 0) throw std::runtime_error("posix_spawn: " + std::string(std::strerror(status)));
  orders_ = ends[1];
}

Neighbour::~Neighbour() {
  close(orders_);
  waitpid(process_, nullptr, 0);
}

void Neighbour::order(char what) {
  if (write(orders_, &what, 1) != 1 || waitpid(process_, nullptr, WNOHANG) != 0) {
    throw std::runtime_error("the process beside this one has ended");
  }
}

int Neighbour::live() {
  const std::vector<SoakCase> cases = soak_cases(kit::current_gpu().major);
  const std::unique_ptr<Subject> subject = cases.front().make(99);
  const kit::DeviceStream stream;
  for (bool goes = false;;) {
    pollfd orders = {.fd = STDIN_FILENO, .events = POLLIN, .revents = 0};
    if (poll(&orders, 1, goes ? 0 : -1) > 0) {
      char order;
      if (read(STDIN_FILENO, &order, 1) != 1) return 0;
      goes = order == 'g';
    }
    if (!goes) continue;
    for (int n = 0; n < 20; ++n) subject->launch(n % kSlots, stream.get());
    stream.synchronize();
  }
}

}  // namespace heddle::soak
