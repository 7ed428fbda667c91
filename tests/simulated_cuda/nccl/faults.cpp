#include "nccl/faults.h"

#include <atomic>
#include <cstdlib>
#include <limits>
#include <stdexcept>
#include <string>

#include "nccl/abi.h"

namespace simulated_nccl {

namespace {

constexpr uint64_t kNever = std::numeric_limits<uint64_t>::max();
std::atomic<uint64_t> error_from{kNever};
std::atomic<uint64_t> absent_from{kNever};
std::atomic<uint64_t> calls{0};

void set(const std::string& text) {
  const auto colon = text.find(':');
  const std::string kind = text.substr(0, colon);
  if (text == "none") {
    error_from = absent_from = kNever;
    return;
  }
  if (colon == std::string::npos || (kind != "error" && kind != "absent")) {
    throw std::runtime_error("simulated nccl: a fault must be none, error:N or absent:N, got " +
                             text);
  }
  (kind == "error" ? error_from : absent_from) = calls + std::stoull(text.substr(colon + 1));
}

}  // namespace

Fault fault_of(uint64_t call) {
  static const bool from_environment = [] {
    if (const char* text = std::getenv("SIMULATED_NCCL_FAULT")) {
      set(text);
    }
    return true;
  }();
  (void)from_environment;
  return call >= error_from ? Fault::Error : call >= absent_from ? Fault::Absent : Fault::None;
}

uint64_t next_call() {
  return calls++;
}

}  // namespace simulated_nccl

// Counted from the next call.
SIMULATED_NCCL_API void simulated_cuda_nccl_fault(const char* text) {
  simulated_nccl::set(text);
}
