// mpi: CPU tensors between the ranks of one MPI_COMM_WORLD. One file, for c10d compiles slowly.

#include "backends/mpi/backend.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/util/accumulate.h>
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <memory>
#include <numeric>
#include <set>
#include <sstream>
#include <string_view>
#include <thread>
#include <tuple>

#include "backends/mpi/pmi_server.h"
#include "base/gil.h"
#include "base/memory.h"
#include "base/profiler_span.h"
#include "base/reduction.h"
#include "base/sparse.h"
#include "base/timeouts.h"
#include "control/rendezvous.h"
#include "work/future.h"
#include "work/request_work.h"
#include "work/span_name.h"

namespace c10d_ext {

namespace {

using mpi::Engine;
using mpi::Library;
using mpi::MpiError;
using mpi::Request;
using std::string_view;
using Milliseconds = std::chrono::milliseconds;
using Tensors = std::vector<at::Tensor>;
using Sizes = std::vector<int64_t>;

// Up to so many bytes of all ranks together, each rank gathers and reduces all of them itself: one
// step instead of two.
constexpr int64_t kSmall = int64_t{32} << 10;
// Elements that are reduced before the next ones, while they are in the cache.
constexpr int64_t kBlock = int64_t{1} << 14;
// Tags of groups are hashes of their names: MPI guarantees that many.
constexpr uint64_t kGroupTags = 32767;

int64_t sum_of(const Sizes& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
}

std::byte* data_of(const at::Tensor& t) {
  return static_cast<std::byte*>(t.mutable_data_ptr());
}

std::exception_ptr error_of(std::string text) {
  return std::make_exception_ptr(c10::DistBackendError(
      {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, std::move(text)));
}

// FNV-1a: the same on every rank.
uint64_t hash_of(string_view text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  }
  return hash;
}

// out = the rows of `rows`, one for each rank, reduced in the order of ranks.
void reduce_rows(const at::Tensor& rows, ReduceOp op, const at::Tensor& out) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto dtype = out.scalar_type();
  const bool is_half = c10::isReducedFloatingType(dtype);
  const int64_t ranks = rows.size(0), count = rows.size(1);
  at::Tensor wide = is_half ? at::empty({std::min(count, kBlock)}, out.options().dtype(at::kFloat))
                            : at::Tensor();
  for (int64_t offset = 0; offset < count; offset += kBlock) {
    const int64_t length = std::min(kBlock, count - offset);
    const at::Tensor target = out.narrow(0, offset, length);
    const at::Tensor sum = is_half ? wide.narrow(0, 0, length) : target;
    sum.copy_(rows.select(0, 0).narrow(0, offset, length));
    for (int64_t rank = 1; rank < ranks; ++rank) {
      combine(sum, rows.select(0, rank).narrow(0, offset, length), op, sum);
    }
    if (op == ReduceOp::Avg) {
      sum.div_(ranks);
    }
    if (is_half) {
      target.copy_(sum);
    }
  }
}

// Its numbers are torch's: process_group/argument_checks.cpp asserts it.
ReduceOp op_of(const c10d::ReduceOp& op) {
  return static_cast<ReduceOp>(op.op_);
}

void start_messages(Library& library, std::vector<Request>& requests, bool sends, std::byte* data,
                    int64_t bytes, int peer, int tag, mpi::Comm comm, int largest) {
  for (int64_t offset = 0; offset < bytes; offset += largest) {
    const auto size = static_cast<int>(std::min<int64_t>(largest, bytes - offset));
    requests.push_back(sends ? library.send(data + offset, size, peer, tag, comm)
                             : library.receive(data + offset, size, peer, tag, comm));
  }
}

}  // namespace

class MpiBackend::MpiWork final : public SignalledWork {
 public:
  MpiWork(int rank, c10d::OpType type, uint64_t owner, std::unique_ptr<ProfilerSpan> span)
      : SignalledWork(rank, type, span_name(type), std::move(span)), owner_(owner) {}

  void abort() override {
    Engine::of_this_process().abandon(owner_, number_or_zero(), error_of("the call was aborted"));
  }

