#pragma once

namespace c10d_ext {

// Registers the kernels of all ops for the devices that are neither CPU nor CUDA. Called once,
// after the ops are defined.
void register_kernels_of_devices();

}  // namespace c10d_ext
