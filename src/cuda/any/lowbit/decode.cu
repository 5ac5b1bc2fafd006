// The kernel that decodes an element.
#include "cuda/any/lowbit/decode.cuh"

namespace heddle::cuda::any::lowbit {

DecodeKernel decode_kernel(Element element) {
  switch (element) {
    case Element::e2m1:
      return decode_matrix_kernel<Element::e2m1>;
    case Element::e2m1_row:
      return decode_matrix_kernel<Element::e2m1_row>;
    case Element::nf4:
      return decode_matrix_kernel<Element::nf4>;
    case Element::fp4_bnb:
      return decode_matrix_kernel<Element::fp4_bnb>;
    case Element::int4:
      return decode_matrix_kernel<Element::int4>;
    case Element::int8:
      return decode_matrix_kernel<Element::int8>;
    case Element::e4m3:
      return decode_matrix_kernel<Element::e4m3>;
  }
  return nullptr;
}

}  // namespace heddle::cuda::any::lowbit