 private:
  const uint64_t owner_;
};

// What goes to rank r and what comes from there: `out_bytes[r]` from `out_offsets[r]` on, ...
struct MpiBackend::Exchange {
  at::Tensor source, out;
  Sizes source_bytes, source_offsets, out_bytes, out_offsets;

  static Sizes offsets_of(const Sizes& sizes) {
    Sizes offsets(sizes.size());
    std::exclusive_scan(sizes.begin(), sizes.end(), offsets.begin(), int64_t{0});
    return offsets;
  }
};

// --- Groups --------------------------------------------------------------------------------------

MpiBackend::MpiBackend(int rank, int size, Group place, mpi::Comm collectives, mpi::Comm messages,
                       int tag_limit, int largest)
    : c10d::Backend(rank, size),
      place_(std::move(place)),
      collectives_(collectives),
      messages_(messages),
      tag_limit_(tag_limit),
      largest_(largest),
      id_([] {
        static std::atomic<uint64_t> last{0};
        return ++last;
      }()) {
  init();
}

MpiBackend::~MpiBackend() {
  auto& engine = Engine::of_this_process();
  engine.abandon(id_, 0, error_of("the group was destroyed"));
  if (engine.has_calls_of(id_)) {
    return;  // MPI has them still
  }
  try {
    // By MPI's rules collective, but no library waits for others in it.
    engine.submit({[comms = std::array{collectives_, messages_}](Library& library, auto&) {
                     for (const auto& comm : comms) {
                       library.free(comm);
                     }
                   },
                   [](const std::exception_ptr&) {}, id_, 0});
  } catch (const MpiError&) {
    // Of a process that has forked, or ends.
  }
}

c10::intrusive_ptr<MpiBackend> MpiBackend::connect(const c10::intrusive_ptr<c10d::Store>& store,
                                                   int rank, int size, Milliseconds timeout,
                                                   const std::string& group_name,
                                                   const GlobalRanks& global_ranks, int largest) {
  const Group place({}, group_name, rank, size);
  const auto fail = [&](const std::string& what) {
    C10_THROW_ERROR(DistBackendError, c10::str("mpi: ", what, ' ', where(place)));
  };
  try {
    auto& engine = Engine::of_this_process();
    Library& library = engine.library();
    const Rendezvous expected(place, store, global_ranks, kPublicName);
    const KeyValueStore meeting = expected.part_of_store("world_ranks");
    // Where everybody is in MPI_COMM_WORLD.
    meeting.set(std::to_string(rank), c10::str(library.rank(), ' ', library.size()));
    std::vector<int> ranks;
    std::set<int> sizes;
    const auto until = std::chrono::steady_clock::now() + bounded(timeout);
    for (int other = 0; other < size; ++other) {
      const auto key = std::to_string(other);
      while (!meeting.has(key)) {
        if (std::chrono::steady_clock::now() >= until) {
          fail(c10::str("every rank must join the group within ",
                        std::chrono::duration<double>(timeout).count(), " s, got none of rank ",
                        other));
        }
        meeting.interrupt();
        std::this_thread::sleep_for(Milliseconds(1));
      }
      std::istringstream text(meeting.get(key, timeout));
      int world_rank = -1, world_size = 0;
      text >> world_rank >> world_size;
      ranks.push_back(world_rank);
      sizes.insert(world_size);
    }
    if (sizes.size() != 1 || std::set<int>(ranks.begin(), ranks.end()).size() != ranks.size()) {
      fail(c10::str(
          "the ranks must be processes of one MPI_COMM_WORLD, which mpirun, srun or "
          "torchrun starts, got ranks ",
          c10::Join(", ", ranks), " of worlds of ", c10::Join(", ", sizes), " by ",
          library.version(), library.is_open_mpi() ? " (Open MPI needs its own mpirun)" : ""));
    }
    const auto tag = static_cast<int>(hash_of(group_name) % kGroupTags);
    auto made = std::make_shared<std::vector<mpi::Comm>>();
    engine.away(
        "MPI_Comm_create_group", timeout, [&] { expected.check(); },
        [made, ranks, tag](Library& mpi) {
          // A message is never taken for a part of a collective.
          made->push_back(mpi.create_group(ranks, tag));
          made->push_back(mpi.create_group(ranks, tag));
        });
    return c10::make_intrusive<MpiBackend>(rank, size, place, made->at(0), made->at(1),
                                           library.tag_limit(), largest);
  } catch (const MpiError& error) {
    fail(error.what());
  }
  return {};
}

