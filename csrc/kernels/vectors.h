// Vectors of one instruction set, and how they are read and written: a part of kernels_impl.h.

namespace c10d_ext::kernels::C10D_EXT_ISA {
namespace {

constexpr size_t kVectorBytes = C10D_EXT_VECTOR_BYTES;

template <class T>
struct VectorOf {
  typedef T type __attribute__((vector_size(kVectorBytes)));
};
template <class T>
using Vector = typename VectorOf<T>::type;

using F32 = Vector<float>;
using U32 = Vector<uint32_t>;
using I32 = Vector<int32_t>;

template <class T>
C10D_EXT_INLINE T read(const char* from) {
  T value;
  __builtin_memcpy(&value, from, sizeof(T));
  return value;
}

template <class T>
C10D_EXT_INLINE void write(char* to, const T& value) {
  __builtin_memcpy(to, &value, sizeof(T));
}

// A store around the caches: whole lines go to memory without being read first and without pushing
// anything out. `to` is aligned to T's size.
template <class T>
C10D_EXT_INLINE void write_around(char* to, const T& value) {
#if defined(__x86_64__)
  if constexpr (!std::is_class_v<T> && sizeof(T) == 16) {
    return _mm_stream_si128(reinterpret_cast<__m128i*>(to), reinterpret_cast<__m128i>(value));
  }
#if C10D_EXT_VECTOR_BYTES >= 32
  if constexpr (!std::is_class_v<T> && sizeof(T) == 32) {
    return _mm256_stream_si256(reinterpret_cast<__m256i*>(to), reinterpret_cast<__m256i>(value));
  }
#endif
#if C10D_EXT_VECTOR_BYTES >= 64
  if constexpr (!std::is_class_v<T> && sizeof(T) == 64) {
    return _mm512_stream_si512(reinterpret_cast<__m512i*>(to), reinterpret_cast<__m512i>(value));
  }
#endif
#endif
  write(to, value);
}

// Such stores are not ordered with the ones that will tell others of this data.
C10D_EXT_INLINE void fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

constexpr size_t kLine = 64;

// The bytes before the first cache line that begins at or after `at`.
C10D_EXT_INLINE size_t before_line(const char* at) {
  return -reinterpret_cast<uintptr_t>(at) % kLine;
}

// Which NaN comes out of arithmetic depends on the order of the operands, which the compiler may
// choose: every result that is a NaN becomes this one.
template <class V>
C10D_EXT_INLINE V canonical(V value) {
  return value == value ? value : V{} + __builtin_nanf("");
}

template <class V>
struct Complex {
  V real;
  V imaginary;
};

template <class V>
C10D_EXT_INLINE Complex<V> operator+(Complex<V> a, Complex<V> b) {
  return {a.real + b.real, a.imaginary + b.imaginary};
}

template <class V, class W>
C10D_EXT_INLINE Complex<V> operator*(Complex<V> a, Complex<W> b) {
  return {a.real * b.real - a.imaginary * b.imaginary, a.real * b.imaginary + a.imaginary * b.real};
}

}  // namespace
}  // namespace c10d_ext::kernels::C10D_EXT_ISA
