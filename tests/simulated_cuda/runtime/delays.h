#pragma once

#include <chrono>
#include <cstdint>
#include <random>

// When an operation of a stream runs, by the environment variable SIMULATED_CUDA_DELAYS:
//   none            at once
//   random:SEED     after a random time, most often none, at most 1 ms
//   late:SEED       only when somebody waits for it, or after 2 to 20 ms: what is not ordered with
//                   another stream is not done by the time that stream counts on it
namespace simulated_cuda {

class Delays {
 public:
  // Of the stream, or of the branch of a graph, with this number.
  explicit Delays(uint64_t number);

  // How long the next operation takes to begin.
  std::chrono::microseconds pause();
  // How long the next operation waits for somebody to wait for it.
  std::chrono::microseconds hold();

 private:
  std::mt19937_64 random_;
};

}  // namespace simulated_cuda