void MpiBackend::abort() {
  Engine::of_this_process().abandon(id_, 0, error_of("the group was aborted"));
}

// --- Calls ---------------------------------------------------------------------------------------

c10::intrusive_ptr<MpiBackend::MpiWork> MpiBackend::make_work(c10d::OpType type,
                                                              const at::Tensor& input) const {
  auto span = ProfilerSpan::open(kPublicName, span_name(type));
  if (span && input.defined()) {
    span->add_input(input);
  }
  return c10::make_intrusive<MpiWork>(rank_, type, id_, std::move(span));
}

void MpiBackend::call(const c10::intrusive_ptr<MpiWork>& work,
                      std::function<void(Library&, std::vector<Request>&)> start, Over over,
                      uint64_t number) {
  auto end = [work, over = std::move(over), name = place_.name()](std::exception_ptr error) {
    if (!error) {
      try {
        over();
        return;
      } catch (...) {
        error = std::current_exception();
      }
    }
    try {
      std::rethrow_exception(error);
    } catch (const MpiError& refused) {
      error = error_of(refused.what());
    } catch (...) {
    }
    work->end(error);
  };
  try {
    Engine::of_this_process().submit({std::move(start), std::move(end), id_, number});
  } catch (const MpiError& refused) {
    C10_THROW_ERROR(DistBackendError, c10::str("mpi: ", refused.what(), ' ', where(place_)));
  }
}

void MpiBackend::exchange(const c10::intrusive_ptr<MpiWork>& work, Exchange parts, Over over) {
  const auto own = static_cast<size_t>(rank_);
  if (parts.source_bytes[own] != 0) {
    std::memcpy(data_of(parts.out) + parts.out_offsets[own],
                data_of(parts.source) + parts.source_offsets[own],
                static_cast<size_t>(parts.source_bytes[own]));
  }
  const int rank = rank_, ranks = size_, largest = largest_;
  call(
      work,
      [parts = std::move(parts), rank, ranks, largest, comm = collectives_](Library& library,
                                                                            auto& requests) {
        // Nobody is everybody's first.
        for (int step = 1; step < ranks; ++step) {
          const int from = (rank - step + ranks) % ranks;
          const auto i = static_cast<size_t>(from);
          start_messages(library, requests, /*sends=*/false,
                         data_of(parts.out) + parts.out_offsets[i], parts.out_bytes[i], from, 0,
                         comm, largest);
        }
        for (int step = 1; step < ranks; ++step) {
          const int to = (rank + step) % ranks;
          const auto i = static_cast<size_t>(to);
          start_messages(library, requests, /*sends=*/true,
                         data_of(parts.source) + parts.source_offsets[i], parts.source_bytes[i], to,
                         0, comm, largest);
        }
      },
      std::move(over));
}

void MpiBackend::share(const c10::intrusive_ptr<MpiWork>& work, const at::Tensor& all,
                       const Sizes& sizes, Over over) {
  const auto ranks = static_cast<size_t>(size_);
  const Sizes offsets = Exchange::offsets_of(sizes);
  if (sum_of(sizes) <= largest_) {
    call(
        work,
        [all, bytes = std::vector<int>(sizes.begin(), sizes.end()),
         places = std::vector<int>(offsets.begin(), offsets.end()),
         comm = collectives_](Library& library, auto& requests) {
          requests.push_back(library.all_gather_uneven(data_of(all), bytes, places, comm));
        },
        std::move(over));
    return;
  }
  const auto own = static_cast<size_t>(rank_);
  Sizes sent(ranks, sizes[own]);
  Sizes received = sizes;
  sent[own] = received[own] = 0;
  exchange(work, {all, all, sent, Sizes(ranks, offsets[own]), received, offsets}, std::move(over));
}

