// CUDA's driver and runtime without a GPU, as far as FlashInfer's trtllm-gen launcher calls them. They answer as the GPU that
// `dry_run_set_gpu` names, check TMA descriptors by the rules that cuda.h documents, and keep a log of what was launched. Nothing
// runs, and no memory is read or written. A descriptor holds what it was made of, so that it can be read back from KernelParams.
#include "fake_cuda.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

namespace {

struct Gpu {
  int major, minor, multiprocessors, shared_memory_optin_bytes, multiprocessors_per_gpc, gpcs;
};
Gpu gpu{10, 0, 148, 232448, 18, 8};

std::vector<std::string> log_lines;
std::string joined_log, last_fault, faults, taken_faults;
std::streambuf* stderr_buffer = nullptr;

struct Function {
  std::string name;
};

// The kernels of the library, which register themselves while it is loaded: by then this must be there.
std::map<void const*, std::string>& host_functions() {
  static std::map<void const*, std::string> all;
  return all;
}

template <class Values>
std::string list(Values const* values, unsigned count) {
  std::ostringstream out;
  for (unsigned i = 0; i < count; i++) out << (i ? "," : "") << values[i];
  return "[" + out.str() + "]";
}

std::string dimensions(unsigned x, unsigned y, unsigned z) {
  unsigned const all[] = {x, y, z};
  return list(all, 3);
}

void write(std::string const& kind, std::string const& rest) { log_lines.push_back("{\"event\":\"" + kind + "\"," + rest + "}"); }

CUresult fault(std::string const& text, CUresult result = CUDA_ERROR_INVALID_VALUE) {
  last_fault = text;
  faults += (faults.empty() ? "" : "; ") + text;
  return result;
}

void write_launch(std::string const& name, std::string const& grid, std::string const& block, unsigned cluster, bool pdl,
                  size_t shared_memory_bytes, void** arguments) {
  std::ostringstream out;
  out << "\"name\":\"" << name << "\",\"grid\":" << grid << ",\"block\":" << block << ",\"cluster\":" << cluster
      << ",\"pdl\":" << (pdl ? "true" : "false") << ",\"shared_memory_bytes\":" << shared_memory_bytes
      << ",\"arguments\":" << dry_run_arguments(name, arguments);
  write("launch", out.str());
}

int attribute(int which) {
  switch (which) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return gpu.major;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return gpu.minor;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return gpu.multiprocessors;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: return 48 * 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return gpu.shared_memory_optin_bytes;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: return gpu.shared_memory_optin_bytes + 1024;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return 32;
  }
  fault("the fake CUDA does not know device attribute " + std::to_string(which) + ", and answered 0");
  return 0;
}

// What a CUtensorMap's 128 opaque bytes hold here.
struct Descriptor {
  uint32_t magic;
  uint8_t dtype, rank, swizzle, unused;
  uint64_t address, dims[5], strides[4];
  uint16_t box[5];
};
constexpr uint32_t kMagic = 0x7431a6bd;
static_assert(sizeof(Descriptor) <= sizeof(CUtensorMap));

int bits_of(CUtensorMapDataType type) {
  static int const bits[] = {8, 16, 32, 32, 64, 64, 16, 32, 64, 16, 32, 32, 32, 4, 4, 6};
  return type < 16 ? bits[type] : 8;
}

