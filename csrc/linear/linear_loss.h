// The PPO loss from hidden states: what the kernel between its GEMMs is given.

#pragma once

#include "logprob/logprob.h"
#include "ppo_loss/ppo_loss.h"

namespace ppokern {

// Tensors per token are those of the call, and contiguous where they are Dense; the logits are
// those of some of its rows.
#define LINEAR_LOSS_ARGS(FIELD)                                                       \
  FIELD(Dense<const int64_t>,                                                         \
        numbers) /* of the rows in the call; absent: they count up from `first` */    \
  FIELD(int64_t, first)                                                               \
  FIELD(Dense<const float>, scales) /* of a token's term in the loss */               \
  FIELD(Dense<const float>, old_logprobs)                                             \
  FIELD(Dense<const float>, advantages)                                               \
  FIELD(Dense<const float>, weights)      /* absent: 1 */                             \
  FIELD(Dense<const float>, ref_logprobs) /* absent: no KL term */                    \
  FIELD(double, low)                      /* the clip range is [1 - low, 1 + high] */ \
  FIELD(double, high)                                                                 \
  FIELD(float, dual_clip)       /* infinity: none */                                  \
  FIELD(float, log_ratio_limit) /* infinity: none */                                  \
  FIELD(float, entropy_coef)                                                          \
  FIELD(float, kl_coef)                                                               \
  FIELD(KlKind, kl_kind)                                                              \
  FIELD(int, blocks)            /* that go over the rows */                           \
  FIELD(Dense<float>, logprobs) /* of the call */                                     \
  FIELD(Dense<float>, entropy)  /* the same; absent: not made */                      \
  FIELD(Dense<uint8_t>, used)   /* of the rows, which have a slope; absent: the others become 0 */
PPOKERN_ARGS_WITHIN(LinearLossArgs, TokenLogits, tokens, TOKEN_LOGITS, LINEAR_LOSS_ARGS)

// Rows of which some are used, and are to come first.
#define MOVED_ROWS(FIELD) \
  FIELD(Rows, logits)     \
  FIELD(int, type)        \
  FIELD(int64_t, rows)    \
  FIELD(int64_t, width)   \
  FIELD(Dense<const uint8_t>, used)
PPOKERN_ARGS(MovedRows, MOVED_ROWS)

void linear_loss_cuda(const LinearLossArgs& args, void* stream);
void move_up_cuda(const MovedRows& args, void* stream);

}  // namespace ppokern
