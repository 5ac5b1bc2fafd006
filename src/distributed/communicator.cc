// What every transport has: parts gathered, and sums in the order of ranks.
#include <algorithm>
#include <cstring>

#include "core/check.h"
#include "heddle/distributed.h"

namespace heddle::distributed {
namespace {

using Transfers = std::vector<std::unique_ptr<Transfer>>;

std::span<const std::byte> bytes_of(std::span<const float> x) { return std::as_bytes(x); }
std::span<std::byte> bytes_of(std::span<float> x) { return std::as_writable_bytes(x); }

void add(std::span<float> sum, std::span<const float> x) {
  for (std::size_t n = 0; n < sum.size(); ++n) sum[n] += x[n];
}

}  // namespace

void Communicator::all_gather(std::span<const std::byte> part, std::span<const std::span<std::byte>> parts,
                              const std::string& what) {
  const int ranks = size(), self = rank();
  const Check check("distributed.all_gather");
  check.require(static_cast<int>(parts.size()) == ranks, "parts are ", parts.size(), ": there must be one for each of ",
                ranks, " ranks");
  check.require(parts[static_cast<std::size_t>(self)].size() == part.size(), "parts[", self, "] has ",
                parts[static_cast<std::size_t>(self)].size(), " bytes: it must have part's, ", part.size());
  Transfers transfers;
  for (int distance = 1; distance < ranks; ++distance) {
    const int to = (self + distance) % ranks, from = (self - distance + ranks) % ranks;
    transfers.push_back(exchange(part, to, parts[static_cast<std::size_t>(from)], from, what));
  }
  std::byte* own = parts[static_cast<std::size_t>(self)].data();
  if (!part.empty() && own != part.data()) std::memcpy(own, part.data(), part.size());
  for (const auto& transfer : transfers) transfer->wait();
}

void Communicator::all_to_all(std::span<const std::span<const std::byte>> out, std::span<const std::span<std::byte>> in,
                              const std::string& what) {
  const auto ranks = static_cast<std::size_t>(size()), self = static_cast<std::size_t>(rank());
  Check("distributed.all_to_all")
      .require(out.size() == ranks && in.size() == ranks && out[self].size() == in[self].size(), "out has ", out.size(),
               " parts and in ", in.size(), ": each must have one for each of ", ranks,
               " ranks, and those of the rank itself one length");
  Transfers transfers;
  for (std::size_t distance = 1; distance < ranks; ++distance) {
    const std::size_t to = (self + distance) % ranks, from = (self + ranks - distance) % ranks;
    transfers.push_back(exchange(out[to], static_cast<int>(to), in[from], static_cast<int>(from), what));
  }
  if (!out[self].empty()) std::memcpy(in[self].data(), out[self].data(), out[self].size());
  for (const auto& transfer : transfers) transfer->wait();
}

void Communicator::reduce_scatter(std::span<const std::span<const float>> parts, std::span<float> sum,
                                  std::span<float> scratch, const std::string& what) {
  const int ranks = size(), self = rank();
  const Check check("distributed.reduce_scatter");
  check.require(static_cast<int>(parts.size()) == ranks, "parts are ", parts.size(), ": there must be one for each of ",
                ranks, " ranks");
  check.require(parts[static_cast<std::size_t>(self)].size() == sum.size() && scratch.size() >= sum.size(), "sum has ",
                sum.size(), " numbers, parts[", self, "] ", parts[static_cast<std::size_t>(self)].size(),
                " and scratch ", scratch.size(), ": sum must have the part's, and scratch as many");
  // Everything is sent at once; what comes in is received one rank after the other, in the order of the sum.
  Transfers sent;
  for (int distance = 1; distance < ranks; ++distance) {
    const int to = (self + distance) % ranks;
    sent.push_back(exchange(bytes_of(parts[static_cast<std::size_t>(to)]), to, {}, to, what));
  }
  for (int from = 0; from < ranks; ++from) {
    std::span<const float> share = parts[static_cast<std::size_t>(self)];
    if (from != self) {
      exchange({}, from, bytes_of(scratch.first(sum.size())), from, what)->wait();
      share = scratch.first(sum.size());
    }
    if (from == 0) {
      std::copy(share.begin(), share.end(), sum.begin());
    } else {
      add(sum, share);
    }
  }
  for (const auto& transfer : sent) transfer->wait();
}

void Communicator::all_reduce(std::span<float> x, std::span<float> scratch, const std::string& what) {
  const auto ranks = static_cast<std::size_t>(size());
  Check("distributed.all_reduce")
      .require(scratch.size() >= ranks * x.size(), "scratch has ", scratch.size(), " numbers: it must have ", ranks,
               " times x's, ", x.size());
  std::vector<std::span<std::byte>> parts;
  for (std::size_t r = 0; r < ranks; ++r) parts.push_back(bytes_of(scratch.subspan(r * x.size(), x.size())));
  all_gather(bytes_of(std::span<const float>(x)), parts, what);
  for (std::size_t r = 0; r < ranks; ++r) {
    const std::span<const float> share = scratch.subspan(r * x.size(), x.size());
    if (r == 0) {
      std::copy(share.begin(), share.end(), x.begin());
    } else {
      add(x, share);
    }
  }
}

void Communicator::barrier() {
  std::vector<std::byte> came(static_cast<std::size_t>(size()));
  std::vector<std::span<std::byte>> parts;
  for (std::byte& one : came) parts.push_back({&one, 1});
  constexpr std::byte kHere{1};
  all_gather({&kHere, 1}, parts, "barrier");
}

}  // namespace heddle::distributed
