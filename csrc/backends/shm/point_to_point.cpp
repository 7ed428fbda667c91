#include "backends/shm/point_to_point.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace c10d_ext::shm {

namespace {

// Copies between one buffer and consecutive stretches of memory.
void copy_pieces(const Buffer& buffer, size_t offset, size_t bytes, std::byte* memory, bool out) {
  size_t start = 0;
  for (const Piece& piece : buffer) {
    const size_t begin = std::max(offset, start);
    const size_t end = std::min(offset + bytes, start + piece.bytes);
    if (begin < end) {
      std::byte* here = piece.data + (begin - start);
      std::byte* there = memory + (begin - offset);
      kernels::copy(out ? there : here, out ? here : there, end - begin, /*streaming=*/false);
    }
    start += piece.bytes;
  }
}

}  // namespace

PointToPoint::PointToPoint(const GroupMemory& memory, const Place& place)
    : memory_(memory),
      place_(place),
      outgoing_(static_cast<size_t>(memory.size())),
      incoming_(static_cast<size_t>(memory.size())) {}

void PointToPoint::post(Item operation) {
  if (operation->request.type == OpType::Send) {
    Outgoing& out = outgoing_[static_cast<size_t>(operation->request.peer)];
    out.queue.push_back({std::move(operation)});
    ++out.unannounced;
    ++sends_;
  } else {
    const int peer = operation->request.peer;
    receives_.push_back(std::move(operation));
    for (size_t p = 0; p < incoming_.size(); ++p) {
      incoming_[p].unmatched &= peer != -1 && peer != static_cast<int>(p);
    }
  }
}

bool PointToPoint::advance(std::vector<Outcome>& ended) {
  bool moved = false;
  for (int p = 0; p < memory_.size(); ++p) {
    if (!outgoing_[static_cast<size_t>(p)].queue.empty()) {
      moved |= advance_send(p, ended);
    }
    if (incoming_[static_cast<size_t>(p)].operation || !receives_.empty()) {
      moved |= advance_receive(p, ended);
    }
  }
  return moved;
}

bool PointToPoint::advance_send(int to, std::vector<Outcome>& ended) {
  Outgoing& out = outgoing_[static_cast<size_t>(to)];
  Mailbox& box = memory_.mailbox(memory_.rank(), to);
  bool moved = false;

  for (; out.unannounced > 0; --out.unannounced) {
    if (out.announced - box.accepted.load(std::memory_order_acquire) >= Mailbox::kEnvelopes) {
      break;
    }
    Sending& s = out.queue[out.queue.size() - out.unannounced];
    // The receiver has copied the envelope that was here: it has accepted it.
    Envelope& envelope = box.envelopes[out.announced % Mailbox::kEnvelopes];
    envelope.bytes = bytes_of(s.operation->request.sources[0]);
    envelope.tag = s.operation->request.tag;
    envelope.dtype = static_cast<uint8_t>(s.operation->request.dtype);
    s.announced = true;
    s.number = out.announced++;
    box.announced.store(out.announced, std::memory_order_seq_cst);
    memory_.ring(to);
    moved = true;
  }

  const auto finish = [&](std::deque<Sending>::iterator it, std::optional<Failure> failure) {
    ended.push_back({it->operation, -1, std::move(failure)});
    out.queue.erase(it);
    --sends_;
    moved = true;
  };
  const uint64_t granted = box.granted.load(std::memory_order_seq_cst);
  if (!out.flowing && granted != out.noticed) {
    const uint64_t wanted_bytes = box.wanted_bytes;
    const DType wanted_dtype = static_cast<DType>(box.wanted_dtype);
    out.noticed = granted;
    box.noticed.store(granted, std::memory_order_seq_cst);
    memory_.ring(to);
    const auto it = std::find_if(out.queue.begin(), out.queue.end(), [&](const Sending& s) {
      return s.announced && s.number + 1 == granted / 2;
    });
    if (it != out.queue.end()) {
      if (granted & 1) {
        const Request& r = it->operation->request;
        finish(it, refusal(*it->operation, memory_.rank(), to, bytes_of(r.sources[0]), r.dtype,
                           wanted_bytes, wanted_dtype));
        return true;
      }
      out.flowing = it->operation;
      out.sent = 0;
      moved = true;
    }
  }
  if (out.flowing) {
    const Buffer& buffer = out.flowing->request.sources[0];
    const size_t bytes = bytes_of(buffer);
    // Half `produced` was emptied before `consumed` came to within kHalves of it.
    while (out.sent < bytes &&
           out.produced - box.consumed.load(std::memory_order_seq_cst) < Mailbox::kHalves) {
      const size_t length = std::min(memory_.layout().half_bytes(), bytes - out.sent);
      copy_pieces(buffer, out.sent, length, memory_.half(memory_.rank(), to, out.produced), true);
      out.sent += length;
      box.produced.store(++out.produced, std::memory_order_seq_cst);
      memory_.ring(to);
      moved = true;
    }
    if (out.sent == bytes) {
      const auto it = std::find_if(out.queue.begin(), out.queue.end(),
                                   [&](const Sending& s) { return s.operation == out.flowing; });
      out.flowing.reset();
      finish(it, std::nullopt);
    }
  }
  return moved;
}

