// Another process on the same GPU, which calls at its own pace while it is let go.
#pragma once

#include <sys/types.h>

namespace heddle::soak {

class Neighbour {
 public:
  Neighbour();
  ~Neighbour();
  Neighbour(const Neighbour&) = delete;
  Neighbour& operator=(const Neighbour&) = delete;

  void order(char what);  // 'g': go, 'p': pause

  // The other process's main.
  static int live();

 private:
  pid_t process_ = 0;
  int orders_ = -1;
};

}  // namespace heddle::soak
