// Generalised advantage estimation on the CPU.
//
// One pass over each sequence, from its last step to its first. Moves 16 bytes per element
// (rewards and values in, advantages and returns out), 1 more for each of mask, bootstrap and
// continues, 4 more for next_values. A step waits for the one behind it, so that the lanes of a
// vector walk along sequences of their own; a sequence's result depends on nothing else.

#include <algorithm>
#include <limits>

#include "gae/gae.h"

#ifdef PPOKERN_ISA  // read by for_each_isa.h

namespace ppokern::PPOKERN_ISA {
namespace {

// What a call needs; the rest costs nothing.
template <bool kFlags_, bool kNextValues_, bool kMaskedAreSteps_>
struct Needs {
  static constexpr bool kFlags = kFlags_;
  static constexpr bool kNextValues = kNextValues_;
  static constexpr bool kMaskedAreSteps = kMaskedAreSteps_;
};

struct Step {
  Mask mask, bootstrap, continues;
  Lanes reward, value, next_value;
};

// What a lane carries from a step to the one before it.
struct Carry {
  Lanes advantage{};
  Lanes value{};
  Mask seen{};     // an unmasked step was passed
  Lanes poison{};  // 0, or NaN once a result was not finite

  bool finite() const { return !any(poison != poison); }
};

struct Result {
  Lanes advantage, returns;
};

template <class N>
inline Result take(Step step, float gamma, float gamma_lambda, Carry& carry) {
  const Lanes zero{}, nan = zero + std::numeric_limits<float>::quiet_NaN();
  if (N::kMaskedAreSteps) {
    step.reward = step.mask ? step.reward : zero;
    step.value = step.mask ? step.value : zero;
    step.bootstrap |= step.mask == 0;
    step.continues |= step.mask == 0;
  }
  Lanes next_value = carry.value;
  if (N::kNextValues) next_value = step.mask ? step.next_value : next_value;
  Lanes decay = zero + gamma_lambda;
  if (N::kFlags) {
    next_value = step.bootstrap ? next_value : zero;
    decay = step.continues ? decay : zero;
  }
  const Lanes delta = gae_delta(step.reward, step.value, next_value, gamma);
  Lanes advantage = gae_step(delta, decay, carry.advantage);
  if (N::kFlags) {
    const Mask lacking =
        N::kNextValues ? step.continues & ~step.bootstrap : step.continues ^ step.bootstrap;
    advantage = carry.seen & lacking ? nan : advantage;
  }

  const Result result = {step.mask ? advantage : zero, step.mask ? advantage + step.value : zero};
  carry.poison += result.returns - result.returns;
  const Mask taken = N::kMaskedAreSteps ? step.mask | carry.seen : step.mask;
  carry.advantage = taken ? advantage : carry.advantage;
  carry.value = taken ? step.value : carry.value;
  carry.seen |= step.mask;
  return result;
}

// Sequences that lie side by side in memory, kVectors of kLanes at a time: while one waits for its
// last result, the others go on.
template <class N, int kVectors>
bool walk_neighbours(const GaeArgs& args, int64_t first) {
  const Mask all = Mask{} == 0;
  Carry carries[kVectors];
  if (args.last_values.data) {
    for (int lane = 0; lane < kVectors * kLanes; ++lane) {
      carries[lane / kLanes].value[lane % kLanes] = *args.last_values.at(first + lane, 0);
    }
  }
  for (int64_t t = args.steps; t-- > 0;) {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
      const int64_t sequence = first + i * kLanes;
      Step step = {
          all,    all, all, load(args.rewards.at(sequence, t)), load(args.values.at(sequence, t)),
          Lanes{}};
      if (args.mask.data) step.mask = load(args.mask.at(sequence, t));
      if (args.bootstrap.data) step.bootstrap = load(args.bootstrap.at(sequence, t));
      if (args.continues.data) step.continues = load(args.continues.at(sequence, t));
      if (N::kNextValues) step.next_value = load(args.next_values.at(sequence, t));
      const Result result = take<N>(step, args.gamma, args.decay, carries[i]);
      store(args.advantages.at(sequence, t), result.advantage);
      store(args.returns.at(sequence, t), result.returns);
    }
  }
  bool finite = true;
  for (const Carry& carry : carries) finite &= carry.finite();
  return finite;
}

// Where each lane stands: steps [end - left, end) of its sequence are still to be taken.
struct Walk {
  int64_t sequence[kLanes] = {};
  int64_t end[kLanes] = {};
  int64_t left[kLanes] = {};

