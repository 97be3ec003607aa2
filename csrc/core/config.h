// What distinguishes one kernel of the library from another: a KernelConfig, the only template parameter of a kernel.
#pragma once

#include <algorithm>
#include <string>

namespace flash_cute {

enum class Op { Fwd, Bwd, Decode };  // Decode: forward over a key/value cache
enum class Arch { Sm80 = 80, Sm90 = 90 };
enum class DType { FP16, BF16, TF32, TF32x3 };  // the last two: fp32, in one or in three products of TF32
enum class Tier { Plain, Rich };  // Rich: with softcap, ALiBi and dropout (ScoreRules), and scales below 0

constexpr int element_bytes(DType dtype) {
  switch (dtype) {
    case DType::FP16:
    case DType::BF16:
      return 2;
    case DType::TF32:
    case DType::TF32x3:
      return 4;
  }
  return 0;
}

constexpr const char* name(DType dtype) {
  switch (dtype) {
    case DType::FP16:
      return "fp16";
    case DType::BF16:
      return "bf16";
    case DType::TF32:
      return "tf32";
    case DType::TF32x3:
      return "tf32x3";
  }
  return nullptr;
}

constexpr const char* name(Op op) {
  switch (op) {
    case Op::Fwd:
      return "fwd";
    case Op::Bwd:
      return "bwd";
    case Op::Decode:
      return "decode";
  }
  return nullptr;
}

// Whether GPUs have clusters of CTAs.
constexpr bool has_clusters(Arch arch) {
  return arch >= Arch::Sm90;
}

}  // namespace flash_cute

// Outside the namespace: the launch stubs that nvcc writes cannot name a namespaced class as a template argument.
struct KernelConfig {
  flash_cute::Op op;
  flash_cute::Arch arch;
  flash_cute::DType dtype;
  flash_cute::Tier tier;
  int head_dim;    // of the tiles of Q and K; the problem's head dims may be smaller
  int head_dim_v;  // of the tiles of V and O
  int block_m;     // query rows a tile
  int block_n;     // key rows a tile
  int stages;      // buffers of the streamed operands: K and V forward, Q and dO backward
  int warps;  // of the CTA that issue MMA; sm90 has producer warps besides
  int ctas;  // resident CTAs an SM: bounds the registers of a thread
  int cluster;  // CTAs that multicast to each other (sm90: K and V forward, Q and dO backward), or 1;
                   // sm90 decode: that share the keys of a tile of queries, at most

  bool operator==(const KernelConfig&) const = default;
  constexpr bool rich() const { return tier == flash_cute::Tier::Rich; }
  constexpr bool fp32() const { return flash_cute::element_bytes(dtype) == 4; }

  // Sm90 forward: an extra warpgroup generates the dropout mask. Beside two consumer warpgroups only: a third leaves no
  // registers, and O must take fewer than the 128 registers of kernel start.
  constexpr bool has_mask_warpgroup() const {
    return arch == flash_cute::Arch::Sm90 && op == flash_cute::Op::Fwd && rich() && warps == 8 && head_dim_v < 256;
  }

  // Whether the kernel has dropout.
  constexpr bool has_dropout() const {
    return rich() && (arch == flash_cute::Arch::Sm80 || op == flash_cute::Op::Bwd || has_mask_warpgroup());
  }

  // Sm90: the producer warpgroup, and the mask warpgroup.
  constexpr int serving_warps() const {
    return arch == flash_cute::Arch::Sm80 || op == flash_cute::Op::Decode ? 0 : has_mask_warpgroup() ? 8 : 4;
  }
  constexpr int threads() const { return (warps + serving_warps()) * 32; }

  // Backward: a warp owns 32 keys and all columns of their dK and dV; else warps share every product.
  constexpr bool whole_keys() const { return block_n == 32 * warps; }

  // Decode: warps with 16 query rows each form a team on the same keys; teams work on different keys.
  constexpr int teams() const { return warps * 16 / block_m; }

  // Sm90 backward: 2-CTA clusters with half a tile of keys each (kernels/sm90/backward_2cta.h).
  constexpr bool two_cta() const { return cluster > 1; }

  // Backward: columns of the sums of dQ. The 2-CTA backward has 64 of 192 twice.
  constexpr int dq_columns() const { return two_cta() ? 256 : head_dim; }

