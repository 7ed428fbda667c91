// What holds for the kernels without knowing what they compute, under whatever sanitizer this is
// built with: results do not depend on the instruction set, on the position and the number of the
// elements, on where they are written and how; nothing beyond the elements is touched; several
// threads may reduce and copy at a time. tests/test_kernels.py compares the values
// themselves with torch's. Prints what failed and exits with 1, or "ok".

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "kernels/isa.h"
#include "kernels/kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

using namespace c10d_ext;
using namespace c10d_ext::kernels;

namespace {

int failures = 0;

void expect(bool ok, const std::string& what) {
  if (!ok && ++failures <= 20) {
    std::fprintf(stderr, "FAILED: %s\n", what.c_str());
  }
}

using Bytes = std::vector<unsigned char>;

// Memory of exactly `bytes` bytes that begins `shift` bytes after a cache line: a sanitizer sees
// what is read or written behind it, and in front of it when `shift` is 0.
class Memory {
 public:
  Memory(size_t bytes, size_t shift)
      : bytes_(bytes), base_(new (kLine) unsigned char[shift + bytes]), data_(base_.get() + shift) {
    std::memset(base_.get(), 0xa5, shift + bytes);
  }
  Memory(const Bytes& values, size_t shift) : Memory(values.size(), shift) {
    std::copy(values.begin(), values.end(), data_);
  }

  unsigned char* data() const {
    return data_;
  }
  Bytes values() const {
    return {data_, data_ + bytes_};
  }
  bool front_is_untouched() const {
    for (const unsigned char* at = base_.get(); at < data_; ++at) {
      if (*at != 0xa5) {
        return false;
      }
    }
    return true;
  }

 private:
  static constexpr std::align_val_t kLine{64};
  struct Delete {
    void operator()(unsigned char* memory) const {
      ::operator delete[](memory, kLine);
    }
  };

  size_t bytes_;
  std::unique_ptr<unsigned char[], Delete> base_;
  unsigned char* data_;
};

std::mt19937_64 bits(20240229);

Bytes any_bytes(size_t bytes) {
  Bytes values(bytes);
  for (unsigned char& value : values) {
    value = static_cast<unsigned char>(bits());
  }
  return values;
}

const std::array<Factor, 8> kFactors{{{3}, {-2, 1}, {0.5}, {7, -3}, {1e-3}, {-1}, {100, 2}, {0.1}}};

struct Case {
  DType dtype;
  ReduceOp op;

