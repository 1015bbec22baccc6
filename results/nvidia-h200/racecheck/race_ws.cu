// Small kernels that hand values between warps through shared memory, for `compute-sanitizer --tool racecheck`.
// Do right kernels of the shape that Triton's warp specialisation compiles to get reports of hazards?
// Each kernel runs one block of 256 threads. Warps 0..3 are the default warps, warps 4..7 the worker warps.
// Build: nvcc -gencode arch=compute_90a,code=sm_90a -lineinfo -o race_ws race_ws.cu
// (-arch=sm_90a of nvcc 13.0 also builds compute_90, which lacks setmaxnreg.)  Run: ./race_ws VARIANT | all | list
//
// hb(X) in the comments: the order that barrier X makes. What a thread did before it arrived at X happens before what
// any thread that waited at X does after it. Program order and hb of several barriers chain (PTX: causality order).
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>
#ifndef EMULATED  // A run on a CPU defines these itself.
#include <cuda_runtime.h>
// Waits at barrier ID for N threads, as Triton's barriers of the default warps do.
#define BAR(ID, N) bar<ID, N>()
template <int ID, int N> __device__ __forceinline__ void bar() {
  asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(N) : "memory");
}
// Waits at barrier ID for all threads of the block, without a count, as Triton's handover does at barrier 1.
#define BAR_ALL(ID) bar_all<ID>()
template <int ID> __device__ __forceinline__ void bar_all() { asm volatile("barrier.sync %0;" ::"n"(ID) : "memory"); }
// Moves registers between the warps: OP is inc or dec.
#define REGS(OP, N) regs_##OP<N>()
template <int N> __device__ __forceinline__ void regs_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N) : "memory");
}
template <int N> __device__ __forceinline__ void regs_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N) : "memory");
}
// Keeps the compiler from moving or merging memory accesses; it is no instruction.
#define COMPILER_FENCE() asm volatile("" ::: "memory")
// Reads a word where the source says so: the compiler may not read it for other threads, too.
#define READ(WORD) (*(const volatile int*)&(WORD))
#define REG_KERNEL __global__ void __maxnreg__(128)
typedef unsigned long long Mbarrier;
__device__ __forceinline__ unsigned address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void mbarrier_init(Mbarrier* m, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(m)), "r"(count) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(Mbarrier* m) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(m)) : "memory");
}
__device__ __forceinline__ void mbarrier_wait(Mbarrier* m, int parity) {
  unsigned done;
  do {
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done) : "r"(address(m)), "r"(parity) : "memory");
  } while (!done);
}
#endif

constexpr int ROUNDS = 3;
// in[0..127]: the terms of the sum. in[128 + round]: the sum times round + 1.
// A right kernel stores to out[round * 256 + t] the sum times round + 1, plus t % 4 for worker threads.

// 0. RACES: no barrier between the write of thread 0 and the reads of the workers.
__global__ void v0_racing(const int* in, int* out) {
  __shared__ int s[4];
  int t = threadIdx.x;
  if (t == 0) s[0] = in[128];
  COMPILER_FENCE();
  out[t] = t < 128 ? in[128] : s[0] + t % 4;
}

// 1. Right: write of thread 0 -> hb(1) -> reads of the workers. One barrier, of all threads.
__global__ void v1_handover(const int* in, int* out) {
  __shared__ int s[4];
  int t = threadIdx.x;
  if (t == 0) s[0] = in[128];
  BAR_ALL(1);
  out[t] = t < 128 ? in[128] : s[0] + t % 4;
}

