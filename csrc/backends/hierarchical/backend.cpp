// Groups of ranks on several hosts: shared memory inside, another engine between. One file, for
// c10d compiles slowly.

#include "backends/hierarchical/backend.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "backends/adapter/adapter.h"
#include "backends/adapter/capabilities.h"
#include "backends/adapter/lowering.h"
#include "base/memory.h"
#include "base/profiler_span.h"
#include "base/signal_masked_thread.h"
#include "control/global_ranks.h"
#include "control/host.h"
#include "work/request_work.h"
#include "work/span_name.h"

namespace c10d_ext {

namespace {

using std::string_view;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Sizes = std::vector<int64_t>;

// Up to so many bytes every rail carries all of them: one step between hosts and none after it.
constexpr int64_t kSmall = int64_t{16} << 10;
// Larger ones travel in parts, so that memory and links work at once.
constexpr int64_t kPart = int64_t{1} << 20;
constexpr int64_t kParts = 8;

// Its numbers are torch's: process_group/argument_checks.cpp asserts it.
Reduction reduction_of(const c10d::ReduceOp& op) {
  return {static_cast<ReduceOp>(op.op_), std::nullopt};
}

at::Tensor flat(const at::Tensor& t) {
  return span_of(t, 0, t.numel());
}

at::Tensor rows_of(const at::Tensor& t, int64_t rows) {
  return flat(t).view({rows, t.numel() / std::max<int64_t>(rows, 1)});
}

}  // namespace

// --- Schedules -----------------------------------------------------------------------------------

// Runs schedules one after the other. Left to itself where one does not end.
class HierarchicalBackend::Thread {
 public:
  static std::shared_ptr<Thread> start() {
    auto thread = std::make_shared<Thread>();
    signal_masked_thread("c10d_ext_hosts", [thread] { thread->run(); }).detach();
    return thread;
  }

