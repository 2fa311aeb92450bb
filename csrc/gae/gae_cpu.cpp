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
  Mask seen{};  // an unmasked step was passed
};

// Returns the advantage.
template <class N>
inline Lanes take(Step step, float gamma, float gamma_lambda, Carry& carry) {
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

  const Mask is_step = N::kMaskedAreSteps ? step.mask | carry.seen : step.mask;
  carry.advantage = is_step ? advantage : carry.advantage;
  carry.value = is_step ? step.value : carry.value;
  carry.seen |= step.mask;
  return step.mask ? advantage : zero;
}

// Returns what it is given; poison stays 0 as long as that is finite.
inline Lanes watched(Lanes returns, Lanes& poison) {
  poison += returns - returns;
  return returns;
}

// Sequences that lie side by side in memory, kVectors of kLanes at a time: while one waits for its
// last result, the others go on.
template <class N, int kVectors>
bool walk_neighbours(const GaeArgs& args, int64_t first) {
  const Mask all = Mask{} == 0;
  Carry carries[kVectors];
  Lanes poison{};  // 0, or NaN once a result was not finite
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
      const Lanes advantage = take<N>(step, args.gamma, args.gamma_lambda, carries[i]);
      store(args.advantages.at(sequence, t), advantage);
      const Lanes returns = step.mask ? advantage + step.value : Lanes{};
      store(args.returns.at(sequence, t), watched(returns, poison));
    }
  }
  return !any(poison != poison);
}

// Where each lane stands in a tensor: behind its next step.
template <class T>
struct Cursor {
  View<T> view;
  T* end[kLanes] = {};

  explicit Cursor(const View<T>& all) : view(all) {}

  T* row(int lane) const { return end[lane] - kLanes; }

  // The i-th step of a tile, where there is one.
  T* step(int lane, int64_t i) const { return end[lane] + (i - kLanes) * view.step_stride; }
};

// Sequences of any lengths and strides: a lane that is through with one takes the next. Tiles of
// kLanes steps are turned, so that a vector holds one step of every lane, which costs less than
// walking along scalar rows.
template <class N>
struct Tiles {
  const GaeArgs& args;
  Cursor<const float> rewards{args.rewards}, values{args.values}, next_values{args.next_values};
  Cursor<const uint8_t> mask{args.mask}, bootstrap{args.bootstrap}, continues{args.continues};
  Cursor<float> advantages{args.advantages}, returns{args.returns};

  int64_t left[kLanes] = {};   // steps of each lane's sequence
  int64_t count[kLanes] = {};  // of these, those in the tile: its last ones
  uint32_t partial = 0;        // a bit for each lane that does not fill the tile
  Carry carry;
  Lanes poison{};  // 0, or NaN once a result was not finite

  // A tile's rows where they lie, or copies.
  struct Rows {
    const float* at[kLanes];
    float copies[kLanes][kLanes] = {};
  } reward_rows, value_rows, next_value_rows;
  Lanes reward[kLanes], value[kLanes], next_value[kLanes], advantage[kLanes];  // for each step

  bool run(int64_t first, int64_t last) {
    // the lanes begin one after the other: rows a power of two apart, read at the same place, would
    // get in each other's way in the cache
    for (int begun = 1; refill(first, last, begun); begun += begun < kLanes) {
      take_tile();
      for_each_cursor([&](auto& cursor) {
        for (int lane = 0; lane < kLanes; ++lane) {
          cursor.end[lane] -= count[lane] * cursor.view.step_stride;
        }
      });
      for (int lane = 0; lane < kLanes; ++lane) left[lane] -= count[lane];
    }
    return !any(poison != poison);
  }

  template <class Use>
  void for_each_cursor(Use use) {
    use(rewards), use(values), use(mask), use(advantages), use(returns);
    if (N::kNextValues) use(next_values);
    if (N::kFlags) use(bootstrap), use(continues);
  }

  // Lets lanes without a sequence take those from `first` on. Returns whether there is a step.
  bool refill(int64_t& first, int64_t last, int begun) {
    for (int lane = 0; lane < kLanes; ++lane) {
      for (; left[lane] == 0 && first < last && lane < begun; ++first) {
        const int64_t* bounds = args.cu_seqlens.data;
        const int64_t sequence = bounds ? 0 : first, end = bounds ? bounds[first + 1] : args.steps;
        left[lane] = bounds ? end - bounds[first] : end;
        for_each_cursor([&](auto& cursor) {
          if (cursor.view.data) cursor.end[lane] = cursor.view.at(sequence, end);
        });
        carry.advantage[lane] = 0;
        carry.value[lane] = args.last_values.data ? *args.last_values.at(first, 0) : 0;
        carry.seen[lane] = 0;
      }
    }
    partial = 0;
    int64_t steps = 0;
    for (int lane = 0; lane < kLanes; ++lane) {  // vectors: what was stored as one loads as one
      count[lane] = std::min<int64_t>(left[lane], kLanes);
      partial |= uint32_t{count[lane] < kLanes} << lane;
      steps += count[lane];
    }
    return steps > 0;
  }