Sizes MpiBackend::shares_of(int64_t count) const {
  Sizes shares(static_cast<size_t>(size_), count / size_);
  for (int64_t rank = 0; rank < count % size_; ++rank) {
    ++shares[static_cast<size_t>(rank)];
  }
  return shares;
}

void MpiBackend::reduce_parts(const c10::intrusive_ptr<MpiWork>& work, const at::Tensor& source,
                              const Sizes& sizes, const at::Tensor& out, ReduceOp op, Over over) {
  const auto width = static_cast<int64_t>(source.element_size());
  const int64_t mine = sizes[static_cast<size_t>(rank_)];
  const at::Tensor rows = at::empty({size_, mine}, source.options());
  Sizes sent = sizes;
  for (auto& bytes : sent) {
    bytes *= width;
  }
  const Sizes received(static_cast<size_t>(size_), mine * width);
  exchange(
      work,
      {source, rows, sent, Exchange::offsets_of(sent), received, Exchange::offsets_of(received)},
      [rows, out, op, over = std::move(over)] {
        reduce_rows(rows, op, out);
        over();
      });
}

MpiBackend::WorkPtr MpiBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  const auto work = make_work(c10d::OpType::BROADCAST, tensors[0]);
  call(
      work,
      [t = tensors[0], root = static_cast<int>(opts.rootRank), largest = largest_,
       comm = collectives_](Library& library, auto& requests) {
        const auto bytes = static_cast<int64_t>(t.nbytes());
        for (int64_t offset = 0; offset < bytes; offset += largest) {
          const auto size = static_cast<int>(std::min<int64_t>(largest, bytes - offset));
          requests.push_back(library.broadcast(data_of(t) + offset, size, root, comm));
        }
      },
      [work] { work->end({}); });
  return work;
}

// How many entries everybody has, then all of them, which each rank adds up.
MpiBackend::WorkPtr MpiBackend::all_reduce_sparse(const at::Tensor& tensor) {
  const auto work = make_work(c10d::OpType::_ALLREDUCE_SPARSE, tensor);
  const at::Tensor own = added_up(tensor);
  const at::Tensor indices = own._indices().contiguous(), values = own._values().contiguous();
  const at::Tensor count = at::empty({1}, at::kLong).fill_(indices.size(1));
  const at::Tensor counts = at::empty({size_}, at::kLong);
  const auto self = c10::intrusive_ptr<MpiBackend>::reclaim_copy(this);
  call(
      work,
      [count, counts, comm = collectives_](Library& library, auto& requests) {
        requests.push_back(
            library.all_gather(data_of(count), data_of(counts), sizeof(int64_t), comm));
      },
      [self, work, tensor, indices, values, counts] {
        const at::AutoDispatchBelowADInplaceOrView below_autograd;
        auto shape = values.sizes().vec();
        shape[0] = 1;
        const int64_t of_indices = indices.size(0) * static_cast<int64_t>(sizeof(int64_t));
        const int64_t of_values =
            c10::multiply_integers(shape) * static_cast<int64_t>(values.element_size());
        Sizes sizes;
        for (int rank = 0; rank < self->size_; ++rank) {
          sizes.push_back(counts.const_data_ptr<int64_t>()[rank] * (of_indices + of_values));
        }
        const Sizes offsets = Exchange::offsets_of(sizes);
        const at::Tensor all = at::empty({sum_of(sizes)}, at::kByte);
        std::byte* mine = data_of(all) + offsets[static_cast<size_t>(self->rank_)];
        std::memcpy(mine, indices.const_data_ptr(), indices.nbytes());
        std::memcpy(mine + indices.nbytes(), values.const_data_ptr(), values.nbytes());
        self->share(
            work, all, sizes, [self, work, tensor, indices, values, counts, all, offsets, shape] {
              const at::AutoDispatchBelowADInplaceOrView adding;
              Tensors all_indices, all_values;
              for (size_t rank = 0; rank < offsets.size(); ++rank) {
                auto entries = shape;
                entries[0] = counts.const_data_ptr<int64_t>()[rank];
                all_indices.push_back(at::empty({indices.size(0), entries[0]}, indices.options()));
                all_values.push_back(at::empty(entries, values.options()));
                const std::byte* from = data_of(all) + offsets[rank];
                const size_t bytes = all_indices.back().nbytes();
                std::memcpy(data_of(all_indices.back()), from, bytes);
                std::memcpy(data_of(all_values.back()), from + bytes, all_values.back().nbytes());
              }
              const at::Tensor sum =
                  added_up(at::cat(all_indices, 1), at::cat(all_values, 0), tensor.sizes());
              tensor.copy_(sum.to(tensor.scalar_type()));
              work->end({});
            });
      });
  return work;
}