// 2. Right: barrier 1 alone, three times a round, in the same order for all warps. Thread 0 writes the value and the
// workers' states -> hb(1: start) -> workers read both -> hb(1: have read) and hb(1: join) -> thread 0 writes again.
REG_KERNEL v2_handover_loop_setmaxnreg(const int* in, int* out) {
  __shared__ int value;
  __shared__ unsigned char state[4];
  int t = threadIdx.x, round = 0;
  if (t < 128) {
    for (; round < ROUNDS; round++) {
      if (t == 0) value = in[128 + round];
      if (t < 4) state[t] = 0;  // 0: work
      BAR_ALL(1), REGS(inc, 208);
      BAR_ALL(1), out[round * 256 + t] = in[128 + round];
      BAR_ALL(1), REGS(dec, 128);
    }
    if (t < 4) state[t] = 1;  // 1: end
    BAR_ALL(1);
    return;
  }
  for (BAR_ALL(1); state[t / 32 - 4] == 0; BAR_ALL(1), round++) {
    REGS(dec, 40);
    int got = value;
    BAR_ALL(1), out[round * 256 + t] = got + t % 4;
    BAR_ALL(1), REGS(inc, 128);
  }
}

// 3 (A). Right: the reduction's words r and the handover's words s are different ones.
// r: partial sums -> hb(2) -> reads of the default warps, the only other accesses. s: as in variant 1.
__global__ void v3_A_disjoint_memory(const int* in, int* out) {
  __shared__ int r[4], s[4];
  int t = threadIdx.x, lane = t % 32, sum = 0;
  if (t < 128) {
    sum = __reduce_add_sync(~0u, in[t]);
    if (lane == 0) r[t / 32] = sum;
    BAR(2, 128);
    sum = __reduce_add_sync(~0u, lane < 4 ? r[lane] : 0);
    BAR(2, 128);
    if (t / 4 == 8) s[t % 4] = sum + t % 4;  // Lanes 0..3 of warp 1 write.
  }
  BAR_ALL(1);
  out[t] = t < 128 ? sum : s[t % 4];
}

// 4 (B). Right: all threads meet at barrier 1 between each two steps: partial sums | sums read | handover | reads.
__global__ void v4_B_same_memory_one_barrier(const int* in, int* out) {
  __shared__ int s[4];
  int t = threadIdx.x, lane = t % 32;
  int sum = __reduce_add_sync(~0u, in[t % 128]);
  if (t < 128 && lane == 0) s[t / 32] = sum;
  BAR_ALL(1);
  if (t < 128) sum = __reduce_add_sync(~0u, lane < 4 ? s[lane] : 0);
  BAR_ALL(1);
  if (t / 4 == 8) s[t % 4] = sum + t % 4;
  BAR_ALL(1);
  out[t] = t < 128 ? sum : s[t % 4];
}

// 5 (C). THE CASE. Right: partial sums -> hb(2) -> reads of the default warps -> hb(2) -> writes of warp 1 to the same
// words -> hb(1) -> reads of the workers. The workers touch s after barrier 1 alone, which all 256 threads join, so
// that program order and barrier 1 already put each access of the default warps before each of the workers.
__global__ void v5_C_same_memory_two_barriers(const int* in, int* out) {
  __shared__ int s[4];
  int t = threadIdx.x, lane = t % 32, sum = 0;
  if (t < 128) {
    sum = __reduce_add_sync(~0u, in[t]);
    if (lane == 0) s[t / 32] = sum;
    BAR(2, 128);
    sum = __reduce_add_sync(~0u, lane < 4 ? s[lane] : 0);
    BAR(2, 128);
    if (t / 4 == 8) s[t % 4] = sum + t % 4;
  }
  BAR_ALL(1);
  out[t] = t < 128 ? sum : s[t % 4];
}

// 6 (D). Right: as variant 5, and __syncthreads (barrier 0, all threads) between the reduction and the handover.
__global__ void v6_D_syncthreads_between(const int* in, int* out) {
  __shared__ int s[4];
  int t = threadIdx.x, lane = t % 32, sum = 0;
  if (t < 128) {
    sum = __reduce_add_sync(~0u, in[t]);
    if (lane == 0) s[t / 32] = sum;
    BAR(2, 128);
    sum = __reduce_add_sync(~0u, lane < 4 ? s[lane] : 0);
    BAR(2, 128);
  }
  __syncthreads();
  if (t / 4 == 8) s[t % 4] = sum + t % 4;
  BAR_ALL(1);
  out[t] = t < 128 ? sum : s[t % 4];
}

