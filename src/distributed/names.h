// Orders and schemes by their names, and the largest number of ranks.
#pragma once

#include "core/names.h"
#include "heddle/distributed.h"

namespace heddle::distributed {

inline constexpr NamedValue<Order> kOrders[] = {{"contiguous", Order::contiguous},
                                                {"zigzag", Order::zigzag},
                                                {"striped", Order::striped},
                                                {"per_document", Order::per_document},
                                                {"balanced", Order::balanced}};
inline constexpr NamedValue<Scheme> kSchemes[] = {
    {"auto", Scheme::automatic}, {"gather", Scheme::gather}, {"ring", Scheme::ring}};

inline constexpr int kMaxRanks = 4096;

}  // namespace heddle::distributed
