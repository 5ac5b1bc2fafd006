// What errors of an exchange say.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "core/check.h"
#include "heddle/distributed.h"

namespace heddle::distributed {

// "[operation] exchange: "
inline std::string beginning(const Purpose& purpose) {
  return text("[", purpose.operation, "] ", purpose.exchange, ": ");
}

// "rank 0 waits for rank 1", or, of one that only sends, "rank 0 sends to rank 1".
inline std::string waiting(int rank, bool receives, int other) {
  return text("rank ", rank, receives ? " waits for rank " : " sends to rank ", other);
}

// "[operation] exchange: rank 0 waits for rank 1, within 60 s, plan 25727c32a69e0bdf: why". timeout: if there is one.
inline std::string lost(const Purpose& purpose, const std::string& waiting,
                        const std::optional<std::chrono::milliseconds>& timeout, const std::string& why) {
  const std::string within =
      timeout ? text(", within ", std::chrono::duration<double>(*timeout).count(), " s") : std::string();
  const std::string of_plan = purpose.plan.empty() ? std::string() : ", plan " + purpose.plan;
  return text(beginning(purpose), waiting, within, of_plan, ": ", why);
}
inline constexpr const char* kNotInTime = "it has not ended";

// A communicator whose exchanges are those of an operation, and of a plan.
class Named : public Communicator {
 public:
  Named(Communicator& all, std::string operation, std::string plan = {})
      : all_(all), operation_(std::move(operation)), plan_(std::move(plan)) {}
  int rank() const override { return all_.rank(); }
  int size() const override { return all_.size(); }
  const char* name() const override { return all_.name(); }
  Device device() const override { return all_.device(); }
  void use_stream(void* stream) override { all_.use_stream(stream); }
  void* stream() const override { return all_.stream(); }
  void throw_if_failed() override { all_.throw_if_failed(); }
  std::unique_ptr<Transfer> exchange(std::span<const std::byte> out, int to, std::span<std::byte> in, int from,
                                     const Purpose& purpose) override {
    return all_.exchange(out, to, in, from, {purpose.exchange, operation_, plan_});
  }
  const std::string& operation() const { return operation_; }

 private:
  Communicator& all_;
  const std::string operation_, plan_;
};

}  // namespace heddle::distributed
