#pragma once

// One rank's side of a collective: what it announces, what it compares with the other ranks'
// announcements, and the parts of the data that the algorithms move.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "backends/shm/buffer_view.h"
#include "backends/shm/group_memory.h"
#include "backends/shm/select.h"
#include "backends/shm/task.h"

namespace c10d_ext::shm {

// The line that calls: text, cut at its beginning and filled with zeros.
using CallSite = std::array<char, Layout::kCallSiteBytes>;

class Collective {
 public:
  Collective(const GroupMemory& memory, const Request& request, uint64_t seq, const Place& place,
             const Selection& selection);

  // Publishes the header and the table of sizes; with Algorithm::Eager the data, too.
  void announce();

  // Once every rank has entered: what is wrong, on every rank alike. From then on algorithm() is
  // the same on all ranks.
  std::optional<Failure> compare(bool strict);

  // Once compare() found nothing: makes the targets that depend on what the others send.
  void make_room();

  Algorithm algorithm() const {
    return algorithm_;
  }
  OpType type() const {
    return request_.type;
  }
  bool reduces() const {
    return type() == OpType::AllReduce || type() == OpType::Reduce ||
           type() == OpType::ReduceScatter;
  }
  bool is_root() const {
    return request_.root == me_;
  }
  const std::vector<BufferView>& sources() const {
    return sources_;
  }
  const BufferView& source(int rank) const {
    return sources_[sources_.size() == 1 ? 0 : static_cast<size_t>(rank)];
  }
  const BufferView& target(int rank) const {
    return targets_[targets_.size() == 1 ? 0 : static_cast<size_t>(rank)];
  }
  bool has_targets() const {
    return !targets_.empty();
  }

  // The bytes of one part, where all parts are of one size.
  size_t part_bytes() const {
    return part_bytes_;
  }
  // The bytes of this rank's input, where all parts are of one size: all of its parts.
  size_t input_bytes() const {
    return input_bytes_;
  }

  const kernels::Factor* factors_or_null() const {
    return request_.reduce_op == ReduceOp::PremulSum ? factors_.data() : nullptr;
  }

  // Reduces [offset, offset + bytes) of what the ranks contribute: what `from(p)` points to, but of
  // this rank its own source. Either of the results may be missing.
  template <class From>
  void reduce_range(const BufferView& own, size_t offset, size_t bytes, const BufferView* target,
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
      kernels::reduce(request_.dtype, request_.reduce_op, out, also, pointers.data(), n_,
                      piece.bytes / element, factors_or_null(), streaming && target != nullptr);
      done += piece.bytes;
    }
  }

  const GroupMemory& memory_;
  const Request& request_;
  const uint64_t seq_;
  const Place& place_;
  const int n_;
  const int me_;

 private:
  size_t find_part_bytes() const;
  size_t find_input_bytes() const;
  bool is_even() const;
  // Of tensors that travel together.
  uint64_t members_sizes() const;
  // Finds out whether all parts are even, and the factors.
  std::optional<Failure> compare_headers(bool strict);

  const Selection& selection_;
  std::vector<BufferView> sources_;
  std::vector<BufferView> targets_;
  const size_t part_bytes_;
  const size_t input_bytes_;
  std::vector<Buffer> room_;
  std::vector<kernels::Factor> factors_;
  bool all_even_ = true;
  Algorithm algorithm_ = Algorithm::Pipelined;
};

// Runs `request` as collective `seq` of the group. `request` outlives the task.
Task run_collective(const GroupMemory& memory, const Request& request, uint64_t seq,
                    const Place& place, const Selection& selection, bool strict);

}  // namespace c10d_ext::shm
