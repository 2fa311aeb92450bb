// Log-probs of selected tokens: what its kernels are given.

#pragma once

#include <type_traits>

#include "portable.h"

namespace ppokern {

enum LogitsType : int { kFloat, kBf16, kFp16 };

// What both passes read. A tensor per token has a stride of its own, 0 where it holds one value.
#define TOKEN_LOGITS(FIELD)                                        \
  FIELD(Rows, logits)                    /* (rows, V) */           \
  FIELD(int, type)                       /* a LogitsType */        \
  FIELD(View<const int64_t>, token_ids)  /* -100: masked */        \
  FIELD(View<const uint8_t>, mask)       /* absent: all True */    \
  FIELD(View<const float>, temperatures) /* absent: temperature */ \
  FIELD(float, temperature)                                        \
  FIELD(float, softcap) /* 0: none */                              \
  FIELD(int64_t, rows)                                             \
  FIELD(int64_t, vocab_size) /* columns that count */              \
  FIELD(int, threads)
PPOKERN_ARGS(TokenLogits, TOKEN_LOGITS)

PPOKERN_HOST_DEVICE inline bool is_valid(const TokenLogits& tokens, int64_t row) {
  return (!tokens.mask.data || *tokens.mask.at(row, 0)) && *tokens.token_ids.at(row, 0) != -100;
}

// Where a row's token is, or -1 where its id is bad.
PPOKERN_HOST_DEVICE inline int64_t token_of(const TokenLogits& tokens, int64_t row) {
  const int64_t id = *tokens.token_ids.at(row, 0);
  return 0 <= id && id < tokens.vocab_size ? id : -1;
}

PPOKERN_HOST_DEVICE inline float temperature_of(const TokenLogits& tokens, int64_t row) {
  return tokens.temperatures.data ? *tokens.temperatures.at(row, 0) : tokens.temperature;
}

// Calls `use` with the types that stand for entropy, softcap and dtype.
template <class Use>
auto with_types(const TokenLogits& tokens, bool entropy, Use use) {
  const auto with_softcap = [&](auto e, auto s) {
    switch (tokens.type) {
      case kFloat:
        return use(e, s, float{});
      case kBf16:
        return use(e, s, Bf16{});
      default:
        return use(e, s, Fp16{});
    }
  };
  const auto with_entropy = [&](auto e) {
    return tokens.softcap != 0 ? with_softcap(e, std::true_type{})
                               : with_softcap(e, std::false_type{});
  };
  return entropy ? with_entropy(std::true_type{}) : with_entropy(std::false_type{});
}

// What the forward pass finds out about a row, and the backward pass reads.
struct LogprobRow {
  float logprob, entropy;
  float max;      // of the capped logits, or a little less
  float log_sum;  // logsumexp = max / temperature + log_sum
};

#define LOGPROB_FORWARD_ARGS(FIELD)                  \
  FIELD(View<float>, logprobs)                       \
  FIELD(View<float>, entropy) /* absent: not made */ \
  FIELD(View<LogprobRow>, found)
PPOKERN_ARGS_WITHIN(LogprobForwardArgs, TokenLogits, tokens, TOKEN_LOGITS, LOGPROB_FORWARD_ARGS)

#define LOGPROB_BACKWARD_ARGS(FIELD)                                                        \
  FIELD(View<const float>, grad_logprobs) /* absent: 0 */                                   \
  FIELD(View<const float>, grad_entropy)  /* absent: 0 */                                   \
  FIELD(View<const LogprobRow>,                                                             \
        found)          /* by the forward pass, with entropy where grad_entropy is there */ \
  FIELD(Rows, out)      /* (rows, width), may be the logits */                              \
  FIELD(int64_t, width) /* columns from vocab_size on become 0 */                           \
  FIELD(bool,                                                                               \
        compact) /* the unmasked rows go to the first rows of out, the others stay or are lost */
PPOKERN_ARGS_WITHIN(LogprobBackwardArgs, TokenLogits, tokens, TOKEN_LOGITS, LOGPROB_BACKWARD_ARGS)

// Whether each unmasked id is one of the `vocab_size` columns or -100.
#define TOKEN_IDS(FIELD)                                  \
  FIELD(View<const int64_t>, token_ids)                   \
  FIELD(View<const uint8_t>, mask) /* absent: all True */ \
  FIELD(int64_t, rows)                                    \
  FIELD(int64_t, vocab_size)
PPOKERN_ARGS(TokenIds, TOKEN_IDS)

bool token_ids_fit(const TokenIds& args);

// An id outside [0, vocab_size) gives NaN, also in the row's gradient.
void logprob_forward_cpu(const LogprobForwardArgs& args);
void logprob_backward_cpu(const LogprobBackwardArgs& args);

// `partials` has room for 4 floats for each segment of each row.
int64_t logprob_segments_cuda(int64_t vocab_size);
void logprob_forward_cuda(const LogprobForwardArgs& args, float* partials, void* stream);
void logprob_backward_cuda(const LogprobBackwardArgs& args, void* stream);

}  // namespace ppokern