bool PointToPoint::advance_receive(int from, std::vector<Outcome>& ended) {
  Incoming& in = incoming_[static_cast<size_t>(from)];
  Mailbox& box = memory_.mailbox(from, memory_.rank());
  bool moved = false;

  const uint64_t announced = box.announced.load(std::memory_order_seq_cst);
  // Not `<`: a sender gone mad must not make this loop run for ever.
  for (size_t i = 0; i < Mailbox::kEnvelopes && in.accepted != announced; ++i) {
    Envelope envelope;
    std::memcpy(&envelope, &box.envelopes[in.accepted % Mailbox::kEnvelopes], sizeof(envelope));
    in.notes.push_back({in.accepted++, envelope});
    in.unmatched = false;
    moved = true;
  }
  if (moved) {
    box.accepted.store(in.accepted, std::memory_order_seq_cst);
    memory_.ring(from);
  }

  if (!in.operation && match(from, ended)) {
    moved = true;
  }
  if (in.operation) {
    const Buffer& buffer = in.operation->request.targets[0];
    const size_t bytes = bytes_of(buffer);
    while (in.received < bytes && box.produced.load(std::memory_order_seq_cst) != in.consumed) {
      const size_t length = std::min(memory_.layout().half_bytes(), bytes - in.received);
      copy_pieces(buffer, in.received, length, memory_.half(from, memory_.rank(), in.consumed),
                  false);
      in.received += length;
      box.consumed.store(++in.consumed, std::memory_order_seq_cst);
      memory_.ring(from);
      moved = true;
    }
    if (in.received == bytes) {
      ended.push_back({std::move(in.operation), from, std::nullopt});
      in.operation.reset();
      --arriving_;
      moved = true;
    }
  }
  return moved;
}

// Grants the oldest message that some receive asks for to the oldest receive that asks for it.
bool PointToPoint::match(int from, std::vector<Outcome>& ended) {
  Incoming& in = incoming_[static_cast<size_t>(from)];
  Mailbox& box = memory_.mailbox(from, memory_.rank());
  if (in.unmatched || box.noticed.load(std::memory_order_seq_cst) != in.granted) {
    return false;
  }
  for (auto receive = receives_.begin(); receive != receives_.end(); ++receive) {
    const Request& r = (*receive)->request;
    if (r.peer != from && r.peer != -1) {
      continue;
    }
    const auto note = std::find_if(in.notes.begin(), in.notes.end(), [&](const Incoming::Note& m) {
      return m.envelope.tag == r.tag;
    });
    if (note == in.notes.end()) {
      continue;
    }
    const uint64_t wanted = bytes_of(r.targets[0]);
    const DType sent_dtype = static_cast<DType>(note->envelope.dtype);
    const bool fits = note->envelope.bytes == wanted && sent_dtype == r.dtype;
    const Item operation = *receive;
    receives_.erase(receive);
    if (fits) {
      in.operation = operation;
      in.received = 0;
      ++arriving_;
    } else {
      box.wanted_bytes = wanted;
      box.wanted_dtype = static_cast<uint64_t>(r.dtype);
      ended.push_back({operation, from,
                       refusal(*operation, from, memory_.rank(), note->envelope.bytes, sent_dtype,
                               wanted, r.dtype)});
    }
    in.granted = 2 * (note->number + 1) + (fits ? 0 : 1);
    box.granted.store(in.granted, std::memory_order_seq_cst);
    in.notes.erase(note);
    memory_.ring(from);
    return true;
  }
  in.unmatched = true;
  return false;
}

void PointToPoint::remove(const Item& operation) {
  receives_.remove(operation);
  for (Outgoing& out : outgoing_) {
    const auto it = std::find_if(out.queue.begin(), out.queue.end(),
                                 [&](const Sending& s) { return s.operation == operation; });
    if (it != out.queue.end()) {
      out.unannounced -= it->announced ? 0 : 1;
      out.queue.erase(it);
      --sends_;
    }
    if (out.flowing == operation) {
      out.flowing.reset();
    }
  }
  for (Incoming& in : incoming_) {
    if (in.operation == operation) {
      in.operation.reset();
      --arriving_;
    }
  }
}

Failure PointToPoint::refusal(const Operation& operation, int from, int to, uint64_t sent,
                              DType sent_dtype, uint64_t expected, DType expected_dtype) const {
  const std::string op(name_of(operation.request.type));
  const std::string text =
      text_of_misfit(from, sent, sent_dtype, to, expected, expected_dtype, operation.request.tag);
  return {
      ErrorKind::Mismatch, op + ": " + text + " " + place_.text(), {from, to}, op, operation.seq()};
}

}  // namespace c10d_ext::shm
