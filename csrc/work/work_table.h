#pragma once

// Which works of ops write a storage. For work/*.cpp.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace c10d_ext {

class PendingWork;
using PendingWorkPtr = c10::intrusive_ptr<PendingWork>;

// storage -> the works that write it. Entries are strong: a work holds its outputs, so the key
// cannot be reused while the entry stands.
class WorkTable {
 public:
  void add(const c10::StorageImpl* storage, const PendingWorkPtr& work);
  void remove(const c10::StorageImpl* storage, const PendingWork* work);
  std::vector<PendingWorkPtr> find(const c10::StorageImpl* storage) const;
  bool contains(const c10::StorageImpl* storage) const;
  bool is_writing(const c10::StorageImpl* storage) const;
  size_t size() const;

  // Never destroyed: backend threads may still complete works while the process exits.
  static WorkTable& get() {
    static WorkTable* instance = new WorkTable;
    return *instance;
  }

 private:
  mutable std::mutex mutex_;
  std::unordered_map<const c10::StorageImpl*, std::vector<PendingWorkPtr>> works_;
};

inline const c10::StorageImpl* storage_of(const at::Tensor& t) {
  return t.defined() && t.has_storage() ? t.storage().unsafeGetStorageImpl() : nullptr;
}

}  // namespace c10d_ext