  std::string text() const {
    return std::string(name_of(op)) + " of " + std::string(name_of(dtype));
  }
};

std::vector<Case> cases() {
  std::vector<Case> found;
  for (int dtype = 0; dtype <= static_cast<int>(DType::Bytes); ++dtype) {
    for (int op = 0; op <= static_cast<int>(ReduceOp::None); ++op) {
      const Case c{static_cast<DType>(dtype), static_cast<ReduceOp>(op)};
      if (has_meaning(c.op, c.dtype)) {
        found.push_back(c);
      }
    }
  }
  return found;
}

void reduce(const Case& c, void* out, void* also, const std::vector<const void*>& sources,
            size_t count, bool streaming) {
  reduce(c.dtype, c.op, out, also, sources.data(), static_cast<int>(sources.size()), count,
         kFactors.data(), streaming);
}

// One element at a time.
Bytes reference(const Case& c, const std::vector<Bytes>& sources) {
  const size_t size = size_of(c.dtype);
  Bytes result(sources[0].size());
  for (size_t at = 0; at < result.size(); at += size) {
    std::vector<const void*> elements;
    for (const Bytes& source : sources) {
      elements.push_back(source.data() + at);
    }
    reduce(c, result.data() + at, nullptr, elements, 1, false);
  }
  return result;
}

void test_reduce(const Case& c, int n, size_t count) {
  const size_t size = size_of(c.dtype);
  std::vector<Bytes> values;
  for (int p = 0; p < n; ++p) {
    values.push_back(any_bytes(count * size));
  }
  use(*instruction_sets().back());
  const Bytes expected = reference(c, values);

  for (const InstructionSet* set : instruction_sets()) {
    use(*set);
    const std::string text = c.text() + ", " + std::to_string(n) + " x " + std::to_string(count) +
                             ", " + std::string(set->name);
    for (const size_t shift : {size_t{0}, size, 7 * size}) {
      std::vector<Memory> sources;
      std::vector<const void*> pointers;
      for (int p = 0; p < n; ++p) {
        sources.emplace_back(values[static_cast<size_t>(p)], static_cast<size_t>(p % 4) * size);
        pointers.push_back(sources.back().data());
      }
      for (const bool streaming : {false, true}) {
        const Memory out(count * size, shift);
        const Memory also(count * size, 3 * size);
        reduce(c, out.data(), nullptr, pointers, count, streaming);
        expect(out.values() == expected, text);
        std::memset(out.data(), 0, count * size);
        reduce(c, out.data(), also.data(), pointers, count, streaming);
        expect(out.values() == expected && also.values() == expected, text + ", both outputs");
        expect(out.front_is_untouched() && also.front_is_untouched(), text + ", in front of it");
      }
      for (size_t p = 0; p < sources.size(); ++p) {
        expect(sources[p].values() == values[p], text + ", a source has changed");
        reduce(c, sources[p].data(), nullptr, pointers, count, shift == 0);
        expect(sources[p].values() == expected, text + ", in place of " + std::to_string(p));
        std::copy(values[p].begin(), values[p].end(), sources[p].data());
      }
    }
  }
}

void test_copy() {
  for (const InstructionSet* set : instruction_sets()) {
    use(*set);
    copy(nullptr, nullptr, 0, false);
    copy(nullptr, nullptr, 0, true);
    for (const size_t bytes : {0, 1, 63, 64, 500, 4095, 4096, 4097, 5000, 70000}) {
      for (const size_t from_shift : {0, 1, 32}) {
        for (const size_t to_shift : {0, 1, 16, 63}) {
          for (const bool streaming : {false, true}) {
            const Memory from(any_bytes(bytes), from_shift);
            const Memory to(bytes, to_shift);
            copy(to.data(), from.data(), bytes, streaming);
            expect(to.values() == from.values() && to.front_is_untouched(),
                   "copy of " + std::to_string(bytes) + " from " + std::to_string(from_shift) +
                       " to " + std::to_string(to_shift) + ", " + std::string(set->name));
          }
        }
      }
    }
  }
}

void test_meaningless() {
  float values[2] = {1, 2};
  for (const Case& c : {Case{DType::Float, ReduceOp::Band}, Case{DType::Bool, ReduceOp::Avg},
                        Case{DType::ComplexFloat, ReduceOp::Max}, Case{DType::Bytes, ReduceOp::Sum},
                        Case{DType::Float, ReduceOp::None}}) {
    try {
      reduce(c, values, nullptr, {values}, 1, false);
      expect(false, c.text() + " is not refused");
    } catch (const std::invalid_argument&) {
    }
  }
}

// A thread that has told the processor to flush subnormals to zero gets what the others get.
void test_flush_to_zero() {
#if defined(__x86_64__)
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | _MM_FLUSH_ZERO_ON | 0x40);
  const unsigned set = _mm_getcsr();
  const float tiny = 1e-40f;
  float out = 0;
  reduce({DType::Float, ReduceOp::Sum}, &out, nullptr, {&tiny, &tiny}, 1, false);
  const bool kept = _mm_getcsr() == set;
  _mm_setcsr(before);
  uint32_t result, expected;
  const float twice = tiny + tiny;
  std::memcpy(&result, &out, sizeof(result));
  std::memcpy(&expected, &twice, sizeof(expected));
  expect(result == expected, "a subnormal sum is kept");
  expect(kept, "the thread's own mode is left as it was");
#endif
}

// The first use may come from several threads at once.
void test_threads() {
  constexpr size_t kCount = 10000;
  constexpr size_t kThreads = 4;
  std::vector<float> a(kCount * kThreads, 1.5f), b(a.size(), 2), out(a.size()), moved(a.size());
  std::vector<std::thread> threads;
  for (size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, begin = t * kCount] {
      for (int round = 0; round < 20; ++round) {
        reduce({DType::Float, ReduceOp::Sum}, &out[begin], nullptr, {&a[begin], &b[begin]}, kCount,
               round % 2);
        copy(&moved[begin], &out[begin], kCount * sizeof(float), round % 2);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  expect(moved == std::vector<float>(a.size(), 3.5f), "threads beside each other");
}

}  // namespace

int main() {
  test_threads();
  for (const Case& c : cases()) {
    for (const int n : {1, 2, 3, 8}) {
      for (const size_t count : {0, 1, 7, 33, 150}) {
        test_reduce(c, n, count);
      }
    }
  }
  test_copy();
  test_meaningless();
  test_flush_to_zero();
  if (failures) {
    std::fprintf(stderr, "%d failed\n", failures);
    return 1;
  }
  std::puts("ok");
}
