#include "cuda/sm90/attention_fwd/launch.h"

#include <cmath>

#include "cuda/common/tensor_map.h"

namespace heddle::cuda::sm90::attention_fwd {
namespace {

// Whether its rows are at multiples of so many bytes.
bool is_aligned(const Plane& x, std::int64_t bytes) {
  const auto multiple = [&](std::int64_t stride) {
    return stride >= 0 && stride * static_cast<std::int64_t>(size_of(x.dtype)) % bytes == 0;
  };
  return x.alignment >= bytes && multiple(x.stride_b) && multiple(x.stride_h) && multiple(x.stride_i);
}

Softcap softcap(const AttentionProblem& p) {
  Softcap cap{};
  if (!(p.softcap > 0)) return cap;
  // tanh(y) / y in y^2, for |y| <= 0.5, right to 6e-7.
  constexpr double kSeries[] = {0.9999994558, -0.3332631795, 0.1319029664, -0.04440222626};
  const double inside = static_cast<double>(p.scale) / p.softcap;
  cap.inside = static_cast<float>(inside);
  cap.outside = static_cast<float>(1 / inside);
  cap.limit = static_cast<float>(0.5 / std::abs(inside));
  for (int k = 0; k < 4; ++k) {
    const double c = kSeries[k] * std::pow(inside, 2 * k);
    cap.series[k] = static_cast<float>(c);
    cap.log2_series[k] = static_cast<float>(c * static_cast<double>(p.scale) * 1.4426950408889634);
  }
  return cap;
}

ScorePlane score_plane(const Plane& x, PlaneAccess access) {
  if (!x) return {};
  return {x.data, access, is_aligned(x, 16) ? 16 : 4, x.stride_b, x.stride_h, x.stride_i, x.stride_j};
}

// rows: of a warpgroup.
CUtensorMap plane_map(const AttentionProblem& p, const Plane& x, int rows) {
  // Mask bytes are copied as they are.
  return make_tensor_map(x.data, x.dtype == DType::boolean ? DType::f8e4m3 : x.dtype,
                         TensorMapShape<4>{.extent = {p.Sk, p.Sq, x.stride_h == 0 ? 1 : p.H, x.stride_b == 0 ? 1 : p.B},
                                           .stride = {x.stride_i, x.stride_h, x.stride_b},
                                           .box = {128 / static_cast<int>(size_of(x.dtype)), rows, 1, 1}});
}

}  // namespace

PlaneAccess access_to(const Plane& x, unsigned options, int pack) {
  if (!x) return PlaneAccess::none;
  if (x.stride_i == 0 && (pack == 1 || x.stride_h == 0)) return PlaneAccess::keys;
  const bool dense = pack == 1 && x.stride_j == 1 && size_of(x.dtype) <= 2;
  if ((options & kBulkPlane) != 0 && dense && is_aligned(x, 16)) return PlaneAccess::bulk;
  if ((options & kTilePlanes) != 0 && dense && is_aligned(x, 4)) return PlaneAccess::copies;
  return PlaneAccess::direct;
}

Params params_for(const AttentionProblem& p, const Row& v, const attention::Plan& plan) {
  PlaneAccess bias = access_to(p.bias, v.options, plan.pack), mask = access_to(p.mask, v.options, plan.pack);
  // One that shared memory has no place for.
  if (bias == PlaneAccess::copies && mask == PlaneAccess::copies && v.tiles.planes() < 2) mask = PlaneAccess::direct;
  Params params{};
  fill(params, p, plan, v.tiles.keys);
  params.scale = p.scale;
  params.scale_inverse = 1 / p.scale;
  params.softcap = softcap(p);
  params.alibi = p.alibi.as<float>();
  params.alibi_stride_b = p.alibi.stride_b;
  params.alibi_stride_h = p.alibi.stride_h;
  params.bias = score_plane(p.bias, bias);
  params.mask = score_plane(p.mask, mask);
  params.bias_is_float = p.bias.dtype == DType::f32;
  if (bias == PlaneAccess::bulk) params.plane = plane_map(p, p.bias, plan.positions);
  if (mask == PlaneAccess::bulk) params.plane = plane_map(p, p.mask, plan.positions);
  return params;
}

}  // namespace heddle::cuda::sm90::attention_fwd
