// The collectives, each as what one rank does: announce, wait until everyone has entered, compare,
// then move the data.
//
// Small ones lay their data beside the announcement, so that one exchange does it all and every
// rank reads from everyone. Larger ones go through `bulk` in chunks that stay in the cache, with a
// few chunks in flight: main memory sees each byte read once and written once.
//   Exchange: all that moves parts between ranks, and reduce-scatter.
//   TwoShot:  all_reduce and reduce. Rank q reduces the q-th part of each chunk for everyone.
//   Swap:     what two ranks both give to and take from each other.

#include <algorithm>
#include <array>
#include <memory>
#include <sstream>

#include "backends/shm/team.h"

namespace c10d_ext::shm {

namespace {

// Measured on two cores with 512 KiB of L2 each: from 64 to 256 KiB all is the same within noise,
// below the synchronisation shows, above the caches overflow.
constexpr size_t kChunk = size_t{128} << 10;
constexpr size_t kMinChunk = size_t{16} << 10;
// Outputs of this size in all are not read back from a cache.
constexpr size_t kStreaming = size_t{8} << 20;
// Data up to this size is reduced by everyone from everyone; from there on dividing the work pays.
constexpr size_t kOneShot = size_t{32} << 10;
// From here on a rank looks at its watch before it reads what lies beside the announcements.
constexpr size_t kGlance = size_t{32} << 10;
// What a rank reads from there at most.
constexpr size_t kMostAtOnce = size_t{1} << 20;

bool is_reducing(Verb verb) {
  return verb == Verb::AllReduce || verb == Verb::Reduce || verb == Verb::ReduceScatter;
}

bool is_float8(DType dtype) {
  return dtype == DType::Float8_e4m3fn || dtype == DType::Float8_e4m3fnuz ||
         dtype == DType::Float8_e5m2 || dtype == DType::Float8_e5m2fnuz;
}

// Random access to a buffer.
class Span {
 public:
  explicit Span(const Buffer& buffer) : buffer_(&buffer) {
    if (buffer.size() > 1) {
      starts_.reserve(buffer.size());
      for (const Piece& piece : buffer) {
        starts_.push_back(bytes_);
        bytes_ += piece.bytes;
      }
    } else if (!buffer.empty()) {
      bytes_ = buffer[0].bytes;
    }
  }

  size_t bytes() const {
    return bytes_;
  }
  // The memory from `offset` on, at most `limit` bytes and not beyond the end of a piece.
  Piece at(size_t offset, size_t limit) const {
    if (starts_.empty()) {
      return {(*buffer_)[0].data + offset, limit};
    }
    const size_t i = static_cast<size_t>(std::upper_bound(starts_.begin(), starts_.end(), offset) -
                                         starts_.begin() - 1);
    const Piece& piece = (*buffer_)[i];
    const size_t into = offset - starts_[i];
    return {piece.data + into, std::min(limit, piece.bytes - into)};
  }

  void read(size_t offset, size_t bytes, std::byte* to) const {
    for (size_t done = 0; done < bytes;) {
      const Piece piece = at(offset + done, bytes - done);
      copy(to + done, piece.data, piece.bytes, /*streaming=*/false);
      done += piece.bytes;
    }
  }
  void write(size_t offset, size_t bytes, const std::byte* from, bool streaming) const {
    for (size_t done = 0; done < bytes;) {
      const Piece piece = at(offset + done, bytes - done);
      copy(piece.data, from + done, piece.bytes, streaming);
      done += piece.bytes;
    }
  }

 private:
  const Buffer* buffer_;
  std::vector<size_t> starts_;
  size_t bytes_ = 0;
};

void copy_span(const Span& from, const Span& to, size_t offset, size_t bytes, bool streaming) {
  for (size_t done = 0; done < bytes;) {
    const Piece source = from.at(offset + done, bytes - done);
    const Piece target = to.at(offset + done, source.bytes);
    if (target.data != source.data) {
      copy(target.data, source.data, target.bytes, streaming);
    }
    done += target.bytes;
  }
}

// What was just read is in the cache: writing it there is cheaper than around it.
bool shares_memory(const Span& source, const Span& target) {
  return source.at(0, 1).data == target.at(0, 1).data;
}

// A collective of one rank with what it has learned from the others.
class Collective {
 public:
  Collective(const Team& team, const Request& request, uint64_t seq, const Place& place)
      : team_(team),
        request_(request),
        seq_(seq),
        place_(place),
        n_(team.size()),
        me_(team.rank()),
        sources_(request.sources.begin(), request.sources.end()),
        targets_(request.targets.begin(), request.targets.end()) {}

