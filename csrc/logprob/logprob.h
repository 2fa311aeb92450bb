// Log-probs of selected tokens: what its kernels are given.

#pragma once

#include "portable.h"

namespace ppokern {

enum LogitsType : int { kFloat, kBf16, kFp16 };

// What both passes read. A tensor per token has a stride of its own, 0 where it holds one value.
struct TokenLogits {
  Rows logits;                    // (rows, V)
  int type;                       // a LogitsType
  View<const int64_t> token_ids;  // -100: masked
  View<const uint8_t> mask;       // absent: all True
  View<const float> temperature;
  float softcap;  // 0: none
  int64_t rows;
  int64_t vocab_size;  // columns that count
  int threads;
};

struct LogprobForwardArgs {
  TokenLogits tokens;
  View<float> logprobs;
  View<float> entropy;   // absent: not made
  View<float> maxima;    // of the capped logits, or a little less
  View<float> log_sums;  // logsumexp = max / temperature + log_sum
};

struct LogprobBackwardArgs {
  TokenLogits tokens;
  View<const float> grad_logprobs;  // absent: 0
  View<const float> grad_entropy;   // absent: 0
  View<const float> logprobs;       // this and what follows: of the forward pass
  View<const float> entropy;        // absent if grad_entropy is
  View<const float> maxima;
  View<const float> log_sums;
  Rows out;       // (rows, width), may be the logits
  int64_t width;  // columns from vocab_size on become 0
  bool compact;   // the unmasked rows go to the first rows of out, the others stay or are lost
};

// An id outside [0, vocab_size) gives NaN, also in the row's gradient.
void logprob_forward_cpu(const LogprobForwardArgs& args);
void logprob_backward_cpu(const LogprobBackwardArgs& args);

}  // namespace ppokern
