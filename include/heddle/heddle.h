// Everything public, in one include.
#pragma once

#include "heddle/attention.h"
#include "heddle/candidate.h"
#include "heddle/checkpoint.h"
#include "heddle/error.h"
#include "heddle/explain.h"
#include "heddle/int4_cache.h"
#include "heddle/kv_cache.h"
#include "heddle/linear.h"
#include "heddle/lowbit.h"
#include "heddle/partial.h"
#include "heddle/runtime.h"
#include "heddle/safetensors.h"
#include "heddle/sparse.h"
#include "heddle/tensor.h"
#include "heddle/transformer.h"
#include "heddle/transformer_block.h"