  void submit(std::function<void()> task) {
    {
      std::lock_guard lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    changed_.notify_one();
  }

  void stop() {
    {
      std::lock_guard lock(mutex_);
      stopped_ = true;
    }
    changed_.notify_one();
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return stopped_ || !tasks_.empty(); });
      if (tasks_.empty()) {
        return;
      }
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      task = nullptr;
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool stopped_ = false;
};

HierarchicalBackend::Step::Step(Started started)
    : work_(std::move(started.work)), finish_(std::move(started.finish)) {}

void HierarchicalBackend::Step::wait() {
  if (work_) {
    work_->wait(kNoTimeout);
    work_.reset();
  }
  if (finish_) {
    std::exchange(finish_, nullptr)();
  }
}

HierarchicalBackend::Part::Part(BackendPtr of) : backend(std::move(of)) {
  if (backend) {
    auto* own = CollectiveBackend::of(*backend);
    can = own != nullptr ? own->capabilities() : capabilities_of(backend->getBackendName());
  }
}

HierarchicalBackend::Step HierarchicalBackend::start(const Part& part,
                                                     const CollectiveRequest& request) const {
  const HeldRequest held(request, request.sources.vec(), request.outs.vec());
  const Group place({}, group_.name(), part.backend->getRank(), part.backend->getSize());
  return Step(
      lowering::start(Adapter(request.op, place, part.backend, part.can, std::nullopt), held));
}

WorkPtr HierarchicalBackend::schedule(c10d::OpType type, const at::Tensor& input,
                                      std::function<void()> steps) {
  auto span = ProfilerSpan::open(title_, span_name(type));
  if (span && input.defined()) {
    span->add_input(input);
  }
  const auto work =
      c10::make_intrusive<SignalledWork>(rank_, type, span_name(type), std::move(span));
  thread_->submit([work, steps = std::move(steps)] {
    std::exception_ptr error;
    try {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      steps();
    } catch (...) {
      error = std::current_exception();
    }
    // A callback may wait for a schedule behind this one.
    signal_masked_thread("c10d_ext_hend", [work, error] { work->end(error); }).detach();
  });
  return work;
}

// --- Groups --------------------------------------------------------------------------------------

HierarchicalBackend::HierarchicalBackend(int rank, int size, const std::string& group_name,
                                         std::vector<std::vector<int>> hosts, BackendPtr local,
                                         BackendPtr rail, BackendPtr flat, std::string title)
    : c10d::Backend(rank, size),
      group_({}, group_name, rank, size),
      hosts_(std::move(hosts)),
      host_of_(static_cast<size_t>(size), -1),
      place_of_(static_cast<size_t>(size), -1),
      local_(std::move(local)),
      rail_(std::move(rail)),
      flat_(std::move(flat)),
      title_(std::move(title)),
      thread_(Thread::start()) {
  for (size_t host = 0; host < hosts_.size(); ++host) {
    is_even_ = is_even_ && hosts_[host].size() == hosts_[0].size();
    for (size_t place = 0; place < hosts_[host].size(); ++place) {
      const auto at = static_cast<size_t>(hosts_[host][place]);
      host_of_.at(at) = static_cast<int>(host);
      place_of_.at(at) = static_cast<int>(place);
    }
  }
  host_ = host_of_[static_cast<size_t>(rank)];
  place_in_host_ = place_of_[static_cast<size_t>(rank)];
  init();
}

HierarchicalBackend::~HierarchicalBackend() {
  thread_->stop();
}

void HierarchicalBackend::setTimeout(std::chrono::milliseconds timeout) {
  for (const auto* part : {&local_, &rail_, &flat_}) {
    if (part->is_there()) {
      part->backend->setTimeout(timeout);
    }
  }
}

void HierarchicalBackend::abort() {
  for (const auto* part : {&local_, &rail_, &flat_}) {
    if (part->is_there()) {
      part->backend->abort();
    }
  }
}

void HierarchicalBackend::shutdown() {
  for (const auto* part : {&local_, &rail_, &flat_}) {
    if (part->is_there()) {
      part->backend->shutdown();
    }
  }
}

Sizes HierarchicalBackend::order_by_host() const {
  Sizes order;
  for (const auto& ranks : hosts_) {
    order.insert(order.end(), ranks.begin(), ranks.end());
  }
  return order;
}

Sizes HierarchicalBackend::order_by_place() const {
  Sizes order;
  for (size_t place = 0; place < hosts_[0].size(); ++place) {
    for (const auto& ranks : hosts_) {
      order.push_back(ranks[place]);
    }
  }
  return order;
}

// --- Collectives ---------------------------------------------------------------------------------

namespace {

// to[i] = from[order[i]]
void gather_rows(const at::Tensor& to, const at::Tensor& from, const Sizes& order) {
  for (size_t i = 0; i < order.size(); ++i) {
    to.select(0, static_cast<int64_t>(i)).copy_(from.select(0, order[i]));
  }
}

// to[order[i]] = from[i]
void scatter_rows(const at::Tensor& to, const at::Tensor& from, const Sizes& order) {
  for (size_t i = 0; i < order.size(); ++i) {
    to.select(0, order[i]).copy_(from.select(0, static_cast<int64_t>(i)));
  }
}

}  // namespace

// Inside, each rank reduces a share; the shares are reduced between hosts, each on a rail of its
// own; inside, everybody gathers them. Parts of the tensor are in different steps at once.
void HierarchicalBackend::all_reduce_over_rails(const at::Tensor& t, const Reduction& reduction) {
  constexpr string_view op = "all_reduce";
  const int64_t here = ranks_here();
  const int64_t parts =
      std::clamp<int64_t>(static_cast<int64_t>(t.nbytes()) / kPart, int64_t{1}, kParts);
  const int64_t share = t.numel() / (parts * here);
  struct Pipe {
    at::Tensor whole, share;
    Step scattered, reduced, gathered;
  };
  std::vector<Pipe> pipes(share > 0 ? static_cast<size_t>(parts) : 0);
  int64_t offset = 0;
  for (auto& pipe : pipes) {
    pipe.whole = t.narrow(0, offset, share * here);
    pipe.share = at::empty({share}, t.options());
    offset += share * here;
    pipe.scattered =
        start(local_, CollectiveRequest::reduce_scatter(op, pipe.whole, pipe.share, reduction));
  }
  const at::Tensor rest = t.narrow(0, offset, t.numel() - offset);
  for (auto& pipe : pipes) {
    pipe.scattered.wait();
    pipe.reduced =
        start(rail_, CollectiveRequest::all_reduce(op, pipe.share, pipe.share, reduction));
  }
  for (auto& pipe : pipes) {
    pipe.reduced.wait();
    pipe.gathered = start(local_, CollectiveRequest::all_gather(op, pipe.share, pipe.whole));
  }
  if (rest.numel() != 0) {
    // Less than an element for each share: every rail carries it.
    start(local_, CollectiveRequest::all_reduce(op, rest, rest, reduction)).wait();
    start(rail_, CollectiveRequest::all_reduce(op, rest, rest, reduction)).wait();
  }
  for (auto& pipe : pipes) {
    pipe.gathered.wait();
  }
}

void HierarchicalBackend::all_reduce_by_leaders(const at::Tensor& t, const Reduction& reduction) {
  constexpr string_view op = "all_reduce";
  if (local_.is_there()) {
    start(local_, CollectiveRequest::reduce(op, t, t, reduction, 0)).wait();
  }
  if (is_leader()) {
    start(rail_, CollectiveRequest::all_reduce(op, t, t, reduction)).wait();
  }
  if (local_.is_there()) {
    start(local_, CollectiveRequest::broadcast(op, t, t, 0)).wait();
  }
}

WorkPtr HierarchicalBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  if (tensors[0].is_sparse()) {
    return flat_.backend->allreduce(tensors, opts);
  }
  return schedule(c10d::OpType::ALLREDUCE, tensors[0],
                  [this, t = flat(tensors[0]), reduction = reduction_of(opts.reduceOp)] {
                    constexpr string_view op = "all_reduce";
                    if (!is_even_) {
                      all_reduce_by_leaders(t, reduction);
                    } else if (!local_.is_there()) {
                      start(rail_, CollectiveRequest::all_reduce(op, t, t, reduction)).wait();
                    } else if (static_cast<int64_t>(t.nbytes()) <= kSmall) {
                      start(local_, CollectiveRequest::all_reduce(op, t, t, reduction)).wait();
                      start(rail_, CollectiveRequest::all_reduce(op, t, t, reduction)).wait();
                    } else {
                      all_reduce_over_rails(t, reduction);
                    }
                  });
}

