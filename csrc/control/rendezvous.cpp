#include "control/rendezvous.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/exceptions.h"
#include "base/gil.h"
#include "base/timeouts.h"
#include "control/open_groups.h"

namespace c10d_ext {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using Keys = std::vector<std::string>;
using Value = std::vector<uint8_t>;

constexpr milliseconds kLook{5};

// A store whose waits look around.
class WatchedStore final : public c10d::Store {
 public:
  WatchedStore(c10::intrusive_ptr<c10d::Store> inner, std::function<void()> check)
      : c10d::Store(inner->getTimeout()), inner_(std::move(inner)), check_(std::move(check)) {}

  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::make_intrusive<WatchedStore>(inner_->clone(), check_);
  }
  void set(const std::string& key, const Value& value) override {
    inner_->set(key, value);
  }
  Value compareSet(const std::string& key, const Value& expected, const Value& desired) override {
    return inner_->compareSet(key, expected, desired);
  }
  Value get(const std::string& key) override {
    wait({key}, timeout_);
    return inner_->get(key);
  }
  int64_t add(const std::string& key, int64_t value) override {
    return inner_->add(key, value);
  }
  bool deleteKey(const std::string& key) override {
    return inner_->deleteKey(key);
  }
  bool check(const Keys& keys) override {
    return inner_->check(keys);
  }
  int64_t getNumKeys() override {
    return inner_->getNumKeys();
  }
  void wait(const Keys& keys) override {
    wait(keys, timeout_);
  }
  void wait(const Keys& keys, const milliseconds& timeout) override {
    constexpr milliseconds kPause{10};
    const auto late = Clock::now() + bounded(timeout);
    for (milliseconds pause{1}; !inner_->check(keys); pause = std::min(2 * pause, kPause)) {
      if (Clock::now() >= late) {
        C10_THROW_ERROR(DistStoreError,
                        c10::str("nobody has set ", c10::Join(", ", keys), " within ",
                                 std::chrono::duration<double>(timeout).count(), " s"));
      }
      check_();
      std::this_thread::sleep_for(pause);
    }
  }
  void append(const std::string& key, const Value& value) override {
    inner_->append(key, value);
  }
  std::vector<Value> multiGet(const Keys& keys) override {
    wait(keys, timeout_);
    return inner_->multiGet(keys);
  }
  void multiSet(const Keys& keys, const std::vector<Value>& values) override {
    inner_->multiSet(keys, values);
  }
  bool hasExtendedApi() const override {
    return inner_->hasExtendedApi();
  }

 private:
  const c10::intrusive_ptr<c10d::Store> inner_;
  const std::function<void()> check_;
};

}  // namespace

std::shared_ptr<const KnownGroup> known_group(GlobalRanks global_ranks,
                                              std::function<std::optional<int>(int rank)> gone) {
  auto made =
      std::make_shared<const KnownGroup>(KnownGroup{std::move(global_ranks), std::move(gone)});
  OpenGroups<const KnownGroup>::of_this_process().add(made);
  return made;
}

void Rendezvous::check() const {
  check_signals();
  if (Clock::now() >= next_look_) {
    look();
  }
}

void Rendezvous::look() const {
  const auto start = Clock::now();
  const auto& mine = global_ranks_.ranks;
  std::vector<bool> asked(mine.size());  // whichever group tells: all see the same process
  std::map<int, int> gone;               // pids by rank
  for (const auto& group : OpenGroups<const KnownGroup>::of_this_process().all()) {
    if (group->global_ranks.world != global_ranks_.world) {
      continue;
    }
    const auto& known = group->global_ranks.ranks;
    for (size_t i = 0; i < known.size(); ++i) {
      const auto found = std::find(mine.begin(), mine.end(), known[i]);
      const auto rank = static_cast<size_t>(found - mine.begin());
      if (found == mine.end() || asked[rank]) {
        continue;
      }
      asked[rank] = true;
      if (const auto pid = group->gone(static_cast<int>(i))) {
        gone.emplace(static_cast<int>(rank), *pid);
      }
    }
  }
  if (!gone.empty()) {
    // All of them: one may have left because of another.
    std::vector<int> ranks;
    std::vector<std::string> names;
    for (const auto& [rank, pid] : gone) {
      ranks.push_back(rank);
      names.push_back(c10::str("rank ", rank, " (pid ", pid, ", gone)"));
    }
    throw CollectiveError(ErrorKind::RankLost,
                          c10::str(backend_, ": every rank must join the group, got: ",
                                   c10::Join(", ", names), ' ', where(place_)),
                          std::move(ranks), backend_, 0, place_.name());
  }
  // A twentieth of the time goes into this, whatever the number of ranks and groups.
  const auto now = Clock::now();
  next_look_ = now + std::max<Clock::duration>(kLook, 20 * (now - start));
}

KeyValueStore Rendezvous::part_of_store(const std::string& prefix) const {
  const auto keys = c10::make_intrusive<c10d::PrefixStore>(prefix, store_);
  KeyValueStore values;
  values.set = [keys](const std::string& key, const std::string& value) {
    static_cast<c10d::Store&>(*keys).set(key, value);
  };
  values.get = [keys](const std::string& key, milliseconds timeout) {
    keys->wait({key}, timeout);
    return keys->get_to_str(key);
  };
  values.has = [keys](const std::string& key) { return keys->check({key}); };
  values.interrupt = [this] { check(); };
  return values;
}

c10::intrusive_ptr<c10d::Store> Rendezvous::watched_store(const std::string& prefix) const {
  return c10::make_intrusive<WatchedStore>(c10::make_intrusive<c10d::PrefixStore>(prefix, store_),
                                           [expected = *this] { expected.check(); });
}

void bind_rendezvous(pybind11::module_& m) {
  namespace py = pybind11;
  py::class_<WatchedStore, c10d::Store, c10::intrusive_ptr<WatchedStore>>(m, "WatchedStore");
  py::class_<GlobalRanks>(
      m, "GlobalRanks",
      "Where the ranks of a group are in the world that has met at a store; none: not known.")
      .def(py::init(&GlobalRanks::of), py::arg("store"), py::arg("global_ranks"));
  py::class_<Rendezvous>(m, "Rendezvous", "The ranks that are to join a group.")
      .def(py::init([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                       const std::string& group_name, const GlobalRanks& global_ranks,
                       const std::string& backend) {
             return Rendezvous(Group({}, group_name, rank, size), store, global_ranks, backend);
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("group_name"),
           py::arg("global_ranks"), py::arg("backend"))
      .def("look", &Rendezvous::look, py::call_guard<py::gil_scoped_release>(),
           "Raises RankLost where one of the ranks is gone.")
      .def("check", &Rendezvous::check, py::call_guard<py::gil_scoped_release>(),
           "The same, now and then, for waits; lets Ctrl-C through.")
      .def("watched_store", &Rendezvous::watched_store, py::arg("prefix"),
           "The group's store, whose waits check().");
}

}  // namespace c10d_ext
