#include "work/left_alone.h"

#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include "base/group.h"
#include "base/sync_scope.h"
#include "control/resolve_group.h"

namespace c10d_ext {

namespace {

struct Loan {
  // Keeps the key from being another storage's address.
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  c10::VariableVersion counter;
  uint32_t version;
  std::string op;
  std::string group;
};

class Loans {
 public:
  static Loans& get() {
    // Never destroyed: threads may wait while the process exits.
    static Loans* instance = new Loans;
    return *instance;
  }

  void add(const c10::StorageImpl* storage, Loan loan) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (loans_.size() >= limit_) {
      for (auto it = loans_.begin(); it != loans_.end();) {
        it = it->second.storage.expired() ? loans_.erase(it) : std::next(it);
      }
      limit_ = std::max(kSweepAt, 2 * loans_.size());
    }
    loans_.insert_or_assign(storage, std::move(loan));
    count_.store(loans_.size(), std::memory_order_relaxed);
  }

  // One more op of ours has written.
  void follow(const c10::StorageImpl* storage) {
    if (count_.load(std::memory_order_relaxed) == 0) {
      return;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    if (const auto found = loans_.find(storage); found != loans_.end()) {
      found->second.version = found->second.counter.current_version();
    }
  }

  std::optional<Loan> take(const c10::StorageImpl* storage) noexcept {
    // A wait for what this thread started sees its entry.
    if (count_.load(std::memory_order_relaxed) == 0) {
      return std::nullopt;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    auto node = loans_.extract(storage);
    count_.store(loans_.size(), std::memory_order_relaxed);
    return node ? std::optional<Loan>(std::move(node.mapped())) : std::nullopt;
  }

 private:
  static constexpr size_t kSweepAt = 64;

  std::mutex mutex_;
  std::unordered_map<const c10::StorageImpl*, Loan> loans_;
  size_t limit_ = kSweepAt;
  std::atomic<size_t> count_{0};
};

bool is_all_of_its_storage(const at::Tensor& t) {
  return t.numel() != 0 && t.is_non_overlapping_and_dense() && t.nbytes() == t.storage().nbytes();
}

}  // namespace

void leave_alone(std::string_view op, std::string_view group_name, const at::Tensor& t) {
  // Inference tensors count nothing.
  if (t.is_meta() || !t.has_storage() || t.is_inference() ||
      t.key_set().has_any(c10::python_ks | c10::functorch_transforms_ks |
                          c10::DispatchKeySet(c10::DispatchKey::Functionalize))) {
    return;
  }
  const c10::Storage& storage = t.storage();
  const auto* key = storage.unsafeGetStorageImpl();
  if (SyncScope::is_on()) {
    release_to_user(key);  // nobody has to wait
  } else if (is_all_of_its_storage(t)) {
    const auto& counter = torch::autograd::impl::version_counter(t);
    Loans::get().add(key, {storage.getWeakStorageImpl(), counter, counter.current_version(),
                           std::string(op), std::string(group_name)});
  } else {
    Loans::get().follow(key);
  }
}

void check_left_alone(const c10::StorageImpl* storage) {
  const auto loan = Loans::get().take(storage);
  if (!loan || loan->counter.current_version() == loan->version) {
    return;
  }
  TORCH_CHECK(false, loan->op, ": the tensor it writes must be left alone until the wait, got a ",
              "write in flight (version ", loan->counter.current_version(), " where it was ",
              loan->version, ") ", where(resolve_group(loan->op, loan->group)));
}

void release_to_user(const c10::StorageImpl* storage) noexcept {
  Loans::get().take(storage);
}

}  // namespace c10d_ext
