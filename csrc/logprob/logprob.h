// Log-probs of selected tokens: what its kernels are given.

#pragma once

#include "portable.h"

namespace ppokern {

enum LogitsType : int { kFloat, kBf16, kFp16 };

// What both passes read. A tensor per token has a stride of its own, 0 where it holds one value.
struct TokenLogits {
  Rows logits;                     // (rows, V)
  int type;                        // a LogitsType
  View<const int64_t> token_ids;   // -100: masked
  View<const uint8_t> mask;        // absent: all True
  View<const float> temperatures;  // absent: temperature
  float temperature;
  float softcap;  // 0: none
  int64_t rows;
  int64_t vocab_size;  // columns that count
  int threads;
};

// What the forward pass finds out about a row, and the backward pass reads.
struct LogprobRow {
  float logprob, entropy;
  float max;      // of the capped logits, or a little less
  float log_sum;  // logsumexp = max / temperature + log_sum
};

struct LogprobForwardArgs {
  TokenLogits tokens;
  View<float> logprobs;
  View<float> entropy;  // absent: not made
  View<LogprobRow> found;
};

struct LogprobBackwardArgs {
  TokenLogits tokens;
  View<const float> grad_logprobs;  // absent: 0
  View<const float> grad_entropy;   // absent: 0
  View<const LogprobRow> found;     // by the forward pass, with entropy where grad_entropy is there
  Rows out;                         // (rows, width), may be the logits
  int64_t width;                    // columns from vocab_size on become 0
  bool compact;  // the unmasked rows go to the first rows of out, the others stay or are lost
};

// Whether each unmasked id is one of the `vocab_size` columns or -100.
struct TokenIds {
  View<const int64_t> token_ids;
  View<const uint8_t> mask;  // absent: all True
  int64_t rows;
  int64_t vocab_size;
};

bool token_ids_fit(const TokenIds& args);

// An id outside [0, vocab_size) gives NaN, also in the row's gradient.
void logprob_forward_cpu(const LogprobForwardArgs& args);
void logprob_backward_cpu(const LogprobBackwardArgs& args);

}  // namespace ppokern