// The broken rule of cuTensorMapEncodeTiled's documentation (cuda.h), or "". Two of its sentences are not checked: that strides
// grow, since FlashInfer's own descriptor of the output has a last stride of 0, and where the descriptor itself lies, which the
// compiler decides.
std::string broken_rule(CUtensorMapDataType type, unsigned rank, void const* address, cuuint64_t const* dims,
                        cuuint64_t const* strides, cuuint32_t const* box, cuuint32_t const* steps, CUtensorMapInterleave interleave,
                        CUtensorMapSwizzle swizzle) {
  bool const unpacked = type == CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN16B || type == CU_TENSOR_MAP_DATA_TYPE_16U6_ALIGN16B;
  bool const interleaved = interleave == CU_TENSOR_MAP_INTERLEAVE_32B;
  unsigned const alignment = unpacked || interleaved ? 32 : 16;
  std::ostringstream out;
  if (rank < 1 || rank > 5) out << "rank " << rank << " is not 1 to 5";
  else if (interleave != CU_TENSOR_MAP_INTERLEAVE_NONE && rank < 3) out << "interleaved, and rank " << rank << " is less than 3";
  else if ((uintptr_t)address % alignment) out << "address " << address << " is no multiple of " << alignment << " bytes";
  for (unsigned i = 0; i < rank && out.str().empty(); i++) {
    if (dims[i] < 1 || dims[i] > (1ull << 32)) out << "dim " << i << " of " << dims[i] << " is not 1 to 2^32";
    else if (box[i] < 1 || box[i] > 256) out << "box " << i << " of " << box[i] << " is not 1 to 256";
    else if (i && (steps[i] < 1 || steps[i] > 8)) out << "element stride " << i << " of " << steps[i] << " is not 1 to 8";
  }
  for (unsigned i = 0; i + 1 < rank && out.str().empty(); i++) {
    if (strides[i] % alignment) out << "stride " << i << " of " << strides[i] << " bytes is no multiple of " << alignment;
    else if (strides[i] >= (1ull << 40)) out << "stride " << i << " of " << strides[i] << " bytes is not below 2^40";
  }
  if (!out.str().empty()) return out.str();
  unsigned const inner_bytes = box[0] * bits_of(type) / 8;
  unsigned const span = swizzle == CU_TENSOR_MAP_SWIZZLE_32B ? 32 : swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 64 : 128;
  if (unpacked && dims[0] % 128) out << "dim 0 of " << dims[0] << " is no multiple of 128, which unpacking asks for";
  else if (unpacked && box[0] != 128) out << "box 0 of " << box[0] << " is not 128, which unpacking asks for";
  else if (type == CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN8B && dims[0] % 2) out << "dim 0 of " << dims[0] << " is odd";
  else if (interleave == CU_TENSOR_MAP_INTERLEAVE_NONE && inner_bytes % 16) out << "the box has " << inner_bytes << " bytes in dim 0, no multiple of 16";
  else if (interleaved && swizzle != CU_TENSOR_MAP_SWIZZLE_32B) out << "interleaved by 32 bytes, and not swizzled by 32";
  else if (interleave == CU_TENSOR_MAP_INTERLEAVE_NONE && swizzle != CU_TENSOR_MAP_SWIZZLE_NONE && inner_bytes > span)
    out << "the box has " << inner_bytes << " bytes in dim 0, more than the swizzle's " << span;
  return out.str();
}

dim3 pushed_grid, pushed_block;
size_t pushed_shared_memory_bytes;
void* pushed_stream;

cudaError_t launch(void const* function, dim3 grid, dim3 block, void** arguments, size_t shared_memory_bytes, bool pdl) {
  write_launch(host_functions()[function], dimensions(grid.x, grid.y, grid.z), dimensions(block.x, block.y, block.z), 1, pdl,
               shared_memory_bytes, arguments);
  return cudaSuccess;
}

}  // namespace

std::string dry_run_tensor_map(CUtensorMap const& map) {
  auto const& it = reinterpret_cast<Descriptor const&>(map);
  if (it.magic != kMagic) return "null";
  std::ostringstream out;
  out << "{\"dtype\":" << int(it.dtype) << ",\"address\":" << it.address << ",\"dims\":" << list(it.dims, it.rank)
      << ",\"strides_bytes\":" << list(it.strides, it.rank - 1) << ",\"box\":" << list(it.box, it.rank)
      << ",\"swizzle\":" << int(it.swizzle) << "}";
  return out.str();
}

