// What distinguishes one kernel of the library from another: a KernelConfig, the only template parameter of a kernel.
#pragma once

#include <string>

namespace flash_cute {

enum class Op { Fwd, Bwd };
enum class Arch { Sm80 = 80, Sm90 = 90 };
enum class DType { FP16, BF16 };

}  // namespace flash_cute

// Outside the namespace: the launch stubs that nvcc writes cannot name a namespaced class as a template argument.
struct KernelConfig {
  flash_cute::Op op;
  flash_cute::Arch arch;
  flash_cute::DType dtype;
  int head_dim;  // of the tile; the problem's head dim may be smaller
  int block_m;   // query rows a tile
  int block_n;   // key rows a tile
  int stages;    // buffers of the streamed operands: K and V forward, Q and dO backward
  int warps;     // of the CTA, all of which do matrix products
  int ctas;      // that an SM is to hold at once: bounds the registers of a thread

  constexpr int threads() const { return warps * 32; }

  // Bytes of shared memory; the kernels assert that their storage is no larger.
  constexpr int smem_bytes() const {
    constexpr int kElement = 2;
    const int q = block_m * head_dim * kElement;
    const int kv = block_n * head_dim * kElement;
    if (op == flash_cute::Op::Fwd) return q + 2 * stages * kv;
    const int ds = block_m * block_n * kElement;
    const int row_statistics = 2 * block_m * static_cast<int>(sizeof(float));
    return 2 * kv + stages * (2 * q + row_statistics) + ds;
  }

  // Name of the kernel in logs, profiles, tests and the benchmark's JSON.
  std::string id() const {
    return std::string(op == flash_cute::Op::Fwd ? "fwd" : "bwd") + "_sm" + std::to_string(static_cast<int>(arch)) +
           (dtype == flash_cute::DType::BF16 ? "_bf16" : "_fp16") + "_d" + std::to_string(head_dim) + "_m" +
           std::to_string(block_m) + "_n" + std::to_string(block_n) + "_s" + std::to_string(stages) + "_w" +
           std::to_string(warps) + "_c" + std::to_string(ctas);
  }
};
