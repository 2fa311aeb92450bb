// The PPO losses: what their kernels are given.

#pragma once

#include <optional>

#include "portable.h"

namespace ppokern {

enum class Aggregate { kTokenMean, kSequenceMean, kSequenceSum, kSum, kNone };
enum class KlKind { kK1, kK2, kK3 };

// Tensors per token are contiguous; an absent one switches its part off.
struct PpoLossArgs {
  Dense<const float> logprobs;
  Dense<const float> entropy;
  Dense<const float> values;
  Dense<const float> old_logprobs;
  Dense<const float> advantages;
  Dense<const float> weights;  // absent: 1
  Dense<const float> ref_logprobs;
  Dense<const float> old_values;  // absent: values are not clipped
  Dense<const float> returns;
  Dense<const uint8_t> mask;         // absent: all True
  Dense<const uint8_t> value_mask;   // the same, of the value term
  Dense<const int64_t> cu_seqlens;   // absent: not packed
  std::optional<float> denominator;  // none: the count of tokens or sequences
  std::optional<float> value_denominator;
  int64_t sequences;
  int64_t tokens;  // of all sequences, at least one
  double low;      // the clip range is [1 - low, 1 + high]
  double high;
  float dual_clip;        // infinity: none
  float log_ratio_limit;  // infinity: none
  Aggregate aggregate;
  float entropy_coef;
  float kl_coef;
  KlKind kl_kind;
  float value_clip_range;
  float value_coef;
  int threads;
  Dense<float> loss;   // one number, per token for the aggregate kNone
  Dense<float> stats;  // in the order of reference.stat_names
  Dense<float> logprob_slopes;
  Dense<float> ratio_slopes;  // present: the ratio is that of a sequence
  Dense<float> entropy_slopes;
  Dense<float> value_slopes;
};

void ppo_loss_cpu(const PpoLossArgs& args);

// The same on the current device; all is NaN where cu_seqlens are none. A denominator that lies on
// the device stands in place of that in `args`. `work` has room for as many bytes as the function
// below says.
void ppo_loss_cuda(const PpoLossArgs& args, const float* denominator,
                   const float* value_denominator, void* work, void* stream);
int64_t ppo_loss_work_cuda(int64_t sequences, int64_t tokens);

}  // namespace ppokern
