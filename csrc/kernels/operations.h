// What is computed: a part of kernels_impl.h.

namespace c10d_ext::kernels::C10D_EXT_ISA {
namespace {

template <class Codec>
struct Reducer {
  using V = typename Codec::V;
  // A copy, which no store through a char* can change: it stays in registers.
  const Reduction r;

  C10D_EXT_INLINE V first(V x) const {
    return x;
  }
  C10D_EXT_INLINE V last(V total) const {
    return total;
  }
};

template <class Codec>
struct Sum : Reducer<Codec> {
  using V = typename Codec::V;
  C10D_EXT_INLINE V next(V total, V x, int) const {
    return total + x;
  }
};

template <class Codec>
struct Avg : Sum<Codec> {
  using V = typename Codec::V;
  C10D_EXT_INLINE V last(V total) const {
    return total / static_cast<typename Codec::Scalar>(this->r.n);
  }
};

template <class Codec>
struct PremulSum : Reducer<Codec> {
  using V = typename Codec::V;
  C10D_EXT_INLINE V first(V x) const {
    return x * Codec::factor(this->r.factors[0]);
  }
  C10D_EXT_INLINE V next(V total, V x, int rank) const {
    return total + x * Codec::factor(this->r.factors[rank]);
  }
};

template <class Codec>
struct Product : Reducer<Codec> {
  using V = typename Codec::V;
  C10D_EXT_INLINE V next(V total, V x, int) const {
    return total * x;
  }
};

// Where either is a NaN neither `<` holds, so x is taken: right when x is the NaN.
template <class Codec>
struct Min : Reducer<Codec> {
  using V = typename Codec::V;
  C10D_EXT_INLINE V next(V total, V x, int) const {
    const V least = total < x ? total : x;
    return total == total ? least : total;
  }
};

template <class Codec>
struct Max : Reducer<Codec> {
  using V = typename Codec::V;
  C10D_EXT_INLINE V next(V total, V x, int) const {
    const V greatest = total > x ? total : x;
    return total == total ? greatest : total;
  }
};

template <class Codec>
struct Band : Reducer<Codec> {
  using V = typename Codec::V;
  C10D_EXT_INLINE V next(V total, V x, int) const {
    return total & x;
  }
};

template <class Codec>
struct Bor : Reducer<Codec> {
  using V = typename Codec::V;
  C10D_EXT_INLINE V next(V total, V x, int) const {
    return total | x;
  }
};

template <class Codec>
struct Bxor : Reducer<Codec> {
  using V = typename Codec::V;
  C10D_EXT_INLINE V next(V total, V x, int) const {
    return total ^ x;
  }
};

}  // namespace
}  // namespace c10d_ext::kernels::C10D_EXT_ISA