  Verb verb() const {
    return request_.verb;
  }
  bool is_root() const {
    return request_.root == me_;
  }
  const Span& source(int rank) const {
    return sources_[sources_.size() == 1 ? 0 : static_cast<size_t>(rank)];
  }
  const Span& target(int rank) const {
    return targets_[targets_.size() == 1 ? 0 : static_cast<size_t>(rank)];
  }

  // What is compared between ranks: of one part, if they all are of one size.
  size_t part_bytes() const {
    switch (verb()) {
      case Verb::Broadcast:
        return is_root() ? sources_[0].bytes() : targets_[0].bytes();
      case Verb::ReduceScatter:
      case Verb::Scatter:
        return targets_[0].bytes();
      default:
        return sources_.empty() ? 0 : sources_[0].bytes();
    }
  }
  bool is_even() const {
    if (verb() == Verb::SparseAllReduce) {
      return false;
    }
    const auto same = [this](const std::vector<Span>& spans) {
      return std::all_of(spans.begin(), spans.end(),
                         [this](const Span& s) { return s.bytes() == part_bytes(); });
    };
    return same(sources_) && same(targets_);
  }

  // Of tensors that travel together.
  uint64_t members_sizes() const {
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

  // What this rank lays beside its announcement if the collective is a small one.
  size_t eager_bytes() const {
    const size_t part = part_bytes();
    switch (verb()) {
      case Verb::ReduceScatter:
      case Verb::AllToAll:
      case Verb::Scatter:
        return part * static_cast<size_t>(n_);
      default:
        return part;
    }
  }
  bool is_small() const {
    const size_t bytes = eager_bytes();
    size_t most = team_.layout().eager_bytes();
    if ((verb() == Verb::AllReduce || verb() == Verb::Reduce) && divides_work()) {
      most = std::min(most, kOneShot);
    } else if (verb() == Verb::AllGather || verb() == Verb::Gather) {
      most = std::min(most, kMostAtOnce / static_cast<size_t>(n_));
    }
    return bytes <= most;
  }

  // Whether each rank should reduce a part for all, or all of them everything: two ranks send each
  // other as many bytes either way, and only float8 takes longer to reduce than to fetch.
  bool divides_work() const {
    return n_ > 2 || is_float8(request_.dtype);
  }

  // Whether a source is this rank's part for itself, which it takes from there.
  bool is_kept(const Span& source) const {
    return sources_.size() > 1 && &source == &sources_[static_cast<size_t>(me_)] &&
           (verb() != Verb::ReduceScatter || request_.targets[0].size() == 1);
  }
  // Writes what the others read beside the announcement.
  void lay_out() const {
    std::byte* to = team_.eager(me_, seq_);
    for (const Span& source : sources_) {
      if (!is_kept(source)) {
        source.read(0, source.bytes(), to);
      }
      to += source.bytes();
    }
  }

  void announce() const {
    for (int direction = 0; direction < 2; ++direction) {
      const std::vector<Span>& spans = direction == 0 ? sources_ : targets_;
      uint64_t* table = team_.table(me_, seq_, direction);
      for (size_t p = 0; p < static_cast<size_t>(n_); ++p) {
        table[p] = spans.empty() ? 0 : spans[spans.size() == 1 ? 0 : p].bytes();
      }
    }
    CollectiveHeader& d = team_.header(me_, seq_);
    d.seq = seq_;
    d.verb = static_cast<uint8_t>(verb());
    d.dtype = static_cast<uint8_t>(request_.dtype);
    d.reduce_op = static_cast<uint8_t>(request_.reduce_op);
    d.even = is_even();
    d.root = request_.root;
    d.bytes = part_bytes();
    d.shapes = request_.shapes;
    const bool sparse = verb() == Verb::SparseAllReduce;
    d.members = sparse ? static_cast<uint64_t>(request_.sparse_dims) : request_.members.size();
    d.members_sizes = sparse ? request_.shapes : members_sizes();
    d.factor_real = request_.factor.real;
    d.factor_imaginary = request_.factor.imaginary;
    if (!request_.call_site.empty()) {
      CallSite site = call_site();
      std::memcpy(team_.call_site(me_, seq_), site.data(), site.size());
    }
    if (d.even && is_small()) {
      lay_out();
    }
    team_.publish(stage_of(seq_, kArrived));
  }

  // Once everyone has entered: what is wrong, on every rank alike.
  std::optional<Failure> compare(bool strict);

  // Once that is nothing: where all of it goes.
  void make_room() {
    if (verb() == Verb::SparseAllReduce) {
      std::vector<uint64_t> bytes(static_cast<size_t>(n_));
      for (int p = 0; p < n_; ++p) {
        bytes[static_cast<size_t>(p)] = team_.table(p, seq_, 0)[me_];
      }
      room_ = request_.room(bytes);
      targets_ = std::vector<Span>(room_.begin(), room_.end());
    }
  }
  bool has_targets() const {
    return !targets_.empty();
  }

  // Small data, from beside the announcements.
  bool fits_eagerly() const {
    return all_even_ && is_small();
  }
  void read_eagerly() const;

  const std::vector<Factor>& factors() const {
    return factors_;
  }
  const Factor* factors_or_null() const {
    return request_.reduce_op == ReduceOp::PremulSum ? factors_.data() : nullptr;
  }

  // Reduces [offset, offset + bytes) of what the ranks contribute: what `from(p)` points to, but of
  // this rank its own source. Either of the results may be missing.
  template <class From>
  void reduce_range(const Span& own, size_t offset, size_t bytes, const Span* target,
                    std::byte* result, const From& from, bool streaming) const {
    const size_t element = size_of(request_.dtype);
    std::array<const void*, Layout::kMaxSize> pointers;
    for (size_t done = 0; done < bytes;) {
      Piece piece = own.at(offset + done, bytes - done);
      std::byte* out = result != nullptr ? result + done : nullptr;
      std::byte* also = nullptr;
      if (target != nullptr) {
        const Piece to = target->at(offset + done, piece.bytes);
        piece.bytes = to.bytes;
        also = std::exchange(out, to.data);
      }
      for (int p = 0; p < n_; ++p) {
        pointers[static_cast<size_t>(p)] = p == me_ ? piece.data : from(p) + done;
      }
      reduce(request_.dtype, request_.reduce_op, out, also, pointers.data(), n_,
             piece.bytes / element, factors_or_null(), streaming && target != nullptr);
      done += piece.bytes;
    }
  }

  const Team& team_;
  const Request& request_;
  const uint64_t seq_;
  const Place& place_;
  const int n_;
  const int me_;

 private:
  std::optional<Failure> mismatch(std::string text, std::vector<int> ranks) const {
    return Failure{Failure::Kind::Mismatch,
                   std::string(name_of(verb())) + ": " + text + " " + place_.text(),
                   std::move(ranks), std::string(name_of(verb())), seq_};
  }
  std::optional<Failure> compare_tables() const;
  std::optional<Failure> compare_call_sites(const std::vector<CollectiveHeader>& headers) const;

  // Text, cut at its beginning and filled with zeros.
  using CallSite = std::array<char, Layout::kCallSiteBytes>;
  CallSite call_site() const {
    CallSite site{};
    const std::string& text = request_.call_site;
    const size_t bytes = std::min(text.size(), site.size());
    std::memcpy(site.data(), text.data() + (text.size() - bytes), bytes);
    return site;
  }

  std::vector<Span> sources_;
  std::vector<Span> targets_;
  std::vector<Buffer> room_;
  std::vector<Factor> factors_;
  bool all_even_ = true;
};

std::string describe(const CollectiveHeader& d) {
  std::ostringstream out;
  const Verb verb = static_cast<Verb>(d.verb);
  const DType dtype = static_cast<DType>(d.dtype);
  out << name_of(verb) << '(';
  if (verb != Verb::Barrier) {
    const size_t element = std::max<size_t>(size_of(dtype), 1);
    if (d.even) {
      out << d.bytes / element << " x ";
    }
    out << name_of(dtype);
    if (verb == Verb::SparseAllReduce) {
      out << " of shape " << text_of_shapes(d.members_sizes) << " with " << d.members
          << " sparse dimensions";
    } else if (d.members > 1) {
      out << " in " << d.members << " tensors of sizes " << text_of_shapes(d.members_sizes);
    }
    if (static_cast<ReduceOp>(d.reduce_op) != ReduceOp::None) {
      out << ", " << name_of(static_cast<ReduceOp>(d.reduce_op));
    }
    if (d.root >= 0) {
      out << ", root " << d.root;
    }
    if (!d.even && verb != Verb::SparseAllReduce) {
      out << ", uneven sizes";
    }
  }
  out << ')';
  return out.str();
}

std::optional<Failure> Collective::compare(bool strict) {
  if (n_ == 1) {
    factors_ = {request_.factor};
    return std::nullopt;
  }
  // Compared as copies: what a peer does to its own later cannot change the verdict.
  std::vector<CollectiveHeader> all(static_cast<size_t>(n_));
  for (int p = 0; p < n_; ++p) {
    std::memcpy(&all[static_cast<size_t>(p)], &team_.header(p, seq_), sizeof(CollectiveHeader));
    all_even_ &= all[static_cast<size_t>(p)].even == 1;
  }
  const auto agree = [&](const CollectiveHeader& a, const CollectiveHeader& b) {
    return a.seq == b.seq && a.verb == b.verb && a.dtype == b.dtype && a.reduce_op == b.reduce_op &&
           a.root == b.root && (!all_even_ || a.bytes == b.bytes) && a.members == b.members &&
           a.members_sizes == b.members_sizes &&
           (!strict || !all_even_ || shapes_agree(a.shapes, b.shapes));
  };
  std::vector<int> others;
  for (int p = 1; p < n_; ++p) {
    if (!agree(all[0], all[static_cast<size_t>(p)])) {
      others.push_back(p);
    }
  }
  if (!others.empty()) {
    const auto said = [&](size_t rank) {
      const uint64_t shapes = strict ? all[rank].shapes : 0;
      return describe(all[rank]) + (shapes != 0 ? " of shape " + text_of_shapes(shapes) : "");
    };
    const std::string text = text_of_difference(
        all.size(), seq_, [&](size_t a, size_t b) { return agree(all[a], all[b]); }, said);
    return mismatch(text, others);
  }
  if (!request_.call_site.empty()) {
    if (auto failure = compare_call_sites(all)) {
      return failure;
    }
  }
  if (request_.reduce_op == ReduceOp::PremulSum) {
    for (const CollectiveHeader& d : all) {
      factors_.push_back({d.factor_real, d.factor_imaginary});
    }
  }
  return all_even_ || verb() == Verb::SparseAllReduce ? std::nullopt : compare_tables();
}

std::optional<Failure> Collective::compare_call_sites(
    const std::vector<CollectiveHeader>& headers) const {
  std::vector<CallSite> sites(static_cast<size_t>(n_));
  std::vector<int> others;
  for (int p = 0; p < n_; ++p) {
    CallSite& site = sites[static_cast<size_t>(p)];
    std::memcpy(site.data(), team_.call_site(p, seq_), site.size());
    if (site != sites[0]) {
      others.push_back(p);
    }
  }
  if (others.empty()) {
    return std::nullopt;
  }
  const auto said = [&](size_t rank) {
    const CallSite& site = sites[rank];
    const auto end = std::find(site.begin(), site.end(), '\0');
    return describe(headers[rank]) + " at " + std::string(site.begin(), end);
  };
  return mismatch(
      text_of_difference(
          sites.size(), seq_, [&](size_t a, size_t b) { return sites[a] == sites[b]; }, said),
      others);
}

// What each rank sends must be what the other expects, between every two ranks: a rank that is not
// concerned itself raises too.
std::optional<Failure> Collective::compare_tables() const {
  const size_t n = static_cast<size_t>(n_);
  std::vector<uint64_t> sends(n * n), expects(n * n);
  for (size_t p = 0; p < n; ++p) {
    std::memcpy(&sends[p * n], team_.table(static_cast<int>(p), seq_, 0), n * sizeof(uint64_t));
    std::memcpy(&expects[p * n], team_.table(static_cast<int>(p), seq_, 1), n * sizeof(uint64_t));
  }
  for (size_t from = 0; from < n; ++from) {
    for (size_t to = 0; to < n; ++to) {
      const bool concerned = verb() == Verb::Gather    ? static_cast<int>(to) == request_.root
                             : verb() == Verb::Scatter ? static_cast<int>(from) == request_.root
                                                       : true;
      const uint64_t sent = sends[from * n + to];
      const uint64_t expected = expects[to * n + from];
      if (concerned && sent != expected) {
        std::ostringstream text;
        const size_t element = std::max<size_t>(size_of(request_.dtype), 1);
        text << "what a rank sends must be what the other expects, got " << sent / element << " x "
             << name_of(request_.dtype) << " from rank " << from << " for rank " << to
             << ", which expects " << expected / element << ", in collective " << seq_;
        return mismatch(text.str(), {static_cast<int>(from), static_cast<int>(to)});
      }
    }
  }
  return std::nullopt;
}

void Collective::read_eagerly() const {
  const size_t part = part_bytes();
  const size_t mine = static_cast<size_t>(me_) * part;
  const auto from = [this](int rank) { return team_.eager(rank, seq_); };
  switch (verb()) {
    case Verb::AllReduce:
    case Verb::Reduce:
    case Verb::ReduceScatter: {
      if (verb() == Verb::Reduce && !is_root()) {
        return;
      }
      const auto contribution = [&](int rank) {
        return from(rank) + (verb() == Verb::ReduceScatter ? mine : 0);
      };
      if (request_.targets[0].size() == 1) {
        reduce_range(source(me_), 0, part, &target(0), nullptr, contribution, /*streaming=*/false);
        return;
      }
      // One reduction for all pieces.
      std::vector<const void*> all;
      for (int p = 0; p < n_; ++p) {
        all.push_back(contribution(p));
      }
      const std::unique_ptr<std::byte[]> result(new std::byte[part]);
      reduce(request_.dtype, request_.reduce_op, result.get(), nullptr, all.data(), n_,
             part / size_of(request_.dtype), factors_or_null(), /*streaming=*/false);
      target(0).write(0, part, result.get(), /*streaming=*/false);
      return;
    }
    case Verb::Broadcast:
      if (!targets_.empty()) {
        target(0).write(0, part, from(request_.root), false);
      }
      return;
    case Verb::Scatter:
      if (is_root()) {
        copy_span(source(me_), target(0), 0, part, false);
      } else {
        target(0).write(0, part, from(request_.root) + mine, false);
      }
      return;
    case Verb::AllGather:
    case Verb::Gather:
    case Verb::AllToAll:
      if (targets_.empty()) {
        return;
      }
      copy_span(source(me_), target(me_), 0, part, false);
      for (int p = 0; p < n_; ++p) {
        if (p != me_) {
          target(p).write(0, part, from(p) + (verb() == Verb::AllToAll ? mine : 0), false);
        }
      }
      return;
    default:
      return;
  }
}

size_t chunks(size_t bytes, size_t chunk) {
  return (bytes + chunk - 1) / chunk;
}

// Who writes what for whom, in chunks. Iteration i writes chunk i and reads chunk i - 1; steps
// count these, so that a stage tells what a rank has done.
class Exchange {
 public:
  static constexpr size_t kDepth = 4;

