// Sizes that the kernel and the cut of a call share, for host and device.
#pragma once

namespace heddle::cuda::sm90::attention_decode {

constexpr int kConsumerWarps = 8, kQueryWarps = 3;
constexpr int kServiceThreads = 128;  // the producer's warp and the query warps
constexpr int kConsumerThreads = 32 * kConsumerWarps;
constexpr int kThreads = kServiceThreads + kConsumerThreads;
constexpr int kRowTile = 16, kKeyTile = 16;      // what a warp's product takes
constexpr int kGroupRows = 64, kGroupKeys = 64;  // what a warpgroup's takes, a row tile for each of its four warps

}  // namespace heddle::cuda::sm90::attention_decode
