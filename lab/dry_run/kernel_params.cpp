// The arguments of FlashInfer's launches, read back by its own struct. `kernel_params_fields.inc` is made by lab.dry_run.build: a
// line FIELD(name) for each member that the installed FlashInfer's KernelParams has.
#include "fake_cuda.h"

#include <cstdint>
#include <cmath>
#include <sstream>
#include <type_traits>
#include <vector>
#include <string>
#include <flashinfer/trtllm/fmha/kernelParams.h>

namespace {

template <class Value>
void write(std::ostringstream& out, char const* name, Value const& value) {
  if constexpr (std::is_same_v<Value, CUtensorMap>) {
    out << ",\"" << name << "\":" << dry_run_tensor_map(value);
  } else if constexpr (std::is_pointer_v<Value>) {
    out << ",\"" << name << "\":" << reinterpret_cast<uint64_t>(value);
  } else if constexpr (std::is_same_v<Value, bool>) {
    out << ",\"" << name << "\":" << (value ? "true" : "false");
  } else if constexpr (std::is_arithmetic_v<Value>) {
    if (std::isfinite(static_cast<double>(value))) out << ",\"" << name << "\":" << value;
    else out << ",\"" << name << "\":" << (std::isnan(static_cast<double>(value)) ? "NaN" : value > 0 ? "Infinity" : "-Infinity");
  }
}

std::string kernel_params(KernelParams const& params) {
  std::ostringstream out;
  out.precision(9);  // the digits that a float needs to be read back as it was
  out << "{\"sizeof\":" << sizeof(KernelParams);
#define FIELD(name) write(out, #name, params.name);
#include "kernel_params_fields.inc"
#undef FIELD
  return out.str() + "}";
}

}  // namespace

std::string dry_run_arguments(std::string const& kernel_name, void** arguments) {
  if (kernel_name.rfind("fmhaSm", 0) == 0 || kernel_name.find("fmhaReductionKernel") != std::string::npos)
    return kernel_params(*static_cast<KernelParams const*>(arguments[0]));
  if (kernel_name.find("ComputeLSEFromMDKernel") == std::string::npos) return "null";
  // lse.cuh: float2* md, float* lse, int num_heads_q, int64 lse_stride_tokens, [float lse_scale,] int64 lse_stride_heads, int n.
  bool const has_scale = kernel_name.find("Pfilfl") != std::string::npos;
  void** rest = arguments + (has_scale ? 5 : 4);
  std::ostringstream out;
  out.precision(9);
  out << "{\"md\":" << *static_cast<uint64_t*>(arguments[0]) << ",\"lse\":" << *static_cast<uint64_t*>(arguments[1])
      << ",\"num_heads_q\":" << *static_cast<int*>(arguments[2]) << ",\"lse_stride_tokens\":" << *static_cast<int64_t*>(arguments[3])
      << ",\"lse_scale\":" << (has_scale ? *static_cast<float*>(arguments[4]) : 1.0f)
      << ",\"lse_stride_heads\":" << *static_cast<int64_t*>(rest[0]) << ",\"n\":" << *static_cast<int*>(rest[1]) << "}";
  return out.str();
}
