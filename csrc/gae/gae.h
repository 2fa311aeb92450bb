// Generalised advantage estimation: what its kernels are given.

#pragma once

#include "portable.h"

namespace ppokern {

struct GaeArgs {
  View<const float> rewards;
  View<const float> values;
  View<const uint8_t> mask;       // absent: all True
  View<const uint8_t> bootstrap;  // absent: all True
  View<const uint8_t> continues;  // absent: all True
  View<const float> next_values;  // absent: the value of the next transition
  View<const float> last_values;  // one per sequence; absent: 0
  View<float> advantages;
  View<float> returns;
  View<const int64_t> cu_seqlens;  // absent: not packed; contiguous
  int64_t sequences;
  int64_t steps;  // of a sequence; packed: of all
  float gamma;
  float decay;            // gamma * lambda
  bool masked_are_steps;  // of reward 0 and value 0, between the unmasked ones
  int threads;
};

// Returns whether all results are finite. NaN stands at a transition that lacks what it needs: it
// continues without bootstrapping, or is cut before the last one without a next value.
bool gae_cpu(const GaeArgs& args);

// Starts the same on the current device; finiteness is not looked at. If they are packed,
// `malformed` has room for an int, and all is NaN where cu_seqlens are none.
void gae_cuda(const GaeArgs& args, int* malformed, void* stream);

}  // namespace ppokern