  explicit Exchange(const Collective& c) : c_(c) {
    const Verb verb = c.verb();
    personal_ = verb == Verb::Scatter || verb == Verb::AllToAll || verb == Verb::ReduceScatter;
    const bool rooted = verb == Verb::Broadcast || verb == Verb::Scatter || verb == Verb::Gather;
    const bool to_root = verb == Verb::Gather;
    sends_ = !rooted || c.is_root() != to_root;
    receives_ = !rooted || c.is_root() == to_root;
    readers = !sends_ ? Team::kNobody : to_root ? c.request_.root : Team::kAll;
    writers = !receives_ ? Team::kNobody : rooted && !to_root ? c.request_.root : Team::kAll;

    const size_t room = c.team_.layout().bulk_bytes() / kDepth;
    chunk_ =
        std::min(kChunk, (personal_ ? room / static_cast<size_t>(c.n_) : room)) / kApart * kApart;
    size_t received = 0;
    for (int p = 0; p < c.n_; ++p) {
      if (p != c.me_ && sends_) {
        writes = std::max(writes, chunks(c.source(p).bytes(), chunk_));
      }
      if (p != c.me_ && reads_from(p)) {
        reads = std::max(reads, chunks(c.target(p).bytes(), chunk_));
        received += c.target(p).bytes();
      }
    }
    if (keeps_own()) {
      own = chunks(c.target(c.me_).bytes(), chunk_);
      received += c.target(c.me_).bytes();
    }
    streaming_ = verb == Verb::ReduceScatter ? c.target(0).bytes() >= kStreaming &&
                                                   !shares_memory(c.source(c.me_), c.target(0))
                                             : received >= kStreaming;
  }

