// Kernels with a fault each, and the same without: what the harness is to catch, and what not.
//
// planted planted|right KERNEL...: prints each one's results, or what was wrong.

#include <cstdio>
#include <exception>
#include <map>
#include <string>
#include <vector>

#include "launch.cuh"

namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr unsigned kAll = 0xffffffff;

struct Call {
  float* out;       // (kThreads,)
  const float* in;  // (kThreads,), aligned to 16 bytes
  bool planted;
};

__global__ void global_bounds(Call c) { c.out[threadIdx.x + c.planted] = c.in[threadIdx.x]; }

__global__ void static_shared_bounds(Call c) {
  __shared__ float all[kThreads];
  float* volatile from = all;  // or g++ would see it, without red zones
  from[threadIdx.x + c.planted] = 1;
  __syncthreads();
  c.out[threadIdx.x] = all[kThreads - 1];
}

__global__ void dynamic_shared_bounds(Call c) {
  float* all = ppokern::dynamic_shared<float>();
  all[threadIdx.x + c.planted] = 1;
  __syncthreads();
  c.out[threadIdx.x] = all[kThreads - 1];
}

__global__ void misaligned_vector(Call c) {
  if (threadIdx.x >= 31) return;
  const float4 x = *reinterpret_cast<const float4*>(c.in + 4 * threadIdx.x + c.planted);
  c.out[threadIdx.x] = x.x + x.w;
}

__global__ void misaligned_store(Call c) {
  if (threadIdx.x >= 31) return;
  *reinterpret_cast<float2*>(c.out + 4 * threadIdx.x + c.planted) = make_float2(1, 2);
}

__global__ void misaligned_load(Call c) {
  if (threadIdx.x >= 31) return;
  const float4 x = __ldg(reinterpret_cast<const float4*>(c.in + 4 * threadIdx.x + c.planted));
  c.out[threadIdx.x] = x.x + x.w;
}

// Each thread reads what one of another warp wrote.
__global__ void missing_barrier(Call c) {
  __shared__ float all[kThreads];
  all[threadIdx.x] = threadIdx.x;
  if (!c.planted) __syncthreads();
  c.out[threadIdx.x] = all[kThreads - 1 - threadIdx.x];
}

// Each warp reads what the one before it wrote: in ascending order nothing is missing.
__global__ void missing_barrier_one_way(Call c) {
  __shared__ float all[kThreads];
  all[threadIdx.x] = threadIdx.x;
  if (!c.planted) __syncthreads();
  c.out[threadIdx.x] = all[threadIdx.x / 64 * 32];
}

// The same within a warp.
__global__ void missing_warp_barrier(Call c) {
  __shared__ float all[kThreads];
  all[threadIdx.x] = threadIdx.x;
  if (!c.planted) __syncwarp();
  c.out[threadIdx.x] = all[threadIdx.x & ~1];
}

// The barrier before a buffer is used again.
__global__ void missing_second_barrier(Call c) {
  __shared__ float of_warp[kWarps];
  for (int i = 0; i < 2; ++i) {
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = i;
    __syncthreads();
    const float sum = of_warp[0] + of_warp[kWarps - 1];
    if (!c.planted) __syncthreads();
    c.out[threadIdx.x] = i ? c.out[threadIdx.x] + sum : 10 * sum;
  }
}

__global__ void ended_before_barrier(Call c) {
  if (c.planted && threadIdx.x >= 100) return;
  __syncthreads();
  c.out[threadIdx.x] = 1;
}

__global__ void barriers_apart(Call c) {
  int all = kThreads;
  if (c.planted && threadIdx.x < 32) {
    __syncthreads();
  } else {
    all = __syncthreads_count(1);
  }
  c.out[threadIdx.x] = all;
}

__global__ void barrier_in_a_branch(Call c) {
  float x = 1;
  if (threadIdx.x % 32 < 16) {
    x = __shfl_xor_sync(c.planted ? kAll : 0xffffu, x, 1);
  } else if (c.planted) {
    __syncthreads();
  }
  c.out[threadIdx.x] = x;
}

__global__ void absent_lane(Call c) {
  if (c.planted && threadIdx.x == 77) return;
  c.out[threadIdx.x] = __shfl_down_sync(kAll, c.in[threadIdx.x], 1);
}

__global__ void partial_warp(Call c) {
  const unsigned mask = threadIdx.x < 96 || c.planted ? kAll : 0xfu;
  c.out[threadIdx.x] = __shfl_xor_sync(mask, c.in[threadIdx.x], 1);
}

__global__ void lane_outside_mask(Call c) {
  if (threadIdx.x >= 16) return;
  c.out[threadIdx.x] = __shfl_sync(0xffffu, c.in[threadIdx.x], c.planted ? 16 : 15);
}

__global__ void caller_outside_mask(Call c) {
  if (threadIdx.x < 16) c.out[threadIdx.x] = __any_sync(c.planted ? 0xff : 0xffff, 1);
}

__global__ void unwritten_shared(Call c) {
  __shared__ float all[kThreads];
  float* more = ppokern::dynamic_shared<float>();
  if (!c.planted) all[threadIdx.x] = more[threadIdx.x] = 1;
  c.out[threadIdx.x] = all[threadIdx.x] + more[threadIdx.x];
  all[threadIdx.x] = more[threadIdx.x] = 1;
}