MpiBackend::WorkPtr MpiBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  if (tensors[0].is_sparse()) {
    return all_reduce_sparse(tensors[0]);
  }
  const auto work = make_work(c10d::OpType::ALLREDUCE, tensors[0]);
  const at::Tensor t = span_of(tensors[0], 0, tensors[0].numel());
  const auto op = op_of(opts.reduceOp);
  const auto bytes = static_cast<int64_t>(t.nbytes());
  if (bytes * size_ <= kSmall && bytes <= largest_) {
    const at::Tensor rows = at::empty({size_, t.numel()}, t.options());
    call(
        work,
        [t, rows, comm = collectives_](Library& library, auto& requests) {
          requests.push_back(
              library.all_gather(data_of(t), data_of(rows), static_cast<int>(t.nbytes()), comm));
        },
        [work, t, rows, op] {
          reduce_rows(rows, op, t);
          work->end({});
        });
    return work;
  }
  const Sizes shares = shares_of(t.numel());
  const Sizes offsets = Exchange::offsets_of(shares);
  const auto own = static_cast<size_t>(rank_);
  const auto self = c10::intrusive_ptr<MpiBackend>::reclaim_copy(this);
  // Others have this rank's values of their shares by then; its own share is nobody else's.
  reduce_parts(work, t, shares, t.narrow(0, offsets[own], shares[own]), op,
               [self, work, t, shares] {
                 Sizes parts = shares;
                 for (auto& part : parts) {
                   part *= static_cast<int64_t>(t.element_size());
                 }
                 self->share(work, t, parts, [work] { work->end({}); });
               });
  return work;
}

MpiBackend::WorkPtr MpiBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const auto work = make_work(c10d::OpType::REDUCE, tensors[0]);
  const at::Tensor t = span_of(tensors[0], 0, tensors[0].numel());
  const auto op = op_of(opts.reduceOp);
  const auto root = static_cast<size_t>(opts.rootRank);
  const auto ranks = static_cast<size_t>(size_);
  const auto bytes = static_cast<int64_t>(t.nbytes());
  if (bytes * size_ <= kSmall || size_ <= 2) {
    // The root reduces all of it.
    Sizes sizes(ranks, 0);
    sizes[root] = t.numel();
    const bool receives = rank_ == opts.rootRank;
    reduce_parts(work, t, sizes, receives ? t : t.narrow(0, 0, 0), op, [work] { work->end({}); });
    return work;
  }
  const Sizes shares = shares_of(t.numel());
  const Sizes offsets = Exchange::offsets_of(shares);
  const auto own = static_cast<size_t>(rank_);
  const auto self = c10::intrusive_ptr<MpiBackend>::reclaim_copy(this);
  // Then each share goes to the root, where all of them lie one after the other.
  reduce_parts(work, t, shares, t.narrow(0, offsets[own], shares[own]), op,
               [self, work, t, shares, offsets, root, own, ranks] {
                 const auto width = static_cast<int64_t>(t.element_size());
                 Sizes sent(ranks, 0), received(ranks, 0), from(ranks, 0), to(ranks, 0);
                 for (size_t i = 0; i < ranks; ++i) {
                   from[i] = offsets[own] * width;
                   to[i] = offsets[i] * width;
                   if (own == root && i != own) {
                     received[i] = shares[i] * width;
                   }
                 }
                 if (own != root) {
                   sent[root] = shares[own] * width;
                 }
                 self->exchange(work, {t, t, sent, from, received, to}, [work] { work->end({}); });
               });
  return work;
}