// 7 (E). Right: as variant 5 with an mbarrier in place of barrier 1: all 128 default threads arrive after their last
// access to s (release), the workers wait for that phase (acquire). __syncthreads orders the mbarrier's init.
__global__ void v7_E_mbarrier_handover(const int* in, int* out) {
  __shared__ int s[4];
  __shared__ Mbarrier full;
  int t = threadIdx.x, lane = t % 32, sum = 0;
  if (t == 0) mbarrier_init(&full, 128);
  __syncthreads();
  if (t < 128) {
    sum = __reduce_add_sync(~0u, in[t]);
    if (lane == 0) s[t / 32] = sum;
    BAR(2, 128);
    sum = __reduce_add_sync(~0u, lane < 4 ? s[lane] : 0);
    BAR(2, 128);
    if (t / 4 == 8) s[t % 4] = sum + t % 4;
    mbarrier_arrive(&full);
  } else {
    mbarrier_wait(&full, 0);
  }
  out[t] = t < 128 ? sum : s[t % 4];
}

// 8. The shape that Triton 3.7.1 compiles gl.sum and gl.warp_specialize to: barrier 0 of the default warps, count-less
// barrier 1, states in bytes. Right in value: order as in variant 5. The 128 default threads write the captured sum and
// the states at once, all the same value; these writes are not ordered among each other, as in Triton's own code.
REG_KERNEL v8_triton_shape(const int* in, int* out) {
  __shared__ struct { int capture[4]; unsigned state; } s;  // state: one byte for each worker warp
  int t = threadIdx.x;
  if (t < 128) {
    int sum = __reduce_add_sync(~0u, in[t]);
    if (t % 32 == 0) s.capture[t / 32] = sum;
    BAR(0, 128);
    sum = __reduce_add_sync(~0u, t < 4 ? s.capture[t] : 0);
    if (t == 0) s.capture[0] = sum;  // Thread 0 alone read this word since barrier 0.
    BAR(0, 128), sum = s.capture[0];
    BAR(0, 128);
    s.state = 0, s.capture[0] = sum;
    BAR_ALL(1), REGS(inc, 208);
    BAR_ALL(1), out[t] = sum;
    BAR_ALL(1), REGS(dec, 128);
    s.state = 0x01010101;
    return BAR_ALL(1);
  }
  for (BAR_ALL(1); ((volatile unsigned char*)&s.state)[t / 32 - 4] == 0; BAR_ALL(1)) {
    REGS(dec, 40);
    int got = s.capture[0];
    BAR_ALL(1), out[t] = got + t % 4;
    BAR_ALL(1), REGS(inc, 128);
  }
}

// Pinpoints: what of variants 5 and 8 is needed for a report?

// 9. Right: as variant 5, but all 256 threads join barrier 2, too. Two barrier numbers, one set of threads.
__global__ void v9_two_barriers_of_all(const int* in, int* out) {
  __shared__ int s[4];
  int t = threadIdx.x, lane = t % 32;
  int sum = __reduce_add_sync(~0u, in[t % 128]);
  if (t < 128 && lane == 0) s[t / 32] = sum;
  BAR(2, 256);
  if (t < 128) sum = __reduce_add_sync(~0u, lane < 4 ? s[lane] : 0);
  BAR(2, 256);
  if (t / 4 == 8) s[t % 4] = sum + t % 4;
  BAR_ALL(1);
  out[t] = t < 128 ? sum : s[t % 4];
}

// 10. Right: one write, no rewrite. Thread 0 writes -> hb(2) -> reads of the default warps; thread 0 joins barrier 1,
// too: its write -> hb(1) -> reads of the workers.
__global__ void v10_one_write_two_barriers(const int* in, int* out) {
  __shared__ int s[4];
  int t = threadIdx.x, sum = 0;
  if (t < 128) {
    if (t == 0) s[0] = in[128];
    BAR(2, 128);
    sum = s[0];
  }
  BAR_ALL(1);
  out[t] = t < 128 ? sum : READ(s[0]) + t % 4;
}