__global__ void nothing(Call) {}

// All that is there, used as it should be.
__global__ void everything(Call c) {
  const int i = threadIdx.x, lane = i % 32;
  __shared__ unsigned count;
  if (i == 0) count = 0;
  __syncthreads();
  float sum = i;
  for (int bits = 16; bits; bits /= 2) sum += __shfl_xor_sync(kAll, sum, bits);
  bool right = sum == 31 * 16 + 32 * (i - lane);
  right &= __shfl_down_sync(kAll, static_cast<double>(i), 1) == (lane == 31 ? i : i + 1);
  right &= __shfl_up_sync(kAll, i, 2) == (lane < 2 ? i : i - 2);
  right &= __shfl_sync(kAll, i, 3) == i - lane + 3;
  right &= __shfl_xor_sync(kAll, i, 4, 8) == (i ^ 4) &&
           __shfl_xor_sync(kAll, i, 8, 8) == (i & 8 ? i ^ 8 : i);
  right &= __shfl_down_sync(kAll, i, 5, 8) == (i % 8 < 3 ? i + 5 : i);
  right &= __ballot_sync(kAll, lane < 3) == 7 && __any_sync(kAll, lane == 5) != 0;
  right &= __all_sync(kAll, lane == 5) == 0 && __all_sync(kAll, lane < 32) != 0;
  if (lane < 4) right &= __ballot_sync(0xf, lane & 1) == 10;
  atomicAdd(&count, 2u);
  __syncwarp();
  right &= __syncthreads_count(i % 3 == 0) == (kThreads + 2) / 3;
  right &= __syncthreads_or(i == 7) && !__syncthreads_or(0);
  right &= !__syncthreads_and(i != 7) && __syncthreads_and(1);
  if (i == 3) {
    right &= count == 2 * kThreads && atomicCAS(&count, 1, 7) == 2 * kThreads;
    right &= atomicCAS(&count, 2 * kThreads, 7) == 2 * kThreads && count == 7;
  }
  right &= blockDim.x == kThreads && gridDim.x == 1;
  c.out[i] = right;
}

// Blocks take numbers; the last one through adds up what the others left, in the order of numbers.
__device__ unsigned tickets = 0, finished = 0;
__device__ float of_block[8];

__global__ void last_block(Call c) {
  __shared__ unsigned mine;
  __shared__ bool last;
  if (threadIdx.x == 0) {
    mine = atomicInc(&tickets, gridDim.x - 1);
    of_block[mine] = static_cast<float>(mine);
    __threadfence();
    last = atomicInc(&finished, gridDim.x - 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (last) {
    float sum = 0;
    for (unsigned i = 0; i < gridDim.x; ++i) sum += of_block[i];
    c.out[threadIdx.x] = sum;
  }
}

template <auto kKernel, int kThreads_ = kThreads, int kShared = 0, int kBlocks = 1>
void start(const Call& call) {
  ppokern::launch<kKernel>(kBlocks, kThreads_, kShared, nullptr, call);
}

void too_many_threads(const Call& call) {
  ppokern::launch<nothing>(1, call.planted ? 1025 : 1024, 0, nullptr, call);
}

void no_threads(const Call& call) {
  ppokern::launch<nothing>(1, call.planted ? 0 : 1, 0, nullptr, call);
}

void too_much_shared(const Call& call) {
  ppokern::launch<nothing>(1, 1, (48 << 10) + call.planted, nullptr, call);
}

const std::map<std::string, void (*)(const Call&)> kCases = {
    {"global_bounds", start<global_bounds>},
    {"static_shared_bounds", start<static_shared_bounds>},
    {"dynamic_shared_bounds", start<dynamic_shared_bounds, kThreads, kThreads * sizeof(float)>},
    {"misaligned_vector", start<misaligned_vector>},
    {"misaligned_load", start<misaligned_load>},
    {"misaligned_store", start<misaligned_store>},
    {"missing_barrier", start<missing_barrier>},
    {"missing_barrier_one_way", start<missing_barrier_one_way>},
    {"missing_warp_barrier", start<missing_warp_barrier>},
    {"missing_second_barrier", start<missing_second_barrier>},
    {"ended_before_barrier", start<ended_before_barrier>},
    {"barriers_apart", start<barriers_apart>},
    {"barrier_in_a_branch", start<barrier_in_a_branch>},
    {"absent_lane", start<absent_lane>},
    {"partial_warp", start<partial_warp, 100>},
    {"lane_outside_mask", start<lane_outside_mask>},
    {"caller_outside_mask", start<caller_outside_mask>},
    {"unwritten_shared", start<unwritten_shared, kThreads, kThreads * sizeof(float)>},
    {"too_many_threads", too_many_threads},
    {"no_threads", no_threads},
    {"too_much_shared", too_much_shared},
    {"everything", start<everything>},
    {"last_block", start<last_block, kThreads, 0, 8>},
};

}  // namespace

int main(int, char** words) {
  const bool planted = words[1] == std::string("planted");
  for (words += 2; *words; ++words) {
    std::vector<float> in(kThreads, 1), out(kThreads, 0);
    try {
      kCases.at (*words)({out.data(), in.data(), planted});
    } catch (const std::exception& error) {
      std::printf("%s\n", error.what());
      return 1;
    }
    for (const float x : out) std::printf("%g ", x);
    std::printf("\n");
  }
}
