// architectures: 90a 100a
// One token per row of logits, as the CPU backend chooses it (its ops/sample.rs): bias, forbidden tokens, mask and
// penalties; greedy, or the largest of logit / temperature + noise over what top-k, min-p and top-p keep; log-probabilities
// of the logits as they came. sample.md has the design.
//
// A block per row. A row's result depends on the row alone. Weights of top-p are summed as multiples of 2^-46, so their
// order does not matter; the CPU sums doubles, and a cut that lies between the two may differ. Biased tokens differ from
// each other, and so do counted ones. vocab <= 2^22.
#include <stdint.h>

#include "common/noise.cuh"
#include "common/overlap.cuh"
#include "common/pages.cuh"
#include "common/select.cuh"

using namespace longwave;

namespace {

constexpr unsigned MOST_TOP = 20;
constexpr unsigned NONE = longwave::UNMAPPED;
// A weight of 1 in sums of weights.
constexpr double ONE = 70368744177664.0;

struct Row {
    unsigned long long seed;
    unsigned active, position;
    float temperature, top_p, min_p;
    unsigned top_k;
    // Best log-probabilities to report; NONE reports nothing.
    unsigned logprobs;
    float presence, frequency, repetition;
    // Places in the lists: pairs of token and bits of a float; tokens; pairs of token and count; words, NONE without.
    unsigned bias, biases, forbidden, forbiddens, counted, counts, mask, unused;
};

}  // namespace

