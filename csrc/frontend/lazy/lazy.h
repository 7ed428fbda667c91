#pragma once

// The ops on torch's lazy tensors (torch._lazy, the TorchScript backend).
namespace c10d_ext::lazy {

// Whether this build has them: torch itself may be built without its lazy backend.
bool is_built();

// Gives every op of c10d_ext its kernel for lazy tensors. Once, after all ops are defined.
void register_kernels();

}  // namespace c10d_ext::lazy