  // How many of the next kLanes steps there are.
  int count(int lane) const { return std::min<int64_t>(left[lane], kLanes); }
};

// The next kLanes steps of each lane: the lanes' rows in memory, transposed to a vector a step.
template <class V, class T>
inline void load_tile(const View<T>& from, const Walk& walk, V* tile) {
#pragma GCC unroll 1
  for (int lane = 0; lane < kLanes; ++lane) {
    const int count = walk.count(lane);
    T* row = from.at(walk.sequence[lane], walk.end[lane] - count);
    if (count == kLanes && from.step_stride == 1) {
      tile[lane] = load(row);
    } else {
      std::remove_const_t<T> steps[kLanes] = {};
      for (int i = 0; i < count; ++i) steps[kLanes - count + i] = row[i * from.step_stride];
      tile[lane] = load(steps);
    }
  }
  transpose(tile);
}

inline void store_tile(const View<float>& to, const Walk& walk, Lanes* tile) {
  transpose(tile);
#pragma GCC unroll 1
  for (int lane = 0; lane < kLanes; ++lane) {
    const int count = walk.count(lane);
    float* row = to.at(walk.sequence[lane], walk.end[lane] - count);
    if (count == kLanes && to.step_stride == 1) {
      store(row, tile[lane]);
    } else {
      for (int i = 0; i < count; ++i) row[i * to.step_stride] = tile[lane][kLanes - count + i];
    }
  }
}

struct Tile {
  Mask mask[kLanes], bootstrap[kLanes], continues[kLanes];
  Lanes rewards[kLanes], values[kLanes], next_values[kLanes], advantages[kLanes], returns[kLanes];

