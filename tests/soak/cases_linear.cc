// Linear layers and their gradients.
#include "soak/cases.h"

namespace heddle::soak {
namespace {

constexpr const char* kFormats[] = {"nvfp4", "int4_g128_zp", "nf4", "int8_row", "fp8_row"};

void tuned_layers(Table& table, bool hopper) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    if (hopper) {
      for (const std::int64_t rows : {1, 16, 32, 64, 128, 250})
        table.linear("", {"sm90_w4a16", "nvfp4", WeightOrder::fragments16, dtype, rows, 8192, 6144});
      table.linear("", {"sm90_w4a16", "mxfp4", WeightOrder::fragments16, dtype, 2000, 8192, 512});
      for (const std::int64_t rows : {40, 128, 250}) {
        table.linear("", {"sm90_w4a8", "mxfp4", WeightOrder::fragments8, dtype, rows, 8192, 6144});
        table.linear("", {"sm90_w4a8", "nvfp4", WeightOrder::fragments8, dtype, rows, 8192, 6144});
      }
      table.linear("", {"sm90_w4a8", "mxfp4", WeightOrder::fragments8, dtype, 2000, 8192, 512});
      table.linear("", {"sm90_w4a8", "nvfp4", WeightOrder::fragments8, dtype, 2000, 8192, 512});
    }
    for (const char* format : kFormats) {
      for (const std::int64_t rows : {1, 40, 300})
        table.linear("", {"sm80_linear", format, WeightOrder::fragments16, dtype, rows, 8192, 1024});
    }
    table.linear("", {"sm80_gemv", "nvfp4", WeightOrder::fragments16, dtype, 1, 8192, 6144});
  }
}

// What the passes around cuBLASLt's products can have beside them.
struct Around {
  const char* what;
  Activation activation;
  bool bias, rms_norm;
};
constexpr Around kAround[] = {{"silu and bias", Activation::silu, true, false},
                              {"swiglu", Activation::swiglu, false, false},
                              {"rms_norm", Activation::none, false, true},
                              {"rms_norm, swiglu and bias", Activation::swiglu, true, true}};
LinearSubject with(LinearSubject s, const Around& around) {
  s.activation = around.activation;
  s.bias = around.bias;
  s.rms_norm = around.rms_norm;
  return s;
}

// 4 blocks of decoding a thread; with 3000 rows sums in two parts of the rows and two of the columns, by the same
// memory.
void cublaslt_layers(Table& table, DType dtype) {
  for (const char* format : kFormats) {
    LinearSubject s = {"cublaslt", format, WeightOrder::matrix, dtype, 300, 8192, 2048};
    table.linear("by rows", s);
    s.order = WeightOrder::fragments16;
    // Others' kernels decode these.
    if (dtype == DType::bf16 && s.format != "nvfp4") table.linear("by fragments", s);
  }
  for (const Around& around : kAround) {
    LinearSubject s = with({"cublaslt", "nvfp4", WeightOrder::matrix, dtype, 3000, 8192, 512}, around);
    table.linear(around.what, s);
    s.kept = true;
    table.linear(std::string(around.what) + ", W kept", s);
  }
  for (const bool int8 : {true, false}) {
    LinearSubject s = {"cublaslt_w8a8",
                       int8 ? "int8_row" : "fp8_row",
                       int8 ? WeightOrder::matrix : WeightOrder::matrix8,
                       dtype,
                       1000,
                       8192,
                       1024};
    s.int8_x = int8;
    table.linear("", s);
    s.rows = 3000;
    s.k = 512;
    for (const Around& around : kAround) table.linear(around.what, with(s, around));
  }
}

// cuBLASLt's candidate alone has gradients on a GPU, for weights in every order.
void gradients(Table& table, DType dtype) {
  LinearSubject s = {"cublaslt", "", WeightOrder::matrix, dtype, 300, 8192, 2048};
  s.gradients = true;
  for (const char* format : kFormats) {
    s.format = format;
    s.order = WeightOrder::matrix;
    table.linear("by rows", s);
    s.order = WeightOrder::fragments16;
    table.linear("by fragments", s);
  }
  for (const char* format : {"nvfp4", "mxfp4"}) {
    s.format = format;
    s.order = WeightOrder::fragments8;
    table.linear("by fragments for e4m3", s);
  }
  s.format = "fp8_row";
  s.order = WeightOrder::matrix8;
  table.linear("by rows for e4m3", s);
  s = {"cublaslt", "nvfp4", WeightOrder::fragments16, dtype, 3000, 8192, 512};
  s.gradients = s.bias = true;
  table.linear("bias", s);
  for (const bool kept : {false, true}) {
    s.kept = kept;
    s.activation = Activation::silu;
    table.linear(kept ? "silu and bias, W kept" : "silu and bias", s);
    s.activation = Activation::swiglu;
    table.linear(kept ? "swiglu and bias, W kept" : "swiglu and bias", s);
  }
}

}  // namespace

void linear_layers(Table& table, bool hopper) {
  tuned_layers(table, hopper);
  for (const DType dtype : {DType::bf16, DType::f16}) {
    cublaslt_layers(table, dtype);
    gradients(table, dtype);
  }
}

}  // namespace heddle::soak