// Grid rows, 512 threads. logits float [rows, vocab]; changed float [rows, vocab] is scratch; lists u32. tokens u32 [rows];
// bad u32 [rows]: the first token whose logit is not finite, or NONE. chosen float [rows] and top_tokens u32, top float
// [rows, 20] are written where log-probabilities are asked for.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
sample(const float* __restrict__ logits, float* __restrict__ changed, const Row* __restrict__ rows,
       const unsigned* __restrict__ lists, unsigned* __restrict__ tokens, unsigned* __restrict__ bad,
       float* __restrict__ chosen, unsigned* __restrict__ top_tokens, float* __restrict__ top_logprobs, unsigned vocab) {
    longwave::overlap();
    __shared__ Counters counters;
    __shared__ uint64_t best_ranks[MOST_TOP];
    __shared__ unsigned listed;
    __shared__ int bar;
    const Row row = rows[blockIdx.x];
    if (!row.active) {
        if (threadIdx.x == 0) {
            tokens[blockIdx.x] = NONE;
            bad[blockIdx.x] = NONE;
        }
        return;
    }
    const float infinity = __int_as_float(0x7f800000);
    const float* raw = logits + size_t(blockIdx.x) * vocab;
    float* own = changed + size_t(blockIdx.x) * vocab;
    const bool changes = row.biases || row.forbiddens || row.counts || row.mask != NONE;
    unsigned first_bad = NONE;
    // The best logit; token 0 where there is none, which no candidate loses to.
    Best<float> best{-infinity, 0};
    float least = infinity;
    each<8>(raw, vocab, [&](unsigned t, float v, bool there) {
        if (there) {
            first_bad = min(first_bad, isfinite(v) ? NONE : t);
            best = v > best.v ? Best<float>{v, t} : best;
            least = v > -infinity ? fminf(least, v) : least;
            if (changes) {
                own[t] = v;
            }
        }
    });
    first_bad = over_block(Single<unsigned>{first_bad}, [](auto a, auto b) { return Single<unsigned>{min(a.v, b.v)}; }).v;
    best = over_block(best, [](auto a, auto b) { return Best<float>::better(a, b); });
    const float most = best.v;
    least = over_block(Single<float>{least}, [](auto a, auto b) { return Single<float>{fminf(a.v, b.v)}; }).v;
    const auto count = [](float) { return 1ull; };

    // Log-probabilities of the logits as they came.
    double log_sum = 0.0;
    if (row.logprobs != NONE) {
        double sum = 0.0;
        each<4>(raw, vocab, [&](unsigned, float v, bool there) { sum += there ? exp(static_cast<double>(v - most)) : 0.0; });
        log_sum = log(over_block(Single<double>{sum}, [](auto a, auto b) { return Single<double>{a.v + b.v}; }).v);
        const unsigned n = min(min(row.logprobs, MOST_TOP), vocab);
        if (n > 0) {
            const auto all = [](float, uint64_t) { return true; };
            const auto best_n = [&](unsigned long long) { return static_cast<unsigned long long>(n); };
            const uint64_t last = select(raw, vocab, most, (BINS - 1) / (most - least), counters, best_n, all, count);
            if (threadIdx.x == 0) {
                listed = 0;
            }
            __syncthreads();
            each<8>(raw, vocab, [&](unsigned t, float v, bool there) {
                const uint64_t rank = rank_of(v, t);
                if (there && rank <= last) {
                    const unsigned at = atomicAdd(&listed, 1u);
                    if (at < MOST_TOP) {
                        best_ranks[at] = rank;
                    }
                }
            });
            __syncthreads();
            if (threadIdx.x < n) {
                unsigned at = 0;
                const uint64_t rank = best_ranks[threadIdx.x];
                for (unsigned i = 0; i < n; i++) {
                    at += best_ranks[i] < rank;
                }
                top_tokens[blockIdx.x * MOST_TOP + at] = static_cast<unsigned>(rank);
                top_logprobs[blockIdx.x * MOST_TOP + at] =
                    static_cast<float>(static_cast<double>(raw[static_cast<unsigned>(rank)] - most) - log_sum);
            }
            __syncthreads();
        }
    }

    // What the request changes.
    const float* l = raw;
    if (changes) {
        l = own;
        __syncthreads();
        for (unsigned i = threadIdx.x; i < row.biases; i += THREADS) {
            const unsigned* pair = lists + row.bias + 2 * size_t(i);
            own[pair[0]] = __fadd_rn(own[pair[0]], __uint_as_float(pair[1]));
        }
        __syncthreads();
        for (unsigned i = threadIdx.x; i < row.forbiddens; i += THREADS) {
            own[lists[row.forbidden + i]] = -infinity;
        }
        __syncthreads();
        if (row.mask != NONE) {
            for (unsigned t = threadIdx.x; t < vocab; t += THREADS) {
                if (!(lists[row.mask + t / 32] >> t % 32 & 1)) {
                    own[t] = -infinity;
                }
            }
            __syncthreads();
        }
        for (unsigned i = threadIdx.x; i < row.counts; i += THREADS) {
            const unsigned* pair = lists + row.counted + 2 * size_t(i);
            float v = own[pair[0]];
            if (row.repetition != 1.f) {
                v = v > 0.f ? __fdiv_rn(v, row.repetition) : __fmul_rn(v, row.repetition);
            }
            if (pair[1] > 0) {
                v = __fsub_rn(v, __fadd_rn(__fmul_rn(row.frequency, static_cast<float>(pair[1])), row.presence));
            }
            own[pair[0]] = v;
        }
        __syncthreads();
        best = {-infinity, 0};
        least = infinity;
        each<8>(l, vocab, [&](unsigned t, float v, bool there) {
            best = there && v > best.v ? Best<float>{v, t} : best;
            least = there && v > -infinity ? fminf(least, v) : least;
        });
        best = over_block(best, [](auto a, auto b) { return Best<float>::better(a, b); });
        least = over_block(Single<float>{least}, [](auto a, auto b) { return Single<float>{fminf(a.v, b.v)}; }).v;
    }

    const unsigned top = best.token;
    const float top_logit = l[top];
    unsigned token = top;
    if (row.temperature > 0.f) {
        const double temperature = static_cast<double>(row.temperature);
        const auto weight = [&](float v) {
            return longwave::noise_exp(__ddiv_rn(__dsub_rn(static_cast<double>(v), static_cast<double>(top_logit)), temperature));
        };
        // The worst token that the cuts keep.
        bool cuts = false;
        float last = 0.f;
        unsigned last_token = 0;
        uint64_t last_rank = ~0ull;
        if (row.top_k > 0 && row.top_k < vocab) {
            const auto candidate = [&](float v, uint64_t) { return v > -infinity; };
            const auto best_k = [&](unsigned long long) { return static_cast<unsigned long long>(row.top_k); };
            const float slope = (BINS - 1) / (top_logit - least);
            last_rank = select(l, vocab, top_logit, slope, counters, best_k, candidate, count);
            cuts = last_rank != ~0ull;
            last = logit_of(last_rank);
            last_token = static_cast<unsigned>(last_rank);
        }
        const auto kept = [&](float v, uint64_t rank) { return v > -infinity && rank <= last_rank; };
        const float per_temperature = 1.f / row.temperature;
        if (row.min_p > 0.f && top_logit > -infinity) {
            // Weights fall with the distance; where the distance decides clearly, the weight is not computed.
            const float bound = -logf(row.min_p), margin = 1e-3f * (1.f + fabsf(bound));
            uint64_t worst = 0;
            each<4>(l, vocab, [&](unsigned t, float v, bool there) {
                const uint64_t rank = rank_of(v, t);
                const float distance = (top_logit - v) * per_temperature;
                if (there && kept(v, rank) && !(distance > bound + margin) &&
                    (distance < bound - margin || weight(v) >= static_cast<double>(row.min_p))) {
                    worst = max(worst, rank);
                }
            });
            worst = over_block(Single<unsigned long long>{worst},
                               [](auto a, auto b) { return Single<unsigned long long>{max(a.v, b.v)}; }).v;
            worst = worst ? worst : rank_of(top_logit, top);
            cuts = true;
            last = logit_of(worst);
            last_token = static_cast<unsigned>(worst);
        }
        if (row.top_p < 1.f && top_logit > -infinity) {
            const auto parts = [&](float v) {
                return (top_logit - v) * per_temperature > 34.f ? 0ull : __double2ull_rn(__dmul_rn(weight(v), ONE));
            };
            const auto share = [&](unsigned long long sum) {
                const double exact = ceil(__dmul_rn(static_cast<double>(row.top_p), static_cast<double>(sum)));
                return min(max(static_cast<unsigned long long>(exact), 1ull), sum);
            };
            const float slope = per_temperature * (BINS / 34.f);
            const uint64_t worst = select(l, vocab, top_logit, slope, counters, share, kept, parts);
            if (worst != ~0ull) {
                const float v = logit_of(worst);
                const unsigned t = static_cast<unsigned>(worst);
                if (!cuts || before(v, t, last, last_token)) {
                    cuts = true;
                    last = v;
                    last_token = t;
                }
            }
        }
        // The likeliest token first: it sets a bar that most others do not reach even with their largest noise.
        const uint64_t noise = longwave::noise_of(row.seed, row.position);
        const auto scaled = [&](float v) { return __ddiv_rn(static_cast<double>(v), temperature); };
        Best<double> score{__dadd_rn(scaled(top_logit), longwave::gumbel(longwave::noise_bits(noise, top))), top};
        // The same test in floats first, with room for their errors, against the best score of any thread so far; NaN passes
        // it. How early a thread sees the others' scores changes what is computed, not what is found.
        if (threadIdx.x == 0) {
            bar = ordered(__double2float_rd(score.v));
        }
        __syncthreads();
        each<4>(l, vocab, [&](unsigned t, float v, bool there) {
            if (!there || !(v > -infinity) || (cuts && before(last, last_token, v, t))) {
                return;
            }
            const uint64_t bits = longwave::noise_bits(noise, t);
            const float about = v * per_temperature;
            const float most_noise = static_cast<float>(__clzll(static_cast<long long>(~bits)) + 1) * 0.69315f;
            if (about + most_noise + 1e-5f * (1.f + fabsf(about)) < unordered(*static_cast<volatile int*>(&bar))) {
                return;
            }
            const double x = scaled(v);
            if (__dadd_rn(x, longwave::gumbel_bound(bits)) >= score.v) {
                score = Best<double>::better(score, Best<double>{__dadd_rn(x, longwave::gumbel(bits)), t});
                atomicMax(&bar, ordered(__double2float_rd(score.v)));
            }
        });
        token = over_block(score, [](auto a, auto b) { return Best<double>::better(a, b); }).token;
    }
    if (threadIdx.x == 0) {
        tokens[blockIdx.x] = token;
        bad[blockIdx.x] = first_bad;
        if (row.logprobs != NONE) {
            chosen[blockIdx.x] = static_cast<float>(static_cast<double>(raw[token] - most) - log_sum);
        }
    }
}