WorkPtr HierarchicalBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  return schedule(
      c10d::OpType::REDUCE, tensors[0],
      [this, t = flat(tensors[0]), reduction = reduction_of(opts.reduceOp),
       root = static_cast<int>(opts.rootRank)] {
        constexpr string_view op = "reduce";
        const int place = place_of_[static_cast<size_t>(root)];
        const bool is_here = host_of(root) == host_;
        // On a rail the root is reduced to at once; leaders are where it may have none.
        const int on_rail = is_even_ ? place : 0;
        if (local_.is_there()) {
          start(local_, CollectiveRequest::reduce(op, t, t, reduction, on_rail)).wait();
        }
        if (place_in_host_ == on_rail) {
          start(rail_, CollectiveRequest::reduce(op, t, t, reduction, host_of(root))).wait();
        }
        if (is_here && place != on_rail) {
          start(local_, CollectiveRequest::broadcast(op, t, t, on_rail)).wait();
        }
      });
}

WorkPtr HierarchicalBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  return schedule(c10d::OpType::BROADCAST, tensors[0],
                  [this, t = flat(tensors[0]), root = static_cast<int>(opts.rootRank)] {
                    constexpr string_view op = "broadcast";
                    const int place = place_of_[static_cast<size_t>(root)];
                    const bool is_here = host_of(root) == host_;
                    const int on_rail = is_even_ ? place : 0;
                    if (is_here && local_.is_there() && on_rail != place) {
                      start(local_, CollectiveRequest::broadcast(op, t, t, place)).wait();
                    }
                    if (place_in_host_ == on_rail) {
                      start(rail_, CollectiveRequest::broadcast(op, t, t, host_of(root))).wait();
                    }
                    if (local_.is_there() && !(is_here && on_rail != place)) {
                      start(local_, CollectiveRequest::broadcast(op, t, t, on_rail)).wait();
                    }
                  });
}

