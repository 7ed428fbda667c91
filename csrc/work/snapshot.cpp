#include "work/snapshot.h"

#include <c10/core/impl/COW.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>

#include "base/memory.h"
#include "base/sync_scope.h"
#include "work/pending.h"

namespace c10d_ext {

namespace {

struct Written {
  std::mutex mutex;
  std::unordered_map<const c10::StorageImpl*, int> counts;
};

Written& written() {
  // Never destroyed: backend threads may still end works while the process exits.
  static Written* instance = new Written;
  return *instance;
}

// Whether a collective in flight writes it. To share such memory would part it: who writes it next
// through a tensor would get a copy without what is still to come.
bool is_written(const at::Tensor& t) {
  if (is_being_written(t)) {
    return true;
  }
  std::lock_guard<std::mutex> lock(written().mutex);
  return !written().counts.empty() &&
         written().counts.count(t.storage().unsafeGetStorageImpl()) != 0;
}

bool is_plain_cpu(const at::Tensor& t) {
  return t.is_cpu() && t.has_storage() && t.numel() != 0 &&
         !t.key_set().has_any(c10::python_ks | c10::functorch_transforms_ks);
}

// Whether the storage of one of those has memory in common with that of `source`: two storages may
// be over one array.
bool overlaps_any(const at::Tensor& source, at::TensorList tensors) {
  const auto begin_of = [](const at::Tensor& t) {
    return static_cast<const char*>(t.storage().data());
  };
  const char* begin = begin_of(source);
  const char* end = begin + source.storage().nbytes();
  return std::any_of(tensors.begin(), tensors.end(), [&](const at::Tensor& t) {
    return t.is_cpu() && t.has_storage() && begin_of(t) < end &&
           begin < begin_of(t) + t.storage().nbytes();
  });
}

// Clones on their way back to the thread that made them. c10 frees the context of a copy-on-write
// storage while another thread that has released its reference may still be about to lock it: the
// last two references must not go at the same time. So a clone ends on the thread that made it,
// which is the one that writes and frees the source.
class Returns {
 public:
  using Clone = c10::intrusive_ptr<c10::StorageImpl>;

  static const std::shared_ptr<Returns>& here() {
    static thread_local const Owner owner;
    return owner.returns;
  }

  // From any thread.
  void take_back(Clone clone) {
    if (owner_ != std::this_thread::get_id()) {
      std::lock_guard<std::mutex> lock(mutex_);
      if (is_open_) {
        clones_.push_back(std::move(clone));
        any_.store(true, std::memory_order_release);
      }
    }
    // Here, or where that thread has ended, it goes now.
  }
  void release() {
    if (!any_.load(std::memory_order_acquire)) {
      return;
    }
    std::vector<Clone> clones;
    std::lock_guard<std::mutex> lock(mutex_);
    clones.swap(clones_);
    any_.store(false, std::memory_order_relaxed);
  }

 private:
  struct Owner {
    const std::shared_ptr<Returns> returns = std::make_shared<Returns>();
    ~Owner() {
      std::lock_guard<std::mutex> lock(returns->mutex_);
      returns->is_open_ = false;
      returns->clones_.clear();
    }
  };

  const std::thread::id owner_ = std::this_thread::get_id();
  std::mutex mutex_;
  std::vector<Clone> clones_;
  bool is_open_ = true;
  std::atomic<bool> any_{false};
};

// A clone and where it belongs.
struct Lent {
  Returns::Clone clone;
  std::shared_ptr<Returns> home = Returns::here();

  explicit Lent(Returns::Clone made) : clone(std::move(made)) {}
  Lent(const Lent&) = delete;
  Lent& operator=(const Lent&) = delete;
  ~Lent() {
    home->take_back(std::move(clone));
  }
};

// One at a time: the first clone of a storage changes the storage itself, and two threads may hand
// the same tensor to a collective each.
c10::intrusive_ptr<c10::StorageImpl> shared_with(const at::Tensor& source) {
  static auto& mutex = *new std::mutex;
  std::lock_guard<std::mutex> lock(mutex);
  return c10::impl::cow::lazy_clone_storage(*source.storage().unsafeGetStorageImpl());
}

// The clone itself copies as soon as somebody asks it for a pointer to write through, as backends
// do that only read. This asks nothing of it again.
c10::Storage readable(c10::intrusive_ptr<c10::StorageImpl> clone) {
  const void* data = clone->data();
  const size_t bytes = clone->nbytes();
  const c10::Device device = clone->device();
  auto* lent = new Lent(std::move(clone));
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes,
                      c10::DataPtr(
                          const_cast<void*>(data), lent,
                          [](void* held) { delete static_cast<Lent*>(held); }, device),
                      /*allocator=*/nullptr, /*resizable=*/false);
}

}  // namespace

bool can_share(const at::Tensor& source) {
  const auto& storage = *source.storage().unsafeGetStorageImpl();
  // Tensor.numpy() takes a storage's leave to resize.
  return storage.resizable() && (c10::impl::cow::has_simple_data_ptr(storage) ||
                                 c10::impl::cow::is_cow_data_ptr(storage.data_ptr()));
}

bool may_move(const at::Tensor& t) {
  return t.has_storage() && c10::impl::cow::is_cow_data_ptr(t.storage().data_ptr());
}

void settle_memory(at::TensorList tensors) {
  for (const at::Tensor& t : tensors) {
    if (C10_UNLIKELY(may_move(t))) {
      t.storage().mutable_data();
    }
  }
}

at::Tensor snapshot_of(const at::Tensor& source, at::TensorList written) {
  if (!is_plain_cpu(source) || is_written(source)) {
    return source;
  }
  if (!can_share(source)) {
    return SyncScope::is_on() && !overlaps_any(source, written) ? source : clone_of(source);
  }
  release_snapshots();
  auto clone = shared_with(source);
  if (clone == nullptr) {
    return clone_of(source);
  }
  at::Tensor snapshot = alias_of(source);
  snapshot.unsafeGetTensorImpl()->set_storage_keep_dtype(readable(std::move(clone)));
  return snapshot;
}

std::shared_ptr<void> keep_values(const at::Tensor& source) {
  // An array that numpy has would stay where the storage was, were that moved.
  if (!is_plain_cpu(source) || is_written(source) || !can_share(source)) {
    return nullptr;
  }
  release_snapshots();
  auto clone = shared_with(source);
  return clone == nullptr ? nullptr : std::make_shared<Lent>(std::move(clone));
}

void release_snapshots() {
  Returns::here()->release();
}

void WritesInFlight::add(const at::Tensor& t) {
  if (!t.defined() || !t.has_storage()) {
    return;
  }
  storages_.push_back(t.storage().unsafeGetStorageImpl());
  std::lock_guard<std::mutex> lock(written().mutex);
  ++written().counts[storages_.back()];
}

void WritesInFlight::clear() {
  if (storages_.empty()) {
    return;
  }
  std::lock_guard<std::mutex> lock(written().mutex);
  for (const auto* storage : std::exchange(storages_, {})) {
    const auto found = written().counts.find(storage);
    if (found != written().counts.end() && --found->second == 0) {
      written().counts.erase(found);
    }
  }
}

}  // namespace c10d_ext
