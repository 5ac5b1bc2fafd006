// What allocates nothing: every allocation of the calling thread is counted, and the executor has no other.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <new>

#include "heddle/int4_cache.h"
#include "kit/int4_case.h"

namespace {

thread_local std::int64_t allocations = 0;

void* counted(std::size_t bytes) noexcept {
  ++allocations;
  return std::malloc(bytes > 0 ? bytes : 1);
}
void* counted_or_throw(std::size_t bytes) {
  void* const data = counted(bytes);
  if (data == nullptr) throw std::bad_alloc();
  return data;
}

}  // namespace

// All forms without an alignment, so that what one of them gives, another one may free.
void* operator new(std::size_t bytes) { return counted_or_throw(bytes); }
void* operator new[](std::size_t bytes) { return counted_or_throw(bytes); }
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return counted(bytes); }
void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept { return counted(bytes); }
void operator delete(void* data) noexcept { std::free(data); }
void operator delete[](void* data) noexcept { std::free(data); }
void operator delete(void* data, std::size_t) noexcept { std::free(data); }
void operator delete[](void* data, std::size_t) noexcept { std::free(data); }
void operator delete(void* data, const std::nothrow_t&) noexcept { std::free(data); }
void operator delete[](void* data, const std::nothrow_t&) noexcept { std::free(data); }

namespace heddle::kit {
namespace {

class CallingThread : public Executor {
 public:
  int workers() const override { return 1; }
  void parallel_for(std::int64_t count, const std::function<void(std::int64_t, int)>& task) override {
    for (std::int64_t i = 0; i < count; ++i) task(i, 0);
  }
};

template <class Call>
std::int64_t allocations_of(Call call) {
  const std::int64_t before = allocations;
  call();
  return allocations - before;
}

TEST(Allocations, AreCounted) {
  EXPECT_EQ(allocations_of([] { ::operator delete(::operator new(1)); }), 1);
}

TEST(Allocations, OfAppendsInFourBitsAreNone) {
  const Int4Case c({.name = "allocations", .lengths = {200, 129}});
  CallingThread executor;
  c.fill_cache([&](std::int64_t b, std::int64_t from, std::int64_t count) {
    const HostTensor row = c.indices({c.row_of(b)}), before = c.indices({from});
    const auto s = Int4Case::step(c.k_new.view(), c.v_new.view(), c.cache(), row.view(), before.view(), b, from, count);
    const Runtime runtime{{}, &executor, nullptr};
    EXPECT_EQ(allocations_of([&] { append_int4_cache(s.k_new, s.v_new, s.cache, s.seqlens, {}, runtime); }), 0);
  });
}

}  // namespace
}  // namespace heddle::kit
