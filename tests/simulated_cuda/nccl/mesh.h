#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

// Sockets between all ranks of a communicator, all on one machine.
namespace simulated_nccl {

// Someone aborted the communicator.
struct Aborted : std::exception {};
// A rank is gone, or does something else than this one.
struct Broken : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// One message of an exchange. Both ends must agree on what it is (`tag`) and on its bytes.
struct Part {
  int peer;
  uint64_t tag;
  char* data;  // only read where it is sent
  size_t bytes;
};

class Mesh {
 public:
  // Connects with all ranks that use the same name. Waits for those that have not come yet, until
  // `aborted` says true.
  Mesh(const std::string& name, int rank, int size, std::function<bool()> aborted);
  ~Mesh();

  // The others find this rank gone. What was sent arrives.
  void shut_down();
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;

  // Sends and receives everything at the same time; messages to and from one peer keep their order.
  void exchange(const std::vector<Part>& sends, const std::vector<Part>& receives);
  // Everybody's `value`, in rank order.
  std::vector<uint64_t> gather(uint64_t value);

 private:
  void connect_to(int peer, const std::string& name);
  void accept_one(int listener);

  const int rank_;
  const int size_;
  const std::function<bool()> aborted_;
  std::vector<int> sockets_;
};

}  // namespace simulated_nccl
