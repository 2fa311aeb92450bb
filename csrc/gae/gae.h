// Generalised advantage estimation: what its kernels are given.

#pragma once

#include "portable.h"

namespace ppokern {

#define GAE_ARGS(FIELD)                                                                  \
  FIELD(View<const float>, rewards)                                                      \
  FIELD(View<const float>, values)                                                       \
  FIELD(View<const uint8_t>, mask)      /* absent: all True */                           \
  FIELD(View<const uint8_t>, bootstrap) /* absent: all True */                           \
  FIELD(View<const uint8_t>, continues) /* absent: all True */                           \
  FIELD(View<const float>, next_values) /* absent: the value of the next transition */   \
  FIELD(View<const float>, last_values) /* one per sequence; absent: 0 */                \
  FIELD(View<float>, advantages)                                                         \
  FIELD(View<float>, returns)                                                            \
  FIELD(View<const int64_t>, cu_seqlens) /* absent: not packed; contiguous */            \
  FIELD(int64_t, sequences)                                                              \
  FIELD(int64_t, steps) /* of a sequence; packed: of all */                              \
  FIELD(float, gamma)                                                                    \
  FIELD(float, gamma_lambda)                                                             \
  FIELD(bool, masked_are_steps) /* of reward 0 and value 0, between the unmasked ones */ \
  FIELD(int, threads)
PPOKERN_ARGS(GaeArgs, GAE_ARGS)

// Returns whether all results are finite. NaN stands at a transition that lacks what it needs: it
// continues without bootstrapping, or is cut before the last one without a next value.
bool gae_cpu(const GaeArgs& args);

// Starts the same on the current device; finiteness is not looked at. If they are packed,
// `malformed` has room for an int, and all is NaN where cu_seqlens are none.
void gae_cuda(const GaeArgs& args, int* malformed, void* stream);

}  // namespace ppokern
