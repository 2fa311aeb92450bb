// The PPO loss from hidden states: what the kernel between its GEMMs is given.

#pragma once

#include "logprob/logprob.h"
#include "ppo_loss/ppo_loss.h"

namespace ppokern {

// Tensors per token are those of the call, and contiguous where they are Dense; the logits are
// those of some of its rows.
struct LinearLossArgs {
  TokenLogits tokens;  // its rows are those of the logits, which their gradient overwrites
  Dense<const int64_t> numbers;  // of the rows in the call; absent: they count up from `first`
  int64_t first;
  Dense<const float> scales;  // of a token's term in the loss
  Dense<const float> old_logprobs;
  Dense<const float> advantages;
  Dense<const float> weights;       // absent: 1
  Dense<const float> ref_logprobs;  // absent: no KL term
  double low;                       // the clip range is [1 - low, 1 + high]
  double high;
  float dual_clip;        // infinity: none
  float log_ratio_limit;  // infinity: none
  float entropy_coef;
  float kl_coef;
  KlKind kl_kind;
  int blocks;             // that go over the rows
  Dense<float> logprobs;  // of the call
  Dense<float> entropy;   // the same; absent: not made
  Dense<uint8_t> used;    // of the rows, which have a slope; absent: the others become 0
};

// Rows of which some are used, and are to come first.
struct MovedRows {
  Rows logits;
  int type;
  int64_t rows;
  int64_t width;
  Dense<const uint8_t> used;
};

void linear_loss_cuda(const LinearLossArgs& args, void* stream);
void move_up_cuda(const MovedRows& args, void* stream);

}  // namespace ppokern
