// The PPO losses: what their kernels are given.

#pragma once

#include <optional>

#include "portable.h"

namespace ppokern {

enum class Aggregate { kTokenMean, kSequenceMean, kSequenceSum, kSum, kNone };
enum class KlKind { kK1, kK2, kK3, kK3Plus };

constexpr const char* kAggregates[] = {"token_mean", "sequence_mean", "sequence_sum", "sum",
                                       "none"};
constexpr const char* kKlKinds[] = {"k1", "k2", "k3", "k3+"};

// Tensors per token are contiguous; an absent one switches its part off.
#define PPO_LOSS_ARGS(FIELD)                                                            \
  FIELD(Dense<const float>, logprobs)                                                   \
  FIELD(Dense<const float>, entropy)                                                    \
  FIELD(Dense<const float>, values)                                                     \
  FIELD(Dense<const float>, old_logprobs)                                               \
  FIELD(Dense<const float>, advantages)                                                 \
  FIELD(Dense<const float>, weights) /* absent: 1 */                                    \
  FIELD(Dense<const float>, ref_logprobs)                                               \
  FIELD(Dense<const float>, old_values) /* absent: values are not clipped */            \
  FIELD(Dense<const float>, returns)                                                    \
  FIELD(Dense<const uint8_t>, mask)        /* absent: all True */                       \
  FIELD(Dense<const uint8_t>, value_mask)  /* the same, of the value term */            \
  FIELD(Dense<const int64_t>, cu_seqlens)  /* absent: not packed */                     \
  FIELD(std::optional<float>, denominator) /* none: the count of tokens or sequences */ \
  FIELD(std::optional<float>, value_denominator)                                        \
  FIELD(int64_t, sequences)                                                             \
  FIELD(int64_t, tokens) /* of all sequences, at least one */                           \
  FIELD(double, low)     /* the clip range is [1 - low, 1 + high] */                    \
  FIELD(double, high)                                                                   \
  FIELD(float, dual_clip)       /* infinity: none */                                    \
  FIELD(float, log_ratio_limit) /* infinity: none */                                    \
  FIELD(Aggregate, aggregate)                                                           \
  FIELD(float, entropy_coef)                                                            \
  FIELD(float, kl_coef)                                                                 \
  FIELD(KlKind, kl_kind)                                                                \
  FIELD(float, value_clip_range)                                                        \
  FIELD(float, value_coef)                                                              \
  FIELD(int, threads)                                                                   \
  FIELD(Dense<float>, loss)  /* one number, per token for the aggregate kNone */        \
  FIELD(Dense<float>, stats) /* in the order of reference.stat_names */                 \
  FIELD(Dense<float>, logprob_slopes)                                                   \
  FIELD(Dense<float>, ratio_slopes) /* present: the ratio is that of a sequence */      \
  FIELD(Dense<float>, entropy_slopes)                                                   \
  FIELD(Dense<float>, value_slopes)
PPOKERN_ARGS(PpoLossArgs, PPO_LOSS_ARGS)

void ppo_loss_cpu(const PpoLossArgs& args);

// The same on the current device; all is NaN where cu_seqlens are none. A denominator that lies on
// the device stands in place of that in `args`. `work` has room for as many bytes as the function
// below says.
void ppo_loss_cuda(const PpoLossArgs& args, const float* denominator,
                   const float* value_denominator, void* work, void* stream);
int64_t ppo_loss_work_cuda(int64_t sequences, int64_t tokens);

}  // namespace ppokern
