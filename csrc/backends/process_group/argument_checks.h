#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/group.h"
#include "base/reduction.h"

namespace c10d {
struct ReduceOp;
}

namespace c10d_ext {

// What must hold of the arguments of c10d's methods on CPU tensors, before anything is sent.
class ArgumentChecks {
 protected:
  using Tensors = std::vector<at::Tensor>;

  // Both outlive this. `backend`: its name.
  ArgumentChecks(const Group& place, const std::string& backend)
      : place_(place), backend_(backend) {}

  void check_tensor(std::string_view op, std::string_view name, const at::Tensor& t) const;
  void check_written(std::string_view op, std::string_view name, const at::Tensor& t) const;
  // None writes what another one writes. Of dense tensors; whether others overlap is too hard to
  // tell.
  void check_apart(std::string_view op, at::TensorList written) const;
  const at::Tensor& only(std::string_view op, std::string_view name, const Tensors& tensors) const;
  const Tensors& only_list(std::string_view op, std::string_view name,
                           const std::vector<Tensors>& lists) const;
  void check_parts(std::string_view op, std::string_view name, const Tensors& parts,
                   const at::Tensor& own, std::string_view own_name) const;
  void check_whole(std::string_view op, std::string_view name, const at::Tensor& whole,
                   std::string_view part_name, const at::Tensor& part) const;
  void check_pairs(std::string_view op, const Tensors& outputs, const Tensors& inputs) const;
  // Tensors of one dtype, written in place.
  void check_list(std::string_view op, const Tensors& tensors) const;
  // A list for each rank, as long as `inputs` and with its dtypes.
  void check_lists(std::string_view op, const std::vector<Tensors>& outputs,
                   const Tensors& inputs) const;
  void check_all_written(std::string_view op, const Tensors& outputs) const;
  void check_no_lists(std::string_view op, std::string_view name, const std::vector<Tensors>& lists,
                      int64_t root) const;
  void check_peer(std::string_view op, std::string_view role, int64_t peer) const;
  // What is summed of a sparse tensor.
  Reduction check_sparse(std::string_view op, const at::Tensor& tensor,
                         const c10d::ReduceOp& reduce_op) const;
  void check_root(std::string_view op, int64_t root) const;
  // How many elements of `t` go to or come from each rank, given rows of its first dimension.
  std::vector<int64_t> elements_of(std::string_view op, std::string_view name, const at::Tensor& t,
                                   const std::vector<int64_t>& rows) const;
  Reduction reduction_of(std::string_view op, const c10d::ReduceOp& reduce_op,
                         c10::ScalarType dtype) const;

  const Group& place_;  // for texts

 private:
  const std::string& backend_;
};

// Where torch's op is one of ours.
ReduceOp reduce_op_of(const c10d::ReduceOp& op);

}  // namespace c10d_ext
