// The candidates for rotary embedding and for appends to caches.
#pragma once

#include "ops/choice.h"
#include "problem/int4_append.h"
#include "problem/kv_cache.h"

namespace heddle {

template <>
std::span<const RotaryKernel* const> PlainOperation<RotaryProblem>::candidates();
template <>
std::span<const AppendKernel* const> PlainOperation<AppendProblem>::candidates();
template <>
std::span<const Int4AppendKernel* const> PlainOperation<Int4AppendProblem>::candidates();

template <>
struct Operation<RotaryProblem> : PlainOperation<RotaryProblem> {};
template <>
struct Operation<AppendProblem> : PlainOperation<AppendProblem> {};
template <>
struct Operation<Int4AppendProblem> : PlainOperation<Int4AppendProblem> {};

}  // namespace heddle