  // The stage at which a rank has written, or has read, chunk i.
  uint64_t written(size_t i) const {
    return stage_of(c_.seq_, 2 * i + 2);
  }
  uint64_t read(size_t i) const {
    return stage_of(c_.seq_, 2 * i + 5);
  }
  // The stage of a rank that is through with iteration i.
  uint64_t through(size_t i) const {
    return stage_of(c_.seq_, 2 * i + 3);
  }

  void write_chunk(size_t i) const {
    if (!personal_) {
      const auto [offset, bytes] = range(c_.source(c_.me_), i);
      c_.source(c_.me_).read(offset, bytes, slot(c_.me_, i, 0));
      return;
    }
    for (int step = 1; step < c_.n_; ++step) {
      const int to = (c_.me_ + step) % c_.n_;
      const auto [offset, bytes] = range(c_.source(to), i);
      c_.source(to).read(offset, bytes, slot(c_.me_, i, to));
    }
  }

  void read_chunk(size_t i) const {
    if (c_.verb() == Verb::ReduceScatter) {
      const auto [offset, bytes] = range(c_.target(0), i);
      c_.reduce_range(
          c_.source(c_.me_), offset, bytes, &c_.target(0), nullptr,
          [&](int p) { return slot(p, i, c_.me_); }, streaming_);
      return;
    }
    for (int step = 1; step < c_.n_; ++step) {
      const int from = (c_.me_ + step) % c_.n_;
      if (reads_from(from)) {
        const auto [offset, bytes] = range(c_.target(from), i);
        c_.target(from).write(offset, bytes, slot(from, i, c_.me_), streaming_);
      }
    }
  }

