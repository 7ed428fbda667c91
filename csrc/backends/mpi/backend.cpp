// mpi: CPU tensors between the ranks of one MPI_COMM_WORLD, and what Python sees of it.

#include "backends/mpi/backend.h"

#include <c10/util/StringUtil.h>
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "backends/mpi/pmi_server.h"
#include "base/gil.h"
#include "control/rendezvous.h"
#include "work/future.h"

namespace c10d_ext {

namespace {

using mpi::Engine;
using mpi::Library;
using mpi::MpiError;
using mpi::Request;
using Milliseconds = std::chrono::milliseconds;

}  // namespace

class MpiBackend::MpiWork final : public SignalledWork {
 public:
  MpiWork(int rank, c10d::OpType type, std::string_view op, uint64_t owner,
          std::unique_ptr<ProfilerSpan> span)
      : SignalledWork(rank, type, op, std::move(span)), owner_(owner) {}

  void abort() override {
    mpi::abandon(owner_, number_or_zero(), "the call was aborted");
  }

 private:
  const uint64_t owner_;
};

c10::intrusive_ptr<MpiBackend> MpiBackend::connect(const c10::intrusive_ptr<c10d::Store>& store,
                                                   int rank, int size, Milliseconds timeout,
                                                   const std::string& group_name,
                                                   const GlobalRanks& global_ranks, int largest) {
  return c10::make_intrusive<MpiBackend>(
      rank, size, group_name,
      mpi::Communicators::connect(store, Group({}, group_name, rank, size), timeout, global_ranks,
                                  largest));
}

MpiBackend::MpiBackend(int rank, int size, const std::string& group_name, mpi::CommsPtr comms)
    : InnerBackend(rank, size, group_name, mpi::kPublicName), comms_(std::move(comms)) {
  init();
}

MpiBackend::~MpiBackend() {
  mpi::abandon(comms_->owner(), 0, "the group was destroyed");
}

void MpiBackend::abort() {
  mpi::abandon(comms_->owner(), 0, "the group was aborted");
}

MpiBackend::TellLosses MpiBackend::losses() const {
  return [losses = comms_->losses()](const std::vector<int>& ranks) { losses->add(ranks); };
}

const Capabilities& MpiBackend::capabilities() const {
  static const Capabilities can = [inherited = InnerBackend::capabilities()]() mutable {
    inherited.reduces_avg = inherited.reduces_avg_to_one = true;
    inherited.reduces_low_precision = true;
    return inherited;
  }();
  return can;
}

MpiBackend::InnerWork MpiBackend::make_work(c10d::OpType type, std::string_view op,
                                            std::unique_ptr<ProfilerSpan> span) const {
  return c10::make_intrusive<MpiWork>(rank_, type, op, comms_->owner(), std::move(span));
}

void MpiBackend::start(const InnerWork& work, InnerCollective collective) {
  mpi::kCollectives.of(collective.op)(comms_, work, collective);
}

MpiBackend::WorkPtr MpiBackend::all_reduce_sparse(const at::Tensor& tensor,
                                                  Milliseconds /*timeout*/) {
  const auto work = begin_work(c10d::OpType::_ALLREDUCE_SPARSE, OpType::SparseAllReduce, tensor);
  mpi::all_reduce_sparse(comms_, work, tensor);
  return work;
}

MpiBackend::WorkPtr MpiBackend::start_message(const Message& message) {
  const OpType op = message.sends ? OpType::Send : OpType::Recv;
  C10D_EXT_CHECK_VALUE(message.tag >= 0 && message.tag <= comms_->tag_limit(), name_of(op), group_,
                       "the tag must be from 0 to ", comms_->tag_limit(), ", which MPI has, got ",
                       message.tag);
  const auto work = begin_work(message.sends ? c10d::OpType::SEND : c10d::OpType::RECV, op,
                               message.sends ? message.tensor : at::Tensor());
  const uint64_t number = ++message_count_;
  work->number(number);
  comms_->call(
      work,
      {[t = message.tensor, sends = message.sends, peer = static_cast<int>(message.peer),
        tag = static_cast<int>(message.tag),
        channel = comms_->messages()](Library& library, auto& requests) {
        channel.add(library, requests, sends, static_cast<std::byte*>(t.mutable_data_ptr()),
                    static_cast<int64_t>(t.nbytes()), peer, tag);
      }},
      [work] { work->end({}); }, number);
  return work;
}

// --- Python --------------------------------------------------------------------------------------

namespace {

// Raises what an MpiError says.
template <class Do>
auto translated(const Do& act) {
  try {
    return act();
  } catch (const MpiError& error) {
    C10_THROW_ERROR(DistBackendError, c10::str("mpi: ", error.what()));
  }
}

// A few bytes of rank 0 of MPI_COMM_WORLD, to all of its ranks.
std::string broadcast_in_world(std::string text, Milliseconds timeout) {
  constexpr size_t kSize = 1024;
  auto buffer = std::make_shared<std::array<char, kSize>>();
  TORCH_CHECK(text.size() < kSize, "mpi: the text must have less than ", kSize, " characters");
  std::copy(text.begin(), text.end(), buffer->begin());
  (*buffer)[text.size()] = '\0';
  Engine::of_this_process().away(
      "MPI_Ibcast", timeout, [] { check_signals(); },
      [buffer](Library& library) {
        Request request = library.broadcast(buffer->data(), kSize, 0, library.world());
        while (!library.test(request)) {
          std::this_thread::sleep_for(Milliseconds(1));
        }
      });
  return buffer->data();
}

}  // namespace

void bind_mpi(pybind11::module_& m) {
  namespace py = pybind11;
  bind_work<MpiBackend::MpiWork>(m, "MpiWork");
  py::class_<MpiBackend, c10::intrusive_ptr<MpiBackend>, c10d::Backend>(
      m, "MpiBackend", "What moves the data of the mpi backend.");
  m.def("connect_mpi", &MpiBackend::connect, py::arg("store"), py::arg("rank"), py::arg("size"),
        py::arg("timeout"), py::arg("group_name"), py::arg("global_ranks"), py::arg("largest"),
        py::call_guard<py::gil_scoped_release>());
  m.def(
      "start_mpi",
      [](const std::string& path, Milliseconds timeout) {
        return translated([&] {
          auto& engine = Engine::of_this_process();
          engine.start(path, timeout, [] { check_signals(); });
          Library& library = engine.library();
          return std::make_tuple(library.rank(), library.size(), library.version(), library.path());
        });
      },
      py::arg("path"), py::arg("timeout"), py::call_guard<py::gil_scoped_release>(),
      "Initializes the library of this process; its rank, size, version and file.");
  m.def(
      "version_of_mpi",
      [](const std::string& path) {
        return translated([&] {
          const auto library = Library::open(path);
          return std::make_tuple(library->version(), library->path(), library->is_open_mpi());
        });
      },
      py::arg("path"), py::call_guard<py::gil_scoped_release>(),
      "Opens a library; its version, its file and whether it is Open MPI.");
  m.def(
      "serve_pmi",
      [](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size) {
        KeyValueStore values;
        values.set = [store](const std::string& key, const std::string& value) {
          store->set(key, value);
        };
        values.get = [store](const std::string& key, Milliseconds) {
          return store->get_to_str(key);
        };
        values.has = [store](const std::string& key) { return store->check({key}); };
        return mpi::PmiServer::start(
                   std::move(values),
                   [store](const std::string& key, int64_t by) { return store->add(key, by); },
                   rank, size)
            .descriptor();
      },
      py::arg("store"), py::arg("rank"), py::arg("size"), py::call_guard<py::gil_scoped_release>(),
      "A process manager for this process, out of a store; the descriptor for PMI_FD.");
  m.def(
      "broadcast_in_mpi_world",
      [](std::string text, Milliseconds timeout) {
        return translated([&] { return broadcast_in_world(std::move(text), timeout); });
      },
      py::arg("text"), py::arg("timeout"), py::call_guard<py::gil_scoped_release>());
  m.def("pmi_process_mapping", &mpi::process_mapping, py::arg("hosts"));
  m.def(
      "finalize_mpi", [](Milliseconds grace) { return Engine::of_this_process().finalize(grace); },
      py::arg("grace"), py::call_guard<py::gil_scoped_release>(),
      "Ends MPI where it was started here and nothing is under way; False: not within that time.");
}

}  // namespace c10d_ext