  // Lanes whose steps do not fill a tile, or do not lie side by side, a bit for each.
  template <class T>
  uint32_t odd_lanes(const Cursor<T>& cursor) const {
    return cursor.view.step_stride == 1 ? partial : (1u << kLanes) - 1;
  }

  void find_rows(const Cursor<const float>& from, Rows& rows) const {
    uint32_t odd = odd_lanes(from);
    for (int lane = 0; lane < kLanes; ++lane) {
      rows.at[lane] = odd >> lane & 1 ? rows.copies[lane] : from.row(lane);
      // of so many rows no processor foresees the next tile
      __builtin_prefetch((const void*)((uintptr_t)from.end[lane] - 4 * sizeof(Lanes)));
    }
    for (; odd; odd &= odd - 1) {
      const int lane = __builtin_ctz(odd);
      for (int64_t i = kLanes - count[lane]; i < kLanes; ++i) {
        rows.copies[lane][i] = *from.step(lane, i);
      }
    }
  }

  // A bit for each step of the tile. Absent flags are True.
  Bits load_flags(const Cursor<const uint8_t>& from) const {
    uint32_t flags[kLanes];
    const uint32_t odd = odd_lanes(from);
    if (from.view.data == nullptr && partial == 0) return Bits{} + ((1u << kLanes) - 1);
    for (int lane = 0; lane < kLanes; ++lane) {
      if (!from.view.data) {
        flags[lane] = ((1u << count[lane]) - 1) << (kLanes - count[lane]);
      } else if (odd >> lane & 1) {
        flags[lane] = 0;
        for (int64_t i = kLanes - count[lane]; i < kLanes; ++i) {
          flags[lane] |= uint32_t{*from.step(lane, i) != 0} << i;
        }
      } else {
        flags[lane] = bits_of(from.row(lane));
      }
    }
    Bits result;
    std::memcpy(&result, flags, sizeof result);
    return result;
  }

  void take_tile() {
    find_rows(rewards, reward_rows);
    find_rows(values, value_rows);
    transpose(reward_rows.at, reward);
    transpose(value_rows.at, value);
    if (N::kNextValues) {
      find_rows(next_values, next_value_rows);
      transpose(next_value_rows.at, next_value);
    }
    const Bits is_step = load_flags(mask);
    Bits bootstrapped{}, continued{};
    if (N::kFlags) bootstrapped = load_flags(bootstrap), continued = load_flags(continues);
    Carry now = carry;  // in registers
    for (int i = kLanes; i-- > 0;) {
      const auto flag = [i](Bits flags) { return (Mask)(flags & (1u << i)) != 0; };
      const Step step = {flag(is_step), flag(bootstrapped), flag(continued),
                         reward[i],     value[i],           next_value[i]};
      advantage[i] = take<N>(step, args.gamma, args.gamma_lambda, now);
    }
    carry = now;
    store_tile(is_step);
  }

  // Writes the advantages, turned back, and with the values, which still lie in rows, the returns.
  void store_tile(Bits is_step) {
    const float* steps[kLanes];
    for (int i = 0; i < kLanes; ++i) steps[i] = (const float*)&advantage[i];
    transpose(steps, advantage);
    Lanes rows[kLanes];
    uint32_t flags[kLanes];
    std::memcpy(flags, &is_step, sizeof flags);
    for (int lane = 0; lane < kLanes; ++lane) {
      const Lanes values = load(value_rows.at[lane]);
      rows[lane] = watched(keep(flags[lane], advantage[lane] + values), poison);
    }
    store_rows(advantages, advantage);
    store_rows(returns, rows);
  }

  void store_rows(const Cursor<float>& to, const Lanes* rows) const {
    const uint32_t odd = odd_lanes(to);
    if (odd == 0) {
      for (int lane = 0; lane < kLanes; ++lane) store(to.row(lane), rows[lane]);
      return;
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      if (odd >> lane & 1) {
        const float* row = (const float*)&rows[lane];
        for (int64_t i = kLanes - count[lane]; i < kLanes; ++i) *to.step(lane, i) = row[i];
      } else {
        store(to.row(lane), rows[lane]);
      }
    }
  }
};

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
  return Tiles<N>{args}.run(first, last) && finite;
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
  const int parts = threads_for(elements, args.threads);
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
