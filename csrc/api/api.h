// The CUDA implementations of the ops, with the dispatcher's boxed calls: arguments and results are on a stack.
#pragma once

#include <torch/csrc/stable/library.h>

namespace flash_cute {

void fwd(StableIValue* stack, uint64_t num_arguments, uint64_t num_results);
void fwd_out(StableIValue* stack, uint64_t num_arguments, uint64_t num_results);
void varlen_fwd(StableIValue* stack, uint64_t num_arguments, uint64_t num_results);
void varlen_fwd_out(StableIValue* stack, uint64_t num_arguments, uint64_t num_results);

void bwd(StableIValue* stack, uint64_t num_arguments, uint64_t num_results);
void bwd_out(StableIValue* stack, uint64_t num_arguments, uint64_t num_results);
void varlen_bwd(StableIValue* stack, uint64_t num_arguments, uint64_t num_results);
void varlen_bwd_out(StableIValue* stack, uint64_t num_arguments, uint64_t num_results);

void fp8_fwd(StableIValue* stack, uint64_t num_arguments, uint64_t num_results);
void fp8_varlen_fwd(StableIValue* stack, uint64_t num_arguments, uint64_t num_results);

void fwd_kvcache(StableIValue* stack, uint64_t num_arguments, uint64_t num_results);
void attend_kvcache(StableIValue* stack, uint64_t num_arguments, uint64_t num_results);
void attend_quantized_kvcache(StableIValue* stack, uint64_t num_arguments, uint64_t num_results);
void combine(StableIValue* stack, uint64_t num_arguments, uint64_t num_results);

void tile_lists(StableIValue* stack, uint64_t num_arguments, uint64_t num_results);
void transposed_tile_lists(StableIValue* stack, uint64_t num_arguments, uint64_t num_results);
void quantize_e4m3(StableIValue* stack, uint64_t num_arguments, uint64_t num_results);
void dequantize_e4m3(StableIValue* stack, uint64_t num_arguments, uint64_t num_results);
void pooled_softmax(StableIValue* stack, uint64_t num_arguments, uint64_t num_results);

void lab_forward(StableIValue* stack, uint64_t num_arguments, uint64_t num_results);
void lab_forward_timed(StableIValue* stack, uint64_t num_arguments, uint64_t num_results);
void lab_usage(StableIValue* stack, uint64_t num_arguments, uint64_t num_results);

}  // namespace flash_cute