MpiBackend::WorkPtr MpiBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::AllgatherOptions& /*opts*/) {
  const auto work = make_work(c10d::OpType::_ALLGATHER_BASE, input);
  const auto ranks = static_cast<size_t>(size_);
  const auto bytes = static_cast<int64_t>(input.nbytes());
  if (bytes * size_ <= largest_) {
    call(
        work,
        [input, output, comm = collectives_](Library& library, auto& requests) {
          requests.push_back(library.all_gather(data_of(input), data_of(output),
                                                static_cast<int>(input.nbytes()), comm));
        },
        [work] { work->end({}); });
    return work;
  }
  const Sizes sizes(ranks, bytes);
  exchange(work, {input, output, sizes, Sizes(ranks, 0), sizes, Exchange::offsets_of(sizes)},
           [work] { work->end({}); });
  return work;
}

MpiBackend::WorkPtr MpiBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                     const c10d::ReduceScatterOptions& opts) {
  const auto work = make_work(c10d::OpType::_REDUCE_SCATTER_BASE, input);
  reduce_parts(work, span_of(input, 0, input.numel()),
               Sizes(static_cast<size_t>(size_), output.numel()),
               span_of(output, 0, output.numel()), op_of(opts.reduceOp), [work] { work->end({}); });
  return work;
}

MpiBackend::WorkPtr MpiBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                              Sizes& output_splits, Sizes& input_splits,
                                              const c10d::AllToAllOptions& /*opts*/) {
  const auto work = make_work(c10d::OpType::ALLTOALL_BASE, input);
  const auto bytes_of = [this](const at::Tensor& t, Sizes rows) {
    const int64_t all = sum_of(rows);
    if (rows.empty()) {
      return Sizes(static_cast<size_t>(size_), static_cast<int64_t>(t.nbytes()) / size_);
    }
    for (auto& row : rows) {
      row *= all == 0 ? 0 : static_cast<int64_t>(t.nbytes()) / all;
    }
    return rows;
  };
  const Sizes sent = bytes_of(input, input_splits), received = bytes_of(output, output_splits);
  exchange(
      work,
      {input, output, sent, Exchange::offsets_of(sent), received, Exchange::offsets_of(received)},
      [work] { work->end({}); });
  return work;
}

MpiBackend::WorkPtr MpiBackend::barrier(const c10d::BarrierOptions& /*opts*/) {
  const auto work = make_work(c10d::OpType::BARRIER, {});
  call(
      work,
      [comm = collectives_](Library& library, auto& requests) {
        requests.push_back(library.barrier(comm));
      },
      [work] { work->end({}); });
  return work;
}

MpiBackend::WorkPtr MpiBackend::send(Tensors& tensors, int dst, int tag) {
  return message(c10d::OpType::SEND, tensors, dst, tag);
}

MpiBackend::WorkPtr MpiBackend::recv(Tensors& tensors, int src, int tag) {
  return message(c10d::OpType::RECV, tensors, src, tag);
}

MpiBackend::WorkPtr MpiBackend::message(c10d::OpType type, Tensors& tensors, int peer, int tag) {
  const bool sends = type == c10d::OpType::SEND;
  C10D_EXT_CHECK_VALUE(tag >= 0 && tag <= tag_limit_, sends ? "send" : "recv", place_,
                       "the tag must be from 0 to ", tag_limit_, ", which MPI has, got ", tag);
  const auto work = make_work(type, sends ? tensors[0] : at::Tensor());
  const uint64_t number = ++message_count_;
  work->number(number);
  call(
      work,
      [t = tensors[0], sends, peer, tag, comm = messages_, largest = largest_](Library& library,
                                                                               auto& requests) {
        if (t.nbytes() == 0) {
          requests.push_back(sends ? library.send(nullptr, 0, peer, tag, comm)
                                   : library.receive(nullptr, 0, peer, tag, comm));
          return;
        }
        start_messages(library, requests, sends, data_of(t), static_cast<int64_t>(t.nbytes()), peer,
                       tag, comm, largest);
      },
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
