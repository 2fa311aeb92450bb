// Generalised advantage estimation on CUDA, in one launch for every layout.
//
// Moves 16 bytes per element (rewards and values in, advantages and returns out), 1 more for each
// of mask, bootstrap and continues, 4 more for next_values.
//
// The recursion is a composition of affine maps. Each thread of a team takes neighbouring steps of
// a sequence and composes theirs; the team scans those of its threads, from the end backwards, and
// goes on to the tile before. Long rows have a block as their team, shorter ones a warp or part of
// one. Where sequences lie side by side in memory, the lanes of a warp walk along sequences of
// their own, and a team has one lane of each warp. Maps are in double precision: a scan adds up
// what the recursion does not, and is not to overflow or round where that would not. Its order
// depends on sizes and on where the results lie (packed, on the mean length), so that a sequence
// among others is the same as alone to the rounding of doubles.

#include <algorithm>
#include <cstdint>
#include <limits>

#include "gae/gae.h"
#include "launch.cuh"

#define PPOKERN_ISA cuda
#include "token_math.h"

namespace ppokern::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kCheckers = 1024;
constexpr int kResident = 4;  // blocks of a multiprocessor
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr int kSteps = 4;  // that a thread takes at a time, at once where they lie so

// Some steps as seen from before them: A = delta + decay * (A of the step behind them).
struct Map {
  double decay = 1, delta = 0;

  __device__ Map over(const Map& behind) const {
    return {decay * behind.decay, gae_step(delta, decay, behind.delta)};
  }

  __device__ Map shuffled(unsigned mask, int lane) const {
    return {__shfl_sync(mask, decay, lane), __shfl_sync(mask, delta, lane)};
  }
};

// The same for what the delta of a step needs to know of those behind it.
struct Behind {
  bool unmasked = false;  // there is a transition
  bool counts = false;    // masked, these are steps of value 0 before any transition
  float value = 0;        // of the nearest step

  __device__ Behind over(const Behind& behind) const {
    const bool passed = !unmasked && !(counts && behind.unmasked);
    return {unmasked || behind.unmasked, counts || behind.counts, passed ? behind.value : value};
  }

  __device__ Behind shuffled(unsigned mask, int lane) const {
    const int flags = __shfl_sync(mask, 2 * unmasked + counts, lane);
    return {(flags & 2) != 0, (flags & 1) != 0, __shfl_sync(mask, value, lane)};
  }
};

// The threads that share a sequence: kLanes neighbouring ones of each of kTeamWarps warps.
template <int kLanes_, int kTeamWarps_>
struct Team {
  static constexpr int kLanes = kLanes_, kTeamWarps = kTeamWarps_;
  static constexpr int kOfWarp = 32 / kLanes;  // teams that share a warp
  static constexpr int kOfBlock = kOfWarp * kWarps / kTeamWarps;
  static constexpr int kTile = kLanes * kTeamWarps * kSteps;

  const int lane = threadIdx.x % kLanes;
  const int first_lane = threadIdx.x % 32 - lane;
  const unsigned mask = (kLanes == 32 ? ~0u : (1u << kLanes % 32) - 1) << first_lane;
  const int warp = threadIdx.x / 32 % kTeamWarps;
  const int first_warp = kTeamWarps == kWarps ? 0 : threadIdx.x / 32 - warp;

  __device__ int64_t sequence() const {
    return int64_t{blockIdx.x} * kOfBlock + first_warp / kTeamWarps * kOfWarp + first_lane / kLanes;
  }

  // The first of a thread's steps, in the tile that begins at a step.
  __device__ int64_t first_step(int64_t tile) const {
    return tile + (warp * kLanes + lane) * kSteps;
  }

  // Returns what lies behind a thread's own part of a tile. `behind` is what lies behind the tile,
  // and becomes what lies behind the next one.
  template <class Part>
  __device__ Part scan(const Part& own, Part& behind, Part (&of_warps)[kWarps][kOfWarp]) const {
    Part from_here = own;
    for (int apart = 1; apart < kLanes; apart *= 2) {
      const bool inside = lane + apart < kLanes;
      const Part other = from_here.shuffled(mask, first_lane + lane + (inside ? apart : 0));
      if (inside) from_here = from_here.over(other);
    }
    Part after;
    if (kLanes > 1) {
      const bool inside = lane + 1 < kLanes;
      const Part other = from_here.shuffled(mask, first_lane + lane + inside);
      if (inside) after = other;
    }
    if (kTeamWarps == 1) {
      const Part result = after.over(behind);
      behind = from_here.shuffled(mask, first_lane).over(behind);
      return result;
    }
    Part* const mine = &of_warps[first_warp][first_lane / kLanes];
    if (lane == 0) mine[warp * kOfWarp] = from_here;
    __syncthreads();
    Part behind_warp;
    for (int i = kTeamWarps; i-- > 0;) {
      if (i == warp) behind_warp = behind;
      behind = mine[i * kOfWarp].over(behind);
    }
    return after.over(behind_warp);
  }
};

