// Between the fake CUDA and what reads FlashInfer's KernelParams.
#pragma once
#include <cuda.h>

#include <string>

// A TMA descriptor that the fake driver made, as a JSON object; "null" where it made none.
std::string dry_run_tensor_map(CUtensorMap const& map);
// The arguments of a launch of the kernel of this name, as a JSON object; "null" where the kernel is not known.
std::string dry_run_arguments(std::string const& kernel_name, void** arguments);
