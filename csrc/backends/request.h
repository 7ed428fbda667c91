#pragma once

// One collective, or one message, as ops ask for it and backends are given it. Nothing of
// torch.distributed in here.

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "base/fingerprint.h"
#include "base/group.h"
#include "base/reduction.h"
#include "base/types.h"

namespace c10d_ext {

// Refers to its tensors: for the length of a call. Sources are read until the collective completes
// and never written, unless they are the outs or share memory with them; outs may have any strides
// and conj or neg bits. Shapes, ranks and reductions have been checked, alike on every rank.
//
// Each function below makes one. `op` is a literal, for texts.
struct CollectiveRequest {
  std::string_view op;
  OpType type = OpType::Barrier;
  at::TensorList sources;
  at::TensorList outs;
  const Reduction* reduction = nullptr;  // of AllReduce, Reduce, ReduceScatter
  int64_t root = -1;                     // of Broadcast, Reduce, Gather, Scatter
  // Elements to and from each rank where they may differ; empty: they do not.
  std::vector<int64_t> source_sizes, out_sizes;
  // Several tensors as one, of which each rank has as many.
  bool is_list = false;
  // The sources, or the outs, are as many tensors for each rank, in the order of ranks, in place of
  // one that holds all of theirs. They may differ in size, and where they are not reduced in dtype.
  // Where the root alone has them, the others have none.
  bool source_parts = false, out_parts = false;

  bool has_parts() const {
    return source_parts || out_parts;
  }
  // The tensor whose device, and so whose backend, is asked.
  const at::Tensor& like() const {
    return type == OpType::Gather ? sources.front() : outs.front();
  }
  // Whether there is nothing to move on any rank. Not known of what ranks cut differently: rooted
  // parts, and an exchange by elements.
  bool is_empty() const;

  static CollectiveRequest all_reduce(std::string_view op, const at::Tensor& source,
                                      const at::Tensor& out, const Reduction& reduction);
  static CollectiveRequest all_reduce_coalesced(std::string_view op, at::TensorList sources,
                                                at::TensorList outs, const Reduction& reduction);
  // `out` on ranks other than `dst` is left alone.
  static CollectiveRequest reduce(std::string_view op, const at::Tensor& source,
                                  const at::Tensor& out, const Reduction& reduction, int64_t dst);
  // `out` holds N sources one after the other.
  static CollectiveRequest all_gather(std::string_view op, const at::Tensor& source,
                                      const at::Tensor& out);
  static CollectiveRequest all_gather_coalesced(std::string_view op, at::TensorList sources,
                                                at::TensorList outs);
  // Rank i contributes rows[i] rows (dim 0).
  static CollectiveRequest all_gather_uneven(std::string_view op, const at::Tensor& source,
                                             const at::Tensor& out, c10::IntArrayRef rows);
  // `source` holds N outs one after the other.
  static CollectiveRequest reduce_scatter(std::string_view op, const at::Tensor& source,
                                          const at::Tensor& out, const Reduction& reduction);
  static CollectiveRequest reduce_scatter_coalesced(std::string_view op, at::TensorList sources,
                                                    at::TensorList outs,
                                                    const Reduction& reduction);
  // Rank i receives rows[i] rows (dim 0) of `source`.
  static CollectiveRequest reduce_scatter_uneven(std::string_view op, const at::Tensor& source,
                                                 const at::Tensor& out, const Reduction& reduction,
                                                 c10::IntArrayRef rows);
  // Rows of dim 0. A rank exchanges even when it has nothing to send or receive itself.
  static CollectiveRequest all_to_all(std::string_view op, const at::Tensor& source,
                                      const at::Tensor& out, c10::IntArrayRef out_rows,
                                      c10::IntArrayRef source_rows);
  // `source` counts on rank `src` only.
  static CollectiveRequest broadcast(std::string_view op, const at::Tensor& source,
                                     const at::Tensor& out, int64_t src);
  static CollectiveRequest broadcast_coalesced(std::string_view op, at::TensorList sources,
                                               at::TensorList outs, int64_t src);
  // `out` counts on rank `dst` only.
  static CollectiveRequest gather(std::string_view op, const at::Tensor& source,
                                  const at::Tensor& out, int64_t dst);
  // `source` counts on rank `src` only.
  static CollectiveRequest scatter(std::string_view op, const at::Tensor& source,
                                   const at::Tensor& out, int64_t src);
  // Each rank's `out` gets its own `source`, which nobody else sees: shapes may differ between
  // ranks, and a rank meets the others with an empty tensor, too.
  static CollectiveRequest barrier(std::string_view op, const at::Tensor& source,
                                   const at::Tensor& out);

  // As c10d's methods have them and ops do not.
  static CollectiveRequest all_reduce_sparse(std::string_view op, const at::Tensor& tensor,
                                             const Reduction& reduction);
  // The same dtypes on all ranks, and `outs` as many for each rank as there are `sources`.
  static CollectiveRequest all_gather_parts(std::string_view op, at::TensorList sources,
                                            at::TensorList outs);
  static CollectiveRequest reduce_scatter_parts(std::string_view op, at::TensorList sources,
                                                at::TensorList outs, const Reduction& reduction);
  static CollectiveRequest gather_parts(std::string_view op, at::TensorList sources,
                                        at::TensorList outs, int64_t dst);
  static CollectiveRequest scatter_parts(std::string_view op, at::TensorList sources,
                                         at::TensorList outs, int64_t src);
  static CollectiveRequest all_to_all_parts(std::string_view op, at::TensorList sources,
                                            at::TensorList outs);
  // Elements to and from each rank, and not rows: dimensions may differ between ranks.
  static CollectiveRequest all_to_all_elements(std::string_view op, const at::Tensor& source,
                                               const at::Tensor& out,
                                               std::vector<int64_t> out_elements,
                                               std::vector<int64_t> source_elements);
};

// A request that lives as long as its collective.
struct HeldRequest {
  using Tensors = c10::SmallVector<at::Tensor, 1>;

  // `request` with other tensors, which stand for its own.
  HeldRequest(const CollectiveRequest& request, Tensors sources, Tensors outs);

  std::string_view op;
  OpType type = OpType::Barrier;
  Tensors sources, outs;
  std::optional<Reduction> reduction;
  int64_t root = -1;
  std::vector<int64_t> source_sizes, out_sizes;
  bool is_list = false;
  bool source_parts = false, out_parts = false;

  bool has_parts() const {
    return source_parts || out_parts;
  }
};

// What is told of elements and shapes of tensors like these.
Fingerprint fingerprint_of(OpType type, at::TensorList like, int64_t count = -1);
// What all ranks must have in common with this one.
Fingerprint fingerprint_of(const CollectiveRequest& request, int64_t rank, int64_t size);

// One message of this rank. `tensor` is read until it has been sent, or written when it arrives.
struct Message {
  at::Tensor tensor;
  bool sends;
  int64_t peer;  // of the group; kAnySource
  int64_t tag;
};
constexpr int64_t kAnySource = -1;

// Elements of each rank, given its rows of `t`, which has all of them.
std::vector<int64_t> elements_of(c10::IntArrayRef rows, const at::Tensor& t);

}  // namespace c10d_ext
