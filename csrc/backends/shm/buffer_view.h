#pragma once

// Random access to the pieces of a Buffer.

#include <algorithm>
#include <cstddef>
#include <vector>

#include "backends/shm/engine.h"
#include "kernels/kernels.h"

namespace c10d_ext::shm {

class BufferView {
 public:
  explicit BufferView(const Buffer& buffer) : buffer_(&buffer) {
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
      kernels::copy(to + done, piece.data, piece.bytes, /*streaming=*/false);
      done += piece.bytes;
    }
  }
  void write(size_t offset, size_t bytes, const std::byte* from, bool streaming) const {
    for (size_t done = 0; done < bytes;) {
      const Piece piece = at(offset + done, bytes - done);
      kernels::copy(piece.data, from + done, piece.bytes, streaming);
      done += piece.bytes;
    }
  }

 private:
  const Buffer* buffer_;
  std::vector<size_t> starts_;
  size_t bytes_ = 0;
};

inline void copy_view(const BufferView& from, const BufferView& to, size_t offset, size_t bytes,
                      bool streaming) {
  for (size_t done = 0; done < bytes;) {
    const Piece source = from.at(offset + done, bytes - done);
    const Piece target = to.at(offset + done, source.bytes);
    if (target.data != source.data) {
      kernels::copy(target.data, source.data, target.bytes, streaming);
    }
    done += target.bytes;
  }
}

// A target that was just read as a source is in the cache: writing it there is cheaper than
// writing around the caches.
inline bool shares_memory(const BufferView& source, const BufferView& target) {
  return source.at(0, 1).data == target.at(0, 1).data;
}

}  // namespace c10d_ext::shm