WorkPtr HierarchicalBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                             const c10d::AllgatherOptions& /*opts*/) {
  return schedule(c10d::OpType::_ALLGATHER_BASE, input, [this, in = flat(input), out = output] {
    constexpr string_view op = "all_gather";
    const int64_t hosts = static_cast<int64_t>(hosts_.size());
    const at::Tensor all = at::empty({size_, in.numel()}, in.options());
    if (is_even_) {
      // The ranks of this place, then those of all places: rows by place and host.
      const at::Tensor column = at::empty({hosts, in.numel()}, in.options());
      start(rail_, CollectiveRequest::all_gather(op, in, column)).wait();
      if (local_.is_there()) {
        start(local_, CollectiveRequest::all_gather(op, column, all)).wait();
      }
      scatter_rows(rows_of(out, size_), local_.is_there() ? all : column, order_by_place());
      return;
    }
    const at::Tensor own = at::empty({ranks_here(), in.numel()}, in.options());
    if (local_.is_there()) {
      start(local_, CollectiveRequest::gather(op, in, own, 0)).wait();
    } else {
      own.select(0, 0).copy_(in);
    }
    if (is_leader()) {
      Sizes rows;
      for (const auto& ranks : hosts_) {
        rows.push_back(static_cast<int64_t>(ranks.size()));
      }
      start(rail_, CollectiveRequest::all_gather_uneven(op, own, all, rows)).wait();
    }
    if (local_.is_there()) {
      start(local_, CollectiveRequest::broadcast(op, all, all, 0)).wait();
    }
    scatter_rows(rows_of(out, size_), all, order_by_host());
  });
}

WorkPtr HierarchicalBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                  const c10d::ReduceScatterOptions& opts) {
  return schedule(
      c10d::OpType::_REDUCE_SCATTER_BASE, input,
      [this, in = input, out = flat(output), reduction = reduction_of(opts.reduceOp)] {
        constexpr string_view op = "reduce_scatter";
        const int64_t hosts = static_cast<int64_t>(hosts_.size());
        const at::Tensor sorted = at::empty({size_, out.numel()}, in.options());
        if (is_even_) {
          // What is for the ranks of this place, then what is for this rank.
          gather_rows(sorted, rows_of(in, size_), order_by_place());
          at::Tensor column = sorted;
          if (local_.is_there()) {
            column = at::empty({hosts, out.numel()}, in.options());
            start(local_, CollectiveRequest::reduce_scatter(op, sorted, column, reduction)).wait();
          }
          start(rail_, CollectiveRequest::reduce_scatter(op, column, out, reduction)).wait();
          return;
        }
        gather_rows(sorted, rows_of(in, size_), order_by_host());
        if (local_.is_there()) {
          start(local_, CollectiveRequest::reduce(op, sorted, sorted, reduction, 0)).wait();
        }
        const at::Tensor own = at::empty({ranks_here(), out.numel()}, in.options());
        if (is_leader()) {
          Sizes rows;
          for (const auto& ranks : hosts_) {
            rows.push_back(static_cast<int64_t>(ranks.size()));
          }
          start(rail_, CollectiveRequest::reduce_scatter_uneven(op, sorted, own, reduction, rows))
              .wait();
        }
        if (local_.is_there()) {
          start(local_, CollectiveRequest::scatter(op, own, out, 0)).wait();
        } else {
          out.copy_(own.select(0, 0));
        }
      });
}

