// Repeats a subject's calls and looks at all they write.
#pragma once

#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

#include "soak/subject.h"

namespace heddle::soak {

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// What calls of a subject did.
struct Findings {
  long calls = 0, bad_calls = 0;
  unsigned long long bad_rows = 0;
  std::string where;  // the first of them
  bool any() const { return bad_calls > 0; }
};

// Runs a subject's calls on a stream of its own and looks at all they write.
class Runner {
 public:
  explicit Runner(Subject& subject) : subject_(subject), tallies_(kSlots * subject.outputs.size() * sizeof(Tally)) {}

  // For so long, or until something is found.
  Findings run(double seconds) {
    Findings found;
    const Clock::time_point begin = Clock::now();
    if (!started_) first_call(found);
    for (long round = 0; seconds_since(begin) < seconds && !found.any(); ++round) {
      reset();
      for (int slot = 0; slot < kSlots; ++slot) {
        // A row that is not written must not pass for what the slot held before; but what clears it also parts the
        // calls.
        if (round % 8 == 0) poison(slot);
      }
      for (int slot = 0; slot < kSlots; ++slot) subject_.launch(slot, stream_.get());
      for (int slot = 0; slot < kSlots; ++slot) {
        subject_.keep(slot, stream_.get());
        for (std::size_t n = 0; n < subject_.outputs.size(); ++n) {
          Output& output = subject_.outputs[n];
          if (output.exact) {
            count_other_rows(output.slot(slot), output.first.data(), output.rows, output.row_bytes(), tally(slot, n),
                             stream_.get());
          } else {
            hold_to_reference(output, slot, n);
          }
        }
      }
      collect(found, kSlots, "call");
    }
    return found;
  }

  // Of one call among others, with nothing else in between; microseconds.
  double time() {
    constexpr int kCalls = 40;
    const Clock::time_point begin = Clock::now();
    for (int call = 0; call < kCalls; ++call) subject_.launch(call % kSlots, stream_.get());
    stream_.synchronize();
    return seconds_since(begin) / kCalls * 1e6;
  }

 private:
  Tally* tally(int slot, std::size_t output) const {
    return static_cast<Tally*>(tallies_.data()) + static_cast<std::size_t>(slot) * subject_.outputs.size() + output;
  }
  void reset() {
    std::vector<Tally> none(tallies_.bytes() / sizeof(Tally));
    tallies_.write(0, none.data(), tallies_.bytes());
  }
  void poison(int slot) {
    for (Output& output : subject_.outputs) fill_bytes(output.slot(slot), 0xFF, output.first.bytes(), stream_.get());
    subject_.spoil(stream_.get());
  }
  void hold_to_reference(const Output& output, int slot, std::size_t n) {
    count_far_rows(output.slot(slot), output.dtype, output.reference(), output.rows, output.width, output.tolerance,
                   output.average, tally(slot, n), stream_.get());
  }

  void first_call(Findings& found) {
    started_ = true;
    reset();
    poison(0);
    subject_.launch(0, stream_.get());
    subject_.keep(0, stream_.get());
    for (std::size_t n = 0; n < subject_.outputs.size(); ++n) {
      hold_to_reference(subject_.outputs[n], 0, n);
      copy_bytes(subject_.outputs[n].first.data(), subject_.outputs[n].slot(0), subject_.outputs[n].first.bytes(),
                 stream_.get());
    }
    collect(found, 1, "the first call, beside the reference,");
  }

  void collect(Findings& found, int slots, const char* which) {
    stream_.synchronize();
    std::vector<Tally> host(tallies_.bytes() / sizeof(Tally));
    tallies_.read(0, host.data(), tallies_.bytes());
    for (int slot = 0; slot < slots; ++slot) {
      ++found.calls;
      bool bad = false;
      for (std::size_t n = 0; n < subject_.outputs.size(); ++n) {
        const Tally& t = host[static_cast<std::size_t>(slot) * subject_.outputs.size() + n];
        if (t.rows == 0) continue;
        bad = true;
        found.bad_rows += t.rows;
        if (!found.where.empty()) continue;
        found.where = std::string(which) + (found.calls > 1 ? " " + std::to_string(found.calls) : "") + " has " +
                      std::to_string(t.rows) + " of " + std::to_string(subject_.outputs[n].rows) + " rows of " +
                      subject_.outputs[n].name + " wrong, the first is " + std::to_string(t.first);
        if (t.worst > 0) found.where += ", " + std::to_string(t.worst) + " times what is allowed";
      }
      found.bad_calls += bad;
    }
  }

  Subject& subject_;
  const kit::DeviceStream stream_;
  DeviceMemory tallies_;
  bool started_ = false;
};

}  // namespace heddle::soak