// 11. Right: as variant 5, but thread 0 writes the sum to s[0] alone, the word whose partial sum it wrote.
__global__ void v11_same_writer(const int* in, int* out) {
  __shared__ int s[4];
  int t = threadIdx.x, lane = t % 32, sum = 0;
  if (t < 128) {
    sum = __reduce_add_sync(~0u, in[t]);
    if (lane == 0) s[t / 32] = sum;
    BAR(2, 128);
    sum = __reduce_add_sync(~0u, lane < 4 ? s[lane] : 0);
    BAR(2, 128);
    if (t == 0) s[0] = sum;
  }
  BAR_ALL(1);
  out[t] = t < 128 ? sum : READ(s[0]) + t % 4;
}

// 12. Right, a true chain of two barriers: warp 0 writes -> hb(2) -> warps 1..3 -> hb(1) -> reads of the workers.
// Warp 0 does not join barrier 1 (224 threads: warps 1..7), so that neither barrier alone orders write and reads.
__global__ void v12_chain(const int* in, int* out) {
  __shared__ int s[4];
  int t = threadIdx.x;
  if (t == 0) s[0] = in[128];
  if (t < 128) BAR(2, 128);
  if (t >= 32) BAR(1, 224);
  out[t] = t < 128 ? in[128] : s[0] + t % 4;
}

// 13. RACES: variant 5 without its second barrier 2: warp 1 overwrites words that warps 0, 2, 3 may not have read yet.
__global__ void v13_racing_case(const int* in, int* out) {
  __shared__ int s[4];
  int t = threadIdx.x, lane = t % 32, sum = 0;
  if (t < 128) {
    sum = __reduce_add_sync(~0u, in[t]);
    if (lane == 0) s[t / 32] = sum;
    BAR(2, 128);
    sum = __reduce_add_sync(~0u, lane < 4 ? s[lane] : 0);
    COMPILER_FENCE();
    if (t / 4 == 8) s[t % 4] = sum + t % 4;
  }
  BAR_ALL(1);
  out[t] = t < 128 ? sum : s[t % 4];
}

// 14. Right in value: as variant 1, but all 128 default threads write the same value at once, as Triton's code does.
// These writes are not ordered among each other; each of them -> hb(1) -> reads of the workers.
__global__ void v14_all_write_same_value(const int* in, int* out) {
  __shared__ int s[4];
  int t = threadIdx.x;
  if (t < 128) s[0] = in[128];
  BAR_ALL(1);
  out[t] = t < 128 ? in[128] : s[0] + t % 4;
}

// 15. Right: variant 8 with one writer of each word at a time (thread 0): no unordered writes are left.
REG_KERNEL v15_triton_shape_one_writer(const int* in, int* out) {
  __shared__ struct { int capture[4]; unsigned state; } s;  // state: one byte for each worker warp
  int t = threadIdx.x;
  if (t < 128) {
    int sum = __reduce_add_sync(~0u, in[t]);
    if (t % 32 == 0) s.capture[t / 32] = sum;
    BAR(0, 128);
    sum = __reduce_add_sync(~0u, t < 4 ? s.capture[t] : 0);
    if (t == 0) s.capture[0] = sum;  // Thread 0 alone read this word since barrier 0.
    BAR(0, 128), sum = s.capture[0];
    BAR(0, 128);
    if (t == 0) s.state = 0, s.capture[0] = sum;
    BAR_ALL(1), REGS(inc, 208);
    BAR_ALL(1), out[t] = sum;
    BAR_ALL(1), REGS(dec, 128);
    if (t == 0) s.state = 0x01010101;
    return BAR_ALL(1);
  }
  for (BAR_ALL(1); ((volatile unsigned char*)&s.state)[t / 32 - 4] == 0; BAR_ALL(1)) {
    REGS(dec, 40);
    int got = s.capture[0];
    BAR_ALL(1), out[t] = got + t % 4;
    BAR_ALL(1), REGS(inc, 128);
  }
}

