#include "backends/shm/collective.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "backends/shm/algorithms/algorithms.h"

namespace c10d_ext::shm {

namespace {

CallSite call_site_of(const Request& request) {
  CallSite site{};
  const std::string& text = request.call_site;
  const size_t bytes = std::min(text.size(), site.size());
  std::memcpy(site.data(), text.data() + (text.size() - bytes), bytes);
  return site;
}

}  // namespace

Collective::Collective(const GroupMemory& memory, const Request& request, uint64_t seq,
                       const Place& place, const Selection& selection)
    : memory_(memory),
      request_(request),
      seq_(seq),
      place_(place),
      n_(memory.size()),
      me_(memory.rank()),
      selection_(selection),
      sources_(request.sources.begin(), request.sources.end()),
      targets_(request.targets.begin(), request.targets.end()),
      part_bytes_(find_part_bytes()),
      input_bytes_(find_input_bytes()) {}

size_t Collective::find_part_bytes() const {
  switch (type()) {
    case OpType::Broadcast:
      return is_root() ? sources_[0].bytes() : targets_[0].bytes();
    case OpType::ReduceScatter:
    case OpType::Scatter:
      return targets_[0].bytes();
    default:
      return sources_.empty() ? 0 : sources_[0].bytes();
  }
}

size_t Collective::find_input_bytes() const {
  switch (type()) {
    case OpType::ReduceScatter:
    case OpType::AllToAll:
    case OpType::Scatter:
      return part_bytes() * static_cast<size_t>(n_);
    default:
      return part_bytes();
  }
}

bool Collective::is_even() const {
  if (type() == OpType::SparseAllReduce) {
    return false;
  }
  const auto same = [bytes = part_bytes_](const std::vector<BufferView>& views) {
    return std::all_of(views.begin(), views.end(),
                       [bytes](const BufferView& view) { return view.bytes() == bytes; });
  };
  return same(sources_) && same(targets_);
}

uint64_t Collective::members_sizes() const {
  const std::vector<uint64_t>& bytes = request_.members;
  if (bytes.empty()) {
    return 0;
  }
  const size_t element = std::max<size_t>(size_of(request_.dtype), 1);
  std::vector<int64_t> elements(bytes.size());
  std::transform(bytes.begin(), bytes.end(), elements.begin(),
                 [element](uint64_t b) { return static_cast<int64_t>(b / element); });
  return add_shape(0, elements.data(), elements.size());
}

void Collective::announce() {
  for (int direction = 0; direction < 2; ++direction) {
    const std::vector<BufferView>& views = direction == 0 ? sources_ : targets_;
    uint64_t* table = memory_.table(me_, seq_, direction);
    for (size_t p = 0; p < static_cast<size_t>(n_); ++p) {
      table[p] = views.empty() ? 0 : views[views.size() == 1 ? 0 : p].bytes();
    }
  }
  CollectiveHeader& d = memory_.header(me_, seq_);
  d.seq = seq_;
  d.type = static_cast<uint8_t>(type());
  d.dtype = static_cast<uint8_t>(request_.dtype);
  d.reduce_op = static_cast<uint8_t>(request_.reduce_op);
  d.even = is_even();
  d.root = request_.root;
  d.bytes = part_bytes();
  d.shapes = request_.shapes;
  const bool sparse = type() == OpType::SparseAllReduce;
  d.members = static_cast<uint32_t>(sparse ? static_cast<size_t>(request_.sparse_dims)
                                           : request_.members.size());
  d.algorithms = selection_.digest();
  d.members_sizes = sparse ? request_.shapes : members_sizes();
  d.factor_real = request_.factor.real;
  d.factor_imaginary = request_.factor.imaginary;
  if (!request_.call_site.empty()) {
    const CallSite site = call_site_of(request_);
    std::memcpy(memory_.call_site(me_, seq_), site.data(), site.size());
  }
  if (d.even != 0 && n_ > 1) {
    algorithm_ = selection_.choose(type(), request_.dtype, input_bytes(), eager::fits(*this));
    if (algorithm_ == Algorithm::Eager) {
      eager::write(*this);
    }
  }
  memory_.publish(stage_of(seq_, kArrived));
}

void Collective::make_room() {
  if (type() == OpType::SparseAllReduce) {
    std::vector<uint64_t> bytes(static_cast<size_t>(n_));
    for (int p = 0; p < n_; ++p) {
      bytes[static_cast<size_t>(p)] = memory_.table(p, seq_, 0)[me_];
    }
    room_ = request_.room(bytes);
    targets_ = std::vector<BufferView>(room_.begin(), room_.end());
  }
}

namespace {

// A group of one rank: the reduction of one value may differ from the value (premul_sum).
void run_alone(const Collective& c) {
  if (!c.has_targets()) {
    return;
  }
  if (!c.reduces()) {
    copy_view(c.source(0), c.target(0), 0, c.target(0).bytes(), false);
    return;
  }
  const auto nobody = [](int) -> const std::byte* { return nullptr; };
  c.reduce_range(c.source(0), 0, c.source(0).bytes(), &c.target(0), nullptr, nobody,
                 /*streaming=*/false);
}

// Larger inputs: the driving thread checks its deadline before the data is read.
constexpr size_t kLookFirst = size_t{32} << 10;

}  // namespace

Task run_collective(const GroupMemory& memory, const Request& request, uint64_t seq,
                    const Place& place, const Selection& selection, bool strict) {
  Collective c(memory, request, seq, place, selection);
  c.announce();
  co_await memory.until(GroupMemory::kAll, stage_of(seq, kArrived));
  if (auto failure = c.compare(strict)) {
    co_return failure;
  }
  c.make_room();
  if (memory.size() == 1) {
    run_alone(c);
    co_return std::nullopt;
  }
  if (request.type == OpType::Barrier) {
    co_return std::nullopt;
  }
  Task data;
  switch (c.algorithm()) {
    case Algorithm::Eager:
      if (c.input_bytes() > kLookFirst) {
        co_await std::suspend_always{};
      }
      eager::read(c);
      co_return std::nullopt;
    case Algorithm::TwoShot:
      data = run_two_shot(c);
      break;
    case Algorithm::Swap:
      data = run_swap(c);
      break;
    case Algorithm::Pipelined:
      data = run_pipelined(c);
      break;
  }
  if (auto failure = co_await std::move(data)) {
    co_return failure;
  }
  memory.publish(stage_of(seq, kDone));
  co_return std::nullopt;
}

}  // namespace c10d_ext::shm