WorkPtr HierarchicalBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                           Sizes& output_splits, Sizes& input_splits,
                                           const c10d::AllToAllOptions& /*opts*/) {
  const auto elements_of = [this](const at::Tensor& t, const Sizes& rows) {
    if (rows.empty()) {
      return Sizes(static_cast<size_t>(size_), t.numel() / size_);
    }
    int64_t all = 0;
    for (const int64_t row : rows) {
      all += row;
    }
    Sizes elements = rows;
    for (auto& row : elements) {
      row *= all == 0 ? 0 : t.numel() / all;
    }
    return elements;
  };
  return schedule(
      c10d::OpType::ALLTOALL_BASE, input,
      [this, in = flat(input), out = flat(output), sent = elements_of(input, input_splits),
       received = elements_of(output, output_splits)] {
        constexpr string_view op = "all_to_all";
        // What stays here goes by shared memory, and the rest by the engine between hosts.
        struct Side {
          Sizes here, there;
          at::Tensor near, far;
          std::vector<std::pair<at::Tensor, at::Tensor>> pieces;  // of the whole, of near or far
        };
        const auto& ranks = hosts_[static_cast<size_t>(host_)];
        const auto part = [&](const at::Tensor& whole, const Sizes& sizes) {
          Side side;
          side.there = sizes;
          Sizes offsets(sizes.size(), 0);
          for (size_t i = 1; i < sizes.size(); ++i) {
            offsets[i] = offsets[i - 1] + sizes[i - 1];
          }
          int64_t near = 0;
          for (const int rank : ranks) {
            const auto i = static_cast<size_t>(rank);
            side.here.push_back(sizes[i]);
            side.there[i] = 0;
            near += sizes[i];
          }
          side.near = at::empty({near}, whole.options());
          side.far = at::empty({whole.numel() - near}, whole.options());
          int64_t at_near = 0, at_far = 0;
          for (const int rank : ranks) {
            const auto i = static_cast<size_t>(rank);
            side.pieces.emplace_back(whole.narrow(0, offsets[i], sizes[i]),
                                     side.near.narrow(0, at_near, sizes[i]));
            at_near += sizes[i];
          }
          for (size_t i = 0; i < sizes.size(); ++i) {
            if (side.there[i] != 0) {
              side.pieces.emplace_back(whole.narrow(0, offsets[i], sizes[i]),
                                       side.far.narrow(0, at_far, sizes[i]));
              at_far += sizes[i];
            }
          }
          return side;
        };
        const Side from = part(in, sent), to = part(out, received);
        for (const auto& [whole, piece] : from.pieces) {
          piece.copy_(whole);
        }
        Step far =
            start(flat_, CollectiveRequest::all_to_all(op, from.far, to.far, to.there, from.there));
        if (local_.is_there()) {
          start(local_, CollectiveRequest::all_to_all(op, from.near, to.near, to.here, from.here))
              .wait();
        } else {
          to.near.copy_(from.near);
        }
        far.wait();
        for (const auto& [whole, piece] : to.pieces) {
          whole.copy_(piece);
        }
      });
}

WorkPtr HierarchicalBackend::barrier(const c10d::BarrierOptions& /*opts*/) {
  return schedule(c10d::OpType::BARRIER, {}, [this] {
    constexpr string_view op = "barrier";
    const at::Tensor nothing = at::empty({0}, at::kByte);
    const auto request = CollectiveRequest::barrier(op, nothing, nothing);
    if (local_.is_there()) {
      start(local_, request).wait();
    }
    if (is_leader()) {
      start(rail_, request).wait();
    }
    if (local_.is_there()) {
      start(local_, request).wait();
    }
  });
}

WorkPtr HierarchicalBackend::send(Tensors& tensors, int dst, int tag) {
  return host_of(dst) == host_
             ? local_.backend->send(tensors, place_of_[static_cast<size_t>(dst)], tag)
             : flat_.backend->send(tensors, dst, tag);
}

WorkPtr HierarchicalBackend::recv(Tensors& tensors, int src, int tag) {
  return host_of(src) == host_
             ? local_.backend->recv(tensors, place_of_[static_cast<size_t>(src)], tag)
             : flat_.backend->recv(tensors, src, tag);
}

// --- Python --------------------------------------------------------------------------------------

void bind_hierarchical(pybind11::module_& m) {
  namespace py = pybind11;
  py::class_<HierarchicalBackend, c10::intrusive_ptr<HierarchicalBackend>, c10d::Backend>(
      m, "HierarchicalBackend", "Shared memory inside each host, another engine between them.")
      .def(py::init<int, int, const std::string&, std::vector<std::vector<int>>,
                    c10::intrusive_ptr<c10d::Backend>, c10::intrusive_ptr<c10d::Backend>,
                    c10::intrusive_ptr<c10d::Backend>, std::string>(),
           py::arg("rank"), py::arg("size"), py::arg("group_name"), py::arg("hosts"),
           py::arg("local"), py::arg("rail"), py::arg("flat"), py::arg("title"))
      .def_property_readonly("hosts", &HierarchicalBackend::hosts,
                             "The group's ranks of each host.")
      .def_property_readonly("title", &HierarchicalBackend::title,
                             "What it is in profilers and reports: \"shm+gloo\".")
      .def_property_readonly("engine", &HierarchicalBackend::engine,
                             "A backend of all ranks, of the kind that goes between hosts.");
  m.def("this_host", &this_host, "The same text in processes that may be able to share memory.");
  m.def(
      "part_of_global_ranks",
      [](const GlobalRanks& global_ranks, const std::vector<int>& ranks) {
        return global_ranks.part(ranks);
      },
      py::arg("global_ranks"), py::arg("ranks"), "Where some of a group's ranks are in the world.");
}

}  // namespace c10d_ext