struct Variant {
  const char* name;
  void (*kernel)(const int*, int*);
  int rounds;
  bool races;
};
const Variant VARIANTS[] = {
    {"v0_racing", v0_racing, 1, true},
    {"v1_handover", v1_handover, 1, false},
    {"v2_handover_loop_setmaxnreg", v2_handover_loop_setmaxnreg, ROUNDS, false},
    {"v3_A_disjoint_memory", v3_A_disjoint_memory, 1, false},
    {"v4_B_same_memory_one_barrier", v4_B_same_memory_one_barrier, 1, false},
    {"v5_C_same_memory_two_barriers", v5_C_same_memory_two_barriers, 1, false},
    {"v6_D_syncthreads_between", v6_D_syncthreads_between, 1, false},
    {"v7_E_mbarrier_handover", v7_E_mbarrier_handover, 1, false},
    {"v8_triton_shape", v8_triton_shape, 1, false},
    {"v9_two_barriers_of_all", v9_two_barriers_of_all, 1, false},
    {"v10_one_write_two_barriers", v10_one_write_two_barriers, 1, false},
    {"v11_same_writer", v11_same_writer, 1, false},
    {"v12_chain", v12_chain, 1, false},
    {"v13_racing_case", v13_racing_case, 1, true},
    {"v14_all_write_same_value", v14_all_write_same_value, 1, false},
    {"v15_triton_shape_one_writer", v15_triton_shape_one_writer, 1, false},
};
constexpr int COUNT = sizeof(VARIANTS) / sizeof(*VARIANTS);

#ifndef EMULATED
// Runs one variant and compares with the host's sum: 0 right, 1 wrong, 2 a CUDA error.
int run(int number, const Variant& v) {
  std::vector<int> in(128 + ROUNDS), out(ROUNDS * 256, -1);
  int sum = 0, wrong = 0;
  for (int i = 0; i < 128; i++) sum += in[i] = (i * 7919 + 13) % 1009;
  for (int round = 0; round < ROUNDS; round++) in[128 + round] = sum * (round + 1);
  int *in_gpu = nullptr, *out_gpu = nullptr;
  cudaMalloc(&in_gpu, in.size() * sizeof(int));
  cudaMalloc(&out_gpu, out.size() * sizeof(int));
  cudaMemcpy(in_gpu, in.data(), in.size() * sizeof(int), cudaMemcpyHostToDevice);
  cudaMemcpy(out_gpu, out.data(), out.size() * sizeof(int), cudaMemcpyHostToDevice);
  v.kernel<<<1, 256>>>(in_gpu, out_gpu);
  cudaError_t launched = cudaGetLastError();
  cudaMemcpy(out.data(), out_gpu, out.size() * sizeof(int), cudaMemcpyDeviceToHost);
  cudaError_t error = launched != cudaSuccess ? launched : cudaGetLastError();
  for (int i = 0; i < v.rounds * 256; i++) wrong += out[i] != sum * (i / 256 + 1) + (i % 256 < 128 ? 0 : i % 4);
  cudaFree(in_gpu), cudaFree(out_gpu);
  const char* result = error != cudaSuccess ? cudaGetErrorString(error) : wrong ? "wrong" : "right";
  printf("RESULT %d %s %s%s (%d of %d values differ)\n", number, v.name, result, v.races ? " [races]" : "", wrong,
         v.rounds * 256);
  fflush(stdout);
  return error != cudaSuccess ? 2 : wrong != 0;
}

int main(int argc, char** argv) {
  if (argc == 2 && !strcmp(argv[1], "list")) {
    for (int i = 0; i < COUNT; i++) printf("%d %s\n", i, VARIANTS[i].name);
    return 0;
  }
  if (argc == 2 && !strcmp(argv[1], "all")) {
    int worst = 0;
    for (int i = 0; i < COUNT; i++) {
      int code = run(i, VARIANTS[i]);
      if (!VARIANTS[i].races && code > worst) worst = code;
    }
    return worst;
  }
  int number = argc == 2 ? atoi(argv[1]) : -1;
  if (number < 0 || number >= COUNT) return fprintf(stderr, "usage: race_ws 0..%d | all | list\n", COUNT - 1), 2;
  return run(number, VARIANTS[number]);
}
#endif