// A thread's steps of a tensor.
template <class T>
struct alignas(kSteps * sizeof(T)) Steps {
  T at[kSteps];
};

// Where a thread's steps are: those from `first` on, of which the sequence has [low, high).
struct Place {
  int64_t row, first;
  int low, high;

  __device__ Place(int64_t row, int64_t first, int64_t begin, int64_t end)
      : row(row), first(first), low(clamped(begin - first)), high(clamped(end - first)) {}

  __device__ static int clamped(int64_t step) {
    return step > 0 ? static_cast<int>(min(step, int64_t{kSteps})) : 0;
  }

  __device__ bool has(int k) const { return low <= k && k < high; }

  template <class T>
  __device__ bool is_one_access(const View<T>& view, T* at) const {
    return view.step_stride == 1 && reinterpret_cast<uintptr_t>(at) % sizeof(Steps<T>) == 0 &&
           low == 0 && high == kSteps;
  }

  // The others become `filler`.
  template <class T>
  __device__ Steps<T> load(const View<const T>& view, T filler) const {
    Steps<T> all = {filler, filler, filler, filler};
    if (view.data == nullptr) return all;
    const T* const at = view.at(row, first);
    if (is_one_access(view, at)) return *reinterpret_cast<const Steps<T>*>(at);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      if (has(k)) all.at[k] = at[k * view.step_stride];
    }
    return all;
  }

  // A bit for each step.
  __device__ unsigned load_flags(const View<const uint8_t>& view) const {
    const auto all = load<uint8_t>(view, 1);
    unsigned flags = 0;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) flags |= (all.at[k] != 0u) << k;
    return flags;
  }

  __device__ void store(const View<float>& view, const Steps<float>& all) const {
    float* const at = view.at(row, first);
    if (is_one_access(view, at)) {  // nvcc takes an assignment apart
      const float4 vector = make_float4(all.at[0], all.at[1], all.at[2], all.at[3]);
      return __stcg(reinterpret_cast<float4*>(at), vector);
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      if (has(k)) at[k * view.step_stride] = all.at[k];
    }
  }
};