  // This rank's part for itself does not travel.
  void keep_chunk(size_t i) const {
    const auto [offset, bytes] = range(c_.target(c_.me_), i);
    copy_span(c_.source(c_.me_), c_.target(c_.me_), offset, bytes, streaming_);
  }

  int readers, writers;
  size_t writes = 0, reads = 0, own = 0;

 private:
  bool reads_from(int rank) const {
    return receives_ && (writers == Team::kAll || writers == rank);
  }
  bool keeps_own() const {
    return c_.verb() != Verb::ReduceScatter && !c_.request_.sources.empty() && c_.has_targets();
  }
  std::pair<size_t, size_t> range(const Span& span, size_t i) const {
    const size_t offset = std::min(i * chunk_, span.bytes());
    return {offset, std::min(chunk_, span.bytes() - offset)};
  }
  std::byte* slot(int from, size_t i, int to) const {
    const size_t width = personal_ ? chunk_ * static_cast<size_t>(c_.n_) : chunk_;
    return c_.team_.bulk(from) + (i % kDepth) * width +
           (personal_ ? static_cast<size_t>(to) * chunk_ : 0);
  }

  const Collective& c_;
  bool personal_, sends_, receives_, streaming_;
  size_t chunk_;
};

// all_reduce and reduce of much data. Chunk k has a part for every rank; iteration k writes chunk
// k + 1, reduces chunk k and collects the results of chunk k. A step is published after each.
class TwoShot {
 public:
  explicit TwoShot(const Collective& c) : c_(c), n_(static_cast<size_t>(c.n_)) {
    bytes_ = c.source(0).bytes();
    const size_t most = c.team_.layout().bulk_bytes() / (2 * n_ + 2) / kApart * kApart;
    const size_t wanted = round_up(chunks(bytes_, 4 * n_), kApart);
    part_ = std::min({std::max(wanted, kMinChunk), kChunk, most});
    chunk_count = chunks(bytes_, part_ * n_);
    collects_ = c.verb() == Verb::AllReduce || c.is_root();
    streaming_ = bytes_ >= kStreaming && collects_ && !shares_memory(c.source(0), c.target(0));
  }

