// The config of a kernel of the laboratory. flash_cute/lab/kernel_configs.py has the same fields, rules and names, and
// lists all configs.
#pragma once

#include <algorithm>
#include <string>

#include "core/config.h"

// Outside the namespace: see KernelConfig.
struct FlashForwardKernelConfig {
  flash_cute::DType dtype;
  int d_head;
  int B_r;  // query rows a block
  int B_c;  // key rows a block
  int n_warps;
  bool async_copy;             // blocks arrive by cp.async; otherwise they pass through registers
  bool eager_load_blocks;      // V arrives while scores are computed, the next K during the product with V
  bool swizzled;               // 16-byte vectors of a row in shared memory lie at their column XOR row % 8
  int Q_mma_load_K_tiles;      // steps of 16 of an operand that are in registers at a time; 0: all. With 0 Q stays
  int K_mma_load_K_tiles;
  int V_mma_load_K_tiles;
  bool mma_double_buffer_loads;  // the next steps are loaded while products of the current ones run
  bool optimized_softmax;  // one FFMA and one exp2 a score, outputs are rescaled only if a maximum rose far

  constexpr int threads() const { return 32 * n_warps; }
  // CTAs per SM that registers must leave room for; 0: the compiler chooses. It chooses three for plain kernels, too,
  // and spills 8 bytes if three are required.
  constexpr int ctas() const { return !optimized_softmax ? 0 : n_warps == 8 ? 1 : B_r == 64 ? 3 : 2; }
  constexpr int smem_bytes() const { return (B_r + 2 * B_c) * d_head * 2; }

  constexpr int d_steps() const { return d_head / 16; }
  constexpr int key_steps() const { return B_c / 16; }
  constexpr bool divides(int tiles, int steps) const {
    return tiles == 0 || (0 < tiles && tiles < steps && steps % tiles == 0);
  }
  constexpr bool loads_tiles() const { return Q_mma_load_K_tiles + K_mma_load_K_tiles + V_mma_load_K_tiles > 0; }

  // Registers that a thread's accumulators and operands take, in the larger of the two products.
  constexpr int fragment_registers() const {
    auto steps = [](int tiles, int all) { return tiles == 0 ? all : tiles; };
    const bool q_stays = Q_mma_load_K_tiles == 0;
    const int q_steps = q_stays ? d_steps() : Q_mma_load_K_tiles * (mma_double_buffer_loads ? 2 : 1);
    const int q = 4 * (B_r / (16 * n_warps)) * q_steps;
    const int k = 4 * key_steps() * steps(K_mma_load_K_tiles, d_steps());
    const int v = 4 * d_steps() * steps(V_mma_load_K_tiles, key_steps());
    const int output = B_r * d_head / threads(), scores = B_r * B_c / threads();
    return output + scores + std::max(q + k, (q_stays ? q : 0) + v);
  }

  // Name of the kernel in logs and profiles, and its key in torch.ops.flash_cute.lab_forward.
  std::string name() const {
    auto number = [](const char* name, int value) { return name + std::to_string(value); };
    auto flag = [](const char* name, bool on) { return std::string(on ? name : ""); };
    return std::string("lab_fwd_") + flash_cute::name(dtype) + number("_d", d_head) + number("_r", B_r) +
           number("_c", B_c) + number("_w", n_warps) + number("_q", Q_mma_load_K_tiles) +
           number("_k", K_mma_load_K_tiles) + number("_v", V_mma_load_K_tiles) + flag("_async", async_copy) +
           flag("_eager", eager_load_blocks) + flag("_swizzled", swizzled) + flag("_buffer", mma_double_buffer_loads) +
           flag("_optsoftmax", optimized_softmax);
  }
};

namespace flash_cute::lab {

constexpr int kMostFragmentRegisters = 224;  // addresses, pointers and softmax take the others of 255
constexpr int kMostSharedMemory = 99 * 1024;  // of a CTA on every GPU since sm_80

// Refuses a config that cannot be built, with the texts of kernel_configs.py.
template <FlashForwardKernelConfig C>
constexpr bool check_config() {
  static_assert(C.dtype == DType::FP16 || C.dtype == DType::BF16, "dtype must be FP16 or BF16");
  static_assert(C.d_head == 64 || C.d_head == 128, "d_head must be 64 or 128");
  static_assert(C.n_warps == 4 || C.n_warps == 8, "n_warps must be 4 or 8");
  static_assert(C.B_r > 0 && C.B_r % (16 * C.n_warps) == 0, "B_r must be a multiple of 16 * n_warps");
  static_assert(C.B_c > 0 && C.B_c % 32 == 0, "B_c must be a multiple of 32");
  static_assert(C.async_copy || !C.eager_load_blocks, "eager_load_blocks needs async_copy");
  static_assert(C.divides(C.Q_mma_load_K_tiles, C.d_steps()),
                "Q_mma_load_K_tiles must be 0 or divide d_head / 16 and be less");
  static_assert(C.divides(C.K_mma_load_K_tiles, C.d_steps()),
                "K_mma_load_K_tiles must be 0 or divide d_head / 16 and be less");
  static_assert(C.divides(C.V_mma_load_K_tiles, C.key_steps()),
                "V_mma_load_K_tiles must be 0 or divide B_c / 16 and be less");
  static_assert(C.loads_tiles() || !C.mma_double_buffer_loads,
                "mma_double_buffer_loads needs Q, K or V to be loaded in tiles");
  static_assert(C.fragment_registers() <= kMostFragmentRegisters, "fragments need more than 224 registers a thread");
  static_assert(C.smem_bytes() <= kMostSharedMemory, "blocks need more than 99 KiB of shared memory");
  return true;
}

}  // namespace flash_cute::lab
