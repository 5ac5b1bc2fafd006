// What is used of cuBLASLt's C interface, declared here: the library is loaded when it is first needed, and neither it
// nor its headers need be there to build. Names and numbers are those of its header, which has kept them from CUDA 11
// to 13.
#pragma once

#include <driver_types.h>
#include <library_types.h>

#include <cstddef>
#include <cstdint>

namespace heddle::cuda::cublaslt {

using Handle = void*;
using MatmulDesc = void*;
using MatrixLayout = void*;
using MatmulPreference = void*;

enum Status : int { kSuccess = 0 };
enum ComputeType : int { kCompute32F = 68, kCompute32I = 72 };
enum Operation : std::int32_t { kOpN = 0, kOpT = 1 };
enum DescAttribute : int { kDescTransA = 3, kDescTransB = 4, kDescEpilogue = 7, kDescBiasPointer = 8 };
// Bits; a product without any has 1.
enum Epilogue : std::uint32_t { kEpilogueDefault = 1, kEpilogueRelu = 2, kEpilogueBias = 4, kEpilogueGelu = 32 };
enum PreferenceAttribute : int {
  kPrefMaxWorkspaceBytes = 1,
  kPrefMinAlignmentA = 5,
  kPrefMinAlignmentB = 6,
  kPrefMinAlignmentC = 7,
  kPrefMinAlignmentD = 8,
};

struct MatmulAlgo {
  std::uint64_t data[8];
};
struct HeuristicResult {
  MatmulAlgo algo;
  std::size_t workspace_bytes;
  Status state;
  float waves;
  int reserved[4];
};

// The functions, by their names in the library less "cublasLt".
struct Functions {
  Status (*Create)(Handle*);
  std::size_t (*GetVersion)();
  Status (*MatmulDescCreate)(MatmulDesc*, ComputeType, cudaDataType_t scale);
  Status (*MatmulDescDestroy)(MatmulDesc);
  Status (*MatmulDescSetAttribute)(MatmulDesc, DescAttribute, const void*, std::size_t);
  Status (*MatrixLayoutCreate)(MatrixLayout*, cudaDataType_t, std::uint64_t rows, std::uint64_t columns,
                               std::int64_t leading);
  Status (*MatrixLayoutDestroy)(MatrixLayout);
  Status (*MatmulPreferenceCreate)(MatmulPreference*);
  Status (*MatmulPreferenceDestroy)(MatmulPreference);
  Status (*MatmulPreferenceSetAttribute)(MatmulPreference, PreferenceAttribute, const void*, std::size_t);
  Status (*MatmulAlgoGetHeuristic)(Handle, MatmulDesc, MatrixLayout a, MatrixLayout b, MatrixLayout c, MatrixLayout d,
                                   MatmulPreference, int requested, HeuristicResult*, int* returned);
  Status (*Matmul)(Handle, MatmulDesc, const void* alpha, const void* a, MatrixLayout, const void* b, MatrixLayout,
                   const void* beta, const void* c, MatrixLayout, void* d, MatrixLayout, const MatmulAlgo*,
                   void* workspace, std::size_t bytes, cudaStream_t);
};

}  // namespace heddle::cuda::cublaslt