  uint64_t written(size_t k) const {
    return stage_of(c_.seq_, 3 * k + 2);
  }
  uint64_t reduced(size_t k) const {
    return stage_of(c_.seq_, 3 * k + 6);
  }

  void write_chunk(size_t k) const {
    for (size_t step = 1; step < n_; ++step) {
      const size_t to = (static_cast<size_t>(c_.me_) + step) % n_;
      const auto [offset, bytes] = range(k, to);
      c_.source(0).read(offset, bytes, contribution(c_.me_, k, to));
    }
  }
  void reduce_chunk(size_t k) const {
    const size_t me = static_cast<size_t>(c_.me_);
    const auto [offset, bytes] = range(k, me);
    const bool for_others = c_.verb() == Verb::AllReduce || !c_.is_root();
    c_.reduce_range(
        c_.source(0), offset, bytes, collects_ ? &c_.target(0) : nullptr,
        for_others ? result(c_.me_, k) : nullptr, [&](int p) { return contribution(p, k, me); },
        streaming_);
  }
  void collect_chunk(size_t k) const {
    for (size_t step = 1; step < n_ && collects_; ++step) {
      const size_t from = (static_cast<size_t>(c_.me_) + step) % n_;
      const auto [offset, bytes] = range(k, from);
      c_.target(0).write(offset, bytes, result(static_cast<int>(from), k), streaming_);
    }
  }

