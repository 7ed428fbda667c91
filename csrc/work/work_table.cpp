#include <algorithm>
#include <mutex>
#include <utility>

#include "work/pending_work.h"

namespace c10d_ext {

void WorkTable::add(const c10::StorageImpl* storage, const PendingWorkPtr& work) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto& works = works_[storage];
  if (std::find(works.begin(), works.end(), work) == works.end()) {
    works.push_back(work);
  }
}

void WorkTable::remove(const c10::StorageImpl* storage, const PendingWork* work) {
  PendingWorkPtr last;  // released outside the lock: its destructor may free tensors
  std::lock_guard<std::mutex> lock(mutex_);
  const auto entry = works_.find(storage);
  if (entry == works_.end()) {
    return;
  }
  auto& works = entry->second;
  const auto found =
      std::find_if(works.begin(), works.end(), [&](const auto& w) { return w.get() == work; });
  if (found != works.end()) {
    last = std::move(*found);
    works.erase(found);
  }
  if (works.empty()) {
    works_.erase(entry);
  }
}

std::vector<PendingWorkPtr> WorkTable::find(const c10::StorageImpl* storage) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto entry = works_.find(storage);
  return entry == works_.end() ? std::vector<PendingWorkPtr>() : entry->second;
}

bool WorkTable::contains(const c10::StorageImpl* storage) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return works_.find(storage) != works_.end();
}

bool WorkTable::is_writing(const c10::StorageImpl* storage) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto entry = works_.find(storage);
  return entry != works_.end() && std::any_of(entry->second.begin(), entry->second.end(),
                                              [](const auto& work) { return !work->is_done(); });
}

size_t WorkTable::size() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return works_.size();
}

}  // namespace c10d_ext