extern "C" {

// ---- for lab.dry_run.machine
void dry_run_set_gpu(int major, int minor, int multiprocessors, int shared_memory_optin_bytes, int multiprocessors_per_gpc, int gpcs) {
  gpu = {major, minor, multiprocessors, shared_memory_optin_bytes, multiprocessors_per_gpc, gpcs};
}
char const* dry_run_log() {
  joined_log = "[";
  for (auto const& line : log_lines) joined_log += (joined_log.size() > 1 ? "," : "") + line;
  return (joined_log += "]").c_str();
}
void dry_run_clear() { log_lines.clear(); }
// What the driver refused since the last call, or "".
char const* dry_run_take_faults() {
  taken_faults.swap(faults);
  faults.clear();
  return taken_faults.c_str();
}
// The launcher writes to std::cerr before it throws what it says: from `begin` to `end` that goes nowhere.
void dry_run_begin_capture() {
  if (!stderr_buffer) stderr_buffer = std::cerr.rdbuf(nullptr);
}
void dry_run_end_capture() {
  if (stderr_buffer) std::cerr.rdbuf(stderr_buffer);
  stderr_buffer = nullptr;
}

// ---- driver
CUresult cuCtxGetDevice(CUdevice* device) { *device = 0; return CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice) { *value = attribute(which); return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult, char const** text) { *text = last_fault.c_str(); return CUDA_SUCCESS; }
CUresult cuGetErrorName(CUresult, char const** text) { *text = last_fault.c_str(); return CUDA_SUCCESS; }
CUresult cuModuleLoadData(CUmodule* module, void const* image) { *module = (CUmodule)image; return CUDA_SUCCESS; }
CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction* function, CUmodule, char const* name) {
  *function = (CUfunction) new Function{name};
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute which, int value) {
  if (which != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES || value <= gpu.shared_memory_optin_bytes) return CUDA_SUCCESS;
  return fault(((Function*)function)->name + " asks for " + std::to_string(value) + " bytes of shared memory, of " +
               std::to_string(gpu.shared_memory_optin_bytes));
}
// A guess: clusters lie within a GPC, a CTA on a multiprocessor.
CUresult cuOccupancyMaxActiveClusters(int* count, CUfunction, CUlaunchConfig const* config) {
  unsigned cluster = 1;
  for (unsigned i = 0; i < config->numAttrs; i++)
    if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) cluster = config->attrs[i].value.clusterDim.x;
  *count = gpu.multiprocessors_per_gpc / cluster * gpu.gpcs;
  return CUDA_SUCCESS;
}
CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address, cuuint64_t const* dims,
                                cuuint64_t const* strides, cuuint32_t const* box, cuuint32_t const* steps,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  std::string const broken = broken_rule(type, rank, address, dims, strides, box, steps, interleave, swizzle);
  if (!broken.empty()) return fault("TMA descriptor: " + broken);
  auto& it = reinterpret_cast<Descriptor&>(*map = CUtensorMap{});
  it = {kMagic, uint8_t(type), uint8_t(rank), uint8_t(swizzle), 0, (uint64_t)address, {}, {}, {}};
  for (unsigned i = 0; i < rank; i++) it.dims[i] = dims[i], it.box[i] = box[i];
  for (unsigned i = 0; i + 1 < rank; i++) it.strides[i] = strides[i];
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(CUlaunchConfig const* config, CUfunction function, void** arguments, void**) {
  unsigned cluster = 1;
  bool pdl = false;
  for (unsigned i = 0; i < config->numAttrs; i++) {
    auto const& each = config->attrs[i];
    if (each.id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) cluster = each.value.clusterDim.x;
    if (each.id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION) pdl = each.value.programmaticStreamSerializationAllowed;
  }
  write_launch(((Function*)function)->name, dimensions(config->gridDimX, config->gridDimY, config->gridDimZ),
               dimensions(config->blockDimX, config->blockDimY, config->blockDimZ), cluster, pdl, config->sharedMemBytes, arguments);
  return CUDA_SUCCESS;
}

// ---- runtime
cudaError_t cudaGetDevice(int* device) { *device = 0; return cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) { *count = 1; return cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) { *value = attribute(which); return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
char const* cudaGetErrorString(cudaError_t) { return last_fault.c_str(); }
char const* cudaGetErrorName(cudaError_t) { return last_fault.c_str(); }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaFuncSetAttribute(void const*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaMemsetAsync(void* address, int value, size_t bytes, cudaStream_t) {
  std::ostringstream out;
  out << "\"address\":" << (uint64_t)address << ",\"value\":" << value << ",\"size_bytes\":" << bytes;
  write("fill", out.str());
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, void const* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  std::ostringstream out;
  out << "\"to\":" << (uint64_t)to << ",\"source\":" << (uint64_t)from << ",\"size_bytes\":" << bytes;
  write("copy", out.str());
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, void const*, int, size_t, unsigned) {
  *count = 1;
  return cudaSuccess;
}
void** __cudaRegisterFatBinary(void*) { static void* handle; return &handle; }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, char const* host, char*, char const* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
  host_functions()[host] = name;
}
void __cudaRegisterVar(void**, char*, char*, char const*, int, size_t, int, int) {}
char __cudaInitModule(void**) { return 1; }
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_memory_bytes, void* stream) {
  pushed_grid = grid, pushed_block = block, pushed_shared_memory_bytes = shared_memory_bytes, pushed_stream = stream;
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_memory_bytes, void* stream) {
  *grid = pushed_grid, *block = pushed_block, *shared_memory_bytes = pushed_shared_memory_bytes, *(void**)stream = pushed_stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, void const* function) { *kernel = (cudaKernel_t)function; return cudaSuccess; }
cudaError_t __cudaLaunchKernel(cudaKernel_t function, dim3 grid, dim3 block, void** arguments, size_t shared_memory_bytes, cudaStream_t) {
  return launch((void const*)function, grid, block, arguments, shared_memory_bytes, false);
}
cudaError_t cudaLaunchKernel(void const* function, dim3 grid, dim3 block, void** arguments, size_t shared_memory_bytes, cudaStream_t) {
  return launch(function, grid, block, arguments, shared_memory_bytes, false);
}
cudaError_t cudaLaunchKernelExC(cudaLaunchConfig_t const* config, void const* function, void** arguments) {
  bool pdl = false;
  for (unsigned i = 0; i < config->numAttrs; i++)
    if (config->attrs[i].id == cudaLaunchAttributeProgrammaticStreamSerialization) pdl = config->attrs[i].val.programmaticStreamSerializationAllowed;
  return launch(function, config->gridDim, config->blockDim, arguments, config->dynamicSmemBytes, pdl);
}

}  // extern "C"