  size_t chunk_count;

 private:
  // The part of chunk k that rank q reduces. The last chunk is divided evenly too.
  std::pair<size_t, size_t> range(size_t k, size_t q) const {
    const size_t begin = k * part_ * n_;
    const size_t whole = std::min(part_ * n_, bytes_ - begin);
    const size_t each = round_up(chunks(whole, n_), kApart);
    const size_t offset = std::min(q * each, whole);
    return {begin + offset, std::min(each, whole - offset)};
  }
  std::byte* contribution(int from, size_t k, size_t to) const {
    return c_.team_.bulk(from) + ((k & 1) * n_ + to) * part_;
  }
  std::byte* result(int from, size_t k) const {
    return c_.team_.bulk(from) + (2 * n_ + (k & 1)) * part_;
  }

  const Collective& c_;
  size_t n_, bytes_, part_;
  bool collects_, streaming_;
};

// Two ranks that give and take: all_reduce, reduce_scatter, all_gather and all_to_all. Where a rank
// has read a piece of the peer's, it puts its own next one: a line of the cache comes over with the
// peer's data and goes back with this rank's, where two one-way streets would have it fetched by
// the reader and then taken back, empty, by the writer. Step k + 2 tells that chunk k is written.
class Swap {
 public:
  static constexpr size_t kDepth = 4;

  static bool fits(const Collective& c) {
    switch (c.verb()) {
      case Verb::AllReduce:
        return !c.divides_work();
      case Verb::ReduceScatter:
      case Verb::AllGather:
      case Verb::AllToAll:
      case Verb::SparseAllReduce:
        return c.n_ == 2;
      default:
        return false;
    }
  }

  explicit Swap(const Collective& c) : c_(c), peer_(1 - c.me_), reduces_(is_reducing(c.verb())) {
    const bool all = c.verb() == Verb::AllReduce || c.verb() == Verb::AllGather ||
                     c.verb() == Verb::SparseAllReduce;
    gives_ = &c.source(all ? c.me_ : peer_);
    takes_ = &c.target(reduces_ ? c.me_ : peer_);
    const size_t bytes = std::max(gives_->bytes(), takes_->bytes());
    const size_t room = c.team_.layout().bulk_bytes() / kDepth / kPiece * kPiece;
    const size_t wanted = round_up(chunks(bytes, 2 * kDepth), kPiece);
    chunk_ = std::min({std::max(wanted, kMinChunk), kChunk, room});
    const size_t own_bytes = reduces_ ? 0 : c.target(c.me_).bytes();
    swaps = chunks(bytes, chunk_);
    own = chunks(own_bytes, chunk_);
    streaming_ = takes_->bytes() + own_bytes >= kStreaming &&
                 !(reduces_ && shares_memory(c.source(c.me_), *takes_));
  }

  uint64_t written(size_t k) const {
    return stage_of(c_.seq_, k + 2);
  }

  void write_chunk(size_t k) const {
    write(k * chunk_, chunk_, place(c_.me_, k));
  }
  // Reads the peer's chunk k and writes this rank's chunk k + kDepth, piece by piece.
  void swap_chunk(size_t k) const {
    for (size_t at = 0; at < chunk_; at += kPiece) {
      std::byte* const piece = place(peer_, k) + at;
      read(k * chunk_ + at, piece);
      write((k + kDepth) * chunk_ + at, kPiece, piece);
    }
  }
  // This rank's part for itself does not travel.
  void keep_chunk(size_t k) const {
    const auto [offset, bytes] = range(c_.target(c_.me_), k * chunk_, chunk_);
    copy_span(c_.source(c_.me_), c_.target(c_.me_), offset, bytes, streaming_);
  }

  // How many chunks go over, as many on both ranks, and how many stay here.
  size_t swaps, own;

 private:
  // A few of them are in the first cache at a time.
  static constexpr size_t kPiece = 4096;
  static_assert(kChunk % kPiece == 0 && kMinChunk % kPiece == 0);

