// The kernels that encode an element.
#include "cuda/any/lowbit/encode.cuh"

namespace heddle::cuda::any::lowbit {

EncodeKernels encode_kernels(Element element) {
  switch (element) {
    case Element::e2m1:
      return {encode_groups_kernel<Element::e2m1>, encode_any_kernel<Element::e2m1>};
    case Element::nf4:
      return {encode_groups_kernel<Element::nf4>, encode_any_kernel<Element::nf4>};
    case Element::fp4_bnb:
      return {encode_groups_kernel<Element::fp4_bnb>, encode_any_kernel<Element::fp4_bnb>};
    case Element::int4:
      return {encode_groups_kernel<Element::int4>, encode_any_kernel<Element::int4>};
    case Element::e2m1_row:
      return {nullptr, encode_any_kernel<Element::e2m1_row>};
    case Element::int8:
      return {nullptr, encode_any_kernel<Element::int8>};
    case Element::e4m3:
      return {nullptr, encode_any_kernel<Element::e4m3>};
  }
  return {};
}

}  // namespace heddle::cuda::any::lowbit
