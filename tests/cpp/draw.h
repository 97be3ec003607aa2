// Random inputs, other ones in each run: what fails prints them.
#pragma once

#include <initializer_list>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "core/layout/seq.h"

namespace flash_cute {

class Draw {
 public:
  int from(int least, int most) { return std::uniform_int_distribution<int>(least, most)(engine_); }
  int of(std::initializer_list<int> values) { return values.begin()[from(0, static_cast<int>(values.size()) - 1)]; }
  bool flag() { return from(0, 1) == 1; }
  Band band(int most) {
    auto bound = [&] { return flag() ? Band::kUnbounded : from(0, most); };
    const int left = bound();
    return {left, bound()};
  }

 private:
  std::mt19937 engine_{std::random_device{}()};
};

inline std::ostream& operator<<(std::ostream& out, const Band& band) {
  return out << "left " << band.left << " right " << band.right;
}

inline std::ostream& operator<<(std::ostream& out, const FwdProblem& p) {
  return out << "b" << p.batch << " h" << p.heads << '/' << p.heads_k << " q" << p.seqlen_q << " k" << p.seqlen_k << ' '
             << p.band;
}

inline std::ostream& operator<<(std::ostream& out, const BwdProblem& p) {
  return out << p.fwd << " deterministic " << p.deterministic;
}

inline std::string listed(const std::vector<int>& values) {
  std::string text;
  for (const int value : values) text += std::to_string(value) + " ";
  return text;
}

// The definition of who sees whom.
inline bool sees(const SeqInfo& seq, Band band, int query, int key) {
  if (query < 0 || key < 0 || query >= seq.q.length || key >= seq.k.length) return false;
  return query + seq.shift() - band.left <= key && key <= query + seq.shift() + band.right;
}

}  // namespace flash_cute
