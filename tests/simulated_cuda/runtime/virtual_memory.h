#pragma once

namespace simulated_cuda {

// A function of the driver that torch asks for by name, or null. Those that are not simulated throw
// their name when they are called.
void* driver_function(const char* name);

}  // namespace simulated_cuda
