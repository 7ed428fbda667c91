#include "runtime/delays.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace simulated_cuda {

namespace {

struct Setting {
  enum class Kind { None, Random, Late } kind = Kind::None;
  uint64_t seed = 0;
};

const Setting& setting() {
  static const Setting instance = [] {
    const char* text = std::getenv("SIMULATED_CUDA_DELAYS");
    const std::string value = text == nullptr ? "none" : text;
    if (value == "none") {
      return Setting();
    }
    const auto colon = value.find(':');
    const std::string kind = value.substr(0, colon);
    if (colon == std::string::npos || (kind != "random" && kind != "late")) {
      throw std::runtime_error(
          "simulated CUDA: SIMULATED_CUDA_DELAYS must be none, random:SEED or late:SEED, got " +
          value);
    }
    return Setting{kind == "late" ? Setting::Kind::Late : Setting::Kind::Random,
                   std::stoull(value.substr(colon + 1))};
  }();
  return instance;
}

}  // namespace

Delays::Delays(uint64_t number) {
  std::seed_seq seed{setting().seed, number};
  random_.seed(seed);
}

std::chrono::microseconds Delays::pause() {
  if (setting().kind != Setting::Kind::Random || random_() % 4 != 0) {
    return {};
  }
  return std::chrono::microseconds(random_() % 1000);
}

std::chrono::microseconds Delays::hold() {
  if (setting().kind != Setting::Kind::Late) {
    return {};
  }
  return std::chrono::microseconds(2000 + random_() % 18000);
}

}  // namespace simulated_cuda