  static std::pair<size_t, size_t> range(const Span& span, size_t begin, size_t most) {
    const size_t offset = std::min(begin, span.bytes());
    return {offset, std::min(most, span.bytes() - offset)};
  }
  void write(size_t begin, size_t most, std::byte* to) const {
    const auto [offset, bytes] = range(*gives_, begin, most);
    gives_->read(offset, bytes, to);
  }
  void read(size_t begin, const std::byte* from) const {
    const auto [offset, bytes] = range(*takes_, begin, kPiece);
    if (reduces_) {
      const auto contribution = [from](int) { return from; };
      c_.reduce_range(c_.source(c_.me_), offset, bytes, takes_, nullptr, contribution, streaming_);
    } else {
      takes_->write(offset, bytes, from, streaming_);
    }
  }
  // Where `rank` writes chunk k: each of the two in the other's last but kDepth.
  std::byte* place(int rank, size_t k) const {
    const int side = rank ^ static_cast<int>(k / kDepth & 1);
    return c_.team_.bulk(side) + k % kDepth * chunk_;
  }

  const Collective& c_;
  const int peer_;
  const bool reduces_;
  const Span *gives_, *takes_;
  size_t chunk_;
  bool streaming_;
};

// A group of one: the reduction of one value is not always that value (premul_sum).
void run_alone(const Collective& c) {
  if (!c.has_targets()) {
    return;
  }
  if (!is_reducing(c.verb())) {
    copy_span(c.source(0), c.target(0), 0, c.target(0).bytes(), false);
    return;
  }
  const auto nobody = [](int) -> const std::byte* { return nullptr; };
  c.reduce_range(c.source(0), 0, c.source(0).bytes(), &c.target(0), nullptr, nobody,
                 /*streaming=*/false);
}

}  // namespace

Task run_collective(const Team& team, const Request& request, uint64_t seq, const Place& place,
                    bool strict) {
  Collective c(team, request, seq, place);
  c.announce();
  co_await team.until(Team::kAll, stage_of(seq, kArrived));
  if (auto failure = c.compare(strict)) {
    co_return failure;
  }
  c.make_room();
  if (team.size() == 1) {
    run_alone(c);
    co_return std::nullopt;
  }
  if (c.fits_eagerly()) {
    if (c.eager_bytes() > kGlance) {
      co_await std::suspend_always{};
    }
    c.read_eagerly();
    co_return std::nullopt;
  }
  co_await std::suspend_always{};

  if (Swap::fits(c)) {
    const Swap s(c);
    for (size_t k = 0; k < std::min(Swap::kDepth, s.swaps); ++k) {
      s.write_chunk(k);
      team.publish(s.written(k));
    }
    for (size_t k = 0; k < std::max(s.swaps, s.own); ++k) {
      if (k < s.swaps) {
        co_await team.until(Team::kAll, s.written(k));
        s.swap_chunk(k);
        if (k + Swap::kDepth < s.swaps) {
          team.publish(s.written(k + Swap::kDepth));
        }
      }
      if (k < s.own) {
        s.keep_chunk(k);
      }
      co_await std::suspend_always{};
    }
  } else if (c.verb() == Verb::AllReduce || c.verb() == Verb::Reduce) {
    const TwoShot t(c);
    // Room is reused every other chunk. Contribution k - 1 has been read by all when all have
    // reduced it, and result k - 2 when all have written chunk k: both are waited for anyway.
    t.write_chunk(0);
    team.publish(t.written(0));
    for (size_t k = 0; k < t.chunk_count; ++k) {
      if (k + 1 < t.chunk_count) {
        t.write_chunk(k + 1);
        team.publish(t.written(k + 1));
      }
      co_await team.until(Team::kAll, t.written(k));
      t.reduce_chunk(k);
      team.publish(t.reduced(k));
      co_await std::suspend_always{};
      co_await team.until(Team::kAll, t.reduced(k));
      t.collect_chunk(k);
    }
  } else {
    const Exchange e(c);
    const size_t iterations = std::max({e.writes, e.reads + 1, e.own});
    for (size_t i = 0; i < iterations; ++i) {
      if (i < e.writes) {
        if (i >= Exchange::kDepth) {
          co_await team.until(e.readers, e.read(i - Exchange::kDepth));
        }
        e.write_chunk(i);
        team.publish(e.written(i));
      }
      if (i < e.own) {
        e.keep_chunk(i);
      }
      if (i >= 1 && i - 1 < e.reads) {
        co_await team.until(e.writers, e.written(i - 1));
        e.read_chunk(i - 1);
      }
      team.publish(e.through(i));
      co_await std::suspend_always{};
    }
  }
  team.publish(stage_of(seq, kDone));
  co_return std::nullopt;
}

}  // namespace c10d_ext::shm