  Tile() {  // what is absent stays True
    for (Mask* flags : {mask, bootstrap, continues}) std::fill(flags, flags + kLanes, Mask{} == 0);
  }
};

template <class N>
inline void walk_tile(const GaeArgs& args, const Walk& walk, Tile& tile, Carry& carry_out) {
  load_tile(args.rewards, walk, tile.rewards);
  load_tile(args.values, walk, tile.values);
  if (args.mask.data) load_tile(args.mask, walk, tile.mask);
  if (args.bootstrap.data) load_tile(args.bootstrap, walk, tile.bootstrap);
  if (args.continues.data) load_tile(args.continues, walk, tile.continues);
  if (N::kNextValues) load_tile(args.next_values, walk, tile.next_values);
  Mask counts;
  for (int lane = 0; lane < kLanes; ++lane) counts[lane] = walk.count(lane);
  Carry carry = carry_out;  // in registers
  for (int i = kLanes; i-- > 0;) {
    const Step step = {tile.mask[i] & (counts >= kLanes - i),
                       tile.bootstrap[i],
                       tile.continues[i],
                       tile.rewards[i],
                       tile.values[i],
                       tile.next_values[i]};
    const Result result = take<N>(step, args.gamma, args.decay, carry);
    tile.advantages[i] = result.advantage;
    tile.returns[i] = result.returns;
  }
  carry_out = carry;
  store_tile(args.advantages, walk, tile.advantages);
  store_tile(args.returns, walk, tile.returns);
}

// Sequences of any lengths and strides: a lane that is through with one takes the next. Turning
// tiles costs less than walking along scalar rows, and the masks cost no branches.
template <class N>
bool walk_any(const GaeArgs& args, int64_t first, int64_t last) {
  Walk walk;
  Carry carry;
  Tile tile;
  while (true) {
    bool active = false;
    for (int lane = 0; lane < kLanes; ++lane) {
      for (; walk.left[lane] == 0 && first < last; ++first) {
        const int64_t* bounds = args.cu_seqlens.data;
        walk.sequence[lane] = bounds ? 0 : first;
        walk.end[lane] = bounds ? bounds[first + 1] : args.steps;
        walk.left[lane] = bounds ? bounds[first + 1] - bounds[first] : args.steps;
        carry.advantage[lane] = 0;
        carry.value[lane] = args.last_values.data ? *args.last_values.at(first, 0) : 0;
        carry.seen[lane] = 0;
      }
      active |= walk.left[lane] > 0;
    }
    if (!active) return carry.finite();
    walk_tile<N>(args, walk, tile, carry);
    for (int lane = 0; lane < kLanes; ++lane) {
      const int count = walk.count(lane);
      walk.end[lane] -= count;
      walk.left[lane] -= count;
    }
  }
}

template <class N>
bool walk_some(const GaeArgs& args, int64_t first, int64_t last) {
  const auto side_by_side = [](const auto& view) {
    return view.data == nullptr || view.sequence_stride == 1;
  };
  bool finite = true;
  if (side_by_side(args.rewards) && side_by_side(args.values) && side_by_side(args.mask) &&
      side_by_side(args.bootstrap) && side_by_side(args.continues) &&
      side_by_side(args.next_values) && side_by_side(args.advantages) &&
      side_by_side(args.returns)) {
    for (; first + 4 * kLanes <= last; first += 4 * kLanes) {
      finite &= walk_neighbours<N, 4>(args, first);
    }
    for (; first + kLanes <= last; first += kLanes) finite &= walk_neighbours<N, 1>(args, first);
  }
  return walk_any<N>(args, first, last) && finite;
}

bool walk(const GaeArgs& args, int64_t first, int64_t last) {
  const auto with_flags = [&](auto flags) {
    const auto with_next = [&](auto next_values) {
      constexpr bool f = decltype(flags)::value, n = decltype(next_values)::value;
      return args.masked_are_steps ? walk_some<Needs<f, n, true>>(args, first, last)
                                   : walk_some<Needs<f, n, false>>(args, first, last);
    };
    return args.next_values.data ? with_next(std::true_type{}) : with_next(std::false_type{});
  };
  return args.bootstrap.data || args.continues.data ? with_flags(std::true_type{})
                                                    : with_flags(std::false_type{});
}

}  // namespace
}  // namespace ppokern::PPOKERN_ISA

#else

#define PPOKERN_KERNELS "gae/gae_cpu.cpp"
#include "for_each_isa.h"

namespace ppokern {
namespace {

constexpr int64_t kSerial = 1 << 16;  // elements; below, waking threads costs more than it saves

// The first sequence of a part; parts have about as many steps each.
int64_t first_of_part(const GaeArgs& args, int64_t part, int64_t parts) {
  if (args.cu_seqlens.data == nullptr) return args.sequences * part / parts;
  const int64_t* begin = args.cu_seqlens.data;
  return std::lower_bound(begin, begin + args.sequences, args.steps * part / parts) - begin;
}

}  // namespace

bool gae_cpu(const GaeArgs& args) {
  if (args.cu_seqlens.data) check_boundaries(args.cu_seqlens.data, args.sequences, args.steps);
  const auto walk = PPOKERN_BEST(walk);
  const int64_t elements = args.steps * (args.cu_seqlens.data ? 1 : args.sequences);
  const int parts = elements < kSerial ? 1 : args.threads;
  bool finite = true;
#pragma omp parallel for num_threads(parts) reduction(&& : finite)
  for (int part = 0; part < parts; ++part) {
    const int64_t first = first_of_part(args, part, parts);
    finite = walk(args, first, first_of_part(args, part + 1, parts)) && finite;
  }
  return finite;
}

}  // namespace ppokern

#endif
