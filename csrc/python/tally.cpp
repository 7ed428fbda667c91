#include "python/tally.h"

#include <ATen/record_function.h>
#include <pybind11/stl.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "base/wait_timer.h"

namespace c10d_ext {

namespace {

using Clock = std::chrono::steady_clock;

struct Row {
  int64_t calls = 0;
  int64_t bytes = 0;
  Clock::duration busy{0};
  // Calls in flight now, and since when there is one.
  int64_t active = 0;
  Clock::time_point since;
};

struct Tally {
  // Names of backends; not changed once calls are counted.
  std::set<std::string, std::less<>> backends;
  std::mutex mutex;
  std::map<std::string, Row, std::less<>> rows;
  bool started = false;

  static Tally& instance() {
    // Leaked on purpose: threads of backends may end their calls while the process goes down.
    static auto* tally = new Tally;
    return *tally;
  }
};

// That a call is counted.
struct Counted final : at::ObserverContext {};

// "shm" of "shm:all_reduce"; empty for what is no collective of a backend.
std::string_view backend_of(std::string_view title) {
  const auto end = title.find(':');
  const auto name = end == title.npos ? std::string_view() : title.substr(0, end);
  return Tally::instance().backends.contains(name) ? name : std::string_view();
}

std::unique_ptr<at::ObserverContext> on_begin(const at::RecordFunction& call) {
  const auto backend = backend_of(call.name());
  if (backend.empty()) {
    return nullptr;
  }
  int64_t bytes = 0;
  for (const c10::IValue& input : call.inputs()) {
    if (input.isTensor() && input.toTensor().defined() && !input.toTensor().is_sparse()) {
      bytes += static_cast<int64_t>(input.toTensor().nbytes());
    }
  }
  auto& tally = Tally::instance();
  const std::lock_guard lock(tally.mutex);
  Row& row = tally.rows[std::string(backend)];
  ++row.calls;
  row.bytes += bytes;
  if (row.active++ == 0) {
    row.since = Clock::now();
  }
  return std::make_unique<Counted>();
}

void on_end(const at::RecordFunction& call, at::ObserverContext* begun) {
  if (begun == nullptr) {
    return;
  }
  auto& tally = Tally::instance();
  const std::lock_guard lock(tally.mutex);
  Row& row = tally.rows[std::string(backend_of(call.name()))];
  if (--row.active == 0) {
    row.busy += Clock::now() - row.since;
  }
}

double seconds(Clock::duration time) {
  return std::chrono::duration<double>(time).count();
}

void start(const std::vector<std::string>& backends) {
  auto& tally = Tally::instance();
  {
    const std::lock_guard lock(tally.mutex);
    if (tally.started) {
      return;
    }
    tally.started = true;
    WaitTimer::start();
    tally.backends.insert(backends.begin(), backends.end());
  }
  at::addGlobalCallback(at::RecordFunctionCallback(on_begin, on_end)
                            .needsInputs(true)
                            .scopes({at::RecordScope::USER_SCOPE}));
}

std::map<std::string, std::tuple<int64_t, int64_t, double, std::optional<double>>> rows() {
  const WaitTimer::Times held = WaitTimer::times();
  auto& tally = Tally::instance();
  const std::lock_guard lock(tally.mutex);
  std::map<std::string, std::tuple<int64_t, int64_t, double, std::optional<double>>> rows;
  for (const auto& [backend, row] : tally.rows) {
    const auto busy = row.busy + (row.active > 0 ? Clock::now() - row.since : Clock::duration{0});
    const auto waited = held.find(backend);
    rows[backend] = {row.calls, row.bytes, seconds(busy),
                     waited == held.end() ? std::nullopt : std::optional(seconds(waited->second))};
  }
  return rows;
}

}  // namespace

void bind_tally(pybind11::module_& m) {
  m.def("start_tally", &start, pybind11::arg("backends"),
        "Counts the collectives and messages of these backends in this process from now on.");
  m.def(
      "tally", &rows,
      "By backend: calls, bytes of this rank's inputs, seconds in which at least one was in "
      "flight, and seconds for which threads were held in waits; None where nobody counts these.");
}

}  // namespace c10d_ext
