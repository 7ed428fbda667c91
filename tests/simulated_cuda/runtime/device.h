#pragma once

// Devices: as many as SIMULATED_CUDA_DEVICES says (4), of which CUDA_VISIBLE_DEVICES chooses.
namespace simulated_cuda {

constexpr int kMostDevices = 16;

int count_devices();
// What the visible device `index` is on the machine: two ranks with the same share it.
int physical_device(int index);
// Of this thread.
int& current_device();

}  // namespace simulated_cuda
