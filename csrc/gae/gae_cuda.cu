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
// depends on layout and sizes alone.

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
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr int kVector = 4;  // steps that are read or written at once where they lie so

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
  bool counts = false;    // there is a step whose value counts
  float value = 0;        // that of the nearest

  __device__ Behind over(const Behind& behind) const {
    return {unmasked || behind.unmasked, counts || behind.counts, counts ? value : behind.value};
  }

  __device__ Behind shuffled(unsigned mask, int lane) const {
    const int flags = __shfl_sync(mask, 2 * unmasked + counts, lane);
    return {(flags & 2) != 0, (flags & 1) != 0, __shfl_sync(mask, value, lane)};
  }
};

// The threads that share a sequence: kLanes neighbouring ones of each of kTeamWarps warps.
template <int kLanes_, int kTeamWarps_, int kSteps_>
struct Team {
  static constexpr int kLanes = kLanes_, kTeamWarps = kTeamWarps_;
  static constexpr int kSteps = kSteps_;       // that a thread takes at a time
  static constexpr int kOfWarp = 32 / kLanes;  // teams that share a warp
  static constexpr int kOfBlock = kOfWarp * kWarps / kTeamWarps;
  static constexpr int kTile = kLanes * kTeamWarps * kSteps;

  const int lane = threadIdx.x % kLanes;
  const int first_lane = threadIdx.x % 32 - lane;
  const unsigned mask = (kLanes == 32 ? ~0u : (1u << kLanes % 32) - 1) << first_lane;
  const int warp = threadIdx.x / 32 % kTeamWarps;
  const int first_warp = threadIdx.x / 32 - warp;

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

template <class T>
struct alignas(kVector * sizeof(T)) Vector {
  T at[kVector];
};

// Uses kVector steps of a tensor from `first` on: all at once, or each that lies in [begin, end).
template <class T, class AllAtOnce, class Each>
__device__ inline void for_steps(const View<T>& view, int64_t row, int64_t first, int64_t begin,
                                 int64_t end, AllAtOnce all_at_once, Each each) {
  T* const at = view.at(row, first);
  if (view.step_stride == 1 && reinterpret_cast<uintptr_t>(at) % sizeof(Vector<T>) == 0 &&
      begin <= first && first + kVector <= end) {
    all_at_once(at);
    return;
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (begin <= first + i && first + i < end) each(at + i * view.step_stride, i);
  }
}

template <int kSteps, class T>
__device__ inline void load(const View<const T>& view, int64_t row, int64_t first, int64_t begin,
                            int64_t end, T (&to)[kSteps]) {
  if (view.data == nullptr) return;
#pragma unroll
  for (int k = 0; k < kSteps; k += kVector) {
    for_steps(
        view, row, first + k, begin, end,
        [&](const T* from) {
          const auto all = *reinterpret_cast<const Vector<T>*>(from);
#pragma unroll
          for (int i = 0; i < kVector; ++i) to[k + i] = all.at[i];
        },
        [&](const T* from, int i) { to[k + i] = *from; });
  }
}

template <int kSteps>
__device__ inline void store(const View<float>& view, int64_t row, int64_t first, int64_t begin,
                             int64_t end, const float (&from)[kSteps]) {
#pragma unroll
  for (int k = 0; k < kSteps; k += kVector) {
    for_steps(
        view, row, first + k, begin, end,
        [&](float* to) {
          Vector<float> all;
#pragma unroll
          for (int i = 0; i < kVector; ++i) all.at[i] = from[k + i];
          *reinterpret_cast<Vector<float>*>(to) = all;
        },
        [&](float* to, int i) { *to = from[k + i]; });
  }
}

// Of packed sequences that are none.
__device__ inline void fill_with_nan(const GaeArgs& args) {
  const int64_t threads = int64_t{gridDim.x} * kThreads;
  for (int64_t t = int64_t{blockIdx.x} * kThreads + threadIdx.x; t < args.steps; t += threads) {
    *args.advantages.at(0, t) = *args.returns.at(0, t) = kNan;
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) gae_kernel(GaeArgs args, const int* malformed) {
  constexpr int kSteps = T::kSteps;
  __shared__ Behind behind_of_warps[kWarps][T::kOfWarp];
  __shared__ Map map_of_warps[kWarps][T::kOfWarp];
  if (malformed && *malformed) return fill_with_nan(args);

  const T team;
  const int64_t sequence = team.sequence();
  const bool there = sequence < args.sequences;
  int64_t row = there ? sequence : 0, begin = 0, end = args.steps;
  float last_value = 0;
  if (there && args.last_values.data) last_value = *args.last_values.at(sequence, 0);
  if (args.cu_seqlens.data) {
    begin = there ? args.cu_seqlens.data[sequence] : 0;
    end = there ? args.cu_seqlens.data[sequence + 1] : 0;
    row = 0;
  }
  // tiles begin where the results can be written in vectors
  int64_t origin = begin;
  if (args.advantages.step_stride == 1) {
    const auto address = reinterpret_cast<uintptr_t>(args.advantages.at(row, begin));
    origin -= address / sizeof(float) % kVector;
  }
  const int64_t tiles = (end - origin + T::kTile - 1) / T::kTile;
  if (!there) end = begin;

  Behind behind;
  Map map_behind;
  for (int64_t tile = tiles; tile-- > 0;) {
    const int64_t first = team.first_step(origin + tile * T::kTile);
    float reward[kSteps] = {}, value[kSteps] = {}, next_value[kSteps] = {};
    uint8_t mask[kSteps], bootstrap[kSteps], continues[kSteps];
#pragma unroll
    for (int k = 0; k < kSteps; ++k) mask[k] = bootstrap[k] = continues[k] = 1;
    load(args.rewards, row, first, begin, end, reward);
    load(args.values, row, first, begin, end, value);
    load(args.mask, row, first, begin, end, mask);
    load(args.bootstrap, row, first, begin, end, bootstrap);
    load(args.continues, row, first, begin, end, continues);
    load(args.next_values, row, first, begin, end, next_value);

    Behind step[kSteps], own;
#pragma unroll
    for (int k = kSteps; k-- > 0;) {
      const bool inside = begin <= first + k && first + k < end;
      step[k].unmasked = inside && mask[k];
      step[k].counts = args.masked_are_steps ? inside : step[k].unmasked;
      reward[k] = step[k].unmasked ? reward[k] : 0;
      step[k].value = value[k] = step[k].unmasked ? value[k] : 0;
      own = step[k].over(own);
    }
    Behind here = team.scan(own, behind, behind_of_warps);

    Map map[kSteps], own_map;
#pragma unroll
    for (int k = kSteps; k-- > 0;) {
      const bool unmasked = step[k].unmasked, last = !here.unmasked;
      const bool bootstraps = bootstrap[k] || !unmasked, goes_on = continues[k] || !unmasked;
      float next = last ? last_value : here.value;
      if (args.next_values.data && unmasked) next = next_value[k];
      const bool lacking = args.next_values.data ? goes_on && !bootstraps : goes_on != bootstraps;
      if (unmasked || (step[k].counts && !last)) {
        const float delta = gae_delta(reward[k], value[k], bootstraps ? next : 0, args.gamma);
        map[k].delta = lacking && !last ? kNan : delta;
        map[k].decay = goes_on && !last ? args.decay : 0;
      }
      own_map = map[k].over(own_map);
      here = step[k].over(here);
    }
    double advantage = team.scan(own_map, map_behind, map_of_warps).delta;

    float advantages[kSteps], returns[kSteps];
#pragma unroll
    for (int k = kSteps; k-- > 0;) {
      advantage = gae_step(map[k].delta, map[k].decay, advantage);
      advantages[k] = step[k].unmasked ? static_cast<float>(advantage) : 0;
      returns[k] = step[k].unmasked ? advantages[k] + value[k] : 0;
    }
    store(args.advantages, row, first, begin, end, advantages);
    store(args.returns, row, first, begin, end, returns);
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
    start<Team<1, kWarps, 8>>(args, malformed, stream);
  } else if (length <= 64) {
    start<Team<8, 1, 4>>(args, malformed, stream);
  } else if (length <= 512) {
    start<Team<32, 1, 4>>(args, malformed, stream);
  } else {
    start<Team<32, kWarps, 4>>(args, malformed, stream);
  }
}

}  // namespace ppokern
