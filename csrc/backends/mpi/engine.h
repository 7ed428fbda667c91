#pragma once

// The thread of this process that looks after what goes on in MPI. No torch in here.

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backends/mpi/library.h"
#include "backends/mpi/losses.h"

namespace c10d_ext::mpi {

// Starts something, on the engine's thread, and adds its requests.
using Step = std::function<void(Library& library, std::vector<Request>& requests)>;

// Something that MPI does in the background.
struct Call {
  // Each is begun once the requests of the one before it are over.
  std::vector<Step> steps;
  // Called once, on a thread that may block and may make further calls.
  std::function<void(std::exception_ptr error)> over;
  // Whose it is, and which of the owner's, for abandon().
  uint64_t owner = 0;
  uint64_t number = 0;
  // Of the ranks that its requests are to or from.
  std::shared_ptr<const Losses> losses = nullptr;
};

// MPI of this process, which has one world for as long as it lives. It starts calls and asks for
// their ends on one thread, so that whoever makes a call goes on at once and an end that never
// comes holds nobody.
class Engine {
 public:
  using Milliseconds = std::chrono::milliseconds;
  // Looks, several times in 100 ms, whether a wait should end, and then throws.
  using Interrupt = std::function<void()>;

  static Engine& of_this_process();

  // Opens and initializes the library, unless that has been done. Throws an MpiError, also after
  // `timeout`.
  void start(const std::string& path, Milliseconds timeout, const Interrupt& interrupt);
  // Of a started engine, of the process that has started it.
  Library& library() const;

  // Does it on a thread of its own, where a blocking call may stay for good.
  void away(const std::string& what, Milliseconds timeout, const Interrupt& interrupt,
            std::function<void(Library& library)> act);

  void submit(Call call);
  // Nobody asks for the end of this call any more, or of any of the owner's (number 0): its `over`
  // is told `error`, and what its steps hold is never released, for MPI may still write it.
  void abandon(uint64_t owner, uint64_t number, std::exception_ptr error);
  // Whether calls of this owner are under way, or were given up.
  bool has_calls_of(uint64_t owner) const;

  // MPI_Finalize, where start() has initialized it and nothing is under way; false: not within
  // `grace`. Nothing can be started then.
  bool finalize(Milliseconds grace);

 private:
  class State;
  Engine();
  const std::shared_ptr<State> state_;
};

}  // namespace c10d_ext::mpi
