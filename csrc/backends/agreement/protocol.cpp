#include "backends/agreement/protocol.h"

namespace c10d_ext {

Words words_of(const Called& called) {
  Words words;
  words.put(static_cast<int64_t>(called.verb)).put(called.unit);
  words.put(called.rest).put(called.root).put(called.count);
  words.put(static_cast<int64_t>(called.shapes)).put(called.sends).put(called.expects);
  return words;
}

Called take_called(Words& words) {
  Called called;
  called.verb = static_cast<shm::Verb>(words.number());
  called.unit = words.text();
  called.rest = words.text();
  called.root = static_cast<int>(words.number());
  called.count = words.number();
  called.shapes = static_cast<uint64_t>(words.number());
  called.sends = words.numbers();
  called.expects = words.numbers();
  return called;
}

Words words_of(const Posted& posted) {
  return Words()
      .put(posted.sends ? 1 : 0)
      .put(posted.peer)
      .put(posted.tag)
      .put(static_cast<int64_t>(posted.bytes))
      .put(static_cast<int64_t>(posted.dtype));
}

Posted take_posted(Words& words) {
  Posted posted;
  posted.sends = words.number() != 0;
  posted.peer = static_cast<int>(words.number());
  posted.tag = words.number();
  posted.bytes = static_cast<uint64_t>(words.number());
  posted.dtype = static_cast<shm::DType>(words.number());
  return posted;
}

Words words_of(const End& end) {
  return Words()
      .put(static_cast<int64_t>(end.kind))
      .put(end.ranks)
      .put(end.why)
      .put(static_cast<int64_t>(end.grace.count()));
}

End take_end(Words& words) {
  End end;
  end.kind = static_cast<shm::Failure::Kind>(words.number());
  end.ranks = words.numbers<int>();
  end.why = words.text();
  end.grace = std::chrono::milliseconds(words.number());
  return end;
}

}  // namespace c10d_ext
