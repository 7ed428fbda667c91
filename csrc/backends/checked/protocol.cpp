#include "backends/checked/protocol.h"

namespace c10d_ext {

Payload encoded(const Fingerprint& called) {
  Payload words;
  words.put(static_cast<int64_t>(called.op_type)).put(called.unit);
  words.put(called.details).put(static_cast<int64_t>(called.reduce_op));
  words.put(called.root).put(called.count).put(called.is_uneven ? 1 : 0);
  words.put(static_cast<int64_t>(called.shapes)).put(called.call_site);
  words.put(called.sends).put(called.expects);
  return words;
}

Fingerprint take_fingerprint(Payload& words) {
  Fingerprint called;
  called.op_type = static_cast<OpType>(words.number());
  called.unit = words.text();
  called.details = words.text();
  called.reduce_op = static_cast<ReduceOp>(words.number());
  called.root = static_cast<int>(words.number());
  called.count = words.number();
  called.is_uneven = words.number() != 0;
  called.shapes = static_cast<uint64_t>(words.number());
  called.call_site = words.text();
  called.sends = words.numbers();
  called.expects = words.numbers();
  return called;
}

Payload encoded(const Posted& posted) {
  return Payload()
      .put(posted.sends ? 1 : 0)
      .put(posted.peer)
      .put(posted.tag)
      .put(static_cast<int64_t>(posted.bytes))
      .put(static_cast<int64_t>(posted.dtype));
}

Posted take_posted(Payload& words) {
  Posted posted;
  posted.sends = words.number() != 0;
  posted.peer = static_cast<int>(words.number());
  posted.tag = words.number();
  posted.bytes = static_cast<uint64_t>(words.number());
  posted.dtype = static_cast<DType>(words.number());
  return posted;
}

Payload encoded(const End& end) {
  return Payload()
      .put(static_cast<int64_t>(end.kind))
      .put(end.ranks)
      .put(end.why)
      .put(static_cast<int64_t>(end.grace.count()));
}

End take_end(Payload& words) {
  End end;
  end.kind = static_cast<ErrorKind>(words.number());
  end.ranks = words.numbers<int>();
  end.why = words.text();
  end.grace = std::chrono::milliseconds(words.number());
  return end;
}

}  // namespace c10d_ext