  // Sm90 forward: ping-pong, one warpgroup's exponentials under another's products. Wide heads have too few
  // exponentials to gain.
  constexpr bool ping_pong() const { return head_dim <= 128; }

  // Sm90 forward: query heads that may share a tile of queries (pack_gqa); each has at least a warp's 16 rows.
  constexpr int max_pack_gqa() const {
    return arch == flash_cute::Arch::Sm90 && op == flash_cute::Op::Fwd && block_m == 128 && cluster == 1 ? 8 : 1;
  }

  // Sm90 forward: buffers of Q (two if O leaves room), and whether O has its own shared memory or takes V's.
  constexpr int stages_q() const { return hopper_bytes(2, true) <= kMostSharedMemory ? 2 : 1; }
  constexpr bool own_output() const { return hopper_bytes(stages_q(), true) <= kMostSharedMemory; }

  // Shared memory in bytes; kernels assert that their storage is no larger.
  constexpr int smem_bytes() const {
    const int element = flash_cute::element_bytes(dtype);
    const int kv = block_n * (head_dim + head_dim_v) * element;
    if (arch == flash_cute::Arch::Sm90 && op == flash_cute::Op::Fwd) return hopper_bytes(stages_q(), own_output());
    if (op == flash_cute::Op::Fwd) return block_m * std::max(head_dim, head_dim_v) * element + stages * kv;
    if (op == flash_cute::Op::Decode) {
      const int q = block_m * head_dim * element, outputs = 2 * block_m * head_dim_v * static_cast<int>(sizeof(float));
      return (arch == flash_cute::Arch::Sm90 ? q + outputs : 2 * q) + stages * kv + kDecodeBookkeeping;
    }
    const int q_dout = block_m * (head_dim + head_dim_v) * element;
    if (fp32()) return kv + stages * q_dout;
    const int row_statistics = 2 * block_m * static_cast<int>(sizeof(float));
    if (two_cta()) {
      const int k_of_other = block_n * (head_dim - 128) * element, ds = 2 * block_m * block_n * element;
      const int bytes = kv + k_of_other + stages * (q_dout + row_statistics) + ds + kBookkeeping;
      return (bytes + kSwizzled - 1) / kSwizzled * kSwizzled;
    }
    if (arch == flash_cute::Arch::Sm90) {
      const int next_k = block_n * head_dim * element, ds = 2 * block_m * block_n * element;
      const int dq = block_m * head_dim * static_cast<int>(sizeof(float));
      return kv + next_k + stages * (q_dout + row_statistics) + ds + dq + kBookkeeping;
    }
    const int score_tiles = whole_keys() ? 1 : 2;  // dS, and P unless it stays in registers
    return kv + stages * (q_dout + row_statistics) + score_tiles * block_m * block_n * element;
  }

  // Name of the kernel in logs, profiles, tests and the benchmark's JSON.
  std::string id() const {
    auto number = [](const char* name, int value) { return name + std::to_string(value); };
    return std::string(flash_cute::name(op)) + number("_sm", static_cast<int>(arch)) + "_" + flash_cute::name(dtype) +
           (rich() ? "_rich" : "_plain") + number("_d", head_dim) + number("x", head_dim_v) + number("_m", block_m) +
           number("_n", block_n) + number("_s", stages) + number("_w", warps) + number("_c", ctas) +
           (has_clusters(arch) ? number("_x", cluster) : "");
  }

  static constexpr int kBookkeeping = 1024;  // bytes of barriers and work descriptions, sm90
  static constexpr int kSwizzled = 1024;  // alignment of swizzled tiles on Hopper
  static constexpr int kDecodeBookkeeping = 3072;  // bytes of split descriptions and of row sums
  static constexpr int kMostSharedMemory = 227 * 1024;  // of a CTA on Hopper

  // Bytes of shared memory of a kernel for Hopper, 16 bits an element.
  constexpr int hopper_bytes(int buffers_q, bool room_for_output) const {
    const int rows_of_q = block_m * head_dim * buffers_q, output = room_for_output ? block_m * head_dim_v : 0;
    const int keep_mask = has_mask_warpgroup() ? 16 * block_m : 0;  // bits of the dropout mask
    return 2 * (rows_of_q + output + stages * block_n * (head_dim + head_dim_v)) + keep_mask + kBookkeeping;
  }
};