// Of packed sequences that are none.
__device__ inline void fill_with_nan(const GaeArgs& args) {
  const int64_t threads = int64_t{gridDim.x} * kThreads;
  for (int64_t t = int64_t{blockIdx.x} * kThreads + threadIdx.x; t < args.steps; t += threads) {
    *args.advantages.at(0, t) = *args.returns.at(0, t) = kNan;
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, kResident)
    gae_kernel(GaeArgs args, const int* malformed) {
  __shared__ Behind behind_of_warps[kWarps][T::kOfWarp];
  __shared__ Map map_of_warps[kWarps][T::kOfWarp];
  if (malformed && *malformed) return fill_with_nan(args);

  const T team;
  const int64_t sequence = team.sequence();
  const bool there = sequence < args.sequences;
  int64_t row = there ? sequence : 0, begin = 0, end = args.steps;
  Behind behind;
  if (there && args.last_values.data) behind.value = *args.last_values.at(sequence, 0);
  if (args.cu_seqlens.data) {
    row = 0;
    begin = there ? args.cu_seqlens.data[sequence] : 0;
    end = there ? args.cu_seqlens.data[sequence + 1] : 0;
  }
  // tiles begin where the results can be written at once
  int64_t tile = begin;
  if (args.advantages.step_stride == 1) {
    const auto address = reinterpret_cast<uintptr_t>(args.advantages.at(row, begin));
    tile -= address / sizeof(float) % kSteps;
  }
  tile += (end - tile + T::kTile - 1) / T::kTile * T::kTile;
  if (!there) end = begin;

  Map map_behind;
  while (tile > begin) {
    tile -= T::kTile;
#if defined(__CUDA_ARCH__)
    asm volatile("" : "+l"(row));  // addresses made anew: sixteen of them would take registers
#endif
    const Place place(row, team.first_step(tile), begin, end);
    unsigned inside = 0;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) inside |= unsigned{place.has(k)} << k;
    Steps<float> reward = place.load(args.rewards, 0.0f), value = place.load(args.values, 0.0f);
    const auto next_value = place.load(args.next_values, 0.0f);
    const unsigned mask = inside & place.load_flags(args.mask);
    const unsigned bootstraps = place.load_flags(args.bootstrap) | ~mask;
    const unsigned goes_on = place.load_flags(args.continues) | ~mask;
    const unsigned lacking = args.next_values.data ? goes_on & ~bootstraps : goes_on ^ bootstraps;
    const auto step = [&](int k) {
      return Behind{(mask >> k & 1) != 0, args.masked_are_steps, value.at[k]};
    };

    Behind own;
#pragma unroll
    for (int k = kSteps; k-- > 0;) {
      if (~mask >> k & 1) reward.at[k] = value.at[k] = 0;
      own = step(k).over(own);
    }
    Behind here = team.scan(own, behind, behind_of_warps);

    float delta[kSteps] = {};
    unsigned are_steps = 0, follows = 0;  // steps that are none leave what is behind them as it is
    const auto map = [&](int k) {
      if (~are_steps >> k & 1) return Map{};
      return Map{follows >> k & 1 ? double{args.gamma_lambda} : 0, delta[k]};
    };
    Map own_map;
#pragma unroll
    for (int k = kSteps; k-- > 0;) {
      const unsigned bit = 1u << k;
      float next = args.next_values.data && mask & bit ? next_value.at[k] : here.value;
      if (~bootstraps & bit) next = 0;
      delta[k] = gae_delta(reward.at[k], value.at[k], next, args.gamma);
      if (here.unmasked) {
        if (lacking & bit) delta[k] = kNan;
        if (args.masked_are_steps) are_steps |= bit;
        follows |= goes_on & bit;
      }
      are_steps |= mask & bit;
      own_map = map(k).over(own_map);
      here = step(k).over(here);
    }
    double advantage = team.scan(own_map, map_behind, map_of_warps).delta;

    Steps<float> advantages = {}, returns = {};
#pragma unroll
    for (int k = kSteps; k-- > 0;) {
      advantage = gae_step(map(k).delta, map(k).decay, advantage);
      if (mask >> k & 1) {
        advantages.at[k] = static_cast<float>(advantage);
        returns.at[k] = advantages.at[k] + value.at[k];
      }
    }
    place.store(args.advantages, advantages);
    place.store(args.returns, returns);
  }
}

// Whether the boundaries are no non-decreasing ones from 0 to `steps`.
__global__ void __launch_bounds__(kCheckers)
    check_kernel(const int64_t* bounds, int64_t sequences, int64_t steps, int* malformed) {
  bool bad = bounds[0] != 0 || bounds[sequences] != steps;
  for (int64_t i = threadIdx.x; i < sequences; i += kCheckers) bad |= bounds[i] > bounds[i + 1];
  bad = __syncthreads_or(bad);
  if (threadIdx.x == 0) *malformed = bad;
}

template <class T>
void start(const GaeArgs& args, const int* malformed, void* stream) {
  const int64_t blocks = (args.sequences + T::kOfBlock - 1) / T::kOfBlock;
  launch<gae_kernel<T>>(std::max<int64_t>(blocks, 1), kThreads, 0, stream, args, malformed);
}

}  // namespace
}  // namespace ppokern::cuda

namespace ppokern {

void gae_cuda(const GaeArgs& args, int* malformed, void* stream) {
  using namespace cuda;
  const bool packed = args.cu_seqlens.data != nullptr;
  if (args.steps == 0 || (args.sequences == 0 && !packed)) return;
  if (packed) {
    const int64_t* bounds = args.cu_seqlens.data;
    launch<check_kernel>(1, kCheckers, 0, stream, bounds, args.sequences, args.steps, malformed);
  } else {
    malformed = nullptr;
  }
  const int64_t length = packed && args.sequences ? args.steps / args.sequences : args.steps;
  if (!packed && args.advantages.step_stride > 1) {
    start<Team<1, kWarps>>(args, malformed, stream);
  } else if (length <= 64) {
    start<Team<8, 1>>(args, malformed, stream);
  } else if (length <= 512) {
    start<Team<32, 1>>(args, malformed, stream);
  } else {
    start<Team<32, kWarps>>(args, malformed, stream);
  }
}

}  // namespace ppokern
