// What every transport has: parts gathered, and sums in the order of ranks.
#include "core/check.h"
#include "distributed/memory.h"
#include "heddle/distributed.h"

namespace heddle::distributed {
namespace {

using Transfers = std::vector<std::unique_ptr<Transfer>>;

std::span<const std::byte> bytes_of(std::span<const float> x) { return std::as_bytes(x); }
std::span<std::byte> bytes_of(std::span<float> x) { return std::as_writable_bytes(x); }

// Where the communicator's messages lie.
class MessageMemory {
 public:
  explicit MessageMemory(const Communicator& communicator) {
    if (communicator.device() != Device::cpu) {
      of_gpu_ = memory_on(communicator.device());
      of_gpu_->use_stream(communicator.stream());
    }
  }
  Memory& operator*() const { return of_gpu_ ? *of_gpu_ : host_memory(); }
  Memory* operator->() const { return &**this; }

 private:
  std::unique_ptr<Memory> of_gpu_;
};

// sum = share for rank 0's, else sum += share.
void add_in_order(Memory& memory, int rank, std::span<float> sum, std::span<const float> share) {
  if (rank == 0) {
    memory.copy(sum.data(), share.data(), share.size_bytes());
  } else {
    memory.add(sum, share);
  }
}

void wait_for(const Transfers& transfers) {
  for (const auto& transfer : transfers) transfer->wait();
}

}  // namespace

void Communicator::use_stream(void* /*stream*/) {}

void Communicator::all_gather(std::span<const std::byte> part, std::span<const std::span<std::byte>> parts,
                              const Purpose& purpose) {
  const int ranks = size(), self = rank();
  const Check check("distributed.all_gather");
  check.require(static_cast<int>(parts.size()) == ranks, "parts are ", parts.size(), ": there must be one for each of ",
                ranks, " ranks");
  check.require(parts[static_cast<std::size_t>(self)].size() == part.size(), "parts[", self, "] has ",
                parts[static_cast<std::size_t>(self)].size(), " bytes: it must have part's, ", part.size());
  Transfers transfers;
  for (int distance = 1; distance < ranks; ++distance) {
    const int to = (self + distance) % ranks, from = (self - distance + ranks) % ranks;
    transfers.push_back(exchange(part, to, parts[static_cast<std::size_t>(from)], from, purpose));
  }
  std::byte* own = parts[static_cast<std::size_t>(self)].data();
  if (own != part.data()) MessageMemory(*this)->copy(own, part.data(), part.size());
  wait_for(transfers);
}

void Communicator::all_gather_on_host(std::span<const std::byte> part, std::span<const std::span<std::byte>> parts,
                                      const Purpose& purpose) {
  if (device() == Device::cpu) return all_gather(part, parts, purpose);
  throw_if_failed();  // rather than what CUDA says then
  const MessageMemory memory(*this);
  std::size_t bytes = 0;
  for (const std::span<std::byte> one : parts) bytes += one.size();
  Buffer own(*memory), came(*memory);
  memory->write(own.get(part.size()), part.data(), part.size());
  std::byte* at = came.get(bytes);
  std::vector<std::span<std::byte>> there;
  for (const std::span<std::byte> one : parts) {
    there.emplace_back(at, one.size());
    at += one.size();
  }
  all_gather({own.get(part.size()), part.size()}, there, purpose);
  try {
    for (std::size_t r = 0; r < parts.size(); ++r) memory->read(parts[r].data(), there[r].data(), parts[r].size());
  } catch (const RuntimeError&) {
    throw_if_failed();
    throw;
  }
  memory->end_of_call();
}

void Communicator::all_to_all(std::span<const std::span<const std::byte>> out, std::span<const std::span<std::byte>> in,
                              const Purpose& purpose) {
  const auto ranks = static_cast<std::size_t>(size()), self = static_cast<std::size_t>(rank());
  Check("distributed.all_to_all")
      .require(out.size() == ranks && in.size() == ranks && out[self].size() == in[self].size(), "out has ", out.size(),
               " parts and in ", in.size(), ": each must have one for each of ", ranks,
               " ranks, and those of the rank itself one length");
  Transfers transfers;
  for (std::size_t distance = 1; distance < ranks; ++distance) {
    const std::size_t to = (self + distance) % ranks, from = (self + ranks - distance) % ranks;
    transfers.push_back(exchange(out[to], static_cast<int>(to), in[from], static_cast<int>(from), purpose));
  }
  MessageMemory(*this)->copy(in[self].data(), out[self].data(), out[self].size());
  wait_for(transfers);
}

void Communicator::reduce_scatter(std::span<const std::span<const float>> parts, std::span<float> sum,
                                  std::span<float> scratch, const Purpose& purpose) {
  const int ranks = size(), self = rank();
  const Check check("distributed.reduce_scatter");
  check.require(static_cast<int>(parts.size()) == ranks, "parts are ", parts.size(), ": there must be one for each of ",
                ranks, " ranks");
  const bool on_host = device() == Device::cpu;
  const std::size_t needed = (on_host ? 1 : static_cast<std::size_t>(ranks)) * sum.size();
  check.require(parts[static_cast<std::size_t>(self)].size() == sum.size() && scratch.size() >= needed, "sum has ",
                sum.size(), " numbers, parts[", self, "] ", parts[static_cast<std::size_t>(self)].size(),
                " and scratch ", scratch.size(), ": sum must have the part's, and scratch ",
                on_host ? "as many" : "as many for each rank");
  // Everything is sent at once. What comes in is received, on the host, one rank after the other in the order of the
  // sum; on a GPU in the exchanges that send, which otherwise would wait for each other.
  const auto place = [&](int from) {
    return scratch.subspan(on_host ? 0 : static_cast<std::size_t>(from) * sum.size(), sum.size());
  };
  Transfers sent;
  for (int distance = 1; distance < ranks; ++distance) {
    const int to = (self + distance) % ranks, from = (self - distance + ranks) % ranks;
    const std::span<std::byte> in = on_host ? std::span<std::byte>{} : bytes_of(place(from));
    sent.push_back(exchange(bytes_of(parts[static_cast<std::size_t>(to)]), to, in, from, purpose));
  }
  if (!on_host) wait_for(sent);
  const MessageMemory memory(*this);
  for (int from = 0; from < ranks; ++from) {
    std::span<const float> share = parts[static_cast<std::size_t>(self)];
    if (from != self) {
      if (on_host) exchange({}, from, bytes_of(place(from)), from, purpose)->wait();
      share = place(from);
    }
    add_in_order(*memory, from, sum, share);
  }
  if (on_host) wait_for(sent);
}

void Communicator::all_reduce(std::span<float> x, std::span<float> scratch, const Purpose& purpose) {
  const auto ranks = static_cast<std::size_t>(size());
  Check("distributed.all_reduce")
      .require(scratch.size() >= ranks * x.size(), "scratch has ", scratch.size(), " numbers: it must have ", ranks,
               " times x's, ", x.size());
  std::vector<std::span<std::byte>> parts;
  for (std::size_t r = 0; r < ranks; ++r) parts.push_back(bytes_of(scratch.subspan(r * x.size(), x.size())));
  all_gather(bytes_of(std::span<const float>(x)), parts, purpose);
  const MessageMemory memory(*this);
  for (std::size_t r = 0; r < ranks; ++r) {
    add_in_order(*memory, static_cast<int>(r), x, scratch.subspan(r * x.size(), x.size()));
  }
}

void Communicator::barrier() {
  std::vector<std::byte> came(static_cast<std::size_t>(size()));
  std::vector<std::span<std::byte>> parts;
  for (std::byte& one : came) parts.push_back({&one, 1});
  constexpr std::byte kHere{1};
  all_gather_on_host({&kHere, 1}, parts, "barrier");
}

}  // namespace heddle::distributed
