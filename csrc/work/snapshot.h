#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <memory>
#include <vector>

// The values of a functional collective's inputs as they were at the call, whatever their owner
// writes while it is in flight. Nobody copies where nobody writes: c10's copy-on-write storages
// share the memory until the owner's first write, which copies only while the snapshot stands.
//
// Copied for real is what is shared outside torch (mapped files, numpy's arrays and what has been
// given to numpy): writes there go past torch. So does a raw pointer that was taken before. Under
// SyncScope it is not copied, but where the collective writes a part of it: the caller waits, and
// writes nothing meanwhile. After Ctrl-C the collective reads it until its end.
namespace c10d_ext {

// `source` with values of its own. For who reads through the tensor while the collective is in
// flight. `source` itself where a collective in flight still writes it, which is to be read when
// that has; where it is no plain CPU tensor; and where its memory cannot be shared and the caller
// waits. `written`: what the collective writes.
at::Tensor snapshot_of(const at::Tensor& source, at::TensorList written);

// Whether a snapshot can share `source`'s memory.
bool can_share(const at::Tensor& source);

// Whether a snapshot shares `t`'s memory, or did. The next write through a tensor may then move
// `t`, and its old memory lives as long as the snapshot.
bool may_move(const at::Tensor& t);
// Moves what may move now, so that addresses taken from now on stay right.
void settle_memory(at::TensorList tensors);

// For who has read the address of dense memory at the start: what keeps the values there from now
// on. Null where a collective in flight still writes it, and where a snapshot cannot share it.
std::shared_ptr<void> keep_values(const at::Tensor& source);

// Releases this thread's snapshots of collectives that are over; other threads leave that to it.
void release_snapshots();

// While one lives, what this thread starts was called by a user of torch_c10d_ext.functional, in
// eager, and not by compiled code. On CUDA c10's copy-on-write is not ordered with streams, and a
// copy costs a graph that never writes its inputs as much as one that does: only such calls copy.
class FunctionalCall {
 public:
  FunctionalCall() : before_(here()) {
    here() = true;
  }
  ~FunctionalCall() {
    here() = before_;
  }
  FunctionalCall(const FunctionalCall&) = delete;
  FunctionalCall& operator=(const FunctionalCall&) = delete;

  static bool is_on() {
    return here();
  }

 private:
  static bool& here() {
    static thread_local bool instance = false;
    return instance;
  }

  const bool before_;
};

// Storages that a backend writes by calls that leave no entry in the table of works, c10d's own.
// Counted, as calls may follow each other.
class WritesInFlight {
 public:
  WritesInFlight() = default;
  template <class Tensors>
  explicit WritesInFlight(const Tensors& tensors) {
    for (const auto& t : tensors) {
      add(t);
    }
  }
  ~WritesInFlight() {
    clear();
  }
  WritesInFlight(WritesInFlight&& other) noexcept : storages_(std::move(other.storages_)) {
    other.storages_.clear();
  }
  WritesInFlight& operator=(WritesInFlight&& other) noexcept {
    std::swap(storages_, other.storages_);
    return *this;
  }

  void clear();

 private:
  void add(const at::Tensor& t);

  // Held by the tensors of who holds this.
  std::vector<const c10::StorageImpl*> storages_;
};

}  // namespace c10d_ext
